"""The portable backward equals the reference, emulated and native; run in Triton's interpreter, so no GPU is needed.

As in the forward, P and dS differ by flipped codes where float32 sums of another order lie near a rounding boundary.
"""

import itertools

import pytest
import torch
from interpreted import INTERPRETED, only_interpreted, run_interpreted, starts_interpreter
from oracle import boundaries, relative_error

from lowbit_attn.ops.saved import flatten_saved
from lowbit_attn.recipes import RECIPES, resolve
from lowbit_attn.reference import Visibility, backward, forward, varlen_backward, varlen_forward

pytest.importorskip("triton", reason="Triton runs on Linux only")

if INTERPRETED:
    import triton_interpreter  # noqa: F401

from lowbit_attn.kernels.portable import attention, support
from lowbit_attn.kernels.portable import backward as kernels
from lowbit_attn.kernels.portable.targets import TARGETS

BOUND = 2e-3
TRAINS = ("mxfp8", "nvfp4_fp8")
MODES = [*((name, "sm_80") for name in TRAINS), ("mxfp8", "sm_100")]
"""Emulated, and native."""

modes = pytest.mark.parametrize(("recipe", "architecture"), MODES)
both = pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])


def inputs(batch, queries, keys, heads, kv_heads, head_dim, dtype=torch.float32):
    """Queries, keys, values of non-zero mean and dO, [B, S, H, D]."""
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    q, k, v, do = (torch.randn(batch, *shape, head_dim) for shape in shapes)
    return q.to(dtype), k.to(dtype), (v + 0.5).to(dtype), do.to(dtype)


def assert_close(found, expected):
    for name, x in zip(("query", "key", "value"), found, strict=True):
        wanted = getattr(expected, name)
        assert torch.equal(x.isnan(), wanted.isnan()), name
        assert (x - wanted).nan_to_num().norm() <= BOUND * wanted.nan_to_num().norm(), name


def compare(q, k, v, do, recipe="mxfp8", *, grad_lse=None, is_causal=False, bottom_right=False, key_lengths=None, scale=None,
            architecture="sm_80"):
    """The kernels' gradients and the reference's, after the reference's forward."""
    parsed = resolve(recipe)
    visibility = Visibility.create(q.shape[0], q.shape[1], k.shape[1], is_causal=is_causal, bottom_right=bottom_right,
                                   key_lengths=key_lengths, device=q.device)
    result = forward(*(x.transpose(1, 2) for x in (q, k, v)), parsed, visibility, scale=scale, save=True)
    wanted = backward(do.transpose(1, 2), grad_lse, result.saved, result.output, result.lse, parsed, visibility, scale=scale)
    found = kernels.backward(do, grad_lse, result.output.transpose(1, 2).contiguous(), result.lse,
                             tuple(flatten_saved(result.saved, packed=False)), parsed, target=TARGETS[architecture], scale=scale,
                             is_causal=is_causal, bottom_right=bottom_right, key_lengths=key_lengths)
    assert_close([x.transpose(1, 2) for x in found], wanted)
    return found


@starts_interpreter
def test_interpreted_gradients_equal_the_reference():
    run_interpreted(__file__, "TestInterpreted")


WITHOUT = {"mxattention": "defines no backward", "mxfp8:causal_safety=exact": "folds no scales of K",
           "nvfp4": "folds no scales of K", "mxfp8:ds=e4m3/per_row": "dS in 32 x 32 blocks",
           "mxfp8:p_grad=e4m3/mx32": "P without scales"}


@pytest.mark.parametrize(("recipe", "reason"), WITHOUT.items())
def test_recipes_without_a_backward_are_named(recipe, reason):
    assert reason in support.backward_refusal(resolve(recipe), "sm_100")
    x, row = torch.zeros(1, 8, 1, 64), torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match="recipe: got"):
        kernels.backward(x, None, x, row, (x, row) * 3, resolve(recipe), target=TARGETS["sm_100"])


def test_which_backwards_are_native():
    pairs = {(name, architecture, head_dim) for name in TRAINS for architecture in TARGETS for head_dim in (40, 128, 192)}
    native = {x for x in pairs if support.has_native_backward(RECIPES[x[0]], *x[1:])}
    assert native == {("mxfp8", *x) for x in itertools.product(("sm_100", "sm_103", "gfx950"), (40, 128))}


@pytest.mark.parametrize("recipe", ["mxfp8:do=e4m3/per_row", "mxfp8:qk=e4m3/per_row"])
def test_scales_of_single_tokens_have_no_native_backward(recipe):
    assert support.backward_refusal(resolve(recipe), "sm_100") is None
    assert not support.has_native_backward(resolve(recipe), "sm_100", 64)


@pytest.mark.parametrize("recipe", TRAINS)
@pytest.mark.parametrize("architecture", TARGETS)
def test_every_architecture_has_the_backward(recipe, architecture):
    assert support.backward_refusal(RECIPES[recipe], architecture) is None


