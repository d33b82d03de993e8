"""The Hopper forward equals the reference on the same codes, for every shape, mask and kind of input.

Why not bitwise: an FP8 wgmma keeps about 13 bits of its accumulator, so a score is off by some 2^-13 of the partial sums it went
through; rounding P to E4M3 is discontinuous, and a score that lies that close to a boundary flips a code, by an eighth of the
value. Where scores are exact (`TestInjectedScores`) nothing is off but the last division.
"""

import math

import pytest
import torch
import torch._dynamo.testing
from block_bounds import relative, scores
from hopper_inputs import DOCUMENTS, SHAPES, adversarial, climbing, inputs, normal, packed, padded_keys

import lowbit_attn
from lowbit_attn.ops import LowbitFallbackWarning

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                                  reason="needs a Hopper GPU")]

FP8_RECIPES = ("mxfp8", "mxfp8_fast")
RECIPES = (*FP8_RECIPES, "nvfp4_fp8")
"""What `test_hopper_nvfp4` adds is what the first two have in another form, or not at all."""


def assert_close(actual, expected, x, head_dim, recipe):
    """A score x is off by up to 2^-13 of itself for each 16 channels that were added, and by 2^-11 more in float16. So is the lse.
    A score off by e doublings moves a share of 8 e of the codes by an eighth: weights by sqrt(8 e) / 8 in the root mean square.
    The output is also off by its own bf16 rounding (2^-8 of two) and, where V's mean is not zero, by half of 2^-13 for each of the
    128 sums of 16 keys between two promotions (2^-7)."""
    (output, lse), (reference, reference_lse) = actual, expected
    step = (head_dim // 16 + 1) * 2.0**-13 + (2.0**-11 if recipe == "mxfp8_fast" else 0)
    typical, largest = (x.square().mean().sqrt().item(), x.abs().max().item()) if x.numel() else (0.0, 0.0)
    assert output.shape == reference.shape
    assert output.dtype == reference.dtype
    assert torch.equal(output.isnan(), reference.isnan())
    assert torch.equal(lse.isneginf(), reference_lse.isneginf())
    seen = lse.isfinite() & reference_lse.isfinite()
    assert relative(output.nan_to_num(), reference.nan_to_num()) < 2.0**-8 + 2.0**-7 + math.sqrt(8 * step * typical) / 8
    if seen.any():
        # A flipped code also moves the row sum: by an eighth of a weight, at most of the only one.
        assert (lse - reference_lse)[seen].abs().max() < step * largest + (0.09 if recipe == "mxfp8_fast" else 2.0**-9)


def compare(q, k, v, recipe, **options):
    run = [lowbit_attn.attention(q, k, v, recipe=recipe, enable_gqa=True, return_lse=True, backend=backend, **options)
           for backend in ("hopper", "reference")]
    assert_close(*run, scores(q, k, options.get("scale")), q.shape[-1], recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestShapes:
    def test_full(self, shape, recipe):
        compare(*inputs(*shape), recipe)

    @pytest.mark.parametrize("align", ["top_left", "bottom_right"])
    def test_causal(self, shape, recipe, align):
        compare(*inputs(*shape), recipe, is_causal=True, causal_align=align)


@pytest.mark.parametrize("recipe", RECIPES)
class TestOptions:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_dtypes(self, recipe, dtype):
        compare(*inputs(1, 300, 300, 2, 2, 128, dtype), recipe)

    @pytest.mark.parametrize("causal", [{}, {"is_causal": True, "causal_align": "bottom_right"}], ids=["full", "causal"])
    def test_key_lengths(self, recipe, causal):
        q, k, v, lengths = padded_keys()
        compare(q, k, v, recipe, key_lengths=lengths, **causal)

    @pytest.mark.parametrize("scale", [-0.1, 0.0, 0.5])
    def test_scales(self, recipe, scale):
        compare(*inputs(1, 300, 300, 2, 2, 128), recipe, scale=scale)

    def test_strided_offset_and_expanded_views(self, recipe):
        q, k, v = inputs(2, 300, 300, 4, 2, 128)
        wide = torch.zeros(2, 4, 300, 260, device="cuda", dtype=q.dtype)
        wide[..., 4:132] = q
        by_token = k.transpose(1, 2).contiguous().transpose(1, 2)
        shared = v[:, :1].expand(-1, 2, -1, -1)
        viewed = lowbit_attn.attention(wide[..., 4:132], by_token, shared, recipe=recipe, enable_gqa=True, is_causal=True)
        plain = lowbit_attn.attention(q, k, shared.contiguous(), recipe=recipe, enable_gqa=True, is_causal=True)
        assert torch.equal(viewed, plain)

    @pytest.mark.parametrize("shape", [(0, 8, 8), (2, 0, 8), (2, 8, 0)], ids=str)
    def test_empty_tensors(self, recipe, shape):
        batch, queries, keys = shape
        output, lse = lowbit_attn.attention(*inputs(batch, queries, keys, 2, 2, 64), recipe=recipe, return_lse=True)
        assert output.shape == (batch, 2, queries, 64)
        assert (output == 0).all()
        assert lse.isneginf().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["sharp", "climbing", "falling", "late spike", "wild values", "quiet values", "outlier", "zeros",
                                  "tiny", "mean", "first tile far above", "first tile far below", "staircase"])
def test_adversarial_inputs(name, recipe, causal):
    compare(*(adversarial() | climbing())[name], recipe, is_causal=causal)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operand", range(3), ids="qkv")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_broken_input_breaks_the_rows_that_read_its_block_and_no_other(recipe, operand, value):
    tensors = list(inputs(1, 700, 700, 2, 2, 128))
    tensors[operand][0, 1, 333, 7] = value
    for causal in (False, True):
        (output, lse), (reference, reference_lse) = (
            lowbit_attn.attention(*tensors, recipe=recipe, is_causal=causal, return_lse=True, backend=backend)
            for backend in ("hopper", "reference"))
        assert torch.equal(output.isnan(), reference.isnan())
        assert torch.equal(lse.isnan(), reference_lse.isnan())


@pytest.mark.parametrize("recipe", RECIPES)
class TestPacked:
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize("documents", DOCUMENTS)
    def test_documents(self, recipe, documents, causal):
        q, k, v, *bounds = packed(DOCUMENTS[documents], 4, 2, 128, tail=77)
        results = [lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe, is_causal=causal, enable_gqa=True, return_lse=True,
                                                backend=backend) for backend in ("hopper", "reference")]
        assert_close(*results, scores(q.transpose(0, 1), k.transpose(0, 1)), q.shape[-1], recipe)

    def test_keys_of_other_lengths(self, recipe):
        q, k, v, *bounds = packed([300, 0, 1, 700, 33], 4, 4, 64, 3, keys=[100, 5, 0, 900, 33])
        results = [lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe, is_causal=True, return_lse=True, backend=backend)
                   for backend in ("hopper", "reference")]
        assert_close(*results, scores(q.transpose(0, 1), k.transpose(0, 1)), q.shape[-1], recipe)

    def test_a_document_moves_no_other_by_a_bit(self, recipe):
        q, k, v, *bounds = packed([300, 260, 500], 2, 2, 128, tail=10)
        before = lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe, is_causal=True)
        for x in (q, k, v):
            x[300:560] = torch.nan
        after = lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe, is_causal=True)
        assert torch.equal(before[:300], after[:300])
        assert torch.equal(before[560:], after[560:])
        assert after[300:560].isnan().all()

    def test_boundaries_that_make_no_sense_stay_in_bounds(self, recipe):
        q, k, v, *_ = packed([500], 2, 2, 64, tail=0)
        cu = torch.tensor([-5, 400, 3, 10_000, 0, 500], dtype=torch.int32, device="cuda")
        lowbit_attn.varlen_attention(q, k, v, cu, cu, 500, 500, recipe=recipe, is_causal=True)
        torch.cuda.synchronize()


