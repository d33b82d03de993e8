"""`patch` changes only what it says, all or nothing, and `unpatch` puts everything back."""

import copy

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from tiny_pipelines import hunyuan, run_wan, wan, wan_scheduler, wan_transformer

from lowbit_attn.integrations.diffusers import patch, report, unpatch
from lowbit_attn.integrations.diffusers.processors import HunyuanVideoProcessor, WanProcessor


def _models(pipe):
    return [model for name in ("transformer", "transformer_2") if (model := getattr(pipe, name, None)) is not None]


def _state(pipe):
    """Identity of everything that patching might touch."""
    parts: dict[str, object] = {"pipe": dict(vars(pipe))}
    parts["scheduler"] = {name: id(value) for name, value in vars(pipe.scheduler).items()}
    parts["scheduler methods"] = [getattr(pipe.scheduler, name).__func__ for name in ("set_timesteps", "step")]
    for index, model in enumerate(_models(pipe)):
        parts[f"cache context {index}"] = model.cache_context.__func__
        parts[f"model {index}"] = {name: id(value) for name, value in vars(model).items()}
        for name, module in model.named_modules():
            if hasattr(module, "processor"):
                parts[f"model {index} {name}"] = {key: id(value) for key, value in vars(module).items()}
    return parts


def _processors(pipe):
    return {name: processor for model in _models(pipe) for name, processor in model.attn_processors.items()}


def _unsupported():
    unet = UNet2DModel(sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
                       down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)
    return DDPMPipeline(unet, DDPMScheduler())


@pytest.mark.parametrize("make", [wan, hunyuan])
def test_unpatch_restores_every_object(make):
    pipe = make()
    before = _state(pipe)
    patch(pipe, "fused_mxfp4")
    assert _state(pipe) != before
    unpatch(pipe)
    assert _state(pipe) == before


def test_patching_leaves_the_state_dict_unchanged():
    pipe = wan()
    before = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
    patch(pipe, "fused_mxfp4")
    after = pipe.transformer.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_each_self_attention_has_its_own_processor_and_cross_attention_keeps_its_own():
    pipe = wan()
    before = _processors(pipe)
    patch(pipe, "fused_mxfp4")
    after = _processors(pipe)
    own = [processor for name, processor in after.items() if "attn1" in name]
    assert all(type(processor) is WanProcessor for processor in own)
    assert len(set(map(id, own))) == len(own)
    assert all(after[name] is before[name] for name in after if "attn2" in name)


def test_a_cross_recipe_patches_cross_attention_too():
    pipe = patch(wan(experts=1), {"version": 1, "name": "c", "attention": {"default": "bf16", "cross": "mxfp8"}})
    run_wan(pipe, steps=2)
    assert report(pipe).counts("cross") == {"mxfp8": 2 * 2 * 3}
    assert report(pipe).counts("self") == {"bf16": 2 * 2 * 3}


def test_the_token_refiner_is_left_alone():
    pipe = hunyuan()
    before = _processors(pipe)
    patch(pipe, "fused_mxfp4")
    after = _processors(pipe)
    refiner = [name for name in after if "refiner" in name]
    assert refiner
    assert all(after[name] is before[name] for name in refiner)
    assert all(type(processor) is HunyuanVideoProcessor for name, processor in after.items() if name not in refiner)


def test_patching_twice_replaces_the_schedule():
    pipe = wan()
    before = _state(pipe)
    patch(patch(pipe, "fused_mxfp6"), "fused_mxfp4")
    run_wan(pipe, steps=2)
    assert set(report(pipe).counts()) == {"fused_mxfp4"}
    unpatch(pipe)
    pipe.scheduler = wan_scheduler()  # the run changed the old one's own state
    assert _state(pipe).keys() == before.keys()
    assert all(type(processor) is WanAttnProcessor for processor in _processors(pipe).values())


def test_a_second_pipeline_is_untouched():
    first, second = wan(), wan()
    before = _state(second)
    patch(first, "fused_mxfp4")
    assert _state(second) == before


def test_attention_backend_set_after_patching_reaches_the_stock_processor():
    pipe = wan(experts=1)
    stock = pipe.transformer.blocks[0].attn1.processor
    patch(pipe, "fused_mxfp4")
    pipe.transformer.set_attention_backend("native")
    assert stock._attention_backend is not None


