"""The demo's report: Markdown with pictures, and the same figures as a table for the terminal."""

import io
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from torch import Tensor

from lowbit_attn import explain
from lowbit_attn.cli.demo_training import TAIL, Training
from lowbit_attn.cli.demo_video import Generation, fidelity
from lowbit_attn.cli.plots import BACKGROUND, save_grids


@dataclass(frozen=True)
class Videos:
    """The baseline, the same again on other code, under the schedule, and in the schedule's default recipe throughout."""

    baseline: Generation
    floor: Generation
    scheduled: Generation
    uniform: Generation


@dataclass(frozen=True)
class Results:
    """All that the demo measured."""

    device: torch.device
    baseline: Training
    low_bit: Training
    videos: Videos
    seconds: float

    @property
    def loss_difference(self) -> float:
        """Of the final training losses, relative to the baseline's."""
        return self.low_bit.final_loss / self.baseline.final_loss - 1.0


def write(results: Results, out: Path) -> Path:
    """Write `report.md` and its pictures; returns the report's path."""
    _plot_losses(results, out / "loss.png")
    ran = results.videos.scheduled.ran
    assert ran is not None
    save_grids({expert: ran.grid(expert) for expert in ran.experts}, out / "grid.png")
    _contact_sheet(results.videos.baseline, out / "frames-bf16.png")
    _contact_sheet(results.videos.scheduled, out / "frames-scheduled.png")
    path = out / "report.md"
    path.write_text(_markdown(results), encoding="utf-8")
    return path


def training_rows(results: Results) -> list[tuple[str, ...]]:
    """Header and one row per run; no speed beside bf16's for the reference, which says nothing about one."""
    emulated = explain(results.low_bit.recipe, results.device).backend == "reference"
    rows: list[tuple[str, ...]] = [("recipe", "final loss", "held-out loss", "tokens/s")]
    for run in (results.baseline, results.low_bit):
        held_out = "–" if run.validation_loss is None else f"{run.validation_loss:.4f}"
        speed = "– (reference)" if emulated and run is results.low_bit else f"{run.tokens_per_second:,.0f}"
        rows.append((run.recipe, f"{run.final_loss:.4f}", held_out, speed))
    return rows


def video_rows(results: Results) -> list[tuple[str, ...]]:
    """Header and one row per comparison."""
    videos = results.videos
    rows: list[tuple[str, ...]] = [("against bf16", "PSNR", "SSIM", "latents differ by", "seconds")]
    for video, note in ((videos.floor, " (noise floor)"), (videos.scheduled, ""), (videos.uniform, "")):
        distance = fidelity(video, videos.baseline)
        rows.append((video.name + note, f"{distance.psnr:.1f} dB", f"{distance.ssim:.4f}", f"{distance.latent_error:.2%}",
                     f"{video.seconds:.1f}"))
    return rows


def summary(results: Results) -> list[RenderableType]:
    """For the terminal."""
    return [_table("Training", training_rows(results)),
            f"final training loss: {results.low_bit.recipe} {results.loss_difference:+.2%} against bf16",
            _table("Video", video_rows(results))]


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _markdown_table(rows: Sequence[tuple[str, ...]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def _markdown(results: Results) -> str:
    training, video = results.low_bit, results.videos.scheduled
    explanation = explain(training.recipe, results.device)
    frames, _, height, width = video.frames.shape
    assert video.ran is not None
    return f"""# lowbit_attn: demonstration

Device: {_device_name(results.device)}, torch {torch.__version__}, {results.seconds:.0f} s in all. Backend of \
`{training.recipe}`: `{explanation.backend}` ({explanation.precision}).{_speed_note(explanation.backend)}

## Training

A byte-level Llama (head_dim 64) in TorchTitan's trainer, {len(training.records)} steps of {training.size.batch_size} × \
{training.size.seq_len} tokens: packed documents, one per source file of the Python standard library. Weights, data and \
order are the same in both runs; only the recipe of attention differs.

{_markdown_table(training_rows(results))}

Final loss: mean of the last {min(TAIL, len(training.records))} steps. `{training.recipe}` against bf16: \
**{results.loss_difference:+.2%}**. Tokens/s: median step.

![training losses](loss.png)

## Video

A two-expert Wan2.2 with **untrained, random weights**, {frames} frames of {width} × {height}, {video.ran.steps} steps: \
the frames show how closely each precision follows bf16, not what a trained model draws. (Self-attention's gate and scores are \
raised to a trained model's scale, since a fresh initialization would hide any error in it.) The noise floor is the same bf16 \
model on torch's other attention code: two exact computations that differ in rounding alone.

{_markdown_table(video_rows(results))}

PSNR and SSIM over all frames, for pixel values in 0..1; latents by relative Frobenius norm.

bf16

![frames, bf16](frames-bf16.png)

{video.name}

![frames, {video.name}](frames-scheduled.png)

### What ran

The recipes that self-attention really ran in under `{video.name}`, as its processors reported them. The \
high-noise expert denoises first, the low-noise expert the rest.

![step × block grid](grid.png)

```
{_plain(video.ran)}
```
"""


def _speed_note(backend: str) -> str:
    return " That is the specification of the numbers, not a fast kernel: times here say nothing about speed." \
        if backend == "reference" else ""


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def _plain(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().strip().splitlines())


def _plot_losses(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.4), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for run, style in ((results.baseline, "-"), (results.low_bit, "--")):
        axes.plot([record.step for record in run.records], [record.loss for record in run.records], style, linewidth=1.4,
                  label=f"{run.recipe}: {run.final_loss:.4f}")
    axes.set(ylabel="training loss (nats per byte)", title="Same seed, same documents; only attention differs")
    axes.legend(title=f"mean of the last {min(TAIL, len(results.baseline.records))}")
    pairs = list(zip(results.low_bit.records, results.baseline.records, strict=True))
    below.plot([low.step for low, _ in pairs], [low.loss - full.loss for low, full in pairs], color="#555555", linewidth=1.0)
    below.set(xlabel="step", ylabel=f"{results.low_bit.recipe} − bf16")
    for panel in (axes, below):
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=130, facecolor=BACKGROUND)


def _contact_sheet(video: Generation, path: Path, columns: int = 6) -> None:
    """Up to two rows of frames, evenly spaced in time, as pixels are."""
    from matplotlib.image import imsave

    count = len(video.frames)
    chosen = sorted({round(i * (count - 1) / max(1, 2 * columns - 1)) for i in range(2 * columns)})
    frames = [_padded(video.frames[i]) for i in chosen]
    frames += [torch.ones_like(frames[0])] * (-len(frames) % columns)
    rows = [torch.cat(frames[i:i + columns], dim=2) for i in range(0, len(frames), columns)]
    imsave(path, torch.cat(rows, dim=1).clamp(0, 1).permute(1, 2, 0).numpy())


def _padded(frame: Tensor) -> Tensor:
    return torch.nn.functional.pad(frame, (2, 2, 2, 2), value=1.0)
