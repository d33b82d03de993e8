"""The tensors that a forward operator returns for its backward, in one layout for every backend.

Six tensors follow output and lse: for each of query, key and value its codes (uint8, the operand's own shape) and one
scale code per token and head ([B, H, S] or [H, T], uint8). Without a backward to come all six are empty. An operand that
is not coded (identity or bf16 formats) travels as float32 values with an empty scale.
"""

import torch
from torch import Tensor

from lowbit_attn.recipes import Operand, Recipe
from lowbit_attn.reference import Saved


def scale_shape(x: Tensor) -> tuple[int, ...]:
    """[B, S, H, D] -> [B, H, S]; [T, H, D] -> [H, T]."""
    *batch, tokens, heads, _ = x.shape
    return (*batch, heads, tokens)


def empty_saved(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, save: bool) -> list[Tensor]:
    """Uninitialized tensors of the right shapes and dtypes: what fakes return."""
    tensors = []
    for x, operand in ((query, recipe.qk), (key, recipe.qk), (value, recipe.v)):
        codes_dtype = torch.uint8 if operand.is_coded else torch.float32
        tensors.append(x.new_empty(x.shape if save else (0,), dtype=codes_dtype))
        tensors.append(x.new_empty(scale_shape(x) if save and operand.is_coded else (0,), dtype=torch.uint8))
    return tensors


def flatten_saved(saved: Saved, packed: bool) -> list[Tensor]:
    """The reference's Saved as six contiguous tensors; dense codes turn from [B, H, S, D] to [B, S, H, D]."""
    tensors = []
    for codes, scales in (saved.query, saved.key, saved.value):
        tensors.append((codes if packed else codes.transpose(1, 2)).contiguous())
        tensors.append(codes.new_empty(0, dtype=torch.uint8) if scales is None else scales.contiguous())
    return tensors


def unflatten_saved(tensors: list[Tensor], recipe: Recipe, packed: bool) -> Saved:
    """Inverse of `flatten_saved`."""

    def operand(codes: Tensor, scales: Tensor, fmt: Operand) -> tuple[Tensor, Tensor | None]:
        return (codes if packed else codes.transpose(1, 2)), scales if fmt.is_coded else None

    formats = (recipe.qk, recipe.qk, recipe.v)
    return Saved(*(operand(tensors[2 * i], tensors[2 * i + 1], fmt) for i, fmt in enumerate(formats)))
