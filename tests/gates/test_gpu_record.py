"""The committed record of the last GPU run belongs to the kernels as they are now, and holds no failure."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kernel_sources import fingerprint, sources

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "gpu-record.json"
WITHOUT_A_PASS = {
    "test_titan_two_gpus.py": "needs two GPUs",
    "test_video_two_gpus.py": "needs two GPUs",
}
"""Files of which the committed record has no test that passed, and why."""


@pytest.fixture
def record():
    if not RECORD.is_file():
        reason = "no run of `make gpu-test` without a failure is on record" if sources() else "this version has no kernels"
        pytest.skip(f"no {RECORD.relative_to(ROOT)} yet: {reason}")
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_kernels_are_those_that_ran(record):
    assert record["kernels"] == fingerprint(), (
        f"lowbit_attn/kernels changed after the GPU run of {record['date']} on {record['device']}: run `make gpu-test` on a GPU "
        "and commit docs/gpu-record.json")


def test_every_recorded_test_passed_or_says_why_it_did_not_run(record):
    outcomes = Counter(outcome.partition(":")[0] for outcome in record["outcomes"].values())
    assert outcomes["passed"] > 0
    assert set(outcomes) <= {"passed", "skipped", "xfailed", "not run"}, outcomes
    unexplained = [name for name, outcome in record["outcomes"].items() if outcome != "passed" and not outcome.partition(": ")[2]]
    assert not unexplained
    assert 100 * outcomes["not run"] < outcomes["passed"]


def test_every_gpu_test_file_ran(record):
    ran = {name.partition("::")[0].rsplit("/", 1)[-1] for name, outcome in record["outcomes"].items() if outcome == "passed"}
    assert {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")} - ran <= set(WITHOUT_A_PASS)
    assert not ran & set(WITHOUT_A_PASS), "no exception any more: take it out"


def test_the_record_says_what_ran_where(record):
    assert all(record[name] for name in ("date", "device", "torch", "triton", "python", "command"))


class TestFingerprint:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "hopper").mkdir()
        (tmp_path / "hopper" / "a.py").write_bytes(b"x = 1\ny = 2\n")
        return tmp_path

    def test_line_ends_and_generated_files_do_not_count(self, folder):
        before = fingerprint(folder)
        (folder / "hopper" / "a.py").write_bytes(b"x = 1\r\ny = 2\r\n")
        (folder / "hopper" / "__pycache__").mkdir()
        (folder / "hopper" / "__pycache__" / "a.pyc").write_bytes(b"1")
        assert fingerprint(folder) == before

    def test_kernels_of_other_hardware_do_not_count(self, folder):
        before = fingerprint(folder)
        (folder / "cdna4").mkdir()
        (folder / "cdna4" / "a.h").write_bytes(b"1")
        assert fingerprint(folder) == before

    @pytest.mark.parametrize(("name", "content"), [("hopper/a.py", b"x = 1\ny = 3\n"), ("hopper/b.py", b""),
                                                   ("c.hsaco", b"\x7fELF")])
    def test_contents_and_names_do(self, folder, name, content):
        before = fingerprint(folder)
        (folder / name).write_bytes(content)
        assert fingerprint(folder) != before


FAKE_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda: "a GPU"
"""
SAMPLE = """
import pytest

def test_good():
    pass

def test_bad():
    assert False

def test_left_out():
    pytest.skip("needs two GPUs")

@pytest.mark.xfail(reason="known")
def test_expected():
    assert False

@pytest.fixture
def broken():
    raise RuntimeError

def test_broken(broken):
    pass
"""


@pytest.fixture
def gpu_run(tmp_path):
    """Runs a sample test file under the plug-in that writes the record; returns the process and the record's path."""
    for name in ("kernel_sources.py", "gpu/conftest.py"):
        target = tmp_path / Path(name).name
        target.write_text((ROOT / "tests" / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_absent.py").write_text("import pytest\n\npytest.importorskip('no_such_package')\n")

    def run(before="", *arguments):
        conftest = tmp_path / "conftest.py"
        conftest.write_text(before + conftest.read_text(encoding="utf-8"))
        environment = os.environ | {"LOWBIT_ATTN_GPU_RECORD": str(tmp_path / "out" / "record.json"), "PYTHONPATH": str(ROOT)}
        result = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "."], cwd=tmp_path,
                                env=environment, capture_output=True, text=True, check=False)
        return result, tmp_path / "out" / "record.json"

    return run


