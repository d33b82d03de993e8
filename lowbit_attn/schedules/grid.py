"""Rules resolved for a concrete run: one recipe per expert, step and attention module."""

import difflib
import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Self

from lowbit_attn.schedules.families import FAMILIES, KINDS, Place, anonymous_places, places
from lowbit_attn.schedules.selector import SelectionError
from lowbit_attn.schedules.source import Location, ScheduleError, Source

if TYPE_CHECKING:
    from lowbit_attn.schedules.schema import AttentionSection, Rule

Grid = list[list[str]]
"""Recipe names, `[step][block]`; "a+b" where the modules of one block differ."""

_RULES: Location = ("attention", "rules")


@dataclass(frozen=True)
class Layout:
    """What a schedule is bound to: steps (None if not known yet), blocks of each stream in order, experts, modules."""

    steps: int | None
    streams: tuple[tuple[str, int], ...]
    experts: tuple[str, ...]
    places: tuple[Place, ...]

    @classmethod
    def of(cls, steps: int | None, blocks: int | Mapping[str, int], experts: tuple[str, ...], model: str = "auto") -> Self:
        """From the arguments of `PrecisionSchedule.bind`. Module names are known if the family and its streams are."""
        known = FAMILIES.get(model, ())
        if isinstance(blocks, Mapping):
            streams = dict(blocks)
        else:
            always = [stream.name for stream in known if stream.published]
            streams = {always[0] if len(always) == 1 else "": blocks}
        counts = {"steps": 1 if steps is None else steps, **{f"blocks {name}".strip(): count for name, count in streams.items()}}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name}: got {count}; accepted: at least 1")
        named = set(streams) <= {stream.name for stream in known}
        found = places(model, streams) if named else anonymous_places(streams)
        return cls(steps, tuple(streams.items()), tuple(experts), tuple(found))

    @property
    def blocks(self) -> int:
        """Number of blocks over all streams."""
        return sum(count for _, count in self.streams)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of attention that there are."""
        return tuple(kind for kind in KINDS if any(place.kind == kind for place in self.places))

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
    """A schedule resolved for a number of steps, blocks and experts.

    Attributes:
        recipes: by expert, `[step][place]`, in the order of `layout.places`.
        ruled: indices of the places that some rule selects at some step, known without the number of steps.
    """

    layout: Layout
    recipes: Mapping[str, list[list[str]]]
    ruled: frozenset[int]

    def recipe(self, step: int, block: int, expert: str | None = None, kind: str | None = None) -> str:
        """Recipe of one block's attention; arguments as in `grid`."""
        return self.grid(expert, kind)[step][block]

    def grid(self, expert: str | None = None, kind: str | None = None) -> Grid:
        """Recipes of one expert, `[step][block]`.

        Args:
            expert: may be left out if there is one only.
            kind: "self", "cross" or "joint"; None for self and joint.
        """
        name = self.layout.experts[0] if expert is None and len(self.layout.experts) == 1 else expert
        if name is None or name not in self.recipes:
            raise ValueError(f"expert: got {expert!r}; accepted: {', '.join(self.layout.experts)}")
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}; accepted: None, {', '.join(KINDS)}")
        rows: Grid = []
        for row in self.recipes[name]:
            cells: list[dict[str, None]] = [{} for _ in range(self.layout.blocks)]
            for place, recipe in zip(self.layout.places, row, strict=True):
                if place.kind == kind or (kind is None and place.kind != "cross"):
                    cells[place.block][recipe] = None
            rows.append(["+".join(cell) for cell in cells])
        return rows


def bind_rules(source: Source, attention: "AttentionSection", layout: Layout) -> BoundSchedule:
    """Apply the rules in order, later ones winning, and refuse those that do not fit or never win."""
    steps = range(layout.steps or 0)
    owners = {expert: [[-1] * len(layout.places) for _ in steps] for expert in layout.experts}
    for number, rule in enumerate(attention.rules):
        for expert, step, place in _cells(source, number, rule, layout):
            owners[expert][step][place] = number
    for number, rule in enumerate(attention.rules):
        winners = {owners[expert][step][place] for expert, step, place in _cells(source, number, rule, layout)}
        if winners and number not in winners:
            raise _shadowed(source, number, rule, layout, winners)
    untouched = [attention.cross if place.kind == "cross" else attention.default for place in layout.places]
    recipes = {expert: [[default if owner < 0 else attention.rules[owner].recipe
                         for owner, default in zip(row, untouched, strict=True)] for row in rows]
               for expert, rows in owners.items()}
    ruled = frozenset(place for number, rule in enumerate(attention.rules)
                      for place in _select_places(source, number, rule, layout))
    return BoundSchedule(layout, recipes, ruled)


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


def _select_places(source: Source, number: int, rule: "Rule", layout: Layout) -> list[int]:
    """Indices of the modules that a rule is for, whatever the step."""
    if rule.kind is not None and rule.kind not in layout.kinds:
        raise source.error((*_RULES, number, "kind"), f"got {rule.kind!r}; accepted for this model: {', '.join(layout.kinds)}")
    blocks = _select_blocks(source, number, rule, layout)
    named = _select_modules(source, number, rule, layout)
    kinds = {rule.kind} if rule.kind else set(KINDS) if rule.modules else {"self", "joint"}
    chosen = [index for index, place in enumerate(layout.places)
              if place.block in blocks and place.kind in kinds and (named is None or place.name in named)]
    if not chosen:
        raise source.error((*_RULES, number), "got keys that no attention module fits at once; accepted: keys that some do")
    return chosen


def _select_modules(source: Source, number: int, rule: "Rule", layout: Layout) -> set[str] | None:
    """Names that the rule's patterns match, None if it has none."""
    if not rule.modules:
        return None
    names = [place.name for place in layout.places if place.name]
    location: Location = (*_RULES, number, "modules")
    if not names:
        raise source.error(location, f"got {list(rule.modules)} for a model whose module names are not known here; accepted: "
                                     f"a schedule with model: {', '.join(FAMILIES)}")
    matched: set[str] = set()
    for pattern in rule.modules:
        found = fnmatch.filter(names, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise source.error(location, f"got {pattern!r}, which matches no attention module; accepted: a pattern such as "
                                         f"{near[0]!r}, with * and ?")
        matched.update(found)
    return matched


def _cells(source: Source, number: int, rule: "Rule", layout: Layout) -> Iterator[tuple[str, int, int]]:
    """Every (expert, step, place) that a rule selects; checks its keys even while the number of steps is unknown."""
    experts = _select_experts(source, number, rule, layout)
    chosen = _select_places(source, number, rule, layout)
    steps = _select(source, number, "steps", rule, layout.steps) if layout.steps else frozenset[int]()
    return product(experts, steps, chosen)


def _shadowed(source: Source, number: int, rule: "Rule", layout: Layout, later: set[int]) -> ScheduleError:
    by = ", ".join(f"rules[{i}]" + (f" (line {line})" if (line := source.line((*_RULES, i))) else "") for i in sorted(later))
    return source.error((*_RULES, number), f"got a rule for {rule.recipe!r} that never applies with {layout.steps} steps and "
                                           f"{layout.blocks} blocks, for later rules win: {by}; accepted: a rule that they "
                                           "leave something to")
