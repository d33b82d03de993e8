"""Every mistake in a schedule is an error that names file, line, value and what is accepted."""

import re

import pytest

from lowbit_attn.recipes import recipe_names
from lowbit_attn.schedules import ScheduleError, load

GOOD = """\
version: 1
name: example
model: wan
attention:
  default: fused_mxfp4
  cross: unchanged
  rules:
    - {steps: {first: 3}, recipe: fused_mxfp6}
    - {steps: {last: 3}, recipe: fused_mxfp6}
    - {blocks: [0], recipe: bf16}
    - steps: {from: 5, to: 9}
      blocks: {from: 10, to: 19}
      expert: high_noise
      recipe: fused_mxfp8
"""

FILE_MISTAKES = [
    # what is changed, into what, line, value, accepted
    ("version: 1", "version: 2", 1, "2", "1"),
    ("name: example", "nmae: example", 2, "'nmae'", "did you mean 'name'"),
    ("name: example", "name: 7", 2, "7", "text"),
    ("model: wan", "model: wam", 3, "'wam'", "wan, hunyuan_video"),
    ("model: wan", "model: wan\nmodel: wan", 4, "given twice", "once"),
    ("default: fused_mxfp4", "default: fused_mxfp5", 5, "'fused_mxfp5'", "fused_mxfp4"),
    ("default: fused_mxfp4", "default: fused_mxfp4:foo=1", 5, "'foo=1'", "max_threshold"),
    ("cross: unchanged", "cross: unchange", 6, "'unchange'", "bf16"),
    ("cross: unchanged", "on_unsupported: ignore", 6, "'ignore'", "error, unchanged"),
    ("  rules:", "  rulez:", 7, "'rulez'", "default, cross, on_unsupported, rules"),
    ("first: 3", "frist: 3", 8, "'frist'", "first, last, from, to"),
    ("first: 3", "first: 3, last: 2", 8, "first and last", "one of first"),
    ("first: 3", "first: 0", 8, "0", "at least 1"),
    ("first: 3", "first: true", 8, "True", "at least 1"),
    ("first: 3", "first: 120%", 8, "'120%'", "percentage"),
    ("first: 3", "first: 1.5", 8, "1.5", "a count"),
    ("steps: {first: 3}, recipe: fused_mxfp6", "steps: {first: 3}", 8, "missing", "bf16"),
    ("[0]", "[0, x]", 10, "[0, 'x']", "0-based"),
    ("[0]", "[0, 0]", 10, "[0, 0]", "without repeats"),
    ("[0]", "[-1]", 10, "[-1]", "0-based"),
    ("[0]", "[]", 10, "[]", "0-based"),
    ("from: 5, to: 9", "from: 9, to: 5", 11, "from 9 to 5", "from <= to"),
    ("blocks: {from: 10, to: 19}", "blocks: {from: 10, until: 19}", 12, "'until'", "first, last, from, to"),
    ("expert: high_noise", "expert: high", 13, "'high'", "high_noise, low_noise"),
    ("recipe: fused_mxfp8", "recipe: mxfp9", 14, "'mxfp9'", "mxfp8"),
    ("recipe: fused_mxfp8", "recipe: [mxfp8", 15, "YAML", "expected"),
    ("expert: high_noise", "kind: crossed", 13, "'crossed'", "self, cross, joint"),
    ("expert: high_noise", "stream: duel", 13, "'duel'", "main, vace, dual, single"),
    ("expert: high_noise", "modules: []", 13, "[]", "a module name or a list of them"),
    ("expert: high_noise", "modules: 3", 13, "3", "a module name or a list of them"),
    ("name: example", "name: example\nsampling: {flow_shift: -1}", 3, "-1", "a positive number"),
    ("name: example", "name: example\nsampling: {step: 5}", 3, "'step'", "did you mean 'steps'"),
    ("name: example", "name: example\nsampling: {frames: 0}", 3, "0", "a number of frames"),
    ("name: example", "name: example\nsampling: 5", 3, "5", "a mapping with scheduler, flow_shift"),
]

BIND_MISTAKES = [
    ("first: 3", "first: 30", 8, "30", "1 to 20"),
    ("[0]", "[40]", 10, "40", "0 to 39"),
    ("[0]", "40", 10, "40", "0 to 39"),
    ("from: 5, to: 9", "from: 5, to: 20", 11, "20", "0 to 19"),
    ("blocks: {from: 10, to: 19}", "blocks: {last: 41}", 12, "41", "1 to 40"),
    ("expert: high_noise", "stream: single", 13, "'single'", "accepted: main"),
    ("[0]", "{first: 100%}", 8, "fused_mxfp6", "rules[2] (line 10)"),
    ("expert: high_noise", "kind: joint", 13, "'joint'", "self, cross"),
    ("expert: high_noise", "modules: blocks.99.*", 13, "'blocks.99.*'", "such as 'blocks."),
    ("expert: high_noise", "modules: blocks.0.attn1", 11, "keys that no attention module fits", "keys that some do"),
    ("recipe: fused_mxfp8", "recipe: fused_mxfp8\n    - {recipe: mxfp8}", 8, "fused_mxfp6", "rules[4] (line 15)"),
]


