"""Tables of the one-pass backward, made on the GPU: what dS, dQ, dK and dV of each query tile are relative to.

One dS serves dK, which contracts queries, and dQ, which contracts keys. It is relative to an exponent of each 32 queries, known
before the loop from a bound: a row of dS is at most the row's largest probability P times X = |dO| |V| + |D|, with the largest
|V| that the row sees, and also at most 2 (1 - P) |dO| |V|, for dP - D is a mean of differences (`ops.saved` has both factors).
dK's sum takes what tells these blocks apart from Q's codes instead, which `transposed_queries` brings down by `q_shift` to an
exponent of the tile that runs with the loop, from a document's last tile to the first. dQ leaves the kernel as float16,
relative to a bound on its row: the sum of a row of dS is at most X.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit_attn.kernels.hopper.gradient_records import (
    LOWEST_FOLD,
    LOWEST_REFERENCE,
    P_GRAD_LOG2,
    VECTOR,
    WORK_COLUMNS,
    key_work,
    larger,
    place_in_record,
    references,
)
from lowbit_attn.kernels.hopper.quantize_gradient import Gradient
from lowbit_attn.kernels.tiling import Tiling, on_device

LOWEST = -200.0
"""log2 of nothing: no other exponent of dS, V or Q is as low."""

WINDOW = 8
"""dK's reference is the largest exponent of this many tiles: a new one rescales dK's sums, so it should not change at each."""

RANGE = 60.0
"""dK's reference stays within this many doublings of the largest so far, so that its sums stay finite when it falls."""


@triton.jit
def _seen_sizes(documents, v_size, k_top, v_seen, k_seen, k_count, LOWEST: tl.constexpr, CHUNK: tl.constexpr):
    """Running maxima over a document's keys, of |V| by 32 and of K's exponents by 128. Programs: documents x kv heads."""
    row = documents + tl.program_id(0) * 8
    tiles = (tl.load(row + 3) + 127) // 128
    start = tl.program_id(1).to(tl.int64) * k_count + tl.load(row + 6)
    i = tl.arange(0, CHUNK)
    before = LOWEST
    for first in range(0, tiles * 4, CHUNK):
        place = start * 4 + first + i
        own = tl.load(v_size + place, mask=first + i < tiles * 4, other=LOWEST)
        running = tl.maximum(tl.associative_scan(own, 0, larger), before)
        tl.store(v_seen + place, running, mask=first + i < tiles * 4)
        before = tl.max(running, 0)
    before = LOWEST
    for first in range(0, tiles, CHUNK):
        own = tl.load(k_top + start + first + i, mask=first + i < tiles, other=LOWEST)
        running = tl.maximum(tl.associative_scan(own, 0, larger), before)
        tl.store(k_seen + start + first + i, running, mask=first + i < tiles)
        before = tl.max(running, 0)


