"""Whole calls of the Hopper backward of mxfp8 on a CPU: host code, tables, quantizers and kernels, all by their own source, equal
the reference on what the forward saved. Tables run in Triton's interpreter, Gluon as plain Python (`gluon_warpgroups`)."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from interpreted import only_interpreted, run_interpreted, starts_interpreter

from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility, backward, forward, varlen_backward, varlen_forward

pytest.importorskip("triton", reason="Triton runs on Linux only")

RECIPE = resolve("mxfp8")


@starts_interpreter
def test_backward_equals_the_reference():
    run_interpreted(__file__, "TestInterpreted")


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(x, seed):
    """x [.., tokens, heads, D] with another exponent, of -6 to 0, for each 32 tokens and head."""
    *_, tokens, heads, _ = x.shape
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-6, 1, (-(-tokens // 32), heads, 1), generator=generator).repeat_interleave(32, 0)[:tokens]
    return x * torch.exp2(exponent)


def inputs(queries, keys, heads, kv_heads, head_dim, batch=(), seed=0):
    """Query, key, value and dO, each 32 tokens of an exponent of their own."""
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    return [uneven(normal(*batch, *size, head_dim, seed=seed + n), seed + n) for n, size in enumerate(sizes)]


@pytest.fixture(params=[False, True], ids=["one pass", "two kernels"])
def call(request):
    """`kernels.hopper.backward.backward` on CPU tensors, in either form, two programs to a kernel, a promotion each two tiles;
    whatever it reads before it was written is NaN."""
    from gluon_warpgroups import Kernel

    from lowbit_attn.kernels.hopper import (
        backward,
        finish_query,
        forward_tiles,
        gradient_tiles,
        key_gradients,
        one_pass,
        quantize_gradient,
        quantize_tile,
        query_gradients,
        work_queue,
    )
    shared = (forward_tiles, gradient_tiles, work_queue)
    kernels = [
        (one_pass, "gradients", Kernel(one_pass.gradients, one_pass, *shared)),
        (backward, "key_gradients", Kernel(key_gradients.key_gradients, key_gradients, *shared)),
        (backward, "query_gradients", Kernel(query_gradients.query_gradients, query_gradients, *shared)),
        (finish_query, "finish_query", Kernel(finish_query.finish_query, finish_query, quantize_tile)),
        (quantize_gradient, "gradient_kernel", Kernel(quantize_gradient.gradient_kernel, quantize_gradient, quantize_tile)),
        (quantize_gradient, "_transpose_queries", Kernel(quantize_gradient._transpose_queries, quantize_gradient, quantize_tile))]
    with ExitStack() as stack:
        for module, name, kernel in kernels:
            stack.enter_context(patch.object(module, name, kernel))
        for name in ("ONE_PASS", "KEYS", "QUERIES"):
            often = {dim: replace(config, promote=2) for dim, config in getattr(backward, name).items()}
            stack.enter_context(patch.object(backward, name, often))
        stack.enter_context(patch.object(backward, "processors", lambda device: 2))
        stack.enter_context(patch.object(torch.cuda, "device", lambda device: nullcontext()))
        torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
        yield partial(backward.backward, deterministic=request.param)
        torch.use_deterministic_algorithms(False)


def dense(call, tensors, *, grad_lse=None, scale=None, key_lengths=None, **options):
    """Gradients of [B, S, H, D] by the kernels and by the reference."""
    from lowbit_attn.kernels.hopper.backward import Saved
    from lowbit_attn.ops.saved import flatten_saved

    q, k, v, do = (x.transpose(1, 2) for x in tensors)
    masks = {"is_causal": False, **options}
    visibility = Visibility.create(q.shape[0], q.shape[2], k.shape[2], key_lengths=key_lengths, **masks)
    made = forward(q, k, v, RECIPE, visibility, scale=scale, save=True)
    wanted = backward(do, grad_lse, made.saved, made.output, made.lse, RECIPE, visibility, scale=scale)
    found = call(tensors[3], grad_lse, made.output.transpose(1, 2), made.lse, Saved(*flatten_saved(made.saved, packed=False)),
                 RECIPE, scale=scale, key_lengths=key_lengths, **masks)
    return found, [x.transpose(1, 2) for x in (wanted.query, wanted.key, wanted.value)]


def packed(call, tensors, cu_seq, causal):
    """Gradients of [T, H, D] by the kernels and by the reference."""
    from lowbit_attn.kernels.hopper.backward import Saved
    from lowbit_attn.ops.saved import flatten_saved

    made = varlen_forward(*tensors[:3], *cu_seq, RECIPE, is_causal=causal, save=True)
    wanted = varlen_backward(tensors[3], None, made.saved, made.output, made.lse, *cu_seq, RECIPE, is_causal=causal)
    found = call(tensors[3], None, made.output, made.lse, Saved(*flatten_saved(made.saved, packed=True)), RECIPE, is_causal=causal,
                 cu_seq=cu_seq)
    return found, [wanted.query, wanted.key, wanted.value]


def by_block(x):
    """[.., S, H, D] -> [.., blocks of 32 tokens, H, 32 * D]."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[-3] % 32))
    return padded.unflatten(-3, (-1, 32)).transpose(-3, -2).flatten(-2)


