"""`lowbit-attn bench train`: both passes beside other implementations, their errors, and what the forward keeps."""

import csv
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import lowbit_attn
from lowbit_attn.cli.benchmarks import by_autograd, gradients, ours, training, workloads
from lowbit_attn.cli.benchmarks.contenders import Bound, Contender, Scope, Trainer, TrainingCall, UnavailableError, first
from lowbit_attn.cli.benchmarks.gradients import NAMES, ExactGradients
from lowbit_attn.cli.benchmarks.peers import BF16_PEERS
from lowbit_attn.cli.benchmarks.record import Environment, Record, Row
from lowbit_attn.cli.benchmarks.workloads import PRESETS, Inputs, Layout, Preset
from lowbit_attn.ops import Device

CPU = torch.device("cpu")
DENSE, GROUPED, PACKED, SHIFTED = PRESETS[Preset.SMALL]


def leaves(workload, layout=Layout.BSHD):
    """Inputs that require grad, in a list too, and dO."""
    inputs = Inputs.draw(workload, CPU, layout)
    tensors = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    return inputs, tensors, torch.randn(inputs.query.shape).bfloat16()


def sdpa(inputs):
    return Bound(lambda: F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value), first)


class TestCommand:
    @pytest.fixture
    def files(self, run, monkeypatch, tmp_path):
        monkeypatch.setitem(workloads.PRESETS, Preset.SMALL, (GROUPED,))
        result = run("bench", "train", "--rounds", 2, "--output", tmp_path, "--recipes", "mxfp8,mxfp8_fast")
        assert result.exit_code == 0, result.stderr
        rows = json.loads((tmp_path / "train.json").read_text())
        return result.stdout, tmp_path, {(row["contender"], row["scope"]): row for row in rows}

    def test_everyone_has_a_backward_row_and_a_training_row(self, files):
        _, _, rows = files
        ours = {f"{recipe} (reference){way}" for recipe in ("mxfp8", "mxfp8_fast") for way in ("", " deterministic")}
        peers = {peer.name for peer in BF16_PEERS} | {"torch SDPA bf16", "cuDNN FP8"}
        assert set(rows) == set(itertools.product(ours | peers, ("backward only", "training call")))
        for row in rows.values():
            assert (row["milliseconds"] is None) == row["note"].startswith("not run: ")

    def test_ratios_compare_like_with_like(self, files):
        _, _, rows = files
        for scope, factor in (("backward only", 2.5), ("training call", 3.5)):
            ours, peer = rows["mxfp8 (reference)", scope], rows["torch SDPA bf16", scope]
            assert ours["rate"] == pytest.approx(factor * GROUPED.flops / ours["milliseconds"] / 1e9)
            assert ours["faster_than"]["torch SDPA bf16"] == pytest.approx(peer["milliseconds"] / ours["milliseconds"])

    def test_gradients_are_compared_with_exact_ones(self, files):
        _, _, rows = files
        for name in NAMES:
            # bf16 rounds to 2^-9; E4M3 to 2^-4, of which about 6 % are left in a product of two (cosine 0.998).
            assert rows["torch SDPA bf16", "training call"]["figures"][f"{name} error"] < 0.01
            for way in ("", " deterministic"):
                assert 0.02 < rows[f"mxfp8 (reference){way}", "backward only"]["figures"][f"{name} error"] < 0.08

    def test_recipes_for_inference_are_named(self, files):
        stdout, _, rows = files
        note = rows["mxfp8_fast (reference)", "training call"]["note"]
        assert note.startswith("not run: mxfp8_fast does not train: ")
        assert note in stdout

    def test_saved_bytes_are_a_share_of_flash_attentions(self, files):
        _, _, rows = files
        flash, ours = (rows[name, "training call"]["figures"] for name in ("torch SDPA bf16", "mxfp8 (reference)"))
        assert flash["saved x bf16 flash"] == 1.0
        assert ours["saved x bf16 flash"] == pytest.approx(ours["saved MB"] / flash["saved MB"])
        tokens, heads, kv_heads, channels = 256, 4, 2, 64
        codes = (heads + 2 * kv_heads) * (channels + 1)
        row_tops = heads
        assert ours["saved MB"] == pytest.approx(tokens * (codes + row_tops + heads * (2 * channels + 4)) / 1e6)

    def test_the_csv_has_a_column_of_each_figure(self, files):
        _, folder, rows = files
        found = {(row["contender"], row["scope"]): row for row in csv.DictReader((folder / "train.csv").read_text().splitlines())}
        row = found["mxfp8 (reference)", "backward only"]
        for name, value in rows["mxfp8 (reference)", "backward only"]["figures"].items():
            assert float(row[name]) == pytest.approx(value)
        assert found["cuDNN FP8", "backward only"]["dQ error"] == ""

    def test_the_table_shows_errors_as_percentages(self, files):
        stdout, _, rows = files
        shown = f"{rows['mxfp8 (reference)', 'training call']['figures']['dQ error']:.2%}"
        [line, *_] = [line for line in stdout.splitlines() if "mxfp8 (reference) " in line and "training call" in line]
        assert shown in line

    def test_a_plot_is_drawn_and_the_record_reads_back(self, files):
        _, folder, rows = files
        assert (folder / "train.png").stat().st_size > 1000
        record = Record.read(folder / "train.json")
        assert [row.figures for row in record.rows] == [row["figures"] for row in rows.values()]


