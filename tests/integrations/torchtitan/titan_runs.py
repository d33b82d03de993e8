"""Tiny runs of torchtitan's own trainer in whichever release line is installed, and counting of our operators in them."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from lowbit_attn.integrations.torchtitan.launch import StepRecord, train
from lowbit_attn.integrations.torchtitan.versions import release_line

LINE = release_line()
CONFIGS = Path(__file__).parents[3] / "configs"
CONFIG = CONFIGS / "torchtitan-llama3-debug-mxfp8.toml"
VARLEN_FORWARD = "lowbit_attn.varlen_attention_forward.default"
VARLEN_BACKWARD = "lowbit_attn.varlen_attention_backward.default"
LAYERS = 2
DEVICE = os.environ.get("TITAN_TEST_DEVICE", "cpu")
"""Where `run` trains: "cpu", or "accelerator" for the tests of a machine that has one."""


class OpCalls(TorchDispatchMode):
    """Counts the operators that really run, below checkpointing's own cache, and keeps their recipes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.recipes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("lowbit_attn."):
            self.count[str(func)] += 1
            self.recipes.update(argument for argument in args if isinstance(argument, str) and argument != "reference")
        return func(*args, **(kwargs or {}))


def run(out_dir: Path, *, steps: int = 2, seq_len: int = 96, checkpointing: str = "selective",
        options: dict[str, Any] | None = None, dataset_path: Path | str | None = None, dataset: str | None = None,
        on_step: Callable[[StepRecord], None] | None = None, flavor: str = "tiny", **settings: Any) -> list[StepRecord]:
    """Train the byte-level model.

    Args:
        options: of `AttentionOptions`.
        flavor: "tiny" or "small"; "tiny_sdpa" (0.2.x) is plain causal.
        settings: `section__key=value` of torchtitan's config, by names that both lines share.
    """
    settings = {"training__steps": steps, "training__seq_len": seq_len, "debug__seed": 0, "metrics__log_freq": 1, **settings}
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    build = _config_v02 if LINE == "0.2" else _config_v03
    config = build(flavor, out_dir, dotted, options or {}, checkpointing, str(dataset_path) if dataset_path else None, dataset)
    return train(config, on_step=on_step, device="cpu" if DEVICE == "cpu" else None)


def _config_v02(flavor: str, out_dir: Path, settings: dict[str, Any], options: dict[str, Any], checkpointing: str,
                dataset_path: str | None, dataset: str | None) -> Any:
    from torchtitan.config import ConfigManager

    settings = {"job.config_file": CONFIG, "job.dump_folder": out_dir, "model.flavor": flavor,
                "activation_checkpoint.mode": checkpointing, "training.dataset_path": dataset_path, "training.dataset": dataset,
                **{f"lowbit_attn.{name}": value for name, value in options.items()}, **settings}
    config = ConfigManager().parse_args(
        [f"--{name}" if value is True else f"--{name}={','.join(value) if isinstance(value, list) else value}"
         for name, value in settings.items() if value is not None and value is not False and value != []])
    for name, value in settings.items():
        if value is False or value == []:  # which a command line cannot say by the same name
            section, key = name.split(".")
            setattr(getattr(config, section), key, value)
    return config


def _config_v03(flavor: str, out_dir: Path, settings: dict[str, Any], options: dict[str, Any], checkpointing: str,
                dataset_path: str | None, dataset: str | None) -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from lowbit_attn.integrations.torchtitan import enable, models_v03

    config = getattr(models_v03, f"llama3_bytes_{flavor}")()
    config.override.imports = []
    enable(config, **options)
    config.dump_folder = str(out_dir)
    config.activation_checkpoint = {"selective": SelectiveAC.Config(), "full": FullAC.Config(), "none": None}[checkpointing]
    config.dataloader.dataset_path = dataset_path
    if dataset is not None:
        config.dataloader.dataset = dataset
    for name, value in settings.items():
        section, key = name.split(".")
        assert hasattr(getattr(config, section), key), name
        setattr(getattr(config, section), key, value)
    return config
