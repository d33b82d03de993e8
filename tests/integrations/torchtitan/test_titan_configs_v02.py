"""Every TOML that is shipped starts, at the size of a test."""

from dataclasses import replace
from pathlib import Path

import pytest
from titan_runs import CONFIGS
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

from lowbit_attn.integrations.torchtitan import demo
from lowbit_attn.integrations.torchtitan.documents import TRAINING, ByteTokenizer
from lowbit_attn.integrations.torchtitan.launch import train

FILES = sorted(CONFIGS.glob("torchtitan-*.toml"))
LAYERS = 4


def test_three_sizes_are_shipped() -> None:
    assert [file.name for file in FILES] == [f"torchtitan-llama3-{size}-mxfp8.toml" for size in ("1b", "8b", "debug")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_config_starts(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 caplog: pytest.LogCaptureFixture) -> None:
    config = ConfigManager().parse_args([f"--job.config_file={file}"])
    spec = get_train_spec(config.model.name)
    full = spec.model_args[config.model.flavor]
    assert full.dim // full.n_heads == (64 if config.model.name == demo.MODEL else 128)
    small = replace(full, dim=2 * full.dim // full.n_heads, n_layers=LAYERS, n_heads=2, n_kv_heads=1, multiple_of=64,
                    ffn_dim_multiplier=None, vocab_size=ByteTokenizer.vocab_size, eos_id=ByteTokenizer.eos_id)
    monkeypatch.setattr(spec, "model_args", {config.model.flavor: small})
    monkeypatch.setattr(spec, "build_tokenizer_fn", lambda job_config: ByteTokenizer())
    monkeypatch.setattr(spec, "state_dict_adapter", None)
    config.job.dump_folder, config.model.hf_assets_path = str(tmp_path), "."
    config.training.dataset, config.training.seq_len, config.training.local_batch_size, config.training.steps = TRAINING, 96, 2, 2
    config.compile.backend, config.checkpoint.enable, config.metrics.log_freq = "aot_eager", False, 1
    caplog.set_level("INFO")
    records = train(config, device="cpu")
    assert [record.step for record in records] == [1, 2]
    expected = "bf16 in 2 layers, mxfp8 in 2 layers" if "8b" in file.name else "mxfp8 in 4 layers"
    assert f"attention: {expected}" in caplog.text


def test_the_flavor_of_1b_has_the_size_that_its_name_says() -> None:
    """Llama 3.2 1B without tied embeddings."""
    import torch

    spec = get_train_spec("llama3")
    with torch.device("meta"):
        model = spec.model_cls(replace(spec.model_args["1B_varlen"], max_seq_len=64))
    parameters = sum(parameter.numel() for parameter in model.layers.parameters())
    assert 0.9e9 < parameters < 1.1e9
