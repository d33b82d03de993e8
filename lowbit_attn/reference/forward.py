"""Attention forward of any recipe in plain PyTorch: the specification that kernels must equal.

Sources: FLAMIA sections 3.1-3.4, B.1; Fused-Softmax algorithm 1; MXAttention algorithm 2. Tiled over keys as the kernels
are (`Recipe.key_tile`), chunked over rows so that memory is linear in the sequence. Runs on any device; float64 inputs
are computed in float64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.recipes import Recipe
from lowbit_attn.reference.masks import Visibility, row_chunks
from lowbit_attn.reference.operands import (
    Saved,
    load_operand,
    round_operand,
    save_operand,
    score_factor,
    value_axis,
    working_qk,
)
from lowbit_attn.reference.softmax import RowState, Stats


@dataclass(frozen=True)
class Forward:
    """output [N, Hq, Sq, D] float32 (float64), lse [N, Hq, Sq] natural log (-inf for a row that sees no key)."""

    output: Tensor
    lse: Tensor
    saved: Saved | None
    stats: Stats | None


def forward(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, visibility: Visibility, *, scale: float | None = None,
            save: bool = False, stats: bool = False) -> Forward:
    """Attention of query [N, Hq, Sq, D] over key, value [N, Hkv, Sk, D], Hq a multiple of Hkv.

    `save` also returns the codes that `backward` reads (recipes that train). Keys past `visibility.key_lengths` count as
    zero before any scale statistic.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    valid = visibility.valid_keys()
    if valid is not None:
        key, value = (torch.where(valid, x, 0.0) for x in (key, value))
    working_query, working_key = working_qk(query, key, recipe, scale)
    counters = Stats() if stats else None
    if save or recipe.v_exponent == "running":
        saved = Saved(save_operand(working_query, recipe.qk), save_operand(working_key, recipe.qk), save_operand(value, recipe.v))
        q, k = load_operand(saved.query, recipe.qk), load_operand(saved.key, recipe.qk)
    else:
        saved = None
        q, k = round_operand(working_query, recipe.qk), round_operand(working_key, recipe.qk)
    v, v_exponent = _value_operand(value, saved, recipe)
    output, lse = _rows(q, k, v, v_exponent, recipe, visibility, score_factor(recipe, scale), counters)
    return Forward(output, lse, saved if save else None, counters)


def _value_operand(value: Tensor, saved: Saved | None, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """V as the GEMM reads it, and the exponents left out of it [N, H, S] if they are folded into P."""
    if saved is None or recipe.v_exponent == "operand":
        return (load_operand(saved.value, recipe.v) if saved else round_operand(value, recipe.v, axis=value_axis(recipe.v))), None
    codes, scales = saved.value
    if scales is None:
        raise ValueError(f"v_exponent='running' needs a coded V, got {recipe.v}")
    exponent = (scales.int() - formats.scales.E8M0_BIAS).to(torch.float32)
    return formats.decode(codes, formats.element_format(recipe.v.element)), exponent


def _rows(q: Tensor, k: Tensor, v: Tensor, v_exponent: Tensor | None, recipe: Recipe, visibility: Visibility, factor: float,
          stats: Stats | None) -> tuple[Tensor, Tensor]:
    batch, heads, queries, channels = q.shape
    kv_heads, keys = k.shape[1:3]
    groups = heads // max(1, kv_heads)
    output = q.new_zeros((batch, kv_heads, groups, queries, channels))
    lse = q.new_full((batch, kv_heads, groups, queries), -math.inf)
    if output.numel() == 0 or keys == 0:
        return output.reshape(q.shape), lse.reshape(batch, heads, queries)
    grouped = q.view(batch, kv_heads, groups, queries, channels)
    for rows in row_chunks(batch * heads, queries, recipe.key_tile):
        state = RowState(recipe, (batch, kv_heads, groups, len(rows)), channels, q, stats)
        for start in range(0, keys, recipe.key_tile):
            first = max(0, visibility.first_row(start) - rows.start)
            if first >= len(rows):
                break
            tile = range(start, min(start + recipe.key_tile, keys))
            visible = visibility.tile(range(rows.start + first, rows.stop), tile)
            scores = _scores(grouped[..., rows.start + first:rows.stop, :], k[..., tile.start:tile.stop, :], factor)
            if visible is not None:
                scores = scores.masked_fill_(~visible, -math.inf)
            exponent = None if v_exponent is None else v_exponent[:, :, None, None, tile.start:tile.stop]
            state.update(scores, v[..., tile.start:tile.stop, :], exponent, visible, first)
        output[..., rows.start:rows.stop, :], lse[..., rows.start:rows.stop] = state.finish()
    return output.reshape(q.shape), lse.reshape(batch, heads, queries)


def _scores(q: Tensor, k: Tensor, factor: float) -> Tensor:
    """Base-two scores [N, H, G, R, T] of q [N, H, G, R, D] and k [N, H, T, D]."""
    batch, heads, groups, rows, channels = q.shape
    product = torch.matmul(q.reshape(batch, heads, groups * rows, channels), k.transpose(-1, -2))
    return product.mul_(factor).view(batch, heads, groups, rows, -1)
