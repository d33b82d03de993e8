"""Attention forward of any recipe in plain PyTorch: the specification that kernels must equal.

Sources: FLAMIA sections 3.1-3.5, B.1; Fused-Softmax algorithm 1; MXAttention algorithm 2. Tiled over keys as the kernels
are (`Recipe.key_tile`), chunked over rows so that memory is linear in the sequence. Runs on any device. Recipes of
identity operands compute float64 inputs in float64, for the oracle tests; others compute in float32.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit_attn.recipes import Recipe
from lowbit_attn.reference.masks import Segment, Visibility, key_tiles, row_chunks
from lowbit_attn.reference.operands import Coded, ForwardOperands, Saved, forward_operands, score_factor
from lowbit_attn.reference.softmax import RowState, ValueTile, score_unit
from lowbit_attn.reference.stats import Stats


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

    `save` also returns what `backward` reads. `stats` counts saturated and flushed elements and rollbacks. Keys past
    `visibility.key_lengths` count as zero before any scale statistic.
    """
    recipe = recipe.effective()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    valid = visibility.valid_keys()
    if valid is not None:
        key, value = (torch.where(valid, x, 0.0) for x in (key, value))
    counters = Stats() if stats else None
    operands = forward_operands(query, key, value, recipe, scale, save=save, stats=counters)
    output, lse, row_top = _attend(operands, recipe, visibility, score_factor(recipe, scale) * score_unit(recipe), counters)
    saved = operands.saved
    if saved is not None and isinstance(saved.query, Coded):
        saved = replace(saved, row_top=row_top)
    return Forward(output, lse, saved, counters)


def _attend(operands: ForwardOperands, recipe: Recipe, visibility: Visibility, factor: float,
            stats: Stats | None) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, channels = operands.q.shape
    kv_heads, keys = operands.k.shape[1:3]
    groups = heads // max(1, kv_heads)
    output = operands.q.new_zeros((batch, kv_heads, groups, queries, channels))
    lse = operands.q.new_full((batch, kv_heads, groups, queries), -math.inf)
    row_top = torch.zeros_like(lse, dtype=torch.uint8)
    if output.numel() == 0 or keys == 0:
        return output.reshape(operands.q.shape), lse.reshape(batch, heads, queries), row_top.reshape(batch, heads, queries)
    scores = _Scores(operands, recipe, factor, groups)
    for rows in row_chunks(batch * heads, queries, recipe.key_tile):
        state = RowState(recipe, (batch, kv_heads, groups, len(rows)), channels, operands.q, stats)
        for tile in key_tiles(keys, recipe.key_tile):
            for segment in visibility.segments(rows, tile):
                x = scores(segment.rows, tile)
                if segment.visible is not None:
                    x = x.masked_fill_(~segment.visible, -math.inf)
                part = slice(segment.rows.start - rows.start, segment.rows.stop - rows.start)
                state.update(x, _value_tile(operands, recipe, segment, tile), segment.visible, part)
        part = slice(rows.start, rows.stop)
        output[..., part, :], lse[..., part], row_top[..., part] = state.finish()
    return tuple(x.reshape(batch, heads, queries, *x.shape[4:]) for x in (output, lse, row_top))  # type: ignore[return-value]


def _value_tile(operands: ForwardOperands, recipe: Recipe, segment: Segment, tile: range) -> ValueTile:
    value, exponent, running = operands.v, operands.v_exponent, recipe.v_exponent == "running"
    if segment.diagonal and operands.diagonal_v is not None:
        value, exponent = operands.diagonal_v, operands.diagonal_v_exponent
    keys = slice(tile.start, tile.stop)
    return ValueTile(value[:, :, keys], None if exponent is None else exponent[:, :, None, None, keys], running)


class _Scores:
    """Base-two score tiles [N, H, G, R, T] of the quantized operands."""

    def __init__(self, operands: ForwardOperands, recipe: Recipe, factor: float, groups: int) -> None:
        self.operands, self.half, self.factor, self.groups = operands, recipe.score_accumulator == "fp16", factor, groups
        self.direct = recipe.exponential == "direct_u8"

    def __call__(self, rows: range, tile: range) -> Tensor:
        q = grouped(self.operands.q, self.groups)[..., rows.start:rows.stop, :]
        k = self.operands.k[:, :, tile.start:tile.stop]
        if not self.half or self.operands.q_exponent is None or self.operands.k_exponent is None:
            return score_product(q, k).mul_(self.factor)
        total = torch.zeros((), dtype=q.dtype, device=q.device)
        for start in range(0, q.shape[-1], 32):
            # One wgmma step contracts 32 channels and leaves its sum in fp16.
            total = (total + score_product(q[..., start:start + 32], k[..., start:start + 32])).half().to(q.dtype)
        q_exponent = grouped(self.operands.q_exponent, self.groups)[..., rows.start:rows.stop, None]
        k_exponent = self.operands.k_exponent[:, :, None, None, tile.start:tile.stop]
        factor = torch.exp2(q_exponent + k_exponent) * self.factor
        # Codes computed directly take the factor in float16; products of two float16 are exact in float32.
        return total * (factor.half().to(factor.dtype) if self.direct else factor)


def grouped(x: Tensor, groups: int) -> Tensor:
    """[N, H * groups, ...] -> [N, H, groups, ...]."""
    return x.unflatten(1, (-1, groups))


def score_product(q: Tensor, k: Tensor) -> Tensor:
    """[N, H, G, R, D] times [N, H, T, D] transposed: [N, H, G, R, T]."""
    batch, heads, groups, rows, channels = q.shape
    product = torch.matmul(q.reshape(batch, heads, groups * rows, channels), k.transpose(-1, -2))
    return product.view(batch, heads, groups, rows, -1)
