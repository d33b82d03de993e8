"""`lowbit-attn schedule`: look at a precision schedule without a model."""

from pathlib import Path
from typing import Annotated

import typer

from lowbit_attn.cli import extras, plots
from lowbit_attn.cli.console import console, fail
from lowbit_attn.schedules import shipped

app = typer.Typer(help="Look at precision schedules.", no_args_is_help=True)


@app.callback()
def schedule() -> None:
    """Look at precision schedules."""


@app.command()
def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML schedule, or the name of a shipped one.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; by default the schedule's own, or 20.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Transformer blocks of a model with one stream; by default the "
                                                           "family's largest published model's (a smaller one may have "
                                                           "fewer, Wan2.1-1.3B has 30), or 40.")] = None,
    dual: Annotated[int, typer.Option(min=0, help="Dual-stream blocks, with --single, in place of --blocks.")] = 0,
    single: Annotated[int, typer.Option(min=0, help="Single-stream blocks, with --dual, in place of --blocks.")] = 0,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the grid into a PNG as well.")] = None,
) -> None:
    """Print which recipe runs at which step and block."""
    from lowbit_attn.schedules import FAMILIES, ScheduleError, load, published_blocks, render_schedule

    path = shipped.find_schedule(file)
    if not path.is_file():
        fail(f"FILE: got {file!r}, which is no file; accepted: a YAML file, or one of {', '.join(shipped.schedule_names())}")
    if bool(dual) != bool(single):
        fail(f"--dual, --single: got {dual} and {single}; accepted: both or neither")
    try:
        loaded = load(path)
        published = published_blocks(loaded.model) if loaded.model in FAMILIES else 40
        extent = {"dual": dual, "single": single} if dual else blocks or published
        bound = loaded.bind(steps or loaded.sampling.steps or 20, extent)
        if png is not None:
            extras.require("demo", ["matplotlib"])
    except (ScheduleError, extras.MissingExtraError) as error:
        fail(error)
    console.print(render_schedule(bound))
    if png is not None:
        plots.save_grids({expert: bound.grid(expert) for expert in bound.recipes}, png)
        console.print(f"written: {png}", soft_wrap=True)
