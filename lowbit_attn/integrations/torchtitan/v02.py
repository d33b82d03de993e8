"""torchtitan 0.2.x: the config section, the inner attention modules its models call, and the model converter."""

import inspect
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.attention import VarlenMetadata
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import _extra_train_specs, get_train_spec, register_train_spec
from torchtitan.tools import utils

import lowbit_attn.ops  # noqa: F401  registers torch.ops.lowbit_attn
from lowbit_attn.api import explain
from lowbit_attn.integrations.torchtitan import startup
from lowbit_attn.integrations.torchtitan.attention import LowbitAttention
from lowbit_attn.integrations.torchtitan.metrics import AttentionMetrics, describe, logger
from lowbit_attn.integrations.torchtitan.options import AttentionOptions, check_options, check_probe, layer_recipes

NAME = "lowbit_attn"
_SUPPORTED = ("llama3", "llama4", "qwen3")
_REASONS = {
    "deepseek_v3": "multi-head latent attention has different head dims for q and v",
    "gpt_oss": "it uses flex attention with sliding windows and attention sinks",
    "flux": "its joint attention is not a causal language model's",
}


@dataclass
class JobConfig:
    """What `job.custom_config_module` adds to torchtitan's JobConfig."""

    lowbit_attn: AttentionOptions = field(default_factory=AttentionOptions)


class LowbitSDPA(LowbitAttention):
    """In place of torchtitan's ScaledDotProductAttentionWrapper."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, enable_gqa: bool = False,
                is_causal: bool = True) -> Tensor:
        """[B, H, L, D] in and out; `enable_gqa` follows from the head counts."""
        return self.attend(q, k, v, is_causal=is_causal, scale=scale)


class LowbitVarlen(LowbitAttention):
    """In place of torchtitan's VarlenAttentionWrapper."""

    def forward(self, xq: Tensor, xk: Tensor, xv: Tensor, attention_masks: VarlenMetadata,
                scale: float | None = None) -> Tensor:
        """[B, H, L, D] in, packed [B * L, H, D] out."""
        # Documents end with their row, so L bounds them: unlike max_q it is the same at every step, and compiles once.
        length = xq.shape[2]
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (xq, xk, xv))
        return self.attend_packed(query, key, value, attention_masks.cu_seq_q, attention_masks.cu_seq_k, length, length,
                                  scale=scale)


class LowbitMetrics(AttentionMetrics, MetricsProcessor):
    """torchtitan's metrics processor, which also logs recipes and the numerics probe."""


def build_metrics_processor(job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None) -> Any:
    """For `TrainSpec.build_metrics_processor_fn`: torchtitan's processor, with ours on top where our converter runs."""
    processor = LowbitMetrics if NAME in job_config.model.converters else MetricsProcessor
    return processor(job_config, parallel_dims, tag)


