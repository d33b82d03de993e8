"""The tensors that a forward operator returns for its backward, in one layout for every backend.

Seven tensors follow output and lse: for each of query, key and value its codes (uint8, the operand's own shape) and one
scale code per token and head ([B, H, S] or [H, T], uint8); then `row_top` (uint8, as the query's scales), from which a
backward knows how large a row of dS can be: up to a half the E8M0 code of a bound on the query's largest probability, and
127 + k if that is over half and all the others are at most 2^-k in sum. Backends whose backward does not read it return
127. Recipes that do not save codes (`Recipe.saves_codes`) return copies of the inputs instead, with empty scales and
row_top. Without a backward to come all seven are empty.
"""

import torch
from torch import Tensor

from lowbit_attn.recipes import Recipe
from lowbit_attn.reference import Coded, Saved


def scale_shape(x: Tensor) -> tuple[int, ...]:
    """[B, S, H, D] -> [B, H, S]; [T, H, D] -> [H, T]."""
    *batch, tokens, heads, _ = x.shape
    return (*batch, heads, tokens)


def empty_saved(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, save: bool) -> list[Tensor]:
    """Uninitialized tensors of the right shapes and dtypes: what fakes return."""
    tensors = []
    for x in (query, key, value):
        tensors.append(x.new_empty(x.shape if save else (0,), dtype=torch.uint8 if recipe.saves_codes else x.dtype))
        tensors.append(x.new_empty(scale_shape(x) if save and recipe.saves_codes else (0,), dtype=torch.uint8))
    tensors.append(torch.empty_like(tensors[1]))
    return tensors


def saved_inputs(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe) -> list[Tensor]:
    """What a recipe that saves no codes saves: fresh contiguous copies of the inputs."""
    tensors = empty_saved(query, key, value, recipe, True)
    for copy, x in zip(tensors[:6:2], (query, key, value), strict=True):
        copy.copy_(x)
    return tensors


def flatten_saved(saved: Saved, packed: bool) -> list[Tensor]:
    """The reference's Saved as seven fresh contiguous tensors; dense ones turn from [B, H, S, D] to [B, S, H, D]."""
    tensors = []
    for x in (saved.query, saved.key, saved.value):
        values = x.codes if isinstance(x, Coded) else x
        values = values if packed else values.transpose(1, 2)
        tensors.append(values.clone(memory_format=torch.contiguous_format))
        tensors.append(x.scales.contiguous() if isinstance(x, Coded) else values.new_empty(0, dtype=torch.uint8))
    tensors.append(torch.empty_like(tensors[1]) if saved.row_top is None else saved.row_top.contiguous())
    return tensors


def unflatten_saved(tensors: list[Tensor], recipe: Recipe, packed: bool) -> Saved:
    """Inverse of `flatten_saved`."""

    def operand(values: Tensor, scales: Tensor) -> Coded | Tensor:
        values = values if packed else values.transpose(1, 2)
        return Coded(values, scales) if recipe.saves_codes else values

    query, key, value = (operand(tensors[i], tensors[i + 1]) for i in (0, 2, 4))
    return Saved(query, key, value, tensors[6] if recipe.saves_codes else None)
