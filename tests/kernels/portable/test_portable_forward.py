"""The portable forward equals the reference, emulated and native; run in Triton's interpreter, so no GPU is needed.

Scores differ by the order of their float32 sums, some 1e-6, which flips a share of P's codes near rounding boundaries: about 3e-4
of the output in E4M3 (tests/gpu/test_cuda.py) and in E2M3, which has as many fraction bits, four times that in E2M1.
"""

import pytest
import torch
from interpreted import INTERPRETED, only_interpreted, run_interpreted, starts_interpreter
from oracle import boundaries, relative_error

from lowbit_attn.formats import element_format
from lowbit_attn.recipes import RECIPES, resolve
from lowbit_attn.reference import Visibility, forward, varlen_forward

pytest.importorskip("triton", reason="Triton runs on Linux only")

if INTERPRETED:
    import triton_interpreter  # noqa: F401

from lowbit_attn.kernels.portable import attention, support
from lowbit_attn.kernels.portable.targets import TARGETS

FP6 = ("fused_mxfp6", "fused_mxfp4")
"""Recipes with E2M3 operands, which are emulated everywhere."""

COMPUTED = ("mxfp8", "nvfp4_fp8", "fused_mxfp8", "mxattention", "mxfp4_ocp", *FP6)
"""The named recipes that these kernels compute."""

OPTIONS = (
    "mxfp8:qk=e2m3/token_block,v=e2m3/token_block", "mxfp8:p=e2m3/fixed,p_log2_scale=0,max_threshold=2",
    "fused_mxfp8:v=e2m3/per_tensor", "nvfp4_fp8:qk=e2m3/nvfp16_token,p=e2m3/per_row",
    "mxfp8:causal_safety=exact", "mxfp8:row_sum=quantized", "mxfp8:maximum=online,max_threshold=0", "mxfp8:rotation=always",
    "mxfp8:v_exponent=operand", "mxfp8:p=e4m3/mx32,v_exponent=operand", "fused_mxfp8:exponential=exact",
    "mxattention:row_sum=exact", "mxfp8:v=e4m3/per_row,v_exponent=operand")
MODES = [(name, "sm_80") for name in COMPUTED] + [(name, "sm_100") for name in COMPUTED] + [
    ("mxfp8", "gfx950"), ("mxattention", "gfx950"), ("mxfp4_ocp", "gfx950"), ("mxfp8", "sm_90")]
SHAPES = [(1, 1, 1, 1, 1, 128), (2, 65, 129, 4, 2, 40), (1, 130, 128, 2, 1, 96), (1, 33, 150, 1, 1, 256)]
"""Batch, queries, keys, heads, key/value heads, head_dim."""

modes = pytest.mark.parametrize(("recipe", "architecture"), MODES)


def bound(recipe):
    return 2e-3 if element_format(resolve(recipe).p.element).mantissa_bits == 3 else 8e-3


def inputs(batch, queries, keys, heads, kv_heads, head_dim, dtype=torch.float32):
    """Queries, keys and values of non-zero mean, [B, H, S, D]."""
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(batch, *shape, head_dim) for shape in shapes)
    return q.to(dtype), k.to(dtype), (v + 0.5).to(dtype)


def run(q, k, v, recipe, architecture, **options):
    """Output [B, H, S, D] and lse of the kernels."""
    prepared = attention.prepare(*(x.transpose(1, 2) for x in (q, k, v)), resolve(recipe), target=TARGETS[architecture], **options)
    output, lse = attention.run(prepared)
    return output.transpose(1, 2), lse


def specified(q, k, v, recipe, *, is_causal=False, bottom_right=False, key_lengths=None, scale=None):
    visibility = Visibility.create(q.shape[0], q.shape[2], k.shape[2], is_causal=is_causal, bottom_right=bottom_right,
                                   key_lengths=key_lengths, device=q.device)
    return forward(q, k, v, resolve(recipe), visibility, scale=scale)


def assert_close(actual, expected, recipe):
    output, lse = actual
    assert torch.equal(output.isnan(), expected.output.isnan())
    assert relative_error(output.nan_to_num(), expected.output.nan_to_num()) < bound(recipe)
    torch.testing.assert_close(lse, expected.lse, rtol=0, atol=2e-3, equal_nan=True)


def compare(q, k, v, recipe, architecture, **options):
    assert_close(run(q, k, v, recipe, architecture, **options), specified(q, k, v, recipe, **options), recipe)


@starts_interpreter
@pytest.mark.parametrize("tests", ["TestRecipes", "TestInputs"])
def test_interpreted_kernels_equal_the_reference(tests):
    run_interpreted(__file__, tests)


def test_which_pairs_are_native():
    pairs = {(name, architecture) for name in COMPUTED for architecture in TARGETS}
    native = {(name, architecture) for name, architecture in pairs if support.is_native(RECIPES[name], architecture)}
    units = set(COMPUTED) - set(FP6)
    blackwell = {(name, architecture) for name in units for architecture in ("sm_100", "sm_103")}
    assert native == blackwell | {(name, "gfx950") for name in units if name != "nvfp4_fp8"}


