"""The operators on backend "hopper"; imports the kernels, and Triton, when it is first called."""

from typing import Any

import torch
from torch import Tensor

from lowbit_attn.ops.saved import empty_saved, saved_inputs
from lowbit_attn.recipes import Recipe


def host(recipe: Recipe) -> Any:
    """The host side of the kernels that compute a recipe: a module with `prepare` and `run`."""
    from lowbit_attn.kernels.hopper import attention, block_attention, nvfp4_attention

    if recipe.qk.layout.startswith("nvfp16"):
        return nvfp4_attention
    return block_attention if recipe.qk.layout == "mx32" else attention


def forward(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, scale: float | None, is_causal: bool, save: bool,
            bottom_right: bool = False, key_lengths: Tensor | None = None,
            cu_seq: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
    """Output, lse and the seven tensors of `ops.saved`, for [B, S, H, D] or, with `cu_seq`, packed [T, H, D]."""
    from lowbit_attn.kernels.hopper import attention

    kernels = host(recipe)
    codes = save and recipe.saves_codes
    prepared = kernels.prepare(query, key, value, recipe, scale=scale, is_causal=is_causal, bottom_right=bottom_right,
                               key_lengths=key_lengths, cu_seq=cu_seq, save=codes)
    output, lse, *row_top = kernels.run(prepared)
    if not codes:
        saved = saved_inputs(query, key, value, recipe) if save else empty_saved(query, key, value, recipe, False)
        return (output, lse, *saved)
    coded = attention.saved_for_backward(prepared)
    return (output, lse, *coded, *(row_top or [torch.full_like(coded[1], 127)]))  # recipes for inference know no row_top


def backward_refusal(recipe: Recipe, head_dim: int) -> str | None:
    """Why the kernels have no backward for a recipe whose forward they run, or None if they have one."""
    from lowbit_attn.kernels.hopper import backward

    if not recipe.saves_codes:
        return f"its kernels read saved codes; {recipe.canonical} saves the inputs"
    return backward.refusal(recipe, head_dim)


def backward(grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, saved: list[Tensor], recipe: Recipe, *,
             scale: float | None, is_causal: bool, bottom_right: bool = False, key_lengths: Tensor | None = None,
             cu_seq: tuple[Tensor, Tensor] | None = None, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from dO, output, lse and the seven tensors of `ops.saved`."""
    from lowbit_attn.kernels.hopper import backward

    return backward.backward(grad_output, grad_lse, output, lse, backward.Saved(*saved), recipe, scale=scale, is_causal=is_causal,
                             bottom_right=bottom_right, key_lengths=key_lengths, cu_seq=cu_seq, deterministic=deterministic)
