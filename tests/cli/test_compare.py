"""`lowbit-attn compare` measures what it says, on latents, folders and videos."""

import math

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lowbit_attn.cli import media
from lowbit_attn.cli.measurements.fidelity import compare_frames, compare_latents
from lowbit_attn.cli.measurements.lpips import Lpips


def _frames(count=5, size=24):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1


def _folder(path, frames):
    media.save_frames(frames, path, fps=8)
    return path


def test_equal_frames_have_no_distance():
    fidelity = compare_frames(_frames(), _frames())
    assert set(fidelity.psnr) == {math.inf}
    assert fidelity.ssim == pytest.approx([1.0] * 5)
    flat = torch.full((2, 3, 24, 24), 0.3)
    assert compare_frames(flat, flat).ssim == pytest.approx([1.0, 1.0], abs=1e-6)
    assert fidelity.faults == []


def test_psnr_is_that_of_a_known_error():
    frames = _frames()
    assert compare_frames(frames + 0.01, frames).psnr == pytest.approx([40.0] * 5, abs=1e-3)


def test_a_steady_error_does_not_flicker_and_a_changing_one_does():
    frames = _frames()
    steady = compare_frames(frames + 0.01, frames)
    changing = compare_frames(frames + 0.01 * torch.tensor([1, -1, 1, -1, 1])[:, None, None, None], frames)
    assert changing.psnr == pytest.approx(steady.psnr, abs=1e-3)
    assert min(steady.flicker) > 100
    assert changing.flicker == pytest.approx([34.0] * 4, abs=0.1)


def test_every_so_many_frames_are_measured_and_flicker_on_all():
    fidelity = compare_frames(_frames(9), _frames(9), every=4)
    assert fidelity.chosen == (0, 4, 8)
    assert (len(fidelity.psnr), len(fidelity.flicker)) == (3, 8)


def test_black_and_broken_frames_are_faults_unless_the_reference_is_black_too():
    video, reference = _frames(), _frames()
    video[1], video[2], reference[2], video[3, 0, 0, 0] = 0.0, 0.0, 0.0, math.nan
    fidelity = compare_frames(video, reference)
    assert fidelity.faults == ["1 frames not finite: 3", "1 frames black, that are not in the reference: 1"]


def test_latents_are_measured_by_angle_and_distance():
    reference = torch.randn(1, 4, 2, 3, 3)
    fidelity = compare_latents(2 * reference, reference)
    assert (fidelity.cosine, fidelity.relative_l2) == pytest.approx((1.0, 1.0))
    assert compare_latents(-reference, reference).cosine == pytest.approx(-1.0)


def test_folders_print_the_measures_and_the_noise_floor(run, tmp_path):
    frames = (_frames() * 255).round() / 255
    paths = [_folder(tmp_path / name, frames + levels / 255) for name, levels in (("a", 20), ("b", 0), ("c", 2))]
    result = run("compare", paths[0], paths[1], "--reference-noise", paths[2], "--every", 2, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 0, result.stderr
    assert "22.11" in result.stdout
    assert "noise floor" in result.stdout
    assert "42.11" in result.stdout
    assert Image.open(tmp_path / "plot.png").size[0] > 100


def test_black_output_ends_with_status_one(run, tmp_path):
    broken = _frames()
    broken[2] = 0
    result = run("compare", _folder(tmp_path / "a", broken), _folder(tmp_path / "b", _frames()))
    assert result.exit_code == 1
    assert "1 frames black, that are not in the reference: 2" in result.stdout


def test_latent_files_of_either_kind(run, tmp_path):
    latents = torch.randn(1, 4, 2, 3, 3)
    save_file({"latents": latents, "other": torch.zeros(2)}, tmp_path / "a.safetensors")
    torch.save(latents * 1.5, tmp_path / "b.pt")
    result = run("compare", tmp_path / "b.pt", tmp_path / "a.safetensors")
    assert result.exit_code == 0, result.stderr
    assert "50.0000%" in result.stdout


def test_latents_that_are_not_finite_end_with_status_one(run, tmp_path):
    torch.save(torch.tensor([1.0, math.nan]), tmp_path / "a.pt")
    torch.save(torch.ones(2), tmp_path / "b.pt")
    assert run("compare", tmp_path / "a.pt", tmp_path / "b.pt").exit_code == 1


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_a_video_file_is_read_as_it_was_written(tmp_path, suffix):
    pytest.importorskip("av")
    frames = torch.linspace(0.2, 0.8, 6)[:, None, None, None].expand(6, 3, 32, 48)
    media.save_frames(frames, tmp_path / f"v{suffix}", fps=8)
    torch.testing.assert_close(media.load_frames(tmp_path / f"v{suffix}"), frames.contiguous(), rtol=0, atol=0.03)


def _weights(path):
    generator = torch.Generator().manual_seed(0)
    shapes = {"net.slice1.0": (64, 3, 11, 11), "net.slice2.3": (192, 64, 5, 5), "net.slice3.6": (384, 192, 3, 3),
              "net.slice4.8": (256, 384, 3, 3), "net.slice5.10": (256, 256, 3, 3)}
    state = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    state |= {f"{name}.bias": torch.zeros(shape[0]) for name, shape in shapes.items()}
    state |= {f"lin{level}.model.1.weight": torch.rand(1, shape[0], 1, 1, generator=generator)
              for level, shape in enumerate(shapes.values())}
    torch.save(state, path)
    return state


def test_lpips_needs_weights_and_is_zero_for_equal_frames(run, tmp_path):
    state = _weights(tmp_path / "alex.pt")
    frames = _frames(2, 64)
    lpips = Lpips(tmp_path / "alex.pt")
    assert lpips(frames, frames).tolist() == [0.0, 0.0]
    assert (lpips(frames, frames.flip(3)) > lpips(frames, frames + 0.001)).all()
    del state["lin2.model.1.weight"]
    torch.save(state, tmp_path / "broken.pt")
    with pytest.raises(ValueError, match=r"has no 'lin2.model.1.weight'; accepted: a state dict of lpips.LPIPS"):
        Lpips(tmp_path / "broken.pt")


@pytest.mark.parametrize(("a", "b", "message"), [
    ("nope.mp4", "frames", "no such file; accepted: latents"),
    ("frames", "small", r"shapes: got [5, 3, 24, 24] against [5, 3, 16, 16]; accepted: equal ones"),
    ("latents.pt", "frames", "got latents and pictures; accepted: one kind"),
    ("two.pt", "latents.pt", "got tensors x, y; accepted: one tensor, or one called 'latents'"),
    ("empty", "frames", "no images; accepted: .png"),
    ("text.txt", "frames", "not a kind of file that is known"),
])
def test_what_cannot_be_compared_says_why(run, tmp_path, a, b, message):
    _folder(tmp_path / "frames", _frames())
    _folder(tmp_path / "small", _frames(size=16))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").touch()
    torch.save(torch.ones(3), tmp_path / "latents.pt")
    torch.save({"x": torch.ones(1), "y": torch.ones(1)}, tmp_path / "two.pt")
    result = run("compare", tmp_path / a, tmp_path / b)
    assert result.exit_code == 2
    assert message in result.stderr
