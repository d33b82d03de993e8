"""Real pipeline runs: what runs in which precision, and what stays the same."""

import copy
import warnings

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from tiny_pipelines import HUNYUAN_DUAL, HUNYUAN_SINGLE, WAN_BLOCKS, hunyuan, run_hunyuan, run_wan, torch_attention, wan

from lowbit_attn.integrations.diffusers import patch, report
from lowbit_attn.integrations.diffusers.processors import WanProcessor, base

HYBRID = {
    "version": 1, "name": "hybrid",
    "attention": {"default": "fused_mxfp4", "rules": [
        {"steps": {"first": 1}, "recipe": "fused_mxfp6"},
        {"steps": {"last": 1}, "recipe": "fused_mxfp6"},
        {"blocks": 0, "recipe": "bf16"},
    ]},
}


def _hybrid_row(step: int, steps: int, blocks: int) -> list[str]:
    return ["bf16"] + ["fused_mxfp6" if step in (0, steps - 1) else "fused_mxfp4"] * (blocks - 1)


@pytest.mark.parametrize("cross", ["unchanged", "mxfp8"])
def test_cross_attention_in_a_recipe_uses_the_stock_arithmetic_around_it(cross, monkeypatch):
    pipe = wan()
    pipe.transformer_2.fuse_qkv_projections()
    before = run_wan(pipe)
    monkeypatch.setattr(base, "attention", torch_attention)
    patch(pipe, {"version": 1, "name": "c", "attention": {"default": "bf16", "cross": cross}})
    assert torch.equal(run_wan(pipe), before)


def test_projections_fused_after_patching_give_the_same_output_as_before():
    fused_before, fused_after = wan(), patch(wan(), "fused_mxfp4")
    for pipe in (fused_before, fused_after):
        pipe.transformer.fuse_qkv_projections()
        pipe.transformer_2.fuse_qkv_projections()
    assert torch.equal(run_wan(patch(fused_before, "fused_mxfp4")), run_wan(fused_after))


@pytest.mark.parametrize(("make", "run"), [(wan, run_wan), (hunyuan, run_hunyuan)])
def test_attention_gets_views_of_what_the_processor_computed(make, run, monkeypatch):
    seen = []

    def spy(query, key, value, *, recipe, key_lengths, enable_gqa):
        seen.extend(x.transpose(1, 2).is_contiguous() for x in (query, key, value))
        return torch_attention(query, key, value, recipe=recipe, key_lengths=key_lengths)

    monkeypatch.setattr(base, "attention", spy)
    run(patch(make(), "mxfp8"), steps=1)
    assert seen
    assert all(seen)


def test_wan_runs_the_schedule_on_both_experts_and_both_guidance_passes():
    pipe = patch(wan(), HYBRID)
    run_wan(pipe, steps=6)
    ran = report(pipe)
    high, low = ran.grid("high_noise"), ran.grid("low_noise")
    switch = high.index(["–"] * WAN_BLOCKS)
    assert 0 < switch < 6
    assert high[:switch] == low[:0] + [_hybrid_row(step, 6, WAN_BLOCKS) for step in range(switch)]
    assert low[switch:] == [_hybrid_row(step, 6, WAN_BLOCKS) for step in range(switch, 6)]
    assert set(ran.calls.values()) == {2}
    assert ran.counts() == {"bf16": 12, "fused_mxfp4": 16, "fused_mxfp6": 8}


def test_rules_for_one_expert_leave_the_other_alone():
    rule = {"expert": "low_noise", "recipe": "bf16"}
    pipe = patch(wan(), {"version": 1, "name": "e", "attention": {"default": "fused_mxfp4", "rules": [rule]}})
    run_wan(pipe, steps=6)
    recipes = {expert: {cell for row in report(pipe).grid(expert) for cell in row} for expert in ("high_noise", "low_noise")}
    assert recipes == {"high_noise": {"fused_mxfp4", "–"}, "low_noise": {"bf16", "–"}}


def test_guidance_off_counts_one_call_each():
    pipe = patch(wan(experts=1), HYBRID)
    run_wan(pipe, guidance=1.0)
    assert set(report(pipe).calls.values()) == {1}


def test_a_single_expert_pipeline_runs_the_whole_schedule():
    pipe = patch(wan(experts=1), HYBRID)
    run_wan(pipe)
    assert report(pipe).grid("transformer") == [_hybrid_row(step, 4, WAN_BLOCKS) for step in range(4)]


def test_hunyuan_runs_the_schedule_on_dual_and_single_blocks():
    stream = {"stream": "single", "steps": 1, "recipe": "bf16"}
    attention = {"default": "fused_mxfp4", "rules": [{"steps": {"first": 1}, "recipe": "fused_mxfp6"}, stream]}
    pipe = patch(hunyuan(), {"version": 1, "name": "h", "attention": attention})
    run_hunyuan(pipe, steps=3)
    blocks = HUNYUAN_DUAL + HUNYUAN_SINGLE
    assert report(pipe).grid() == [
        ["fused_mxfp6"] * blocks,
        ["fused_mxfp4"] * HUNYUAN_DUAL + ["bf16"] * HUNYUAN_SINGLE,
        ["fused_mxfp4"] * blocks,
    ]


