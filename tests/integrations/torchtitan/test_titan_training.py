"""torchtitan's own trainer: it learns, saves what it should, and leaves the process as it was."""

import gc
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from titan_runs import LAYERS, VARLEN_BACKWARD, VARLEN_FORWARD, OpCalls, run

from lowbit_attn.integrations.torchtitan.launch import StepRecord, train


def test_loss_falls_and_steps_are_reported_as_they_happen(tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    records = run(tmp_path, steps=16, seq_len=128, on_step=seen.append)
    assert [r.step for r in records] == list(range(1, 17))
    assert [r.loss for r in seen] == [r.loss for r in records]
    assert records[-1].loss < records[0].loss - 0.8
    assert all(r.seconds > 0 and r.grad_norm > 0 for r in records)


def test_loss_follows_exact_attention(tmp_path: Path) -> None:
    """Same weights, packed documents and mask, torch SDPA against MXFP8: the losses differ by rounding, and only by it."""
    mxfp8, bf16 = (run(tmp_path, steps=12, seq_len=128, options={"recipe": recipe}) for recipe in ("mxfp8", "bf16"))
    assert [r.loss for r in mxfp8] != [r.loss for r in bf16]
    assert [r.loss for r in mxfp8] == pytest.approx([r.loss for r in bf16], rel=2e-3)


@pytest.mark.parametrize(("mode", "forwards_per_layer"), [("selective", 1), ("full", 2), ("none", 1)])
def test_checkpointing_runs_attention_forward(mode: str, forwards_per_layer: int, tmp_path: Path) -> None:
    """Selective checkpointing saves our output; full checkpointing computes it again."""
    with OpCalls() as calls:
        run(tmp_path, checkpointing=mode, steps=2)
    start_up = 1
    assert calls.count[VARLEN_FORWARD] == 2 * LAYERS * forwards_per_layer + start_up
    assert calls.count[VARLEN_BACKWARD] == 2 * LAYERS + start_up


def test_each_layer_runs_its_recipe(tmp_path: Path) -> None:
    with OpCalls() as calls:
        run(tmp_path, steps=1, checkpointing="none", options={
            "recipe": "mxfp8:max_threshold=2", "layers": "[{blocks: {last: 1}, recipe: 'mxfp8:causal_safety=exact'}]"})
    start_up, per_layer = 2, 2  # a forward and a backward
    assert calls.recipes == dict.fromkeys(("mxfp8:max_threshold=2.0", "mxfp8:causal_safety=exact"), start_up + per_layer)


def test_layers_in_bf16_never_enter_our_operators(tmp_path: Path) -> None:
    with OpCalls() as calls:
        run(tmp_path, steps=1, options={"layers": "[{blocks: 0, recipe: bf16}]"})
    assert calls.count[VARLEN_BACKWARD] == 1 + 1  # start-up and layer 1
    with OpCalls() as calls:
        run(tmp_path, steps=1, options={"recipe": "bf16"})
    assert not calls.count


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ), gc.isenabled()
    run(tmp_path, steps=1)
    assert (dict(os.environ), gc.isenabled()) == before
    assert not dist.is_initialized()


def test_device_is_checked() -> None:
    with pytest.raises(ValueError, match=r"device: got 'gpu'; accepted: None, 'cpu'"):
        train([], device="gpu")