@pytest.mark.parametrize("recipe", RECIPES)
class TestCausality:
    @pytest.mark.parametrize("change", [64, 192, 480, 700])
    def test_later_blocks_move_no_earlier_one_by_a_bit(self, recipe, change):
        q, k, v = inputs(1, 800, 800, 2, 2, 128)
        before = lowbit_attn.attention(q, k, v, recipe=recipe, is_causal=True)
        for x in (q, k, v):
            x[:, :, change:] *= 4096
        after = lowbit_attn.attention(q, k, v, recipe=recipe, is_causal=True)
        first = change // 32 * 32
        assert torch.equal(before[:, :, :first], after[:, :, :first])
        assert not torch.equal(before[:, :, change:], after[:, :, change:])


@pytest.mark.parametrize("recipe", FP8_RECIPES)
class TestInjectedScores:
    def test_exact_scores_give_exact_outputs(self, recipe):
        # Query row i is one-hot: its scores are the whole numbers in channel i of K, its weights powers of two.
        generator = torch.Generator("cuda").manual_seed(5)
        q = torch.eye(128, device="cuda")[None, None].repeat(1, 1, 3, 1)
        k = -torch.randint(0, 3, (1, 1, 500, 128), generator=generator, device="cuda").float()
        v = torch.randint(-2, 3, (1, 1, 500, 128), generator=generator, device="cuda").float()
        options = {"recipe": f"{recipe}:rotation=none", "scale": math.log(2.0), "return_lse": True}
        output, lse = lowbit_attn.attention(q, k, v, backend="hopper", **options)
        reference, reference_lse = lowbit_attn.attention(q, k, v, backend="reference", **options)
        torch.testing.assert_close(output, reference, rtol=2.0**-21, atol=0)  # division and logarithm differ in the last bits
        torch.testing.assert_close(lse, reference_lse, rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("keys", [32768, pytest.param(131072, marks=pytest.mark.full)])
def test_accumulation_error_stays_small_over_many_keys(recipe, keys):
    q, k, v = normal(1, 1, 256, 128, seed=1), normal(1, 1, keys, 128, seed=2), normal(1, 1, keys, 128, seed=3) + 0.5
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert relative(lowbit_attn.attention(q, k, v, recipe=recipe), exact) < 0.015


def test_a_backward_gets_an_output_that_lost_less():
    """D = sum(O dO) inherits what the sums lose; with a quarter of the additions to a promotion, about a quarter of 1.27 %."""
    q, k, v = normal(1, 1, 256, 128, seed=1), normal(1, 1, 32768, 128, seed=2), normal(1, 1, 32768, 128, seed=3) + 0.5
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert relative(lowbit_attn.attention(q.requires_grad_(), k, v, recipe="mxfp8").detach(), exact) < 0.006


@pytest.mark.parametrize("recipe", RECIPES)
class TestRuns:
    def test_every_element_is_written(self, recipe):
        q, k, v, *bounds = packed(DOCUMENTS["mixed"], 4, 2, 128, tail=77)
        torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
        try:
            output, lse = lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe, is_causal=True, enable_gqa=True,
                                                       return_lse=True)
        finally:
            torch.use_deterministic_algorithms(False)
        assert output.isfinite().all()
        assert not lse.isnan().any()

    def test_runs_and_graph_replays_are_bitwise_equal(self, recipe):
        q, k, v = inputs(2, 700, 700, 4, 2, 128)
        eager = lowbit_attn.attention(q, k, v, recipe=recipe, is_causal=True, enable_gqa=True)
        assert torch.equal(eager, lowbit_attn.attention(q, k, v, recipe=recipe, is_causal=True, enable_gqa=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = lowbit_attn.attention(q, k, v, recipe=recipe, is_causal=True, enable_gqa=True)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(eager, captured)

    def test_compiled_equals_eager_and_compiles_once_for_dynamic_sizes(self, recipe):
        compiles = torch._dynamo.testing.CompileCounterWithBackend("inductor")

        @torch.compile(fullgraph=True, dynamic=True, backend=compiles)
        def attend(q, k, v):
            return lowbit_attn.attention(q, k, v, recipe=recipe, is_causal=True) * 2

        for tokens in (300, 400):
            q, k, v = inputs(2, tokens, tokens, 2, 2, 64)
            assert torch.equal(attend(q, k, v), lowbit_attn.attention(q, k, v, recipe=recipe, is_causal=True) * 2)
        assert compiles.frame_count == 1

    def test_more_than_two_to_the_31_elements(self, recipe):
        q = normal(1, 32, 600_000, 128)
        k, v = normal(1, 1, 256, 128, seed=2), normal(1, 1, 256, 128, seed=3)
        assert q.numel() > 2**31
        output = lowbit_attn.attention(q, k, v, recipe=recipe, enable_gqa=True)
        rows = slice(599_936, 600_000)
        last = lowbit_attn.attention(q[:, :, rows].contiguous(), k, v, recipe=recipe, enable_gqa=True)
        assert relative(output[:, :, rows], last) < 1e-3

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_a_second_device_leaves_the_current_one_alone(self, recipe):
        q, k, v = inputs(1, 300, 300, 2, 2, 128)
        here = lowbit_attn.attention(q, k, v, recipe=recipe)
        there = lowbit_attn.attention(*(x.to("cuda:1") for x in (q, k, v)), recipe=recipe)
        assert torch.cuda.current_device() == 0
        assert torch.equal(here, there.to("cuda:0"))


class TestDispatch:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_hopper_is_chosen_without_a_word(self, recipe, recwarn):
        assert lowbit_attn.explain(recipe).backend == "hopper"
        lowbit_attn.attention(*inputs(1, 64, 64, 1, 1, 64), recipe=recipe)
        assert not [w for w in recwarn if issubclass(w.category, LowbitFallbackWarning)]

    def test_gradients_come_from_the_codes_that_the_kernel_saved(self):
        tensors = [x.requires_grad_() for x in inputs(1, 400, 400, 4, 2, 128)]
        grads = {}
        for backend in ("hopper", "reference"):
            output = lowbit_attn.attention(*tensors, recipe="mxfp8", is_causal=True, enable_gqa=True, backend=backend)
            grads[backend] = torch.autograd.grad(output.float().square().sum(), tensors)
        for a, b in zip(grads["hopper"], grads["reference"], strict=True):
            assert torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0) > 0.9995


@pytest.mark.parametrize("offset", [0.0, -30.0], ids=["", "scores far below zero"])
def test_row_top_is_the_references(offset):
    q, k, v = (x.transpose(1, 2) for x in inputs(1, 300, 300, 2, 2, 128))
    q[..., 0], k[..., 0] = offset, 60.0
    found = [torch.ops.lowbit_attn.attention_forward(q, k, v, None, "mxfp8", True, False, None, True, False, backend)[8].int()
             for backend in ("hopper", "reference")]
    # A probability within rounding of a boundary has either code; scores are off by 2^-13 of their products' sums.
    assert (found[0] - found[1]).abs().max() <= 1
    assert (found[0] != found[1]).float().mean() < 0.1
