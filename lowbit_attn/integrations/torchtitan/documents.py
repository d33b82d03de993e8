"""Real text that every machine has, for both release lines: the Python standard library's own source files, as bytes.

`register` gives torchtitan the datasets `python_stdlib` and `python_stdlib_validation`. One file is one document; torchtitan's
own dataloader packs them.
"""

import random
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset  # type: ignore[import-untyped]
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

TRAINING, VALIDATION = "python_stdlib", "python_stdlib_validation"

# Files are chosen small, so that rows of a few hundred tokens hold document boundaries.
MAX_FILE_BYTES = 4096
VALIDATION_EVERY = 10
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes as tokens, and three specials after them."""

    bos_id, eos_id, pad_id = 256, 257, 258
    vocab_size = 264  # 259 in use; a multiple of 8 keeps the output projection aligned

    if hasattr(BaseTokenizer, "Config"):  # 0.3.x builds tokenizers from a config

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            """BaseTokenizer's."""

    def __init__(self, config: Any = None, *, tokenizer_path: str = "") -> None:
        """Keeps the ids of the class: the base class would reset eos_id. There are no files to load."""

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """The bytes of `text` between BOS and EOS."""
        return [self.bos_id] * add_bos + list(text.encode()) + [self.eos_id] * add_eos

    def decode(self, tokens: list[int]) -> str:
        """Text of the tokens that are bytes."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.vocab_size


def source_files(root: str | Path, max_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Python sources under `root`, not empty and at most `max_bytes` long; no tests, no installed packages."""
    root = Path(root)
    return [path for path in sorted(root.rglob("*.py"))
            if not _NOT_SOURCES & set(path.relative_to(root).parts) and 0 < path.stat().st_size <= max_bytes]


def load_documents(root: str | Path, validation: bool, max_bytes: int = MAX_FILE_BYTES) -> Dataset:
    """The contents of `source_files` in an order that is always the same; every tenth file is held out for validation."""
    files = source_files(root, max_bytes)
    random.Random(0).shuffle(files)
    chosen = [path for index, path in enumerate(files) if (index % VALIDATION_EVERY == 0) == validation]
    if not chosen:
        raise ValueError(f"dataset_path: found no Python source of at most {max_bytes} bytes under {str(root)!r}; "
                         "accepted: a folder with at least two")
    return Dataset.from_dict({"text": [path.read_text(encoding="utf-8", errors="replace") for path in chosen]})


def register(max_bytes: int = MAX_FILE_BYTES) -> None:
    """Make the datasets known to torchtitan."""
    standard_library = sysconfig.get_paths()["stdlib"]
    for name, validation in ((TRAINING, False), (VALIDATION, True)):
        DATASETS[name] = DatasetConfig(standard_library, partial(load_documents, validation=validation, max_bytes=max_bytes),
                                       lambda sample: sample["text"])


__all__ = ["MAX_FILE_BYTES", "TRAINING", "VALIDATION", "ByteTokenizer", "load_documents", "register", "source_files"]
