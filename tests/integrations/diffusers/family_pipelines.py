"""One small real pipeline of every supported family and variant, with random weights and no download, and how to run it."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from PIL import Image
from tiny_pipelines import (
    TEXT_DIM,
    TEXT_TOKENS,
    hunyuan,
    hunyuan_text,
    run_hunyuan,
    run_wan,
    wan,
    wan_scheduler,
    wan_transformer,
)

Latents = torch.Tensor


class Family(NamedTuple):
    """`make()` builds a pipeline, `run(pipe, steps=2)` gives its final latents; `passes` model calls make a step."""

    name: str
    family: str
    make: Callable[[], Any]
    run: Callable[..., Latents]
    blocks: int
    passes: int


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _still(module: torch.nn.Module) -> torch.nn.Module:
    return module.eval().requires_grad_(False)


def _noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


@cache
def _wan_vae() -> torch.nn.Module:
    torch.manual_seed(0)
    return _still(diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                             temperal_downsample=[False, True, True]))


def _wan_config(**changes: Any) -> dict[str, Any]:
    return {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 16, "out_channels": 16,
            "text_dim": TEXT_DIM, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2, "cross_attn_norm": True, "rope_max_seq_len": 32,
            **changes}


@cache
def _image_encoder() -> dict[str, Any]:
    """CLIP with 5 image tokens of width 8, and its image processor."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    config = CLIPVisionConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=32,
                              patch_size=16)
    return {"image_encoder": _still(CLIPVisionModel(config)),
            "image_processor": CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})}


def picture(seed: int = 4) -> Image.Image:
    return Image.fromarray((torch.rand(32, 32, 3, generator=torch.Generator().manual_seed(seed)) * 255).byte().numpy())


def wan_i2v() -> Any:
    """Wan2.1 I2V: the model attends to image tokens in a cross-attention of its own."""
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(**_wan_config(in_channels=36, image_dim=8, added_kv_proj_dim=32))
    return _quiet(diffusers.WanImageToVideoPipeline(tokenizer=None, text_encoder=None, vae=_wan_vae(), scheduler=wan_scheduler(),
                                                    transformer=_still(model), **_image_encoder()))


def _wan_i2v_text() -> dict[str, torch.Tensor]:
    """512 tokens: the model takes whatever comes before the last 512 for image tokens."""
    return {"prompt_embeds": _noise(1, 512, TEXT_DIM), "negative_prompt_embeds": _noise(1, 512, TEXT_DIM, seed=3)}


def run_wan_i2v(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    return run_wan(pipe, steps, image=picture(), **_wan_i2v_text(), **changes)


def wan_animate() -> Any:
    torch.manual_seed(0)
    model = diffusers.WanAnimateTransformer3DModel(
        **_wan_config(in_channels=36, image_dim=8, added_kv_proj_dim=32), motion_encoder_size=16, motion_style_dim=8, motion_dim=4,
        motion_encoder_dim=8, face_encoder_hidden_dim=8, face_encoder_num_heads=2, inject_face_latents_blocks=2,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8})
    return _quiet(diffusers.WanAnimatePipeline(tokenizer=None, text_encoder=None, vae=_wan_vae(), scheduler=wan_scheduler(),
                                               transformer=_still(model), **_image_encoder()))


def run_wan_animate(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    inputs = {"image": picture(), "pose_video": [picture(i) for i in range(5)], "face_video": [picture(i) for i in range(5)],
              "height": 32, "width": 32, "segment_frame_length": 5, "num_inference_steps": steps, "guidance_scale": 4.0,
              "generator": _generator(), "output_type": "latent", **_wan_i2v_text()}
    latents: Latents = pipe(**{**inputs, **changes}).frames
    return latents


def wan_ti2v() -> Any:
    """Wan2.2 5B's way to run: one expert, a timestep for each token."""
    return _quiet(diffusers.WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=wan_scheduler(),
                                        transformer=wan_transformer(0), expand_timesteps=True))


def wan_v2v() -> Any:
    return _quiet(diffusers.WanVideoToVideoPipeline(tokenizer=None, text_encoder=None, vae=_wan_vae(), scheduler=wan_scheduler(),
                                                    transformer=wan_transformer(0)))


def run_wan_v2v(pipe: Any, steps: int = 2, strength: float = 1.0, **changes: Any) -> Latents:
    inputs = {"prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM), "negative_prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM, seed=3),
              "height": 32, "width": 32, "num_inference_steps": steps, "generator": _generator(), "output_type": "latent",
              "video": torch.rand(1, 5, 3, 32, 32, generator=_generator()), "strength": strength}
    latents: Latents = pipe(**{**inputs, **changes}).frames
    return latents


def wan_vace() -> Any:
    torch.manual_seed(0)
    model = diffusers.WanVACETransformer3DModel(**_wan_config(num_layers=3, vace_layers=[0, 2], vace_in_channels=96))
    return _quiet(diffusers.WanVACEPipeline(tokenizer=None, text_encoder=None, vae=_wan_vae(), scheduler=wan_scheduler(),
                                            transformer=_still(model)))


