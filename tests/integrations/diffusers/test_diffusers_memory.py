"""Offloading, LoRA, saving and loading, and number formats go on working around patched modules."""

import pytest
import torch
from diffusers import WanPipeline
from tiny_pipelines import hunyuan, run_hunyuan, run_wan, wan

from lowbit_attn.integrations.diffusers import patch, report, unpatch

CPU = torch.device("cpu")


def _sequential(model):
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=CPU, state_dict=model.state_dict())


def _whole_model(model):
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(model, execution_device=CPU)


def _groups(model):
    model.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type="leaf_level")


@pytest.mark.parametrize("offload", [_sequential, _whole_model, _groups])
@pytest.mark.parametrize("patched_first", [True, False])
def test_offloaded_models_give_the_same_latents(offload, patched_first):
    expected = run_wan(patch(wan(), "fused_mxfp4"), steps=2)
    pipe = wan()
    if patched_first:
        patch(pipe, "fused_mxfp4")
    for model in (pipe.transformer, pipe.transformer_2):
        offload(model)
    if not patched_first:
        patch(pipe, "fused_mxfp4")
    assert torch.equal(run_wan(pipe, steps=2), expected)
    assert report(pipe).counts().keys() == {"fused_mxfp4"}


def test_processors_hold_no_tensor_so_nothing_stays_on_the_device_when_experts_switch():
    pipe = patch(wan(), "fused_mxfp4")
    run_wan(pipe)
    processors = [block.attn1.processor for model in (pipe.transformer, pipe.transformer_2) for block in model.blocks]
    assert not [value for processor in processors for value in vars(processor).values() if isinstance(value, torch.Tensor)]


def test_a_saved_patched_pipeline_loads_as_the_stock_one(tmp_path):
    pipe = patch(wan(experts=1), "fused_mxfp4")
    pipe.save_pretrained(tmp_path)
    loaded = WanPipeline.from_pretrained(tmp_path, tokenizer=None, text_encoder=None, vae=None, transformer_2=None)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(run_wan(loaded), run_wan(unpatch(pipe)))
    assert not torch.equal(run_wan(patch(loaded, "fused_mxfp4")), run_wan(pipe))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "run"), [(wan, run_wan), (hunyuan, run_hunyuan)])
def test_number_formats_set_before_or_after_patching_agree(dtype, make, run):
    before = run(patch(make().to(dtype), "mxfp8"), steps=2)
    after = run(patch(make(), "mxfp8").to(dtype), steps=2)
    assert torch.equal(before, after)
    assert torch.isfinite(before).all()


def _add_lora(pipe):
    from peft import LoraConfig

    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False))


@pytest.mark.parametrize("patched_first", [True, False])
def test_lora_loaded_before_or_after_patching_acts(patched_first):
    pytest.importorskip("peft")
    pipe = wan(experts=1)
    plain = run_wan(patch(wan(experts=1), "mxfp8"), steps=2)
    if patched_first:
        patch(pipe, "mxfp8")
    torch.manual_seed(0)
    _add_lora(pipe)
    if not patched_first:
        patch(pipe, "mxfp8")
    low = run_wan(pipe, steps=2)
    exact = run_wan(unpatch(pipe), steps=2)
    assert float((low - exact).norm() / exact.norm()) < 0.05 < float((low - plain).norm() / plain.norm())
