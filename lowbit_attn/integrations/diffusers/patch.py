"""`patch` a diffusers pipeline with a precision schedule, `unpatch` it, and `report` what ran."""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

from lowbit_attn.integrations.diffusers.adapters import Adapter, Site, adapter_for
from lowbit_attn.integrations.diffusers.clock import Clock
from lowbit_attn.integrations.diffusers.processors.base import LowBitProcessor
from lowbit_attn.integrations.diffusers.record import Call, RunReport
from lowbit_attn.recipes import UNQUANTIZED
from lowbit_attn.schedules import UNCHANGED, BoundSchedule, PrecisionSchedule, load

Pipeline = TypeVar("Pipeline")

_SESSION = "_lowbit_attn_session"


def patch(pipe: Pipeline, schedule: str | Path | Mapping[str, Any] | PrecisionSchedule) -> Pipeline:
    """Run a pipeline's self-attention in the precisions of a schedule, from the next call on; returns the pipeline.

    The schedule is in force while the pipeline's scheduler runs, from `set_timesteps` to the last `step`; calls of the model
    outside a run are stock attention, as is whatever a schedule gives recipe `bf16`. Weights, state dicts and all else but the
    scheduled attention modules stay as they are. Patching again replaces the schedule. An error leaves everything as it was.

    Args:
        pipe: a `WanPipeline` (one or two experts) or a `HunyuanVideoPipeline`.
        schedule: path of a YAML file, YAML text, a mapping, a `PrecisionSchedule`, or a plain recipe name.

    Raises:
        TypeError: a pipeline of another class.
        ValueError: a schedule that is wrong or does not fit this pipeline, or modules whose processors are not stock.
    """
    plan = _Plan.of(pipe, load(schedule))
    _remove(pipe)
    setattr(pipe, _SESSION, _Session(pipe, plan))
    return pipe


def unpatch(pipe: Pipeline) -> Pipeline:
    """Undo `patch` completely: the same processor objects, scheduler and model methods as before; returns the pipeline."""
    if _session_of(pipe) is None:
        raise ValueError(f"pipe: this {type(pipe).__name__} is not patched")
    _remove(pipe)
    return pipe


def report(pipe: Any) -> RunReport:
    """What the attention of a patched pipeline really ran in its last run (so far, if it is still running).

    Processors say so themselves each time they run, compiled or not, so a block that a cache skipped or a call that fell back
    is reported as such.
    """
    session = _session_of(pipe)
    if session is None:
        raise ValueError(f"pipe: this {type(pipe).__name__} is not patched")
    return session.snapshot()


def _session_of(pipe: Any) -> "_Session | None":
    return vars(pipe).get(_SESSION) if hasattr(pipe, "__dict__") else None


def _remove(pipe: Any) -> None:
    if (session := _session_of(pipe)) is not None:
        session.uninstall()
        delattr(pipe, _SESSION)


@dataclass(frozen=True)
class _Plan:
    """A schedule that fits a pipeline: everything `patch` checks before it changes anything."""

    adapter: Adapter
    schedule: PrecisionSchedule
    models: dict[str, Any]
    blocks: int | dict[str, int]
    sites: dict[str, list[Site]]

    @classmethod
    def of(cls, pipe: Any, schedule: PrecisionSchedule) -> "_Plan":
        name, adapter = adapter_for(pipe, schedule.model)
        models = adapter.models(pipe)
        if not models:
            components = " or ".join(adapter.components.values())
            raise ValueError(f"pipe: this {type(pipe).__name__} has no transformer; accepted: {components} set")
        if not all(hasattr(pipe.scheduler, name) for name in ("set_timesteps", "step")):
            raise TypeError(f"pipe.scheduler: got a {type(pipe.scheduler).__name__}; accepted: one with set_timesteps and step")
        for expert, model in models.items():
            if not isinstance(model, adapter.model):
                raise TypeError(f"pipe {expert}: got a {type(model).__name__}; accepted for {name!r}: {adapter.model.__name__}")
        counts = [adapter.blocks(model) for model in models.values()]
        if any(count != counts[0] for count in counts):
            raise ValueError(f"pipe: experts with different numbers of blocks, {counts}; accepted: equal numbers")
        schedule.check(counts[0], tuple(models))
        wanted = ("self",) if schedule.attention.cross == UNCHANGED else ("self", "cross")
        sites = {expert: [site for site in adapter.sites(model) if site.kind in wanted] for expert, model in models.items()}
        current = _session_of(pipe)
        for expert, own in sites.items():
            for site in own:
                _check_site(adapter, expert, site, () if current is None else current.processors())
        if "cross" in wanted and not any(site.kind == "cross" for own in sites.values() for site in own):
            raise ValueError(f"schedule attention.cross: got {schedule.attention.cross!r}; accepted for {name!r}: "
                             f"{UNCHANGED!r}, its attention is joint")
        return cls(adapter, schedule, models, counts[0], sites)


def _check_site(adapter: Adapter, expert: str, site: Site, ours: tuple[LowBitProcessor, ...]) -> None:
    processor = site.module.processor
    if any(processor is own for own in ours):
        processor = processor.stock
    where = f"{expert} {site.name}"
    if isinstance(processor, LowBitProcessor):
        raise ValueError(f"{where}: patched through another pipeline that shares this model; unpatch that one first")
    if type(processor) is not adapter.stock:
        raise ValueError(f"{where}: got processor {type(processor).__name__}; accepted: {adapter.stock.__name__}")
    if site.kind == "cross" and getattr(site.module, "add_k_proj", None) is not None:
        raise ValueError(f"{where}: cross-attention to images as well as text; accepted: attention.cross: {UNCHANGED}")


