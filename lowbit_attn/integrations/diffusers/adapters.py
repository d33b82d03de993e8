"""What is known about each supported model family: its pipelines, its models, and where their attention is."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowbit_attn.integrations.diffusers.processors import LowBitProcessor, counterpart
from lowbit_attn.schedules import FAMILIES, Place


@dataclass(frozen=True)
class Site:
    """One attention module and its place in the model."""

    place: Place
    module: Any


@dataclass(frozen=True)
class Adapter:
    """A model family in diffusers. Classes are known by name, so that no family's code is loaded for another's.

    Attributes:
        family: its name in a schedule.
        pipelines: pipeline classes that `model: auto` recognizes; subclasses count.
        models: model classes.
        components: names of the pipeline's models that denoise, by expert; an absent one is left out.
    """

    family: str
    pipelines: tuple[str, ...]
    models: tuple[str, ...]
    components: Mapping[str, str]

    def experts(self, pipe: Any) -> dict[str, nn.Module]:
        """The denoising models of a pipeline by expert, without torch.compile's wrapper; "transformer" if there is one only."""
        found = {expert: unwrap(getattr(pipe, component, None)) for expert, component in self.components.items()}
        present = {expert: model for expert, model in found.items() if model is not None}
        if len(present) == 1 and next(iter(present)) == next(iter(self.components)):
            return {"transformer": next(iter(present.values()))}
        return present

    def blocks(self, model: Any) -> dict[str, int]:
        """Number of blocks of a model by stream."""
        lists = {stream.name: getattr(model, stream.blocks, ()) for stream in FAMILIES[self.family]}
        return {name: len(blocks) for name, blocks in lists.items() if len(blocks)}


_ONE = {"transformer": "transformer"}

ADAPTERS: dict[str, Adapter] = {
    adapter.family: adapter
    for adapter in (
        Adapter("wan",
                ("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline", "WanVACEPipeline", "WanAnimatePipeline",
                 "WanModularPipeline"),
                ("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel"),
                {"high_noise": "transformer", "low_noise": "transformer_2"}),
        Adapter("hunyuan_video",
                ("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline", "HunyuanSkyreelsImageToVideoPipeline"),
                ("HunyuanVideoTransformer3DModel",), _ONE),
        Adapter("hunyuan_video15",
                ("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline", "HunyuanVideo15ModularPipeline"),
                ("HunyuanVideo15Transformer3DModel",), _ONE),
        Adapter("minimax_h3", ("MiniMaxH3ModularPipeline",), ("MiniMaxH3Transformer3DModel",),
                {"transformer": "transformer", "transformer_ref": "transformer_ref"}),
        Adapter("cogvideox",
                ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "CogVideoXVideoToVideoPipeline",
                 "CogVideoXFunControlPipeline"),
                ("CogVideoXTransformer3DModel",), _ONE),
        Adapter("ltx",
                ("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline", "LTXI2VLongMultiPromptPipeline",
                 "LTXModularPipeline"),
                ("LTXVideoTransformer3DModel",), _ONE),
        Adapter("ltx2", ("LTX2Pipeline", "LTX2ImageToVideoPipeline", "LTX2ConditionPipeline", "LTX2ModularPipeline"),
                ("LTX2VideoTransformer3DModel",), _ONE),
        Adapter("flux",
                ("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline", "FluxFillPipeline", "FluxKontextPipeline",
                 "FluxControlPipeline", "FluxModularPipeline"),
                ("FluxTransformer2DModel",), _ONE),
    )
}
"""Model families by the name that a schedule's `model` key gives them."""


def unwrap(model: Any) -> Any:
    """The module inside `torch.compile(module)`."""
    return getattr(model, "_orig_mod", model)


def adapter_for(pipe: Any, model: str) -> Adapter:
    """The adapter of a pipeline; `model` is a family, or "auto" to take the pipeline's own.

    A pipeline of unknown class needs a family by name, and models of that family's classes under their usual names.
    """
    classes = {cls.__name__ for cls in type(pipe).__mro__}
    own = next((adapter for adapter in ADAPTERS.values() if classes & set(adapter.pipelines)), None)
    if own is None and model == "auto":
        raise TypeError(describe_unknown(pipe))
    if own is not None and model not in ("auto", own.family):
        raise ValueError(f"model: got {model!r} for a {type(pipe).__name__}; accepted: {own.family!r}, 'auto'")
    return own or ADAPTERS[model]


def describe_unknown(pipe: Any) -> str:
    """An error text that lists the attention modules of a pipeline, and what naming a family would do with them."""
    known = ", ".join(name for adapter in ADAPTERS.values() for name in adapter.pipelines)
    lines = [f"pipe: got {type(pipe).__name__}, whose attention lowbit_attn does not guess at; accepted: {known}; or a model "
             "family by name, patch(pipe, schedule, model=...)."]
    for component, model in _models_of(pipe):
        family = _family_of(model)
        lines.append(f"  {component} ({type(model).__name__}): "
                     + (f"model={family!r} would fit" if family else "of no family that is known"))
        lines += [f"    {text}" for text in _attention_modules(model, family)]
    if len(lines) == 1:
        lines.append("  It has no component with attention modules.")
    return "\n".join(lines)


def _models_of(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Components that hold attention modules, by name."""
    components = getattr(pipe, "components", None)
    for name, component in components.items() if isinstance(components, Mapping) else vars(pipe).items():
        model = unwrap(component)
        if isinstance(model, nn.Module) and any(hasattr(module, "processor") for module in model.modules()):
            yield name, model


def _family_of(model: nn.Module) -> str | None:
    return next((adapter.family for adapter in ADAPTERS.values() if type(model).__name__ in adapter.models), None)


def _attention_modules(model: nn.Module, family: str | None) -> list[str]:
    """One line for each group of modules whose names differ in numbers only."""
    kinds = {(stream.blocks, name): kind for stream in (FAMILIES[family] if family else ())
             for name, kind in stream.attention.items()}
    groups: Counter[tuple[str, str, str]] = Counter()
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None:
            continue
        processor = processor.stock if isinstance(processor, LowBitProcessor) else processor
        parts = name.split(".")
        kind = kinds.get((parts[0], parts[-1])) if counterpart(processor) is not None else None
        fate = {None: "left alone", "cross": "left alone, unless the schedule says otherwise"}.get(kind, "would run the schedule")
        groups[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), type(processor).__name__, fate] += 1
    return [f"{count} × {name} ({processor}): {fate}" for (name, processor, fate), count in groups.items()]
