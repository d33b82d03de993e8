import pytest
from PIL import Image

from lowbit_attn.schedules import shipped


def test_show_prints_the_grid(run):
    result = run("schedule", "show", shipped.folder() / "wan2.2-t2v-a14b-hybrid.yaml", "--steps", 20, "--blocks", 40)
    assert result.exit_code == 0, result.stderr
    rows = [line.split("│")[1:3] for line in result.stdout.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0–2", "fused_mxfp6"], ["3–16", "fused_mxfp4"], ["17–19", "fused_mxfp6"]]
    assert "0–39" in result.stdout


@pytest.mark.parametrize("name", shipped.schedule_names())
def test_shipped_schedules_are_found_by_name(run, name):
    result = run("schedule", "show", name)
    assert result.exit_code == 0, result.stderr
    assert any(recipe in result.stdout for recipe in ("fused_mxfp4", "mxattention", "mxfp8_fast"))


def test_a_png_of_the_grid_is_written(run, tmp_path):
    result = run("schedule", "show", "wan2.2-t2v-a14b-mxattention", "--png", tmp_path / "grid.png")
    assert result.exit_code == 0, result.stderr
    assert Image.open(tmp_path / "grid.png").size[0] > 500


def test_steps_and_blocks_default_to_the_schedules_own_and_the_published_models(run):
    result = run("schedule", "show", "minimax-h3-hybrid")
    assert "35–49" in result.stdout
    assert "0–49" in result.stdout


def test_streams(run, tmp_path):
    path = tmp_path / "streams.yaml"
    path.write_text("""
version: 1
name: streams
model: hunyuan_video
attention:
  default: fused_mxfp4
  rules:
    - {stream: dual, recipe: bf16}
""")
    result = run("schedule", "show", path, "--steps", 4, "--dual", 2, "--single", 3)
    assert result.exit_code == 0, result.stderr
    assert "0–1" in result.stdout
    assert "2–4" in result.stdout
    assert "accepted: both or neither" in run("schedule", "show", path, "--dual", 2).stderr


def test_a_missing_file_says_what_is_accepted(run):
    result = run("schedule", "show", "nope.yaml")
    assert result.exit_code == 2
    assert "got 'nope.yaml', which is no file" in result.stderr
    assert "wan2.2-t2v-a14b-hybrid" in result.stderr


def test_an_error_in_the_file_names_its_line(run, tmp_path):
    path = tmp_path / "typo.yaml"
    path.write_text("version: 1\nname: typo\nattention:\n  defualt: mxfp8\n")
    result = run("schedule", "show", path)
    assert result.exit_code == 2
    assert f"{path}:4" in result.stderr
    assert "did you mean 'default'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_step_that_does_not_exist_is_refused(run):
    result = run("schedule", "show", "hunyuan-video-hybrid", "--steps", 3)
    assert result.exit_code == 2
    assert "accepted: 1 to 3, there are 3 steps" in result.stderr
