"""torchtitan's own trainer, from the shipped TOML: it learns, saves what it should, and leaves the process as it was."""

import gc
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from titan_runs import CONFIG, LAYERS, VARLEN_BACKWARD, VARLEN_FORWARD, OpCalls, edited_config, run

from lowbit_attn.integrations.torchtitan.demo import train_demo


def test_loss_falls_and_steps_are_reported_as_they_happen(tmp_path: Path) -> None:
    seen = []
    records = train_demo("mxfp8", 16, tmp_path, seen.append, flavor="tiny", seq_len=128, validation_steps=1)
    assert [r.step for r in records] == list(range(1, 17))
    assert [r.loss for r in seen] == [r.loss for r in records]
    assert records[-1].loss < records[0].loss - 1.0
    assert 0 < records[-1].validation_loss < records[0].loss
    assert all(r.seconds > 0 and r.grad_norm > 0 for r in records)


def test_recipes_differ_by_numerics_only(tmp_path: Path) -> None:
    """Same weights, same packed documents, same mask: the first loss, before any update, differs by rounding."""
    mxfp8, bf16 = (train_demo(recipe, 2, tmp_path, flavor="tiny", seq_len=128, validation_steps=0)
                   for recipe in ("mxfp8", "bf16"))
    assert mxfp8[0].loss != bf16[0].loss
    for ours, exact in zip(mxfp8, bf16, strict=True):
        assert ours.loss == pytest.approx(exact.loss, rel=2e-3)


@pytest.mark.parametrize(("mode", "forwards_per_layer"), [("selective", 1), ("full", 2), ("none", 1)])
def test_checkpointing_runs_attention_forward(mode: str, forwards_per_layer: int, tmp_path: Path) -> None:
    """Selective checkpointing saves our output; full checkpointing computes it again."""
    with OpCalls() as calls:
        run(tmp_path, f"--activation_checkpoint.mode={mode}", steps=2)
    start_up = 1
    assert calls.count[VARLEN_FORWARD] == 2 * LAYERS * forwards_per_layer + start_up
    assert calls.count[VARLEN_BACKWARD] == 2 * LAYERS


def test_options_reach_the_operator_from_the_toml(tmp_path: Path) -> None:
    config = edited_config(tmp_path, 'recipe = "mxfp8" ', 'recipe = "mxfp8:max_threshold=2" ')
    with OpCalls() as calls:
        run(tmp_path, config=config, steps=1)
    assert calls.recipes == {"mxfp8:max_threshold=2.0"}


def test_options_reach_the_operator_from_the_command_line(tmp_path: Path) -> None:
    with OpCalls() as calls:
        run(tmp_path, "--lowbit_attn.recipe=bf16", steps=1)
    assert not calls.count


def test_without_a_section_the_defaults_apply(tmp_path: Path) -> None:
    text = CONFIG.read_text()
    head, section = text.split("\n[lowbit_attn]\n")
    config = tmp_path / "plain.toml"
    config.write_text("\n".join(line for line in head.splitlines() if not line.startswith("custom_config_module"))
                      + "\n[training]" + section.split("[training]")[1])
    with OpCalls() as calls:
        run(tmp_path, config=config, steps=1)
    assert calls.recipes == {"mxfp8"}


def test_plain_causal_attention(tmp_path: Path) -> None:
    with OpCalls() as calls:
        records = run(tmp_path, "--model.flavor=tiny_sdpa", steps=3)
    assert records[-1].loss < records[0].loss
    assert calls.count["lowbit_attn.attention_forward.default"] == 3 * LAYERS + 1


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ), gc.isenabled()
    run(tmp_path, steps=1)
    assert (dict(os.environ), gc.isenabled()) == before
    assert not dist.is_initialized()
