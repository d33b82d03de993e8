"""A small byte-level Llama for torchtitan 0.2.x, on real text that every machine has.

Importing this module registers, with torchtitan, the model `llama3_bytes` and the datasets of `documents`, so a TOML reaches
them with `experimental.custom_import`. torchtitan's own dataloader packs documents and ends each with EOS, where packed
attention (attn_type "varlen") cuts.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3 import get_train_spec as llama3_train_spec
from torchtitan.protocols.train_spec import register_train_spec

from lowbit_attn.integrations.torchtitan import documents
from lowbit_attn.integrations.torchtitan.documents import TRAINING, VALIDATION, ByteTokenizer
from lowbit_attn.integrations.torchtitan.launch import StepRecord, train
from lowbit_attn.integrations.torchtitan.v02 import build_metrics_processor

MODEL = "llama3_bytes"


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
    documents.register()
    register_train_spec(MODEL, replace(llama3_train_spec(), model_args=MODELS, state_dict_adapter=None,
                                       build_tokenizer_fn=lambda job_config: ByteTokenizer(),
                                       build_metrics_processor_fn=build_metrics_processor))


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


__all__ = ["MODEL", "MODELS", "train_demo"]
