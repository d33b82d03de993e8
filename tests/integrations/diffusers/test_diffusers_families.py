"""Every family: what is replaced, that all around attention stays the same, and that it runs its schedule."""

import importlib
import inspect

import diffusers
import pytest
import torch
from diffusers.models import attention_processor
from family_pipelines import FAMILIES
from tiny_pipelines import torch_attention
from torch._dynamo.utils import counters

from lowbit_attn.integrations.diffusers import patch, report, unpatch
from lowbit_attn.integrations.diffusers.adapters import ADAPTERS
from lowbit_attn.integrations.diffusers.processors import PROCESSORS, LowBitProcessor, base
from lowbit_attn.schedules import FAMILIES as STREAMS

ENDS = {"version": 1, "name": "ends", "attention": {"default": "fused_mxfp4", "rules": [
    {"steps": {"first": 1}, "recipe": "fused_mxfp6"}, {"blocks": 0, "recipe": "bf16"}]}}

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def experts(pipe):
    adapter = next(adapter for adapter in ADAPTERS.values() if {c.__name__ for c in type(pipe).__mro__} & set(adapter.pipelines))
    return adapter.experts(pipe)


def processors(pipe):
    return {f"{expert}.{name}": module.processor for expert, model in experts(pipe).items()
            for name, module in model.named_modules() if hasattr(module, "processor")}


@every_family
def test_bf16_everywhere_is_bit_identical_to_the_unpatched_pipeline(family):
    pipe = family.make()
    before = family.run(pipe)
    assert torch.equal(family.run(patch(pipe, "bf16")), before)
    assert set(report(pipe).counts()) == {"bf16"}


@every_family
@pytest.mark.parametrize("fused", [None, "before", "after"])
def test_everything_around_attention_is_bit_identical_to_the_stock_processor(family, fused, monkeypatch):
    if fused and family.name == "ltx-2":
        pytest.skip("diffusers cannot fuse LTX-2's projections: key and query of its audio attention differ in width")
    pipe = family.make()
    monkeypatch.setattr(base, "attention", torch_attention)
    if fused != "before":
        patch(pipe, "mxfp8")
    if fused:
        for model in experts(pipe).values():
            model.fuse_qkv_projections()
    if fused == "before":
        patch(pipe, "mxfp8")
    patched = family.run(pipe)
    assert set(report(pipe).counts()) == {"mxfp8"}
    unpatch(pipe)
    assert torch.equal(patched, family.run(pipe))


@every_family
def test_the_schedule_runs_by_step_and_block(family):
    pipe = patch(family.make(), ENDS)
    family.run(pipe, steps=3)
    rows = [["bf16"] + [recipe] * (family.blocks - 1) for recipe in ("fused_mxfp6", "fused_mxfp4", "fused_mxfp4")]
    assert report(pipe).grid() == rows
    passes = {number for call, number in report(pipe).calls.items() if call.block == 0}
    assert passes == {family.passes}


UNTOUCHED = {
    "wan i2v": "attn2", "wan animate": "face_adapter", "hunyuan video": "refiner", "hunyuan video i2v": "refiner",
    "hunyuan video 1.5": "refiner", "minimax-h3": "refiner", "ltx": "attn2", "ltx-2": "audio",
}


@every_family
def test_each_video_attention_has_a_processor_of_its_own_and_no_other_module_has_one(family):
    pipe = family.make()
    before = processors(pipe)
    patch(pipe, "fused_mxfp4")
    after = processors(pipe)
    ours = [processor for processor in after.values() if isinstance(processor, LowBitProcessor)]
    assert len(set(map(id, ours))) == len(ours) == family.blocks * len(experts(pipe))
    others = [name for name in after if not isinstance(after[name], LowBitProcessor)]
    assert all(after[name] is before[name] for name in others)
    if family.name in UNTOUCHED:
        assert any(UNTOUCHED[family.name] in name for name in others)
    unpatch(pipe)
    assert all(processor is before[name] for name, processor in processors(pipe).items())


@every_family
def test_unpatch_restores_the_output(family):
    pipe = family.make()
    before = family.run(pipe)
    low = family.run(patch(pipe, "fused_mxfp4"))
    assert torch.isfinite(low).all()
    assert not torch.equal(low, before)
    assert torch.equal(family.run(unpatch(pipe)), before)


