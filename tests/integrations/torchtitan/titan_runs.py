"""Tiny runs of torchtitan's own trainer, and counting of our operators in them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.protocols.train_spec import get_train_spec

from lowbit_attn.integrations.torchtitan import AttentionOptions, LowbitConverter
from lowbit_attn.integrations.torchtitan.launch import StepRecord, train

CONFIG = Path(__file__).parents[3] / "configs" / "torchtitan-llama3-debug-mxfp8.toml"
VARLEN_FORWARD = "lowbit_attn.varlen_attention_forward.default"
VARLEN_BACKWARD = "lowbit_attn.varlen_attention_backward.default"
LAYERS = 2
DEFAULTS = AttentionOptions()


class OpCalls(TorchDispatchMode):
    """Counts the operators that really run, below checkpointing's own cache, and keeps their recipes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.recipes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("lowbit_attn."):
            self.count[str(func)] += 1
            self.recipes |= {argument for argument in args if isinstance(argument, str) and argument != "reference"}
        return func(*args, **(kwargs or {}))


def run(out_dir: Path, *args: str, config: Path = CONFIG, steps: int = 2, seq_len: int = 96) -> list[StepRecord]:
    """Train the tiny flavor of the shipped config."""
    return train([f"--job.config_file={config}", f"--job.dump_folder={out_dir}", "--model.flavor=tiny",
                  f"--training.steps={steps}", f"--training.seq_len={seq_len}", *args])


def edited_config(out_dir: Path, old: str, new: str) -> Path:
    """The shipped config with one line changed."""
    text = CONFIG.read_text()
    assert old in text
    path = out_dir / "edited.toml"
    path.write_text(text.replace(old, new))
    return path


def converter(options: AttentionOptions = DEFAULTS, *, name: str = "llama3_bytes", flavor: str = "tiny",
              dtype: str = "float32", param_dtype: str = "bfloat16", **dims: int) -> LowbitConverter:
    """The converter as torchtitan builds it, for a run whose parallel degrees are `dims`."""
    job_config = SimpleNamespace(
        model=SimpleNamespace(name=name, flavor=flavor), lowbit_attn=options, compile=SimpleNamespace(enable=False),
        training=SimpleNamespace(dtype=dtype, mixed_precision_param=param_dtype, seq_len=128),
        metrics=SimpleNamespace(log_freq=1), validation=SimpleNamespace(seq_len=128),
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
