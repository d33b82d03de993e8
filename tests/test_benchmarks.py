"""Every script in benchmarks/ still runs: the quick ones as a dry run, all of them as far as their arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
WAN = ["--device", "cpu", "--blocks", "2", "--frames", "5", "--height", "32", "--width", "32", "--heads", "1", "--repeats", "1"]


def run(script, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(ROOT / "benchmarks" / script), *arguments], env=environment, text=True,
                          capture_output=True, check=False)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_explains_its_arguments(script):
    result = run(script, "--help")
    assert result.returncode == 0, result.stderr
    assert "usage" in result.stdout


def test_a_wan_step_is_measured_for_bf16_and_every_schedule_that_runs():
    pytest.importorskip("diffusers")
    result = run("wan_step.py", "mxfp8_fast", "wan2.2-t2v-a14b-hopper", *WAN)
    assert result.returncode == 0, result.stderr
    for name in ("bf16", "mxfp8_fast", "wan2.2-t2v-a14b-hopper"):
        assert f"\n{name}: " in result.stdout


def test_fewer_blocks_weigh_a_schedules_blocks_as_forty_do(monkeypatch):
    pytest.importorskip("diffusers")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import wan_step
    from wan_step import Forward

    class Meter:
        def __getitem__(self, row):
            assert len(row) == 8
            [recipe] = set(row)
            return {"bf16": Forward(10.0, 8.0, 3.0), "mxfp8_fast": Forward(5.0, 3.0, 2.0)}[recipe]

    row = ("bf16",) + ("mxfp8_fast",) * 39
    mixed = wan_step.forward_of(row, Meter(), 8)
    assert mixed.seconds == pytest.approx(10 * 5 * (1 / 40) + 5 * 5 * (39 / 40))
    assert mixed.attention == pytest.approx(8 * 5 * (1 / 40) + 3 * 5 * (39 / 40))
    assert mixed.peak == 3.0


def test_errors_over_seeds_stand_beside_the_published_ones():
    result = run("fused_softmax.py", "--seq", "512", "--heads", "1", "--seeds", "2", "--rows", "64", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    lines = {line.split(" ")[0]: line for line in result.stdout.splitlines()[1:]}
    for recipe, published in (("fused_mxfp8", 5.69), ("fused_mxfp6", 6.46), ("fused_mxfp4", 20.53)):
        # Two seeds of one short head are within a tenth of the published error.
        assert float(lines[recipe].split("error ")[1].split(" ")[0]) == pytest.approx(published, rel=0.1)
        assert "rolled back 0.000%" in lines[recipe]
        assert f"published {published}" in lines[recipe]
    assert "published" not in lines["mxattention"]
