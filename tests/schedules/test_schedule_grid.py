"""What a valid schedule resolves to."""

from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lowbit_attn.schedules import PrecisionSchedule, load, render_schedule

CONFIGS = Path(__file__).parents[2] / "configs"


def _schedule(*rules: dict[str, object], default: str = "fused_mxfp4", **attention: object) -> PrecisionSchedule:
    return load({"version": 1, "name": "test", "attention": {"default": default, "rules": list(rules), **attention}})


def _steps(selector: object, count: int) -> list[int]:
    grid = _schedule({"steps": selector, "recipe": "mxfp8"}).bind(steps=count, blocks=1).grid()
    return [step for step, row in enumerate(grid) if row[0] == "mxfp8"]


@pytest.mark.parametrize(("selector", "expected"), [
    (4, [4]), ([0, 9], [0, 9]), ({"first": 3}, [0, 1, 2]), ({"last": 2}, [8, 9]), ({"from": 5, "to": 7}, [5, 6, 7]),
    ({"from": 8}, [8, 9]), ({"to": 1}, [0, 1]), ({"at": [2]}, [2]), ({"first": "25%"}, [0, 1, 2]), ({"last": "10%"}, [9]),
])
def test_selectors_are_zero_based_and_inclusive(selector, expected):
    assert _steps(selector, 10) == expected


@settings(deadline=None)
@given(percent=st.integers(1, 100), count=st.integers(1, 200))
def test_percentages_round_outward(percent, count):
    assert len(_steps({"first": f"{percent}%"}, count)) == ceil(percent * count / 100 - 1e-9)


def test_decimal_percentages_are_exact():
    assert len(_steps({"last": "0.1%"}, 1000)) == 1


def test_later_rules_win():
    bound = _schedule({"steps": {"first": 2}, "recipe": "fused_mxfp6"}, {"blocks": 0, "recipe": "bf16"}).bind(steps=3, blocks=2)
    assert bound.grid() == [["bf16", "fused_mxfp6"], ["bf16", "fused_mxfp6"], ["bf16", "fused_mxfp4"]]


def test_rules_can_be_for_one_expert():
    bound = _schedule({"expert": "low_noise", "recipe": "bf16"}).bind(steps=1, blocks=1)
    assert (bound.recipe(0, 0, "high_noise"), bound.recipe(0, 0, "low_noise")) == ("fused_mxfp4", "bf16")


def test_block_indices_run_on_from_dual_to_single_stream():
    schedule = _schedule({"blocks": 2, "recipe": "mxfp8"}, {"stream": "dual", "recipe": "bf16"})
    assert schedule.bind(steps=1, blocks={"dual": 2, "single": 2}).grid() == [["bf16", "bf16", "mxfp8", "fused_mxfp4"]]


def test_a_stream_intersects_with_blocks():
    bound = _schedule({"stream": "single", "blocks": {"from": 1, "to": 2}, "recipe": "bf16"}).bind(1, {"dual": 2, "single": 2})
    assert bound.grid() == [["fused_mxfp4", "fused_mxfp4", "bf16", "fused_mxfp4"]]


def test_a_stream_without_the_given_blocks_is_refused():
    with pytest.raises(ValueError, match="outside stream 'single'; accepted: 2 to 3"):
        _schedule({"stream": "single", "blocks": [0], "recipe": "bf16"}).bind(1, {"dual": 2, "single": 2})


def test_cross_attention_has_its_own_recipe():
    bound = _schedule({"recipe": "bf16"}, cross="mxfp8").bind(steps=1, blocks=1)
    assert (bound.recipe(0, 0, kind="cross"), bound.recipe(0, 0)) == ("mxfp8", "bf16")


def test_cross_attention_is_unchanged_by_default():
    assert _schedule().bind(steps=1, blocks=1).recipe(0, 0, kind="cross") == "unchanged"


def test_recipes_are_kept_in_canonical_form():
    assert _schedule(default="mxfp8:max_threshold=4").attention.default == "mxfp8"


def test_a_plain_recipe_name_runs_everywhere():
    assert load("fused_mxfp6").bind(steps=2, blocks=2).grid() == [["fused_mxfp6"] * 2] * 2


def test_a_loaded_schedule_loads_as_itself():
    schedule = load("mxfp8")
    assert load(schedule) is schedule


@pytest.mark.parametrize(("file", "steps", "blocks", "experts", "ends"), [
    ("wan2.2-t2v-a14b-hybrid.yaml", 20, 40, ("high_noise", "low_noise"), 3),
    ("hunyuan-video-hybrid.yaml", 50, {"dual": 20, "single": 40}, ("transformer",), 5),
])
def test_shipped_hybrids_run_mxfp6_at_the_ends_and_mxfp4_between(file, steps, blocks, experts, ends):
    bound = load(CONFIGS / file).bind(steps, blocks, experts)
    rows = ["fused_mxfp6"] * ends + ["fused_mxfp4"] * (steps - 2 * ends) + ["fused_mxfp6"] * ends
    for expert in experts:
        assert bound.grid(expert) == [[recipe] * bound.layout.blocks for recipe in rows]


def _drawn(bound: object) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(bound)
    return capture.get()


def test_drawn_grids_merge_equal_steps_blocks_and_experts():
    text = _drawn(render_schedule(load(CONFIGS / "wan2.2-t2v-a14b-hybrid.yaml").bind(20, 40, ("high_noise", "low_noise"))))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert "high_noise = low_noise" in text
    assert "0–39" in text
    assert rows == [["0–2", "fused_mxfp6"], ["3–16", "fused_mxfp4"], ["17–19", "fused_mxfp6"]]


def test_drawn_grids_keep_different_experts_apart():
    text = _drawn(render_schedule(_schedule({"expert": "low_noise", "blocks": 1, "recipe": "bf16"}).bind(steps=2, blocks=3)))
    assert "high_noise\n" in text.replace(" ", "")
    assert text.count("step \\ block") == 2


def test_spaces_around_a_recipe_are_no_part_of_it():
    bound = _schedule({"blocks": 0, "recipe": " bf16 "}, {"blocks": 1, "recipe": "mxfp8 "}, cross=" unchanged ").bind(1, 2)
    assert bound.grid() == [["bf16", "mxfp8"]]
    assert load(" bf16 ").bind(steps=1, blocks=1).grid() == [["bf16"]]
