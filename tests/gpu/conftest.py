"""Writes what the GPU tests found to the file that LOWBIT_ATTN_GPU_RECORD names; `make gpu-test` sets it to docs/gpu-record.json.

CI has no GPU: it compares the kernels' fingerprint in the committed record with the sources (tests/gates/test_gpu_record.py).
"""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from kernel_sources import fingerprint

VARIABLE = "LOWBIT_ATTN_GPU_RECORD"
_outcomes: dict[str, str] = {}
_collected: set[str] = set()
_selected: set[str] = set()
NOT_RUN = "not run: the session ended before it"


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _reason(report):
    return f": {report.longrepr[2]}" if report.skipped and isinstance(report.longrepr, tuple) else ""


def pytest_collection_finish(session):
    _selected.update(item.nodeid for item in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    """The same where pytest-xdist's workers collect."""
    _selected.update(ids)


def pytest_collectreport(report):
    """A file that cannot be imported, or that is skipped as a whole, has an outcome too."""
    if report.outcome == "passed":
        _collected.add(report.nodeid)
    else:
        _outcomes[report.nodeid] = ("skipped" if report.skipped else "error") + _reason(report)


def pytest_runtest_logreport(report):
    """A test's outcome is its call's, unless its setup or teardown ended otherwise."""
    if report.skipped and hasattr(report, "wasxfail"):
        _outcomes[report.nodeid] = f"xfailed: {report.wasxfail.removeprefix('reason: ')}"
    elif report.when == "call" or report.outcome != "passed":
        outcome = report.outcome if report.when == "call" or report.skipped else "error"
        _outcomes[report.nodeid] = outcome + _reason(report)


def _join(record, path):
    """Keep what earlier runs of the same kernels on the same machine found, but for tests that ran again, not only were to run, and
    for files that could not be collected then, and now can."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if all(before.get(name) == record[name] for name in ("kernels", "device", "torch", "triton", "python")):
        kept = {name: outcome for name, outcome in before["outcomes"].items() if name not in _collected}
        new = {name: outcome for name, outcome in record["outcomes"].items() if outcome != NOT_RUN or name not in kept}
        record["outcomes"] = dict(sorted({**kept, **new}.items()))
        record["command"] = "; ".join(dict.fromkeys([*before["command"].split("; "), record["command"]]))


@pytest.fixture(autouse=True)
def _memory_for_others():
    """Workers of pytest-xdist share a GPU: what a large test has reserved goes back."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """A record is written only where there is a GPU: skipped tests say nothing about kernels."""
    target = os.environ.get(VARIABLE)
    if not target:
        return
    if not torch.cuda.is_available() or not any(name in _selected for name in _outcomes):
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
        print(f"\n{VARIABLE}={target}: no record written: {'no test ran' if torch.cuda.is_available() else 'no GPU here'}")
        return
    _outcomes.update(dict.fromkeys(_selected - _outcomes.keys(), NOT_RUN))
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": _triton(),
        "python": platform.python_version(),
        "command": "pytest " + " ".join(session.config.invocation_params.args),
        "kernels": fingerprint(),
        "outcomes": dict(sorted(_outcomes.items())),
    }
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    _join(record, path)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\nGPU record: {path}")