@only_interpreted
class TestInterpreted:
    @pytest.mark.parametrize(("recipe", "architecture"), [*MODES, ("mxfp8", "gfx950")])  # whose native tiles are smaller
    @pytest.mark.parametrize("causal", [False, True])
    def test_gqa_and_both_masks(self, recipe, architecture, causal):
        compare(*inputs(1, 100, 150, 4, 2, 64), recipe, is_causal=causal, bottom_right=causal, grad_lse=torch.randn(1, 4, 100),
                architecture=architecture)

    @pytest.mark.parametrize(("shape", "architecture"), [  # none is native at head_dim 256
        *itertools.product([(1, 1, 1, 1, 1, 128), (1, 33, 70, 1, 1, 40)], ["sm_80", "sm_100"]), ((1, 40, 65, 1, 1, 256), "sm_80")])
    def test_shapes(self, shape, architecture):
        compare(*inputs(*shape), "mxfp8:rotation=always", is_causal=True, architecture=architecture)

    def test_every_block_of_32_tokens_has_a_scale_of_its_own(self):
        q, k, v, do = inputs(1, 200, 200, 1, 1, 64)
        rising = torch.exp2(torch.arange(200) // 32 % 5 * 3.0)[:, None, None]
        compare(q * rising / 64, k / rising, v * rising, do * rising.flip(0), is_causal=True, architecture="sm_100")

    def test_architectures_that_round_in_hardware(self):
        compare(*inputs(1, 70, 70, 1, 1, 64), is_causal=True, architecture="sm_90")

    @both
    @pytest.mark.parametrize("causal", [False, True])
    def test_key_lengths(self, causal, architecture):
        q, k, v, do = inputs(4, 70, 140, 1, 1, 64)
        lengths = torch.tensor([140, 0, 1, 100], dtype=torch.int32)
        found = compare(q, k, v, do, key_lengths=lengths, is_causal=causal, bottom_right=causal, scale=0.2,
                        architecture=architecture)
        for n, length in enumerate(lengths.tolist()):
            assert not found[1][n, length:].any()
            assert not found[2][n, length:].any()

    @modes
    def test_packed_documents(self, recipe, architecture):
        q, k, v, do = (x[0] for x in inputs(1, 230, 230, 2, 1, 64))
        cu_q, cu_k, parsed = boundaries(0, 1, 1, 140, 200), boundaries(0, 20, 30, 170, 230), RECIPES[recipe]
        result = varlen_forward(q, k, v, cu_q, cu_k, parsed, is_causal=True, save=True)
        wanted = varlen_backward(do, None, result.saved, result.output, result.lse, cu_q, cu_k, parsed, is_causal=True)
        found = kernels.backward(do, None, result.output, result.lse, tuple(flatten_saved(result.saved, packed=True)), parsed,
                                 target=TARGETS[architecture], is_causal=True, cu_seq=(cu_q, cu_k))
        assert_close(found, wanted)
        assert not found[0][200:].any()

    @both
    def test_after_the_kernels_own_forward(self, architecture):
        q, k, v, do = inputs(1, 70, 140, 2, 1, 64, torch.bfloat16)
        recipe, options = RECIPES["mxfp8"], {"target": TARGETS[architecture], "is_causal": True, "bottom_right": True}
        prepared = attention.prepare(q, k, v, recipe, save=True, **options)
        output, lse = attention.run(prepared)
        found = kernels.backward(do, None, output, lse, attention.saved_for_backward(prepared), recipe, **options)
        visibility = Visibility.create(1, 70, 140, is_causal=True, bottom_right=True, device=q.device)
        parts = [x.transpose(1, 2) for x in (q, k, v)]
        result = forward(*parts, recipe, visibility, save=True)
        wanted = backward(do.transpose(1, 2), None, result.saved, result.output.bfloat16(), result.lse, recipe, visibility)
        for x, y in zip(found, (wanted.query, wanted.key, wanted.value), strict=True):
            assert x.dtype == torch.bfloat16
            assert relative_error(x.transpose(1, 2), y) < BOUND + 2.0**-8

    @pytest.mark.parametrize("poison", [torch.nan, torch.inf])
    @pytest.mark.parametrize("where", range(4), ids=["query", "key", "value", "grad_output"])
    @pytest.mark.parametrize(("recipe", "architecture"), [*MODES, ("mxfp8", "sm_90")])  # which rounds in hardware
    def test_nan_and_inf_break_the_gradients_that_they_break_in_the_reference(self, recipe, architecture, where, poison):
        x = inputs(1, 150, 150, 1, 1, 64)
        x[where][0, 100, 0, 3] = poison   # past rows of the same tile that do not see its block
        compare(*x, recipe, is_causal=True, architecture=architecture)

    @both
    def test_later_blocks_move_no_bit_of_earlier_rows_of_dq(self, architecture):
        q, k, v, do = inputs(1, 200, 200, 1, 1, 64)
        before = compare(q, k, v, do, is_causal=True, architecture=architecture)[0][:, :128]
        for x in (q, k, v, do):
            x[:, 128:] *= 4096
        assert torch.equal(compare(q, k, v, do, is_causal=True, architecture=architecture)[0][:, :128], before)
