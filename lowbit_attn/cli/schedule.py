"""`lowbit-attn schedule`: look at a precision schedule without a model."""

from typing import Annotated

import typer

from lowbit_attn.cli import shipped
from lowbit_attn.cli.console import console, fail

app = typer.Typer(help="Look at precision schedules.", no_args_is_help=True)


@app.callback()
def schedule() -> None:
    """Look at precision schedules."""


@app.command()
def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML schedule, or the name of a shipped one.")],
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 20,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks (of a model with one stream).")] = 40,
    dual: Annotated[int, typer.Option(min=0, help="Dual-stream blocks, with --single, in place of --blocks.")] = 0,
    single: Annotated[int, typer.Option(min=0, help="Single-stream blocks, with --dual, in place of --blocks.")] = 0,
) -> None:
    """Print which recipe runs at which step and block."""
    from lowbit_attn.schedules import ScheduleError, load, render_schedule

    path = shipped.find_schedule(file)
    if not path.is_file():
        fail(f"FILE: got {file!r}, which is no file; accepted: a YAML file, or one of {', '.join(shipped.schedule_names())}")
    if bool(dual) != bool(single):
        fail(f"--dual, --single: got {dual} and {single}; accepted: both or neither")
    try:
        bound = load(path).bind(steps, {"dual": dual, "single": single} if dual else blocks)
    except ScheduleError as error:
        fail(error)
    console.print(render_schedule(bound))
