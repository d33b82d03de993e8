"""On a GPU the portable kernels equal the reference, whatever the mask, layout and dtype.

Bounds: products of codes are exact in bf16 and add up in float32 in another order, about 1e-6 of a score, which moves O by 3e-4 in
E4M3 (tests/gpu/test_cuda.py) and in E2M3, which has as many fraction bits, and four times that in E2M1; outputs in bf16 add their
own rounding, 2^-9 in the mean.
"""

import pytest
import torch
from block_bounds import rising

import lowbit_attn
from lowbit_attn import formats
from lowbit_attn.ops import LowbitFallbackWarning, describe, dispatch
from lowbit_attn.recipes import RECIPES, resolve
from lowbit_attn.reference.operands import round_operand, working_qk

support = pytest.importorskip("lowbit_attn.kernels.portable.support")

ARCHITECTURE = describe(torch.device("cuda")).architecture if torch.cuda.is_available() else None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(support.refusal(RECIPES["mxfp8"], ARCHITECTURE) is not None,
                                                  reason="needs a GPU that the portable kernels know"),
              pytest.mark.filterwarnings("ignore::lowbit_attn.ops.dispatch.LowbitFallbackWarning")]

COMPUTED = [name for name, recipe in RECIPES.items() if support.refusal(recipe, "sm_90") is None]
TRAINS = [name for name in COMPUTED if support.backward_refusal(RECIPES[name], "sm_90") is None]
FULL = {}
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}


def bound(recipe):
    return 2e-3 if formats.element_format(resolve(recipe).p.element).mantissa_bits == 3 else 8e-3


def inputs(batch, queries, keys, heads, kv_heads, head_dim, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(batch, *shape, head_dim, generator=generator, device="cuda") for shape in shapes)
    return q.to(dtype), k.to(dtype), (v + 0.5).to(dtype)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def compare(q, k, v, recipe, limit=None, **options):
    found, wanted = (lowbit_attn.attention(q, k, v, recipe=recipe, enable_gqa=True, return_lse=True, backend=backend, **options)
                     for backend in ("triton", "reference"))
    assert torch.equal(found[0].isnan(), wanted[0].isnan())
    assert relative(found[0].nan_to_num(), wanted[0].nan_to_num()) < (limit or bound(recipe))
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=2e-3, equal_nan=True)


SHAPES = [(1, 1, 1, 1, 1, 128), (2, 129, 127, 2, 1, 128), (2, 300, 333, 4, 2, 128), (1, 500, 700, 4, 4, 64), (1, 77, 300, 2, 1, 96),
          (1, 300, 300, 2, 2, 40), (1, 260, 300, 2, 1, 256)]