@pytest.mark.parametrize(("make", "run"), [(wan, run_wan), (hunyuan, run_hunyuan)])
def test_the_scheduled_recipe_is_what_reaches_attention(make, run, monkeypatch):
    asked = []

    def spy(query, key, value, *, recipe, key_lengths, enable_gqa):
        asked.append(recipe)
        return torch_attention(query, key, value, recipe=recipe, key_lengths=key_lengths)

    monkeypatch.setattr(base, "attention", spy)
    pipe = patch(make(), HYBRID)
    run(pipe)
    assert {recipe: asked.count(recipe) for recipe in asked} == {
        recipe: count for recipe, count in report(pipe).counts().items() if recipe != "bf16"}


def test_lower_precision_changes_the_latents_a_little():
    pipe = wan()
    exact = run_wan(pipe)
    error = {recipe: float((run_wan(patch(pipe, recipe)) - exact).norm() / exact.norm()) for recipe in ("mxfp8", "fused_mxfp4")}
    assert 0 < error["mxfp8"] < error["fused_mxfp4"] < 0.1


@pytest.mark.parametrize(("make", "run"), [(wan, run_wan), (hunyuan, run_hunyuan)])
def test_bf16_models_stay_close_to_their_own_bf16_output(make, run):
    pipe = make().to(torch.bfloat16)
    exact = run(pipe).float()
    low = run(patch(pipe, HYBRID)).float()
    assert 0 < float((low - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("run_before", [False, True])
def test_a_model_called_outside_a_run_is_stock_and_says_so(run_before):
    pipe = patch(wan(experts=1), "fused_mxfp4")
    if run_before:
        run_wan(pipe, steps=2)
    inputs = {"hidden_states": torch.ones(1, 16, 1, 4, 4), "timestep": torch.tensor([5]),
              "encoder_hidden_states": torch.ones(1, 4, 32), "return_dict": False}
    with pytest.warns(UserWarning, match="outside a run"), pipe.transformer.cache_context("cond"):
        patched = pipe.transformer(**inputs)[0]
    assert torch.equal(patched, wan(experts=1).transformer(**inputs)[0])


def test_a_run_gives_no_warning_of_its_own():
    pipe = patch(wan(), HYBRID)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_wan(pipe)
    assert not [w for w in caught if str(w.message).startswith("lowbit_attn: model")]


def test_a_deep_copied_model_does_not_speak_for_the_pipeline():
    pipe = patch(wan(experts=1), "fused_mxfp4")
    twin = copy.deepcopy(pipe.transformer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the pipeline's own model would warn that no run is in progress
        with twin.cache_context("cond"):
            pass


@pytest.mark.parametrize("tokens", [1, 7, 31, 33, 130])
@pytest.mark.parametrize("recipe", ["mxfp8", "fused_mxfp4", "mxattention"])
def test_sequences_of_any_length_give_finite_numbers(tokens, recipe):
    processor = WanProcessor(WanAttnProcessor(), "block 0")
    processor.recipe = recipe
    query, key, value = torch.randn(3, 1, tokens, 2, 64)
    out = processor.attend(query, key, value)
    exact = torch_attention(*(x.transpose(1, 2) for x in (query, key, value)), recipe="bf16", key_lengths=None).transpose(1, 2)
    assert torch.isfinite(out).all()
    assert float((out - exact).norm() / exact.norm()) < 0.5


def test_views_into_a_larger_buffer_are_read_at_their_offset():
    """Fused projections hand over strided views that start inside one tensor."""
    processor = WanProcessor(WanAttnProcessor(), "block 0")
    processor.recipe = "mxfp8"
    query, key, value = (x.unflatten(-1, (2, 16)) for x in torch.randn(2, 9, 96).chunk(3, dim=-1))
    assert value.storage_offset() > 0
    assert torch.equal(processor.attend(query, key, value), processor.attend(*(x.contiguous() for x in (query, key, value))))


def test_grouped_key_heads_equal_repeated_ones():
    processor = WanProcessor(WanAttnProcessor(), "block 0")
    processor.recipe = "mxfp8"
    query, (key, value) = torch.randn(1, 9, 4, 16), torch.randn(2, 1, 9, 2, 16)
    repeated = processor.attend(query, *(x.repeat_interleave(2, dim=2) for x in (key, value)))
    assert torch.equal(processor.attend(query, key, value), repeated)


def test_higher_precision_at_the_ends_is_closer_to_exact_than_four_bits_everywhere():
    pipe = wan()
    exact = run_wan(pipe, steps=8)
    ends = {"version": 1, "name": "e", "attention": {"default": "fused_mxfp4", "rules": [
        {"steps": {"first": 3}, "recipe": "fused_mxfp6"}, {"steps": {"last": 3}, "recipe": "fused_mxfp6"}]}}
    errors = [float((run_wan(patch(pipe, schedule), steps=8) - exact).norm()) for schedule in (ends, "fused_mxfp4")]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("recipe", ["mxfp8", "fused_mxfp6"])
def test_large_activations_in_half_precision_stay_finite(recipe):
    """Scores in the thousands, as untrained or scaled models have, give no black video."""
    pipe = wan(experts=1).to(torch.float16)
    with torch.no_grad():
        for block in pipe.transformer.blocks:
            block.attn1.norm_q.weight.mul_(30)
            block.attn1.norm_k.weight.mul_(30)
    latents = run_wan(patch(pipe, recipe), steps=2)
    assert torch.isfinite(latents).all()
    assert latents.std() > 0.1
