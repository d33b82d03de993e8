import pytest

from lowbit_attn import recipe_names
from lowbit_attn.cli import doctor, extras
from lowbit_attn.ops import Device, Explanation


def test_every_recipe_is_listed_and_runs(run):
    result = run("doctor", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    rows = {cells[1].strip(): cells for line in result.stdout.splitlines() if len(cells := line.split("│")) == 8}
    for name in recipe_names():
        assert rows[name][6].strip() == "runs"
    assert rows["mxfp8"][2].strip() == "reference"
    assert rows["bf16"][2].strip() == "torch"


def test_says_why_not_faster(run):
    result = run("doctor", "--device", "cpu")
    assert "not hopper: needs sm_90, this device is cpu (all recipes)" in result.stdout


def test_reasons_that_differ_by_recipe_are_grouped():
    def passed_over(recipe, reason):
        return Explanation(recipe, Device("cuda", "sm_90"), "reference", "emulated", (("hopper", reason),))

    lines = doctor._reasons([passed_over("mxfp8", "no kernel for mxfp8 in this version"),
                             passed_over("nvfp4", "no kernel for nvfp4 in this version"),
                             passed_over("mxattention", "head_dim 64 only")])
    assert len(lines) == 2
    assert "no kernel for this recipe in this version" in lines[0]
    assert "mxfp8, nvfp4" in lines[0]


def test_a_recipe_that_breaks_is_reported_and_ends_nothing(run, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such instruction\nand a trace")

    monkeypatch.setattr(doctor, "attention", broken)
    result = run("doctor", "--device", "cpu")
    assert result.exit_code == 0
    assert "RuntimeError: no such instruction" in result.stdout
    assert "and a trace" not in result.stdout


def test_a_missing_package_comes_with_its_pip_command(run, monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda package: None if package == "diffusers" else "1.0")
    result = run("doctor", "--device", "cpu")
    line = next(line for line in result.stdout.splitlines() if "│ diffusers " in line)
    assert "missing" in line
    assert "pip install 'lowbit-attn[diffusers]'" in line


@pytest.mark.parametrize("device", ["cpux", "cuda:99"])
def test_an_unusable_device_is_refused(run, device):
    result = run("doctor", "--device", device)
    assert result.exit_code == 2
    assert f"--device: got '{device}'; accepted:" in result.stderr


def test_require_names_packages_extra_and_command(monkeypatch):
    monkeypatch.setitem(extras.EXTRAS, "demo", ("no_such_package", "torch"))
    with pytest.raises(extras.MissingExtraError, match=r"not installed: no_such_package; .*pip install 'lowbit-attn\[demo\]'"):
        extras.require("demo")
