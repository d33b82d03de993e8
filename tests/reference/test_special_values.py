"""NaN, Inf, padding garbage, zeros, denormals and outliers: seen where they must be, nowhere else, and never a plausible number."""

import math
from dataclasses import replace

import pytest
import torch
from oracle import boundaries, exact_attention, relative_error, visible

from lowbit_attn.recipes import DIRECT_UNIT, RECIPES, resolve
from lowbit_attn.reference import Visibility, backward, forward, varlen_backward, varlen_forward
from lowbit_attn.reference.operands import round_operand

TOKENS, BLOCK = 200, 32
CAUSAL = [name for name, recipe in RECIPES.items() if recipe.causal]
TRAINS = [name for name, recipe in RECIPES.items() if recipe.trains]


def inputs(tokens=TOKENS, channels=64):
    return [torch.randn(1, 4, tokens, channels), *(torch.randn(1, 2, tokens, channels) for _ in range(2))]


def see(alignment=None, tokens=TOKENS, lengths=None, batch=1):
    return Visibility.create(batch, tokens, tokens, is_causal=alignment is not None, bottom_right=alignment == "bottom_right",
                             key_lengths=lengths)


def nan_rows(output):
    """Rows of [1, H, S, D] that hold a NaN in some head."""
    return output.isnan().any(-1).any(1)[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("operand", [1, 2], ids="KV")
class TestKeyOrValue:
    POSITION = 70

    @pytest.mark.parametrize("name", RECIPES)
    def test_every_row_that_sees_it_is_nan(self, name, operand, bad):
        tensors = inputs()
        tensors[operand][:, :, self.POSITION, 5] = bad
        assert forward(*tensors, RECIPES[name], see()).output.isnan().any(-1).all()

    @pytest.mark.parametrize("name", CAUSAL)
    def test_causal_rows_before_its_block_are_not(self, name, operand, bad):
        tensors = inputs()
        tensors[operand][:, :, self.POSITION, 5] = bad
        rows = nan_rows(forward(*tensors, RECIPES[name], see("top_left")).output)
        assert rows[self.POSITION:].all()
        assert not rows[:self.POSITION // BLOCK * BLOCK].any()

    @pytest.mark.parametrize("name", RECIPES)
    def test_other_documents_are_not(self, name, operand, bad):
        cu = boundaries(0, 50, 120, 200)
        tensors = [x[0].transpose(0, 1).clone() for x in inputs()]
        tensors[operand][self.POSITION, :, 5] = bad
        output = varlen_forward(*tensors, cu, cu, RECIPES[name], is_causal=False).output
        assert output[50:120].isnan().any(-1).all()
        assert output[[*range(50), *range(120, 200)]].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", RECIPES)
def test_a_broken_query_breaks_its_own_block_only(name, bad):
    tensors = inputs()
    tensors[0][:, :, 70, 5] = bad
    rows = nan_rows(forward(*tensors, RECIPES[name], see()).output)
    assert rows[70]
    assert not rows[:64].any()
    assert not rows[96:].any()


@pytest.mark.parametrize("name", TRAINS)
class TestGradients:
    """Gradients multiply masked zeros with whole tiles, so a NaN reaches every row of its 128 x 128 tile, and no other tile."""

    def run(self, name, broken, position):
        tensors = [*inputs(), torch.randn(1, 4, TOKENS, 64)]
        tensors[broken][:, :, position, 5] = float("nan")
        result = forward(*tensors[:3], RECIPES[name], see("top_left"), save=True)
        grads = backward(tensors[3], None, result.saved, result.output, result.lse, RECIPES[name], see("top_left"))
        return [nan_rows(x) for x in (grads.query, grads.key, grads.value)]

    @pytest.mark.parametrize("broken", [1, 2], ids="KV")
    def test_a_later_key_or_value_reaches_no_query_gradient_of_an_earlier_tile(self, name, broken):
        query, _, _ = self.run(name, broken, 140)
        assert query[140:].all()
        assert not query[:128].any()

    @pytest.mark.parametrize("broken", [0, 3], ids=["Q", "dO"])
    def test_an_earlier_row_reaches_no_key_of_a_later_tile(self, name, broken):
        _, key, value = self.run(name, broken, 70)
        assert key[:71].all()
        assert value[:71].all()
        assert not key[128:].any()
        assert not value[128:].any()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", RECIPES)
def test_padding_past_key_lengths_reaches_no_live_row(name, garbage):
    lengths = boundaries(150, 7, 0)
    q, k, v = (torch.randn(3, h, TOKENS, 64) for h in (4, 2, 2))
    padded = [k.clone(), v.clone()]
    zeroed = [k.clone(), v.clone()]
    for item, length in enumerate(lengths.tolist()):
        for x, y in zip(padded, zeroed, strict=True):
            x[item, :, length:], y[item, :, length:] = garbage, 0.0
    seen = see(lengths=lengths, batch=3)
    actual, expected = forward(q, *padded, RECIPES[name], seen), forward(q, *zeroed, RECIPES[name], seen)
    assert actual.output.isfinite().all()
    assert torch.equal(actual.output, expected.output)
    assert torch.equal(actual.lse, expected.lse)
    assert (actual.output[2] == 0).all()
    assert (actual.lse[2] == -torch.inf).all()


@pytest.mark.parametrize("garbage", [float("nan"), 1e30])
@pytest.mark.parametrize("name", TRAINS)
def test_padding_reaches_no_gradient(name, garbage):
    lengths = boundaries(150, 0)
    q, k, v, grad = (torch.randn(2, h, TOKENS, 64) for h in (4, 2, 2, 4))
    k[0, :, 150:], v[0, :, 150:], k[1], v[1] = (garbage,) * 4
    seen = see("top_left", lengths=lengths, batch=2)
    result = forward(q, k, v, RECIPES[name], seen, save=True)
    grads = backward(grad, torch.randn(2, 4, TOKENS), result.saved, result.output, result.lse, RECIPES[name], seen)
    for x in (grads.query, grads.key, grads.value):
        assert x.isfinite().all()
        assert (x[1] == 0).all()
    assert (grads.key[0, :, 150:] == 0).all()
    assert (grads.value[0, :, 150:] == 0).all()


@pytest.mark.parametrize("name", TRAINS)
def test_packed_rows_outside_documents_reach_nothing(name):
    cu = boundaries(3, 60, 60, 150)
    tensors = [x[0].transpose(0, 1).clone() for x in inputs()]
    for x in tensors:
        x[:3], x[150:] = float("nan"), float("nan")
    grad = torch.full_like(tensors[0], float("nan"))
    grad[3:150] = 1.0
    result = varlen_forward(*tensors, cu, cu, RECIPES[name], is_causal=True, save=True)
    grads = varlen_backward(grad, None, result.saved, result.output, result.lse, cu, cu, RECIPES[name], is_causal=True)
    outside = [*range(3), *range(150, TOKENS)]
    for x in (result.output, grads.query, grads.key, grads.value):
        assert x.isfinite().all()
        assert (x[outside] == 0).all()
    assert (result.lse[:, outside] == -torch.inf).all()


@pytest.mark.parametrize("name", RECIPES)
def test_zero_inputs_give_zero_output_and_the_lse_of_equal_scores(name):
    tensors = [torch.zeros_like(x) for x in inputs()]
    result = forward(*tensors, RECIPES[name], see())
    assert (result.output == 0).all()
    # log(0.92) = -0.083: the proxies of 1 are at most 8 % off (table 8).
    assert result.lse.sub(torch.log(torch.tensor(float(TOKENS)))).abs().max() <= 0.09


@pytest.mark.parametrize("name", RECIPES)
def test_equal_keys_average_the_values(name):
    q, k, v = inputs()
    v[:] = 1.0
    # Every weight and value is the same power of two, so only the row sum's own rounding is left; an exact row sum
    # keeps the rounding error of P instead: E2M1's quarter step.
    output = forward(q, torch.zeros_like(k), v, RECIPES[name], see()).output
    assert (output - 1).abs().max() <= (1e-6 if RECIPES[name].row_sum == "quantized" else 1 / 8)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1e-10, 1e10])