def test_a_run_writes_every_outcome_and_the_kernels_it_ran(gpu_run):
    _, path = gpu_run(FAKE_GPU)
    record = json.loads(path.read_text())
    assert record["device"] == "a GPU"
    assert record["kernels"] == fingerprint()
    absent = record["outcomes"].pop("test_absent.py")
    assert absent.startswith("skipped: ")
    assert "no_such_package" in absent
    assert record["outcomes"] == {
        "test_sample.py::test_bad": "failed", "test_sample.py::test_broken": "error", "test_sample.py::test_good": "passed",
        "test_sample.py::test_expected": "xfailed: known", "test_sample.py::test_left_out": "skipped: Skipped: needs two GPUs"}


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "workers"])
def test_what_an_interrupted_run_did_not_reach_is_on_record(gpu_run, tmp_path, workers):
    (tmp_path / "test_sample.py").write_text("def test_good():\n    pass\n\ndef test_cut():\n    raise KeyboardInterrupt\n\n"
                                             "def test_late():\n    pass\n")
    _, path = gpu_run(FAKE_GPU, *workers)
    outcomes = json.loads(path.read_text())["outcomes"]
    assert outcomes["test_sample.py::test_late"] == "not run: the session ended before it"
    assert outcomes["test_sample.py::test_cut"] in ("not run: the session ended before it", "failed", "error")


def test_a_second_run_of_the_same_kernels_replaces_what_it_ran_again(gpu_run, tmp_path):
    _, path = gpu_run(FAKE_GPU)
    sample = tmp_path / "test_sample.py"
    sample.write_text(SAMPLE.replace("def test_bad():\n    assert False", "def test_bad():\n    assert True"))
    first = json.loads(path.read_text())
    gpu_run("", "-k", "test_bad")
    second = json.loads(path.read_text())
    assert first["outcomes"].pop("test_sample.py::test_bad") == "failed"
    assert second["outcomes"].pop("test_sample.py::test_bad") == "passed"
    assert second["outcomes"] == first["outcomes"]
    assert second["command"] == f"{first['command']}; pytest -q -p no:cacheprovider -k test_bad ."


def test_what_a_second_run_did_not_reach_stays_as_the_first_found_it(gpu_run, tmp_path):
    _, path = gpu_run(FAKE_GPU)
    sample = tmp_path / "test_sample.py"
    sample.write_text("def test_cut():\n    raise KeyboardInterrupt\n" + SAMPLE)
    gpu_run("")
    outcomes = json.loads(path.read_text())["outcomes"]
    assert outcomes["test_sample.py::test_bad"] == "failed"
    assert outcomes["test_sample.py::test_good"] == "passed"
    gpu_run("", "--collect-only")
    assert json.loads(path.read_text())["outcomes"] == outcomes


def test_a_file_that_can_be_collected_again_is_no_longer_on_record_as_one_that_cannot(gpu_run, tmp_path):
    _, path = gpu_run(FAKE_GPU)
    assert "test_absent.py" in json.loads(path.read_text())["outcomes"]
    (tmp_path / "test_absent.py").write_text("def test_here():\n    pass\n")
    gpu_run("", "-k", "test_here")
    outcomes = json.loads(path.read_text())["outcomes"]
    assert outcomes["test_absent.py::test_here"] == outcomes["test_sample.py::test_good"] == "passed"
    assert "test_absent.py" not in outcomes


def test_a_run_of_other_kernels_starts_anew(gpu_run):
    _, path = gpu_run(FAKE_GPU)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kernels": "others"}))
    gpu_run("", "-k", "test_good")
    assert json.loads(path.read_text())["outcomes"].keys() == {"test_sample.py::test_good", "test_absent.py"}


def test_without_a_gpu_nothing_is_recorded_and_the_run_fails(gpu_run):
    result, path = gpu_run()
    assert not path.exists()
    assert result.returncode != 0
    assert "no record written: no GPU here" in result.stdout