def _message(edit: tuple[str, str]) -> str:
    assert GOOD.count(edit[0]) == 1
    with pytest.raises(ScheduleError) as caught:
        load(GOOD.replace(*edit)).bind(steps=20, blocks=40)
    return str(caught.value)


@pytest.mark.parametrize(("old", "new", "line", "value", "accepted"), FILE_MISTAKES)
def test_a_mistake_in_the_file_names_line_value_and_accepted(old, new, line, value, accepted):
    message = _message((old, new))
    assert re.search(rf"^<string>:{line}: ", message, re.MULTILINE), message
    assert value in message
    assert accepted in message


@pytest.mark.parametrize(("old", "new", "line", "value", "accepted"), BIND_MISTAKES)
def test_a_rule_that_does_not_fit_the_run_names_line_value_and_accepted(old, new, line, value, accepted):
    message = _message((old, new))
    assert message.startswith(f"<string>:{line}: "), message
    assert value in message
    assert accepted in message


def test_the_unedited_schedule_is_valid():
    load(GOOD).bind(steps=20, blocks=40)


def test_all_mistakes_of_a_file_are_reported_at_once():
    message = _message(("version: 1\nname: example", "version: 3\nnane: example"))
    assert [line.split(":")[1] for line in message.splitlines()] == ["1", "1", "2"]


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace("first: 3", "frist: 3"))
    with pytest.raises(ScheduleError, match=re.escape(f"{path}:8: attention.rules[0].steps.frist")):
        load(path)


def test_unknown_recipe_lists_every_recipe():
    message = _message(("default: fused_mxfp4", "default: mxfp5"))
    assert all(name in message for name in recipe_names())


@pytest.mark.parametrize("source", ["no/such/file.yaml", "mxfp5"])
def test_a_source_that_is_neither_file_nor_recipe_says_what_is_accepted(source):
    with pytest.raises(ScheduleError, match=rf"got '{source}'.*accepted: a YAML file.*fused_mxfp4"):
        load(source)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path, encoding):
    path = tmp_path / "mine.yaml"
    path.write_bytes(GOOD.replace("name: example", "name: Exämple").encode(encoding))
    line = 2 if encoding == "latin-1" else 1
    with pytest.raises(ScheduleError, match=re.escape(f"{path}:{line}: schedule: got byte 0x") + ".*accepted: YAML text in UTF-8"):
        load(path)


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(ScheduleError, match=r"which cannot be read .*accepted: a YAML file"):
        load("x" * 5000)


@pytest.mark.parametrize("text", ["\n", "- a\n- b\n", "a: &x [*x]\n", "1: 2\nversion: 1\n"])
def test_documents_of_another_shape_are_refused_with_a_line(text):
    with pytest.raises(ScheduleError, match="<string>:1: "):
        load(text)


def test_a_mapping_with_a_mistake_names_the_key():
    with pytest.raises(ScheduleError, match=r"attention\.rules\[0\]\.recipe: .*got 'x'"):
        load({"version": 1, "name": "m", "attention": {"default": "bf16", "rules": [{"recipe": "x"}]}})


def test_an_expert_the_pipeline_does_not_have_is_refused():
    with pytest.raises(ScheduleError, match=r"<string>:13: .*got 'high_noise'; accepted here: leave it out"):
        load(GOOD).bind(steps=20, blocks=40, experts=("transformer",))


def test_patterns_need_a_model_whose_modules_are_known():
    with pytest.raises(ScheduleError, match=r"<string>:13: .*modules: got \['a'\] for a model whose module names are not known"):
        load(GOOD.replace("model: wan", "model: auto").replace("expert: high_noise", "modules: a")).bind(steps=20, blocks=40)


def test_check_finds_what_does_not_depend_on_the_number_of_steps():
    with pytest.raises(ScheduleError, match=r"<string>:12: .*got 19; accepted: 0 to 11"):
        load(GOOD).check(blocks=12)


def test_check_leaves_the_steps_to_bind():
    schedule = load(GOOD.replace("first: 3", "first: 30"))
    schedule.check(blocks=40)
    with pytest.raises(ScheduleError, match="got 30"):
        schedule.bind(steps=20, blocks=40)


@pytest.mark.parametrize("arguments", [{"steps": 0, "blocks": 4}, {"steps": 4, "blocks": 0}])
def test_runs_without_steps_or_blocks_are_refused(arguments):
    with pytest.raises(ValueError, match="got 0; accepted: at least 1"):
        load("mxfp8").bind(**arguments)