def run_wan_vace(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    return run_wan(pipe, steps, **changes)


def wan_modular() -> Any:
    pipe = diffusers.WanModularPipeline(blocks=diffusers.modular_pipelines.wan.modular_blocks_wan.WanCoreDenoiseStep())
    pipe.update_components(transformer=wan_transformer(0), scheduler=wan_scheduler())
    return pipe


def run_wan_modular(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    inputs = {"prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM), "negative_prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM, seed=3),
              "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": steps, "generator": _generator()}
    latents: Latents = pipe(**{**inputs, **changes}, output="latents")
    return latents


def wan22_modular() -> Any:
    from diffusers.modular_pipelines.wan.modular_blocks_wan22 import Wan22CoreDenoiseStep

    pipe = diffusers.Wan22ModularPipeline(blocks=Wan22CoreDenoiseStep())
    pipe.update_components(transformer=wan_transformer(0), transformer_2=wan_transformer(1), scheduler=wan_scheduler(),
                           boundary_ratio=0.7)
    return pipe


def hunyuan_i2v() -> Any:
    torch.manual_seed(0)
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=TEXT_DIM, pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6), guidance_embeds=False, image_condition_type="token_replace")
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, down_block_types=("HunyuanVideoDownBlock3D",) * 4, up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, mid_block_add_attention=True)
    return _quiet(diffusers.HunyuanVideoImageToVideoPipeline(
        text_encoder=None, tokenizer=None, transformer=_still(model), vae=_still(vae),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0), text_encoder_2=None, tokenizer_2=None,
        image_processor=None))


def run_hunyuan_i2v(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    return run_hunyuan(pipe, steps, image=picture(), **changes)


def hunyuan15() -> Any:
    torch.manual_seed(0)
    model = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2, num_refiner_layers=1,
        patch_size=1, patch_size_t=1, text_embed_dim=TEXT_DIM, text_embed_2_dim=16, image_embed_dim=8, rope_axes_dim=(4, 6, 6),
        target_size=16, task_type="t2v")
    vae = diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1)
    return _quiet(diffusers.HunyuanVideo15Pipeline(
        text_encoder=None, tokenizer=None, transformer=_still(model), vae=_still(vae),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0), text_encoder_2=None, tokenizer_2=None,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=4.0)))


def run_hunyuan15(pipe: Any, steps: int = 2, valid: int = 10, **changes: Any) -> Latents:
    text = hunyuan_text(valid)
    inputs = {"prompt_embeds": text["prompt_embeds"], "prompt_embeds_mask": text["prompt_attention_mask"],
              "negative_prompt_embeds": text["prompt_embeds"].flip(1), "negative_prompt_embeds_mask": text["prompt_attention_mask"],
              "prompt_embeds_2": _noise(1, 6, 16), "prompt_embeds_mask_2": (torch.arange(6) < 3).long()[None],
              "negative_prompt_embeds_2": _noise(1, 6, 16, seed=3),
              "negative_prompt_embeds_mask_2": (torch.arange(6) < 3).long()[None],
              "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": steps, "generator": _generator(),
              "output_type": "latent"}
    latents: Latents = pipe(**{**inputs, **changes}).frames
    return latents


def minimax_h3() -> Any:
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3CoreDenoiseStep

    torch.manual_seed(0)
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=32, num_layers=2, num_refiner_layers=1, ffn_dim=32,
        in_channels=24, audio_in_channels=32, text_dim=TEXT_DIM, freq_dim=32, time_embed_hidden_dim=32,
        time_embed_dim=16, rope_freq_dim=2)
    pipe = diffusers.MiniMaxH3ModularPipeline(blocks=MiniMaxH3CoreDenoiseStep())
    pipe.update_components(transformer=_still(model), scheduler=diffusers.MiniMaxH3Scheduler(shift=12.0),
                           audio_scheduler=diffusers.MiniMaxH3Scheduler(shift=3.0))
    return pipe


def run_minimax_h3(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    """The scheduler's last step ends at a sigma of zero, which counts as one of the requested: one more is asked for."""
    inputs = {"prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM), "text_token_tags": torch.ones(TEXT_TOKENS, dtype=torch.long),
              "height": 32, "width": 32, "num_frames": 124, "num_inference_steps": steps + 1, "generator": _generator()}
    latents: Latents = pipe(**{**inputs, **changes}, output="latents")
    return latents


def cogvideox() -> Any:
    torch.manual_seed(0)
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=TEXT_DIM,
        num_layers=2, sample_width=4, sample_height=4, sample_frames=5, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=TEXT_TOKENS, use_rotary_positional_embeddings=True)
    return _quiet(diffusers.CogVideoXPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=_still(model),
                                              scheduler=diffusers.CogVideoXDDIMScheduler()))


