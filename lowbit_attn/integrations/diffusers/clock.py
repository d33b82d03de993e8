"""The step clock: a pipeline's scheduler, observed.

The scheduler is called once per denoising step, outside compiled code, whichever expert runs and however guidance is batched;
forward counters are none of these.
"""

from collections.abc import Callable
from typing import Any, Protocol

from lowbit_attn.integrations.diffusers.taps import Tap


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
    """Follows the scheduler of one pipeline.

    On the scheduler instance it observes `set_timesteps` (a run begins), `step` (a step is over) and `set_begin_index` (the run
    starts late in its schedule). On the pipeline instance it observes what tells of a scheduler that was replaced since the last
    run (`check_inputs`, a modular pipeline's `register_components`); `get_timesteps`, which says how many steps a `strength` below
    one leaves; and `maybe_free_model_hooks`, the last thing a call does.
    """

    def __init__(self, listener: ClockListener, pipe: Any) -> None:
        self._listener = listener
        self._pipe = pipe
        self._scheduler: Any = None
        self._taps: list[Tap] = []
        self._calls = self._expected = 0
        self._order = 1
        self._pipe_taps = self._observe(pipe, {
            "check_inputs": (self.follow, None),
            "register_components": (None, lambda result: self.follow()),
            "get_timesteps": (None, self._shortened),
            "maybe_free_model_hooks": (self._finish, None),
        })
        self.follow()

    @property
    def step(self) -> int:
        """Index of the step in progress. A second-order scheduler (Heun) is called twice in each."""
        return self._calls // self._order

    @property
    def running(self) -> bool:
        """Whether a step is in progress."""
        return self._calls < self._expected

    def follow(self, mid_run: bool = False) -> None:
        """Make sure that it is the pipeline's present scheduler which is followed; `mid_run` to join the run that it is in."""
        scheduler = self._pipe.scheduler
        if scheduler is self._scheduler:
            return
        self._release_scheduler()
        self._scheduler = scheduler
        self._taps = self._observe(scheduler, {
            "set_timesteps": (None, lambda result: self._begin()),
            "set_begin_index": (None, lambda result: self._moved()),
            "step": (self._listener.step_ending, lambda result: self._advance()),
        })
        if mid_run and getattr(scheduler, "num_inference_steps", None) is not None:
            self._begin()

    def release(self) -> None:
        """Detach; scheduler and pipeline have their own methods again."""
        self._release_scheduler()
        for tap in self._pipe_taps:
            tap.release(self)
        self._pipe_taps = []

    def _release_scheduler(self) -> None:
        for tap in self._taps:
            tap.release(self)
        self._taps = []
        self._scheduler = None
        self._calls = self._expected = 0

    def _observe(self, owner: Any, methods: dict[str, tuple[Callable[[], None] | None, Callable[[Any], None] | None]],
                 ) -> list[Tap]:
        taps = []
        for name, (before, after) in methods.items():
            if callable(getattr(owner, name, None)):
                tap = Tap.on(owner, name)
                tap.observe(self, before, after)
                taps.append(tap)
        return taps

    def _begin(self, calls: int | None = None) -> None:
        """A run of so many scheduler steps is about to start; None for as many as are left of the scheduler's timesteps."""
        self._calls = self._expected = 0  # a listener that refuses the run leaves the clock at rest
        self._order = getattr(self._scheduler, "order", 1)
        if calls is None:
            calls = len(self._scheduler.timesteps) - (getattr(self._scheduler, "begin_index", None) or 0)
        self._listener.run_started(-(-calls // self._order))
        self._expected = calls

    def _moved(self) -> None:
        """The run that has just begun starts elsewhere."""
        if self.running and self._calls == 0:
            self._begin()

    def _shortened(self, result: Any) -> None:
        """`get_timesteps` returns what `strength` leaves: timesteps (in some pipelines after as many sigmas) and a number."""
        if isinstance(result, tuple) and hasattr(result[0], "__len__") and self.running and self._calls == 0:
            left = len(result[0])
            if 0 < left != self._expected:
                self._begin(left)

    def _finish(self) -> None:
        """The call is over, also if it was interrupted, or has set the timesteps once more than it used (Wan Animate)."""
        if self.running:
            self._calls = self._expected = 0
            self._listener.run_ended()

    def _advance(self) -> None:
        if not self.running:
            return
        before = self.step
        self._calls += 1
        if not self.running:
            self._listener.run_ended()
        elif self.step != before:
            self._listener.step_started(self.step)