@pytest.mark.parametrize("make", [wan, hunyuan])
def test_loading_weights_after_patching_works(make):
    pipe = patch(make(), "fused_mxfp4")
    missing, unexpected = pipe.transformer.load_state_dict(make().transformer.state_dict())
    assert not missing
    assert not unexpected


def _foreign_processor(pipe):
    pipe.transformer_2.blocks[1].attn1.set_processor(type("Other", (WanAttnProcessor,), {})())


def _unequal_experts(pipe):
    pipe.transformer_2 = wan_transformer(1, blocks=2)


def _no_transformers(pipe):
    pipe.transformer = pipe.transformer_2 = None


def _no_scheduler(pipe):
    pipe.scheduler = None


def _other_model(pipe):
    pipe.transformer_2 = hunyuan().transformer


GOOD = {"version": 1, "name": "test", "attention": {"default": "fused_mxfp4"}}


def _with_rule(**rule):
    return {**GOOD, "attention": {"default": "fused_mxfp4", "rules": [{"recipe": "bf16", **rule}]}}


@pytest.mark.parametrize(("make", "spoil", "schedule", "error", "message"), [
    (_unsupported, None, GOOD, TypeError, "got DDPMPipeline, whose attention lowbit_attn does not guess at; accepted: WanPipeline"),
    (wan, None, {**GOOD, "model": "hunyuan_video"}, ValueError, "got .hunyuan_video. for a WanPipeline; accepted: .wan."),
    (wan, None, 7, TypeError, "schedule: got int; accepted: a path"),
    (wan, None, _with_rule(blocks=3), ValueError, "got 3; accepted: 0 to 2"),
    (wan, None, _with_rule(stream="dual"), ValueError, "got 'dual'; accepted: main"),
    (hunyuan, None, _with_rule(blocks=4), ValueError, "got 4; accepted: 0 to 3"),
    (hunyuan, None, _with_rule(expert="low_noise"), ValueError, "got 'low_noise'; accepted here: leave it out"),
    (hunyuan, None, {**GOOD, "attention": {"default": "bf16", "cross": "mxfp8"}}, ValueError, "cross: got 'mxfp8'"),
    (wan, _foreign_processor, GOOD, ValueError, r"low_noise blocks.1.attn1: got processor Other; accepted: diffusers. own"),
    (wan, _unequal_experts, GOOD, ValueError, r"got|different numbers of blocks, \[3, 2\]; accepted: equal"),
    (wan, _no_transformers, GOOD, ValueError, "no transformer; accepted: transformer or transformer_2 set"),
    (wan, _no_scheduler, GOOD, TypeError, "scheduler: got a NoneType; accepted"),
    (wan, _other_model, GOOD, TypeError, "low_noise: got a HunyuanVideoTransformer3DModel; accepted"),
])
def test_a_failed_patch_is_a_clear_error_and_changes_nothing(make, spoil, schedule, error, message):
    pipe = make()
    if spoil is not None:
        spoil(pipe)
    before = _state(pipe) if pipe.scheduler is not None else None
    with pytest.raises(error, match=message):
        patch(pipe, schedule)
    assert before is None or _state(pipe) == before


def test_a_failed_second_patch_keeps_the_first():
    pipe = patch(wan(), "fused_mxfp6")
    before = _state(pipe)
    with pytest.raises(ValueError, match="accepted: 0 to 2"):
        patch(pipe, _with_rule(blocks=3))
    assert _state(pipe) == before


def test_a_model_patched_through_another_pipeline_is_refused():
    first = wan()
    second = type(first)(**first.components, boundary_ratio=first.config.boundary_ratio)
    patch(first, "fused_mxfp4")
    with pytest.raises(ValueError, match="patched through another pipeline"):
        patch(second, "fused_mxfp4")


@pytest.mark.parametrize("call", [unpatch, report])
def test_calls_on_an_unpatched_pipeline_are_refused(call):
    with pytest.raises(ValueError, match="this WanPipeline is not patched"):
        call(wan())


def test_copying_a_patched_pipeline_is_refused():
    with pytest.raises(TypeError, match="unpatch it first"):
        copy.deepcopy(patch(wan(), "fused_mxfp4"))
