"""What cannot run in 0.2.x is refused before training, by the name of the setting, and the model stays as it was."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_v02 import build_model, converter, edited_config
from torchtitan.models.attention import FlexAttentionWrapper, VarlenMetadata
from torchtitan.protocols.train_spec import get_train_spec

from lowbit_attn.integrations.torchtitan import AttentionOptions, v02
from lowbit_attn.integrations.torchtitan.launch import train


@pytest.mark.parametrize(("new", "message"), [
    ('recipe = "mxfp9"', r"lowbit_attn\.recipe: got 'mxfp9'; accepted names: bf16, mxfp8.*of these train bf16, mxfp8"),
    ('recipe = "mxfp8:max_treshold=2"', r"lowbit_attn\.recipe: recipe option: got 'max_treshold=2'"),
    ('recipe = "fused_mxfp6"', r"lowbit_attn\.recipe: got 'fused_mxfp6', which is for inference only .*; accepted: bf16, mxfp8"),
    ('recipe = "mxfp8:causal=false"', r"which cannot run under a causal mask"),
    ('recpie = "mxfp8"', r"Invalid field names.*recpie"),
    ('backend = "hoper"', r"backend: got 'hoper'"),
    ('recipe = "bf16"\nbackend = "reference"', r"lowbit_attn\.backend: got 'reference' with recipe 'bf16'"),
])
def test_bad_options_in_the_toml(new: str, message: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    config = edited_config(tmp_path, 'recipe = "mxfp8" ', new)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        train([f"--job.config_file={config}", f"--job.dump_folder={tmp_path}", "--model.flavor=tiny"], on_step=seen.append)
    assert not seen


@pytest.mark.parametrize(("name", "flavor", "changes", "message"), [
    ("llama3", "debugmodel_flex_attn", {}, r"attn_type: got 'flex' from model\.flavor 'debugmodel_flex_attn'"),
    ("llama3", "debugmodel", {"attn_mask_type": "block_causal"}, r"attn_mask_type: got 'block_causal'.*attn_type 'sdpa'"),
    ("llama3", "debugmodel_varlen_attn", {"attn_mask_type": "causal"}, r"attn_mask_type: got 'causal'.*attn_type 'varlen'"),
    ("llama3", "debugmodel", {"dim": 1024, "n_heads": 2}, r"512.*256"),
    ("deepseek_v3", "debugmodel", {"n_layers": 1}, r"model\.name: got 'deepseek_v3' \(multi-head latent.*llama4, qwen3"),
    ("gpt_oss", "debugmodel", {}, r"model\.name: got 'gpt_oss' \(.*sliding windows"),
])
def test_unsupported_attention(name: str, flavor: str, changes: dict[str, Any], message: str, on_cpu: None) -> None:
    model = build_model(name, flavor, device="meta", **changes)
    before = [type(module) for module in model.modules()]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        converter(name=name, flavor=flavor).convert(model)
    assert [type(module) for module in model.modules()] == before


def test_flex_attention_anywhere_in_a_supported_model_is_found(on_cpu: None) -> None:
    model = build_model("llama3", "debugmodel", device="meta")
    model.vision = FlexHolder()
    with pytest.raises(ValueError, match=r"model\.name"):
        converter(name="llama3", flavor="debugmodel").convert(model)


class FlexHolder(FlexAttentionWrapper):
    def __init__(self) -> None:
        super().__init__()
        self.inner_attention = FlexAttentionWrapper()


@pytest.mark.parametrize(("dims", "name", "flavor", "message"), [
    ({"cp": 2}, "llama3", "debugmodel", r"parallelism\.context_parallel_degree: got 2"),
    ({"pp": 2}, "llama3", "debugmodel_varlen_attn", r"parallelism\.pipeline_parallel_degree: got 2 with attn_type 'varlen'"),
    ({"tp": 2}, "qwen3", "debugmodel", r"parallelism\.tensor_parallel_degree: got 2 with model\.name 'qwen3'"),
])
def test_unsupported_parallelism(dims: dict[str, int], name: str, flavor: str, message: str, on_cpu: None) -> None:
    with pytest.raises(NotImplementedError, match=message):
        converter(name=name, flavor=flavor, **dims).convert(build_model(name, flavor, device="meta"))


@pytest.mark.parametrize(("dtypes", "message"), [
    ({"dtype": "float16"}, r"training\.dtype: got 'float16'.*accepts: float32, bfloat16"),
    ({"param_dtype": "float16"}, r"training\.mixed_precision_param: got 'float16'"),
])
def test_half_precision_weights(dtypes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        converter(**dtypes)


@pytest.mark.parametrize(("options", "message"), [
    (AttentionOptions(layers="[{blocks: 2, recipe: bf16}]"), r"lowbit_attn\.layers: .*blocks: got 2; accepted: 0 to 1"),
    (AttentionOptions(probe_every=10, probe_layer=2), r"lowbit_attn\.probe_layer: got 2; accepted: 0 to 1"),
    (AttentionOptions("bf16", probe_every=10), r"lowbit_attn\.probe_layer: got 0, which runs 'bf16'"),
    (AttentionOptions(probe_layer=1), r"lowbit_attn\.probe_layer: got 1 without lowbit_attn\.probe_every"),
    (AttentionOptions(probe_every=15), r"lowbit_attn\.probe_every: got 15 with metrics\.log_freq 10; accepted: a multiple"),
])
def test_options_that_do_not_fit_the_model(options: AttentionOptions, message: str, on_cpu: None) -> None:
    model = build_model("llama3_bytes", "tiny", device="meta")
    with pytest.raises(ValueError, match=message):
        converter(options, log_freq=10).convert(model)


def test_a_train_spec_with_other_metrics_cannot_hold_the_probe(on_cpu: None, monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(get_train_spec("llama3_bytes"), "build_metrics_processor_fn", None)
    with pytest.raises(ValueError, match=r"lowbit_attn\.probe_every: got 1.*build_metrics_processor_fn"):
        converter(AttentionOptions(probe_every=1)).convert(build_model("llama3_bytes", "tiny", device="meta"))
    converter().convert(build_model("llama3_bytes", "tiny", device="meta"))
    assert "recipes will not be in the metrics log" in caplog.text


def test_train_specs_are_extended_and_those_of_the_user_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that torchtitan cannot import with this torch does not keep the others from being registered."""
    def stock(name: str) -> Any:
        if name == "llama4":
            raise ImportError
        return importlib.import_module(f"torchtitan.models.{name}").get_train_spec()

    mine, specs = stock("qwen3"), {}
    specs["qwen3"] = mine
    monkeypatch.setattr(v02, "_extra_train_specs", specs)
    monkeypatch.setattr(v02, "get_train_spec", stock)
    monkeypatch.setattr(v02, "register_train_spec", specs.__setitem__)
    v02._register_train_specs()
    assert list(specs) == ["qwen3", "llama3"]
    assert specs["qwen3"] is mine
    assert specs["llama3"].build_metrics_processor_fn is v02.build_metrics_processor
    assert set(specs["llama3"].model_args) == {*stock("llama3").model_args, "1B_varlen"}