def test_values_of_any_magnitude_keep_their_accuracy(name, magnitude):
    q, k, v = inputs()
    expected, _ = exact_attention(q, k, v * magnitude)
    actual = forward(q, k, v * magnitude, RECIPES[name], see()).output
    assert actual.isfinite().all()
    usual = relative_error(forward(q, k, v, RECIPES[name], see()).output, exact_attention(q, k, v)[0])
    # 1e-40 is a float32 subnormal: scales stop at 2^-127, so elements keep fewer bits there, or none.
    assert relative_error(actual, expected) <= (1.1 * usual if magnitude > 1e-38 else 1.0)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("operand", [0, 1, 2], ids="QKV")
def test_one_huge_outlier_leaves_everything_finite(name, operand):
    tensors = inputs()
    tensors[operand][:, :, 70, 5] = 1e4
    result = forward(*tensors, RECIPES[name], see())
    assert result.output.isfinite().all()
    assert result.lse.isfinite().all()


@pytest.mark.parametrize("name", TRAINS)
@pytest.mark.parametrize("operand", [0, 1, 2, 3], ids=["Q", "K", "V", "dO"])
def test_one_huge_outlier_leaves_gradients_finite(name, operand):
    tensors = [*inputs(), torch.randn(1, 4, TOKENS, 64)]
    tensors[operand][:, :, 70, 5] = 1e4
    result = forward(*tensors[:3], RECIPES[name], see("top_left"), save=True)
    grads = backward(tensors[3], None, result.saved, result.output, result.lse, RECIPES[name], see("top_left"))
    assert all(x.isfinite().all() for x in (grads.query, grads.key, grads.value))


