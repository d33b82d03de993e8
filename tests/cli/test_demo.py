"""The demo at miniature size: the same code, a smaller model, fewer steps."""

import pytest
import torch
from typer.testing import CliRunner

from lowbit_attn.cli import demo, demo_video
from lowbit_attn.cli.main import app

for package in ("torchtitan", "diffusers", "matplotlib", "torchmetrics"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    arguments = ["demo", "--out", str(out), "--size", "tiny", "--steps", "3", "--video-steps", "8", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return out, result.stdout


def test_report_and_pictures_are_written(report):
    out, terminal = report
    text = (out / "report.md").read_text()
    for picture in ("loss.png", "frames-bf16.png", "frames-scheduled.png", "grid.png"):
        assert f"({picture})" in text
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert str(out / "report.md") in terminal


def test_report_says_what_it_must(report):
    text = (report[0] / "report.md").read_text()
    for words in ("untrained, random weights", "noise floor", "PSNR", "SSIM", "tokens/s", "held-out loss", "not a fast kernel"):
        assert words in text


def test_the_references_speed_stands_beside_nobodys(report):
    [line] = [line for line in (report[0] / "report.md").read_text().splitlines() if line.startswith("| mxfp8 ")]
    assert line.endswith("| – (reference) |")


def test_the_grid_is_what_ran(report):
    text = (report[0] / "report.md").read_text()
    grid = text[text.index("```"):]
    assert "fused_mxfp6" in grid
    assert "fused_mxfp4" in grid
    # 8 steps × 2 blocks × 2 guidance passes: 6 steps in MXFP6 and 2 in MXFP4.
    assert "self-attention calls: fused_mxfp4 8, fused_mxfp6 24" in grid


def test_every_stage_ran_to_its_end(report):
    terminal = report[1]
    assert terminal.count("3/3") == 2
    assert terminal.count("8/8") == 4


def test_a_log_shows_each_stage_as_it_begins(report):
    stages = ["train bf16 ...", "train mxfp8 ..."]
    assert [line for line in report[1].splitlines() if line.strip().endswith("...")][:2] == stages


@pytest.mark.parametrize(("arguments", "problem"), [
    (("--recipe", "fused_mxfp4"), "inference only"),
    (("--recipe", "mxfp9"), "got 'mxfp9'; accepted names"),
    (("--recipe", "bf16"), "--recipe: got 'bf16', which trains anyway, as the baseline; accepted: mxfp8, nvfp4_fp8, nvfp4"),
    (("--recipe", " bf16 "), "--recipe: got ' bf16 ', which trains anyway"),
    (("--schedule", "nope"), "got 'nope', which is no file"),
])
def test_a_wrong_choice_is_refused_before_any_work(run, tmp_path, arguments, problem):
    out = tmp_path / "report"
    result = run("demo", "--out", out, *arguments)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert not out.exists()


def test_missing_extras_are_named_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr(demo.extras, "find_spec", lambda name: None if name == "torchmetrics" else object())
    result = run("demo", "--out", tmp_path / "report")
    assert result.exit_code == 2
    assert "not installed: torchmetrics" in result.stderr
    assert "pip install 'lowbit-attn[demo]'" in result.stderr


def test_the_video_depends_on_attention():
    """A fresh initialization would hide attention's errors: 4-bit everywhere must stand out from the noise floor."""
    size = demo_video.VideoSize(blocks=2, heads=1, pixels=32, frames=5)
    pipe = demo_video.build_pipeline(size, 0, torch.device("cpu"))

    def generate(**changes):
        return demo_video.generate(pipe, "video", size, 4, seed=0, on_step=lambda note: None, **changes)

    bf16, again = generate(), generate()
    assert torch.equal(bf16.latents, again.latents)
    with demo_video.other_backend():
        floor = demo_video.fidelity(generate(), bf16)
    coarse = demo_video.fidelity(generate(schedule="mxfp4_ocp"), bf16)
    assert coarse.latent_error > 2 * floor.latent_error
    assert coarse.psnr < floor.psnr
    assert torch.equal(generate().latents, bf16.latents), "the pipeline is as before"