@triton.jit(do_not_specialize=["groups", "q_count", "k_count", "head_stride", "document_extra"])
def _needs(documents, q_tiles, q_scales, row_top, do_size, delta, v_seen, k_seen, ds_exponent, dk_exponent, exponent, groups,
           q_count, k_count, head_stride, document_extra, LOWEST: tl.constexpr, HAS_LSE: tl.constexpr):
    """Of the 128 queries of a padded tile and head: by 32, dS's exponent and that plus Q's; by row, what its float16 dQ is relative
    to, without dS's exponent, which `_vectors` adds. Programs: query tiles x heads."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    document = tl.load(q_tiles + tile)
    if document >= 0:
        row = documents + document * 8
        first = (tile - tl.load(row + 5)) * 128
        rows = tl.load(row + 1) - first
        k_valid = tl.load(row + 4)
        diagonal = tl.load(row + 7)
        k_start = (head // groups) * k_count + tl.load(row + 6)
        i = tl.arange(0, 128)
        exists = i < rows
        side = head * head_stride + document.to(tl.int64) * document_extra + tl.load(row) + first + i
        limit = tl.minimum(first + i + diagonal, k_valid - 1)
        seen = exists & (limit >= 0)
        largest = tl.load(v_seen + k_start * 4 + limit // 32, mask=seen, other=LOWEST)
        size = tl.load(do_size + side, mask=seen, other=0.0)
        d = tl.load(delta + side, mask=seen, other=0.0)
        far = size * tl.exp2(largest)
        x = far + tl.abs(d)
        x = tl.where(x == x, x, 0.0)
        x = tl.where(seen & (x > 0), tl.log2(tl.maximum(x, 2.0**-126)), LOWEST)
        top = tl.load(row_top + side, mask=seen, other=0).to(tl.float32) - 127.0
        bound = tl.minimum(top, 0.0) + x
        if not HAS_LSE:  # a gradient of lse does not cancel in a mean of differences
            far = tl.where(far == far, far, 0.0)
            others = tl.where(far > 0, tl.log2(tl.maximum(far, 2.0**-126)), LOWEST) + (1.0 - top)
            bound = tl.where(top > 0, tl.minimum(bound, others), bound)
        # A bound of 2^8 is below 448, and the rest of it is room for the rounding of P and D.
        need = tl.where(seen, tl.ceil(bound) - 8.0, LOWEST)
        blocks = tl.max(tl.reshape(need, [4, 32]), 1)
        blocks = tl.minimum(tl.maximum(blocks, -100.0), 100.0)
        block = tl.arange(0, 4)
        code = tl.load(q_scales + head * head_stride + document.to(tl.int64) * document_extra + tl.load(row) + first + block * 32,
                       mask=block * 32 < rows, other=0).to(tl.int32)
        tl.store(ds_exponent + (head * q_count + tile) * 4 + block, blocks)
        with_q = tl.where((code == 0) | (code == 255), LOWEST, blocks + (code - 127).to(tl.float32))
        tl.store(dk_exponent + (head * q_count + tile) * 4 + block, with_q)
        # The last row of each 64 sees all the key tiles that they meet.
        last = tl.minimum(first + (i // 64) * 64 + 63 + diagonal, k_valid - 1)
        reached = tl.load(k_seen + k_start + last // 128, mask=last >= 0, other=-127.0)
        own = tl.reshape(tl.broadcast_to(blocks[:, None], [4, 32]), [128])
        # Codes of dS of a row sum up to 2^(x - own) times 17/16, K's codes are up to 448: below 2^15.5 in all.
        margin = tl.minimum(tl.maximum(tl.ceil(x - own - 6.5), -20.0), 40.0)
        tl.store(exponent + head * q_count * 128 + tile * 128 + i, reached + margin)


@triton.jit
def _reference_of(dk_exponent, suffix, kv_head, groups, q_count, tile, last, LOWEST: tl.constexpr, WINDOW: tl.constexpr,
                  RANGE: tl.constexpr):
    """dK's reference at each of two neighbouring query tiles [2]; at `last` + 1, that of `last`."""
    tile = tl.minimum(tile, last)
    i = tl.arange(0, 2 * WINDOW)
    largest = tl.full([2], LOWEST, tl.float32)
    for g in range(0, groups):
        place = (kv_head * groups + g) * q_count * 4 + tile[:, None] * 2 + i[None, :]
        own = tl.load(dk_exponent + place, mask=(tile[:, None] * 2 + i[None, :]) < (last + 1) * 2, other=LOWEST)
        largest = tl.maximum(largest, tl.max(own, 1))
    return tl.maximum(largest, tl.load(suffix + kv_head * q_count * 2 + tile) - RANGE)


