"""Rules resolved for a concrete run: one recipe per expert, step and block."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Self

from lowbit_attn.schedules.selector import SelectionError
from lowbit_attn.schedules.source import Location, ScheduleError, Source

if TYPE_CHECKING:
    from lowbit_attn.schedules.schema import AttentionSection, Rule

Grid = list[list[str]]
"""Recipe names, `[step][block]`."""

_RULES: Location = ("attention", "rules")


@dataclass(frozen=True)
class Layout:
    """What a schedule is bound to: steps (None if not known yet), blocks of each stream in order, experts."""

    steps: int | None
    streams: tuple[tuple[str, int], ...]
    experts: tuple[str, ...]

    @classmethod
    def of(cls, steps: int | None, blocks: int | Mapping[str, int], experts: tuple[str, ...]) -> Self:
        """From the arguments of `PrecisionSchedule.bind`."""
        streams = tuple(blocks.items()) if isinstance(blocks, Mapping) else (("", blocks),)
        counts = {"steps": 1 if steps is None else steps, **{f"blocks {name}".strip(): count for name, count in streams}}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name}: got {count}; accepted: at least 1")
        return cls(steps, streams, tuple(experts))

    @property
    def blocks(self) -> int:
        """Number of blocks over all streams."""
        return sum(count for _, count in self.streams)

    def blocks_of(self, stream: str) -> frozenset[int] | None:
        """Indices of one stream's blocks, None if there is no such stream."""
        start = 0
        for name, count in self.streams:
            if name == stream:
                return frozenset(range(start, start + count))
            start += count
        return None


@dataclass(frozen=True)
class BoundSchedule:
    """A schedule resolved for a number of steps, blocks and experts."""

    layout: Layout
    cross: str
    grids: Mapping[str, Grid]

    def recipe(self, step: int, block: int, expert: str | None = None, kind: str = "self") -> str:
        """Recipe of one attention call; `kind` is "self" or "cross", `expert` may be left out if there is one only."""
        if kind == "cross":
            return self.cross
        if kind != "self":
            raise ValueError(f"kind: got {kind!r}; accepted: 'self', 'cross'")
        return self.grid(expert)[step][block]

    def grid(self, expert: str | None = None) -> Grid:
        """Recipes of one expert's self-attention, `[step][block]`."""
        name = self.layout.experts[0] if expert is None and len(self.layout.experts) == 1 else expert
        if name is None or name not in self.grids:
            raise ValueError(f"expert: got {expert!r}; accepted: {', '.join(self.layout.experts)}")
        return self.grids[name]


def bind_rules(source: Source, attention: "AttentionSection", layout: Layout) -> BoundSchedule:
    """Apply the rules in order, later ones winning, and refuse those that do not fit or never win."""
    steps = range(layout.steps or 0)
    owners = {expert: [[-1] * layout.blocks for _ in steps] for expert in layout.experts}
    for number, rule in enumerate(attention.rules):
        for expert, step, block in _cells(source, number, rule, layout):
            owners[expert][step][block] = number
    for number, rule in enumerate(attention.rules):
        winners = {owners[expert][step][block] for expert, step, block in _cells(source, number, rule, layout)}
        if winners and number not in winners:
            raise _shadowed(source, number, rule, layout, winners)
    grids = {expert: [[attention.default if owner < 0 else attention.rules[owner].recipe for owner in row] for row in rows]
             for expert, rows in owners.items()}
    return BoundSchedule(layout, attention.cross, grids)


def _select(source: Source, number: int, key: str, rule: "Rule", count: int) -> frozenset[int]:
    try:
        chosen: frozenset[int] = getattr(rule, key).resolve(count, key)
    except SelectionError as error:
        location: Location = (*_RULES, number, key)
        if source.value((*location, error.key)) is not None:
            location = (*location, error.key)
        raise source.error(location, str(error)) from None
    return chosen


def _select_blocks(source: Source, number: int, rule: "Rule", layout: Layout) -> frozenset[int]:
    blocks = _select(source, number, "blocks", rule, layout.blocks)
    if rule.stream is None:
        return blocks
    of_stream = layout.blocks_of(rule.stream)
    if of_stream is None:
        names = ", ".join(name for name, _ in layout.streams if name)
        raise source.error((*_RULES, number, "stream"),
                           f"got {rule.stream!r}; accepted: {names or 'no stream, this model has one kind of block'}")
    if not blocks & of_stream:
        raise source.error((*_RULES, number, "blocks"),
                           f"got blocks outside stream {rule.stream!r}; accepted: {min(of_stream)} to {max(of_stream)}")
    return blocks & of_stream


def _select_experts(source: Source, number: int, rule: "Rule", layout: Layout) -> tuple[str, ...]:
    if rule.expert is None:
        return layout.experts
    if rule.expert not in layout.experts:
        raise source.error((*_RULES, number, "expert"),
                           f"got {rule.expert!r}; accepted here: leave it out, this pipeline has {', '.join(layout.experts)}")
    return (rule.expert,)


def _cells(source: Source, number: int, rule: "Rule", layout: Layout) -> Iterator[tuple[str, int, int]]:
    """Every (expert, step, block) that a rule selects; checks its keys even while the number of steps is unknown."""
    experts = _select_experts(source, number, rule, layout)
    blocks = _select_blocks(source, number, rule, layout)
    steps = _select(source, number, "steps", rule, layout.steps) if layout.steps else frozenset[int]()
    return product(experts, steps, blocks)


def _shadowed(source: Source, number: int, rule: "Rule", layout: Layout, later: set[int]) -> ScheduleError:
    by = ", ".join(f"rules[{i}]" + (f" (line {line})" if (line := source.line((*_RULES, i))) else "") for i in sorted(later))
    return source.error((*_RULES, number), f"got a rule for {rule.recipe!r} that never applies with {layout.steps} steps and "
                                           f"{layout.blocks} blocks, for later rules win: {by}; accepted: a rule that they "
                                           "leave something to")
