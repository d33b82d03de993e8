"""A small byte-level Llama on real text that every machine has: the Python standard library's own source files.

Importing this module registers, with torchtitan, the model `llama3_bytes` and the datasets `python_stdlib` and
`python_stdlib_validation`, so a TOML reaches them with `experimental.custom_import`. One file is one document; torchtitan's own
dataloader packs documents and ends each with EOS, where packed attention (attn_type "varlen") cuts.
"""

import random
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset  # type: ignore[import-untyped]
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3 import get_train_spec as llama3_train_spec
from torchtitan.protocols.train_spec import register_train_spec

from lowbit_attn.integrations.torchtitan.launch import StepRecord, train

MODEL, TRAINING, VALIDATION = "llama3_bytes", "python_stdlib", "python_stdlib_validation"

# Files are chosen small, so that rows of a few hundred tokens hold document boundaries.
MAX_FILE_BYTES = 4096
VALIDATION_EVERY = 10
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes as tokens, and three specials after them."""

    bos_id, eos_id, pad_id = 256, 257, 258
    vocab_size = 264  # 259 in use; a multiple of 8 keeps the output projection aligned

    def __init__(self) -> None:
        """Keeps the ids of the class: the base class would reset eos_id."""

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """The bytes of `text` between BOS and EOS."""
        return [self.bos_id] * add_bos + list(text.encode()) + [self.eos_id] * add_eos

    def decode(self, tokens: list[int]) -> str:
        """Text of the tokens that are bytes."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.vocab_size


def source_files(root: str | Path) -> list[Path]:
    """Python sources under `root`, not empty and at most MAX_FILE_BYTES long; no tests, no installed packages."""
    root = Path(root)
    return [path for path in sorted(root.rglob("*.py"))
            if not _NOT_SOURCES & set(path.relative_to(root).parts) and 0 < path.stat().st_size <= MAX_FILE_BYTES]


def load_documents(root: str | Path, validation: bool) -> Dataset:
    """The contents of `source_files` in an order that is always the same; every tenth file is held out for validation."""
    files = source_files(root)
    random.Random(0).shuffle(files)
    chosen = [path for index, path in enumerate(files) if (index % VALIDATION_EVERY == 0) == validation]
    if not chosen:
        raise ValueError(f"dataset_path: found no Python source of at most {MAX_FILE_BYTES} bytes under {str(root)!r}; "
                         "accepted: a folder with at least two")
    return Dataset.from_dict({"text": [path.read_text(encoding="utf-8", errors="replace") for path in chosen]})


def _model(**changes: Any) -> TransformerModelArgs:
    return TransformerModelArgs(**{"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 64,
                                   "rope_theta": 500000, "vocab_size": ByteTokenizer.vocab_size, "attn_type": "varlen",
                                   "attn_mask_type": "block_causal", "eos_id": ByteTokenizer.eos_id, **changes})


MODELS = {
    "small": _model(),
    "tiny": _model(dim=128, n_layers=2, n_heads=2, n_kv_heads=1),
    "tiny_sdpa": _model(dim=128, n_layers=2, n_heads=2, n_kv_heads=1, attn_type="sdpa", attn_mask_type="causal"),
}
"""Flavors of `llama3_bytes`; head_dim is 64."""


def _register() -> None:
    standard_library = sysconfig.get_paths()["stdlib"]
    for name, validation in ((TRAINING, False), (VALIDATION, True)):
        DATASETS[name] = DatasetConfig(standard_library, partial(load_documents, validation=validation),
                                       lambda sample: sample["text"])
    register_train_spec(MODEL, replace(llama3_train_spec(), model_args=MODELS, state_dict_adapter=None,
                                       build_tokenizer_fn=lambda job_config: ByteTokenizer()))


_register()


def train_demo(recipe: str, steps: int, out_dir: str | Path, on_step: Callable[[StepRecord], None] | None = None, *,
               flavor: str = "small", seq_len: int = 512, batch_size: int = 2, seed: int = 0, validation_steps: int = 8,
               device: str | None = None) -> list[StepRecord]:
    """Train `llama3_bytes` on packed standard library sources; runs differ only in `recipe`.

    The model, its initial weights, the packed documents and the document mask depend on the other arguments alone, so "bf16"
    (torch SDPA under the same block-diagonal mask) is the baseline of every other recipe.

    Args:
        recipe: of attention, see `lowbit_attn.recipe_names`.
        steps: to train; the last record also carries the held-out `validation_loss` if `validation_steps` > 0.
        out_dir: torchtitan's dump folder.
        on_step: called with each step's record.
        validation_steps: batches of the held-out files.

    Returns:
        One record for each step.
    """
    args = [
        "--job.custom_config_module=lowbit_attn.integrations.torchtitan",
        "--experimental.custom_import=lowbit_attn.integrations.torchtitan.demo",
        f"--job.dump_folder={out_dir}", f"--model.name={MODEL}", f"--model.flavor={flavor}", "--model.converters=lowbit_attn",
        "--model.hf_assets_path=.",  # unused: the tokenizer has no files
        f"--lowbit_attn.recipe={recipe}", f"--training.dataset={TRAINING}", f"--training.seq_len={seq_len}",
        f"--training.local_batch_size={batch_size}", f"--training.steps={steps}", "--optimizer.lr=1e-3",
        f"--lr_scheduler.warmup_steps={max(1, steps // 10)}", "--activation_checkpoint.mode=none", "--metrics.log_freq=1",
        f"--debug.seed={seed}", "--comm.trace_buf_size=0",
    ]
    if validation_steps > 0:
        args += ["--validation.enable", f"--validation.dataset={VALIDATION}", f"--validation.seq_len={seq_len}",
                 f"--validation.local_batch_size={batch_size}", f"--validation.freq={steps}",
                 f"--validation.steps={validation_steps}"]
    return train(args, on_step=on_step, device=device)


__all__ = ["MODEL", "MODELS", "TRAINING", "VALIDATION", "ByteTokenizer", "load_documents", "source_files", "train_demo"]
