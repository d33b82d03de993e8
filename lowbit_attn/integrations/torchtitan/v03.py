"""torchtitan 0.3.x: overrides that put our attention in the place of flex and varlen attention.

On the command line, next to any --module and --config of torchtitan's:

    --training.disable_cuda_graphs --override.imports
        'lowbit_attn.integrations.torchtitan.v03.attention={"recipe": "mxfp8"}'
        lowbit_attn.integrations.torchtitan.v03.sac
        lowbit_attn.integrations.torchtitan.v03.metrics

(`varlen_attention` in place of `attention` for a config whose backend is varlen), or in a config function of one's own:

    def llama3_8b_mxfp8():
        return enable(llama3_8b(), recipe="mxfp8")
"""

import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import TORCH_DTYPE_MAP, derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention, VarlenMetadata
from torchtitan.tools import utils

import lowbit_attn.ops  # noqa: F401  registers torch.ops.lowbit_attn
from lowbit_attn.api import explain
from lowbit_attn.integrations.torchtitan import startup
from lowbit_attn.integrations.torchtitan.attention import LowbitAttention
from lowbit_attn.integrations.torchtitan.metrics import AttentionMetrics, describe, logger
from lowbit_attn.integrations.torchtitan.options import AttentionOptions, check_options, check_probe, layer_recipes

_CAUSAL = (-1, 0)
_HOME = __name__


class LowbitVarlen(LowbitAttention, VarlenAttention):
    """In place of torchtitan's inner attention. A VarlenAttention, so that the model hands it document boundaries."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """A varlen attention's, with our options."""

        options: AttentionOptions

    def __init__(self, config: Config) -> None:
        LowbitAttention.__init__(self, config.options, torch.bfloat16)  # VarlenAttention's would load a flash attention
        self.window_size = config.window_size
        self.started = False

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: VarlenMetadata,
                scale: float | None = None, enable_gqa: bool = False) -> Tensor:
        """[B, L, N, H] in and out; `enable_gqa` follows from the head counts."""
        if not self.started:
            raise RuntimeError(f"override.imports: {_HOME}.metrics is missing, which checks the run and gives every layer its "
                               "recipe; accepted: it beside the attention override")
        length = q_BLNH.shape[1]
        # Opaque to torchtitan's SPMD type checker, as its own kernels are: the output has the query's type.
        with spmd.no_typecheck():
            query, key, value = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
            output = self.attend_packed(query, key, value, attention_masks.cu_seq_q, attention_masks.cu_seq_k, length, length,
                                        scale=scale).view(q_BLNH.shape)
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            spmd.assert_type(output, spmd.get_local_type(q_BLNH), get_partition_spec(q_BLNH))
        return output


def _options(values: dict[str, Any]) -> AttentionOptions:
    names = [f.name for f in fields(AttentionOptions)]
    for name in values:
        if name not in names:
            raise ValueError(f"override.imports: got option {name!r} for {_HOME}.attention; accepted: {', '.join(names)}")
    if not isinstance(values.get("layers", ""), str):
        values = {**values, "layers": json.dumps(values["layers"])}  # JSON's own list of rules is YAML too
    options = AttentionOptions(**values)
    check_options(options)
    return options


@override(target=FlexAttention.Config, description="low-bit attention in place of flex attention")
def attention(cfg: FlexAttention.Config, **options: Any) -> LowbitVarlen.Config:
    """Options are those of `AttentionOptions`; `layers` may be a list of rules."""
    if type(cfg) is not FlexAttention.Config:
        raise ValueError(f"inner_attention: got {type(cfg).__qualname__}, whose additions low-bit attention would drop; "
                         "lowbit_attn accepts: FlexAttention.Config")
    stock = FlexAttention.Config()
    for name in ("block_size", "kernel_options"):
        if getattr(cfg, name) != getattr(stock, name):
            logger.warning(f"inner_attention.{name}: {getattr(cfg, name)!r} tunes flex attention and is not used")
    return derive(cfg, LowbitVarlen.Config, options=_options(options))


