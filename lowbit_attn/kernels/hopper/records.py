"""Per-tile records for the forward: K's block scales and V's block exponents relative to their running maximum.

V's block exponents are folded into P relative to a reference exponent that runs with the key loop (reference.softmax,
`RowState._fold`), so the reference of a tile is the largest exponent of the document's keys up to and including that tile: it
depends on no later tile and on no other document. Rows that see only part of a tile use the blocks' own exponents instead.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit_attn.kernels.tiling import Tiling
from lowbit_attn.recipes import SHARED_FOLD

COLUMNS = 16
LOWEST_FOLD = -20.0
"""Folds below it are raised to it: P <= 2^8 folded by 2^-20 is under half of E4M3's smallest value, so its code is 0 anyway."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["heads", "groups", "head_stride", "document_extra", "max_tiles", "group", "factor"])
def _records(documents, k_group, v_group, out, weights, quiet, sizes, heads, groups, head_stride, document_extra, max_tiles,
             group, factor, LOWEST: tl.constexpr, SHARED: tl.constexpr, DIRECT: tl.constexpr, CHUNK: tl.constexpr):
    row = documents + tl.program_id(0) * 8
    k_len = tl.load(row + 3)
    k_valid = tl.load(row + 4)
    first = tl.load(row + 6)
    tiles = (k_len + 127) // 128
    head = tl.program_id(1).to(tl.int64) * max_tiles + first
    t, g = tl.arange(0, CHUNK), tl.arange(0, 4)
    before = -127.0  # the reference exponent after the previous chunk
    loud = 1 << 30
    for start in range(0, tiles, CHUNK):
        inside = start + t < tiles
        tile = head + start + t
        index, mask = tile[:, None] * 4 + g[None, :], inside[:, None] & (g[None, :] < 4)
        # Blocks that hold no valid key are hidden from every row: they neither raise the reference nor fold.
        valid = mask & ((start + t)[:, None] * 128 + g[None, :] * 32 < k_valid)
        exponent = tl.load(v_group + index, mask=valid, other=-127.0)
        scale = tl.load(k_group + index, mask=valid, other=1.0)
        known = tl.where(exponent == exponent, exponent, -127.0)  # NaN marks a block that holds NaN or Inf
        own = tl.max(known, 1)
        running = tl.maximum(tl.associative_scan(own, 0, _larger), before)
        earlier = tl.maximum(tl.max(tl.where(t[None, :] < t[:, None], own[None, :], -127.0), 1), before)
        fold = exponent - running[:, None]
        fold = tl.where(valid, tl.where(fold < LOWEST, LOWEST, fold), 0.0)
        base = out + tile[:, None] * 16 + g[None, :]
        if DIRECT:
            # Codes computed directly cannot hold NaN: it travels with the scores' factor and makes the row's maximum NaN.
            scale = tl.where(exponent == exponent, scale, exponent)
            undone = tl.maximum(tl.where(exponent == exponent, fold, 0.0), SHARED)
            code = ((7 - undone.to(tl.int32)) << 3).to(tl.uint8)
            keys = tl.arange(0, 32)
            place = (first + start + t).to(tl.int64)[:, None, None] * 128 + g[None, :, None] * 32 + keys[None, None, :]
            spread = code[:, :, None] + tl.zeros([1, 1, 32], tl.uint8)
            for copy in tl.static_range(8):
                line = weights + (tl.program_id(1).to(tl.int64) * 8 + copy) * max_tiles * 128
                tl.store(line + place, spread, mask=mask[:, :, None])
            softest = tl.min(tl.where(mask, fold, 0.0), 1)
            loud = tl.minimum(loud, tl.min(tl.where(inside & (softest < SHARED), start + t, 1 << 30), 0))
        else:
            scale = tl.where(scale == scale, scale, 1.0)  # NaN codes make the scores NaN
        tl.store(base, scale, mask=mask)
        tl.store(base + 4, fold, mask=mask)
        lift = tl.where(start + t == 0, 0.0, earlier - running)
        column = g[None, :]
        side = tl.where(column == 0, lift[:, None], tl.where(column == 1, running[:, None], 0.0))
        tl.store(base + 12, side, mask=mask)
        before = tl.max(tl.where(inside, running, before), 0)
    if DIRECT and tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(sizes, heads)
        tl.store(sizes + 1, groups)
        tl.store(sizes + 2, head_stride)
        tl.store(sizes + 3, document_extra)
        tl.store(sizes + 4, max_tiles)
        tl.store(sizes + 5, tl.num_programs(0))
        tl.store(sizes + 6, group)
        tl.store(sizes + 7, factor.to(tl.float32).to(tl.int32, bitcast=True))
    if DIRECT:
        tl.store(quiet + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), loud)


@dataclass(frozen=True)
class Records:
    """tiles: float32 [Hkv, max_k_tiles, 16]: K's scales 2^eK of the tile's four blocks; the folds of V's exponents; four unused
        columns; then by how much the reference exponent rose at this tile (<= 0), the reference exponent, and two unused
        columns. Tiles past a document's end are not written.
    weights: E4M3 codes uint8 [8 Hkv, 128 max_k_tiles] of 2^-fold for every key, eight equal rows a head; direct codes only.
    quiet: int32 [Hkv, documents], the first tile that has a fold below `SHARED_FOLD`; direct codes only.
    sizes: int32 [8], the numbers of `Sizes`, the documents before the last two, the factor by its bits; direct codes only.
    """

    tiles: Tensor
    weights: Tensor | None = None
    quiet: Tensor | None = None
    sizes: Tensor | None = None


@dataclass(frozen=True)
class Sizes:
    """What the kernels need to find their way: query heads; query heads per key/value head; strides of the per-token side
    tensors (see `attention.Prepared`); padded key tiles; heads that run side by side; the factor of the code products."""

    heads: int
    groups: int
    head_stride: int
    document_extra: int
    max_tiles: int
    group: int
    factor: float


def tile_records(tiling: Tiling, k_group: Tensor, v_group: Tensor, sizes: Sizes, *, direct: bool) -> Records:
    """Records of every key tile; `direct` for the kernel that computes codes directly."""
    heads, tiles = k_group.shape[0], k_group.shape[1] // 4
    documents = tiling.documents.shape[0]
    out = torch.empty((heads, tiles, COLUMNS), dtype=torch.float32, device=k_group.device)

    def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=out.device) if direct else None

    result = Records(out, table(8 * heads, tiles * 128, dtype=torch.uint8), table(heads, documents), table(8))
    unused = tiling.count
    with torch.cuda.device(out.device):
        _records[(documents, heads)](tiling.documents, k_group, v_group, out, out if result.weights is None else result.weights,
                                     unused if result.quiet is None else result.quiet,
                                     unused if result.sizes is None else result.sizes, sizes.heads, sizes.groups,
                                     sizes.head_stride, sizes.document_extra, sizes.max_tiles, sizes.group, sizes.factor,
                                     LOWEST=LOWEST_FOLD, SHARED=SHARED_FOLD, DIRECT=direct, CHUNK=32)
    return result
