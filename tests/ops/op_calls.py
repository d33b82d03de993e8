"""Arguments for calling the operators directly, in every memory layout that callers use."""

import torch
from oracle import boundaries

import lowbit_attn.ops  # noqa: F401  (registers the operators)

OPS = torch.ops.lowbit_attn
LAYOUTS = ["contiguous", "transposed", "fused qkv", "offset", "every second", "expanded"]


def laid_out(shape, dtype, layout):
    """Random values of `shape` with the strides that `layout` names."""
    if layout == "contiguous":
        return torch.randn(shape).to(dtype)
    if layout == "transposed":
        order = [*range(len(shape) - 3), -2, -3, -1]
        return torch.randn([shape[i] for i in order]).to(dtype).transpose(-2, -3)
    if layout == "fused qkv":
        return torch.randn(*shape[:-2], 3 * shape[-2], shape[-1]).to(dtype)[..., shape[-2]:2 * shape[-2], :]
    if layout == "offset":
        return torch.randn(shape[0], shape[1] + 3, *shape[2:]).to(dtype)[:, 3:]
    if layout == "every second":
        return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]
    if layout == "expanded":
        return torch.randn(*shape[:-2], 1, shape[-1]).to(dtype).expand(shape)
    raise ValueError(layout)


def dense(batch=2, queries=33, keys=40, heads=4, kv_heads=2, channels=16, *, dtype=torch.bfloat16, layout="contiguous",
          recipe="mxfp8", is_causal=True, key_lengths=None, save=True, requires_grad=False):
    """Arguments of attention_forward."""
    shapes = [(batch, queries, heads, channels), (batch, keys, kv_heads, channels), (batch, keys, kv_heads, channels)]
    tensors = [laid_out(s, dtype, layout).requires_grad_(requires_grad) for s in shapes]
    return [*tensors, key_lengths, recipe, is_causal, True, None, save, False, "reference", None]


def varlen(cu_q=(0, 15, 15, 33), cu_k=(0, 15, 15, 33), tail=4, heads=4, kv_heads=2, channels=16, *, dtype=torch.bfloat16,
           layout="contiguous", recipe="mxfp8", is_causal=True, save=True, requires_grad=False):
    """Arguments of varlen_attention_forward."""
    q_tokens, k_tokens = cu_q[-1] + tail, cu_k[-1] + tail
    shapes = [(q_tokens, heads, channels), (k_tokens, kv_heads, channels), (k_tokens, kv_heads, channels)]
    tensors = [laid_out(s, dtype, layout).requires_grad_(requires_grad) for s in shapes]
    return [*tensors, boundaries(*cu_q), boundaries(*cu_k), 1000, 1000, recipe, is_causal, None, save, False, "reference", None]


def dense_backward(arguments, grad_layout="contiguous", grad_lse=True):
    """Arguments of attention_backward for a forward's."""
    query, _, _, key_lengths, recipe, is_causal, bottom_right, scale, _, deterministic, backend, seed = arguments
    with torch.no_grad():
        outputs = OPS.attention_forward(*arguments)
    grad = laid_out(tuple(query.shape), query.dtype, grad_layout)
    return [grad, torch.randn_like(outputs[1]) if grad_lse else None, *outputs, key_lengths, recipe, is_causal, bottom_right,
            scale, deterministic, backend, seed]


def varlen_backward(arguments, grad_layout="contiguous", grad_lse=True):
    """Arguments of varlen_attention_backward for a forward's."""
    query, _, _, cu_q, cu_k, max_q, max_k, recipe, is_causal, scale, _, deterministic, backend, seed = arguments
    with torch.no_grad():
        outputs = OPS.varlen_attention_forward(*arguments)
    grad = laid_out(tuple(query.shape), query.dtype, grad_layout)
    return [grad, torch.randn_like(outputs[1]) if grad_lse else None, *outputs, cu_q, cu_k, max_q, max_k, recipe, is_causal,
            scale, deterministic, backend, seed]
