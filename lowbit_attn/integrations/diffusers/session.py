"""A patched pipeline: the plan, and the session that carries it out."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console

from lowbit_attn.integrations.diffusers.adapters import Adapter, Site, adapter_for
from lowbit_attn.integrations.diffusers.clock import Clock
from lowbit_attn.integrations.diffusers.observe import Stopwatch, observe_forwards
from lowbit_attn.integrations.diffusers.processors import PROCESSORS, LowBitProcessor, counterpart
from lowbit_attn.integrations.diffusers.processors.base import RESTING
from lowbit_attn.integrations.diffusers.record import Call, RunReport
from lowbit_attn.recipes import UNQUANTIZED
from lowbit_attn.schedules import UNCHANGED, BoundSchedule, Layout, Place, PrecisionSchedule


@dataclass(frozen=True)
class Plan:
    """A schedule that fits a pipeline: everything that is checked before anything is changed."""

    adapter: Adapter
    schedule: PrecisionSchedule
    models: dict[str, Any]
    layout: Layout
    sites: dict[str, list[tuple[int, Site]]]  # by expert, with the index of each site's place in the layout

    @classmethod
    def of(cls, pipe: Any, schedule: PrecisionSchedule, model: str, present: "Session | None") -> Self:
        """Check a schedule against a pipeline; `present` is the session that it already has, if any."""
        adapter = adapter_for(pipe, model)
        models = adapter.experts(pipe)
        _check_pipeline(pipe, adapter, models)
        counts = [adapter.blocks(each) for each in models.values()]
        if any(count != counts[0] for count in counts):
            shown = [list(count.values()) if len(count) > 1 else sum(count.values()) for count in counts]
            raise ValueError(f"pipe: experts with different numbers of blocks, {shown}; accepted: equal numbers")
        bound = schedule.check(counts[0], tuple(models), adapter.family)
        wanted = _wanted(schedule, bound, adapter.family)
        sites = {expert: [(index, Site(place, each.get_submodule(place.name))) for index, place in wanted]
                 for expert, each in models.items()}
        ours = () if present is None else present.processors()
        for expert, own in sites.items():
            for _, site in own:
                _check_site(expert, site, ours)
        return cls(adapter, schedule, models, bound.layout, sites)


def _check_pipeline(pipe: Any, adapter: Adapter, models: dict[str, Any]) -> None:
    if not models:
        components = " or ".join(adapter.components.values())
        raise ValueError(f"pipe: this {type(pipe).__name__} has no transformer; accepted: {components} set")
    scheduler = getattr(pipe, "scheduler", None)
    if not all(hasattr(scheduler, name) for name in ("set_timesteps", "step")):
        raise TypeError(f"pipe.scheduler: got a {type(scheduler).__name__}; accepted: one with set_timesteps and step")
    for expert, model in models.items():
        if not any(cls.__name__ in adapter.models for cls in type(model).__mro__):
            raise TypeError(f"pipe {expert}: got a {type(model).__name__}; accepted for {adapter.family!r}: "
                            f"{', '.join(adapter.models)}")


def _wanted(schedule: PrecisionSchedule, bound: BoundSchedule, family: str) -> list[tuple[int, Place]]:
    """Modules that get a processor: of the cross-attention only those that the schedule gives a recipe at some step."""
    cross = schedule.attention.cross
    if cross != UNCHANGED and "cross" not in bound.layout.kinds:
        raise ValueError(f"schedule attention.cross: got {cross!r}; accepted for {family!r}: {UNCHANGED!r}, it has no "
                         "cross-attention that can run in low bits")
    return [(index, place) for index, place in enumerate(bound.layout.places)
            if place.kind != "cross" or cross != UNCHANGED or index in bound.ruled]


def _check_site(expert: str, site: Site, ours: tuple[LowBitProcessor, ...]) -> None:
    processor = site.module.processor
    if any(processor is own for own in ours):
        processor = processor.stock
    where = f"{expert} {site.place.name}"
    if isinstance(processor, LowBitProcessor):
        raise ValueError(f"{where}: patched through another pipeline that shares this model; unpatch that one first")
    if counterpart(processor) is None:
        raise ValueError(f"{where}: got processor {type(processor).__name__}; accepted: diffusers' own, one of "
                         f"{', '.join(PROCESSORS)}")
    if site.place.kind == "cross" and getattr(site.module, "add_k_proj", None) is not None:
        raise ValueError(f"{where}: cross-attention to images as well as text; accepted: attention.cross: {UNCHANGED}")


class Session:
    """An installed plan: sets the processors' recipes as the clock ticks and collects what they report."""

    def __init__(self, pipe: Any, plan: Plan, measure: bool) -> None:
        self._pipe, self._plan = pipe, plan
        self._report = RunReport()
        self._next: RunReport | None = None  # of a run that has not called a model yet
        self._stopwatch = Stopwatch() if measure else None
        self._warned: set[str] = set()
        self._bound: BoundSchedule | None = None
        self._installed: dict[str, list[tuple[int, Site, LowBitProcessor]]] = {
            expert: [(index, site, self._install(expert, site)) for index, site in sites] for expert, sites in plan.sites.items()}
        if self._stopwatch is not None:
            for sites in plan.sites.values():
                for _, site in sites:
                    self._stopwatch.watch(site.module)
        self._restore = [observe_forwards(model, functools.partial(self._forward, expert))
                         for expert, model in plan.models.items()]
        self._clock = Clock(self, pipe)

    def _install(self, expert: str, site: Site) -> LowBitProcessor:
        stock = site.module.processor
        kind = counterpart(stock)
        assert kind is not None
        processor = kind(stock, f"{expert} {site.place.name}", self._plan.schedule.attention.on_unsupported)
        processor.recipe, processor.outside = RESTING, self._called_outside
        site.module.set_processor(processor)
        return processor

    def __deepcopy__(self, memo: dict[int, Any]) -> "Session":
        raise TypeError("a patched pipeline cannot be copied: unpatch it first, then patch both")

    def __reduce__(self) -> str:
        raise TypeError("a patched pipeline cannot be pickled: unpatch it first")

    def uninstall(self) -> None:
        """Put back what was there."""
        self._clock.release()
        if self._stopwatch is not None:
            self._stopwatch.remove()
        for restore in self._restore:
            restore()
        for installed in self._installed.values():
            for _, site, processor in installed:
                processor.recipe, processor.outside = UNQUANTIZED, None
                if site.module.processor is processor:  # someone may have set another one since
                    site.module.set_processor(processor.stock)

    def processors(self) -> tuple[LowBitProcessor, ...]:
        """The installed ones."""
        return tuple(processor for installed in self._installed.values() for _, _, processor in installed)

    def snapshot(self) -> RunReport:
        """A copy of the report so far."""
        taken = copy(self._report)
        taken.calls, taken.fallbacks = copy(self._report.calls), copy(self._report.fallbacks)
        if self._stopwatch is not None:
            taken.seconds, taken.run_seconds = self._stopwatch.seconds()
        return taken

    # What the clock tells.

    def run_started(self, steps: int) -> None:
        """Resolve the schedule for this number of steps; an error here comes before any denoising."""
        self._rest()
        now = self._plan.adapter.experts(self._pipe)
        for expert, model in self._plan.models.items():
            if now.get(expert) is not model:
                raise RuntimeError(f"pipe {expert}: the model was replaced after patch(); call patch() again")
        self._reclaim()
        streams, experts = dict(self._plan.layout.streams), tuple(self._plan.models)
        self._bound = self._plan.schedule.bind(steps, streams, experts, self._plan.adapter.family)
        self._next = RunReport(steps, self._plan.layout.blocks, experts)
        if self._stopwatch is not None:
            self._stopwatch.start()
        self.step_started(0)

    def _reclaim(self) -> None:
        """Take back modules whose processors were replaced since, as CogVideoX's `fuse_qkv_projections` does."""
        for expert, installed in self._installed.items():
            for number, (index, site, processor) in enumerate(installed):
                present = site.module.processor
                if present is processor:
                    continue
                if isinstance(present, LowBitProcessor):  # put back by unfuse_qkv_projections
                    installed[number] = (index, site, present)
                elif counterpart(present) is not None:
                    installed[number] = (index, site, self._install(expert, site))
                else:
                    raise RuntimeError(f"{processor.name}: the processor was replaced after patch() by a "
                                       f"{type(present).__name__}; call patch() again, or unpatch()")

    def step_started(self, step: int) -> None:
        """Hand every processor its recipe."""
        assert self._bound is not None
        for expert, installed in self._installed.items():
            recipes = self._bound.recipes[expert][step]
            for index, _, processor in installed:
                processor.recipe = recipes[index]

    def step_ending(self) -> None:
        """Collect from models that were called without `cache_context`."""
        for expert in self._installed:
            self._collect(expert)

    def run_ended(self) -> None:
        """Between runs attention is stock."""
        self._rest()
        if self._stopwatch is not None and self._next is None:
            self._stopwatch.stop()
            Console(stderr=True).print(self.snapshot())

    def _rest(self) -> None:
        for processor in self.processors():
            processor.recipe, processor.ran, processor.fell_back = RESTING, None, None
            processor.eager_calls.clear()

    # What the models' forwards tell.

    @contextmanager
    def _forward(self, expert: str) -> Iterator[None]:
        self._clock.follow(mid_run=True)  # the scheduler may have been replaced since the last call
        if not self._clock.running:
            self._called_outside()
        try:
            yield
        finally:
            self._collect(expert)

    def _called_outside(self) -> None:
        self._warn("model called outside a run: pipe.scheduler is not between set_timesteps and its last step, so attention is "
                   "unchanged. A second pipeline that shares this model must share its scheduler too; a modular pipeline is "
                   "given another scheduler by update_components")

    def _collect(self, expert: str) -> None:
        for _, site, processor in self._installed[expert]:
            if processor.ran is not None and self._clock.running:
                if self._next is not None:
                    self._report, self._next = self._next, None
                place = site.place
                for recipe, number in (processor.eager_calls or {processor.ran: 1}).items():
                    self._report.calls[Call(self._clock.step, expert, place.block, place.kind, recipe)] += number
            if processor.fell_back is not None:  # and so has run
                self._report.fallbacks[processor.fell_back] += 1
                self._warn(f"{processor.name}: attention_mask with {processor.fell_back} is not key padding; such calls run "
                           "unchanged")
            processor.ran = processor.fell_back = None
            processor.eager_calls.clear()

    def _warn(self, text: str) -> None:
        """Once per session and matter."""
        matter = text.partition(": ")[2]
        if matter not in self._warned:
            self._warned.add(matter)
            warnings.warn(f"lowbit_attn: {text}", stacklevel=2)