def assert_close(gradients):
    """But for codes that a score's last bits flip, and for the smallest of dS, which the one pass rounds relative to a bound on its
    block: few of all, more in a block that is quiet beside what it was multiplied with."""
    unseen = (gradients[1][2] == 0).all(-1)
    for name, a, b in zip(("query", "key", "value"), *gradients, strict=True):
        assert a.dtype == torch.float32
        assert a.shape == b.shape
        assert a.is_contiguous()
        assert (a - b).norm() <= 2.0**-9 * b.norm(), name
        error, size = by_block(a - b).norm(dim=-1), by_block(b).norm(dim=-1)
        assert (error <= 2.0**-5 * size.clamp_min(size.max() / 16)).all(), name
        assert name == "query" or not a[unseen].any(), name


CAUSAL = pytest.mark.parametrize("causal", [{}, {"is_causal": True}, {"is_causal": True, "bottom_right": True}],
                                 ids=["full", "top left", "bottom right"])
PACKED_CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@only_interpreted
class TestInterpreted:
    @CAUSAL
    @pytest.mark.parametrize("sizes", [(200, 200, 1, 1, 128), (130, 333, 3, 1, 64), (300, 150, 4, 2, 64), (40, 300, 2, 2, 96)],
                             ids=str)
    def test_dense(self, call, sizes, causal):
        assert_close(dense(call, inputs(*sizes, batch=(2,)), **causal))

    @PACKED_CAUSAL
    def test_packed_documents(self, call, causal):
        lengths = [150, 0, 1, 260, 33]
        tensors = inputs(sum(lengths) + 20, sum(lengths) + 20, 2, 1, 64)
        for x in tensors:
            x[-20:] = torch.nan
        found, wanted = packed(call, tensors, (bounds(lengths), bounds(lengths)), causal)
        assert not any(x[-20:].any() for x in found)
        assert_close((found, wanted))

    def test_one_head_at_a_time(self, call):
        from lowbit_attn.kernels.hopper import backward

        lengths = bounds([150, 260, 33])
        with patch.object(backward, "FEW_ENTRIES", 0), patch.object(backward, "STREAM_BUDGET", 1):
            assert_close(packed(call, inputs(443, 443, 6, 3, 64), (lengths, lengths), True))

    @PACKED_CAUSAL
    def test_documents_without_queries_or_keys(self, call, causal):
        cu_seq = (bounds([30, 0, 100, 20, 0]), bounds([300, 140, 40, 0, 200]))
        assert_close(packed(call, inputs(150, 680, 2, 2, 64), cu_seq, causal))

    @CAUSAL
    def test_key_lengths(self, call, causal):
        tensors = inputs(150, 200, 2, 1, 64, batch=(4,))
        lengths = torch.tensor([200, 0, 129, 1], dtype=torch.int32)
        for n, length in enumerate(lengths.tolist()):
            tensors[1][n, length:], tensors[2][n, length:] = torch.nan, torch.inf
        assert_close(dense(call, tensors, key_lengths=lengths, **causal))

    @pytest.mark.parametrize("zero", [[0], [1], [2], [3], [0, 1, 2, 3]], ids=["query", "key", "value", "gradient", "all"])
    def test_blocks_of_zeros(self, call, zero):
        tensors = inputs(200, 200, 2, 1, 64, batch=(1,))
        for operand in zero:
            tensors[operand][:, 32:128] = 0
        assert_close(dense(call, tensors, is_causal=True))

    @pytest.mark.parametrize("scale", [-0.1, 0.5])
    def test_scales_and_gradients_of_lse(self, call, scale):
        assert_close(dense(call, inputs(200, 200, 2, 1, 64, batch=(1,)), grad_lse=normal(1, 2, 200, seed=8), scale=scale))

    def test_quiet_queries_beside_loud_ones(self, call):
        tensors = [normal(1, 150, 2, 64, seed=n) for n in range(4)]
        tensors[3] *= torch.where(torch.arange(150) % 5 == 0, 1.0, 2.0**-4)[:, None, None]
        (found, *_), (wanted, *_) = dense(call, tensors)
        assert ((found - wanted).norm(dim=-1) <= 2.0**-5 * wanted.norm(dim=-1)).all()

    @pytest.mark.parametrize("operand", range(4), ids=["query", "key", "value", "gradient"])
    def test_nan_stays_in_its_document(self, call, operand):
        lengths = [70, 90, 60]
        tensors = inputs(220, 220, 2, 1, 64)
        clean, _ = packed(call, tensors, (bounds(lengths), bounds(lengths)), False)
        tensors[operand][100, 0, 5] = torch.nan
        found, wanted = packed(call, tensors, (bounds(lengths), bounds(lengths)), False)
        for a, b, c in zip(found, wanted, clean, strict=True):
            assert torch.equal(a[:70], c[:70])
            assert torch.equal(a[160:], c[160:])
            assert a.isnan().any()
            assert (b.isnan() | ~a.isnan()).all()  # the reference multiplies it by zeros of more keys
        assert torch.equal(found[0].isnan(), wanted[0].isnan())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_dtypes(self, call, dtype):
        q, k, v, do = inputs(100, 150, 2, 1, 64, batch=(1,))
        do = do.to(dtype)
        wide, narrow = (dense(call, (q, k, v, x), is_causal=True)[0] for x in (do.float(), do))
        for a, b in zip(narrow, wide, strict=True):
            assert torch.equal(a, b.to(dtype))

    def test_strides_of_the_gradient(self, call):
        q, k, v, do = inputs(100, 150, 2, 1, 64, batch=(1,))
        wide = torch.full((1, 100, 2, 67), torch.nan)
        wide[..., 1:65] = do
        expected = dense(call, (q, k, v, do))[0]
        for x in (wide[..., 1:65], do.mT.contiguous().mT, do.transpose(1, 2).contiguous().transpose(1, 2)):
            for a, b in zip(dense(call, (q, k, v, x))[0], expected, strict=True):
                assert torch.equal(a, b)
