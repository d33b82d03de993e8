"""Low-bit attention beside torchao's low-bit linear layers, in torchtitan 0.3.x's trainer."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_runs import LAYERS, VARLEN_BACKWARD, OpCalls
from torchtitan.components.quantization import Float8LinearConverter, MXFP8LinearConverter
from torchtitan.config.override import apply_overrides

from lowbit_attn.integrations.torchtitan import launch
from lowbit_attn.integrations.torchtitan.models_v03 import llama3_bytes_tiny

LINEARS = 5 * LAYERS  # fused q, k and v, o and three of the feed forward


def _modules(model: torch.nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


def test_float8_linear_layers_train_with_low_bit_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: Counter[str] = Counter()
    close = launch.RecordingTrainer.close

    def count(self: Any) -> None:
        modules.update(_modules(self.model_parts[0]))
        close(self)

    monkeypatch.setattr(launch.RecordingTrainer, "close", count)
    config = llama3_bytes_tiny()
    config.dump_folder, config.training.seq_len, config.training.steps = str(tmp_path), 96, 4
    converter = Float8LinearConverter.Config(emulate=True, model_compile_enabled=False, filter_fqns=["lm_head"])
    config.model_spec.model = converter.build().convert(config.model_spec.model)
    with OpCalls() as calls:
        records = launch.train(config, device="cpu")
    assert modules["Float8Linear"] == LINEARS
    assert modules["LowbitVarlen"] == LAYERS
    assert calls.count[VARLEN_BACKWARD] == 4 * LAYERS + 1
    assert records[-1].loss < records[0].loss


def test_mx_linear_layers_are_built_beside_low_bit_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's MX layers of this line compute on sm_100 only."""
    monkeypatch.setattr("torchtitan.components.quantization.mx.has_cuda_capability", lambda major, minor: True)
    config = llama3_bytes_tiny()
    config.model_spec.model = MXFP8LinearConverter.Config(model_compile_enabled=True).build().convert(config.model_spec.model)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        modules = _modules(config.model_spec.model.build())
    assert modules["MXFP8Linear"] == LINEARS + 1
    assert modules["LowbitVarlen"] == LAYERS