@override(target=VarlenAttention.Config, exact=True, description="low-bit attention in place of varlen attention")
def varlen_attention(cfg: VarlenAttention.Config, **options: Any) -> LowbitVarlen.Config:
    """Options are those of `AttentionOptions`; `layers` may be a list of rules."""
    if tuple(cfg.window_size) != _CAUSAL:
        raise ValueError(f"inner_attention.window_size: got {tuple(cfg.window_size)}; lowbit_attn accepts: {_CAUSAL} (causal, "
                         "without a sliding window)")
    return derive(cfg, LowbitVarlen.Config, options=_options(options))


class LowbitSAC(SelectiveAC):
    """Selective checkpointing that also saves our output, so that the backward does not run our forward again."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """SelectiveAC's."""

    def get_save_ops(self) -> set[Any]:
        """torchtitan's, and ours."""
        ops = torch.ops.lowbit_attn
        return SelectiveAC.get_save_ops(self) | {ops.attention_forward.default, ops.varlen_attention_forward.default}


@override(target=SelectiveAC.Config, description="save low-bit attention's output")
def sac(cfg: SelectiveAC.Config) -> LowbitSAC.Config:
    """For torchtitan's own policy; a subclass must save our operators itself."""
    if type(cfg) is not SelectiveAC.Config:
        raise ValueError(f"activation_checkpoint: got {type(cfg).__qualname__}; lowbit_attn accepts: SelectiveAC.Config, or leave "
                         f"{_HOME}.sac out and add torch.ops.lowbit_attn.varlen_attention_forward.default to its get_save_ops")
    return derive(cfg, LowbitSAC.Config)


class LowbitMetrics(AttentionMetrics, MetricsProcessor):
    """torchtitan's metrics processor, which also checks the run at start-up and logs recipes and the numerics probe."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """MetricsProcessor's."""

    def __init__(self, config: Config, *, parallel_dims: Any, config_dict: dict[str, Any] | None = None, **others: Any) -> None:
        assert config_dict is not None, "torchtitan's trainer passes its whole config"
        self._settings = config_dict
        self._model_parts: list[nn.Module] | None = None
        _check_settings(config_dict, parallel_dims)
        super().__init__(config, parallel_dims=parallel_dims, config_dict=config_dict, **others)

    @property
    def model_parts(self) -> list[nn.Module] | None:  # type: ignore[override]
        """The trainer sets it once, when models are parallel and initialized and no data has been read: our start-up."""
        return self._model_parts

    @model_parts.setter
    def model_parts(self, parts: list[nn.Module] | None) -> None:
        self._model_parts = parts
        if parts is not None:
            _start(parts, self._settings)


@override(target=MetricsProcessor.Config, description="start-up checks of low-bit attention, its recipes and numerics in the log")
def metrics(cfg: MetricsProcessor.Config) -> LowbitMetrics.Config:
    """For torchtitan's own metrics processor; one of the user's own builds on `LowbitMetrics` and is left as it is."""
    if isinstance(cfg, LowbitMetrics.Config):
        return cfg
    if type(cfg) is not MetricsProcessor.Config:
        raise ValueError(f"metrics: got {type(cfg).__qualname__}; lowbit_attn accepts: MetricsProcessor.Config, or a subclass of "
                         f"{_HOME}.LowbitMetrics.Config")
    return derive(cfg, LowbitMetrics.Config)


def enable(config: Any, **options: Any) -> Any:
    """Turn low-bit attention on in a `Trainer.Config`, for config functions of one's own; returns the same config.

    Args:
        config: as a function of a torchtitan config_registry returns it; its `override.imports` are kept, and its CUDA graphs
            turned off (low-bit attention refuses them).
        options: those of `AttentionOptions`; `layers` may be a list of rules.
    """
    _options(options)
    config.override.imports = [*config.override.imports, (f"{_HOME}.attention", options), (f"{_HOME}.varlen_attention", options),
                               f"{_HOME}.sac", f"{_HOME}.metrics"]
    config.training.disable_cuda_graphs = True
    return config