@pytest.mark.parametrize("recipe", FP6)
@pytest.mark.parametrize("architecture", TARGETS)
def test_fp6_is_emulated_everywhere_and_says_why(recipe, architecture):
    assert "emulated: bf16 matrix units on the codes' exact values, as Triton has no FP6 operands," in (
        support.precision(RECIPES[recipe], architecture))


@pytest.mark.parametrize("recipe", [name for name in COMPUTED if name not in FP6])
def test_other_formats_lack_no_fp6(recipe):
    assert "FP6" not in support.precision(RECIPES[recipe], "sm_80")


def test_scales_of_single_keys_are_not_native():
    recipe = resolve("mxfp8:v=e4m3/per_row,v_exponent=operand")
    assert not support.is_native(recipe, "sm_100")
    assert support.is_native(resolve("mxfp8:v=e4m3/per_row"), "sm_100")


@pytest.mark.parametrize("recipe", [*COMPUTED, *OPTIONS])
@pytest.mark.parametrize("architecture", TARGETS)
def test_supported_pairs_are_not_refused(recipe, architecture):
    assert support.refusal(resolve(recipe), architecture) is None


REFUSED = {"fused_mxfp6:exponential=schraudolph_u32": "schraudolph_u32", "fused_mxfp6:v=e5m2/mx32": "multiply E4M3, E2M3, E2M1",
           "fused_mxfp6:key_tile=64": "step by 128 keys", "mxfp8_fast": "direct_u8", "nvfp4": "p in fixed, mx32, per_row",
           "mxfp8:key_tile=64": "step by 128 keys", "mxfp8:qk=identity,trains=false": "qk of",
           "mxfp8:exponential=mitchell,max_threshold=2": "exponentials exact, schraudolph_u16"}


@pytest.mark.parametrize("recipe", REFUSED)
def test_unsupported_recipes_are_named(recipe):
    assert REFUSED[recipe] in (support.refusal(resolve(recipe), "sm_100") or "")
    with pytest.raises(ValueError, match="recipe: got"):
        run(*inputs(1, 8, 8, 1, 1, 64), recipe, "sm_100")


def test_unknown_architectures_are_named():
    assert support.refusal(RECIPES["mxfp8"], "sm_75").startswith("needs one of sm_80, ")
    assert support.refusal(RECIPES["mxfp8"], None).endswith("this device is no GPU")


def test_a_device_that_is_no_gpu_is_named():
    x = torch.zeros(1, 8, 1, 64)
    with pytest.raises(ValueError, match="device: got cpu; accepted: a GPU of sm_80"):
        attention.prepare(x, x, x, RECIPES["mxfp8"])


