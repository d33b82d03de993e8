"""Attention processors, one module per model family, by the stock processor that each stands for."""

from typing import Any

from lowbit_attn.integrations.diffusers.processors.base import LowBitProcessor
from lowbit_attn.integrations.diffusers.processors.cogvideox import CogVideoXProcessor, FusedCogVideoXProcessor
from lowbit_attn.integrations.diffusers.processors.flux import FluxProcessor
from lowbit_attn.integrations.diffusers.processors.hunyuan_video import HunyuanVideo15Processor, HunyuanVideoProcessor
from lowbit_attn.integrations.diffusers.processors.ltx import LTX2PerturbedProcessor, LTX2Processor, LTXProcessor
from lowbit_attn.integrations.diffusers.processors.minimax_h3 import MiniMaxH3Processor
from lowbit_attn.integrations.diffusers.processors.wan import WanProcessor

PROCESSORS: dict[str, type[LowBitProcessor]] = {
    "WanAttnProcessor": WanProcessor,  # Animate's model file has its own copy of the class
    "HunyuanVideoAttnProcessor2_0": HunyuanVideoProcessor,
    "HunyuanVideo15AttnProcessor2_0": HunyuanVideo15Processor,
    "MiniMaxH3AttnProcessor": MiniMaxH3Processor,
    "CogVideoXAttnProcessor2_0": CogVideoXProcessor,
    "FusedCogVideoXAttnProcessor2_0": FusedCogVideoXProcessor,
    "LTXVideoAttnProcessor": LTXProcessor,
    "LTX2AudioVideoAttnProcessor": LTX2Processor,
    "LTX2PerturbedAttnProcessor": LTX2PerturbedProcessor,
    "FluxAttnProcessor": FluxProcessor,
}
"""Ours by the name of diffusers' class."""


def counterpart(stock: Any) -> type[LowBitProcessor] | None:
    """The processor class that stands for diffusers' own `stock`; None for any other, subclasses of its classes included."""
    own = type(stock).__module__.partition(".")[0] == "diffusers"
    return PROCESSORS.get(type(stock).__name__) if own else None


__all__ = ["PROCESSORS", "CogVideoXProcessor", "FluxProcessor", "FusedCogVideoXProcessor", "HunyuanVideo15Processor",
           "HunyuanVideoProcessor", "LTX2PerturbedProcessor", "LTX2Processor", "LTXProcessor", "LowBitProcessor",
           "MiniMaxH3Processor", "WanProcessor", "counterpart"]