def _check_settings(settings: dict[str, Any], parallel_dims: Any) -> None:
    """What the config alone tells."""
    startup.check_context_parallel(parallel_dims.cp)
    if parallel_dims.pp > 1 and "kwarg_mbs" not in inspect.signature(PipelineScheduleSingle.step).parameters:
        raise NotImplementedError(f"parallelism.pipeline_parallel_degree: got {parallel_dims.pp} with torch {torch.__version__}, "
                                  "whose pipelines do not take a microbatch's documents; accepted: 1, or a torch from 2.14")
    training = settings["training"]
    startup.check_precision(training["dtype"], training["mixed_precision_param"])
    if not training["disable_cuda_graphs"]:
        raise NotImplementedError("training.disable_cuda_graphs: got False; CUDA graphs need inputs of one shape, and the number "
                                  "of document boundaries changes from step to step; lowbit_attn accepts: "
                                  "--training.disable_cuda_graphs")
    active = [entry if isinstance(entry, str) else entry[0] for entry in settings["override"]["imports"]]
    checkpointing = settings["activation_checkpoint"]
    if checkpointing is not None and "force_recompute_mm_shapes_by_fqns" in checkpointing and f"{_HOME}.sac" not in active:
        logger.warning(f"{_HOME}.sac is not among override.imports. Unless the activation checkpointing policy saves "
                       "torch.ops.lowbit_attn.varlen_attention_forward.default itself, the backward runs attention's forward again")
    if checkpointing is not None and "memory_budget" in checkpointing:
        logger.warning(startup.MEMORY_BUDGET)
    if utils.device_type != "cpu" and not hasattr(torch.distributed, "set_timeout"):
        raise RuntimeError(f"torch: found {torch.__version__}, which has no torch.distributed.set_timeout; torchtitan 0.3.x calls "
                           "it after the first step; accepted: a torch that has it (2.14)")


def _start(parts: Iterable[nn.Module], settings: dict[str, Any]) -> None:
    """Check the model, give every layer its recipe, and let it run."""
    spec = settings["model_spec"]
    name = f"{spec['name']} {spec['flavor']}"
    layers = [layer for part in parts for layer in _layers(part, name)]
    if not layers:
        return  # a pipeline stage without blocks
    first = layers[0][1]
    options = first.inner_attention.options
    recipes = layer_recipes(options, len(spec["model"]["layers"]))
    check_probe(options, recipes, settings["metrics"]["log_freq"])
    for _, site in layers:
        site.inner_attention.compute_dtype = TORCH_DTYPE_MAP[settings["training"]["mixed_precision_param"]]
    heads = startup.Heads(first.n_heads, first.n_kv_heads, first.head_dim)
    startup.check_heads(heads, name)
    startup.try_once(first.inner_attention, heads, recipes, utils.device_type, packed=True)
    startup.assign(((index, site.inner_attention) for index, site in layers), recipes, options)
    for _, site in layers:
        site.inner_attention.started = True
    for part in parts:
        part.register_forward_pre_hook(startup.DocumentCheck(settings["training"]["seq_len"]), with_kwargs=True)
    logger.info(f"{describe(options, recipes)}. {explain(options.recipe, utils.device_type)}")


def _layers(model: Any, name: str) -> list[tuple[int, Any]]:
    """Index and attention of every layer of a model (part); ValueError for attention that ours does not stand in for."""
    found = [(int(index), site) for index, block in model.layers.named_children() for site in block.modules()
             if "inner_attention" in site._modules]
    for index, site in found:
        if type(site) is not GQAttention:
            kind = f"{type(site).__module__}.{type(site).__name__}"
            raise ValueError(f"model: got {name!r}, whose layer {index} is {kind}: its masks, windows or head dims may be its own; "
                             "lowbit_attn accepts models built from GQAttention alone: llama3, qwen3")
        if not isinstance(site.inner_attention, LowbitVarlen):
            raise ValueError(f"inner_attention: got {type(site.inner_attention).__name__} in layer {index} of {name!r}; accepted: "
                             f"{_HOME}.attention (for flex) or {_HOME}.varlen_attention (for varlen) among override.imports")
    return found


__all__ = ["LowbitMetrics", "LowbitSAC", "LowbitVarlen", "attention", "enable", "metrics", "sac", "varlen_attention"]