def test_a_later_outlier_leaves_earlier_rows_accurate():
    # E4M3 P saturating, or a value scale shared with the outlier, would show here.
    q, k, v = inputs()
    v[:, :, 150] *= 4096.0
    output = forward(q, k, v, RECIPES["mxfp8"], see("top_left")).output
    expected, _ = exact_attention(q, k, v, visible(TOKENS, TOKENS, "top_left"))
    assert relative_error(output[:, :, :128], expected[:, :, :128]) <= 0.08


class TestValueMagnitudes:
    """V's scales may rise and fall along the keys: a reference exponent that is raised must rescale what came before."""

    PROFILES = {
        "climbs": [2.0**-14, 1.0],
        "falls": [1.0, 2.0**-14],
        "zero first": [0.0, 1.0],
        "zero last": [1.0, 0.0],
        "blocks": [1.0, 2.0**-6] * 4,
        "staircase": [2.0**-12, 2.0**-8, 2.0**-4, 1.0],
    }

    @pytest.mark.parametrize("profile", PROFILES)
    @pytest.mark.parametrize(("name", "alignment"), [*((name, None) for name in RECIPES), *((name, "top_left") for name in CAUSAL)])
    def test_output_keeps_its_accuracy(self, name, profile, alignment):
        q, k, v = inputs(tokens=256)
        factors = torch.tensor(self.PROFILES[profile])
        scaled = v * factors.repeat_interleave(256 // len(factors))[:, None]
        seen, mask = see(alignment, tokens=256), visible(256, 256, alignment)
        usual = relative_error(forward(q, k, v, RECIPES[name], seen).output, exact_attention(q, k, v, mask)[0])
        actual = forward(q, k, scaled, RECIPES[name], seen).output
        assert relative_error(actual, exact_attention(q, k, scaled, mask)[0]) <= 1.3 * usual

    @pytest.mark.parametrize("name", CAUSAL)
    def test_a_later_huge_value_leaves_earlier_rows_finite(self, name):
        q, k, v = inputs()
        v[:, :, 100:] = 1e30
        v[:, :, :32] = 0.0
        output = forward(q, k, v, RECIPES[name], see("top_left")).output
        assert output.isfinite().all()
        assert (output[:, :, :32] == 0).all()


class TestSinks:
    """One key far above thousands of others: the denominator counts them whatever V is."""

    @pytest.mark.parametrize("loudness", [1.0, 4.0, 16.0])
    @pytest.mark.parametrize("name", ["mxfp8", "mxfp8_fast"])
    def test_a_loud_first_block_of_values_moves_no_weight(self, name, loudness):
        generator = torch.Generator().manual_seed(3)
        q, k, v = torch.ones(1, 1, 1, 64), torch.zeros(1, 1, 4096, 64), torch.randn(1, 1, 4096, 64, generator=generator) + 1
        k[0, 0, 0] = 1.0
        v[:, :, :32] *= loudness
        scale = 11 * math.log(2.0) / 64  # the first key weighs as much as 2048 others
        result = forward(q, k, v, RECIPES[name], Visibility(1, 4096), scale=scale)
        exact, lse = exact_attention(q, k, v, visible(1, 4096, None), scale=scale)
        # Weights of 2^-11, folded by 2^-4, are subnormal codes: a step of 2^-9 in weights of 2^-11 2^4 2^-4 (2^7.5 for codes).
        assert relative_error(result.output, exact) <= 0.12
        # Codes computed directly are off by up to 9 %: the log of a weight by 0.09 at most.
        assert (result.lse - lse).abs().max() <= (0.09 if name == "mxfp8_fast" else 0.01)


class TestBrokenLaterKeys:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("name", ["mxfp8", "mxfp8:causal_safety=exact", "nvfp4_fp8:causal_safety=exact"])
    def test_rows_that_see_no_broken_key_keep_their_gradients(self, name, value):
        recipe, (q, k, v) = resolve(name), inputs(tokens=300)
        k[:, :, 200:] = value
        seen = see("top_left", tokens=300)
        result = forward(q, k, v, recipe, seen, save=True)
        grads = backward(torch.ones_like(q), None, result.saved, result.output, result.lse, recipe, seen)
        first = 192 if name == "mxfp8" else 200  # a broken key breaks its block of 32
        assert grads.query[:, :, :first].isfinite().all()
        assert grads.query[:, :, 200:].isnan().all()


class TestScoresOutOfRange:
    """Scores of any size: as accurate as float32 holds them, or NaN; never a row of zeros that claims to have seen no key."""

    AFFINE = [name for name, recipe in RECIPES.items() if recipe.exponential == "schraudolph_u16"]

    @pytest.mark.parametrize("log2_score", [10, 20, 26, 30])
    @pytest.mark.parametrize("name", RECIPES)
    def test_a_row_with_one_loud_key_returns_its_value(self, name, log2_score):
        # Row i scores 2^log2_score with key i and 0 with the others. NVFP4 holds 6 exactly, prescaled formats a power of two.
        recipe = replace(RECIPES[name], rotation="none")
        size, score = 1.0 if recipe.q_prescale else 6.0, 2.0**log2_score * math.log(2.0)
        one_hot, v = size * torch.eye(128)[None, None], torch.randn(1, 1, 128, 128)
        result = forward(one_hot, one_hot, v, recipe, Visibility(128, 128), scale=score / size**2)
        if recipe.score_accumulator == "fp16" and 2.0**log2_score * DIRECT_UNIT > 65504:
            assert result.output.isnan().all()
            assert result.lse.isnan().all()
            return
        assert relative_error(result.output, round_operand(v, recipe.v, axis=-2)) <= 1e-5
        # float16 scores: the factor and the score are each rounded to 11 bits.
        bound = 2.0**-10 if recipe.score_accumulator == "fp16" else 1e-4
        assert relative_error(result.lse, torch.full_like(result.lse, score)) <= bound

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    @pytest.mark.parametrize("log2_score", [32, 40, 100])
    @pytest.mark.parametrize("name", AFFINE)
    def test_beyond_the_affine_range_rows_are_nan(self, name, log2_score, sign):
        # Every key of a row scores the same, and the offset of one doubling is lost beside 2^31 of them.
        q, k = torch.ones(1, 1, 8, 32), torch.full((1, 1, 300, 32), sign)
        result = forward(q, k, torch.randn(1, 1, 300, 32), replace(RECIPES[name], rotation="none"), Visibility(8, 300),
                         scale=2.0**log2_score / 32)
        assert result.output.isnan().all()
        assert result.lse.isnan().all()

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    @pytest.mark.parametrize("name", RECIPES)
    def test_scores_that_overflow_float32_are_nan(self, name, sign):
        q, k = torch.full((1, 1, 8, 64), 1e25), torch.full((1, 1, 300, 64), sign * 1e25)
        result = forward(q, k, torch.randn(1, 1, 300, 64), RECIPES[name], Visibility(8, 300))
        assert result.output.isnan().all()
        assert result.lse.isnan().all()

    @pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.score_accumulator == "fp32"])
    def test_one_overflowing_score_of_many_is_nan_upwards_and_no_weight_downwards(self, name):
        q, k, v = torch.full((1, 1, 8, 64), 1e25), torch.zeros(1, 1, 300, 64), torch.randn(1, 1, 300, 64)
        k[:, :, 200:232] = -1e25
        result = forward(q, k, v, RECIPES[name], Visibility(8, 300))
        assert result.output.isfinite().all()
        k[:, :, 200:232] = 1e25
        assert forward(q, k, v, RECIPES[name], Visibility(8, 300)).output.isnan().all()
