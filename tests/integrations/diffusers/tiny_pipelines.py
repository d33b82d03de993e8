"""Real diffusers pipelines of small size with random weights, built without any download."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

TEXT_TOKENS, TEXT_DIM, POOLED_DIM = 16, 32, 8
WAN_BLOCKS = 3
HUNYUAN_DUAL, HUNYUAN_SINGLE = 2, 2


def wan_scheduler(flow_shift: float = 3.0) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)


def wan_transformer(seed: int, blocks: int = WAN_BLOCKS) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=16, out_channels=16, text_dim=TEXT_DIM,
        freq_dim=32, ffn_dim=64, num_layers=blocks, cross_attn_norm=True, rope_max_seq_len=32)
    return model.eval().requires_grad_(False)


def wan(*, experts: int = 2, blocks: int = WAN_BLOCKS) -> WanPipeline:
    """Wan2.2 with two experts that share the denoising about evenly, or a single-expert Wan."""
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=wan_scheduler(), transformer=wan_transformer(0, blocks),
        transformer_2=wan_transformer(1, blocks) if experts == 2 else None, boundary_ratio=0.7 if experts == 2 else None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def hunyuan(*, dual: int = HUNYUAN_DUAL, single: int = HUNYUAN_SINGLE) -> HunyuanVideoPipeline:
    torch.manual_seed(0)
    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=dual,
        num_single_layers=single, num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=TEXT_DIM,
        pooled_projection_dim=POOLED_DIM, rope_axes_dim=(4, 6, 6))
    pipe = HunyuanVideoPipeline(
        text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None, vae=None,
        transformer=model.eval().requires_grad_(False), scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_wan(pipe: WanPipeline, steps: int = 4, guidance: float = 4.0, **changes: Any) -> torch.Tensor:
    """Final latents; with guidance each step is two sequential calls of the model."""
    noise, device = torch.Generator().manual_seed(1), pipe._execution_device
    inputs = {
        "prompt_embeds": torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=noise).to(device),
        "negative_prompt_embeds": torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=noise).to(device),
        "height": 32, "width": 32, "num_frames": 5, "guidance_scale": guidance, "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(2), "output_type": "latent",
    }
    latents: torch.Tensor = pipe(**{**inputs, **changes}).frames
    return latents


def hunyuan_text(valid: int, length: int = TEXT_TOKENS) -> Mapping[str, torch.Tensor]:
    """Prompt embeddings of which the first `valid` tokens count; the others hold garbage."""
    embeds = torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    embeds[:, valid:] = 50.0
    mask = (torch.arange(length) < valid).long()[None]
    pooled = torch.ones(1, POOLED_DIM)
    return {"prompt_embeds": embeds[:, :length], "prompt_attention_mask": mask, "pooled_prompt_embeds": pooled}


def run_hunyuan(pipe: HunyuanVideoPipeline, steps: int = 4, valid: int = 10, **changes: Any) -> torch.Tensor:
    """Final latents."""
    inputs = {
        **hunyuan_text(valid), "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(2), "output_type": "latent",
    }
    latents: torch.Tensor = pipe(**{**inputs, **changes}).frames
    return latents


def torch_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, recipe: str,
                    key_lengths: torch.Tensor | None, enable_gqa: bool = False) -> torch.Tensor:
    """Exact attention in the place of ours, the way the stock processors call it."""
    mask = None
    if key_lengths is not None:
        mask = (torch.arange(key.shape[2]) < key_lengths[:, None])[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
