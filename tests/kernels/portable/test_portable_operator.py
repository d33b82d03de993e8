"""The public calls on backend "triton", forward and backward: what is saved, copied and handed on. Interpreted on CPU tensors,
which stand for those of a GPU."""

import pytest
import torch
from interpreted import INTERPRETED, only_interpreted, run_interpreted, starts_interpreter
from oracle import boundaries, relative_error

import lowbit_attn
from lowbit_attn.ops import Device, dispatch

pytest.importorskip("triton", reason="Triton runs on Linux only")

if INTERPRETED:
    import triton_interpreter  # noqa: F401

from lowbit_attn.kernels.portable import attention, backward
from lowbit_attn.kernels.portable.targets import TARGETS

BOUND = 2e-3


@starts_interpreter
def test_interpreted_calls_equal_the_reference():
    run_interpreted(__file__, "TestInterpreted")


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors are taken for tensors of an sm_80."""
    for module in (dispatch, lowbit_attn.api.ops):
        monkeypatch.setattr(module, "describe", lambda device: Device("cuda", "sm_80"))
    for module in (attention, backward):
        monkeypatch.setattr(module, "target_of", lambda device: TARGETS["sm_80"])


def inputs(*shape):
    return [torch.randn(*shape).requires_grad_() for _ in range(3)]


@only_interpreted
class TestInterpreted:
    @pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8"])
    def test_dense_with_lse(self, gpu, recipe):
        x = inputs(1, 2, 70, 64)
        lengths = torch.tensor([50], dtype=torch.int32)
        results = []
        for backend in ("triton", "reference"):
            output, lse = lowbit_attn.attention(*x, recipe=recipe, is_causal=True, causal_align="bottom_right", key_lengths=lengths,
                                                return_lse=True, backend=backend)
            loss = output.square().sum() + lse.nan_to_num(neginf=0).sum()
            results.append((output, lse.nan_to_num(neginf=0), *torch.autograd.grad(loss, x)))
        for found, wanted in zip(*results, strict=True):
            assert relative_error(found, wanted) < BOUND

    @pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8"])
    def test_packed(self, gpu, recipe):
        x, cu = inputs(100, 2, 64), boundaries(0, 30, 90)
        results = []
        for backend in ("triton", "reference"):
            output = lowbit_attn.varlen_attention(*x, cu, cu, 90, 90, recipe=recipe, is_causal=True, backend=backend)
            results.append((output, *torch.autograd.grad(output.square().sum(), x)))
        for found, wanted in zip(*results, strict=True):
            assert relative_error(found, wanted) < BOUND

    @pytest.mark.parametrize("recipe", ["fused_mxfp6", "fused_mxfp4", "mxfp4_ocp"])
    def test_recipes_for_inference(self, gpu, recipe):
        query, key, value = (x.detach() for x in inputs(2, 2, 70, 64))
        lengths, cu = torch.tensor([70, 40], dtype=torch.int32), boundaries(0, 30, 65)
        packed = [x[0].transpose(0, 1) for x in (query, key, value)]
        results = []
        for backend in ("triton", "reference"):
            output, lse = lowbit_attn.attention(query, key[:, :1], value[:, :1], recipe=recipe, enable_gqa=True,
                                                key_lengths=lengths, return_lse=True, backend=backend)
            results.append((output, lse, lowbit_attn.varlen_attention(*packed, cu, cu, 35, 35, recipe=recipe, backend=backend)))
        for found, wanted in zip(*results, strict=True):
            assert relative_error(found, wanted) < BOUND
        with pytest.raises(ValueError, match="is_causal: got True"):
            lowbit_attn.attention(query, key, value, recipe="fused_mxfp6", is_causal=True, backend="triton")

    def test_it_is_the_default(self, gpu):
        x = [y.detach() for y in inputs(1, 2, 40, 64)]
        dispatch._warn_once.cache_clear()
        with pytest.warns(lowbit_attn.ops.LowbitFallbackWarning, match="runs backend 'triton', emulated"):
            output = lowbit_attn.attention(*x)
        assert torch.equal(output, lowbit_attn.attention(*x, backend="triton"))

    def test_empty_tensors(self, gpu):
        for shape in ((0, 2, 8, 64), (1, 2, 0, 64)):
            x = inputs(*shape)
            output = lowbit_attn.attention(*x, backend="triton")
            assert output.shape == shape
            assert all(not grad.any() for grad in torch.autograd.grad(output.sum(), x))
        query, key = torch.zeros(1, 2, 8, 64), torch.zeros(1, 2, 0, 64)
        output, lse = lowbit_attn.attention(query, key, key, backend="triton", return_lse=True)
        assert not output.any()
        assert lse.isneginf().all()
