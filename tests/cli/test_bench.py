"""`lowbit-attn bench`: what it measures, what it says of what it cannot, and the files it writes."""

import csv
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import lowbit_attn
from lowbit_attn.cli import bench
from lowbit_attn.cli.benchmarks import exact, forward, ours, quantizers, workloads
from lowbit_attn.cli.benchmarks.contenders import Bound, Contender, Scope, UnavailableError, first
from lowbit_attn.cli.benchmarks.exact import Exact, sampled_rows
from lowbit_attn.cli.benchmarks.peers import PEERS
from lowbit_attn.cli.benchmarks.record import Environment, Record, Row
from lowbit_attn.cli.benchmarks.timing import interleaved
from lowbit_attn.cli.benchmarks.workloads import PRESETS, Inputs, Layout, Preset, Workload, log_uniform_documents
from lowbit_attn.ops import Device

CPU = torch.device("cpu")
DENSE, GROUPED, PACKED, SHIFTED = PRESETS[Preset.SMALL]


@pytest.fixture
def small(monkeypatch):
    """One workload instead of the preset's four."""
    monkeypatch.setitem(workloads.PRESETS, Preset.SMALL, (GROUPED,))


class TestForward:
    @pytest.fixture
    def files(self, run, small, tmp_path):
        result = run("bench", "forward", "--rounds", 2, "--output", tmp_path, "--recipes", "mxfp8")
        assert result.exit_code == 0, result.stderr
        return result.stdout, tmp_path

    def test_without_a_gpu_it_says_so_and_measures_the_reference(self, files):
        stdout, _ = files
        assert "no GPU here" in stdout
        [line] = [line for line in stdout.splitlines() if "mxfp8 (reference)" in line and "│" in line]
        assert "including quantization" in line

    def test_every_peer_is_timed_or_named_with_the_reason(self, files):
        stdout, folder = files
        rows = json.loads((folder / "forward.json").read_text())
        named = {row["contender"] for row in rows}
        assert {peer.name for peer in PEERS} | {"torch SDPA bf16", "mxfp8 (reference)"} == named
        for row in rows:
            assert (row["milliseconds"] is None) == row["note"].startswith("not run: ")
            if row["milliseconds"] is None:
                assert f"{row['contender']}, {row['scope']}: {row['note']}" in stdout

    def test_rows_carry_what_repeats_them(self, files):
        _, folder = files
        for row in json.loads((folder / "forward.json").read_text()):
            environment = row["environment"]
            assert "CPU" in environment["device"]
            assert environment["versions"]["torch"] == torch.__version__
            assert environment["versions"]["triton"]
            assert environment["command"].split()[0] == "lowbit-attn"
        for row in csv.DictReader((folder / "forward.csv").read_text().splitlines()):
            assert row["torch"] == torch.__version__
            assert row["device"]
            assert row["command"]

    def test_figures_agree_with_one_another(self, files):
        _, folder = files
        rows = {(row["contender"], row["scope"]): row for row in json.loads((folder / "forward.json").read_text())}
        ours, peer = rows["mxfp8 (reference)", "including quantization"], rows["torch SDPA bf16", "whole call"]
        assert ours["rate"] == pytest.approx(GROUPED.flops / ours["milliseconds"] / 1e9)
        assert ours["faster_than"]["torch SDPA bf16"] == pytest.approx(peer["milliseconds"] / ours["milliseconds"])
        assert len(ours["rounds"]) == 2
        assert peer["error"] < 0.004
        assert 0.01 < ours["error"] < 0.1

    def test_a_plot_is_drawn_and_can_be_drawn_again(self, files, run):
        _, folder = files
        (folder / "forward.png").unlink()
        assert run("bench", "plot", folder / "forward.json").exit_code == 0
        assert (folder / "forward.png").stat().st_size > 1000