@pytest.mark.parametrize("recipe", COMPUTED)
class TestForward:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_shapes(self, recipe, shape):
        compare(*inputs(*shape), recipe)
        if RECIPES[recipe].causal:
            compare(*inputs(*shape), recipe, **CAUSAL)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_dtypes(self, recipe, dtype):
        compare(*inputs(1, 300, 300, 2, 2, 128, dtype), recipe, limit=bound(recipe) + 2.0**-9)

    def test_key_lengths_and_garbage_past_them(self, recipe):
        q, k, v = inputs(4, 200, 333, 2, 1, 128)
        lengths = torch.tensor([333, 0, 1, 129], dtype=torch.int32, device="cuda")
        for n, length in enumerate(lengths.tolist()):
            k[n, :, length:], v[n, :, length:] = torch.nan, torch.inf
        compare(q, k, v, recipe, key_lengths=lengths)

    def test_packed_documents(self, recipe):
        q, k, v = (x[0].transpose(0, 1) for x in inputs(1, 700, 700, 4, 2, 128))
        cu = torch.tensor([0, 1, 1, 300, 620], dtype=torch.int32, device="cuda")
        outputs = [lowbit_attn.varlen_attention(q, k, v, cu, cu, 700, 700, recipe=recipe, is_causal=RECIPES[recipe].causal,
                                                enable_gqa=True, backend=backend) for backend in ("triton", "reference")]
        assert relative(*outputs) < bound(recipe)
        assert not outputs[0][620:].any()

    def test_rising_scores_and_values(self, recipe):
        q, k, v = inputs(1, 128, 1000, 1, 1, 128)
        step = torch.arange(1000, device="cuda")
        compare(q, k * torch.exp2(step // 256)[:, None], v * torch.exp2(step // 32 % 5 * 4.0)[:, None], recipe)


@pytest.mark.parametrize("recipe", ["mxfp8", "fused_mxfp6"])
def test_sums_over_many_keys_do_not_drift(recipe):
    q, k, v = inputs(1, 128, 131072, 1, 1, 128)
    compare(q, k, v, recipe)


FP6 = [name for name in COMPUTED if "e2m3" in (RECIPES[name].qk.element, RECIPES[name].p.element, RECIPES[name].v.element)]


@pytest.mark.parametrize("recipe", [*FP6, "mxfp4_ocp"])
def test_operands_are_the_codes_values_where_hoppers_are_not(recipe):
    from lowbit_attn.kernels.portable import attention

    parsed = RECIPES[recipe]
    q, k, v = inputs(1, 300, 333, 2, 1, 128)
    q[..., 5, :32] *= 2.0**-16  # far below blocks that share an exponent with them there: a query token's, 32 keys', a channel's
    k[..., 40, 32:64] *= 2.0**-16
    v[..., :32, 3] *= 2.0**-20
    if parsed.rotates(128):
        q, k = formats.hadamard(q), formats.hadamard(k)
    by_token = [x.transpose(1, 2) for x in (q, k, v)]
    prepared = attention.prepare(*by_token, parsed)
    if not prepared.target.is_native(parsed):
        work_q, work_k = working_qk(q, k, parsed, 128**-0.5)
        wanted = round_operand(work_q, parsed.qk), round_operand(work_k, parsed.qk), round_operand(v, parsed.v, axis=-2)
        for x, values in zip((prepared.query, prepared.key, prepared.value), wanted, strict=True):
            assert torch.equal(x.values[:, :values.shape[2]].float(), values[0])
    if ARCHITECTURE == "sm_90":
        from lowbit_attn.kernels.hopper import block_attention

        assert (block_attention.prepare(*by_token, parsed, count=True).quantized.inexact > 0).all()
    compare(q, k, v, recipe)


@pytest.mark.parametrize("recipe", FP6)
def test_many_keys_far_below_a_frozen_maximum_keep_their_weight(recipe):
    # One key of the first tile is 10 doublings above the others, which outweigh it (docs/numerics.md, Blocks of 32 on Hopper).
    q, k, v = inputs(1, 100, 14 * 128, 1, 1, 128)
    q, k, v = rising(q, k, v, {key: 10.0 if key == 60 else 0.0 for key in range(k.shape[2])})
    compare(q, k, v, recipe)


@pytest.mark.parametrize("recipe", FP6)
def test_maxima_roll_back(recipe):
    # Past 128 doublings above the first maximum the affine exponential has no more patterns. Scores of 150 doublings are off by
    # some 2^-14, which flips codes of P, 8 to a doubling: weights by sqrt(8 * 2^-14) / 8, 3e-3 (tests/block_bounds.py).
    q, k, v = inputs(1, 100, 512, 1, 1, 128)
    compare(*rising(q, k, v, {key: 45.0 * (key // 128) for key in range(512)}), recipe, limit=4e-3)


@pytest.mark.parametrize("recipe", [*TRAINS, "mxfp8:rotation=always"])
@pytest.mark.parametrize("options", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [(1, 300, 333, 4, 2, 128), (1, 130, 200, 2, 2, 64), (1, 100, 150, 2, 1, 256)], ids=str)
def test_gradients(recipe, options, shape):
    grads = []
    for backend in ("triton", "reference"):
        x = [t.requires_grad_() for t in inputs(*shape)]
        output, lse = lowbit_attn.attention(*x, recipe=recipe, enable_gqa=True, return_lse=True, backend=backend, **options)
        grads.append(torch.autograd.grad(output.square().sum() + output.sum() + lse.nan_to_num(neginf=0).sum(), x))
    for found, wanted in zip(*grads, strict=True):
        assert relative(found, wanted) < 10 * bound(recipe)  # dS amplifies a flipped code, as in tests/gpu/test_cuda.py


@pytest.mark.parametrize("recipe", TRAINS)
def test_gradients_of_packed_documents_repeat_bit_for_bit(recipe):
    cu = torch.tensor([0, 1, 1, 300, 620], dtype=torch.int32, device="cuda")
    grads = []
    for backend in ("triton", "reference", "triton"):
        x = [t[0].transpose(0, 1).contiguous().requires_grad_() for t in inputs(1, 700, 700, 4, 2, 128)]
        output = lowbit_attn.varlen_attention(*x, cu, cu, 700, 700, recipe=recipe, is_causal=True, enable_gqa=True, backend=backend)
        grads.append(torch.autograd.grad(output.square().sum() + output.sum(), x))
    for found, wanted, again in zip(*grads, strict=True):
        assert relative(found, wanted) < 10 * bound(recipe)
        assert not found[620:].any()
        assert torch.equal(found, again)


@pytest.mark.parametrize("text", ["e4m3/token_block", "e4m3/mx32", "e2m1/mx32/uos", "e2m1/nvfp16_token", "e2m3/mx32",
                                  "e2m3/nvfp16"])
def test_quantized_values_equal_formats_bit_for_bit(text):
    from lowbit_attn.kernels.portable.quantize import Work, quantize
    from lowbit_attn.kernels.tiling import dense_tiling
    from lowbit_attn.recipes import Operand

    operand = Operand.parse(text)
    x = inputs(1, 300, 300, 2, 2, 128)[0].transpose(1, 2) * 3
    tiling = dense_tiling(x, 300, align="none", key_lengths=None, block_rows=64)
    found = quantize(x, tiling, Work(operand, 0, rotate=True, prescale=0.3), packed=False).values[:, :300]
    wanted = formats.round_to_blocks(formats.hadamard(x.transpose(1, 2)) * 0.3, formats.element_format(operand.element),
                                     formats.block_layout(operand.layout), operand.rule)
    assert torch.equal(found.float(), wanted[0])


def test_a_captured_call_and_a_compiled_one_give_the_same_bits():
    q, k, v = inputs(1, 300, 300, 4, 2, 128, torch.bfloat16)

    def call():
        return lowbit_attn.attention(q, k, v, is_causal=True, enable_gqa=True, backend="triton")

    eager = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    assert torch.equal(captured, eager)
    assert torch.equal(torch.compile(call, fullgraph=True)(), eager)


def test_an_emulated_choice_warns_by_name_where_no_faster_kernel_serves():
    recipe = "mxfp8:causal_safety=exact"  # which no Hopper kernel has
    if support.is_native(resolve(recipe), ARCHITECTURE):
        pytest.skip("native here")
    dispatch._warn_once.cache_clear()
    with pytest.warns(LowbitFallbackWarning, match="mxfp8.* on .* runs backend 'triton', emulated"):
        lowbit_attn.attention(*inputs(1, 40, 40, 2, 2, 64), recipe=recipe)
