"""What ran: counts of attention calls by step, expert, block, kind and recipe."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import StringIO
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowbit_attn.schedules import KINDS, Grid, render_grids

NOT_RUN = "–"


class Call(NamedTuple):
    """One attention call; `kind` is "self", "joint" or "cross", and `recipe` what it ran in."""

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
        seconds: of the attention modules, projections included, by recipe; only with `patch(..., report=True)`, and only of
            calls that were not compiled.
        run_seconds: of the whole run, once it is over; only with `patch(..., report=True)`.
    """

    steps: int = 0
    blocks: int = 0
    experts: tuple[str, ...] = ()
    calls: Counter[Call] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    run_seconds: float | None = None

    def grid(self, expert: str | None = None, kind: str | None = None) -> Grid:
        """Recipes that ran, `[step][block]`, of one expert (None: of all); "–" where nothing ran, "a+b" where several did.

        `kind` is "self", "joint" or "cross"; None for all but cross-attention.
        """
        if expert is not None and expert not in self.experts:
            raise ValueError(f"expert: got {expert!r}; accepted: {', '.join(self.experts) or 'none, nothing ran yet'}")
        cells: list[list[list[str]]] = [[[] for _ in range(self.blocks)] for _ in range(self.steps)]
        for call in sorted(self.calls):
            if _is(call, kind) and expert in (None, call.expert) and call.recipe not in cells[call.step][call.block]:
                cells[call.step][call.block].append(call.recipe)
        return [["+".join(cell) or NOT_RUN for cell in row] for row in cells]

    def counts(self, kind: str | None = None) -> dict[str, int]:
        """Number of calls of each recipe; `kind` as in `grid`."""
        totals: Counter[str] = Counter()
        for call, number in self.calls.items():
            if _is(call, kind):
                totals[call.recipe] += number
        return dict(sorted(totals.items()))

    def time_share(self) -> dict[str, float]:
        """Part of the run's time that the attention modules took, by recipe; empty unless measured and over."""
        return {recipe: seconds / self.run_seconds for recipe, seconds in self.seconds.items()} if self.run_seconds else {}

    def __str__(self) -> str:
        text = StringIO()
        Console(width=120, file=text, color_system=None).print(self)
        return text.getvalue().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.calls:
            yield Text("nothing ran yet")
            return
        yield render_grids({expert: self.grid(expert) for expert in self.experts})
        for kind in KINDS:
            if counts := self.counts(kind):
                yield Text(f"{kind}-attention calls: " + _listing(counts.items()))
        if self.fallbacks:
            yield Text("ran unchanged: " + _listing(self.fallbacks.items()))
        if self.run_seconds is not None:
            shares = ", ".join(f"{recipe} {share:.0%}" for recipe, share in self.time_share().items())
            yield Text(f"{self.run_seconds:.2f} s, of which attention modules: {shares or 'not measured in compiled code'}")


def _is(call: Call, kind: str | None) -> bool:
    return call.kind == kind or (kind is None and call.kind != "cross")


def _listing(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts)