def test_named_workloads_are_measured_without_the_contenders_left_out(run, tmp_path):
    result = run("bench", "forward", "--workload", "causal", "--skip", "reference", "--skip", "FP8", "--rounds", 1,
                 "--output", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "left out: mxfp8 (reference), mxfp8_fast (reference), cuDNN FP8" in result.stdout
    rows = json.loads((tmp_path / "forward.json").read_text())
    assert {row["workload"] for row in rows} == {"small causal"}
    assert {row["contender"] for row in rows} == {peer.name for peer in PEERS if "FP8" not in peer.name} | {"torch SDPA bf16"}


@pytest.mark.parametrize("name", ["forward", "train"])
def test_contenders_of_which_none_runs_leave_their_reasons_and_no_plot(run, tmp_path, name):
    result = run("bench", name, "--workload", "small packed", "--skip", "mx", "--skip", "torch SDPA bf16", "--rounds", 1,
                 "--output", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "no plot: nothing in it was timed" in result.stdout
    assert json.loads((tmp_path / f"{name}.json").read_text())
    again = run("bench", "plot", tmp_path / f"{name}.json")
    assert again.exit_code == 2
    assert "nothing in it was timed" in again.stderr


def test_a_name_means_its_workload_and_a_part_all_that_contain_it():
    assert [workload.name for workload in bench._workloads([Preset.SMALL], CPU, ["small"])] == ["small"]
    assert [workload.name for workload in bench._workloads([Preset.SMALL], CPU, ["small c", "pack"])] == ["small causal",
                                                                                                          "small packed"]


def test_shapes_of_two_presets_with_one_name_have_their_own_baselines():
    rates = {("full", "ours"): 6.0, ("full", "peer"): 3.0, ("packed", "ours"): 4.0, ("packed", "peer"): 4.0}
    rows = [Row("4x4096", shape, contender, "kernel only", 1.0, rate, "TFLOP/s", baseline=contender == "peer")
            for (shape, contender), rate in rates.items()]
    record = Record(Environment.current(CPU), rows)
    assert [record.ratios(row)["peer"] for row in rows] == [2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("arguments", "problem"), [
    (["forward", "--device", "cpu", "--preset", "paper"], "--preset: got paper on device cpu, which needs a GPU; accepted: small"),
    (["forward", "--recipes", "mxfp9"], "mxfp9"),
    (["forward", "--recipes", ","], "--recipes: got ','; accepted: at least one recipe"),
    (["forward", "--skip", "cuDNN FP9"], "--skip: got 'cuDNN FP9'; accepted: one of mxfp8 (reference), mxfp8_fast (reference)"),
    (["forward", "--skip", ""], "--skip: got ''; accepted: one of mxfp8 (reference)"),
    (["forward", *(f"--skip={part}" for part in ("mx", "torch", "flash", "cuDNN", "Sage"))], "which leaves nothing to measure"),
    (["train", "--workload", "tall"], "--workload: got 'tall'; accepted: one of small, small causal, small packed"),
    (["quantize", "--workload", "accumulation"], "--workload: got accumulation, whose operands differ from others in values only"),
    (["quantize", "--device", "cpux"], "--device: got 'cpux'; accepted:"),
    (["plot", "no-such.json"], "JSON: got 'no-such.json'"),
])
def test_what_cannot_be_done_is_named(run, arguments, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert problem in result.stderr


@pytest.mark.parametrize(("text", "names"), [
    ("mxfp8,mxfp8_fast", ["mxfp8", "mxfp8_fast"]),
    ("mxfp8:max_threshold=2,causal_safety=exact, bf16", ["mxfp8:max_threshold=2,causal_safety=exact", "bf16"]),
])
def test_recipes_keep_their_options(text, names):
    assert bench._recipes(text) == names


def test_one_broken_contender_costs_the_others_nothing():
    def broken(inputs):
        raise RuntimeError("no such engine\nand a trace")

    def absent(inputs):
        raise UnavailableError("is not installed")

    def sound(inputs):
        return Bound(lambda: F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value), first)

    taking_part = [Contender(name, Scope.CALL, bind) for name, bind in (("a", broken), ("b", absent), ("c", sound))]
    rows = forward.measure(DENSE, taking_part, CPU, 1)
    assert [row.note for row in rows] == ["failed: RuntimeError: no such engine", "not run: is not installed", ""]
    assert [row.milliseconds is None for row in rows] == [True, True, False]


def test_the_reference_is_not_timed_for_minutes():
    large = Inputs.draw(Workload("large", 2, 2, 8, causal=False, queries=4096, keys=4096), CPU)
    [contender] = [x for x in forward.contenders(["mxfp8"], CPU) if x.scope is Scope.QUANTIZED and x.name.startswith("mxfp8")]
    with pytest.raises(UnavailableError, match=r"only the reference runs it here.*not 'hopper': needs sm_90"):
        contender.bind(large)


def test_portable_kernels_are_measured_beside_faster_ones(monkeypatch):
    for module in (ours, lowbit_attn.api.ops):
        monkeypatch.setattr(module, "describe", lambda device: Device("cuda", "sm_90"))
    names = [(x.name, x.scope) for recipe in ("mxfp8", "mxfp8_fast", "mxattention") for x in ours.contenders(recipe, CPU)]
    both = (Scope.KERNEL, Scope.QUANTIZED)
    assert names == [(name, scope) for name in ("mxfp8", "mxfp8 (triton)", "mxfp8_fast", "mxattention",
                                                    "mxattention (triton)") for scope in both]


def test_calls_take_turns():
    order = []
    interleaved({name: lambda name=name: order.append(name) for name in "ab"}, CPU, 3)
    assert "".join(order[2:]) == "ababab"


class TestExact:
    @pytest.mark.parametrize("workload", [DENSE, GROUPED, SHIFTED], ids=str)
    def test_dense_is_torchs_float32_attention(self, workload):
        inputs = Inputs.draw(workload, CPU)
        expected = F.scaled_dot_product_attention(inputs.query.float(), inputs.key.float(), inputs.value.float(),
                                                  is_causal=workload.causal, enable_gqa=True)
        assert Exact(inputs).error(expected) < 1e-6
        assert Exact(inputs).error(1.01 * expected) == pytest.approx(0.01, rel=1e-3)

    def test_packed_documents_do_not_see_one_another(self):
        inputs = Inputs.draw(PACKED, CPU)
        parts = []
        for start, end in itertools.pairwise(inputs.cu.tolist()):
            q, k, v = (x[start:end].transpose(0, 1).float() for x in (inputs.query, inputs.key, inputs.value))
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
        assert Exact(inputs).error(torch.cat(parts)) < 1e-6

    def test_chunks_of_heads_change_nothing(self, monkeypatch):
        inputs = Inputs.draw(GROUPED, CPU)
        output = F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, is_causal=True, enable_gqa=True)
        whole = Exact(inputs).error(output)
        monkeypatch.setattr(exact, "_CHUNK", 1)
        assert Exact(inputs).error(output) == whole

    def test_a_nan_is_no_small_error(self):
        inputs = Inputs.draw(DENSE, CPU)
        assert math.isnan(Exact(inputs).error(torch.full_like(inputs.query, math.nan)))

    def test_sampled_rows_reach_both_ends(self):
        rows = sampled_rows(100_000)
        assert (rows[0], rows[-1], len(rows)) == (0, 99_999, exact.ROWS)
        assert sampled_rows(5).tolist() == [0, 1, 2, 3, 4]


class TestWorkloads:
    def test_operations_are_counted_as_is_usual(self):
        [long, causal, *_] = PRESETS[Preset.PAPER]
        assert long.flops == 4 * 24 * 32768**2 * 128
        assert causal.flops == 4 * 4 * 16 * 4096**2 * 128 / 2
        assert PACKED.flops == 4 * 2 * (200**2 + 1 + 55**2) * 64 / 2

    def test_packed_preset_has_its_nine_loads(self):
        loads = PRESETS[Preset.PACKED]
        assert [sum(x.documents) for x in loads] == [16384, 65536, 16384, 65536, 16384, 65536, 16384, 16384, 65536]
        assert [len(x.documents) for x in loads] == [4, 16, 16, 64, 33, 225, 11, 11, 29]
        assert all(x.causal and x.heads == 16 and x.head_dim == 128 for x in loads)
        assert [x.kv_heads for x in loads] == [16] * 7 + [4, 16]

    @pytest.mark.parametrize(("count", "total"), [(11, 16384), (29, 65536)])
    def test_log_uniform_documents_fill_their_batch_within_bounds(self, count, total):
        lengths = log_uniform_documents(count, total)
        assert (len(lengths), sum(lengths)) == (count, total)
        assert 128 <= min(lengths) <= max(lengths) <= 8192

    @pytest.mark.parametrize("layout", Layout)
    def test_inputs_are_views_of_the_asked_layout(self, layout):
        inputs = Inputs.draw(GROUPED, CPU, layout)
        assert inputs.query.shape == (1, 4, 256, 64)
        native = inputs.query if layout is Layout.BHSD else inputs.query.transpose(1, 2)
        assert native.is_contiguous()

    def test_a_shifted_v_has_the_asked_mean(self):
        assert float(Inputs.draw(SHIFTED, CPU).value.float().mean()) == pytest.approx(0.5, abs=0.02)


class TestQuantize:
    def test_rates_count_bytes_read_and_written(self, run, small, tmp_path):
        result = run("bench", "quantize", "--device", "cpu", "--rounds", 1, "--output", tmp_path, "--recipes", "mxfp8")
        assert result.exit_code == 0, result.stderr
        copy, ours = json.loads((tmp_path / "quantize.json").read_text())
        elements = 256 * 64 * (4 + 2 + 2)
        assert copy["rate"] == pytest.approx(4 * elements / copy["milliseconds"] / 1e6)
        assert ours["rate"] == pytest.approx(3 * elements / ours["milliseconds"] / 1e6)
        assert ours["faster_than"]["copy"] == pytest.approx(ours["rate"] / copy["rate"])

    def test_workloads_that_differ_by_mask_only_are_measured_once(self):
        names = [workload.name for workload in quantizers.distinct(PRESETS[Preset.PAPER])]
        assert names == ["long", "4x4096 causal"]


def test_a_record_reads_back_what_it_wrote(tmp_path):
    rows = [Row("w", "shape", "a", "kernel only", 2.0, 10.0, "TFLOP/s", 0.01, 0.1, (2.0, 2.2), "calls"),
            Row("w", "shape", "b", "whole call", note="not run: no", baseline=True)]
    record = Record(Environment.current(CPU), rows)
    path, _ = record.write(tmp_path / "x")
    assert Record.read(path) == record
    assert record.ratios(rows[0]) == {"b": None}


def test_the_default_folder_is_not_committed():
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text().splitlines()
    assert "outputs/" in ignored
