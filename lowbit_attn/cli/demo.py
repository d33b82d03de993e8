"""`lowbit-attn demo`: train and generate on this machine, in bf16 and in low bits, and report how they compare."""

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lowbit_attn.cli import demo_report, demo_training, demo_video, extras
from lowbit_attn.cli.console import console, fail
from lowbit_attn.cli.demo_report import Results, Videos
from lowbit_attn.cli.demo_training import Training, TrainingSize
from lowbit_attn.cli.demo_video import Generation, VideoSize
from lowbit_attn.recipes import UNQUANTIZED, canonical_text
from lowbit_attn.schedules import PrecisionSchedule, load, shipped

DEFAULT_SCHEDULE = "wan2.2-t2v-a14b-hybrid"


_VIDEOS = ("video bf16", "video bf16 again", "video scheduled", "video unscheduled")


class Size(StrEnum):
    """How much the demo computes."""

    small = "small"
    tiny = "tiny"


class Target(StrEnum):
    """Where the demo computes."""

    auto = "auto"
    cpu = "cpu"


_TRAINING = {Size.small: TrainingSize("small", seq_len=512, batch_size=4, validation_steps=8),
             Size.tiny: TrainingSize("tiny", seq_len=128, batch_size=2, validation_steps=1)}
_VIDEO = {Size.small: VideoSize(blocks=4, heads=2, pixels=128, frames=17),
          Size.tiny: VideoSize(blocks=2, heads=1, pixels=32, frames=5)}


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report; it is made if need be.")] = Path("demo-report"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 150,
    video_steps: Annotated[int, typer.Option(min=1, help="Denoising steps of each video.")] = 20,
    recipe: Annotated[str, typer.Option(help="Recipe that trains beside bf16.")] = "mxfp8",
    schedule: Annotated[str, typer.Option(help="Schedule of the video: a YAML file, or the name of a shipped one.")]
    = DEFAULT_SCHEDULE,
    seed: Annotated[int, typer.Option(help="Of weights, data order and noise.")] = 0,
    device: Annotated[Target, typer.Option(help="auto takes the GPU if there is one.")] = Target.auto,
    size: Annotated[Size, typer.Option(help="tiny is for a quick look; its figures mean little.")] = Size.small,
) -> None:
    """Train a small Llama and generate a small video, in bf16 and in low bits, and write a report.

    Nothing is downloaded: the text is the Python standard library, the video model has random weights.
    """
    began = time.perf_counter()
    with console.status("loading TorchTitan and diffusers"):
        plan = _check(schedule, recipe)
    out.mkdir(parents=True, exist_ok=True)
    target = torch.device("cuda" if device is Target.auto and torch.cuda.is_available() else "cpu")
    with _progress() as progress:
        trainings = _Stages(progress, [f"train {name}" for name in (UNQUANTIZED, recipe)], steps)
        videos = _Stages(progress, _VIDEOS, video_steps)
        baseline, low_bit = _train_both(trainings, recipe, steps, _TRAINING[size], out, seed, target)
        generated = _generate_all(videos, plan, video_steps, _VIDEO[size], seed, target)
    results = Results(target, baseline, low_bit, generated, time.perf_counter() - began)
    report = demo_report.write(results, out)
    console.print(*demo_report.summary(results), sep="\n")
    console.print(f"Loss curves, frames and the grid of what ran: [bold]{report}[/] ({results.seconds:.0f} s)", soft_wrap=True)


def _check(schedule: str, recipe: str) -> PrecisionSchedule:
    """Whatever can go wrong by the user's choice does so here, before any work."""
    try:
        plan = load(shipped.find_schedule(schedule))
        extras.require("demo", [name for extra in ("torchtitan", "diffusers", "demo") for name in extras.EXTRAS[extra]])
        from lowbit_attn.integrations.torchtitan.options import AttentionOptions, check_options, training_recipes
        from lowbit_attn.integrations.torchtitan.versions import release_line

        if release_line() != "0.2":
            raise ImportError(f"torchtitan: found {release_line()}.x; the demo accepts: 0.2.x from 0.2.2")
        if canonical_text(recipe) == UNQUANTIZED:
            accepted = [name for name in training_recipes() if name != UNQUANTIZED]
            raise ValueError(f"--recipe: got {recipe!r}, which trains anyway, as the baseline; accepted: {', '.join(accepted)}")
        check_options(AttentionOptions(recipe=recipe))
    except (ImportError, ValueError) as error:
        fail(error)
    return plan


class _Stages:
    """Progress bars, one for each stage, all of them visible from the start."""

    def __init__(self, progress: Progress, names: Iterable[str], total: int) -> None:
        self._progress = progress
        self._tasks = {name: progress.add_task(name, total=total, note="", start=False) for name in names}

    def begin(self, name: str) -> Callable[[str], None]:
        """Start the clock of a stage; calling the result counts one step and shows a note."""
        task = self._tasks[name]
        self._progress.start_task(task)
        if not console.is_terminal:  # bars are drawn once, at the end, where nobody sees them move
            console.print(f"{name} ...")

        def step(note: str) -> None:
            self._progress.update(task, advance=1, note=note)

        return step


def _progress() -> Progress:
    return Progress(TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console)


def _train_both(stages: _Stages, recipe: str, steps: int, size: TrainingSize, out: Path, seed: int,
                device: torch.device) -> list[Training]:
    runs = []
    for name in (UNQUANTIZED, recipe):
        on_step = stages.begin(f"train {name}")
        runs.append(demo_training.train(name, steps, size, out, seed=seed, device=device, on_step=on_step))
    return runs


def _generate_all(stages: _Stages, schedule: PrecisionSchedule, steps: int, size: VideoSize, seed: int,
                  device: torch.device) -> Videos:
    """In bf16, in bf16 on torch's other attention code, under the schedule, and in the schedule's default throughout."""
    with _quiet():
        pipe = demo_video.build_pipeline(size, seed, device)

        def generate(stage: str, name: str, schedule: PrecisionSchedule | str | None = None) -> Generation:
            on_step = stages.begin(stage)
            return demo_video.generate(pipe, name, size, steps, seed=seed, schedule=schedule, on_step=on_step)

        baseline = generate(_VIDEOS[0], UNQUANTIZED)
        with demo_video.other_backend():
            floor = generate(_VIDEOS[1], "bf16 again")
        scheduled = generate(_VIDEOS[2], schedule.name, schedule)
        uniform = schedule.attention.default
        return Videos(baseline, floor, scheduled, generate(_VIDEOS[3], f"{uniform} throughout", uniform))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' notices about packages and settings that the demo has no use for."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