class TestExactGradients:
    @pytest.mark.parametrize("layout", Layout)
    @pytest.mark.parametrize("workload", [DENSE, GROUPED, SHIFTED], ids=str)
    def test_dense_are_torchs_in_float64(self, workload, layout):
        inputs, tensors, grad = leaves(workload, layout)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        output = F.scaled_dot_product_attention(*wide, is_causal=workload.causal, enable_gqa=True)
        expected = torch.autograd.grad(output, wide, grad.double())
        exact = ExactGradients(inputs, grad)
        assert max(exact.errors(expected).values()) < 1e-5
        assert exact.errors(tuple(1.01 * x for x in expected))["dK error"] == pytest.approx(0.01, rel=1e-2)

    def test_packed_documents_do_not_see_one_another(self):
        inputs, tensors, grad = leaves(PACKED)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        parts = []
        for start, end in itertools.pairwise(inputs.cu.tolist()):
            q, k, v = (x[start:end].transpose(0, 1) for x in wide)
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
        expected = torch.autograd.grad(torch.cat(parts), wide, grad.double())
        assert max(ExactGradients(inputs, grad).errors(expected).values()) < 1e-5

    @pytest.mark.parametrize("scores", [1, 4096, 100_000])
    @pytest.mark.parametrize("workload", [GROUPED, PACKED], ids=str)
    def test_chunks_of_rows_and_heads_change_nothing(self, monkeypatch, workload, scores):
        inputs, _, grad = leaves(workload)
        whole = ExactGradients(inputs, grad).exact
        monkeypatch.setattr(gradients, "_CHUNK", scores)
        assert max(ExactGradients(inputs, grad).errors(whole).values()) < 1e-5

    def test_a_nan_is_no_small_error(self):
        inputs, tensors, grad = leaves(DENSE)
        broken = tuple(torch.full_like(x, math.nan) for x in tensors)
        assert all(math.isnan(error) for error in ExactGradients(inputs, grad).errors(broken).values())


class TestByAutograd:
    def test_the_backward_alone_runs_the_forward_once(self):
        inputs, _, grad = leaves(DENSE)
        forwards = []

        def counted(given):
            bound = sdpa(given)
            return Bound(lambda: forwards.append(1) or bound.run(), first)

        call = by_autograd.trainer(Contender("counted", Scope.CALL, counted)).bind(inputs, grad)
        forwards.clear()
        results = [call.backward() for _ in range(3)]
        assert len(forwards) == 1
        whole = call.whole()
        assert len(forwards) == 2
        for one in results:
            assert all(torch.equal(x, y) for x, y in zip(call.gradients(one), call.gradients(whole), strict=True))

    def test_saved_bytes_count_every_storage_once(self):
        inputs, _, _ = leaves(DENSE)
        tokens, heads, channels = 256, 2, 64
        assert by_autograd.saved_bytes(sdpa(inputs).run) >= tokens * heads * (4 * 2 * channels + 4)
        # The same tensor saved by two operations is one storage.
        x = torch.randn(1000, requires_grad=True)
        assert by_autograd.saved_bytes(lambda: x.sin() + x.cos() + x[:10].sum()) == 4000


