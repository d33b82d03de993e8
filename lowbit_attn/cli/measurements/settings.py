"""Size of a measurement, the inputs it draws and the two numbers it reports."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

HEAD_DIM = 128


@dataclass(frozen=True)
class Settings:
    """`seq` keys per head; `heads` heads per seed, drawn and run together; `rows` query rows per head (0: all of `seq`).

    Rows of one head are equivalent on normal inputs, while every head brings its own V mean into the norm of O: 3 % of it at
    any length. Many heads of few rows measure an error far more precisely than one head of many.
    """

    seq: int = 4096
    heads: int = 4
    seeds: int = 16
    rows: int = 128
    device: str = "cpu"

    def normal_inputs(self, count: int = 3) -> Iterator[list[Tensor]]:
        """Per seed: standard normal, bf16-valued Q [1, heads, rows, 128], then K, V (and more) [1, heads, seq, 128]."""
        for seed in range(self.seeds):
            generator = torch.Generator().manual_seed(seed)
            shape = (1, self.heads, self.seq, HEAD_DIM)
            tensors = [torch.randn(shape, generator=generator).bfloat16().to(self.device) for _ in range(count)]
            yield [tensors[0][:, :, :self.rows or self.seq], *tensors[1:]]

    def __str__(self) -> str:
        rows = "" if self.rows in (0, self.seq) else f", {self.rows} query rows of each"
        return (f"normal inputs, s={self.seq}, d={HEAD_DIM}, {self.seeds} seeds of {self.heads} heads{rows}, "
                f"{torch.device(self.device).type}")


@dataclass
class Comparison:
    """Global relative error |O - R| / |R| and cosine over all the pairs that were added."""

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])

    def add(self, actual: Tensor, reference: Tensor) -> None:
        """Add one pair of equally shaped tensors."""
        a, r = actual.double().flatten(), reference.double().flatten()
        parts = ((a - r).square().sum(), r.square().sum(), a.square().sum(), (a * r).sum())
        self.sums = [total + float(part) for total, part in zip(self.sums, parts, strict=True)]

    @property
    def percent(self) -> float:
        """Relative error in percent."""
        return 100 * math.sqrt(self.sums[0] / self.sums[1])

    @property
    def cosine(self) -> float:
        """Cosine similarity of everything added, as one vector."""
        return self.sums[3] / math.sqrt(self.sums[1] * self.sums[2])