def test_a_memory_budget_that_may_run_the_forward_twice_is_named(on_cpu: None, caplog: pytest.LogCaptureFixture) -> None:
    ours = converter()
    ours.job_config.activation_checkpoint.mode = "memory_budget"
    ours.convert(build_model("llama3_bytes", "tiny", device="meta"))
    assert "a memory budget lets the compiler run attention's forward again" in caplog.text


def test_a_document_longer_than_its_row(on_cpu: None) -> None:
    model = build_model("llama3_bytes", "tiny")
    converter().convert(model)
    tokens = torch.zeros(2, 128, dtype=torch.long)
    boundaries = torch.tensor([0, 256], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"attention_masks\.max_q: got a document of 256 tokens with training\.seq_len 128"):
        model(tokens, attention_masks=VarlenMetadata(boundaries, boundaries, 256, 256))


def test_selective_checkpointing_without_a_list_of_saved_operators(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = converter()
    ours.job_config.activation_checkpoint.mode = "selective"
    monkeypatch.delattr("torchtitan.models.llama3.infra.parallelize._op_sac_save_list")
    with pytest.raises(ValueError, match=r"activation_checkpoint\.selective_ac_option: got 'op'"):
        ours.convert(build_model("llama3_bytes", "tiny", device="meta"))


def test_device_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device: got 'gpu'; accepted: None, 'cpu'"):
        train([], device="gpu")


def test_deterministic_reaches_the_operator(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit_attn.integrations.torchtitan import attention

    seen = []
    original = attention.varlen_attention
    monkeypatch.setattr(attention, "varlen_attention", lambda *a, **k: (seen.append(k), original(*a, **k))[1])
    converter(AttentionOptions(deterministic=True, backend="reference")).convert(build_model("llama3_bytes", "tiny"))
    assert seen[0]["deterministic"] is True
    assert seen[0]["backend"] == "reference"

