"""What a valid schedule resolves to."""

from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lowbit_attn.schedules import PrecisionSchedule, load, published_blocks, render_schedule

CONFIGS = Path(__file__).parents[2] / "configs"


def _schedule(*rules: dict[str, object], default: str = "fused_mxfp4", model: str = "auto",
              **attention: object) -> PrecisionSchedule:
    section = {"default": default, "rules": list(rules), **attention}
    return load({"version": 1, "name": "test", "model": model, "attention": section})


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


def test_a_kind_selects_modules_of_that_kind_only():
    cross = {"kind": "cross", "steps": 0, "recipe": "mxfp8"}
    bound = load({"version": 1, "name": "k", "model": "wan", "attention": {"default": "bf16", "rules": [cross]}}).bind(2, 2)
    assert bound.grid(kind="cross") == [["mxfp8"] * 2, ["unchanged"] * 2]
    assert bound.grid() == [["bf16"] * 2] * 2


def test_rules_without_a_kind_leave_cross_attention_alone():
    bound = _schedule({"recipe": "bf16"}, cross="mxfp8", model="wan").bind(1, 1)
    assert (bound.recipe(0, 0, kind="self"), bound.recipe(0, 0, kind="cross")) == ("bf16", "mxfp8")


@pytest.mark.parametrize(("patterns", "blocks"), [
    ("blocks.1.attn1", [1]), ("blocks.?.attn1", [0, 1, 2]), (["blocks.0.*", "blocks.2.attn1"], [0, 2]), ("*attn1", [0, 1, 2])])
def test_patterns_select_modules_by_name(patterns, blocks):
    rules = [{"modules": patterns, "recipe": "bf16"}]
    schedule = load({"version": 1, "name": "m", "model": "wan", "attention": {"default": "mxfp8", "rules": rules}})
    assert [block for block, recipe in enumerate(schedule.bind(1, 3).grid()[0]) if recipe == "bf16"] == blocks


def test_vace_blocks_are_a_stream_that_goes_on_from_the_main_one():
    rule = {"stream": "vace", "recipe": "bf16"}
    schedule = load({"version": 1, "name": "v", "model": "wan", "attention": {"default": "mxfp8", "rules": [rule]}})
    assert schedule.bind(1, {"main": 2, "vace": 1}).grid() == [["mxfp8", "mxfp8", "bf16"]]


def test_sampling_settings_are_read():
    sampling = load(CONFIGS / "wan2.2-t2v-a14b-hybrid.yaml").sampling
    assert sampling.model_dump() == {"scheduler": "UniPCMultistepScheduler", "flow_shift": 12.0, "steps": 20, "guidance_scale": 4.0,
                                     "guidance_scale_2": 3.0, "frames": 81, "width": 1280, "height": 720, "fps": 16.0}


SHIPPED = {
    # file: recipe and number of steps from the first on; the last entry's block 0 if it differs
    "wan2.2-t2v-a14b-hybrid": [("fused_mxfp6", 3), ("fused_mxfp4", 14), ("fused_mxfp6", 3)],
    "wan2.2-t2v-a14b-mxattention": [("mxattention", 38), ("bf16", 2)],
    "wan2.2-t2v-a14b-hopper": [("bf16", 2), ("mxfp8_fast", 17), ("bf16", 1)],
    "wan2.1-t2v-14b-hybrid": [("fused_mxfp6", 8), ("fused_mxfp4", 34), ("fused_mxfp6", 8)],
    "wan2.1-t2v-1.3b-hybrid": [("fused_mxfp6", 8), ("fused_mxfp4", 34), ("fused_mxfp6", 8)],
    "wan2.2-ti2v-5b-hybrid": [("fused_mxfp6", 8), ("fused_mxfp4", 34), ("fused_mxfp6", 8)],
    "hunyuan-video-hybrid": [("fused_mxfp6", 5), ("fused_mxfp4", 40), ("fused_mxfp6", 5)],
    "hunyuan-video-mxattention": [("mxattention", 50)],
    "hunyuan-video-hopper": [("bf16", 5), ("mxfp8_fast", 43), ("bf16", 2)],
    "hunyuan-video-1.5-hybrid": [("fused_mxfp6", 5), ("fused_mxfp4", 40), ("fused_mxfp6", 5)],
    "minimax-h3-hybrid": [("fused_mxfp6", 15), ("fused_mxfp4", 20), ("fused_mxfp6", 15)],
}
BF16_IN_BLOCK_0 = {"wan2.2-t2v-a14b-mxattention", "wan2.2-t2v-a14b-hopper", "hunyuan-video-hopper"}


def test_every_shipped_schedule_is_in_the_table_below():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_schedule_is_its_sources(name):
    schedule = load(CONFIGS / f"{name}.yaml")
    blocks = published_blocks(schedule.model)
    grid = schedule.bind(schedule.sampling.steps, blocks).grid()
    rows = [recipe for recipe, steps in SHIPPED[name] for _ in range(steps)]
    first = ["bf16" if name in BF16_IN_BLOCK_0 else recipe for recipe in rows]
    assert grid == [[block_0] + [recipe] * (sum(blocks.values()) - 1) for block_0, recipe in zip(first, rows, strict=True)]
    assert schedule.name == name


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