class _Session:
    """An installed plan: sets the processors' recipes as the clock ticks and collects what they report."""

    def __init__(self, pipe: Any, plan: _Plan) -> None:
        self._pipe, self._plan = pipe, plan
        self._report = RunReport()
        self._warned: set[str] = set()
        self._bound: BoundSchedule | None = None
        self._installed: dict[str, list[tuple[Site, LowBitProcessor]]] = {}
        on_unsupported = plan.schedule.attention.on_unsupported
        for expert, sites in plan.sites.items():
            self._installed[expert] = []
            for site in sites:
                processor = plan.adapter.processor(site.module.processor, f"{expert} {site.name}", on_unsupported)
                site.module.set_processor(processor)
                self._installed[expert].append((site, processor))
        self._restore = [_observe_forwards(model, functools.partial(self._forward, expert))
                         for expert, model in plan.models.items()]
        self._clock = Clock(self)
        self._clock.attach(pipe.scheduler)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Session":
        raise TypeError("a patched pipeline cannot be copied: unpatch it first, then patch both")

    def __reduce__(self) -> str:
        raise TypeError("a patched pipeline cannot be pickled: unpatch it first")

    def uninstall(self) -> None:
        """Put back what was there."""
        self._clock.release()
        for restore in self._restore:
            restore()
        for pairs in self._installed.values():
            for site, processor in pairs:
                if site.module.processor is processor:  # someone may have set another one since
                    site.module.set_processor(processor.stock)

    def processors(self) -> tuple[LowBitProcessor, ...]:
        """The installed ones."""
        return tuple(processor for pairs in self._installed.values() for _, processor in pairs)

    def snapshot(self) -> RunReport:
        """A copy of the report so far."""
        taken = copy(self._report)
        taken.calls, taken.fallbacks = copy(self._report.calls), copy(self._report.fallbacks)
        return taken

    # What the clock tells.

    def run_started(self, steps: int) -> None:
        """Resolve the schedule for this number of steps; an error here comes before any denoising."""
        self._rest()
        now = self._plan.adapter.models(self._pipe)
        for expert, model in self._plan.models.items():
            if now.get(expert) is not model:
                raise RuntimeError(f"pipe {expert}: the model was replaced after patch(); call patch() again")
        self._bound = self._plan.schedule.bind(steps, self._plan.blocks, tuple(self._plan.models))
        self._report = RunReport(steps, self._bound.layout.blocks, tuple(self._plan.models))
        self.step_started(0)

    def step_started(self, step: int) -> None:
        """Hand every processor its recipe."""
        assert self._bound is not None
        for expert, pairs in self._installed.items():
            for site, processor in pairs:
                processor.recipe = self._bound.recipe(step, site.block, expert, site.kind)

    def step_ending(self) -> None:
        """Collect from experts that were called without `cache_context`."""
        for expert in self._installed:
            self._collect(expert)

    def run_ended(self) -> None:
        """Between runs attention is stock."""
        self._rest()

    def _rest(self) -> None:
        for processor in self.processors():
            processor.recipe, processor.ran, processor.fell_back = UNQUANTIZED, None, None

    # What the models' forwards tell.

    @contextmanager
    def _forward(self, expert: str) -> Iterator[None]:
        self._clock.follow(self._pipe.scheduler)  # it may have been replaced since the last call
        if not self._clock.running:
            self._warn("model called outside a run: pipe.scheduler is not between set_timesteps and its last step, so "
                       "attention is unchanged. A second pipeline that shares this model must share its scheduler too")
        try:
            yield
        finally:
            self._collect(expert)

    def _collect(self, expert: str) -> None:
        for site, processor in self._installed[expert]:
            if processor.ran is not None and self._clock.running:
                self._report.calls[Call(self._clock.step, expert, site.block, site.kind, processor.ran)] += 1
            if processor.fell_back is not None:
                self._report.fallbacks[processor.fell_back] += 1
                self._warn(f"{processor.name}: attention_mask with {processor.fell_back} is not key padding; such calls run "
                           "unchanged")
            processor.ran = processor.fell_back = None

    def _warn(self, text: str) -> None:
        """Once per session and matter."""
        matter = text.partition(": ")[2]
        if matter not in self._warned:
            self._warned.add(matter)
            warnings.warn(f"lowbit_attn: {text}", stacklevel=2)


def _observe_forwards(model: Any, around: Callable[[], Any]) -> Callable[[], None]:
    """Enter `around()` with each of the model's `cache_context`s; returns a function that undoes it.

    Pipelines open one around every forward, outside compiled code.
    """
    original = model.cache_context.__func__

    @functools.wraps(original)
    @contextmanager
    def cache_context(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with original(self, *args, **kwargs):
            if self is not model:  # a deep copy of the model carries this method
                yield
                return
            with around():
                yield

    model.cache_context = installed = MethodType(cache_context, model)

    def restore() -> None:
        if vars(model).get("cache_context") is installed:
            del model.cache_context

    return restore
