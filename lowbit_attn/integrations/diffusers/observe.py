"""What models tell of their forwards: when one runs, and how long their attention takes."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch


def observe_forwards(model: Any, around: Callable[[], Any]) -> Callable[[], None]:
    """Enter `around()` with each of the model's `cache_context`s; returns a function that undoes it.

    Most pipelines open one around every forward, outside compiled code.
    """
    if not hasattr(model, "cache_context"):
        return lambda: None
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


class Stopwatch:
    """Seconds that attention modules take, projections included, by the recipe that ran; eager calls only.

    On a GPU it puts events into the stream and reads them when asked, so nothing waits meanwhile.
    """

    def __init__(self) -> None:
        self._intervals: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)
        self._run: list[float] = []
        self._handles: list[Any] = []
        self._device = torch.device("cpu")

    def watch(self, module: Any) -> None:
        """Time each call of a module that has one of our processors."""
        started: list[Any] = []

        def before(module: Any, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                self._device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), self._device)
                started.append(self._mark())

        def after(module: Any, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and started:
                self._intervals[str(module.processor.ran)].append((started.pop(), self._mark()))

        self._handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]

    def start(self) -> None:
        """A run begins."""
        self._intervals.clear()
        self._seconds.clear()
        self._run = [time.perf_counter()]

    def stop(self) -> None:
        """The run is over; waits for the GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._run = [*self._run[:1], time.perf_counter()]

    def seconds(self) -> tuple[dict[str, float], float | None]:
        """Seconds of attention by recipe, and of the whole run once it is over. Waits for the GPU."""
        for recipe, intervals in self._intervals.items():
            self._seconds[recipe] += sum(_between(*interval) for interval in intervals)
        self._intervals.clear()
        return dict(sorted(self._seconds.items())), self._run[1] - self._run[0] if len(self._run) == 2 else None

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(start: Any, end: Any) -> float:
    """Seconds between two marks of a kind."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
