"""`lowbit-attn generate`: a video from a local or hub checkpoint, under a precision schedule."""

import inspect
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from lowbit_attn.cli import extras, media
from lowbit_attn.cli.console import console, fail
from lowbit_attn.schedules import shipped

if TYPE_CHECKING:
    from lowbit_attn.schedules import PrecisionSchedule

DEFAULT_FPS = 16.0
SHIFT_KEYS = ("flow_shift", "shift")
"""What schedulers call the flow shift."""


class GenerateError(ValueError):
    """Something the user can put right."""


class Offload(StrEnum):
    """Where the models wait for their turn."""

    none = "none"
    model = "model"
    sequential = "sequential"


class DType(StrEnum):
    """Number format of the models; autoencoders stay in float32."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def generate(
    model: Annotated[str, typer.Option(metavar="PATH_OR_ID", help="A diffusers checkpoint: a folder, or an id on the hub.")],
    prompt: Annotated[str, typer.Option(help="What the video shows.")],
    schedule: Annotated[str, typer.Option(metavar="FILE", help="A YAML schedule, the name of a shipped one, or a recipe.")],
    out: Annotated[Path, typer.Option(help="A video file, or a folder for PNG files (no suffix).")] = Path("video.mp4"),
    negative_prompt: Annotated[str | None, typer.Option(help="What it does not show; by default the pipeline's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the initial noise.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="In place of the schedule's sampling.steps.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="In place of sampling.guidance_scale.")] = None,
    guidance_scale_2: Annotated[float | None, typer.Option(help="In place of sampling.guidance_scale_2.")] = None,
    flow_shift: Annotated[float | None, typer.Option(help="In place of sampling.flow_shift.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="In place of sampling.frames.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="In place of sampling.width.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="In place of sampling.height.")] = None,
    fps: Annotated[float | None, typer.Option(min=1, help="Frames per second of the file; in place of sampling.fps, else 16.")]
    = None,
    dtype: Annotated[DType, typer.Option(help="Number format of the models.")] = DType.bfloat16,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else the CPU.")] = None,
    offload: Annotated[Offload, typer.Option(help="Keep models in main memory until their turn: whole, or layer by layer.")]
    = Offload.none,
    tiling: Annotated[bool, typer.Option("--tiling", help="Decode in tiles: less memory, and time.")] = False,
    compile_blocks: Annotated[bool, typer.Option("--compile", help="torch.compile the repeated blocks.")] = False,
    latents: Annotated[Path | None, typer.Option(metavar="FILE", help="Also save the final latents (.safetensors).")] = None,
) -> None:
    """Generate a video and report what ran. The schedule's `sampling` settings are set, and printed; options override them."""
    from lowbit_attn.schedules import load

    try:
        extras.require("diffusers")
        if out.suffix:
            extras.require("video", ["av"])
        plan = load(shipped.find_schedule(schedule) if shipped.find_schedule(schedule).is_file() else schedule)
        settings = {"steps": steps, "guidance_scale": guidance_scale, "guidance_scale_2": guidance_scale_2,
                    "flow_shift": flow_shift, "frames": frames, "width": width, "height": height, "fps": fps}
        sampling = plan.sampling.model_copy(update={name: value for name, value in settings.items() if value is not None})
        plan = plan.model_copy(update={"sampling": sampling})
        pipe = load_pipeline(model, getattr(torch, dtype.value))
        set_scheduler(pipe, plan)
        call = call_arguments(pipe, plan, prompt, negative_prompt, seed)
        _place(pipe, device or ("cuda" if torch.cuda.is_available() else "cpu"), offload)
        if tiling:
            _tile(pipe)
        _patch(pipe, plan, compile_blocks)
    except (extras.MissingExtraError, TypeError, ValueError) as error:
        fail(error)
    _print_sampling(pipe, call)
    try:
        _run(pipe, call, out, plan.sampling.fps or DEFAULT_FPS, latents)
    except ValueError as error:  # a setting that the pipeline refuses, or a rule for a step that this run does not have
        fail(error)


def load_pipeline(model: str, dtype: torch.dtype) -> Any:
    """A `DiffusionPipeline` from a folder or the hub; GenerateError says what is missing."""
    from diffusers import DiffusionPipeline

    folder = Path(model).expanduser()
    looks_local = folder.exists() or model.startswith((".", "/", "~"))
    if looks_local and not (folder / "model_index.json").is_file():
        problem = "has no model_index.json" if folder.is_dir() else "is no folder"
        if (folder / "modular_model_index.json").is_file():
            problem = "is a modular pipeline: load and patch it in Python"
        raise GenerateError(f"--model: got {model!r}, which {problem}; accepted: a diffusers checkpoint folder, or an id on the "
                            "hub")
    try:
        return DiffusionPipeline.from_pretrained(str(folder) if looks_local else model,
                                                 dtype={"default": dtype, "vae": torch.float32})
    except (OSError, ConnectionError, ValueError) as error:
        if looks_local:
            raise GenerateError(f"--model: {model}: {error}") from error
        raise GenerateError(f"--model: {model!r} is no folder here, and could not be fetched from the hub: {_first_line(error)}. "
                            "Without a network, download the checkpoint elsewhere (hf download) and give its folder") from error