@only_interpreted
class TestRecipes:
    @modes
    def test_full(self, recipe, architecture):
        compare(*inputs(1, 70, 300, 2, 1, 64), recipe, architecture)

    @modes
    def test_causal(self, recipe, architecture):
        if not RECIPES[recipe].causal:
            pytest.skip("not causal")
        compare(*inputs(1, 130, 200, 1, 1, 64), recipe, architecture, is_causal=True, bottom_right=True)

    @pytest.mark.parametrize("recipe", OPTIONS)
    def test_options(self, recipe):
        causal = resolve(recipe).causal
        compare(*inputs(1, 70, 200, 2, 1, 64), recipe, "sm_80", is_causal=causal, bottom_right=causal)

    @modes
    def test_scores_that_rise_from_tile_to_tile(self, recipe, architecture):
        q, k, v = inputs(1, 20, 400, 1, 1, 64)
        k = k * torch.exp2(torch.arange(400) // 128)[:, None]
        v = v * torch.exp2(torch.arange(400) // 32 % 5 * 4.0)[:, None]
        compare(q, k, v, recipe, architecture)


    @pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8", "fused_mxfp8", "fused_mxfp6"])
    def test_maxima_stay_where_scores_rise_by_less_than_the_threshold(self, recipe):
        q, k, v = inputs(1, 20, 300, 1, 1, 64)
        compare(q, k * (1 + torch.arange(300) // 128 * 0.4)[:, None], v, recipe, "sm_80")


@only_interpreted
class TestInputs:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("causal", [False, True])
    def test_shapes(self, shape, causal):
        compare(*inputs(*shape), "mxfp8", "sm_80", is_causal=causal)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_dtypes(self, dtype):
        q, k, v = inputs(1, 70, 140, 2, 2, 128, dtype)
        output, _ = run(q, k, v, "mxfp8", "sm_80")
        assert output.dtype == dtype
        assert relative_error(output, specified(q, k, v, "mxfp8").output) < 2.0**-8

    @pytest.mark.parametrize("causal", [{}, {"is_causal": True, "bottom_right": True}], ids=["full", "causal"])
    @pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8", "fused_mxfp6"])
    def test_key_lengths_and_garbage_past_them(self, recipe, causal):
        if causal and not RECIPES[recipe].causal:
            pytest.skip("not causal")
        q, k, v = inputs(3, 70, 200, 1, 1, 64)
        lengths = torch.tensor([200, 0, 129], dtype=torch.int32)
        for n, length in enumerate(lengths.tolist()):
            k[n, :, length:], v[n, :, length:] = torch.nan, torch.inf
        compare(q, k, v, recipe, "sm_80", key_lengths=lengths, **causal)

    @pytest.mark.parametrize("scale", [-0.1, 0.0, 0.5])
    @pytest.mark.parametrize("recipe", ["mxfp8", "fused_mxfp8"])
    def test_scales(self, recipe, scale):
        compare(*inputs(1, 70, 200, 1, 1, 64), recipe, "sm_80", scale=scale)

    @pytest.mark.parametrize(("recipe", "architecture"), [("mxfp8", "sm_80"), ("nvfp4_fp8", "sm_100")])
    @pytest.mark.parametrize("causal", [False, True])
    def test_packed_documents(self, recipe, architecture, causal):
        q, k, v = (x[0].transpose(0, 1) for x in inputs(1, 230, 230, 2, 1, 64))
        cu_q, cu_k = boundaries(0, 1, 1, 140, 200), boundaries(0, 20, 30, 170, 230)
        prepared = attention.prepare(q, k, v, resolve(recipe), target=TARGETS[architecture], is_causal=causal, cu_seq=(cu_q, cu_k))
        assert_close(attention.run(prepared), varlen_forward(q, k, v, cu_q, cu_k, resolve(recipe), is_causal=causal), recipe)

    @pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8"])
    def test_broken_blocks_reach_only_rows_that_see_them(self, recipe):
        q, k, v = inputs(1, 170, 170, 1, 1, 64)
        v[0, 0, 100, 3], k[0, 0, 165, 0] = torch.nan, torch.inf
        output, _ = run(q, k, v, recipe, "sm_80", is_causal=True)
        assert not output[0, 0, :96].isnan().any()
        assert output[0, 0, 100:].isnan().all()

    @pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
    @pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8", "fused_mxfp8", "mxattention", "fused_mxfp6"])
    def test_a_broken_v_breaks_the_lse_only_where_it_is_folded_into_p(self, recipe, architecture):
        q, k, v = inputs(2, 8, 70, 1, 1, 64)
        v[0, 0, 40] = torch.nan
        compare(q, k, v, recipe, architecture)

    @pytest.mark.parametrize(("recipe", "architecture"), [
        ("fused_mxfp8", "sm_80"), ("fused_mxfp8", "gfx950"), ("mxattention", "sm_80"), ("mxfp8:row_sum=quantized", "sm_80"),
        ("fused_mxfp6", "sm_80"), ("fused_mxfp4", "gfx950")])
    def test_scores_of_inf_and_nan_break_their_rows(self, recipe, architecture):
        q, k, v = inputs(2, 8, 200, 1, 1, 64)
        q[0, 0, 2, 0], k[0, 0, 150] = torch.nan, k[0, 0, 150] * 1e30
        q[0, 0, 5] = 1e30 * k[0, 0, 150].sign()
        compare(q, k, v, recipe, architecture)

    @pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8:causal_safety=exact", "nvfp4_fp8"])
    @pytest.mark.parametrize("growth", [2.0**12, 2.0**100])
    def test_later_blocks_move_no_bit_of_earlier_rows(self, recipe, growth):
        q, k, v = inputs(1, 170, 170, 1, 1, 64)
        output, lse = run(q, k, v, recipe, "sm_80", is_causal=True)
        for x in (q, k, v):
            x[..., 160:, :] *= growth
        after = run(q, k, v, recipe, "sm_80", is_causal=True)
        assert torch.equal(after[0][..., :160, :], output[..., :160, :])
        assert torch.equal(after[1][..., :160], lse[..., :160])

    def test_any_strides(self):
        q, k, v = inputs(1, 40, 70, 2, 2, 64)
        wide = torch.zeros(1, 2, 40, 200)
        wide[..., 5:69] = q
        by_token = k.transpose(1, 2).contiguous().transpose(1, 2)
        shared = v[:, :1].expand(-1, 2, -1, -1)
        viewed = run(wide[..., 5:69], by_token, shared, "mxfp8", "sm_80")[0]
        assert torch.equal(viewed, run(q, k, shared.contiguous(), "mxfp8", "sm_80")[0])

    def test_saved_codes_equal_the_references(self):
        q, k, v = inputs(2, 70, 100, 2, 1, 128)
        visibility = Visibility.create(2, 70, 100, is_causal=False)
        wanted = forward(q, k, v, RECIPES["mxfp8"], visibility, save=True).saved
        prepared = attention.prepare(*(x.transpose(1, 2) for x in (q, k, v)), RECIPES["mxfp8"], target=TARGETS["sm_80"], save=True)
        found = attention.saved_for_backward(prepared)
        for codes, scales, part in zip(found[::2], found[1::2], (wanted.query, wanted.key, wanted.value), strict=True):
            assert torch.equal(codes.transpose(1, 2), part.codes)
            assert torch.equal(scales, part.scales)
