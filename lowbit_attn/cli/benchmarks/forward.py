"""Attention forward: every contender on every workload."""

from collections.abc import Callable, Iterator, Sequence

import torch

from lowbit_attn.cli.benchmarks import ours
from lowbit_attn.cli.benchmarks.contenders import Bound, Contender, UnavailableError
from lowbit_attn.cli.benchmarks.exact import Exact
from lowbit_attn.cli.benchmarks.peers import CPU_PEERS, PEERS
from lowbit_attn.cli.benchmarks.record import Row
from lowbit_attn.cli.benchmarks.timing import current, interleaved
from lowbit_attn.cli.benchmarks.workloads import Inputs, Layout, Workload


def contenders(recipes: Sequence[str], device: torch.device) -> list[Contender]:
    """Our recipes first, then everything they are compared with."""
    return [x for recipe in recipes for x in ours.contenders(recipe, device)] + list(
        PEERS if device.type == "cuda" else CPU_PEERS + PEERS)


def measure(workload: Workload, taking_part: Sequence[Contender], device: torch.device, rounds: int,
            layout: Layout = Layout.BSHD) -> list[Row]:
    """One row per contender; one that does not run here gets a row that says why."""
    inputs = Inputs.draw(workload, device, layout)
    exact = Exact(inputs)
    bound: dict[int, Bound] = {}
    errors: dict[int, float] = {}
    reasons: dict[int, str] = {}
    for number, contender in enumerate(taking_part):
        try:
            with torch.no_grad():
                candidate = contender.bind(inputs)
                errors[number] = exact.error(candidate.output(candidate.run()))
            bound[number] = candidate
        except UnavailableError as error:
            reasons[number] = f"not run: {error}"
        except Exception as error:  # one broken contender must not cost the others their figures
            reasons[number] = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    with torch.no_grad():
        timings = interleaved({number: x.run for number, x in bound.items()}, device, rounds)
    rows = []
    for number, contender in enumerate(taking_part):
        row = Row(workload.name, str(workload), contender.name, contender.scope, unit="TFLOP/s", baseline=contender.baseline,
                  note=reasons.get(number, ""))
        if number in bound:
            timing = timings[number]
            row = Row(workload.name, str(workload), contender.name, contender.scope, timing.milliseconds,
                      workload.flops / timing.milliseconds / 1e9, "TFLOP/s", errors[number], timing.spread, timing.rounds,
                      timing.method, bound[number].note, contender.baseline)
        rows.append(row)
    return rows


def measure_all(workloads: Sequence[Workload], recipes: Sequence[str], device: torch.device, rounds: int, layout: Layout,
                started: Callable[[Workload], None]) -> Iterator[list[Row]]:
    """Rows of one workload after another; `started` is told before each."""
    taking_part = contenders(recipes, device)
    for workload in workloads:
        started(workload)
        with current(device):
            yield measure(workload, taking_part, device, rounds, layout)
            if device.type == "cuda":
                torch.cuda.empty_cache()
