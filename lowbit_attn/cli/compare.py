"""`lowbit-attn compare`: how close a generation is to a reference from the same seed."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lowbit_attn.cli import extras, media, plots
from lowbit_attn.cli.console import console, fail
from lowbit_attn.cli.measurements.fidelity import (
    FrameFidelity,
    LatentFidelity,
    PerFrame,
    compare_frames,
    compare_latents,
)

Fidelity = FrameFidelity | LatentFidelity


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=f"What is to be judged: {media.ACCEPTED}.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The reference, of the same kind and size.")],
    every: Annotated[int, typer.Option(min=1, help="Measure every so many frames (flicker: always all of them). The published "
                                                   "figures of Fused-Softmax Attention are of every fourth.")] = 1,
    reference_noise: Annotated[Path | None, typer.Option(metavar="C", help="Another run of the reference, on another "
                                                                           "attention backend: the noise floor.")] = None,
    lpips: Annotated[Path | None, typer.Option(metavar="WEIGHTS", help="Measure LPIPS too, with this state dict of "
                                                                       "lpips.LPIPS(net='alex'); never downloaded.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw the measures by frame.")] = None,
) -> None:
    """Compare latents, image folders or videos; ends with status 1 if A has black frames or values that are not finite."""
    try:
        names = {"A against B": a}
        if reference_noise is not None:
            names["C against B: the noise floor"] = reference_noise
        results = _measure(names, b, every, lpips)
        if plot is not None:
            _plot(results, plot)
    except (ValueError, OSError, extras.MissingExtraError) as error:
        fail(error)
    for letter, path in (("A", a), ("B", b), ("C", reference_noise)):
        if path is not None:
            console.print(f"{letter}: {path}", soft_wrap=True)
    for name, result in results.items():
        console.print(_table(name, result))
    if reference_noise is None:
        console.print("Two correct runs differ too, since trajectories diverge: --reference-noise C shows by how much.")
    if faults := next(iter(results.values())).faults:
        console.print(f"[bold red]{a}: {'; '.join(faults)}[/]", soft_wrap=True)
        raise typer.Exit(1)


def _measure(names: dict[str, Path], reference: Path, every: int, lpips: Path | None) -> dict[str, Fidelity]:
    kinds = {media.is_latents(path) for path in (*names.values(), reference)}
    if len(kinds) > 1:
        raise ValueError("A, B, C: got latents and pictures; accepted: one kind")
    if kinds == {True}:
        if lpips is not None:
            raise ValueError("--lpips: got latents; accepted: with pictures only")
        target = media.load_latents(reference)
        return {name: compare_latents(media.load_latents(path), target) for name, path in names.items()}
    extras.require("demo", ["torchmetrics"])
    distance: PerFrame | None = None
    if lpips is not None:
        from lowbit_attn.cli.measurements.lpips import Lpips

        distance = Lpips(lpips)
    frames = media.load_frames(reference)
    return {name: compare_frames(media.load_frames(path), frames, every, distance) for name, path in names.items()}


def _table(name: str, result: Fidelity) -> Table:
    table = Table(title=name, title_justify="left")
    if isinstance(result, LatentFidelity):
        for column in ("cosine similarity", "relative L2 distance", "not finite"):
            table.add_column(column, justify="right")
        table.add_row(f"{result.cosine:.6f}", f"{result.relative_l2:.4%}", str(result.not_finite))
        return table
    for column in ("measure", "mean", "worst", "worst frame"):
        table.add_column(column, justify="left" if column == "measure" else "right")
    table.add_row("PSNR (dB)", *_row(result.psnr, result.chosen, ".2f"))
    table.add_row("SSIM", *_row(result.ssim, result.chosen, ".4f"))
    table.add_row("flicker: PSNR of changes (dB)", *_row(result.flicker, range(1, len(result.flicker) + 1), ".2f"))
    if result.lpips:
        table.add_row("LPIPS", *_row(result.lpips, result.chosen, ".4f", less_is_better=True))
    table.add_row("frames not finite", str(len(result.not_finite)), "", "")
    table.add_row("frames black", str(len(result.black)), "", "")
    return table


def _row(values: Sequence[float], frames: Sequence[int], shown: str, less_is_better: bool = False) -> tuple[str, str, str]:
    """Mean, worst value and its frame. Equal frames have an infinite PSNR, and so has the mean with any of them."""
    if not values:
        return "", "", ""
    sign = 1 if less_is_better else -1
    worst = max(range(len(values)), key=lambda i: (math.isnan(values[i]), sign * values[i]))
    return format(sum(values) / len(values), shown), format(values[worst], shown), str(frames[worst])


def _plot(results: dict[str, Fidelity], path: Path) -> None:
    extras.require("demo", ["matplotlib"])
    frames = {name: result for name, result in results.items() if isinstance(result, FrameFidelity)}
    if not frames:
        raise ValueError("--plot: got latents; accepted: with pictures only")
    plots.save_series({
        "PSNR (dB)": {name: (result.chosen, result.psnr) for name, result in frames.items()},
        "SSIM": {name: (result.chosen, result.ssim) for name, result in frames.items()},
        "flicker (dB)": {name: (range(1, len(result.flicker) + 1), result.flicker) for name, result in frames.items()},
    }, path)
