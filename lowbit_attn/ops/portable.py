"""The operators on backend "triton"; imports the kernels, and Triton, when it is first called."""

import torch
from torch import Tensor

from lowbit_attn.ops.saved import empty_saved, saved_inputs
from lowbit_attn.recipes import Recipe


def forward(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, scale: float | None, is_causal: bool, save: bool,
            bottom_right: bool = False, key_lengths: Tensor | None = None,
            cu_seq: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
    """Output, lse and the seven tensors of `ops.saved`, for [B, S, H, D] or, with `cu_seq`, packed [T, H, D]."""
    from lowbit_attn.kernels.portable import attention

    prepared = attention.prepare(query, key, value, recipe, scale=scale, is_causal=is_causal, bottom_right=bottom_right,
                                 key_lengths=key_lengths, cu_seq=cu_seq, save=save)
    if save and recipe.saves_codes:
        codes = attention.saved_for_backward(prepared)
        return (*attention.run(prepared), *codes, torch.full_like(codes[1], 127))
    saved = saved_inputs(query, key, value, recipe) if save else empty_saved(query, key, value, recipe, False)
    return (*attention.run(prepared), *saved)


def backward(grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, saved: list[Tensor], recipe: Recipe, *,
             scale: float | None, is_causal: bool, bottom_right: bool = False, key_lengths: Tensor | None = None,
             cu_seq: tuple[Tensor, Tensor] | None = None, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in grad_output's dtype, from what a forward of any backend returned; always
    reproducible bit for bit."""
    from lowbit_attn.kernels.portable import backward as kernels

    return kernels.backward(grad_output, grad_lse, output, lse, saved, recipe, scale=scale, is_causal=is_causal,
                            bottom_right=bottom_right, key_lengths=key_lengths, cu_seq=cu_seq)
