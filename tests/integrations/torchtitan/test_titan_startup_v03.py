"""What cannot run in 0.3.x is refused at start-up, by the name of the setting, before any data is read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import OverrideConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC, SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

from lowbit_attn.integrations.torchtitan import AttentionOptions, enable, v03
from lowbit_attn.integrations.torchtitan.launch import train
from lowbit_attn.integrations.torchtitan.models_v03 import llama3_bytes_tiny, llama3_spec
from lowbit_attn.integrations.torchtitan.startup import DocumentCheck

HOME = "lowbit_attn.integrations.torchtitan.v03"


def _config(out_dir: Path) -> Any:
    config = llama3_bytes_tiny()
    config.dump_folder, config.training.seq_len, config.training.steps = str(out_dir), 96, 1
    return config


def _refused(config: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`config` does not train: the error comes before the first batch."""
    batches: list[Any] = []
    from lowbit_attn.integrations.torchtitan.launch import Trainer

    monkeypatch.setattr(Trainer, "batch_generator", lambda self, data: batches.append(data) or iter(()))
    with pytest.raises(error, match=message):
        train(config, device="cpu")
    assert not batches


def _set(section: str, key: str, value: Any) -> Callable[[Any], None]:
    return lambda config: setattr(getattr(config, section), key, value)


def _options(**options: Any) -> Callable[[Any], None]:
    return lambda config: setattr(config.override, "imports", [(f"{HOME}.varlen_attention", options), f"{HOME}.sac",
                                                               f"{HOME}.metrics"])


def _two_heads_of(head_dim: int) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.model_spec = llama3_spec("wide", dim=2 * head_dim, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=264)

    return change


@pytest.mark.parametrize(("change", "error", "message"), [
    (_options(recipe="mxfp9"), ValueError, r"lowbit_attn\.recipe: got 'mxfp9'; accepted names: bf16, .*of these train bf16, m"),
    (_options(recipe="fused_mxfp6"), ValueError, r"lowbit_attn\.recipe: got 'fused_mxfp6', which is for inference only"),
    (_options(recpie="mxfp8"), ValueError, r"override\.imports: got option 'recpie' .*accepted: recipe, layers"),
    (_options(backend="hopper"), ValueError, r"backend: got 'hopper', which cannot run mxfp8 on cpu"),
    (_options(layers=[{"blocks": 2, "recipe": "bf16"}]), ValueError, r"lowbit_attn\.layers: .*blocks: got 2; accepted: 0 to 1"),
    (_options(probe_every=1, probe_layer=2), ValueError, r"lowbit_attn\.probe_layer: got 2; accepted: 0 to 1"),
    (_set("training", "disable_cuda_graphs", False), NotImplementedError, r"accepts: --training\.disable_cuda_graphs"),
    (_set("training", "dtype", "float16"), ValueError, r"training\.dtype: got 'float16'"),
    (_two_heads_of(264), ValueError, r"head_dim: got 264 from model 'llama3 wide'; lowbit_attn accepts: 1 to 256"),
], ids=lambda value: value if isinstance(value, str) else None)
def test_settings_that_cannot_run(change: Callable[[Any], None], error: type[Exception], message: str, tmp_path: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path)
    change(config)
    _refused(config, error, message, monkeypatch)


@pytest.mark.parametrize(("dims", "message"), [
    ({"cp": 2}, r"parallelism\.context_parallel_degree: got 2; lowbit_attn accepts: 1"),
    ({"pp": 2}, r"parallelism\.pipeline_parallel_degree: got 2 with torch .*accepted: 1, or a torch from 2\.14"),
])
def test_unsupported_parallelism(dims: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v03.PipelineScheduleSingle, "step", lambda self, *args, target=None, **kwargs: None)  # torch 2.13's
    config = _config(tmp_path)
    with pytest.raises(NotImplementedError, match=message):
        v03._check_settings(config.to_dict(), SimpleNamespace(**{"cp": 1, "pp": 1, **dims}))


def test_an_accelerator_without_set_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v03.utils, "device_type", "cuda")
    monkeypatch.delattr(torch.distributed, "set_timeout", raising=False)
    with pytest.raises(RuntimeError, match=r"torch: found .*no torch\.distributed\.set_timeout.*2\.14"):
        v03._check_settings(_config(tmp_path).to_dict(), SimpleNamespace(cp=1, pp=1))


@pytest.mark.parametrize("missing", ["varlen_attention", "metrics"])
def test_an_override_that_is_left_out_is_asked_for(missing: str, tmp_path: Path) -> None:
    config = _config(tmp_path)
    config.override.imports = [f"{HOME}.{name}" for name in ("varlen_attention", "sac", "metrics") if name != missing]
    with pytest.raises((ValueError, RuntimeError), match=rf"v03\.{missing}"):
        train(config, device="cpu")


