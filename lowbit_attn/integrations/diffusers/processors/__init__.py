"""Attention processors, one module per model family."""

from lowbit_attn.integrations.diffusers.processors.hunyuan_video import HunyuanVideoProcessor
from lowbit_attn.integrations.diffusers.processors.wan import WanProcessor

__all__ = ["HunyuanVideoProcessor", "WanProcessor"]
