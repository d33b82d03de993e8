"""The recipe of every layer, from the options of a training configuration."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from lowbit_attn.integrations.torchtitan.options import AttentionOptions, check_options, layer_recipes


@pytest.mark.parametrize(("rules", "expected"), [
    ("", ["mxfp8"] * 6),
    ("[{blocks: {first: 2}, recipe: bf16}, {blocks: {last: 1}, recipe: bf16}]", ["bf16"] * 2 + ["mxfp8"] * 3 + ["bf16"]),
    ('[{"blocks": [0, 2, 4], "recipe": "nvfp4_fp8"}]', ["nvfp4_fp8", "mxfp8"] * 3),
    ("- {blocks: {from: 1, to: 4}, recipe: bf16}\n- {blocks: 3, recipe: mxfp8}",
     ["mxfp8", "bf16", "bf16", "mxfp8", "bf16", "mxfp8"]),
    ("[{blocks: {first: 20%}, recipe: bf16}]", ["bf16"] * 2 + ["mxfp8"] * 4),
])
def test_rules_of_the_schedule_language_choose_layers(rules: str, expected: list[str]) -> None:
    assert layer_recipes(AttentionOptions(layers=rules), 6) == expected


def test_the_recipe_option_runs_where_no_rule_speaks() -> None:
    options = AttentionOptions("mxfp8:causal_safety=exact", layers="[{blocks: 0, recipe: bf16}]")
    assert layer_recipes(options, 2) == ["bf16", "mxfp8:causal_safety=exact"]


@pytest.mark.parametrize(("rules", "message"), [
    ("[{blocks: 6, recipe: bf16}]", r"lowbit_attn\.layers: .*blocks: got 6; accepted: 0 to 5, there are 6 blocks"),
    ("[{blocks: 0, recipe: bf61}]", r"lowbit_attn\.layers: .*recipe: got 'bf61'"),
    ("[{blocks: 0, recipe: fused_mxfp6}]", r"lowbit_attn\.layers: got 'fused_mxfp6', which is for inference only"),
    ("[{block: 0, recipe: bf16}]", r"lowbit_attn\.layers: .*unknown key 'block'.*did you mean 'blocks'"),
    ("[{blocks: 0, steps: 1, recipe: bf16}]", r"lowbit_attn\.layers: rules\[0\]\.steps: belongs to video models"),
    ("[{blocks: 0, kind: cross, recipe: bf16}]", r"lowbit_attn\.layers: rules\[0\]\.kind: belongs to video models"),
    ("[{blocks: 0, recipe: bf16}, {recipe: mxfp8}]", r"lowbit_attn\.layers: .*never applies"),
    ("{blocks: 0, recipe: bf16}", r"lowbit_attn\.layers: .*rules.*a list of rules"),
    ("[{blocks: 0", r"lowbit_attn\.layers: .*not valid YAML"),
])
def test_rules_that_do_not_fit_are_named(rules: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_recipes(AttentionOptions(layers=rules), 6)


@pytest.mark.parametrize(("options", "message"), [
    (AttentionOptions("fused_mxfp6"), r"lowbit_attn\.recipe: got 'fused_mxfp6', which is for inference only .*; accepted: bf16, m"),
    (AttentionOptions("mxfp8:causal=false"), r"lowbit_attn\.recipe: .* cannot run under a causal mask"),
    (AttentionOptions("bf16", backend="reference"), r"lowbit_attn\.backend: got 'reference' with recipe 'bf16'"),
    (AttentionOptions(probe_every=-1), r"lowbit_attn\.probe_every: got -1"),
])
def test_options_that_cannot_train_are_named(options: AttentionOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_options(options)


def test_the_page_on_training_has_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs" / "training-torchtitan.md").read_text()
    for option in fields(AttentionOptions):
        shown = "none" if option.default is None else f"`{json.dumps(option.default)}`"
        assert f"| `{option.name}` | {shown} |" in page
