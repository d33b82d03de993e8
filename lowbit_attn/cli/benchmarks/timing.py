"""Time of several calls that take turns, as medians."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

WARM_UP, REPEAT = 20, 50
"""Milliseconds of each call in each round, untimed and timed."""

Run = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Median of each round in milliseconds, and what was timed: replays of a CUDA graph, or calls."""

    rounds: tuple[float, ...]
    method: str

    @property
    def milliseconds(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Slowest round over fastest, minus 1."""
        return max(self.rounds) / min(self.rounds) - 1.0


def current(device: torch.device) -> AbstractContextManager:
    """Makes a GPU the current one, which is where libraries without a device argument run."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def interleaved(runs: Mapping[Key, Run], device: torch.device, rounds: int) -> dict[Key, Timing]:
    """Time every call once a round, in turn, so that a warming or throttled (current) device slows all of them alike.

    On a GPU a call is captured into a CUDA graph if it can be, and replays are timed by events on a cold L2 cache: launches
    cost the host time, which a model hides and a benchmark of small kernels would measure. On a CPU calls are timed by the clock.
    """
    if device.type != "cuda":
        for run in runs.values():
            run()
        turns = [{name: _clock(run) for name, run in runs.items()} for _ in range(rounds)]
        return {name: Timing(tuple(turn[name] for turn in turns), "calls") for name in runs}
    from triton.testing import do_bench

    prepared = {name: _captured(run) for name, run in runs.items()}
    turns = [{name: do_bench(replay, WARM_UP, REPEAT, return_mode="median") for name, (replay, _) in prepared.items()}
             for _ in range(rounds)]
    return {name: Timing(tuple(turn[name] for turn in turns), method) for name, (_, method) in prepared.items()}


def _clock(run: Run) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def _captured(run: Run) -> tuple[Run, str]:
    """A replay of the call's CUDA graph, or the call itself with the reason.

    It warms up on the stream that is captured: a backward runs where its forward ran, which a capture elsewhere would not see.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, allocates, loads modules: none of it is allowed in a capture
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            run()
    except Exception as error:  # whatever forbids a capture, the call can still be timed
        torch.cuda.synchronize()
        return run, f"calls (no CUDA graph: {type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return graph.replay, "graph replays"
