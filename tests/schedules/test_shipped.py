"""Shipped schedules are found by name from any folder; a file of that name goes first."""

import pytest

from lowbit_attn.schedules import ScheduleError, load, shipped


@pytest.mark.parametrize("name", shipped.schedule_names())
def test_every_shipped_schedule_loads_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(name).model_dump() == load(shipped.folder() / f"{name}.yaml").model_dump()


def test_a_file_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = shipped.schedule_names()[0]
    (tmp_path / name).write_text("version: 1\nname: mine\nattention: {default: bf16}\n", encoding="utf-8")
    assert load(name).name == "mine"


def test_an_unknown_name_is_told_the_shipped_ones():
    with pytest.raises(ScheduleError, match=shipped.schedule_names()[0]):
        load("wan9")
