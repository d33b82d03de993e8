"""Per-tile records for the forward: K's block scales and V's block exponents relative to their running maximum.

V's block exponents are folded into P relative to a reference exponent that runs with the key loop (reference.softmax,
`RowState._fold`), so the reference of a tile is the largest exponent of the document's keys up to and including that tile: it
depends on no later tile and on no other document. Rows that see only part of a tile use the blocks' own exponents instead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit_attn.kernels.hopper.tiling import Tiling

COLUMNS = 16
LOWEST_FOLD = -20.0
"""Folds below it are raised to it: P <= 2^8 folded by 2^-20 is under half of E4M3's smallest value, so its code is 0 anyway."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _records(documents, k_group, v_group, out, max_tiles, P_LOG2: tl.constexpr, LOWEST: tl.constexpr, CHUNK: tl.constexpr):
    row = documents + tl.program_id(0) * 8
    k_len = tl.load(row + 3)
    first = tl.load(row + 6)
    tiles = (k_len + 127) // 128
    head = tl.program_id(1).to(tl.int64) * max_tiles + first
    t, g = tl.arange(0, CHUNK), tl.arange(0, 4)
    before = -127.0  # the reference exponent after the previous chunk
    for start in range(0, tiles, CHUNK):
        inside = start + t < tiles
        tile = head + start + t
        index, mask = tile[:, None] * 4 + g[None, :], inside[:, None] & (g[None, :] < 4)
        exponent = tl.load(v_group + index, mask=mask, other=-127.0)
        known = tl.where(exponent == exponent, exponent, -127.0)  # NaN marks a block that holds NaN or Inf
        own = tl.max(known, 1)
        running = tl.maximum(tl.associative_scan(own, 0, _larger), before)
        # The running maximum before each tile: the scan without the tile's own part.
        earlier = tl.maximum(tl.max(tl.where(t[None, :] < t[:, None], own[None, :], -127.0), 1), before)
        fold = exponent - running[:, None]
        fold = tl.where(fold < LOWEST, LOWEST, fold)
        base = out + tile[:, None] * 16 + g[None, :]
        tl.store(base, tl.load(k_group + index, mask=mask, other=1.0), mask=mask)
        tl.store(base + 4, fold, mask=mask)
        tl.store(base + 8, tl.exp2(-fold - P_LOG2), mask=mask)
        lift = tl.where(start + t == 0, 0.0, earlier - running)
        column = g[None, :]
        side = tl.where(column == 0, lift[:, None], tl.where(column == 1, running[:, None], 0.0))
        tl.store(base + 12, side, mask=mask)
        before = tl.max(running, 0)


def tile_records(tiling: Tiling, k_group: Tensor, v_group: Tensor, p_log2_scale: float) -> Tensor:
    """float32 [Hkv, max_k_tiles, 16]: K's scales 2^eK of the tile's four blocks; the folds of V's exponents; the weights
    2^(-fold - c) that turn folded sums of P 2^c into row sums; then by how much the reference exponent rose at this tile
    (<= 0), the reference exponent, and two unused columns. Tiles past a document's end are not written.
    """
    heads, tiles = k_group.shape[0], k_group.shape[1] // 4
    out = torch.empty((heads, tiles, COLUMNS), dtype=torch.float32, device=k_group.device)
    _records[(tiling.documents.shape[0], heads)](tiling.documents, k_group, v_group, out, tiles, P_LOG2=p_log2_scale,
                                                 LOWEST=LOWEST_FOLD, CHUNK=128)
    return out
