"""Under torch.compile: one graph per recipe, none added by later runs, never a stale one, and a true report."""

import pytest
import torch
from tiny_pipelines import hunyuan, run_hunyuan, run_wan, wan
from torch._dynamo.utils import counters

from lowbit_attn.integrations.diffusers import patch, report, unpatch

THREE = {"version": 1, "name": "three", "attention": {"default": "fused_mxfp4", "rules": [
    {"steps": {"first": 1}, "recipe": "bf16"}, {"steps": {"last": 1}, "recipe": "fused_mxfp6"}]}}
BY_BLOCK = {"version": 1, "name": "blocks", "attention": {"default": "fused_mxfp4", "rules": [
    {"blocks": 0, "recipe": "bf16"}, {"blocks": {"last": 1}, "recipe": "fused_mxfp6"}]}}


def _small_wan(experts: int = 1):
    return wan(experts=experts, blocks=1)


def _two_experts():
    return _small_wan(experts=2)


def _small_hunyuan():
    return hunyuan(dual=1, single=1)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def _compile(pipe):
    for model in (pipe.transformer, getattr(pipe, "transformer_2", None)):
        if model is not None:
            model.compile(backend="eager", fullgraph=True)
    return pipe


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("make", "run"), [(_two_experts, run_wan), (_small_hunyuan, run_hunyuan)])
def test_compiled_runs_make_one_graph_per_recipe_and_later_runs_add_none(make, run):
    pipe = patch(_compile(make()), THREE)
    run(pipe, steps=6)
    assert _graphs() == 3
    run(pipe, steps=4)
    assert _graphs() == 3


@pytest.mark.parametrize(("make", "run"), [
    (_two_experts, run_wan), pytest.param(_small_hunyuan, run_hunyuan, marks=pytest.mark.full)])
def test_compiled_output_and_report_equal_eager(make, run):
    eager, compiled = patch(make(), THREE), patch(_compile(make()), THREE)
    torch.testing.assert_close(run(compiled), run(eager), rtol=1e-5, atol=1e-5)
    assert report(compiled) == report(eager)
    assert report(compiled).calls


def test_repeated_blocks_compiled_one_by_one_follow_block_rules():
    pipe = wan(experts=1)
    pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    patch(pipe, BY_BLOCK)
    run_wan(pipe, steps=2)
    assert report(pipe).grid() == [["bf16", "fused_mxfp4", "fused_mxfp6"]] * 2
    assert _graphs() == 3
    run_wan(pipe, steps=3)
    assert _graphs() == 3


def test_a_model_wrapped_by_torch_compile_is_found():
    pipe = _small_wan()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    patch(pipe, THREE)
    run_wan(pipe, steps=3)
    assert [row[0] for row in report(pipe).grid()] == ["bf16", "fused_mxfp4", "fused_mxfp6"]


def test_wrapping_by_torch_compile_after_patching_keeps_the_schedule():
    pipe = patch(_small_wan(), THREE)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    run_wan(pipe, steps=3)
    assert [row[0] for row in report(pipe).grid()] == ["bf16", "fused_mxfp4", "fused_mxfp6"]


def test_patching_and_unpatching_a_model_that_has_run_compiled_leaves_no_stale_graph():
    pipe = _compile(_small_wan())
    stock = run_wan(pipe)
    patch(pipe, "fused_mxfp4")
    low = run_wan(pipe)
    patch(pipe, "fused_mxfp6")
    mid = run_wan(pipe)
    unpatch(pipe)
    assert torch.equal(run_wan(pipe), stock)
    expected = [run_wan(patch(_small_wan(), recipe)) for recipe in ("fused_mxfp4", "fused_mxfp6")]
    torch.testing.assert_close([low, mid], expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(low, mid)
    assert not torch.equal(low, stock)


@pytest.mark.full
def test_inductor_gives_the_eager_latents():
    eager = run_wan(patch(_small_wan(), THREE))
    pipe = _small_wan()
    pipe.transformer.compile(fullgraph=True)
    torch.testing.assert_close(run_wan(patch(pipe, THREE)), eager, rtol=1e-3, atol=1e-3)
    assert report(pipe).counts().keys() == {"bf16", "fused_mxfp4", "fused_mxfp6"}
