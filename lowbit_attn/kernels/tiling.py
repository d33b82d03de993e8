"""How documents are cut into tiles: tables built on the GPU by one small kernel, with no host synchronisation.

Dense and packed attention share one path: a dense batch item is a document. Kernels read these tables and never `cu_seqlens`
itself. Values that make no sense are clamped, past the end to the end and decreasing ones to the largest before, so that documents
never overlap and nothing is read or written out of bounds whatever the tables are built from.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
"""Tokens per padded tile: the key tile of the recipes."""

EVERYTHING = 1 << 29
"""The diagonal of attention without a causal mask: every row sees every key."""

DOCUMENT_COLUMNS = 8
WORK_COLUMNS = 8
NUM_WARPS = 8


def on_device(like: Tensor) -> AbstractContextManager:
    """The device that launches go to. The interpreter runs on CPU tensors, which have no device to enter."""
    return torch.cuda.device(like.device) if like.is_cuda else nullcontext()


@dataclass(frozen=True)
class Tiling:
    """int32 tables on the device; starts and lengths count tokens of the flattened [tokens, heads, head_dim] view.

    documents: [n, 8]: q_start, q_len, k_start, k_len (stored keys), k_valid (keys that exist; the rest count as zero), q_tile
        and k_tile (the document's first tile in the padded tilings), diagonal (row i sees keys j <= i + diagonal). For
        packed inputs the last row is a pseudo document: the tokens past the last boundary, with no valid key.
    q_tiles, k_tiles: document of each padded tile of 128 tokens, -1 past the end.
    work: [entries, 8], longest first: q_row (first token of the block), rows, k_start, k_valid, k_tile, diagonal (row i of the
        block sees keys j <= i + diagonal), tiles (key tiles of the block, at least 1), document.
    count: [2], the entries of `work` that exist, and a counter at zero for the kernel that works on them (`hopper.work_queue`).
    block_rows: query rows per work entry.
    """

    documents: Tensor
    q_tiles: Tensor
    k_tiles: Tensor
    work: Tensor
    count: Tensor
    block_rows: int


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _rows(cu, d, exists, last, before, tokens):
    """Start and stop of packed documents, each at the largest boundary so far, so that they never overlap; the last start."""
    own = tl.minimum(tl.maximum(tl.load(cu + d, mask=exists, other=0), 0), tokens)
    start = tl.maximum(tl.associative_scan(own, 0, _larger), before)
    stop = tl.where(d == last, tokens, tl.load(cu + d + 1, mask=exists & (d < last), other=0))
    return start, tl.maximum(tl.minimum(stop, tokens), start), tl.max(start, 0)


@triton.jit
def _documents(first, documents, cu_q, cu_k, lengths, tokens_q, tokens_k, q_before, k_before, PACKED: tl.constexpr,
               HAS_LENGTHS: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """q_start, q_len, k_start, k_len, k_valid, diagonal, query tiles, key tiles and work blocks of CHUNK documents, none of which
    starts before `q_before` and `k_before`; then the same two for the next CHUNK."""
    d = first + tl.arange(0, CHUNK)
    exists = d < documents
    if PACKED:
        last = documents - 1  # the pseudo document
        q_start, q_stop, q_before = _rows(cu_q, d, exists, last, q_before, tokens_q)
        k_start, k_stop, k_before = _rows(cu_k, d, exists, last, k_before, tokens_k)
        q_len, k_len = q_stop - q_start, k_stop - k_start
        k_valid = tl.where(d == last, 0, k_len)
    else:
        q_start, k_start = d * tokens_q, d * tokens_k
        q_len, k_len = tokens_q + d * 0, tokens_k + d * 0
        k_valid = k_len
        if HAS_LENGTHS:
            k_valid = tl.minimum(tl.maximum(tl.load(lengths + d, mask=exists, other=0), 0), k_len)
    q_len, k_len, k_valid = tl.where(exists, q_len, 0), tl.where(exists, k_len, 0), tl.where(exists, k_valid, 0)
    if ALIGN == 0:
        diagonal = d * 0 + 536870912
    elif ALIGN == 1:
        diagonal = d * 0
    else:
        diagonal = k_valid - q_len
    return (d, exists, q_start, q_len, k_start, k_len, k_valid, diagonal, (q_len + 127) // 128, (k_len + 127) // 128,
            (q_len + ROWS - 1) // ROWS, q_before, k_before)


@triton.jit
def _owner(entry, ends, counts):
    """For entries [E] and the running ends [D] of documents: how many documents end at or before each, and their total."""
    before = ends[None, :] <= entry[:, None]
    return tl.sum(before.to(tl.int32), 1), tl.sum(tl.where(before, counts[None, :], 0), 1)


@triton.jit
def _longer(tiles, blocks, q_len, k_valid, diagonal, ROWS: tl.constexpr):
    """[E, D]: how many blocks of each document have more than `tiles` [E] key tiles. Blocks only get longer downwards."""
    needed = 128 * tiles[:, None] - diagonal[None, :]
    short = tl.where(needed < 0, 0, needed // ROWS)
    some = (k_valid[None, :] > 128 * tiles[:, None]) & (q_len[None, :] > needed)
    return tl.where(tiles[:, None] < 0, blocks[None, :], tl.where(some, blocks[None, :] - short, 0))


@triton.jit(do_not_specialize=["documents", "tokens_q", "tokens_k", "max_q", "max_k", "max_work"])
def _build(table, q_tiles, k_tiles, work, count, cu_q, cu_k, lengths, documents, tokens_q, tokens_k, max_q, max_k, max_work,
           PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr,
           CHUNK: tl.constexpr):
    entry = tl.program_id(0) * E + tl.arange(0, E)
    zero = entry * 0
    q_owner, k_owner, owner, begin = zero, zero, zero, zero
    q_end, k_end, end = 0, 0, 0
    q_before, k_before = 0, 0
    for first in range(0, documents, CHUNK):
        d, exists, q_start, q_len, k_start, k_len, k_valid, diagonal, nq, nk, nb, q_before, k_before = _documents(
            first, documents, cu_q, cu_k, lengths, tokens_q, tokens_k, q_before, k_before, PACKED, HAS_LENGTHS, ALIGN, ROWS, CHUNK)
        q_ends, k_ends, ends = q_end + tl.cumsum(nq, 0), k_end + tl.cumsum(nk, 0), end + tl.cumsum(nb, 0)
        if tl.program_id(0) == 0:
            row = table + d * 8
            tl.store(row, q_start, mask=exists)
            tl.store(row + 1, q_len, mask=exists)
            tl.store(row + 2, k_start, mask=exists)
            tl.store(row + 3, k_len, mask=exists)
            tl.store(row + 4, k_valid, mask=exists)
            tl.store(row + 5, q_ends - nq, mask=exists)
            tl.store(row + 6, k_ends - nk, mask=exists)
            tl.store(row + 7, diagonal, mask=exists)
        before, _ = _owner(entry, q_ends, nq)
        q_owner += before
        before, _ = _owner(entry, k_ends, nk)
        k_owner += before
        before, blocks = _owner(entry, ends, nb)
        owner += before
        begin += blocks
        q_end += tl.sum(nq, 0)
        k_end += tl.sum(nk, 0)
        end += tl.sum(nb, 0)
    tl.store(q_tiles + entry, tl.where(entry < q_end, q_owner, -1), mask=entry < max_q)
    tl.store(k_tiles + entry, tl.where(entry < k_end, k_owner, -1), mask=entry < max_k)
    if tl.program_id(0) == 0:
        tl.store(count, tl.minimum(end, max_work))
        tl.store(count + 1, 0)
    exists_e = entry < end
    block = entry - begin
    # Fetch the owner's numbers by comparison: a gather from the table would race with program 0.
    q_start_e, q_len_e, k_start_e, k_valid_e, k_tile_e, diagonal_e, blocks_e = zero, zero, zero, zero, zero, zero, zero
    k_end, q_before, k_before = 0, 0, 0
    for first in range(0, documents, CHUNK):
        d, exists, q_start, q_len, k_start, k_len, k_valid, diagonal, nq, nk, nb, q_before, k_before = _documents(
            first, documents, cu_q, cu_k, lengths, tokens_q, tokens_k, q_before, k_before, PACKED, HAS_LENGTHS, ALIGN, ROWS, CHUNK)
        k_begin = k_end + tl.cumsum(nk, 0) - nk
        k_end += tl.sum(nk, 0)
        mine = d[None, :] == owner[:, None]
        q_start_e += tl.sum(tl.where(mine, q_start[None, :], 0), 1)
        q_len_e += tl.sum(tl.where(mine, q_len[None, :], 0), 1)
        k_start_e += tl.sum(tl.where(mine, k_start[None, :], 0), 1)
        k_valid_e += tl.sum(tl.where(mine, k_valid[None, :], 0), 1)
        k_tile_e += tl.sum(tl.where(mine, k_begin[None, :], 0), 1)
        diagonal_e += tl.sum(tl.where(mine, diagonal[None, :], 0), 1)
        blocks_e += tl.sum(tl.where(mine, nb[None, :], 0), 1)
    rows = tl.minimum(q_len_e - block * ROWS, ROWS)
    diagonal_e += block * ROWS
    visible = tl.maximum(tl.minimum(k_valid_e, rows + diagonal_e), 0)
    tiles = (visible + 127) // 128
    rank = zero
    q_before, k_before = 0, 0
    for first in range(0, documents, CHUNK):
        d, exists, q_start, q_len, k_start, k_len, k_valid, diagonal, nq, nk, nb, q_before, k_before = _documents(
            first, documents, cu_q, cu_k, lengths, tokens_q, tokens_k, q_before, k_before, PACKED, HAS_LENGTHS, ALIGN, ROWS, CHUNK)
        longer = _longer(tiles, nb, q_len, k_valid, diagonal, ROWS)
        as_long = _longer(tiles - 1, nb, q_len, k_valid, diagonal, ROWS)
        mine = d[None, :] == owner[:, None]
        earlier = d[None, :] < owner[:, None]
        rank += tl.sum(longer + tl.where(earlier, as_long - longer, 0), 1)
        rank += tl.sum(tl.where(mine, as_long - blocks_e[:, None], 0), 1) + tl.sum(tl.where(mine, block[:, None], 0), 1)
    stored = exists_e & (rank < max_work)
    row = work + rank * 8
    tl.store(row, q_start_e + block * ROWS, mask=stored)
    tl.store(row + 1, rows, mask=stored)
    tl.store(row + 2, k_start_e, mask=stored)
    tl.store(row + 3, k_valid_e, mask=stored)
    tl.store(row + 4, k_tile_e, mask=stored)
    tl.store(row + 5, diagonal_e, mask=stored)
    tl.store(row + 6, tl.maximum(tiles, 1), mask=stored)
    tl.store(row + 7, owner, mask=stored)


ALIGNMENTS = {"none": 0, "top_left": 1, "bottom_right": 2}


def _launch(like: Tensor, documents: int, tokens_q: int, tokens_k: int, total_q: int, total_k: int, cu_q: Tensor | None,
            cu_k: Tensor | None, lengths: Tensor | None, align: str, block_rows: int) -> Tiling:
    """`tokens_*` are per document for dense inputs, in all for packed ones."""
    packed = cu_q is not None
    per_document = 1 if packed else -(-tokens_q // TILE), 1 if packed else -(-tokens_k // TILE)
    if packed:
        max_q, max_k = total_q // TILE + documents, total_k // TILE + documents
        max_work = total_q // block_rows + documents
    else:
        max_q, max_k = documents * per_document[0], documents * per_document[1]
        max_work = documents * -(-tokens_q // block_rows)

    def table(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=like.device)

    result = Tiling(table(documents, DOCUMENT_COLUMNS), table(max_q), table(max_k), table(max_work, WORK_COLUMNS), table(2),
                    block_rows)
    none = result.count
    entries = 64
    grid = (max(1, -(-max(max_q, max_k, max_work) // entries)),)
    with on_device(like):
        _build[grid](result.documents, result.q_tiles, result.k_tiles, result.work, result.count,
                     none if cu_q is None else cu_q, none if cu_k is None else cu_k, none if lengths is None else lengths,
                     documents, tokens_q, tokens_k, max_q, max_k, max_work, PACKED=packed, HAS_LENGTHS=lengths is not None,
                     ALIGN=ALIGNMENTS[align], ROWS=block_rows, E=entries, CHUNK=64, num_warps=NUM_WARPS)
    return result


def dense_tiling(query: Tensor, keys: int, *, align: str, key_lengths: Tensor | None, block_rows: int) -> Tiling:
    """Tiling of query [B, Sq, H, D] over `keys` keys per batch item; `align` is "none" (not causal), "top_left" or
    "bottom_right" (to `key_lengths` if given)."""
    batch, queries = query.shape[:2]
    return _launch(query, batch, queries, keys, batch * queries, batch * keys, None, None, key_lengths, align, block_rows)


def packed_tiling(query: Tensor, keys: int, cu_seq_q: Tensor, cu_seq_k: Tensor, *, align: str, block_rows: int) -> Tiling:
    """Tiling of packed query [Tq, H, D] over `keys` packed keys; document n holds rows cu_seq[n]:cu_seq[n + 1]."""
    documents = min(cu_seq_q.shape[0], cu_seq_k.shape[0])
    return _launch(query, documents, query.shape[0], keys, query.shape[0], keys, cu_seq_q.contiguous(), cu_seq_k.contiguous(), None,
                   align, block_rows)


def tiling_of(query: Tensor, keys: int, rows: int, *, is_causal: bool = False, bottom_right: bool = False,
              key_lengths: Tensor | None = None, cu_seq: tuple[Tensor, Tensor] | None = None) -> Tiling:
    """Tiling of one call's documents, dense or (with `cu_seq`) packed, into blocks of `rows` queries; `query` gives the shape."""
    if cu_seq is not None:
        return packed_tiling(query, keys, *cu_seq, align="bottom_right" if is_causal else "none", block_rows=rows)
    align = ("bottom_right" if bottom_right else "top_left") if is_causal else "none"
    return dense_tiling(query, keys, align=align, key_lengths=key_lengths, block_rows=rows)


def lse_layout(x: Tensor, packed: bool) -> tuple[tuple[int, ...], int, int]:
    """Shape of what holds one value per token and head of x ([B, H, S] or [H, T]), and its strides of a head and (beside the
    tokens') of a document."""
    *batch, tokens, heads, _ = x.shape
    return (*batch, heads, tokens), tokens, 0 if packed else (heads - 1) * tokens


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict, dict[str, Any]]]:
    """What the static gate compiles: name, kernel, signature, constants, attributes, options."""
    pointers = ("table", "q_tiles", "k_tiles", "work", "count", "cu_q", "cu_k", "lengths")
    for name, packed, lengths, align in (("dense", False, True, "top_left"), ("packed", True, False, "bottom_right")):
        constants = {"PACKED": packed, "HAS_LENGTHS": lengths, "ALIGN": ALIGNMENTS[align], "ROWS": 128, "E": 64, "CHUNK": 64}
        signature = {argument: "*i32" if argument in pointers else "constexpr" if argument in constants else "i32"
                     for argument in _build.arg_names}
        aligned = {(position,): [["tt.divisibility", 16]] for position in range(len(pointers))}
        yield f"tiling-{name}", _build, signature, constants, aligned, {"num_warps": NUM_WARPS}
