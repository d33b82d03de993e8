"""Recipes, throughput and the numerics probe stand in torchtitan's own metrics log."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from titan_runs import run

from lowbit_attn.integrations.torchtitan.attention import LowbitAttention
from lowbit_attn.ops import observe

PROBE = "lowbit_attn/layer1/"


def _log(out_dir: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value of the TensorBoard log."""
    (events,) = out_dir.rglob("events.out.tfevents*")
    log = EventAccumulator(str(events))
    log.Reload()
    return {name: {event.step: event.value for event in log.Scalars(name)} for name in log.Tags()["scalars"]}


def test_recipes_and_numerics_are_logged_beside_throughput(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    records_before = set(observe._RECORDS)
    records = run(tmp_path, steps=4, metrics__enable_tensorboard=True, options={
        "layers": "[{blocks: {first: 1}, recipe: bf16}]", "probe_every": 2, "probe_layer": 1})
    log = _log(tmp_path)
    assert set(log["throughput(tps)"]) == {1, 2, 3, 4}
    assert log["lowbit_attn/layers(mxfp8)"] == log["lowbit_attn/layers(bf16)"] == dict.fromkeys((1, 2, 3, 4), 1.0)
    probed = {name.removeprefix(PROBE): values for name, values in log.items() if name.startswith(PROBE)}
    assert all(set(values) == {2, 4} for values in probed.values())
    assert {"flushed(ds)", "saturated(p)", "saturated(q)", "cosine(output)", "cosine(grad_query)"} <= set(probed)
    for name in ("output", "grad_query", "grad_key", "grad_value"):
        assert all(0.99 < value < 1.0 for value in probed[f"cosine({name})"].values())
    assert "attention numerics of layer 1, mxfp8" in caplog.text
    assert records[-1].loss < records[0].loss
    assert set(observe._RECORDS) == records_before


def test_the_probe_changes_nothing(tmp_path: Path) -> None:
    plain, probed = (run(tmp_path / str(every), steps=3, options={"probe_every": every}) for every in (0, 1))
    assert [record.loss for record in plain] == [record.loss for record in probed]
    assert [record.grad_norm for record in plain] == [record.grad_norm for record in probed]


def test_the_probe_measures_the_tensors_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator noted is what attention was given."""
    seen: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    attend_packed = LowbitAttention.attend_packed

    def keep(self: LowbitAttention, *args: torch.Tensor, **kwargs: float) -> torch.Tensor:
        if self.probe is not None:
            seen.append(args[0].detach().clone())
        return attend_packed(self, *args, **kwargs)

    drop = observe.drop_record
    monkeypatch.setattr(LowbitAttention, "attend_packed", keep)
    monkeypatch.setattr("lowbit_attn.integrations.torchtitan.metrics.drop_record",
                        lambda number: (kept.append(observe.record(number).tensors["query"]), drop(number)))
    run(tmp_path, steps=2, checkpointing="none", options={"probe_every": 1})
    assert torch.equal(kept[0], seen[-1].to(kept[0].dtype))


def test_another_recipe_is_measured_as_worse(tmp_path: Path) -> None:
    cosines = {}
    for recipe in ("mxfp8", "nvfp4_fp8"):
        run(tmp_path / recipe, steps=1, metrics__enable_tensorboard=True, options={"recipe": recipe, "probe_every": 1})
        cosines[recipe] = _log(tmp_path / recipe)["lowbit_attn/layer0/cosine(output)"][1]
    assert cosines["nvfp4_fp8"] < cosines["mxfp8"]
