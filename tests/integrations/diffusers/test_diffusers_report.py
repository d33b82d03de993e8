"""What a report says: calls, steps and blocks, time; and the printed form."""

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from rich.console import Console
from tiny_pipelines import WAN_BLOCKS, run_wan, wan

from lowbit_attn.integrations.diffusers import patch, report, unpatch

HALF = {"version": 1, "name": "half", "attention": {"default": "mxfp8", "rules": [{"steps": {"first": 1}, "recipe": "bf16"}]}}


def _printed(shown):
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_time_is_measured_by_recipe_and_printed_after_each_run(capsys):
    pipe = patch(wan(experts=1), HALF, report=True)
    run_wan(pipe, steps=2)
    ran = report(pipe)
    assert ran.seconds.keys() == {"bf16", "mxfp8"}
    assert all(seconds > 0 for seconds in ran.seconds.values())
    assert sum(ran.time_share().values()) < 1
    assert ran.counts() == {"bf16": 2 * WAN_BLOCKS, "mxfp8": 2 * WAN_BLOCKS}
    assert "of which attention modules: bf16" in capsys.readouterr().err
    assert str(ran) == _printed(ran).rstrip()


def test_a_second_run_is_timed_on_its_own():
    pipe = patch(wan(experts=1), "bf16", report=True)
    run_wan(pipe, steps=8)
    long = report(pipe).seconds["bf16"]
    run_wan(pipe, steps=1)
    assert report(pipe).seconds["bf16"] < long


def test_without_measuring_there_is_no_hook_and_nothing_is_printed(capsys):
    pipe = patch(wan(experts=1), HALF)
    assert not pipe.transformer.blocks[0].attn1._forward_hooks
    run_wan(pipe)
    assert capsys.readouterr().err == ""
    assert report(pipe).seconds == {}


def test_unpatching_takes_the_stopwatch_off():
    pipe = patch(wan(experts=1), HALF, report=True)
    assert pipe.transformer.blocks[0].attn1._forward_hooks
    unpatch(pipe)
    assert not pipe.transformer.blocks[0].attn1._forward_hooks
    assert not pipe.transformer.blocks[0].attn1._forward_pre_hooks


def test_measuring_does_not_break_compiled_graphs():
    torch.compiler.reset()
    pipe = wan(experts=1, blocks=1)
    pipe.transformer.compile(backend="eager", fullgraph=True)
    patch(pipe, HALF, report=True)
    run_wan(pipe, steps=2)
    assert report(pipe).counts() == {"bf16": 2, "mxfp8": 2}
    assert "not measured in compiled code" in _printed(report(pipe))


def test_the_printed_report_has_the_grid_and_the_counts():
    pipe = patch(wan(), HALF)
    run_wan(pipe, steps=4)
    text = _printed(report(pipe))
    assert "high_noise" in text
    assert "low_noise" in text
    assert f"self-attention calls: bf16 {2 * WAN_BLOCKS}, mxfp8 {6 * WAN_BLOCKS}" in text


def test_a_report_before_any_run_says_so():
    assert "nothing ran yet" in _printed(report(patch(wan(), HALF)))


def test_an_unknown_expert_is_refused():
    pipe = patch(wan(experts=1), HALF)
    run_wan(pipe)
    with pytest.raises(ValueError, match="expert: got 'low'; accepted: transformer"):
        report(pipe).grid("low")


def test_blocks_that_a_cache_skips_are_reported_as_not_run():
    pipe = wan(experts=1)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=100.0))
    patch(pipe, "mxfp8")
    run_wan(pipe, steps=3)
    grid = report(pipe).grid()
    assert grid[0] == ["mxfp8"] * WAN_BLOCKS
    assert grid[2] == ["mxfp8"] + ["–"] * (WAN_BLOCKS - 1)
