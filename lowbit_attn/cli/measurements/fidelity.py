"""How far one generation is from another, from the same seed: frames and latents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLACK = 1.0 / 255
"""A frame whose brightest value is no more than this is black."""

PerFrame = Callable[[Tensor, Tensor], Tensor]
"""Distance of frames `[F, 3, H, W]` in 0..1, `[F]`."""


@dataclass(frozen=True)
class FrameFidelity:
    """Frames against reference frames. `psnr` (dB), `ssim` and `lpips` are per frame, of the frames `chosen`.

    Attributes:
        flicker: PSNR (dB) of each frame's change from the one before it, over all frames; what is steady but off costs nothing.
        black, not_finite: numbers of such frames, over all frames of the video under test.
        black_reference: numbers of black frames in the reference, which are no fault then.
    """

    chosen: tuple[int, ...]
    psnr: tuple[float, ...]
    ssim: tuple[float, ...]
    flicker: tuple[float, ...]
    black: tuple[int, ...]
    not_finite: tuple[int, ...]
    black_reference: tuple[int, ...]
    lpips: tuple[float, ...] = ()

    @property
    def faults(self) -> list[str]:
        """What no video may have, whatever its distance."""
        black = [frame for frame in self.black if frame not in self.black_reference]
        return [f"{len(frames)} frames {problem}: {_few(frames)}" for frames, problem in
                ((self.not_finite, "not finite"), (black, "black, that are not in the reference")) if frames]


@dataclass(frozen=True)
class LatentFidelity:
    """Latents against reference latents: cosine similarity, relative L2 distance, and the number of values not finite."""

    cosine: float
    relative_l2: float
    not_finite: int

    @property
    def faults(self) -> list[str]:
        """What no latents may have, whatever their distance."""
        return [f"{self.not_finite} values not finite"] if self.not_finite else []


def compare_frames(video: Tensor, reference: Tensor, every: int = 1, lpips: PerFrame | None = None) -> FrameFidelity:
    """Measure `[F, 3, H, W]` frames in 0..1 against as many reference frames, every so many of them."""
    _check_shapes(video, reference)
    chosen = tuple(range(0, len(video), every))
    a, b = video[list(chosen)], reference[list(chosen)]
    finite = torch.isfinite(video).flatten(1).all(dim=1)
    return FrameFidelity(
        chosen=chosen, psnr=_floats(psnr(a, b)), ssim=_floats(_ssim(a, b)), flicker=_floats(psnr(video.diff(dim=0),
                                                                                                 reference.diff(dim=0))),
        black=_black(video), not_finite=_indices(~finite), black_reference=_black(reference),
        lpips=_floats(lpips(a, b)) if lpips else ())


def compare_latents(latents: Tensor, reference: Tensor) -> LatentFidelity:
    """Measure latents of any shape against reference latents of the same shape."""
    _check_shapes(latents, reference)
    a, b = latents.flatten().double(), reference.flatten().double()
    return LatentFidelity(float(torch.nn.functional.cosine_similarity(a, b, dim=0)), float((a - b).norm() / b.norm()),
                          int((~torch.isfinite(a)).sum()))


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, `[F]`, of frames with a peak of one; infinite for equal frames."""
    return -10 * torch.log10((a - b).square().flatten(1).mean(dim=1))


def _ssim(a: Tensor, b: Tensor) -> Tensor:
    from torchmetrics.functional.image import structural_similarity_index_measure

    # Frame by frame, for memory, and in float64: in float32 the variances of flat frames cancel to noise.
    pairs = zip(a.split(1), b.split(1), strict=True)
    values = [structural_similarity_index_measure(x.double(), y.double(), data_range=1.0) for x, y in pairs]
    return torch.tensor([float(value) for value in values if isinstance(value, Tensor)])


def _check_shapes(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"shapes: got {list(a.shape)} against {list(b.shape)}; accepted: equal ones")


def _black(frames: Tensor) -> tuple[int, ...]:
    return _indices(frames.flatten(1).amax(dim=1) <= BLACK)


def _indices(flags: Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())


def _few(frames: Sequence[int]) -> str:
    return ", ".join(map(str, frames[:5])) + (" …" if len(frames) > 5 else "")
