"""Reading and writing what pipelines produce: latents, folders of images, videos."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowbit_attn.cli import extras

LATENTS = (".safetensors", ".pt")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
VIDEOS = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".gif")
ACCEPTED = f"latents ({', '.join(LATENTS)}), a folder of images ({', '.join(IMAGES)}) or a video ({', '.join(VIDEOS)})"


def is_latents(path: Path) -> bool:
    """Whether a path is taken for latents rather than pictures."""
    return path.suffix.lower() in LATENTS


def load_latents(path: Path) -> Tensor:
    """The one tensor of a file, or the one called "latents", in float32; ValueError if it is neither."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; accepted: {ACCEPTED}")
    if path.suffix.lower() == ".safetensors":
        from safetensors.torch import load_file

        content: object = load_file(path)
    else:
        content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, Tensor):
        return content.float()
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)} if isinstance(content, dict) else {}
    chosen = tensors.get("latents", next(iter(tensors.values())) if len(tensors) == 1 else None)
    if chosen is None:
        raise ValueError(f"{path}: got tensors {', '.join(tensors) or 'none'}; accepted: one tensor, or one called 'latents'")
    return chosen.float()


def load_frames(path: Path) -> Tensor:
    """Frames `[F, 3, H, W]` in 0..1 of a folder of images (in the order of their names) or a video file."""
    if path.is_dir():
        return _load_images(path)
    if not path.is_file() or path.suffix.lower() not in VIDEOS:
        problem = "not a kind of file that is known" if path.is_file() else "no such file"
        raise ValueError(f"{path}: {problem}; accepted: {ACCEPTED}")
    extras.require("video", ["av"])
    import av

    with av.open(str(path)) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    if not frames:
        raise ValueError(f"{path}: no frames; accepted: a video with some")
    return _stack(path, frames)


def _load_images(folder: Path) -> Tensor:
    from PIL import Image

    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGES)
    if not files:
        raise ValueError(f"{folder}: no images; accepted: {', '.join(IMAGES)}")
    return _stack(folder, [torch.from_numpy(np.array(Image.open(file).convert("RGB"))) for file in files])


def _stack(path: Path, frames: list[Tensor]) -> Tensor:
    if len(shapes := {tuple(frame.shape[:2]) for frame in frames}) > 1:
        raise ValueError(f"{path}: frames of different sizes {sorted(shapes)}; accepted: one size")
    return torch.stack(frames).permute(0, 3, 1, 2).float() / 255


def save_frames(frames: Tensor, path: Path, fps: float) -> None:
    """Write frames `[F, 3, H, W]` in 0..1 as a video, or as numbered PNG files if `path` has no suffix."""
    pixels = (frames.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    if not path.suffix:
        from PIL import Image

        path.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(pixels):
            Image.fromarray(picture).save(path / f"frame-{number:04}.png")
        return
    extras.require("video", ["av"])
    from fractions import Fraction

    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
        stream.options = {"crf": "12"}  # visually lossless: a codec's artifacts are not to be taken for a precision's
        for picture in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
