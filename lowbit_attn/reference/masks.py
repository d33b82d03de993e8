"""Which keys a query row sees: key lengths and the causal diagonal, tile by tile."""

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def first_row(self, first_key: int) -> int:
        """A lower bound, rounded down to a multiple of 32, of the rows that see any key from `first_key` on."""
        if self.diagonal is None:
            return 0
        return max(0, first_key - self.diagonal_bounds[1]) // 32 * 32

    def tile(self, rows: range, keys: range) -> Tensor | None:
        """Bool [N, 1, 1, rows, keys], or None where every row is known to see every key."""
        causal = self.diagonal is not None and keys.stop - 1 > rows.start + self.diagonal_bounds[0]
        if not causal and self.key_lengths is None:
            return None
        device = (self.diagonal if self.key_lengths is None else self.key_lengths).device  # type: ignore[union-attr]
        key = torch.arange(keys.start, keys.stop, device=device)
        visible = torch.ones((), dtype=torch.bool, device=device)
        if self.key_lengths is not None:
            visible = (key < self.key_lengths[:, None])[:, None, None, None, :]
        if causal:
            row = torch.arange(rows.start, rows.stop, device=device)
            below = key <= row[:, None] + self.diagonal[:, None, None]  # type: ignore[index]
            visible = visible & below[:, None, None]
        return visible

    def valid_keys(self) -> Tensor | None:
        """Bool [N, 1, keys, 1] of the keys inside `key_lengths`, or None if all are."""
        if self.key_lengths is None:
            return None
        return (torch.arange(self.keys, device=self.key_lengths.device) < self.key_lengths[:, None])[:, None, :, None]


def row_chunks(heads: int, queries: int, tile: int) -> list[range]:
    """Query rows in chunks whose score tile holds about a million elements: memory stays linear in the sequence."""
    rows = max(128, (1 << 20) // max(1, heads * tile) // 128 * 128)
    return [range(start, min(start + rows, queries)) for start in range(0, queries, rows)]
