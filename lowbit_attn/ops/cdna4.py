"""The operators' forward on backend "cdna4"; imports the kernels, and loads HIP, when it is first called."""

from torch import Tensor

from lowbit_attn.ops.saved import empty_saved, saved_inputs
from lowbit_attn.recipes import Recipe


def forward(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, scale: float | None, save: bool,
            key_lengths: Tensor | None = None, cu_seq: tuple[Tensor, Tensor] | None = None,
            longest: tuple[int, int] | None = None) -> tuple[Tensor, ...]:
    """Output, lse and the seven tensors of `ops.saved`, for [B, S, H, D] or, with `cu_seq` and `longest`, packed [T, H, D]."""
    from lowbit_attn.kernels.cdna4 import forward as kernels
    from lowbit_attn.kernels.cdna4 import loader

    output, lse = kernels.forward(query, key, value, recipe, loader.run, scale=scale, key_lengths=key_lengths, cu_seq=cu_seq,
                                  longest=longest)
    saved = saved_inputs(query, key, value, recipe) if save else empty_saved(query, key, value, recipe, False)
    return (output, lse, *saved)
