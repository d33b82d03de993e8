"""torch.compile sees ordinary operators: one full graph for every batch and sequence size, equal to eager bit for bit."""

import pytest
import torch
from oracle import boundaries
from torch._dynamo.testing import CompileCounterWithBackend

from lowbit_attn import RECIPES, attention, varlen_attention

# Sizes that differ from one another and from heads and head_dim: torch takes equal sizes for one symbol.
SIZES = [(3, 33), (6, 70), (5, 2), (2, 300)]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(*lead, requires_grad=True, dtype=torch.bfloat16):
    """Query of 8 heads, key and value of 4, head_dim 16: [*lead[:1], H, *lead[1:], 16]."""
    return [torch.randn(*lead[:1], heads, *lead[1:], 16).to(dtype).requires_grad_(requires_grad) for heads in (8, 4, 4)]


def packed_tensors(tokens):
    return [torch.randn(tokens, heads, 16, requires_grad=True) for heads in (8, 4, 4)]


def assert_equal(function, compiled, arguments, *rest):
    """Outputs, strides and gradients of the compiled function are eager's."""
    twins = [x.detach().clone().requires_grad_(x.requires_grad) for x in arguments]
    actual, expected = compiled(*arguments, *rest), function(*twins, *rest)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
        assert a.stride() == e.stride()
    grads = [torch.randn_like(x) for x in expected]
    torch.autograd.backward(actual, grads)
    torch.autograd.backward(expected, grads)
    for a, e in zip(arguments, twins, strict=True):
        assert torch.equal(a.grad, e.grad)


def dense(query, key, value):
    return attention(query, key, value, is_causal=True, enable_gqa=True, return_lse=True, backend="reference")


def packed(query, key, value, cu_seq, longest):
    return varlen_attention(query, key, value, cu_seq, cu_seq, longest, longest, is_causal=True, enable_gqa=True,
                            return_lse=True, backend="reference")


class TestOneGraph:
    def test_dense(self):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(dense, fullgraph=True, backend=counter, dynamic=True)
        for batch, tokens in SIZES:
            assert_equal(dense, compiled, tensors(batch, tokens))
        assert counter.frame_count == 1

    def test_dense_with_marked_dimensions(self):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(dense, fullgraph=True, backend=counter)
        for batch, tokens in SIZES:
            arguments = tensors(batch, tokens)
            for x in arguments:
                torch._dynamo.mark_dynamic(x, (0, 2))
            assert_equal(dense, compiled, arguments)
        assert counter.frame_count == 1

    def test_varlen(self):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(packed, fullgraph=True, backend=counter, dynamic=True)
        for tokens, cu_seq in ((50, (0, 7, 7, 9, 30)), (64, (0, 64)), (77, (0, 1, 2, 3, 9, 70))):
            assert_equal(packed, compiled, packed_tensors(tokens), boundaries(*cu_seq), tokens)
        assert counter.frame_count == 1

    def test_key_lengths(self):
        counter = CompileCounterWithBackend("aot_eager")

        def masked(query, key, value, key_lengths):
            return attention(query, key, value, key_lengths=key_lengths, enable_gqa=True, return_lse=True, backend="reference")

        compiled = torch.compile(masked, fullgraph=True, backend=counter, dynamic=True)
        for batch, tokens in SIZES:
            lengths = torch.arange(batch, dtype=torch.int32) * tokens // batch
            assert_equal(masked, compiled, tensors(batch, tokens), lengths)
        assert counter.frame_count == 1


@pytest.mark.parametrize("options", [
    {"recipe": "bf16"}, {"recipe": RECIPES["mxfp8"]}, {"recipe": "mxfp8:causal_safety=exact", "is_causal": True}, {"scale": 0.3},
    {"recipe": "nvfp4_fp8"}, {"deterministic": True},
], ids=["bf16", "Recipe", "option", "scale", "saves inputs", "deterministic"])
def test_every_option_traces_into_one_graph(options):
    options = options if options.get("recipe") == "bf16" else {**options, "backend": "reference"}

    def function(query, key, value):
        return [attention(query, key, value, enable_gqa=True, **options)]

    assert_equal(function, torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True), tensors(3, 20))


def test_inference_recipes_compile_without_grad():
    query, key, value = tensors(3, 20, requires_grad=False)

    def function(*rows):
        return attention(*rows, recipe="fused_mxfp4", enable_gqa=True, backend="reference")

    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(query, key, value), function(query, key, value))


def test_bf16_packed_and_masked_compile():
    def function(query, key, value, cu_seq):
        return [varlen_attention(query, key, value, cu_seq, cu_seq, 20, 20, recipe="bf16", enable_gqa=True, is_causal=True)]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_equal(function, compiled, packed_tensors(20), boundaries(0, 5, 5, 18))


def test_inductor_equals_eager():
    # Fake strides that differ from the real ones show here as noise: inductor plans memory by them.
    def function(query, key, value):
        output, lse = dense(query * 2, key, value)
        return output.transpose(1, 2).flatten(2), lse + 1

    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    try:
        assert_equal(function, compiled, tensors(3, 33, dtype=torch.float32))
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"inductor has no working C++ compiler here: {error}")
