"""`patch` changes only what it says, all or nothing, and `unpatch` puts everything back."""

import copy
import re

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, DiffusionPipeline, UNet2DModel
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from family_pipelines import cogvideox, hunyuan_i2v, run_cogvideox, run_hunyuan_i2v, wan_i2v
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


class _Mine(DiffusionPipeline):
    """A pipeline that nobody knows, around models that are known and one that is not."""

    def __init__(self, transformer, scheduler, unet):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, unet=unet)


def _mine():
    unet = UNet2DModel(sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, attention_head_dim=4,
                       down_block_types=("AttnDownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)
    return _Mine(wan_transformer(0), wan_scheduler(), unet)


def test_an_unknown_pipeline_lists_its_attention_and_refuses_to_guess():
    pipe = _mine()
    with pytest.raises(TypeError) as caught:
        patch(pipe, "fused_mxfp4", model="auto")
    message = str(caught.value)
    assert "got _Mine, whose attention lowbit_attn does not guess at" in message
    assert "transformer (WanTransformer3DModel): model='wan' would fit" in message
    assert "3 × blocks.*.attn1 (WanAttnProcessor): would run the schedule" in message
    assert "3 × blocks.*.attn2 (WanAttnProcessor): left alone, unless the schedule says otherwise" in message
    assert "unet (UNet2DModel): of no family that is known" in message
    assert re.search(r"\d+ × down_blocks.*attentions.* \(AttnProcessor2_0\): left alone", message)
    assert not [name for name in vars(pipe) if "lowbit" in name]


def test_an_unknown_pipeline_runs_as_the_family_that_is_named():
    pipe = patch(_mine(), "fused_mxfp4", model="wan")
    assert all(type(block.attn1.processor) is WanProcessor for block in pipe.transformer.blocks)
    assert type(unpatch(pipe).transformer.blocks[0].attn1.processor) is WanAttnProcessor


@pytest.mark.parametrize(("model", "error", "message"), [
    ("hunyuan_video", TypeError, "got a WanTransformer3DModel; accepted for 'hunyuan_video': HunyuanVideoTransformer3DModel"),
    ("wam", ValueError, "model: got 'wam'; accepted: None, 'auto', wan, hunyuan_video"),
])
def test_a_family_that_does_not_fit_is_refused(model, error, message):
    with pytest.raises(error, match=message):
        patch(_mine(), "fused_mxfp4", model=model)


def test_a_subclass_of_a_known_pipeline_is_known():
    pipe = wan(experts=1)
    pipe.__class__ = type("Mine", (type(pipe),), {})
    assert report(patch(pipe, "fused_mxfp4")).calls == {}


def test_fusing_and_unfusing_cogvideox_after_patching_keeps_the_schedule():
    pipe = cogvideox()
    stock = pipe.transformer.transformer_blocks[0].attn1.processor
    patch(pipe, "mxfp8")
    for change, recipe in ((pipe.transformer.fuse_qkv_projections, "mxfp8"), (pipe.transformer.unfuse_qkv_projections, "mxfp8")):
        change()
        run_cogvideox(pipe)
        assert report(pipe).counts().keys() == {recipe}
    assert unpatch(pipe).transformer.transformer_blocks[0].attn1.processor is stock


def test_a_processor_replaced_after_patching_is_refused_before_any_denoising():
    pipe = patch(wan(experts=1), "mxfp8")
    pipe.transformer.blocks[1].attn1.set_processor(type("Other", (WanAttnProcessor,), {})())
    with pytest.raises(RuntimeError, match=r"transformer blocks.1.attn1: the processor was replaced after patch\(\) by a Other"):
        run_wan(pipe)


def test_nothing_global_changes(monkeypatch):
    """Nor the autoencoder, which has attention of its own."""
    before = {name: id(value) for name, value in vars(attention_dispatch).items()}
    registry, sdpa = attention_dispatch._AttentionBackendRegistry, torch.nn.functional.scaled_dot_product_attention
    active = registry.get_active_backend()
    pipe = hunyuan_i2v()
    autoencoder = {name: module.processor for name, module in pipe.vae.named_modules() if hasattr(module, "processor")}
    patch(pipe, "fused_mxfp4")
    run_hunyuan_i2v(pipe)
    assert {name: id(value) for name, value in vars(attention_dispatch).items()} == before
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert registry.get_active_backend() == active
    assert autoencoder
    assert all(module.processor is autoencoder[name] for name, module in pipe.vae.named_modules() if name in autoencoder)


def test_rules_for_cross_attention_or_modules_give_it_a_processor():
    rules = [{"modules": "blocks.0.attn2", "recipe": "mxfp8"}]
    pipe = patch(wan(experts=1), {"version": 1, "name": "m", "attention": {"default": "bf16", "rules": rules}})
    run_wan(pipe, steps=2)
    assert report(pipe).counts("cross") == {"mxfp8": 2 * 2}
    assert [type(block.attn2.processor) for block in pipe.transformer.blocks] == [WanProcessor, WanAttnProcessor, WanAttnProcessor]


def test_rules_by_module_name_leave_image_cross_attention_alone():
    rules = [{"modules": "blocks.0.attn1", "recipe": "bf16"}]
    patch(wan_i2v(), {"version": 1, "name": "m", "attention": {"default": "mxfp8", "rules": rules}})
    with pytest.raises(ValueError, match=r"cross-attention to images as well as text; accepted: attention\.cross: unchanged"):
        patch(wan_i2v(), {"version": 1, "name": "m", "attention": {"default": "mxfp8", "cross": "mxfp8"}})