def test_one_broken_trainer_costs_the_others_nothing():
    def broken(inputs, grad):
        raise RuntimeError("no such engine\nand a trace")

    def absent(inputs, grad):
        raise UnavailableError("is not installed")

    def wrong(inputs, grad):
        return TrainingCall(lambda: (0,), lambda: (0,), lambda result: result, 0)

    taking_part = [Trainer("a", broken), Trainer("b", absent), Trainer("c", wrong),
                   by_autograd.trainer(Contender("d", Scope.CALL, sdpa))]
    rows = training.measure(DENSE, taking_part, CPU, 1)
    assert [row.milliseconds is None for row in rows] == [True] * 6 + [False] * 2
    assert [row.note for row in rows[:4]] == ["failed: RuntimeError: no such engine"] * 2 + ["not run: is not installed"] * 2


def test_without_flash_attention_there_is_no_ratio_to_it():
    rows = training.measure(PACKED, [by_autograd.trainer(Contender("mine", Scope.CALL, lambda inputs: Bound(
        lambda: inputs.query * inputs.key.sum() + inputs.value.sum(), first)))], CPU, 1)
    assert all(training.SAVED in row.figures and training.SAVED_RATIO not in row.figures for row in rows)


def test_a_baseline_of_one_scope_serves_every_scope():
    rows = [Row("w", "shape", "a", "kernel only", 1.0, 30.0), Row("w", "shape", "a", "backward only", 1.0, 10.0),
            Row("w", "shape", "b", "backward only", 1.0, 5.0, baseline=True),
            Row("w", "shape", "b", "training call", 1.0, 2.0, baseline=True)]
    record = Record(Environment.current(CPU), rows)
    assert record.ratios(rows[1]) == {"b": 2.0}
    assert record.ratios(rows[3]) == {"b": 1.0}
    assert Record(record.environment, rows[:3]).ratios(rows[0]) == {"b": 6.0}


def test_hoppers_kernels_are_timed_alone_and_only_backwards(monkeypatch):
    monkeypatch.setattr(lowbit_attn, "explain", lambda recipe, device: SimpleNamespace(backend="hopper"))
    alone = [x for x in ours.trainers("mxfp8", CPU) if x.name == "mxfp8 kernels"]
    assert [x.scopes for x in alone] == [(Scope.BACKWARD,)]


def test_portable_kernels_train_beside_faster_ones_that_they_have_the_backward_of(monkeypatch):
    for module in (ours, lowbit_attn.api.ops):
        monkeypatch.setattr(module, "describe", lambda device: Device("cuda", "sm_90"))
    recipes = ("mxfp8", "mxfp8_fast", "mxattention", "mxfp8:ds=e4m3/per_row")
    found = [x for recipe in recipes for x in ours.trainers(recipe, CPU)]
    beside = [x for x in found if "(triton)" in x.name]
    assert [(x.name, x.scopes) for x in beside] == [("mxfp8 (triton)", (Scope.BACKWARD, Scope.TRAINING))]


def test_portable_kernels_train_once_where_none_is_faster(monkeypatch):
    for module in (ours, lowbit_attn.api.ops):
        monkeypatch.setattr(module, "describe", lambda device: Device("cuda", "sm_80"))
    assert [x.name for x in ours.trainers("mxfp8", CPU)] == ["mxfp8 (triton)", "mxfp8 (triton) deterministic"]


def test_the_portable_trainer_runs_both_passes_on_that_backend(monkeypatch):
    monkeypatch.setattr(ours, "describe", lambda device: Device("cuda", "sm_90"))
    monkeypatch.setattr(lowbit_attn, "explain", lambda recipe, device: SimpleNamespace(backend="hopper"))
    asked = []

    def attention(query, key, value, *, backend, **options):
        asked.append(backend)
        return query * key.sum() + value.sum()

    monkeypatch.setattr(lowbit_attn, "attention", attention)
    inputs, _, grad = leaves(DENSE)
    [beside] = [x for x in ours.trainers("mxfp8", CPU) if x.name == "mxfp8 (triton)"]
    call = beside.bind(inputs, grad)
    assert len(call.gradients(call.whole())) == 3
    assert set(asked) == {"triton"}
