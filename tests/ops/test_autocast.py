"""Under autocast the operators take the autocast dtype, as torch SDPA does."""

import pytest
import torch
from oracle import boundaries

from lowbit_attn import attention, varlen_attention


def dense(query, key, value, **options):
    return attention(query, key, value, **{"backend": "reference", **options})


def packed(query, key, value, **options):
    cu_seq = boundaries(0, 15, 15, 33)
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attention(*rows, cu_seq, cu_seq, 40, 40, **{"backend": "reference", **options})


def tensors(dtype=torch.float32):
    return [torch.randn(1, 4, 40, 16).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("call", [dense, packed])
class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_equals_casting_by_hand(self, call, dtype):
        inputs = tensors()
        with torch.autocast("cpu", dtype):
            output, lse = call(*inputs, return_lse=True)
        expected, expected_lse = call(*(x.to(dtype) for x in inputs), return_lse=True)
        assert output.dtype == dtype
        assert lse.dtype == torch.float32
        assert torch.equal(output, expected)
        assert torch.equal(lse, expected_lse)

    def test_gradients_come_back_in_the_parameters_dtype(self, call):
        inputs = tensors()
        with torch.autocast("cpu", torch.bfloat16):
            output = call(*inputs)
        output.sum().backward()
        twin = [x.detach().clone().requires_grad_() for x in inputs]
        call(*(x.bfloat16() for x in twin)).sum().backward()
        for x, t in zip(inputs, twin, strict=True):
            assert x.grad.dtype == torch.float32
            assert torch.equal(x.grad, t.grad)

    @pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
    def test_mixed_dtypes_are_unified_by_autocast_only(self, call, recipe):
        # A normalization that autocast keeps in float32 hands over such a mixture.
        options = {"recipe": recipe, "backend": None if recipe == "bf16" else "reference"}
        query, key, value = tensors()
        with torch.autocast("cpu", torch.bfloat16):
            output = call(query.bfloat16(), key, value.bfloat16(), **options)
            assert torch.equal(output, call(query, key, value, **options))
        with pytest.raises(TypeError, match="key: got dtype"):
            call(query.bfloat16(), key, value.bfloat16(), **options)

    def test_disabled_autocast_changes_nothing(self, call):
        inputs = tensors()
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            assert torch.equal(call(*inputs), call(*inputs))
            assert call(*inputs).dtype == torch.float32

    def test_compiled_autocast_equals_eager(self, call):
        torch._dynamo.reset()
        inputs = tensors()

        def function(*rows):
            with torch.autocast("cpu", torch.bfloat16):
                return call(*rows)

        assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), function(*inputs))