def set_scheduler(pipe: Any, schedule: "PrecisionSchedule") -> None:
    """Give the pipeline the scheduler and flow shift of `sampling`; GenerateError for what does not exist."""
    import diffusers

    wanted = schedule.sampling
    if wanted.scheduler is None and wanted.flow_shift is None:
        return
    name = wanted.scheduler or type(pipe.scheduler).__name__
    kind: Any = getattr(diffusers, name, None)
    if not all(hasattr(kind, method) for method in ("set_timesteps", "step", "from_config")):
        raise GenerateError(f"sampling.scheduler: got {name!r}; accepted: the name of a diffusers scheduler class")
    parameters = inspect.signature(kind.__init__).parameters
    changes: dict[str, Any] = {}
    if wanted.flow_shift is not None:
        key = next((key for key in SHIFT_KEYS if key in parameters), None)
        if key is None:
            raise GenerateError(f"sampling.flow_shift: got {wanted.flow_shift} for {name}, which has none; accepted: leave it out")
        changes[key] = wanted.flow_shift
    if "use_flow_sigmas" in parameters:
        changes |= {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    pipe.scheduler = kind.from_config(pipe.scheduler.config, **changes)


def call_arguments(pipe: Any, schedule: "PrecisionSchedule", prompt: str, negative_prompt: str | None, seed: int) -> dict[str, Any]:
    """What the pipeline is called with; GenerateError for a setting that it does not have."""
    sampling = schedule.sampling
    wanted = {"num_inference_steps": sampling.steps, "guidance_scale": sampling.guidance_scale, "num_frames": sampling.frames,
              "guidance_scale_2": sampling.guidance_scale_2, "width": sampling.width, "height": sampling.height,
              "negative_prompt": negative_prompt}
    given = {name: value for name, value in wanted.items() if value is not None}
    accepted = inspect.signature(type(pipe).__call__).parameters
    if unknown := [name for name in given if name not in accepted]:
        raise GenerateError(f"{', '.join(unknown)}: a {type(pipe).__name__} takes no such setting; accepted: "
                            f"{', '.join(name for name in wanted if name in accepted)}")
    return {"prompt": prompt, "generator": torch.Generator().manual_seed(seed), "output_type": "pt", **given}


def _place(pipe: Any, device: str, offload: Offload) -> None:
    if offload is Offload.none:
        pipe.to(device)
    elif torch.device(device).type == "cpu":
        raise GenerateError(f"--offload: got {offload.value!r} on the CPU, where there is nothing to offload; accepted: none")
    elif offload is Offload.model:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.enable_sequential_cpu_offload(device=device)


def _tile(pipe: Any) -> None:
    vae: Any = getattr(pipe, "vae", None)
    if not hasattr(vae, "enable_tiling"):
        raise GenerateError(f"--tiling: the autoencoder of this {type(pipe).__name__} cannot; accepted: leave it out")
    vae.enable_tiling()


def _patch(pipe: Any, schedule: "PrecisionSchedule", compile_blocks: bool) -> None:
    from lowbit_attn.integrations.diffusers import patch
    from lowbit_attn.integrations.diffusers.adapters import adapter_for

    patch(pipe, schedule, report=True)
    if compile_blocks:
        for model in adapter_for(pipe, schedule.model).experts(pipe).values():
            model.compile_repeated_blocks()  # type: ignore[operator]


def _print_sampling(pipe: Any, call: dict[str, Any]) -> None:
    shown = {"scheduler": type(pipe.scheduler).__name__,
             **{key: pipe.scheduler.config[key] for key in SHIFT_KEYS if key in pipe.scheduler.config},
             **{name: value for name, value in call.items() if isinstance(value, int | float)}}
    console.print("sampling: " + ", ".join(f"{name} {value}" for name, value in shown.items()), soft_wrap=True)


def _run(pipe: Any, call: dict[str, Any], out: Path, fps: float, latents: Path | None) -> None:
    from lowbit_attn.integrations.diffusers import report

    last: dict[str, torch.Tensor] = {}

    def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        last.update(tensors)
        return tensors

    video = getattr(pipe(**call, callback_on_step_end=keep), "frames", None)
    if video is None:
        raise GenerateError(f"--model: a {type(pipe).__name__} makes no video; accepted: a pipeline that does")
    media.save_frames(video[0].float(), out, fps)
    if latents is not None:
        from safetensors.torch import save_file

        save_file({"latents": last["latents"].contiguous().cpu()}, latents)
    ran = report(pipe)
    console.print(f"{sum(ran.counts().values())} attention calls: {ran.counts()}; written: {out}", soft_wrap=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
