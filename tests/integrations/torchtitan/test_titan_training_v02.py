"""What only 0.2.x has: the TOML section, plain causal attention, and the demo's run with validation."""

from pathlib import Path

from titan_runs import CONFIG, LAYERS, OpCalls, run
from titan_v02 import edited_config

from lowbit_attn.integrations.torchtitan.demo import train_demo
from lowbit_attn.integrations.torchtitan.launch import train


def _train(out_dir: Path, config: Path, *args: str) -> None:
    train([f"--job.config_file={config}", f"--job.dump_folder={out_dir}", "--model.flavor=tiny", "--training.steps=1",
           "--training.seq_len=96", *args], device="cpu")


def test_options_reach_the_operator_from_the_toml(tmp_path: Path) -> None:
    config = edited_config(tmp_path, 'recipe = "mxfp8" ', 'recipe = "mxfp8:max_threshold=2" ')
    with OpCalls() as calls:
        _train(tmp_path, config)
    assert set(calls.recipes) == {"mxfp8:max_threshold=2.0"}


def test_without_a_section_the_defaults_apply(tmp_path: Path) -> None:
    text = CONFIG.read_text()
    head, section = text.split("\n[lowbit_attn]\n")
    config = tmp_path / "plain.toml"
    config.write_text("\n".join(line for line in head.splitlines() if not line.startswith("custom_config_module"))
                      + "\n[training]" + section.split("[training]")[1])
    with OpCalls() as calls:
        _train(tmp_path, config)
    assert set(calls.recipes) == {"mxfp8"}


def test_plain_causal_attention(tmp_path: Path) -> None:
    with OpCalls() as calls:
        records = run(tmp_path, steps=3, flavor="tiny_sdpa")
    assert records[-1].loss < records[0].loss
    assert calls.count["lowbit_attn.attention_forward.default"] == 3 * LAYERS + 1


def test_the_demo_validates_after_its_last_step(tmp_path: Path) -> None:
    records = train_demo("mxfp8", 4, tmp_path, flavor="tiny", seq_len=128, validation_steps=1)
    assert records[-1].validation_loss is not None
    assert 0 < records[-1].validation_loss < records[0].loss