class LowbitConverter:
    """torchtitan model converter "lowbit_attn": every inner attention of the model becomes ours, before parallelization.

    Everything that cannot run is refused here, before the model changes and before any data is read.
    """

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        startup.check_context_parallel(parallel_dims.cp)
        startup.check_precision(job_config.training.dtype, job_config.training.mixed_precision_param)
        self.options: AttentionOptions = getattr(job_config, NAME, AttentionOptions())
        check_options(self.options)
        self.job_config = job_config
        self.parallel_dims = parallel_dims
        self.compute_dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]

    def convert(self, model: nn.Module) -> None:
        """Replace the inner attention of every block, or raise and leave the model as it is."""
        sites = self._attention_sites(model)
        attn_type = self._attention_type(model)
        self._check_parallelism(sites[0], attn_type)
        recipes = layer_recipes(self.options, len(sites))
        check_probe(self.options, recipes, self.job_config.metrics.log_freq)
        self._check_metrics()
        saved_ops = self._saved_ops()
        replacement = LowbitVarlen if attn_type == "varlen" else LowbitSDPA
        heads = startup.Heads(sites[0].n_heads, sites[0].n_kv_heads, sites[0].head_dim)
        startup.check_heads(heads, self.job_config.model.flavor)
        startup.try_once(replacement(self.options, self.compute_dtype), heads, recipes, utils.device_type,
                         packed=attn_type == "varlen")

        for site in sites:
            site.inner_attention = replacement(self.options, self.compute_dtype)
        startup.assign(enumerate(site.inner_attention for site in sites), recipes, self.options)
        saved_ops |= {torch.ops.lowbit_attn.attention_forward.default, torch.ops.lowbit_attn.varlen_attention_forward.default}
        if attn_type == "varlen":
            seq_len = max(self.job_config.training.seq_len, self.job_config.validation.seq_len)
            model.register_forward_pre_hook(startup.DocumentCheck(seq_len), with_kwargs=True)
        logger.info(f"{describe(self.options, recipes)} ({attn_type}). {explain(self.options.recipe, utils.device_type)}")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing to update after an optimizer step."""

    def _attention_sites(self, model: nn.Module) -> list[Any]:
        """The attention module of every layer, in order."""
        sites = [module for module in model.modules() if hasattr(module, "inner_attention")]
        if not sites or not all(_is_supported(site) for site in sites):
            name = self.job_config.model.name
            reason = f" ({_REASONS[name]})" if name in _REASONS else ""
            raise ValueError(f"model.name: got {name!r}{reason}; lowbit_attn accepts models with the attention of: "
                             f"{', '.join(_SUPPORTED)}")
        return sites

    def _attention_type(self, model: Any) -> str:
        """The model's attn_type, once it and its mask type are known to mean what our modules compute."""
        args, flavor = model.model_args, f"model.flavor {self.job_config.model.flavor!r}"
        if args.attn_type not in ("sdpa", "varlen"):
            raise ValueError(f"attn_type: got {args.attn_type!r} from {flavor}; lowbit_attn accepts: 'varlen' (packed "
                             "documents, as in flavor 'debugmodel_varlen_attn') or 'sdpa' (plain causal)")
        expected = {"sdpa": "causal", "varlen": "block_causal"}[args.attn_type]
        if args.attn_mask_type != expected:
            raise ValueError(f"attn_mask_type: got {args.attn_mask_type!r} from {flavor}, whose attn_type {args.attn_type!r} "
                             f"does not apply it; lowbit_attn accepts: {expected!r}, or another attn_type")
        return args.attn_type

    def _check_parallelism(self, site: Any, attn_type: str) -> None:
        dims = self.parallel_dims
        if dims.pp_enabled and attn_type == "varlen":
            raise NotImplementedError(
                f"parallelism.pipeline_parallel_degree: got {dims.pp} with attn_type 'varlen', whose document boundaries "
                "torchtitan would split between microbatches; lowbit_attn accepts: 1, or attn_type 'sdpa'")
        if dims.tp_enabled and _is_a(site, "qwen3"):
            raise NotImplementedError(
                f"parallelism.tensor_parallel_degree: got {dims.tp} with model.name 'qwen3', which passes DTensors to its "
                "attention; lowbit_attn accepts: 1")

    def _check_metrics(self) -> None:
        """The processor that logs ours is reached through the model's train spec; a spec of the user's own may lack it."""
        name = self.job_config.model.name
        if get_train_spec(name).build_metrics_processor_fn is build_metrics_processor:
            return
        remedy = (f"build_metrics_processor_fn of the TrainSpec of model.name {name!r}: got another; accepted: "
                  "lowbit_attn.integrations.torchtitan.build_metrics_processor")
        if self.options.probe_every:
            raise ValueError(f"lowbit_attn.probe_every: got {self.options.probe_every}, which has no log to write to. {remedy}")
        logger.warning(f"recipes will not be in the metrics log. {remedy}")

    def _saved_ops(self) -> set[Any]:
        """The set of operators that selective checkpointing saves in this model's parallelize function."""
        function = inspect.unwrap(get_train_spec(self.job_config.model.name).parallelize_fn)
        saved = getattr(sys.modules[function.__module__], "_op_sac_save_list", None)
        checkpoint = self.job_config.activation_checkpoint
        if checkpoint.mode == "memory_budget":
            logger.warning(startup.MEMORY_BUDGET)
        if saved is None and checkpoint.mode == "selective" and checkpoint.selective_ac_option == "op":
            raise ValueError(f"activation_checkpoint.selective_ac_option: got 'op', but {function.__module__} has no list of "
                             "saved operators to join; lowbit_attn accepts: a layer frequency, or mode 'full' or 'none'")
        return set() if saved is None else saved


def _is_a(site: nn.Module, model: str) -> bool:
    home = f"torchtitan.models.{model}.model.model"
    return any(cls.__module__ == home and cls.__name__ == "Attention" for cls in type(site).__mro__)


def _is_supported(site: nn.Module) -> bool:
    return any(_is_a(site, model) for model in _SUPPORTED)


def _register_train_specs() -> None:
    """torchtitan's own train specs with our metrics processor, and the flavor that it lacks."""
    for name in _SUPPORTED:
        if name in _extra_train_specs:  # the user's own
            continue
        try:
            spec = get_train_spec(name)
        except (ImportError, AttributeError):
            continue  # a model that cannot be imported with this torch cannot be trained either
        flavors = {**spec.model_args, **_extra_flavors(name, spec.model_args)}
        register_train_spec(name, replace(spec, model_args=flavors, build_metrics_processor_fn=build_metrics_processor))


def _extra_flavors(name: str, flavors: Any) -> dict[str, Any]:
    """`1B_varlen`: the size of FLAMIA's pretraining (section 4.6), as Llama 3.2 1B with FLAMIA's head_dim of 128."""
    if name != "llama3":
        return {}
    return {"1B_varlen": replace(flavors["8B_varlen"], dim=2048, n_layers=16, n_heads=16, n_kv_heads=8, ffn_dim_multiplier=1.5)}


register_model_converter(LowbitConverter, NAME)
_register_train_specs()

__all__ = ["JobConfig", "LowbitConverter", "LowbitMetrics", "LowbitSDPA", "LowbitVarlen", "build_metrics_processor"]
