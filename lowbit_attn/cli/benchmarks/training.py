"""Attention forward and backward: every contender on every workload, the backward alone and both together.

Operations are counted as is usual: the backward's five products are 2.5 times the forward's two.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lowbit_attn.cli.benchmarks import by_autograd, candidates, cudnn_fp8, ours
from lowbit_attn.cli.benchmarks.candidates import Candidate, Prepared
from lowbit_attn.cli.benchmarks.contenders import Scope, Trainer
from lowbit_attn.cli.benchmarks.gradients import ExactGradients
from lowbit_attn.cli.benchmarks.peers import BF16_PEERS, CPU_PEERS
from lowbit_attn.cli.benchmarks.record import Row
from lowbit_attn.cli.benchmarks.workloads import Inputs, Layout, Workload

FLASH = ("torch SDPA flash bf16", "torch varlen bf16", "flash-attn-4 bf16", "torch SDPA bf16")
"""bf16 flash attention, whose saved bytes others are compared with: the first that runs."""

SAVED, SAVED_RATIO = "saved MB", "saved x bf16 flash"


def trainers(recipes: Sequence[str], device: torch.device) -> list[Trainer]:
    """Our recipes first, each also as the reproducible backward, then everything they are compared with."""
    peers = BF16_PEERS if device.type == "cuda" else CPU_PEERS + BF16_PEERS
    return [*(x for recipe in recipes for x in ours.trainers(recipe, device)), *(by_autograd.trainer(peer) for peer in peers),
            Trainer("cuDNN FP8", cudnn_fp8.bind_training, baseline=True)]


def measure(workload: Workload, taking_part: Sequence[Trainer], device: torch.device, rounds: int,
            layout: Layout = Layout.BSHD) -> list[Row]:
    """A row per contender and scope; one that does not run here gets rows that say why."""
    drawn = Inputs.draw(workload, device, layout)
    inputs = replace(drawn, **{name: getattr(drawn, name).requires_grad_() for name in ("query", "key", "value")})
    grad = Inputs.draw(replace(workload, v_mean=0.0), device, layout, seed=1).query
    exact = ExactGradients(inputs, grad)

    def candidate(trainer: Trainer, scope: Scope) -> Candidate:
        def prepare() -> Prepared:
            call = trainer.bind(inputs, grad)
            run = call.backward if scope is Scope.BACKWARD else call.whole
            figures = {**exact.errors(call.gradients(run())), SAVED: call.saved_bytes / 1e6}
            return Prepared(run, figures=figures, note=call.note)

        flops = workload.flops * (2.5 if scope is Scope.BACKWARD else 3.5)
        return Candidate(trainer.name, scope, trainer.baseline, flops, prepare)

    found = candidates.rows(workload, [candidate(trainer, scope) for trainer in taking_part
                                       for scope in trainer.scopes], device, rounds)
    return _with_ratio(found)


def _with_ratio(rows: list[Row]) -> list[Row]:
    """The same with each row's saved bytes over those of bf16 flash attention."""
    saved = {row.contender: row.figures[SAVED] for row in rows if SAVED in row.figures}
    base = next((saved[name] for name in FLASH if name in saved), None)
    if base is None:
        return rows
    return [replace(row, figures=row.figures | {SAVED_RATIO: row.figures[SAVED] / base}) if SAVED in row.figures else row
            for row in rows]
