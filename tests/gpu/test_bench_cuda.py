"""On a GPU the benchmark's contenders compute attention, and a kernel timed alone computes what the whole call does."""

import pytest
import torch

from lowbit_attn.cli.benchmarks import forward, quantizers, training
from lowbit_attn.cli.benchmarks.contenders import Scope
from lowbit_attn.cli.benchmarks.workloads import PRESETS, Preset

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GPU = torch.device("cuda")


@pytest.mark.parametrize("workload", PRESETS[Preset.SMALL], ids=str)
def test_every_contender_that_runs_computes_attention(workload):
    rows = forward.measure(workload, forward.contenders(["mxfp8", "mxfp8_fast"], GPU), GPU, 1)
    assert not [row for row in rows if row.note.startswith("failed")]
    timed = [row for row in rows if row.milliseconds]
    assert {row.contender.split()[0] for row in timed} >= {"torch", "mxfp8", "mxfp8_fast"}
    for row in timed:
        assert row.error < (0.01 if "bf16" in row.contender else 0.1), row
    alone = {row.contender: row.error for row in timed if row.scope is Scope.KERNEL}
    whole = {row.contender: row.error for row in timed if row.scope is Scope.QUANTIZED}
    for name in alone.keys() & whole.keys():
        assert alone[name] == whole[name]


@pytest.mark.parametrize("workload", PRESETS[Preset.SMALL], ids=str)
def test_every_trainer_that_runs_computes_gradients(workload):
    rows = training.measure(workload, training.trainers(["mxfp8"], GPU), GPU, 1)
    assert not [row for row in rows if row.note.startswith("failed")]
    timed = [row for row in rows if row.milliseconds]
    assert {row.contender.split()[0] for row in timed} >= {"torch", "mxfp8"}
    for row in timed:
        errors = [value for name, value in row.figures.items() if name.endswith("error")]
        assert max(errors) < (0.02 if "bf16" in row.contender else 0.1), row
    assert all(row.method == "graph replays" for row in timed if "bf16" in row.contender), timed


@pytest.mark.parametrize("workload", quantizers.distinct(PRESETS[Preset.SMALL]), ids=str)
def test_quantizers_are_timed_beside_a_copy(workload):
    copy, *ours = quantizers.measure(workload, ["mxfp8"], GPU, 1)
    assert copy.contender == quantizers.COPY
    assert ours
    assert all(row.milliseconds for row in ours), ours
