"""The step clock: a pipeline's scheduler, observed.

The scheduler is called once per denoising step, outside compiled code, whichever expert runs and however guidance is batched;
forward counters are none of these.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol


class ClockListener(Protocol):
    """What a clock tells."""

    def run_started(self, steps: int) -> None:
        """Step 0 of `steps` is about to run."""

    def step_started(self, step: int) -> None:
        """`step` (at least 1) is about to run."""

    def step_ending(self) -> None:
        """The model calls of the current step are over."""

    def run_ended(self) -> None:
        """The last step is over."""


class Clock:
    """Follows one scheduler at a time by wrapping `set_timesteps` and `step` on that instance."""

    def __init__(self, listener: ClockListener) -> None:
        self._listener = listener
        self._scheduler: Any = None
        self._taps: list[_Tap] = []
        self._calls = 0
        self._order = 1
        self.steps = 0

    @property
    def step(self) -> int:
        """Index of the step in progress. A second-order scheduler (Heun) is called twice in each."""
        return self._calls // self._order

    @property
    def running(self) -> bool:
        """Whether a step is in progress."""
        return self.step < self.steps

    def attach(self, scheduler: Any) -> None:
        """Listen to `scheduler` from its next run on, leaving the former one as it was."""
        self.release()
        self._scheduler = scheduler
        for name, observer in (("set_timesteps", (None, self._begin)), ("step", (self._listener.step_ending, self._advance))):
            tap = _Tap.on(scheduler, name)
            tap.observers[self] = observer
            self._taps.append(tap)

    def follow(self, scheduler: Any) -> None:
        """Make sure, inside a run, that it is `scheduler`'s run which is followed.

        Joins the run of a scheduler that was replaced since the last call, and learns of a run that starts late in its schedule
        (video-to-video sets the begin index after the timesteps).
        """
        if scheduler is not self._scheduler:
            self.attach(scheduler)
            if getattr(scheduler, "num_inference_steps", None) is not None:
                self._begin()
        elif self.running and self._calls == 0 and self._scheduled_steps() != self.steps:
            self._begin()

    def release(self) -> None:
        """Detach; the scheduler has its own methods again."""
        for tap in self._taps:
            tap.observers.pop(self, None)
            tap.remove_if_unused()
        self._taps = []
        self._scheduler = None
        self._calls = self.steps = 0

    def _scheduled_steps(self) -> int:
        calls = len(self._scheduler.timesteps) - (getattr(self._scheduler, "begin_index", None) or 0)
        return -(-calls // self._order)

    def _begin(self) -> None:
        self._calls = self.steps = 0  # a listener that refuses the run leaves the clock at rest
        self._order = getattr(self._scheduler, "order", 1)
        steps = self._scheduled_steps()
        self._listener.run_started(steps)
        self.steps = steps

    def _advance(self) -> None:
        if not self.running:
            return
        before = self.step
        self._calls += 1
        if self.step == before:
            return
        if self.running:
            self._listener.step_started(self.step)
        else:
            self._listener.run_ended()


Observer = tuple[Callable[[], None] | None, Callable[[], None] | None]


class _Tap:
    """A wrapper around one method of one scheduler, shared by the clocks of all pipelines that use that scheduler."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.observers: dict[Clock, Observer] = {}
        self._replaced = vars(owner).get(name)
        original = getattr(owner, name)
        bound = isinstance(original, MethodType)
        function = original.__func__ if bound else original

        @functools.wraps(function)  # pipelines inspect the signature
        def tapped(*args: Any, **kwargs: Any) -> Any:
            # A deep copy of the scheduler carries this method, bound to the copy: that is not our clock.
            observers = [] if bound and args[0] is not owner else list(self.observers.values())
            for before, _ in observers:
                if before is not None:
                    before()
            result = function(*args, **kwargs)
            for _, after in observers:
                if after is not None:
                    after()
            return result

        tapped.lowbit_attn_tap = self  # type: ignore[attr-defined]
        self._installed = MethodType(tapped, owner) if bound else tapped
        setattr(owner, name, self._installed)

    @classmethod
    def on(cls, owner: Any, name: str) -> "_Tap":
        """The tap that is already there, or a new one."""
        present = getattr(vars(owner).get(name), "lowbit_attn_tap", None)
        return present if isinstance(present, cls) and present.owner is owner else cls(owner, name)

    def remove_if_unused(self) -> None:
        """Put the original back, unless another clock listens; a tap that others have wrapped since stays, inert."""
        if not self.observers and vars(self.owner).get(self.name) is self._installed:
            if self._replaced is None:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self._replaced)