@pytest.mark.usefixtures("on_cpu")
def test_checkpointing_that_would_run_the_forward_twice_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = _config(tmp_path)
    config.override.imports = [f"{HOME}.varlen_attention", f"{HOME}.metrics"]
    v03._check_settings(config.to_dict(), SimpleNamespace(cp=1, pp=1))
    assert "v03.sac is not among override.imports" in caplog.text
    config.activation_checkpoint = MemoryBudgetAC.Config()
    v03._check_settings(config.to_dict(), SimpleNamespace(cp=1, pp=1))
    assert "a memory budget lets the compiler run attention's forward again" in caplog.text


def _config_of(model: str, flavor: str, backend: str) -> Any:
    from importlib import import_module

    return import_module(f"torchtitan.models.{model}").model_registry(flavor, attn_backend=backend).model


@pytest.mark.parametrize(("model", "flavor", "layer"), [
    ("gpt_oss", "debugmodel", r"gpt_oss\.model\.Attention"), ("deepseek_v3", "debugmodel", r"deepseek_v3\.model\.Attention"),
    ("muse_glimmer", "debugmodel", r"muse_glimmer\.model\."),
])
def test_models_whose_attention_is_more_than_causal(model: str, flavor: str, layer: str) -> None:
    """Sliding windows, sinks and latent attention live in the model around the inner attention that we replace."""
    config = _config_of(model, flavor, "flex")
    apply_overrides(OverrideConfig(imports=[f"{HOME}.attention"]), _Root(config))
    with torch.device("meta"):
        built = config.build()
    named = rf"model: got '{model}', whose layer \d+ is torchtitan\.models\.{layer}"
    with pytest.raises(ValueError, match=named + ".*accepts models built from GQAttention alone"):
        v03._layers(built, model)


class _Root:
    """A config tree without a trainer's."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def traverse(self, config_cls: type, **others: Any) -> Any:
        yield from self.model.traverse(config_cls, **others)


def test_sliding_windows_are_named() -> None:
    with pytest.raises(ValueError, match=r"inner_attention\.window_size: got \(127, 0\); lowbit_attn accepts: \(-1, 0\)"):
        v03.varlen_attention(VarlenAttention.Config(window_size=(127, 0)))


def test_subclasses_whose_additions_would_be_lost_are_named() -> None:
    class Flex(FlexAttention.Config):
        pass

    class Checkpointing(SelectiveAC.Config):
        pass

    class Metrics(MetricsProcessor.Config):
        pass

    for factory, config, name in ((v03.attention, Flex(), "inner_attention"), (v03.sac, Checkpointing(), "activation_checkpoint"),
                                  (v03.metrics, Metrics(), "metrics")):
        with pytest.raises(ValueError, match=f"{name}: got .*accepts"):
            factory(config)


def test_tuning_of_flex_attention_that_is_not_used_is_named(caplog: pytest.LogCaptureFixture) -> None:
    v03.attention(FlexAttention.Config())
    assert not caplog.text
    v03.attention(FlexAttention.Config(kernel_options={"BLOCK_M": 64}))
    assert "inner_attention.kernel_options: {'BLOCK_M': 64} tunes flex attention and is not used" in caplog.text


def test_a_metrics_processor_built_on_ours_is_left_as_it_is() -> None:
    class Mine(v03.LowbitMetrics):
        @dataclass(kw_only=True, slots=True)
        class Config(v03.LowbitMetrics.Config):
            pass

    config = Mine.Config()
    assert v03.metrics(config) is config


def test_a_document_longer_than_its_row() -> None:
    boundaries = torch.tensor([0, 192], dtype=torch.int32)
    metadata = VarlenMetadata(boundaries, boundaries, 192, 192)
    with pytest.raises(ValueError, match=r"attention_masks\.max_q: got a document of 192 tokens with training\.seq_len 96"):
        DocumentCheck(96)(torch.nn.Identity(), (), {"attention_masks": metadata})


def test_flex_and_varlen_backends_are_both_replaced() -> None:
    """With everything that torchtitan declares on the stock config, such as its sharding."""
    for backend in ("flex", "varlen"):
        config = enable(_trainer_config(backend), recipe="mxfp8", layers=[{"blocks": 0, "recipe": "bf16"}])
        stock = config.model_spec.model.layers[1].attention.inner_attention
        stock.sharding_config = marker = object()
        apply_overrides(config.override, config)
        ours = config.model_spec.model.layers[1].attention.inner_attention
        assert type(ours) is v03.LowbitVarlen.Config
        assert ours.sharding_config is marker
        assert ours.options == AttentionOptions("mxfp8", layers='[{"blocks": 0, "recipe": "bf16"}]')
        assert config.training.disable_cuda_graphs


def _trainer_config(backend: str) -> Any:
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend=backend)
    return config


def test_the_command_line_turns_it_on(tmp_path: Path) -> None:
    records = train(["--module=lowbit_attn.integrations.torchtitan.models_v03", "--config=llama3_bytes_tiny",
                     f"--dump_folder={tmp_path}", "--training.steps=1", "--training.seq_len=96", "--override.imports",
                     HOME + '.varlen_attention={"recipe": "mxfp8:max_threshold=2"}', f"{HOME}.sac", f"{HOME}.metrics"],
                    device="cpu")
    assert len(records) == 1
