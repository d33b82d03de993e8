"""`lowbit-attn doctor`: what this machine can run, recipe by recipe, and why not faster."""

import platform
import warnings
from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich.table import Table
from rich.text import Text

from lowbit_attn import RECIPES, attention, explain, recipe_names
from lowbit_attn.cli.console import console, fail
from lowbit_attn.cli.extras import EXTRAS, installed_version, pip_command
from lowbit_attn.ops import Explanation
from lowbit_attn.recipes import UNQUANTIZED

_CORE = ("torch", "triton", "numpy")


def doctor(
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default the GPU if there is one.")] = None,
) -> None:
    """Say what this machine can run, per recipe, and why not faster."""
    target = _device(device)
    found = [explain(name, target) for name in recipe_names()]
    console.print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, "
                  f"device [bold]{_describe(target)}[/]\n")
    console.print(_recipes(found, target))
    for line in (*_meanings(found), *_reasons(found)):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(_versions())


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        fail(f"--device: got {name!r}; accepted: a device that torch can use here ({str(error).splitlines()[0]})")
    return device


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device} ({torch.get_num_threads()} threads)"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)} ({explain(UNQUANTIZED, device).device.architecture}, {memory:.0f} GiB)"


def _recipes(found: Sequence[Explanation], device: torch.device) -> Table:
    table = Table(title="Recipes", title_justify="left")
    for column in ("recipe", "backend", "computes in", "trains", "causal", "tried here"):
        table.add_column(column)
    for explanation in found:
        problem = _try(explanation, device)
        tried = Text("runs", style="green") if problem is None else Text(problem, style="red")
        recipe = RECIPES.get(explanation.recipe)
        trains, causal = (True, True) if recipe is None else (recipe.trains, recipe.causal)
        table.add_row(explanation.recipe, explanation.backend, explanation.precision.partition(":")[0],
                      "yes" if trains else "no", "yes" if causal else "no", tried)
    return table


def _meanings(found: Sequence[Explanation]) -> list[str]:
    """What a precision that the table shortens stands for, once each."""
    return list(dict.fromkeys(f"[bold]{short}[/]:{rest}" for short, colon, rest in
                              (explanation.precision.partition(":") for explanation in found) if colon))


def _try(explanation: Explanation, device: torch.device) -> str | None:
    """Run the recipe once, small; what went wrong, if anything did."""
    query, key, value = torch.randn(3, 1, 2, 32, 64, device=device, dtype=torch.bfloat16).unbind()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = attention(query, key, value, recipe=explanation.recipe)
    except Exception as error:  # whatever it is, this report is the place for it
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    assert isinstance(output, torch.Tensor)
    return None if bool(output.isfinite().all()) else "gave values that are not finite"


def _reasons(found: Sequence[Explanation]) -> list[str]:
    """Why faster backends were passed over: one line for each reason, with the recipes that share it."""
    recipes: dict[tuple[str, str], list[str]] = {}
    for explanation in found:
        for backend, reason in explanation.passed_over:
            general = reason.replace(f"for {explanation.recipe} ", "for this recipe ")
            recipes.setdefault((backend, general), []).append(explanation.recipe)
    low_bit = sum(explanation.recipe != UNQUANTIZED for explanation in found)
    return [f"[yellow]not {backend}[/]: {reason} [dim]({'all recipes' if len(names) == low_bit else ', '.join(names)})[/]"
            for (backend, reason), names in recipes.items()]


def _versions() -> Table:
    table = Table(title="Packages", title_justify="left")
    for column in ("package", "version", "extra", "to install"):
        table.add_column(column, no_wrap=column == "to install")
    needed = [(name, "") for name in _CORE] + [(name, extra) for extra, names in EXTRAS.items() for name in names]
    for package, extra in needed:
        version = installed_version(package)
        command = "" if version else Text(pip_command(extra) if extra else f"pip install {package}", style="yellow")
        table.add_row(package, version or Text("missing", style="yellow"), extra, command)
    return table
