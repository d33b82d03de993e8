"""Every config function that is shipped starts, at the size of a test."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from titan_runs import CONFIGS

from lowbit_attn.integrations.torchtitan import documents
from lowbit_attn.integrations.torchtitan.documents import TRAINING, ByteTokenizer
from lowbit_attn.integrations.torchtitan.launch import train
from lowbit_attn.integrations.torchtitan.models_v03 import llama3_spec

LAYERS = 4


def _shipped() -> Any:
    spec = importlib.util.spec_from_file_location("torchtitan_v03_llama3", CONFIGS / "torchtitan_v03_llama3.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "head_dim"), [("llama3_debug_mxfp8", 64), ("llama3_1b_mxfp8", 128), ("llama3_8b_mxfp8", 128)])
def test_a_shipped_config_starts(name: str, head_dim: int, tmp_path: Path) -> None:
    documents.register()
    function: Callable[[], Any] = getattr(_shipped(), name)
    config = function()
    model = config.model_spec.model
    assert model.dim // model.layers[0].attention.n_heads == head_dim
    small = llama3_spec("small", dim=2 * head_dim, n_layers=LAYERS, n_heads=2, n_kv_heads=1, vocab_size=ByteTokenizer.vocab_size,
                        multiple_of=64, attn_backend="flex")
    config.model_spec = replace(small, state_dict_adapter=None)
    config.dump_folder, config.hf_assets_path, config.tokenizer = str(tmp_path), ".", ByteTokenizer.Config()
    config.loss.loss_fn.global_vocab_size = ByteTokenizer.vocab_size
    config.dataloader.dataset, config.compile.backend, config.metrics.log_freq = TRAINING, "aot_eager", 1
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 96, 2, 2
    config.validator.enable, config.profiler.enable_profiling, config.checkpoint.enable = False, False, False
    records = train(config, device="cpu")
    assert [record.step for record in records] == [1, 2]
