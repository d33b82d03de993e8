"""`lowbit-attn generate` on a small checkpoint folder with tokenizer and text encoder, built here."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoint import save_wan

from lowbit_attn.cli import media
from lowbit_attn.cli.measurements.fidelity import compare_latents

SCHEDULE = """
version: 1
name: small
model: wan
attention:
  default: fused_mxfp4
  rules:
    - {steps: {first: 1}, recipe: fused_mxfp6}
sampling: {scheduler: UniPCMultistepScheduler, flow_shift: 12, steps: 3, guidance_scale: 4, frames: 5, width: 32, height: 32}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_wan(tmp_path_factory.mktemp("checkpoint") / "wan")


@pytest.fixture
def schedule(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SCHEDULE)
    return path


def test_it_sets_the_schedules_sampling_and_says_what_ran(run, checkpoint, schedule, tmp_path):
    result = run("generate", "--model", checkpoint, "--prompt", "dance monkey", "--schedule", schedule, "--dtype", "float32",
                 "--out", tmp_path / "frames", "--latents", tmp_path / "latents.safetensors")
    assert result.exit_code == 0, result.stderr
    assert "flow_shift 12" in result.stdout
    assert "num_inference_steps 3" in result.stdout
    assert "guidance_scale 4" in result.stdout
    assert "{'fused_mxfp4': 8, 'fused_mxfp6': 4}" in result.stdout
    assert media.load_frames(tmp_path / "frames").shape == (5, 3, 32, 32)
    assert load_file(tmp_path / "latents.safetensors")["latents"].shape == (1, 16, 2, 4, 4)


def test_options_override_the_schedule_and_a_seed_repeats(run, checkpoint, schedule, tmp_path):
    for name, recipe in (("a", "mxfp8"), ("b", "mxfp8"), ("c", "bf16")):
        result = run("generate", "--model", checkpoint, "--prompt", "dance", "--schedule", recipe, "--dtype", "float32",
                     "--steps", 2, "--flow-shift", 5, "--frames", 5, "--width", 32, "--height", 32, "--seed", 7,
                     "--out", tmp_path / name, "--latents", tmp_path / f"{name}.safetensors")
        assert result.exit_code == 0, result.stderr
        assert "flow_shift 5" in result.stdout
    a, b, c = (load_file(tmp_path / f"{name}.safetensors")["latents"] for name in "abc")
    assert torch.equal(a, b)
    assert 0 < compare_latents(a, c).relative_l2 < 0.1


@pytest.mark.parametrize(("options", "message"), [
    (("--model", "{tmp}/nothing"), "which is no folder; accepted: a diffusers checkpoint folder"),
    (("--model", "{tmp}"), "which has no model_index.json"),
    (("--model", "{tmp}/modular"), "which is a modular pipeline: load and patch it in Python"),
    (("--schedule", "wan2.1-t2v-14b-hybrid", "--steps", "1"), "never applies with 1 steps and 2 blocks"),
    (("--height", "33"), "have to be divisible by"),
    (("--schedule", "nope.yaml"), "got 'nope.yaml', which is no file"),
    (("--schedule", "hunyuan-video-mxattention"), "model: got 'hunyuan_video' for a WanPipeline; accepted: 'wan'"),
    (("--offload", "model", "--device", "cpu"), "there is nothing to offload; accepted: none"),
])
def test_what_cannot_be_generated_says_why(run, checkpoint, schedule, tmp_path, options, message):
    (tmp_path / "modular").mkdir()
    (tmp_path / "modular" / "modular_model_index.json").touch()
    given = {"--model": checkpoint, "--schedule": schedule, "--prompt": "x", "--out": tmp_path / "frames", "--dtype": "float32"}
    for key, value in zip(options[::2], options[1::2], strict=True):
        given[key] = value.replace("{tmp}", str(tmp_path))
    result = run("generate", *(part for pair in given.items() for part in pair))
    assert result.exit_code == 2, result.stdout
    assert message in result.stderr


def test_a_checkpoint_of_the_hub_without_a_network_is_a_clear_message(run, schedule, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    result = run("generate", "--model", "nobody/no-such-model", "--prompt", "x", "--schedule", schedule, "--out", "frames")
    assert result.exit_code == 2
    assert "'nobody/no-such-model' is no folder here, and could not be fetched from the hub" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_setting_that_the_pipeline_does_not_have_is_refused(run, checkpoint, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(SCHEDULE.replace("UniPCMultistepScheduler", "WanPipeline"))
    result = run("generate", "--model", checkpoint, "--prompt", "x", "--schedule", path, "--out", tmp_path / "frames")
    assert result.exit_code == 2
    assert "sampling.scheduler: got 'WanPipeline'; accepted: the name of a diffusers scheduler class" in result.stderr
