"""Attention forward: every contender on every workload."""

from collections.abc import Sequence

import torch

from lowbit_attn.cli.benchmarks import candidates, ours
from lowbit_attn.cli.benchmarks.candidates import Candidate, Prepared
from lowbit_attn.cli.benchmarks.contenders import Contender
from lowbit_attn.cli.benchmarks.exact import Exact
from lowbit_attn.cli.benchmarks.peers import CPU_PEERS, PEERS
from lowbit_attn.cli.benchmarks.record import Row
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

    def candidate(contender: Contender) -> Candidate:
        def prepare() -> Prepared:
            bound = contender.bind(inputs)
            return Prepared(bound.run, exact.error(bound.output(bound.run())), note=bound.note)

        return Candidate(contender.name, contender.scope, contender.baseline, workload.flops, prepare)

    with torch.no_grad():
        return candidates.rows(workload, [candidate(contender) for contender in taking_part], device, rounds)
