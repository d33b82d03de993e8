"""Which keys a query row sees: key lengths and the causal diagonal, tile by tile."""

from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_TILE = 128
"""Rows that share the decision whether a key tile is a diagonal one."""


@dataclass(frozen=True)
class Segment:
    """Consecutive query rows that treat one key tile alike.

    `visible` is bool, broadcastable to [N, 1, 1, rows, keys], or None where every row sees every key. `diagonal` marks
    tiles that the causal diagonal crosses for the rows' query tile.
    """

    rows: range
    visible: Tensor | None
    diagonal: bool


@dataclass(frozen=True)
class Visibility:
    """Row i of batch item n sees key j when j < key_lengths[n] and, if causal, j <= i + diagonal[n].

    `key_lengths` and `diagonal` are int [N] or None (all keys; not causal). `diagonal_bounds` are host-side bounds of
    `diagonal`, so that tiles can be skipped without reading the device.
    """

    queries: int
    keys: int
    key_lengths: Tensor | None = None
    diagonal: Tensor | None = None
    diagonal_bounds: tuple[int, int] = (0, 0)

    @classmethod
    def create(cls, batch: int, queries: int, keys: int, *, is_causal: bool, bottom_right: bool = False,
               key_lengths: Tensor | None = None, device: torch.device | None = None) -> "Visibility":
        """`bottom_right` aligns the last query with the last key (of `key_lengths`, if given); else row 0 sees key 0."""
        if not is_causal:
            return cls(queries, keys, key_lengths)
        if bottom_right and key_lengths is not None:
            return cls(queries, keys, key_lengths, key_lengths - queries, (-queries, keys - queries))
        offset = keys - queries if bottom_right else 0
        return cls(queries, keys, key_lengths, torch.full((batch,), offset, device=device), (offset, offset))

    def segments(self, rows: range, tile: range) -> list[Segment]:
        """The rows among `rows` that may see a key of `tile`: those on the diagonal, then those that see all of it.

        Segments start at multiples of 32 rows, the diagonal one ends at a multiple of QUERY_TILE.
        """
        if self.diagonal is None:
            return [Segment(rows, self._visible(rows, tile, causal=False), False)]
        lower, upper = self.diagonal_bounds
        first = max(rows.start, max(0, tile.start - upper) // 32 * 32)
        full = max(first, -(-(tile.stop - 1 - lower) // QUERY_TILE) * QUERY_TILE)
        crossed, complete = range(first, min(full, rows.stop)), range(full, rows.stop)
        segments = []
        if crossed:
            segments.append(Segment(crossed, self._visible(crossed, tile, causal=True), True))
        if complete:
            segments.append(Segment(complete, self._visible(complete, tile, causal=False), False))
        return segments

    def _visible(self, rows: range, tile: range, *, causal: bool) -> Tensor | None:
        visible = None
        if self.key_lengths is not None:
            key = torch.arange(tile.start, tile.stop, device=self.key_lengths.device)
            visible = (key < self.key_lengths[:, None])[:, None, None, None, :]
        if causal and self.diagonal is not None:
            key = torch.arange(tile.start, tile.stop, device=self.diagonal.device)
            row = torch.arange(rows.start, rows.stop, device=self.diagonal.device)
            below = (key <= row[:, None] + self.diagonal[:, None, None])[:, None, None]
            visible = below if visible is None else visible & below
        return visible

    def valid_keys(self) -> Tensor | None:
        """Bool [N, 1, keys, 1] of the keys inside `key_lengths`, or None if all are."""
        if self.key_lengths is None:
            return None
        return (torch.arange(self.keys, device=self.key_lengths.device) < self.key_lengths[:, None])[:, None, :, None]


def row_chunks(heads: int, queries: int, tile: int) -> list[range]:
    """Query rows in chunks whose score tile holds about a million elements: memory stays linear in the sequence."""
    rows = max(QUERY_TILE, (1 << 20) // max(1, heads * tile) // QUERY_TILE * QUERY_TILE)
    return [range(start, min(start + rows, queries)) for start in range(0, queries, rows)]


def key_tiles(keys: int, tile: int) -> list[range]:
    """The key tiles of a sequence, the last one possibly short."""
    return [range(start, min(start + tile, keys)) for start in range(0, keys, tile)]
