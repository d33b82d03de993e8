"""Activation checkpointing: a policy can save our operator's outputs, and saving them is smaller than saving bf16 tensors."""

from functools import partial

import pytest
import torch
from oracle import boundaries
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowbit_attn import attention, varlen_attention

OPS = torch.ops.lowbit_attn
FORWARDS = (OPS.attention_forward.default, OPS.varlen_attention_forward.default)
BACKWARDS = (OPS.attention_backward.default, OPS.varlen_attention_backward.default)


class CallCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.forwards = self.backwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forwards += func in FORWARDS
        self.backwards += func in BACKWARDS
        return func(*args, **(kwargs or {}))


def dense(x):
    query, key, value = x.unflatten(-1, (3, 4, 16)).transpose(1, 3).unbind(2)
    return attention(query, key, value, is_causal=True, backend="reference")


def packed(x):
    query, key, value = x[0].unflatten(-1, (3, 4, 16)).unbind(1)
    cu_seq = boundaries(0, 9, 9, 40)
    return varlen_attention(query, key, value, cu_seq, cu_seq, 40, 40, is_causal=True, backend="reference")


def save_ours(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in FORWARDS else CheckpointPolicy.PREFER_RECOMPUTE


def run(function, **checkpointing):
    """Calls of our operators in a forward and backward, and the input's gradient."""
    x = torch.randn(2, 40, 3 * 4 * 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with CallCounter() as counter:
        output = checkpoint(function, x * 1.5, use_reentrant=False, **checkpointing) if checkpointing else function(x * 1.5)
        output.square().sum().backward()
    return counter.forwards, counter.backwards, x.grad


SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, save_ours)}
FULL = {"determinism_check": "default"}


@pytest.mark.parametrize("function", [dense, packed])
class TestOperatorCalls:
    def test_a_policy_that_saves_ours_never_recomputes_it(self, function):
        forwards, backwards, grad = run(function, **SELECTIVE)
        assert (forwards, backwards) == (1, 1)
        assert torch.equal(grad, run(function)[2])

    def test_full_checkpointing_recomputes_it_once(self, function):
        forwards, backwards, grad = run(function, **FULL)
        assert (forwards, backwards) == (2, 1)
        assert torch.equal(grad, run(function)[2])

    def test_the_same_under_compile(self, function):
        torch._dynamo.reset()
        for checkpointing in (SELECTIVE, FULL):
            compiled = torch.compile(lambda x, c=checkpointing: checkpoint(function, x, use_reentrant=False, **c),
                                     backend="aot_eager", fullgraph=True)
            x = torch.randn(2, 40, 3 * 4 * 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
            compiled(x * 1.5).square().sum().backward()
            assert torch.equal(x.grad, run(function)[2])


def test_a_list_of_operators_is_a_policy_too():
    context = partial(create_selective_checkpoint_contexts, list(FORWARDS))
    assert run(dense, context_fn=context)[:2] == (1, 1)


@pytest.mark.parametrize(("heads", "kv_heads", "channels"), [(8, 8, 64), (8, 8, 128)])
def test_what_the_backward_keeps_is_at_most_three_quarters_of_bf16(heads, kv_heads, channels):
    query, key, value = (torch.randn(1, 64, h, channels).bfloat16().transpose(1, 2).requires_grad_()
                         for h in (heads, kv_heads, kv_heads))
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output, lse = attention(query, key, value, is_causal=True, return_lse=True, backend="reference")
    bf16 = sum(2 * x.numel() for x in (query, key, value, output)) + 4 * lse.numel()
    assert sum(kept.values()) <= 0.75 * bf16
    output.sum().backward()


def test_nothing_is_kept_without_grad():
    arguments = [torch.randn(1, 40, 2, 16) for _ in range(3)]
    outputs = OPS.attention_forward(*arguments, None, "mxfp8", True, False, None, False, False, "reference")
    assert all(x.numel() == 0 for x in outputs[2:])
