"""The video half of the demo: a small Wan2.2 with random weights, in bf16 and under a schedule, same seed.

Everything is the real pipeline's (two experts, UniPC, guidance in two passes, video VAE) but the size, and the weights, which
nothing trained. So the frames say how closely a precision follows bf16, and nothing about beauty.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lowbit_attn.integrations.diffusers import RunReport
    from lowbit_attn.schedules import PrecisionSchedule

TEXT_TOKENS, TEXT_DIM = 16, 64
FLOW_SHIFT, GUIDANCE, GUIDANCE_LOW_NOISE, BOUNDARY = 12.0, 4.0, 3.0, 0.875
"""Of the published Wan2.2 evaluation (see configs/wan2.2-t2v-a14b-hybrid.yaml) and of the checkpoint."""


@dataclass(frozen=True)
class VideoSize:
    """Extent of the model and of what it generates."""

    blocks: int
    heads: int
    pixels: int
    frames: int
    head_dim: int = 64


@dataclass(frozen=True)
class Generation:
    """One generated video: `frames` is [F, 3, H, W] in 0..1, `latents` what was decoded, `ran` the attention calls."""

    name: str
    frames: Tensor
    latents: Tensor
    seconds: float
    ran: "RunReport | None" = None


@dataclass(frozen=True)
class Fidelity:
    """How far a generation is from another: of the frames, and the relative Frobenius distance of the latents."""

    psnr: float
    ssim: float
    latent_error: float


def build_pipeline(size: VideoSize, seed: int, device: torch.device) -> Any:
    """A two-expert `WanPipeline` in bf16 with a float32 VAE, as the published checkpoint runs."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    with _seeded(seed):
        vae = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                               temperal_downsample=[False, True, True])
        experts = [_expert(size) for _ in range(2)]
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae.eval().requires_grad_(False),
        transformer=experts[0], transformer_2=experts[1],
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT),
        boundary_ratio=BOUNDARY)
    pipe.set_progress_bar_config(disable=True)
    for model in (pipe.vae, pipe.transformer, pipe.transformer_2):
        model.to(device)
    return pipe


def _expert(size: VideoSize) -> nn.Module:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=size.heads, attention_head_dim=size.head_dim, in_channels=16, out_channels=16,
        text_dim=TEXT_DIM, freq_dim=64, ffn_dim=4 * size.head_dim, num_layers=size.blocks, cross_attn_norm=True,
        rope_max_seq_len=64)
    _make_attention_matter(model)
    _to_bf16(model)
    return model.eval().requires_grad_(False)


def _make_attention_matter(model: Any) -> None:
    """Freshly initialized, attention is near uniform and its gate near zero: any precision would look perfect."""
    with torch.no_grad():
        for block in model.blocks:
            block.attn1.norm_q.weight.mul_(3.0)
            block.scale_shift_table[:, 2].add_(1.0)  # the gate of self-attention


def _to_bf16(model: Any) -> None:
    """As `from_pretrained(torch_dtype=torch.bfloat16)`: all but the modules that the model keeps in float32."""
    kept = tuple(model._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def generate(pipe: Any, name: str, size: VideoSize, steps: int, *, seed: int, on_step: Callable[[str], None],
             schedule: "PrecisionSchedule | str | None" = None) -> Generation:
    """Generate one video, under a schedule if there is one; the pipeline is as before afterwards."""
    from lowbit_attn.integrations.diffusers import patch, report, unpatch

    if schedule is not None:
        patch(pipe, schedule)
    try:
        began = time.perf_counter()
        frames, latents = _run(pipe, size, steps, seed, on_step)
        seconds = time.perf_counter() - began
        return Generation(name, frames, latents, seconds, None if schedule is None else report(pipe))
    finally:
        if schedule is not None:
            unpatch(pipe)


def _run(pipe: Any, size: VideoSize, steps: int, seed: int, on_step: Callable[[str], None]) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    prompt, negative = torch.randn(2, 1, TEXT_TOKENS, TEXT_DIM, generator=random).to(pipe.device, torch.bfloat16)
    last: dict[str, Tensor] = {}

    def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        last.update(tensors)
        on_step("")
        return tensors

    frames = pipe(prompt_embeds=prompt, negative_prompt_embeds=negative, height=size.pixels, width=size.pixels,
                  num_frames=size.frames, num_inference_steps=steps, guidance_scale=GUIDANCE,
                  guidance_scale_2=GUIDANCE_LOW_NOISE, generator=random, output_type="pt",
                  callback_on_step_end=after_step).frames
    return frames[0].float().cpu(), last["latents"].float().cpu()


@contextmanager
def other_backend() -> Iterator[None]:
    """The same mathematics from torch's other attention code: what differs then is rounding, the noise floor."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def fidelity(video: Generation, baseline: Generation) -> Fidelity:
    """PSNR and SSIM over all frames, for values in 0..1."""
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    psnr = peak_signal_noise_ratio(video.frames, baseline.frames, data_range=1.0)
    ssim = structural_similarity_index_measure(video.frames, baseline.frames, data_range=1.0)
    assert isinstance(ssim, Tensor)
    error = (video.latents - baseline.latents).norm() / baseline.latents.norm()
    return Fidelity(float(psnr), float(ssim), float(error))
