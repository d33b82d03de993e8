"""Is the gap to bf16 within its tolerance, and did the controls go wrong?"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from study.training import Run

TOLERANCE = 0.005
"""Nats per byte; twice the standard error between bf16 seeds, if that is larger."""

GRADIENTS = 10.0
"""A gradient norm so many times the largest of the unspoiled run has gone wrong."""


LEAKS, LEAST_LEAK = 3.0, 0.01
"""Later tokens that move earlier outputs of their own block so many times as far as in the unspoiled run, and so far, leak."""


def load(folder: Path) -> list[Run]:
    """The runs whose JSON is in a folder, by variant and seed."""
    runs = [Run(**json.loads(path.read_text())) for path in sorted(folder.glob("run-*.json"))]
    differing = {json.dumps([run.settings, run.text], sort_keys=True) for run in runs}
    if len(differing) > 1:
        raise SystemExit(f"--out: {folder} has runs of different settings or texts, which cannot be compared")
    order = {"bf16": 0, "recipe": 1, "mismatch": 2, "leak": 3}
    return sorted(runs, key=lambda run: (order[run.kind], run.variant, run.seed))


@dataclass(frozen=True)
class Gap:
    """Losses of one variant minus those of bf16, by seed that both have: through its own attention, and through exact attention."""

    variant: str
    own: dict[int, float]
    exact: dict[int, float]
    tolerance: float
    diverged: tuple[int, ...]
    """Seeds whose loss was not finite at some step."""

    @property
    def largest(self) -> float:
        """The larger of the two mean gaps; only a loss above bf16's counts."""
        return max(statistics.fmean(self.own.values()), statistics.fmean(self.exact.values()))

    @property
    def holds(self) -> bool:
        """Whether no seed diverged and both mean gaps are within the tolerance."""
        return not self.diverged and bool(self.own) and self.largest <= self.tolerance


def gap(runs: Sequence[Run], variant: str) -> Gap:
    """The gap of a recipe to bf16."""
    base = {run.seed: run.final for run in runs if run.kind == "bf16" and run.final is not None}
    mine = {run.seed: run.final for run in runs if run.variant == variant and run.final is not None}
    paired = sorted(base.keys() & mine.keys())
    own = {seed: mine[seed]["own"] - base[seed]["own"] for seed in paired}
    exact = {seed: mine[seed]["exact"] - base[seed]["exact"] for seed in paired}
    diverged = tuple(run.seed for run in runs if run.variant == variant and run.diverged_at is not None)
    return Gap(variant, own, exact, tolerance([final["own"] for final in base.values()]), diverged)


def tolerance(losses: Sequence[float]) -> float:
    """max(0.005, twice the standard error of the mean of these losses); one loss has no standard error."""
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
    return max(TOLERANCE, 2 * error)


def went_wrong(control: Run, honest: Run, allowed: float) -> list[str]:
    """What shows that a control is broken, beside the same seed's run of the recipe it spoils; empty if nothing does."""
    found = []
    if control.diverged_at is not None:
        found.append(f"not finite from step {control.diverged_at}")
    steps = len(control.grad_norm)
    norm, usual = (max((x for x in run.grad_norm[:steps] if math.isfinite(x)), default=0.0) for run in (control, honest))
    if norm > GRADIENTS * usual:
        found.append(f"gradient norm {norm:.3g}, {norm / usual:.3g} times the largest of {honest.variant}")
    at = {entry["step"]: entry for entry in honest.evaluations}
    common = [entry for entry in control.evaluations if entry["step"] in at]
    if common:
        last = common[-1]
        behind = last["exact"] - at[last["step"]]["exact"]
        if behind > allowed:
            found.append(f"{behind:+.4f} nats through exact attention at step {last['step']:.0f}")
        if last["exact"] - last["own"] > allowed:
            found.append(f"{last['exact'] - last['own']:.4f} nats better through its own attention than through exact attention")
    return [*found, *_leaks(control, honest)]


def _leaks(control: Run, honest: Run) -> list[str]:
    """Blocks: nothing may move. Within a block the recipe moves a little (`causal_safety=exact` does not): a leak is a multiple."""
    if control.leak is None or honest.leak is None:
        return []
    found = []
    if control.leak["blocks"] and not honest.leak["blocks"]:
        found.append(f"later tokens move outputs of earlier blocks by {control.leak['blocks']:.2%}")
    if control.leak["within"] > max(LEAST_LEAK, LEAKS * honest.leak["within"]):
        found.append(f"later tokens move earlier outputs of their own block by {control.leak['within']:.2%}, "
                     f"{honest.leak['within']:.2%} in {honest.variant}")
    return found
