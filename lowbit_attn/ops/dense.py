"""torch.ops.lowbit_attn.attention_forward / attention_backward: batched attention on [B, S, H, D] tensors."""

from typing import Any

import torch
from torch import Tensor

from lowbit_attn.ops import cdna4, hopper, portable, validation
from lowbit_attn.ops.dispatch import backward_backend, require_backend
from lowbit_attn.ops.registration import (
    refuse_double_backward,
    refuse_forward_mode_and_func,
    refuse_vmap,
    register_autocast,
)
from lowbit_attn.ops.saved import empty_saved, flatten_saved, unflatten_saved
from lowbit_attn.recipes import Recipe, resolve
from lowbit_attn.reference import Visibility, backward, forward

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def require_trainable(recipe: Recipe) -> None:
    """Inference-only recipes refuse inputs that require grad, in the forward."""
    refusal = recipe.training_refusal
    if refusal:
        raise ValueError(f"recipe: got {recipe.canonical!r}, which is for inference only, with inputs that require grad "
                         f"({refusal}); accepted: a recipe that trains (mxfp8 for one), or torch.no_grad()")


def require_causal(recipe: Recipe, is_causal: bool) -> None:
    """Recipes whose scales would leak refuse a causal mask."""
    if is_causal and not recipe.causal:
        raise ValueError(f"is_causal: got True with recipe {recipe.canonical!r}, whose scales or maximum would leak later "
                         "tokens; accepted: False, or a causal recipe (mxfp8)")


def _check(query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor | None, recipe: Recipe, is_causal: bool) -> None:
    validation.check_tensors(query, key, value, "BSHD")
    require_causal(recipe, is_causal)
    if key_lengths is not None:
        validation.check_index("key_lengths", key_lengths, query.shape[0], query.device)


def _visibility(query: Tensor, keys: int, key_lengths: Tensor | None, is_causal: bool, bottom_right: bool) -> Visibility:
    return Visibility.create(query.shape[0], query.shape[1], keys, is_causal=is_causal, bottom_right=bottom_right,
                             key_lengths=key_lengths, device=query.device)


@torch.library.custom_op("lowbit_attn::attention_forward", mutates_args=())
def attention_forward(query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor | None, recipe: str, is_causal: bool,
                      bottom_right: bool, scale: float | None, save: bool, deterministic: bool, backend: str,
                      seed: Tensor | None = None) -> Outputs:
    """Attention of query [B, Sq, Hq, D] over key, value [B, Sk, Hkv, D]; any strides.

    Returns output (query's shape and dtype, contiguous), lse [B, Hq, Sq] float32, and the seven tensors of `ops.saved`
    (empty unless `save`). `recipe` is canonical text, `backend` a concrete name, `seed` an int64 scalar for the stochastic
    rounding of the backward (recipes with ds_stochastic).
    """
    parsed = resolve(recipe)
    _check(query, key, value, key_lengths, parsed, is_causal)
    if key_lengths is not None:
        validation.check_key_lengths_values(key_lengths, key.shape[1])
    require_backend(backend)
    if backend == "cdna4":   # no recipe that it computes is causal
        return cdna4.forward(query, key, value, parsed, scale=scale, save=save,  # type: ignore[return-value]
                             key_lengths=key_lengths)
    if backend != "reference":
        kernels = {"hopper": hopper.forward, "triton": portable.forward}[backend]
        return kernels(query, key, value, parsed, scale=scale, is_causal=is_causal, save=save,  # type: ignore[return-value]
                       bottom_right=bottom_right, key_lengths=key_lengths)
    visibility = _visibility(query, key.shape[1], key_lengths, is_causal, bottom_right)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    result = forward(q, k, v, parsed, visibility, scale=scale, save=save)
    output = query.new_empty(query.shape).copy_(result.output.transpose(1, 2))
    saved = flatten_saved(result.saved, packed=False) if result.saved else empty_saved(query, key, value, parsed, False)
    return (output, result.lse.contiguous(), *saved)  # type: ignore[return-value]


@attention_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor | None, recipe: str, is_causal: bool, bottom_right: bool,
      scale: float | None, save: bool, deterministic: bool, backend: str, seed: Tensor | None = None) -> Outputs:
    parsed = resolve(recipe)
    _check(query, key, value, key_lengths, parsed, is_causal)
    lse = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=torch.float32)
    return (query.new_empty(query.shape), lse, *empty_saved(query, key, value, parsed, save))  # type: ignore[return-value]


@torch.library.custom_op("lowbit_attn::attention_backward", mutates_args=())
def attention_backward(grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, q_codes: Tensor,
                       q_scales: Tensor, k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor, row_top: Tensor,
                       key_lengths: Tensor | None, recipe: str, is_causal: bool, bottom_right: bool, scale: float | None,
                       deterministic: bool, backend: str,
                       seed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, [B, S, H, D] in grad_output's dtype, from what the forward returned."""
    parsed = resolve(recipe)
    tensors = [q_codes, q_scales, k_codes, k_scales, v_codes, v_scales, row_top]
    if (chosen := backward_backend(parsed, backend, q_codes.shape[-1], q_codes.device)) != "reference":
        kernels = {"hopper": hopper.backward, "triton": portable.backward}[chosen]
        return kernels(grad_output, grad_lse, output, lse, tensors, parsed, scale=scale, is_causal=is_causal,
                       bottom_right=bottom_right, key_lengths=key_lengths, deterministic=deterministic)
    saved = unflatten_saved(tensors, parsed, packed=False)
    visibility = _visibility(output, k_codes.shape[1], key_lengths, is_causal, bottom_right)
    grads = backward(grad_output.transpose(1, 2), grad_lse, saved, output.transpose(1, 2), lse, parsed, visibility, scale=scale,
                     seed=seed)
    return tuple(g.new_empty((g.shape[0], g.shape[2], g.shape[1], g.shape[3]), dtype=grad_output.dtype)  # type: ignore[return-value]
                 .copy_(g.transpose(1, 2)) for g in (grads.query, grads.key, grads.value))


@attention_backward.register_fake
def _(grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, q_codes: Tensor, q_scales: Tensor,
      k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor, row_top: Tensor, key_lengths: Tensor | None,
      recipe: str, is_causal: bool, bottom_right: bool, scale: float | None, deterministic: bool,
      backend: str, seed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(grad_output.new_empty(x.shape) for x in (q_codes, k_codes, v_codes))  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple, output: Outputs) -> None:
    _, _, _, key_lengths, recipe, is_causal, bottom_right, scale, save, deterministic, backend, seed = inputs
    require_trainable(resolve(recipe))
    if not save:
        raise ValueError("save: got False with inputs that require grad; accepted: True")
    ctx.save_for_backward(*output, key_lengths, seed)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.options = (recipe, is_causal, bottom_right, scale, deterministic, backend)


def _backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple:
    *output, key_lengths, seed = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output[0])
    grads = attention_backward(grad_output, grad_lse, *output, key_lengths, *ctx.options, seed)
    return (*grads, *[None] * 9)


attention_forward.register_autograd(_backward, setup_context=_setup_context)
refuse_double_backward(attention_backward)
register_autocast(attention_forward)
refuse_forward_mode_and_func(attention_forward)
refuse_vmap(attention_forward)
