"""`lowbit-attn check`: who may run it, what it finds, and what its report says."""

import math
import os

import pytest
import torch
import typer

from lowbit_attn.cli import check
from lowbit_attn.cli.benchmarks.record import Environment
from lowbit_attn.cli.checks import report
from lowbit_attn.cli.checks.cases import Case, Outcome, normal
from lowbit_attn.cli.checks.instructions import Finding
from lowbit_attn.cli.checks.speed import Speed
from lowbit_attn.kernels.cdna4 import toolchain
from lowbit_attn.kernels.cdna4.loader import HipError

needs_compiler = pytest.mark.skipif(not toolchain.available() and not os.environ.get("CI"), reason="the compiler is missing")
ENVIRONMENT = Environment("2026-01-01", "AMD Instinct MI355X", {"torch": "2.11", "cudnn": None},
                          "lowbit-attn check --backend cdna4")
GOOD = Outcome(Case("129 keys", "fused_mxfp6", normal(1, 1), 1e-6), 1e-7, 0.0)


def test_a_machine_without_the_device_is_told_what_it_can_do(run):
    result = run("check", "--backend", "cdna4")
    assert result.exit_code == 2
    assert "needs a gfx950" in result.stderr
    assert "--emulate" in result.stderr


def test_other_backends_are_refused_by_name(run):
    result = run("check", "--backend", "hopper")
    assert result.exit_code == 2
    assert "--backend: got 'hopper'; accepted: cdna4" in result.stderr


def test_an_emulator_is_not_timed(run):
    result = run("check", "--backend", "cdna4", "--emulate", "--speed")
    assert result.exit_code == 2
    assert "--speed: got it with --emulate" in result.stderr


@needs_compiler
def test_emulated_it_finds_no_difference_and_says_that_it_is_no_device(run, tmp_path):
    path = tmp_path / "sub" / "report.md"
    result = run("check", "--backend", "cdna4", "--emulate", "--output", path)
    assert result.exit_code == 0, result.stdout
    assert "no differences" in result.stdout
    text = path.read_text()
    assert "EMULATED: says nothing of a device" in text
    assert "**0 differences** in 41 instructions and 27 calls" in text
    assert "fused_mxfp4, a rollback in every tile: equal" in text


@pytest.mark.parametrize("error", [2e-6, math.inf])
def test_a_call_beyond_its_bound_is_a_difference(error):
    bad = Outcome(GOOD.case, error, 0.0)
    assert report.failures([], [GOOD, bad]) == 1
    assert "DIFFERS" in report.outcome_line(bad)


def test_an_open_question_is_told_and_is_no_difference():
    finding = Finding("v_cvt, scale 1.75", 3, 64, "at [5]", question=True)
    assert report.failures([finding], []) == 0
    assert report.finding_line(finding) == "v_cvt, scale 1.75: 3 of 64 differ, at [5]; no kernel depends on it"


def test_a_fault_on_the_way_still_leaves_a_report(tmp_path):
    def run(launch):
        raise HipError("hipModuleLaunchKernel: launch failure [719]")

    path = tmp_path / "report.md"
    with pytest.raises(typer.Exit) as ended:
        check._check(run, torch.device("cpu"), path, speed=False, small=True)
    assert ended.value.exit_code == 1
    assert "**STOPPED** by HipError: hipModuleLaunchKernel: launch failure [719]" in path.read_text()


def test_a_folder_for_the_report_is_refused_before_anything_runs(tmp_path, capsys):
    with pytest.raises(typer.Exit):
        check._check(lambda launch: pytest.fail("it ran"), torch.device("cpu"), tmp_path, speed=False, small=True)
    assert "--output: got the folder" in capsys.readouterr().err


def test_a_lost_lse_is_a_difference():
    assert not Outcome(GOOD.case, 0.0, math.inf).passed


def test_the_report_has_everything_that_was_found():
    speed = Speed("paper", "fused_mxfp6", 3900.0, 3700.0, 1400.0, 0.065, 0.9979)
    text = report.render(ENVIRONMENT, [Finding("v_cvt", 3, 64, "at [5] of 1.5: got 2, read as 4")], [GOOD], [speed], emulated=False)
    assert "**1 differences** in 1 instructions and 1 calls" in text
    assert "v_cvt: 3 of 64 differ, at [5] of 1.5: got 2, read as 4" in text
    assert "AMD Instinct MI355X, 2026-01-01" in text
    assert "3900 TFLOP/s, 3700 with quantization, SDPA bf16 1400; error 6.50%" in text
    assert "EMULATED" not in text


@needs_compiler
def test_speed_times_all_three_and_compares_with_sdpa(tmp_path):
    from lowbit_attn.cli.checks.speed import speeds
    from lowbit_attn.kernels.cdna4.emulate import Emulator

    found = list(speeds(Emulator(tmp_path), torch.device("cpu"), {"tiny": (130, 1)}, rounds=1))
    assert [x.recipe for x in found] == ["fused_mxfp8", "fused_mxfp6", "fused_mxfp4"]
    assert all(x.kernel > x.with_quantization > 0 and x.sdpa > 0 for x in found)
    assert all(0 < x.error < 0.35 and x.cosine > 0.95 for x in found)
