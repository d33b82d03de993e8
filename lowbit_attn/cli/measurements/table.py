"""Lines of measured and published numbers, and their three forms: rich table, CSV, Markdown."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text

HEADINGS = ("case", "quantity", "measured", "published", "difference", "tolerance")


@dataclass(frozen=True)
class Line:
    """One number: what was measured, what its source printed (None: nothing), how far apart they may be (None: unstated).

    `at_least` makes the published number a floor that the measured one must not fall below.
    """

    case: str
    quantity: str
    measured: float
    published: float | None = None
    tolerance: float | None = None
    decimals: int = 3
    at_least: bool = False

    @property
    def difference(self) -> float | None:
        """Measured minus published."""
        return None if self.published is None else self.measured - self.published

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance, or nothing was promised."""
        if self.difference is None or self.tolerance is None:
            return True
        return self.difference >= -self.tolerance and (self.at_least or self.difference <= self.tolerance)

    def cells(self) -> tuple[str, ...]:
        """The line as text, in the order of HEADINGS."""
        def number(value: float | None, sign: str = "") -> str:
            return "" if value is None else f"{value:{sign}.{self.decimals}f}"

        published = (">= " if self.at_least and self.published is not None else "") + number(self.published)
        tolerance = "" if self.tolerance is None else f"{self.tolerance:g}"
        return self.case, self.quantity, number(self.measured), published, number(self.difference, "+"), tolerance


@dataclass(frozen=True)
class Table:
    """A titled list of lines with the source of the published column and the conditions of the measured one."""

    title: str
    source: str
    conditions: str
    lines: Sequence[Line]
    notes: Sequence[str] = ()

    def rich(self) -> RichTable:
        """For a terminal; a difference out of tolerance is red."""
        table = RichTable(title=self.title, caption="\n".join([f"{self.conditions}; published: {self.source}", *self.notes]),
                          caption_justify="left")
        for index, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=index >= 2)
        previous = None
        for line in self.lines:
            case, *rest = line.cells()
            style = "" if line.holds else "bold red"
            table.add_row(case if case != previous else "", *rest[:3], Text(rest[3], style=style), rest[4])
            previous = case
        return table

    def csv(self) -> str:
        """Comma-separated, with full precision in the number columns."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["table", *HEADINGS])
        for line in self.lines:
            writer.writerow([self.title, line.case, line.quantity, line.measured, *("" if x is None else x for x in (
                line.published, line.difference, line.tolerance))])
        return stream.getvalue()

    def markdown(self) -> str:
        """A GitHub table with its conditions above."""
        rows = ["| " + " | ".join(HEADINGS) + " |", "|---|---|" + "---:|" * (len(HEADINGS) - 2)]
        rows += ["| " + " | ".join(cell.replace("|", "\\|") for cell in line.cells()) + " |" for line in self.lines]
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"### {self.title}", "", f"{self.conditions}. Published: {self.source}.", "", *rows, *notes]) + "\n"
