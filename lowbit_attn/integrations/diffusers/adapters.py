"""What is known about each supported model family: its pipeline, its models, and where their attention is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import nn

from lowbit_attn.integrations.diffusers.processors import HunyuanVideoProcessor, WanProcessor
from lowbit_attn.integrations.diffusers.processors.base import LowBitProcessor


@dataclass(frozen=True)
class Site:
    """One attention module: its name in the model, its block's index, "self" (joint included) or "cross"."""

    name: str
    module: Any
    block: int
    kind: str


@dataclass(frozen=True)
class Adapter:
    """A model family.

    Attributes:
        pipeline, model: classes that it supports.
        stock, processor: the processor class it replaces, and by what.
        components: names of the pipeline's models that denoise, by expert; an absent one is left out.
        blocks: number of blocks of a model, by stream if there are several.
        sites: the attention modules of a model.
    """

    pipeline: type
    model: type
    stock: type
    processor: type[LowBitProcessor]
    components: Mapping[str, str]
    blocks: Callable[[Any], int | dict[str, int]]
    sites: Callable[[Any], Iterator[Site]]

    def models(self, pipe: Any) -> dict[str, nn.Module]:
        """The denoising models of a pipeline by expert, without torch.compile's wrapper; "transformer" if there is one only."""
        found = {expert: unwrap(getattr(pipe, component, None)) for expert, component in self.components.items()}
        present = {expert: model for expert, model in found.items() if model is not None}
        if len(present) == 1 and next(iter(present)) == next(iter(self.components)):
            return {"transformer": next(iter(present.values()))}
        return present


def unwrap(model: Any) -> Any:
    """The module inside `torch.compile(module)`."""
    return getattr(model, "_orig_mod", model)


def _wan_sites(model: Any) -> Iterator[Site]:
    for index, block in enumerate(model.blocks):
        yield Site(f"blocks.{index}.attn1", block.attn1, index, "self")
        yield Site(f"blocks.{index}.attn2", block.attn2, index, "cross")


def _hunyuan_video_sites(model: Any) -> Iterator[Site]:
    dual = len(model.transformer_blocks)
    for index, block in enumerate(model.transformer_blocks):
        yield Site(f"transformer_blocks.{index}.attn", block.attn, index, "self")
    for index, block in enumerate(model.single_transformer_blocks):
        yield Site(f"single_transformer_blocks.{index}.attn", block.attn, dual + index, "self")


ADAPTERS: dict[str, Adapter] = {
    "wan": Adapter(
        WanPipeline, WanTransformer3DModel, WanAttnProcessor, WanProcessor,
        components={"high_noise": "transformer", "low_noise": "transformer_2"},
        blocks=lambda model: len(model.blocks),
        sites=_wan_sites,
    ),
    "hunyuan_video": Adapter(
        HunyuanVideoPipeline, HunyuanVideoTransformer3DModel, HunyuanVideoAttnProcessor2_0, HunyuanVideoProcessor,
        components={"transformer": "transformer"},
        blocks=lambda model: {"dual": len(model.transformer_blocks), "single": len(model.single_transformer_blocks)},
        sites=_hunyuan_video_sites,
    ),
}
"""Model families by the name that a schedule's `model` key gives them."""


def adapter_for(pipe: Any, model: str) -> tuple[str, Adapter]:
    """The adapter of a pipeline, and its name; `model` is a schedule's, "auto" to take what fits."""
    known = {name: adapter.pipeline.__name__ for name, adapter in ADAPTERS.items()}
    found = next(((name, adapter) for name, adapter in ADAPTERS.items() if isinstance(pipe, adapter.pipeline)), None)
    if found is None:
        raise TypeError(f"pipe: got {type(pipe).__name__}; accepted: {', '.join(known.values())}")
    if model not in ("auto", found[0]):
        raise ValueError(f"schedule model: got {model!r} for a {type(pipe).__name__}; accepted: {found[0]!r}, 'auto'")
    return found
