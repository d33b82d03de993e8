"""torch.ops.lowbit_attn.varlen_attention_forward / _backward: attention on packed documents, [T, H, D] tensors."""

from typing import Any

import torch
from torch import Tensor

from lowbit_attn.ops import cdna4, hopper, portable, validation
from lowbit_attn.ops.dense import Outputs, require_causal, require_trainable
from lowbit_attn.ops.dispatch import backward_backend, require_backend
from lowbit_attn.ops.registration import (
    refuse_double_backward,
    refuse_forward_mode_and_func,
    refuse_vmap,
    register_autocast,
)
from lowbit_attn.ops.saved import empty_saved, flatten_saved, unflatten_saved
from lowbit_attn.recipes import Recipe, resolve
from lowbit_attn.reference import varlen_backward, varlen_forward


def _check(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, recipe: Recipe,
           is_causal: bool) -> None:
    validation.check_tensors(query, key, value, "THD")
    validation.check_cu_seq(cu_seq_q, cu_seq_k, query.device)
    require_causal(recipe, is_causal)


@torch.library.custom_op("lowbit_attn::varlen_attention_forward", mutates_args=())
def varlen_attention_forward(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
                             max_k: int, recipe: str, is_causal: bool, scale: float | None, save: bool, deterministic: bool,
                             backend: str, seed: Tensor | None = None) -> Outputs:
    """Attention inside each document of packed query [Tq, Hq, D], key and value [Tk, Hkv, D]; any strides.

    Document n holds rows cu_seq[n]:cu_seq[n+1] (int32). Causal masks align bottom-right per document. Returns output
    (query's shape and dtype), lse [Hq, Tq] float32 and the seven tensors of `ops.saved`; rows of no document are zero. `seed`
    as in `attention_forward`.
    """
    parsed = resolve(recipe)
    _check(query, key, value, cu_seq_q, cu_seq_k, parsed, is_causal)
    validation.check_cu_seq_values("cu_seq_q", cu_seq_q, query.shape[0], max_q)
    validation.check_cu_seq_values("cu_seq_k", cu_seq_k, key.shape[0], max_k)
    require_backend(backend)
    if backend == "cdna4":
        return cdna4.forward(query, key, value, parsed, scale=scale, save=save,  # type: ignore[return-value]
                             cu_seq=(cu_seq_q, cu_seq_k), longest=(max_q, max_k))
    if backend != "reference":
        kernels = {"hopper": hopper.forward, "triton": portable.forward}[backend]
        return kernels(query, key, value, parsed, scale=scale, is_causal=is_causal, save=save,  # type: ignore[return-value]
                       cu_seq=(cu_seq_q, cu_seq_k))
    result = varlen_forward(query, key, value, cu_seq_q, cu_seq_k, parsed, is_causal=is_causal, scale=scale, save=save)
    saved = flatten_saved(result.saved, packed=True) if result.saved else empty_saved(query, key, value, parsed, False)
    return (result.output.to(query.dtype).contiguous(), result.lse.contiguous(), *saved)  # type: ignore[return-value]


@varlen_attention_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, recipe: str,
      is_causal: bool, scale: float | None, save: bool, deterministic: bool, backend: str,
      seed: Tensor | None = None) -> Outputs:
    parsed = resolve(recipe)
    _check(query, key, value, cu_seq_q, cu_seq_k, parsed, is_causal)
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return (query.new_empty(query.shape), lse, *empty_saved(query, key, value, parsed, save))  # type: ignore[return-value]


@torch.library.custom_op("lowbit_attn::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, q_codes: Tensor,
                              q_scales: Tensor, k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor,
                              row_top: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, recipe: str,
                              is_causal: bool, scale: float | None, deterministic: bool, backend: str,
                       seed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of packed query, key and value in grad_output's dtype, from what the forward returned."""
    parsed = resolve(recipe)
    tensors = [q_codes, q_scales, k_codes, k_scales, v_codes, v_scales, row_top]
    if (chosen := backward_backend(parsed, backend, q_codes.shape[-1], q_codes.device)) != "reference":
        kernels = {"hopper": hopper.backward, "triton": portable.backward}[chosen]
        return kernels(grad_output, grad_lse, output, lse, tensors, parsed, scale=scale, is_causal=is_causal,
                       cu_seq=(cu_seq_q, cu_seq_k), deterministic=deterministic)
    saved = unflatten_saved(tensors, parsed, packed=True)
    grads = varlen_backward(grad_output, grad_lse, saved, output, lse, cu_seq_q, cu_seq_k, parsed, is_causal=is_causal,
                            scale=scale, seed=seed)
    narrow = (g.to(grad_output.dtype).contiguous() for g in (grads.query, grads.key, grads.value))
    return tuple(narrow)  # type: ignore[return-value]


@varlen_attention_backward.register_fake
def _(grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, q_codes: Tensor, q_scales: Tensor,
      k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor, row_top: Tensor, cu_seq_q: Tensor,
      cu_seq_k: Tensor, max_q: int, max_k: int, recipe: str, is_causal: bool, scale: float | None, deterministic: bool,
      backend: str, seed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(grad_output.new_empty(x.shape) for x in (q_codes, k_codes, v_codes))  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple, output: Outputs) -> None:
    _, _, _, cu_seq_q, cu_seq_k, max_q, max_k, recipe, is_causal, scale, save, deterministic, backend, seed = inputs
    require_trainable(resolve(recipe))
    if not save:
        raise ValueError("save: got False with inputs that require grad; accepted: True")
    ctx.save_for_backward(*output, cu_seq_q, cu_seq_k, seed)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.options = (max_q, max_k, recipe, is_causal, scale, deterministic, backend)


def _backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple:
    *saved, seed = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(saved[0])
    grads = varlen_attention_backward(grad_output, grad_lse, *saved, *ctx.options, seed)
    return (*grads, *[None] * 11)


varlen_attention_forward.register_autograd(_backward, setup_context=_setup_context)
refuse_double_backward(varlen_attention_backward)
register_autocast(varlen_attention_forward)
refuse_forward_mode_and_func(varlen_attention_forward)
refuse_vmap(varlen_attention_forward)
