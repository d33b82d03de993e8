"""DCP checkpoints do not know about low-bit attention: saved with it, loaded without it, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from titan_runs import LINE, run

from lowbit_attn.integrations.torchtitan import launch


def _stock_model() -> Any:
    """The model of the runs with torchtitan's own attention, with other weights."""
    torch.manual_seed(1)
    if LINE == "0.2":
        from titan_v02 import build_model

        return build_model("llama3_bytes", "tiny")
    from lowbit_attn.integrations.torchtitan.models_v03 import llama3_bytes_tiny

    model = llama3_bytes_tiny().model_spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def _weights_after(steps: int, out_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}

    def close(self: Any) -> None:
        state = self.model_parts[0].state_dict()
        kept.update({name: getattr(value, "full_tensor", lambda value=value: value)().clone() for name, value in state.items()})
        original(self)

    original = launch.RecordingTrainer.close
    with monkeypatch.context() as patch:
        patch.setattr(launch.RecordingTrainer, "close", close)
        run(out_dir, steps=steps, checkpoint__enable=True)
    return kept


def test_saved_with_low_bit_attention_loaded_without_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = _weights_after(2, tmp_path / "ours", monkeypatch)
    saved = tmp_path / "ours" / "checkpoint" / "step-2"

    stock = _stock_model()
    state = stock.state_dict()
    assert list(state) == list(trained)
    assert not torch.equal(state["tok_embeddings.weight"], trained["tok_embeddings.weight"])
    dcp.load(state, checkpoint_id=str(saved), no_dist=True)
    assert all(torch.equal(state[name], trained[name]) for name in state)

    back = tmp_path / "stock"
    dcp.save(state, checkpoint_id=str(back), no_dist=True)
    losses = [run(tmp_path / folder.name / "again", steps=1, checkpoint__enable=True, checkpoint__initial_load_path=str(folder),
                  checkpoint__load_only=True)[0].loss for folder in (saved, back)]
    fresh = run(tmp_path / "fresh", steps=1)[0].loss
    assert losses[0] == losses[1] != fresh


@pytest.mark.skipif(LINE != "0.2", reason="torchtitan 0.3.x has no attention of its own that trains on a CPU")
def test_a_run_goes_on_without_low_bit_attention_and_with_it_again(tmp_path: Path) -> None:
    """Optimizer, dataloader and step included: the same dump folder, with and without the converter."""
    settings = {"flavor": "tiny_sdpa", "checkpoint__enable": True, "checkpoint__last_save_model_only": False}
    first = run(tmp_path, steps=2, **settings)
    stock = run(tmp_path, steps=4, model__converters=[], **settings)
    again = run(tmp_path, steps=6, **settings)
    assert [record.step for record in (*first, *stock, *again)] == [1, 2, 3, 4, 5, 6]
    assert again[-1].loss < first[0].loss
