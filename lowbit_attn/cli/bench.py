"""`lowbit-attn bench`: speed and error beside other implementations, on this machine."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import torch
import typer
from rich.console import Console

from lowbit_attn.cli import extras
from lowbit_attn.cli.benchmarks.workloads import PRESETS, Layout, Preset, Workload
from lowbit_attn.cli.console import console, fail

if TYPE_CHECKING:
    from lowbit_attn.cli.benchmarks.contenders import Contender, Trainer
    from lowbit_attn.cli.benchmarks.record import Row

Entrant = TypeVar("Entrant", "Contender", "Trainer")

app = typer.Typer(help="Measure speed and error beside other implementations.", no_args_is_help=True)

Presets = Annotated[list[Preset] | None, typer.Option(
    "--preset", help="Workloads; may be given several times. By default `paper` on a GPU, `small` on a CPU.")]
Recipes = Annotated[str, typer.Option(help="Recipes, separated by commas; options may follow as in 'mxfp8:max_threshold=2'.")]
Rounds = Annotated[int, typer.Option(min=1, help="Every contender is timed once a round, in turn; the median counts.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; by default the GPU if there is one.")]
InputLayout = Annotated[Layout, typer.Option("--layout", help="How batched inputs lie in memory.")]
Named = Annotated[list[str] | None, typer.Option(
    "--workload", help="Only workloads of this name, or whose name contains it; may be given several times.")]
Skipped = Annotated[list[str] | None, typer.Option(
    "--skip", help="Leave out contenders of this name, or whose name contains it; may be given several times.")]
Output = Annotated[Path, typer.Option(help="Folder for the JSON, the CSV and the plot.")]


@app.callback()
def bench() -> None:
    """Measure speed and error beside other implementations."""


@app.command()
def forward(
    preset: Presets = None,
    recipes: Recipes = "mxfp8,mxfp8_fast",
    rounds: Rounds = 3,
    device: DeviceName = None,
    layout: InputLayout = Layout.BSHD,
    workload: Named = None,
    skip: Skipped = None,
    output: Output = Path("outputs/bench"),
) -> None:
    """Attention forward: kernel alone and with quantization, against torch SDPA, flash-attn-4, cuDNN FP8 and SageAttention.

    What cannot run here is named with the reason. Errors are relative to exact attention in float32.
    """
    from lowbit_attn.cli.benchmarks import candidates, forward

    target = _device(device)
    workloads, taking_part = _workloads(preset, target, workload), _kept(forward.contenders(_recipes(recipes), target), skip)
    _run("forward", candidates.each(workloads, target, _announce, lambda one: forward.measure(
        one, taking_part, target, rounds, layout)), target, output)


@app.command()
def train(
    preset: Presets = None,
    recipes: Recipes = "mxfp8",
    rounds: Rounds = 3,
    device: DeviceName = None,
    layout: InputLayout = Layout.BSHD,
    workload: Named = None,
    skip: Skipped = None,
    output: Output = Path("outputs/bench"),
) -> None:
    """Forward and backward with all quantization, and the backward alone, against torch SDPA, flash-attn-4 and cuDNN FP8.

    What cannot run here is named with the reason. Where a recipe has faster kernels, the portable ones that train it are timed
    beside them, as "RECIPE (triton)". Errors of dQ, dK and dV are relative to exact attention in float32. Saved bytes are what
    the forward keeps for the backward, also as a ratio to bf16 flash attention's.
    """
    from lowbit_attn.cli.benchmarks import candidates, training

    target = _device(device)
    workloads, taking_part = _workloads(preset, target, workload), _kept(training.trainers(_recipes(recipes), target), skip)
    _run("train", candidates.each(workloads, target, _announce, lambda one: training.measure(
        one, taking_part, target, rounds, layout)), target, output)


@app.command()
def quantize(
    preset: Presets = None,
    recipes: Recipes = "mxfp8,mxfp8_fast",
    rounds: Rounds = 3,
    device: DeviceName = None,
    workload: Named = None,
    output: Output = Path("outputs/bench"),
) -> None:
    """Quantization of Q, K and V: bytes read and written per second, against a plain copy on the same device."""
    from lowbit_attn.cli.benchmarks import candidates, quantizers

    target = _device(device)
    workloads, names = quantizers.distinct(_workloads(preset, target, workload)), _recipes(recipes)
    if not workloads:
        fail(f"--workload: got {', '.join(workload or ())}, whose operands differ from others in values only, which a quantizer "
             "does not see; accepted: a workload without a mean of V")
    _run("quantize", candidates.each(workloads, target, _announce, lambda one: quantizers.measure(
        one, names, target, rounds)), target, output)


@app.command()
def plot(file: Annotated[Path, typer.Argument(metavar="JSON", help="What `forward`, `train` or `quantize` wrote.")]) -> None:
    """Draw a finished measurement again, beside its JSON file; for measurements from machines without matplotlib."""
    from lowbit_attn.cli.benchmarks import render
    from lowbit_attn.cli.benchmarks.record import Record

    try:
        extras.require("demo", ["matplotlib"])
        record = Record.read(file)
        render.plot(record, file.with_suffix(".png"))
    except (OSError, ValueError, KeyError, IndexError, TypeError, extras.MissingExtraError) as error:
        fail(f"JSON: got {str(file)!r}: {error or type(error).__name__}")
    console.print(f"wrote {file.with_suffix('.png')}", soft_wrap=True)


def _run(name: str, measured: Iterable[list["Row"]], device: torch.device, output: Path) -> None:
    """Print and write each workload as it is done, so that what an interrupted run measured is kept."""
    from lowbit_attn.cli.benchmarks import render
    from lowbit_attn.cli.benchmarks.record import Environment, Record

    record, paths, said = Record(Environment.current(device), []), [], []
    wide = console if console.is_terminal else Console(width=max(200, console.width))  # a log keeps every cell
    console.print(f"{record.environment.device}: {record.environment.command}", soft_wrap=True, highlight=False)
    for rows in measured:
        record = Record(record.environment, [*record.rows, *rows])
        paths = record.write(output / name)
        wide.print(render.table(record, rows))
        for line in [line for line in render.notes(rows) if line not in said]:
            said.append(line)
            console.print(line, soft_wrap=True)
    try:
        extras.require("demo", ["matplotlib"])
    except extras.MissingExtraError as error:
        console.print(f"no plot: {error}; `lowbit-attn bench plot {paths[0]}` draws it later", style="yellow", soft_wrap=True)
    else:
        try:
            render.plot(record, output / f"{name}.png")
            paths.append(output / f"{name}.png")
        except ValueError as error:
            console.print(f"no plot: {error}", style="yellow")
    console.print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True)


def _announce(workload: Workload) -> None:
    console.print(f"measuring {workload}", style="dim", soft_wrap=True)


def _device(name: str | None) -> torch.device:
    if name is None and not torch.cuda.is_available():
        console.print("no GPU here (torch finds no CUDA or ROCm device): measuring the reference on the CPU", style="yellow")
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        fail(f"--device: got {name!r}; accepted: a device that torch can use here ({str(error).splitlines()[0]})")
    return device


def _workloads(presets: Sequence[Preset] | None, device: torch.device, parts: Sequence[str] | None) -> list[Workload]:
    """The workloads of the presets, or those whose name contains one of `parts`; those made for a GPU would take a CPU hours."""
    chosen = presets or [Preset.SMALL if device.type == "cpu" else Preset.PAPER]
    large = [preset for preset in chosen if preset is not Preset.SMALL]
    if device.type == "cpu" and large:
        fail(f"--preset: got {', '.join(large)} on device cpu, which needs a GPU; accepted: {Preset.SMALL}")
    found = [workload for preset in dict.fromkeys(chosen) for workload in PRESETS[preset]]
    names = _named("--workload", [workload.name for workload in found], parts)
    return [workload for workload in found if not parts or workload.name in names]


def _named(option: str, names: Sequence[str], parts: Sequence[str] | None) -> list[str]:
    """The names that the option's values mean: a name itself, or every name that contains the value."""
    known, meant = list(dict.fromkeys(names)), list[str]()
    for part in parts or ():
        matches = [part] if part in known else [name for name in known if part.strip() and part in name]
        if not matches:
            fail(f"{option}: got {part!r}; accepted: one of {', '.join(known)}, or a part of one")
        meant += matches
    return meant


def _kept(found: "list[Entrant]", parts: Sequence[str] | None) -> "list[Entrant]":
    """What no part of a name leaves out; what is left out is said."""
    left = _named("--skip", [x.name for x in found], parts)
    kept = [x for x in found if x.name not in left]
    if not kept:
        fail(f"--skip: got {', '.join(parts or ())}, which leaves nothing to measure; accepted: parts of some names")
    if left:
        console.print(f"left out: {', '.join(dict.fromkeys(left))}", soft_wrap=True)
    return kept


def _recipes(text: str) -> list[str]:
    """Split at commas; a part like `option=value` belongs to the recipe before it."""
    from lowbit_attn.recipes import UNQUANTIZED, resolve

    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    try:
        for name in names:
            if name != UNQUANTIZED:
                resolve(name)
    except ValueError as error:
        fail(f"--recipes: {error}")
    if not names:
        fail(f"--recipes: got {text!r}; accepted: at least one recipe")
    return names
