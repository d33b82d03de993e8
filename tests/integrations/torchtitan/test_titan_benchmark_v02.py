"""The pretraining benchmark, at the size of a test: it compares, and goes on where it was cut."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "titan_pretraining.py"


def _report(out_dir: Path, *arguments: str) -> dict[str, Any]:
    subprocess.run([sys.executable, SCRIPT, "--out", out_dir, "--size", "tiny", "--seq-len", "96", "--batch", "1", "--steps", "3",
                    "--checkpoint", "1", "--no-compile", *arguments], check=True, capture_output=True,
                   env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    report: dict[str, Any] = json.loads((out_dir / "report.json").read_text())
    return report


@pytest.mark.full
def test_a_cut_run_goes_on_and_the_report_compares(tmp_path: Path) -> None:
    cut = _report(tmp_path, "--seconds", "0")
    assert not cut["complete"]
    assert cut["runs"]["bf16"]["steps"] == 2
    whole = _report(tmp_path)
    assert whole["complete"]
    assert {name: len(found["losses"]) for name, found in whole["runs"].items()} == {"bf16": 3, "mxfp8": 3}
    assert whole["runs"]["bf16"]["losses"][:2] == cut["runs"]["bf16"]["losses"]
    assert abs(whole["against"]["mxfp8"]["loss"]) < 0.005
    assert whole["against"]["mxfp8"]["tokens_per_second"] > 0
    assert (tmp_path / "loss.png").stat().st_size > 1000
