"""Per-tile tables for the backward, made on the GPU: reference exponents of dO, what a query tile adds to scores and dS, work.

dV folds the block exponents of dO into P, relative to a reference exponent that runs with the loop over query tiles. The loop
goes from a document's last tile to the first, so the reference of a tile is the largest exponent of dO from that tile to the
document's end, over the query heads that share a key/value head: it depends on no earlier token and on no other document.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit_attn.kernels.tiling import Tiling, on_device

QUERIES = 64
"""Queries of a tile, half of a padded tile of the tiling."""

VECTOR = 256
"""Floats of a query tile's record."""

WORK_COLUMNS = 11

LOWEST_REFERENCE = -90.0
"""A smaller dO counts as this: 2^-reference times a D of up to 2^30 stays finite."""

LOWEST_FOLD = -40.0
"""P 2^8 folded by less is zero in E4M3 anyway; dS undoes the fold, so P itself must not vanish."""

P_GRAD_LOG2 = 8
"""The factor of P in dV (FLAMIA B.1)."""


@triton.jit
def larger(a, b):
    """What a running maximum combines."""
    return tl.maximum(a, b)


@triton.jit
def place_in_record(i):
    """Where a record holds a number of query i: the order (c, j, e) of each 16."""
    within = i % 16
    return (i % 64) // 16 * 16 + (within % 8) // 2 * 4 + within // 8 * 2 + i % 2


@triton.jit(do_not_specialize=["groups", "q_count", "lowest"])
def _references(documents, do_group, reference, lifts, groups, q_count, lowest, CHUNK: tl.constexpr):
    """One document of one key/value head."""
    row = documents + tl.program_id(0) * 8
    q_len = tl.load(row + 1)
    first = tl.load(row + 5)
    tiles = (q_len + 63) // 64
    kv_head = tl.program_id(1).to(tl.int64)
    i, b = tl.arange(0, CHUNK), tl.arange(0, 2)
    before = lowest
    for start in range(0, tiles, CHUNK):
        tile = tiles - 1 - start - i
        own = tl.zeros([CHUNK], tl.float32) + lowest
        for g in range(0, groups):
            place = ((kv_head * groups + g) * q_count + first) * 4 + tile[:, None] * 2 + b[None, :]
            exists = (tile[:, None] >= 0) & (tile[:, None] * 64 + b[None, :] * 32 < q_len)
            exponent = tl.load(do_group + place, mask=exists, other=float("nan"))
            own = tl.maximum(own, tl.max(tl.where(exponent == exponent, exponent, lowest), 1))
        running = tl.maximum(tl.associative_scan(own, 0, larger), before)
        earlier = tl.maximum(tl.max(tl.where(i[None, :] < i[:, None], own[None, :], lowest), 1), before)
        lift = tl.where(start + i == 0, 1.0, tl.exp2(earlier - running))
        tl.store(reference + (kv_head * q_count + first) * 2 + tile, running, mask=tile >= 0)
        tl.store(lifts + (kv_head * q_count + first) * 2 + tile, lift, mask=tile >= 0)
        before = tl.max(running, 0)


