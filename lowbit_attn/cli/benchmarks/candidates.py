"""From what takes part in a measurement to rows: check, time in turn, and say why of what does not run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowbit_attn.cli.benchmarks.contenders import UnavailableError
from lowbit_attn.cli.benchmarks.record import Row
from lowbit_attn.cli.benchmarks.timing import current, interleaved
from lowbit_attn.cli.benchmarks.workloads import Workload


@dataclass(frozen=True)
class Prepared:
    """A call that has run once, and what was found out about its results."""

    run: Callable[[], Any]
    error: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Candidate:
    """One row to be: `prepare` raises UnavailableError where it cannot run; `flops` of one call."""

    contender: str
    scope: str
    baseline: bool
    flops: float
    prepare: Callable[[], Prepared]


def rows(workload: Workload, candidates: Sequence[Candidate], device: torch.device, rounds: int) -> list[Row]:
    """One row per candidate; one that does not run here gets a row that says why."""
    prepared: dict[int, Prepared] = {}
    reasons: dict[int, str] = {}
    for number, candidate in enumerate(candidates):
        try:
            prepared[number] = candidate.prepare()
        except UnavailableError as error:
            reasons[number] = f"not run: {error}"
        except Exception as error:  # one broken contender must not cost the others their figures
            reasons[number] = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if device.type == "cuda":  # what finding the error took is in pieces that the next contender could not use
            torch.cuda.empty_cache()
    timings = interleaved({number: x.run for number, x in prepared.items()}, device, rounds)
    found = []
    for number, candidate in enumerate(candidates):
        common = (workload.name, str(workload), candidate.contender, candidate.scope)
        if number not in prepared:
            found.append(Row(*common, unit="TFLOP/s", baseline=candidate.baseline, note=reasons[number]))
            continue
        ready, timing = prepared[number], timings[number]
        found.append(Row(*common, timing.milliseconds, candidate.flops / timing.milliseconds / 1e9, "TFLOP/s", ready.error,
                         timing.spread, timing.rounds, timing.method, ready.note, candidate.baseline, dict(ready.figures)))
    return found


def each(workloads: Sequence[Workload], device: torch.device, started: Callable[[Workload], None],
         measure: Callable[[Workload], list[Row]]) -> Iterator[list[Row]]:
    """Rows of one workload after another, with the device the current one; `started` is told before each."""
    for workload in workloads:
        started(workload)
        with current(device):
            yield measure(workload)
            if device.type == "cuda":
                torch.cuda.empty_cache()
