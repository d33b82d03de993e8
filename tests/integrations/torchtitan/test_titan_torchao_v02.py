"""Low-bit attention beside torchao's low-bit linear layers, in torchtitan 0.2.x's trainer."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from titan_runs import LAYERS, VARLEN_BACKWARD, OpCalls, run

from lowbit_attn.integrations.torchtitan import launch

pytest.importorskip("torchao", reason="torchao is not installed; `make test` runs this file once more, beside it")

FLOAT8 = {"model__converters": ["quantize.linear.float8", "lowbit_attn"], "quantize__linear__float8__emulate": True,
          "quantize__linear__float8__filter_fqns": ["output"]}
MX = {"model__converters": ["quantize.linear.mx", "lowbit_attn"], "quantize__linear__mx__recipe_name": "mxfp8_emulated",
      "quantize__linear__mx__mxfp8_dim1_cast_kernel_choice": "torch", "quantize__linear__mx__filter_fqns": ["output"]}
LINEARS = 7 * LAYERS  # q, k, v, o and three of the feed forward


@pytest.mark.parametrize(("settings", "linear"), [(FLOAT8, "Float8Linear"), (MX, "MXLinear")], ids=["float8", "mx"])
@pytest.mark.parametrize("ours_first", [False, True])
def test_linear_layers_and_attention_are_both_low_bit(settings: dict[str, Any], linear: str, ours_first: bool, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    modules: Counter[str] = Counter()
    close = launch.RecordingTrainer.close

    def count(self: Any) -> None:
        modules.update(type(module).__name__ for module in self.model_parts[0].modules())
        close(self)

    monkeypatch.setattr(launch.RecordingTrainer, "close", count)
    # The emulated recipe runs anywhere, which torchtitan's check of the device does not know.
    monkeypatch.setattr("torchtitan.components.quantization.mx.has_cuda_capability", lambda major, minor: True)
    converters = settings["model__converters"][::-1] if ours_first else settings["model__converters"]
    with OpCalls() as calls:
        records = run(tmp_path, steps=4, **{**settings, "model__converters": converters})
    assert modules[linear] == LINEARS
    assert modules["LowbitVarlen"] == LAYERS
    assert calls.count[VARLEN_BACKWARD] == 4 * LAYERS + 1
    assert records[-1].loss < records[0].loss