@triton.jit(do_not_specialize=["factor", "groups", "q_count", "head_stride", "document_extra"])
def _vectors(documents, q_tiles, q_scales, do_group, lse, delta, reference, vectors, factor, groups, q_count, head_stride,
             document_extra, P_LOG2: tl.constexpr, FOLD: tl.constexpr):
    """The records of the two query tiles of one padded tile and head."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    document = tl.load(q_tiles + tile)
    if document >= 0:
        row = documents + document * 8
        first = (tile - tl.load(row + 5)) * 128
        rows = tl.load(row + 1) - first
        i = tl.arange(0, 128)
        side = head * head_stride + document.to(tl.int64) * document_extra + tl.load(row) + first
        exists = i < rows
        base = tl.load(reference + ((head // groups) * q_count + tile) * 2 + i // 64)
        exponent = tl.load(do_group + (head * q_count + tile) * 4 + i // 32)
        exponent = tl.where(exponent == exponent, exponent, base)  # codes of NaN make the products NaN
        fold = tl.maximum(exponent - base, FOLD)
        code = tl.load(q_scales + side + i, mask=exists, other=127).to(tl.int32)
        q_exponent = tl.where(code == 255, 0.0, (code - 127).to(tl.float32))
        natural = tl.load(lse + side + i, mask=exists, other=float("-inf"))
        bias = tl.where(natural == float("-inf"), natural, P_LOG2 + fold - natural * 1.4426950408889634)
        d = tl.load(delta + side + i, mask=exists, other=0.0)
        weight = tl.where(d == 0, 0.0, d * tl.exp2(q_exponent - base - fold))  # where dO is all zero the power may overflow
        out = vectors + (head * q_count + tile) * 512 + (i // 64) * 256
        tl.store(out + place_in_record(i), bias)
        tl.store(out + 64 + place_in_record(i), weight)
        block = (i % 64) // 32
        leads = i % 32 == 0
        tl.store(out + 128 + block, factor * tl.exp2(q_exponent), mask=leads)
        tl.store(out + 130 + block, tl.exp2(q_exponent + exponent - base - fold), mask=leads)
        tl.store(out + 132 + block, tl.where(code == 0, -60.0, q_exponent), mask=leads)
        size = tl.max(tl.reshape(tl.where(weight == weight, tl.abs(weight), 0.0), [4, 32]), 1)
        half = tl.arange(0, 4)
        tl.store(vectors + (head * q_count + tile) * 512 + half // 2 * 256 + 134 + half % 2, tl.log2(tl.maximum(size, 2.0**-126)))


@triton.jit
def _entry(tile, documents, k_tiles, max_k):
    """Document, block, and query tiles (first, number) of padded key tiles; a document of -1 past the end."""
    document = tl.load(k_tiles + tile, mask=tile < max_k, other=-1)
    row = documents + tl.maximum(document, 0) * 8
    exists = document >= 0
    block = tl.where(exists, tile - tl.load(row + 6, mask=exists, other=0), 0)
    q_len = tl.load(row + 1, mask=exists, other=0)
    valid = tl.load(row + 4, mask=exists, other=0) - block * 128
    shift = block * 128 - tl.load(row + 7, mask=exists, other=0)
    first = tl.maximum(shift, 0) // 64
    number = tl.where(valid > 0, tl.maximum((q_len + 63) // 64 - first, 0), 0)
    return document, row, block, first, number, shift, valid, q_len


@triton.jit(do_not_specialize=["max_k"])
def _key_work(documents, k_tiles, work, count, max_k, E: tl.constexpr, CHUNK: tl.constexpr):
    """E entries of the work list, each at its rank: longest first."""
    tile = tl.program_id(0) * E + tl.arange(0, E)
    document, row, block, first, number, shift, valid, q_len = _entry(tile, documents, k_tiles, max_k)
    exists = document >= 0
    rank = tile * 0
    total = 0
    for start in range(0, max_k, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there, _, _, _, length, _, _, _ = _entry(other, documents, k_tiles, max_k)
        longer = (length[None, :] > number[:, None]) | ((length[None, :] == number[:, None]) & (other[None, :] < tile[:, None]))
        rank += tl.sum(tl.where((there >= 0)[None, :] & longer, 1, 0), 1)
        total += tl.sum(tl.where(there >= 0, 1, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(count, total)
        tl.store(count + 1, 0)
    out = work + rank * 11
    tl.store(out, tl.load(row + 2, mask=exists, other=0) + block * 128, mask=exists)
    tl.store(out + 1, tl.load(row + 3, mask=exists, other=0) - block * 128, mask=exists)
    tl.store(out + 2, valid, mask=exists)
    tl.store(out + 3, tl.load(row, mask=exists, other=0), mask=exists)
    tl.store(out + 4, tl.load(row + 5, mask=exists, other=0) * 2, mask=exists)
    tl.store(out + 5, q_len, mask=exists)
    tl.store(out + 6, first, mask=exists)
    tl.store(out + 7, number, mask=exists)
    tl.store(out + 8, shift, mask=exists)
    tl.store(out + 9, document, mask=exists)
    tl.store(out + 10, tile, mask=exists)


@dataclass(frozen=True)
class GradientRecords:
    """reference, lifts: float32 [Hkv, 2 q_tiles], dO's reference exponent at each query tile, and what it multiplies sums over the
        tiles after it by.
    vectors: float32 [Hq, 2 q_tiles, 256] by query tile: for its 64 queries, in the order (c, j, e) of each 16, the exponent of P
        beside its score and D as dS subtracts it; then, two of each for its blocks of 32: the factor of scores, the factor of dP,
        the exponent of Q (-60 for zeros), log2 of the largest D as dS subtracts it.
    work: int32 [entries, 11], key blocks of 128, longest first: k_row, rows stored, rows valid (both may exceed 128), q_start,
        the document's first query tile, q_len, first query tile that the block sees, their number, shift (row r sees query i
        from r + shift on), document, the block's padded tile. count: int32 [2], the entries that exist, and a
        counter at zero (`work_queue`).
    """

    reference: Tensor
    lifts: Tensor
    vectors: Tensor
    work: Tensor
    count: Tensor


def references(tiling: Tiling, group: Tensor, reference: Tensor, lifts: Tensor, groups: int, lowest: float) -> None:
    """The largest exponent [Hkv, 2 q_tiles] of 32 queries, in `group` [Hq, 4 q_tiles], from each tile to its document's end, and by
    how much the sums over the tiles after it are lifted, a power of two up to 1."""
    kv_heads, q_count = reference.shape[0], tiling.q_tiles.numel()
    _references[(tiling.documents.shape[0], kv_heads)](tiling.documents, group, reference, lifts, groups, q_count, lowest, CHUNK=64,
                                                       num_warps=1)


def key_work(tiling: Tiling, work: Tensor, count: Tensor) -> None:
    """Fill `GradientRecords.work` and `count`."""
    k_count = tiling.k_tiles.numel()
    _key_work[(triton.cdiv(k_count, 32),)](tiling.documents, tiling.k_tiles, work, count, k_count, E=32, CHUNK=64)


def gradient_records(tiling: Tiling, q_scales: Tensor, do_group: Tensor, lse: Tensor, delta: Tensor, *, kv_heads: int,
                     factor: float, head_stride: int, document_extra: int) -> GradientRecords:
    """Tables of one call; `factor` turns products of Q's and K's values into base-two scores."""
    heads, q_count, k_count = do_group.shape[0], tiling.q_tiles.numel(), tiling.k_tiles.numel()
    groups = heads // kv_heads

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=lse.device)

    result = GradientRecords(empty(kv_heads, 2 * q_count), empty(kv_heads, 2 * q_count), empty(heads, 2 * q_count, VECTOR),
                             empty(k_count, WORK_COLUMNS, dtype=torch.int32), empty(2, dtype=torch.int32))
    with on_device(lse):
        references(tiling, do_group, result.reference, result.lifts, groups, LOWEST_REFERENCE)
        _vectors[(q_count, heads)](tiling.documents, tiling.q_tiles, q_scales, do_group, lse, delta, result.reference,
                                   result.vectors, factor, groups, q_count, head_stride, document_extra, P_LOG2=P_GRAD_LOG2,
                                   FOLD=LOWEST_FOLD, num_warps=1)
        key_work(tiling, result.work, result.count)
    return result
