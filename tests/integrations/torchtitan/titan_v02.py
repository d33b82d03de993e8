"""Parts of torchtitan 0.2.x for tests that do without its trainer."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from titan_runs import CONFIG, LAYERS
from torchtitan.protocols.train_spec import get_train_spec

import lowbit_attn.integrations.torchtitan.demo  # noqa: F401  registers llama3_bytes and its data
from lowbit_attn.integrations.torchtitan import AttentionOptions, LowbitConverter

DEFAULTS = AttentionOptions()


def edited_config(out_dir: Path, old: str, new: str) -> Path:
    """The shipped config with one line changed."""
    text = CONFIG.read_text()
    assert old in text
    path = out_dir / "edited.toml"
    path.write_text(text.replace(old, new))
    return path


def converter(options: AttentionOptions = DEFAULTS, *, name: str = "llama3_bytes", flavor: str = "tiny",
              dtype: str = "float32", param_dtype: str = "bfloat16", log_freq: int = 1, **dims: int) -> LowbitConverter:
    """The converter as torchtitan builds it, for a run whose parallel degrees are `dims`."""
    job_config = SimpleNamespace(
        model=SimpleNamespace(name=name, flavor=flavor), lowbit_attn=options, compile=SimpleNamespace(enable=False),
        training=SimpleNamespace(dtype=dtype, mixed_precision_param=param_dtype, seq_len=128),
        metrics=SimpleNamespace(log_freq=log_freq), validation=SimpleNamespace(seq_len=128),
        activation_checkpoint=SimpleNamespace(mode="none", selective_ac_option="op"))
    degrees = {name: dims.get(name, 1) for name in ("cp", "pp", "tp")}
    enabled = {f"{name}_enabled": degree > 1 for name, degree in degrees.items()}
    return LowbitConverter(job_config, SimpleNamespace(**degrees, **enabled))


def build_model(name: str, flavor: str, *, device: str = "cpu", **changes: Any) -> Any:
    """A torchtitan model of two layers: with seeded weights, or on "meta", as converters see it."""
    spec = get_train_spec(name)
    args = replace(spec.model_args[flavor], **{"n_layers": LAYERS, "max_seq_len": 128, **changes})
    torch.manual_seed(0)
    with torch.device(device):
        model = spec.model_cls(args)
    if device == "cpu":
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device("cpu"))
    return model
