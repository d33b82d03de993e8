"""`lowbit-attn leak`: what it prints, and when it fails."""

import pytest

from lowbit_attn.cli.measurements import leaks
from lowbit_attn.recipes import RECIPES


@pytest.fixture
def leak(run):
    def invoke(recipe, *options):
        return run("leak", "--recipe", recipe, "--probes", 5, *options)

    return invoke


def rows(result):
    """Cells of the table's body, by (changed, position)."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if line.startswith("│")]
    return {tuple(cells[:2]): cells[2:] for cells in lines}


def test_exact_recipe_shows_zeros_beside_a_leaking_control(leak):
    result = leak("mxfp8:causal_safety=exact")
    assert result.exit_code == 0
    table = rows(result)
    assert set(table) == {(operand, position) for operand in leaks.OPERANDS for position in leaks.POSITIONS}
    assert table["v", "earlier blocks"][:2] == ["0", "0"]
    assert float(table["v", "earlier blocks"][4]) > 0


def test_a_changed_do_says_nothing_about_the_forward_and_the_key_side(leak):
    cells = rows(leak("mxfp8"))["dO", "same block"]
    assert [bool(cell) for cell in cells] == [False, True, False, False] * 2


def test_packed(leak):
    result = leak("nvfp4_fp8:causal_safety=exact", "--packed", "--seq", 96)
    assert result.exit_code == 0
    assert "packed" in result.stdout


def test_a_recipe_that_refuses_causal_masks_is_probed_and_said_to(leak):
    result = leak("fused_mxfp8")
    assert result.exit_code == 0
    assert "fused_mxfp8 is refused under a causal mask" in result.stdout
    assert float(rows(result)["v", "earlier blocks"][0]) > 0


def test_a_leak_ends_with_status_1(leak, monkeypatch):
    monkeypatch.setattr(leaks, "probe", lambda recipe, probes, honest=leaks.probe: honest(
        leaks.leaking_control(RECIPES["mxfp8"]), probes))
    result = leak("mxfp8")
    assert result.exit_code == 1
    assert "leak: O of rows in the earlier blocks moved by" in result.stdout


def test_a_control_that_shows_nothing_ends_with_status_1(leak, monkeypatch):
    from dataclasses import replace

    monkeypatch.setattr(leaks, "leaking_control", lambda recipe: replace(recipe, causal_safety="exact"))
    result = leak("mxfp8")
    assert result.exit_code == 1
    for operand in leaks.OPERANDS:
        assert f"shows no leak through {operand}:" in result.stdout


def test_an_unknown_recipe_is_named(leak):
    result = leak("mxfp9")
    assert result.exit_code == 2
    assert "mxfp9" in result.stderr


def test_bf16_is_refused_and_not_offered(leak):
    result = leak("bf16")
    assert result.exit_code == 2
    assert "got 'bf16', which is torch SDPA" in result.stderr
    assert "bf16" not in result.stderr.partition("accepted")[2]


@pytest.mark.parametrize(("option", "value"), [("--seq", 63), ("--probes", 0)])
def test_sizes_too_small_are_refused(run, option, value):
    assert run("leak", "--recipe", "mxfp8", option, value).exit_code == 2
