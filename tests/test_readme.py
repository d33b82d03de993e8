"""The documents name only what exists: files, commands, options, recipes; and their code runs."""

import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import lowbit_attn
from lowbit_attn.cli.main import app
from lowbit_attn.ops.dispatch import Device, explain

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_python_blocks_run_on_their_own():
    python = blocks("python")
    assert python
    for source in python:
        code = compile(source, "README.md", "exec")
        if "pipe" not in code.co_names:
            exec(code, {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document):
    text = document.read_text()
    named = set(re.findall(r"\b(?:configs|docs|lowbit_attn|tests)/[\w./-]*\w\.(?:yaml|toml|md|py)\b", text))
    assert named or document.name != "README.md"
    for name in named:
        assert (ROOT / name).is_file(), name


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_commands_and_their_options_exist():
    # A command may be broken over two lines inside backticks.
    commands = [text for text in re.findall(r"`lowbit-attn ([^`]+)`", README) if text != "--help"]
    assert commands
    for text in commands:
        words, command = text.split(), get_command(app)
        while words and hasattr(command, "commands") and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert not hasattr(command, "commands"), f"unknown command in {text!r}"
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_toml_is_what_the_adapter_documents():
    [section] = [tomllib.loads(block) for block in blocks("toml")]
    shipped = tomllib.loads((ROOT / "configs" / "torchtitan-llama3-debug-mxfp8.toml").read_text())
    assert section["job"]["custom_config_module"] == shipped["job"]["custom_config_module"]
    assert shipped["experimental"]["custom_import"].startswith(section["experimental"]["custom_import"])
    assert section["model"]["converters"] == shipped["model"]["converters"]
    assert section["lowbit_attn"]["recipe"] in lowbit_attn.recipe_names()


def test_recipe_table_is_complete_and_true():
    rows = {name: cells for name, *cells in re.findall(r"^\| `(\w+)` \|.*\| (yes|no)[^|]* \| (yes|no)[^|]* \| [^|]+ \|$", README,
                                                       flags=re.MULTILINE)}
    assert set(rows) == set(lowbit_attn.RECIPES)
    for name, (causal, trains) in rows.items():
        recipe = lowbit_attn.RECIPES[name]
        assert (causal == "yes", trains == "yes") == (recipe.causal, recipe.trains), name


def test_shipped_configurations_are_reachable_inside_the_package():
    inside = ROOT / "lowbit_attn" / "configs"
    assert {path.name for path in inside.iterdir()} == {path.name for path in (ROOT / "configs").iterdir()}


COLUMNS = {"Hopper": ["sm_90"], "Blackwell": ["sm_100", "sm_103"], "CDNA4": ["gfx950"],
           "sm_80": ["sm_80", "sm_86", "sm_89", "sm_120", "gfx942"]}
BACKENDS = {"kernel": "hopper", "Triton": "triton", "HIP": "cdna4", "reference": "reference"}


def hardware():
    """(recipe, architecture, cell) of the hardware table."""
    lines = README.partition("## Hardware")[2].partition("\n## ")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    for recipes, *cells in table[2:]:
        for title, cell in zip(table[0][1:-1], cells[:-1], strict=True):
            for architecture in next(names for start, names in COLUMNS.items() if title.startswith(start)):
                for recipe in re.findall(r"`(\w+)`", recipes):
                    yield recipe, architecture, cell


def test_the_hardware_table_says_what_dispatch_does():
    seen = set()
    for recipe, architecture, cell in hardware():
        found = explain(lowbit_attn.RECIPES[recipe], Device("cuda", architecture))
        assert found.backend == BACKENDS[cell.split(",")[0].split()[0]], (recipe, architecture)
        if cell.startswith("Triton"):
            assert found.precision.startswith("native") == ("native" in cell), (recipe, architecture)
        seen.add(recipe)
    assert seen == set(lowbit_attn.RECIPES)