def run_cogvideox(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    inputs = {"prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM), "negative_prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM, seed=3),
              "height": 32, "width": 32, "num_frames": 5, "num_inference_steps": steps, "generator": _generator(),
              "max_sequence_length": TEXT_TOKENS, "output_type": "latent"}
    latents: Latents = pipe(**{**inputs, **changes}).frames
    return latents


def ltx() -> Any:
    torch.manual_seed(0)
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32, num_layers=2,
        caption_channels=TEXT_DIM)
    return _quiet(diffusers.LTXPipeline(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=None, text_encoder=None,
                                        tokenizer=None, transformer=_still(model)))


def run_ltx(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    mask = (torch.arange(TEXT_TOKENS) < 10).long()[None]
    inputs = {"prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM), "prompt_attention_mask": mask,
              "negative_prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM, seed=3), "negative_prompt_attention_mask": mask,
              "height": 64, "width": 64, "num_frames": 9, "num_inference_steps": steps, "generator": _generator(),
              "output_type": "latent"}
    latents: Latents = pipe(**{**inputs, **changes}).frames
    return latents


def ltx2() -> Any:
    torch.manual_seed(0)
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32, gated_attn=True,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=8,
        audio_cross_attention_dim=16, num_layers=2, caption_channels=TEXT_DIM, rope_type="split", perturbed_attn=True)
    connectors = LTX2TextConnectors(
        caption_channels=TEXT_DIM, text_proj_in_factor=2, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16, video_connector_num_layers=1, video_connector_num_learnable_registers=16,
        audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=16, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=16, rope_type="split")
    audio_vae = diffusers.AutoencoderKLLTX2Audio(base_channels=8, ch_mult=(1,), num_res_blocks=1, latent_channels=2, mel_bins=16)
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False), down_block_types=("LTX2VideoDownBlock3D",), downsample_type=("spatial",),
        upsample_type=("spatiotemporal",), upsample_residual=(False,), upsample_factor=(1,), spatial_compression_ratio=32,
        temporal_compression_ratio=8)
    return _quiet(diffusers.LTX2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=_still(vae), audio_vae=_still(audio_vae), text_encoder=None,
        tokenizer=None, connectors=_still(connectors), transformer=_still(model), vocoder=None))


def run_ltx2(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    mask = (torch.arange(TEXT_TOKENS) < 10).long()[None]
    inputs = {"prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM * 2), "prompt_attention_mask": mask,
              "negative_prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM * 2, seed=3), "negative_prompt_attention_mask": mask,
              "height": 64, "width": 64, "num_frames": 9, "num_inference_steps": steps, "generator": _generator(),
              "spatio_temporal_guidance_blocks": [1], "output_type": "latent"}
    latents: Latents = pipe(**{**inputs, **changes}).frames
    return latents


def flux() -> Any:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=TEXT_DIM, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8))
    return _quiet(diffusers.FluxPipeline(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=None, text_encoder=None,
                                         tokenizer=None, text_encoder_2=None, tokenizer_2=None, transformer=_still(model)))


def run_flux(pipe: Any, steps: int = 2, **changes: Any) -> Latents:
    inputs = {"prompt_embeds": _noise(1, TEXT_TOKENS, TEXT_DIM), "pooled_prompt_embeds": _noise(1, 8), "height": 32, "width": 32,
              "num_inference_steps": steps, "generator": _generator(), "output_type": "latent"}
    latents: Latents = pipe(**{**inputs, **changes}).images
    return latents


FAMILIES = {
    family.name: family
    for family in (
        Family("wan2.2", "wan", wan, run_wan, 3, 2),
        Family("wan2.2 ti2v", "wan", wan_ti2v, run_wan, 3, 2),
        Family("wan i2v", "wan", wan_i2v, run_wan_i2v, 2, 2),
        Family("wan v2v", "wan", wan_v2v, run_wan_v2v, 3, 2),
        Family("wan animate", "wan", wan_animate, run_wan_animate, 2, 2),
        Family("wan vace", "wan", wan_vace, run_wan_vace, 5, 2),
        Family("wan modular", "wan", wan_modular, run_wan_modular, 3, 2),
        Family("wan2.2 modular", "wan", wan22_modular, run_wan_modular, 3, 2),
        Family("hunyuan video", "hunyuan_video", hunyuan, run_hunyuan, 4, 1),
        Family("hunyuan video i2v", "hunyuan_video", hunyuan_i2v, run_hunyuan_i2v, 2, 1),
        Family("hunyuan video 1.5", "hunyuan_video15", hunyuan15, run_hunyuan15, 2, 2),
        Family("minimax-h3", "minimax_h3", minimax_h3, run_minimax_h3, 2, 1),
        Family("cogvideox", "cogvideox", cogvideox, run_cogvideox, 2, 1),
        Family("ltx", "ltx", ltx, run_ltx, 2, 1),
        Family("ltx-2", "ltx2", ltx2, run_ltx2, 2, 3),
        Family("flux", "flux", flux, run_flux, 2, 1),
    )
}