def _without_branches(family):
    """LTX-2's perturbed guidance branches on a tensor, in diffusers' own processor too."""
    return {"spatio_temporal_guidance_blocks": None, "stg_scale": 0.0, "audio_stg_scale": 0.0} if family.name == "ltx-2" else {}


@pytest.mark.parametrize("name", ["hunyuan video 1.5", "minimax-h3", "cogvideox", "ltx", "ltx-2", "flux"])
def test_a_block_of_any_family_runs_compiled_without_a_graph_break(name):
    torch.compiler.reset()
    family = FAMILIES[name]
    eager = family.run(patch(family.make(), "fused_mxfp4"), **_without_branches(family))
    pipe = family.make()
    model = experts(pipe)["transformer"]
    blocks = next(getattr(model, stream.blocks) for stream in reversed(STREAMS[family.family]) if hasattr(model, stream.blocks))
    blocks[-1].compile(backend="eager", fullgraph=True)
    low = family.run(patch(pipe, "fused_mxfp4"), **_without_branches(family))
    torch.testing.assert_close(low, eager, rtol=1e-5, atol=1e-5)
    assert report(pipe).counts().keys() == {"fused_mxfp4"}


CANNOT = {
    ("hunyuan video 1.5", "compile"): "branches on its inputs outside its blocks",
    ("cogvideox", "compile_repeated_blocks"): "lists no repeated blocks",
}


@pytest.mark.parametrize("how", ["compile", "compile_repeated_blocks"])
@every_family
def test_any_family_compiles_as_diffusers_can_and_a_later_run_adds_no_graph(family, how):
    if (family.name, how) in CANNOT:
        pytest.skip(f"diffusers' model {CANNOT[family.name, how]}")
    torch.compiler.reset()
    counters.clear()
    changes = _without_branches(family)
    eager = family.run(patch(family.make(), "mxfp8"), **changes)
    pipe = family.make()
    for model in experts(pipe).values():
        getattr(model, how)(backend="eager", fullgraph=True)
    torch.testing.assert_close(family.run(patch(pipe, "mxfp8"), **changes), eager, rtol=1e-5, atol=1e-5)
    graphs = counters["stats"]["unique_graphs"]
    family.run(pipe, steps=3, **changes)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_named_classes_exist_and_their_models_are_of_the_family(adapter):
    """Names are known without loading the classes; here they are checked against the installed diffusers."""
    for name in adapter.models:
        assert issubclass(getattr(diffusers, name), torch.nn.Module), name
    for name in adapter.pipelines:
        pipeline = getattr(diffusers, name)
        if issubclass(pipeline, diffusers.DiffusionPipeline):
            wanted = str(inspect.signature(pipeline.__init__).parameters["transformer"].annotation)
            assert any(model in wanted for model in adapter.models), (name, wanted)


def test_every_processor_stands_for_a_class_of_diffusers_with_the_same_parameters():
    modules = [attention_processor, *(importlib.import_module(f"diffusers.models.transformers.transformer_{name}") for name in
                                      ("wan", "hunyuan_video", "hunyuan_video15", "minimax_h3", "ltx", "ltx2", "flux"))]
    for name, ours in PROCESSORS.items():
        stock = next(getattr(module, name) for module in modules if hasattr(module, name))
        assert list(inspect.signature(ours.__call__).parameters) == list(inspect.signature(stock.__call__).parameters), name


def test_ltx2_rows_that_skip_attention_and_rows_that_do_not_share_a_batch(monkeypatch):
    monkeypatch.setattr(base, "attention", torch_attention)
    pipe = FAMILIES["ltx-2"].make()
    attn = pipe.transformer.transformer_blocks[0].attn1
    tokens, mask = torch.randn(2, 9, 32), torch.tensor([0.0, 1.0])[:, None, None]
    expected = attn(tokens, perturbation_mask=mask)
    patch(pipe, "mxfp8")
    attn.processor.recipe = "mxfp8"
    assert torch.equal(attn(tokens, perturbation_mask=mask), expected)
    assert attn.processor.ran == "mxfp8"