@triton.jit(do_not_specialize=["factor", "groups", "q_count", "head_stride", "document_extra"])
def _vectors(documents, q_tiles, q_scales, do_group, lse, delta, reference_v, lift_v, suffix, ds_exponent, dk_exponent, exponent,
             vectors, q_shift, reference_k, factor, groups, q_count, head_stride, document_extra, P_LOG2: tl.constexpr,
             FOLD: tl.constexpr, LOWEST: tl.constexpr, WINDOW: tl.constexpr, RANGE: tl.constexpr):
    """The records of the two query tiles of one padded tile and head. Programs: query tiles x heads."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    document = tl.load(q_tiles + tile)
    if document >= 0:
        row = documents + document * 8
        first = (tile - tl.load(row + 5)) * 128
        rows = tl.load(row + 1) - first
        kv_head = head // groups
        two = tile * 2 + tl.arange(0, 2)
        last = tl.load(row + 5) * 2 + (tl.load(row + 1) + 63) // 64 - 1
        reference = _reference_of(dk_exponent, suffix, kv_head, groups, q_count, two, last, LOWEST, WINDOW, RANGE)
        later = _reference_of(dk_exponent, suffix, kv_head, groups, q_count, two + 1, last, LOWEST, WINDOW, RANGE)
        # Sums are lifted once a tile, at the first head of the group.
        lifted = two <= tl.where(head % groups == 0, last, -1)
        lifted_v = tl.load(lift_v + kv_head * q_count * 2 + two, mask=lifted, other=1.0)
        tl.store(vectors + (head * q_count * 2 + two) * 256 + 132, lifted_v)
        tl.store(vectors + (head * q_count * 2 + two) * 256 + 133, tl.where(lifted, tl.exp2(later - reference), 1.0))
        tl.store(reference_k + kv_head * q_count * 2 + two, reference, mask=lifted)
        block = tl.arange(0, 4)
        with_q = tl.load(dk_exponent + (head * q_count + tile) * 4 + block)
        of_tile = tl.reshape(tl.broadcast_to(reference[:, None], [2, 2]), [4])
        shift = tl.where(with_q == LOWEST, 0.0, tl.maximum(with_q - of_tile, -60.0))
        tl.store(q_shift + (head * q_count + tile) * 4 + block, shift)
        i = tl.arange(0, 128)
        side = head * head_stride + document.to(tl.int64) * document_extra + tl.load(row) + first
        exists = i < rows
        base = tl.load(reference_v + kv_head * q_count * 2 + tile * 2 + i // 64)
        do_exponent = tl.load(do_group + (head * q_count + tile) * 4 + i // 32)
        do_exponent = tl.where(do_exponent == do_exponent, do_exponent, base)  # codes of NaN make the products NaN
        fold = tl.maximum(do_exponent - base, FOLD)
        code = tl.load(q_scales + side + i, mask=exists, other=127).to(tl.int32)
        q_exponent = tl.where(code == 255, 0.0, (code - 127).to(tl.float32))
        natural = tl.load(lse + side + i, mask=exists, other=float("-inf"))
        hidden = natural == float("-inf")
        bias = tl.where(hidden, natural, P_LOG2 + fold - natural * 1.4426950408889634)
        own = tl.load(ds_exponent + (head * q_count + tile) * 4 + i // 32)
        d = tl.load(delta + side + i, mask=exists, other=0.0)
        # In two steps: where dO is tiny beside that of other tokens, one power leaves float32.
        weight = tl.where(hidden | (d == 0), 0.0, d * tl.exp2(-own) * tl.exp2(-fold - P_LOG2))
        out = vectors + (head * q_count + tile) * 512 + (i // 64) * 256
        tl.store(out + place_in_record(i), bias)
        tl.store(out + 64 + place_in_record(i), weight)
        leads = i % 32 == 0
        tl.store(out + 128 + (i % 64) // 32, factor * tl.exp2(q_exponent), mask=leads)
        # Exceeds 2^127 only where V is all zero, and zeros times infinity are none.
        tl.store(out + 130 + (i % 64) // 32, tl.exp2(tl.minimum(do_exponent - own - fold - P_LOG2, 127.0)), mask=leads)
        margin = tl.load(exponent + (head * q_count + tile) * 128 + i)
        tl.store(out + 192 + i % 64, margin)
        tl.store(exponent + (head * q_count + tile) * 128 + i, margin + own)


@dataclass(frozen=True)
class OnePassRecords:
    """reference_v, reference_k: float32 [Hkv, 2 q_tiles], what dV's and dK's sums are relative to at each query tile.
    vectors: float32 [Hq, 2 q_tiles, 256] by query tile: for its 64 queries, in the order (c, j, e) of each 16, the exponent of P
        beside its score and D as dS subtracts it; from 128 on, two of each for its blocks of 32: the factor of scores, the factor
        of dP; what to multiply dV's and dK's sums over the tiles before by; from 192 on, in plain order, the exponent that a row's
        float16 dQ is relative to, without dS's.
    q_shift: float32 [Hq, 4 q_tiles], see `transposed_queries`.
    exponent: float32 [Hq, 128 q_tiles], the exponent of a row's float16 dQ.
    work, count: as in `GradientRecords`.
    """

    reference_v: Tensor
    reference_k: Tensor
    vectors: Tensor
    q_shift: Tensor
    exponent: Tensor
    work: Tensor
    count: Tensor


def one_pass_records(tiling: Tiling, q_scales: Tensor, row_top: Tensor, made: Gradient, lse: Tensor, *, kv_heads: int,
                     factor: float, head_stride: int, document_extra: int, has_lse: bool) -> OnePassRecords:
    """Tables of one call; `factor` turns products of Q's and K's values into base-two scores. `has_lse`: D holds a gradient of
    lse."""
    heads, q_count, k_count = made.do_group.shape[0], tiling.q_tiles.numel(), tiling.k_tiles.numel()
    documents, groups = tiling.documents.shape[0], heads // kv_heads

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=lse.device)

    reference_v, lift_v, reference_k, suffix, unused = (empty(kv_heads, 2 * q_count) for _ in range(5))
    v_seen, k_seen = torch.empty_like(made.v_size), torch.empty_like(made.k_top)
    ds_exponent, dk_exponent = torch.empty_like(made.do_group), torch.empty_like(made.do_group)
    result = OnePassRecords(reference_v, reference_k, empty(heads, 2 * q_count, VECTOR), empty(heads, 4 * q_count),
                            empty(heads, 128 * q_count), empty(k_count, WORK_COLUMNS, dtype=torch.int32),
                            empty(2, dtype=torch.int32))
    sides = (head_stride, document_extra)
    with on_device(lse):
        _seen_sizes[(documents, kv_heads)](tiling.documents, made.v_size, made.k_top, v_seen, k_seen, k_count, LOWEST=LOWEST,
                                           CHUNK=64, num_warps=1)
        _needs[(q_count, heads)](tiling.documents, tiling.q_tiles, q_scales, row_top, made.do_size, made.delta, v_seen, k_seen,
                                 ds_exponent, dk_exponent, result.exponent, groups, q_count, k_count, *sides, LOWEST=LOWEST,
                                 HAS_LSE=has_lse, num_warps=1)
        references(tiling, made.do_group, reference_v, lift_v, groups, LOWEST_REFERENCE)
        references(tiling, dk_exponent, suffix, unused, groups, LOWEST)
        _vectors[(q_count, heads)](tiling.documents, tiling.q_tiles, q_scales, made.do_group, lse, made.delta, reference_v, lift_v,
                                   suffix, ds_exponent, dk_exponent, result.exponent, result.vectors, result.q_shift, reference_k,
                                   factor, groups, q_count, *sides, P_LOG2=P_GRAD_LOG2, FOLD=LOWEST_FOLD, LOWEST=LOWEST,
                                   WINDOW=WINDOW, RANGE=RANGE, num_warps=1)
        key_work(tiling, result.work, result.count)
    return result
