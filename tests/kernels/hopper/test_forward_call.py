"""Whole calls of the Hopper forward of mxfp8 on a CPU: host code, tables, quantizer, loader and consumers, all by their own source,
equal the reference. Tables run in Triton's interpreter, Gluon as plain Python (`gluon_warpgroups`): its warpgroups take turns, and
turns that do not fit each other leave them waiting."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from interpreted import only_interpreted, run_interpreted, starts_interpreter
from row_bounds import assert_close

from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility, forward, varlen_forward

pytest.importorskip("triton", reason="Triton runs on Linux only")

RECIPE = resolve("mxfp8")


@starts_interpreter
def test_calls_equal_the_reference():
    run_interpreted(__file__, "TestInterpreted")


def uneven(*shape, seed):
    """[.., tokens, heads, D], each 32 tokens and head with an exponent of its own: references rise here and there."""
    generator = torch.Generator().manual_seed(seed)
    *_, tokens, heads, _ = shape
    exponent = torch.randint(-4, 1, (-(-tokens // 32), heads, 1), generator=generator).repeat_interleave(32, 0)[:tokens]
    return torch.randn(shape, generator=generator) * torch.exp2(exponent)


def inputs(queries, keys, heads, kv_heads, head_dim, batch=()):
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return [uneven(*batch, *size, head_dim, seed=n) for n, size in enumerate(sizes)]


@pytest.fixture(params=[2, 16], ids=["promoted each two tiles", "as configured"])
def call(request):
    """`ops.hopper.forward` on CPU tensors, two programs to a kernel; what it reads before it was written is NaN."""
    from gluon_warpgroups import Kernel

    from lowbit_attn.kernels.hopper import attention, forward_tiles, inline, quantize, quantize_tile, work_queue
    from lowbit_attn.kernels.hopper import forward as family
    from lowbit_attn.ops import hopper

    assert {config.promote for config in attention.EXACT.values()} == {16}
    often = {dim: replace(config, promote=request.param) for dim, config in attention.EXACT.items()}
    with ExitStack() as stack:
        for module, name, value in (
                (family, "attention", Kernel(family.attention, family, forward_tiles, inline, work_queue)),
                (attention, "EXACT", often),
                (quantize, "quantize_kernel", Kernel(quantize.quantize_kernel, quantize, quantize_tile)),
                (attention, "processors", lambda device: 2), (torch.cuda, "device", lambda device: nullcontext())):
            stack.enter_context(patch.object(module, name, value))
        torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
        yield hopper.forward
        torch.use_deterministic_algorithms(False)


def dense(call, tensors, *, scale=None, key_lengths=None, **masks):
    q, k, v = (x.transpose(1, 2) for x in tensors)
    masks = {"is_causal": False, **masks}
    visibility = Visibility.create(q.shape[0], q.shape[2], k.shape[2], key_lengths=key_lengths, **masks)
    wanted = forward(q, k, v, RECIPE, visibility, scale=scale)
    output, lse, *_ = call(*tensors, RECIPE, scale=scale, key_lengths=key_lengths, save=False, **masks)
    assert_close(output, lse, wanted)


CAUSAL = pytest.mark.parametrize("causal", [{}, {"is_causal": True}, {"is_causal": True, "bottom_right": True}],
                                 ids=["full", "top left", "bottom right"])

CAUSAL_BELOW = {"is_causal": True, "bottom_right": True}


@only_interpreted
class TestInterpreted:
    @CAUSAL
    @pytest.mark.parametrize("shape", [(300, 900, 4, 2, 128), (700, 700, 1, 1, 64), (77, 40, 2, 1, 96), (130, 300, 2, 1, 256),
                                       (129, 255, 1, 1, 64)])  # the first row is one key short of full tiles
    def test_shapes(self, call, shape, causal):
        dense(call, inputs(*shape, batch=(2,)), **causal)

    @pytest.mark.parametrize("scale", [-0.1, 0.0, 0.5])
    def test_key_lengths_and_scales(self, call, scale):
        q, k, v = inputs(200, 600, 4, 2, 64, batch=(3,))
        lengths = torch.tensor([600, 0, 385], dtype=torch.int32)
        k[2, 385:], v[2, 385:], v[1] = torch.nan, torch.inf, torch.nan
        dense(call, (q, k, v), scale=scale, key_lengths=lengths)

    def test_scores_that_climb_raise_the_maximum_across_promotions(self, call):
        q, k, v = inputs(130, 1200, 1, 1, 128, batch=(1,))
        dense(call, (q, k * torch.linspace(0, 12, 1200)[:, None, None], v))

    @pytest.mark.parametrize("keys", [100, 128, 300])
    def test_scores_that_all_lie_far_below_zero(self, call, keys):
        q, k, v = inputs(130, keys, 1, 1, 64, batch=(1,))
        q[..., 0], k[..., 0] = 32.0, -64.0  # 369 doublings
        dense(call, (q, k, v))

    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    def test_packed_documents(self, call, causal):
        lengths = [150, 0, 1, 700, 33]
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        q, k, v = inputs(sum(lengths) + 20, sum(lengths) + 20, 4, 2, 128)
        q[-20:], k[-20:], v[-20:] = torch.nan, torch.nan, torch.nan
        wanted = varlen_forward(q, k, v, cu, cu, RECIPE, is_causal=causal)
        output, lse, *_ = call(q, k, v, RECIPE, scale=None, is_causal=causal, cu_seq=(cu, cu), save=False)
        assert_close(output, lse, wanted)

    def test_more_tiles_than_one_promotion(self, call):
        dense(call, inputs(70, 2500, 1, 1, 64, batch=(1,)))

    @pytest.mark.parametrize(("keys", "causal"), [
        (100, {}), (128, {}), (400, {}), (161, CAUSAL_BELOW)], ids=["masked tile", "full tile", "many tiles", "causal"])
    def test_scores_that_left_float32_downwards(self, call, keys, causal):
        q, k, v = torch.zeros(1, 128, 1, 64), torch.zeros(1, keys, 1, 64), inputs(1, keys, 1, 1, 64, batch=(1,))[2]
        q[..., 0], k[..., 0] = 1e30, -1e30
        if causal:
            k[:, 128:] = 0.0  # ordinary scores after a tile of -inf
        by_head = [x.transpose(1, 2) for x in (q, k, v)]
        wanted = forward(*by_head, RECIPE, Visibility.create(1, 128, keys, **{"is_causal": False, **causal}))
        output, lse, *_ = call(q, k, v, RECIPE, scale=None, save=False, **{"is_causal": False, **causal})
        assert wanted.lse.isnan().any()
        assert torch.equal(output.transpose(1, 2).isnan(), wanted.output.isnan())
        assert torch.equal(lse.isnan(), wanted.lse.isnan())
