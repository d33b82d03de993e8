"""What ran: counts of attention calls by step, expert, block, kind and recipe."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowbit_attn.schedules import Grid, render_grids

NOT_RUN = "–"


class Call(NamedTuple):
    """One attention call; `kind` is "self" or "cross", and `recipe` what it ran in."""

    step: int
    expert: str
    block: int
    kind: str
    recipe: str


@dataclass
class RunReport:
    """The attention calls of a pipeline's last run, as its processors reported them. Printable with rich.

    Attributes:
        steps, blocks, experts: extent of the run.
        calls: how often each call ran; guidance in two passes counts two. Cross-attention is here only if it has a recipe.
        fallbacks: calls that ran in the stock processor instead of their recipe, by reason.
    """

    steps: int = 0
    blocks: int = 0
    experts: tuple[str, ...] = ()
    calls: Counter[Call] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def grid(self, expert: str | None = None, kind: str = "self") -> Grid:
        """Recipes that ran, `[step][block]`, of one expert (None: of all); "–" where nothing ran, "a+b" where several did."""
        if expert is not None and expert not in self.experts:
            raise ValueError(f"expert: got {expert!r}; accepted: {', '.join(self.experts) or 'none, nothing ran yet'}")
        cells: list[list[list[str]]] = [[[] for _ in range(self.blocks)] for _ in range(self.steps)]
        for call in sorted(self.calls):
            if call.kind == kind and expert in (None, call.expert) and call.recipe not in cells[call.step][call.block]:
                cells[call.step][call.block].append(call.recipe)
        return [["+".join(cell) or NOT_RUN for cell in row] for row in cells]

    def counts(self, kind: str = "self") -> dict[str, int]:
        """Number of calls of each recipe."""
        totals: Counter[str] = Counter()
        for call, number in self.calls.items():
            if call.kind == kind:
                totals[call.recipe] += number
        return dict(sorted(totals.items()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.calls:
            yield Text("nothing ran yet")
            return
        yield render_grids({expert: self.grid(expert) for expert in self.experts})
        for kind in ("self", "cross"):
            if counts := self.counts(kind):
                yield Text(f"{kind}-attention calls: " + _listing(counts.items()))
        if self.fallbacks:
            yield Text("ran unchanged: " + _listing(self.fallbacks.items()))


def _listing(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts)
