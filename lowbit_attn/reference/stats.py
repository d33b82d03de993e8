"""What happened in a forward or backward: elements that clamped or vanished, tiles and rollbacks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.recipes import Operand


@dataclass
class Count:
    """Elements of one operand: how many were quantized, clamped at the largest code, or non-zero and became zero."""

    total: int = 0
    saturated: int = 0
    flushed: int = 0

    @property
    def flushed_fraction(self) -> float:
        """Share of all elements that quantization set to zero."""
        return self.flushed / self.total if self.total else 0.0


@dataclass
class Stats:
    """Counters per operand ("q", "k", "v", "p", "do", "ds"), and (row, key tile) steps with the rollbacks among them.

    Reading a device tensor for each count makes this slow: it is for study, not for training.
    """

    operands: dict[str, Count] = field(default_factory=dict)
    tiles: int = 0
    rollbacks: int = 0

    @property
    def rollback_rate(self) -> float:
        """Share of the (row, key tile) steps in which a frozen maximum was raised."""
        return self.rollbacks / self.tiles if self.tiles else 0.0

    def __str__(self) -> str:
        lines = [f"{name}: {count.total} elements, {count.saturated} saturated, {count.flushed} flushed "
                 f"({count.flushed_fraction:.3%})" for name, count in self.operands.items()]
        return "\n".join([*lines, f"rolled back: {self.rollbacks} of {self.tiles} row steps ({self.rollback_rate:.3%})"])

    def add(self, name: str, total: int, saturated: Tensor, flushed: Tensor) -> None:
        """Add counts of one operand to those so far."""
        count = self.operands.setdefault(name, Count())
        count.total += total
        count.saturated += int(saturated)
        count.flushed += int(flushed)

    def record(self, name: str, x: Tensor, operand: Operand, axis: int = -1, top: float | None = None) -> None:
        """Count what quantizing `x` in the operand's format does to its elements."""
        if not operand.is_coded or x.numel() == 0:
            return
        element = formats.element_format(operand.element)
        saturated, flushed = formats.quantization_counts(x, element, formats.block_layout(operand.layout), operand.rule,
                                                         axis=axis, top=top)
        self.add(name, x.numel(), saturated, flushed)

    def record_scaled(self, name: str, source: Tensor, scaled: Tensor, operand: Operand) -> None:
        """The same for an operand without stored scales, already multiplied by its constant factor."""
        self.add(name, source.numel(), *formats.element_counts(source, scaled, formats.element_format(operand.element)))

    def record_step(self, rolled_back: Tensor) -> None:
        """One key tile for a set of rows, some of which rolled back."""
        self.tiles += rolled_back.numel()
        self.rollbacks += int(torch.count_nonzero(rolled_back))
