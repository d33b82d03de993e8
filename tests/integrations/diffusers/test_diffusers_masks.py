"""Key-padding masks run as key lengths; no other mask is ignored."""

import pytest
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from tiny_pipelines import hunyuan, hunyuan_text, run_hunyuan

from lowbit_attn.integrations.diffusers import patch, report
from lowbit_attn.integrations.diffusers.processors import HunyuanVideo15Processor, HunyuanVideoProcessor, WanProcessor
from lowbit_attn.integrations.diffusers.processors.base import key_lengths, mask_problem

VIDEO, TEXT, DIM = 12, 6, 32


def _attention() -> Attention:
    torch.manual_seed(0)
    return Attention(query_dim=DIM, added_kv_proj_dim=DIM, dim_head=16, heads=2, out_dim=DIM, context_pre_only=False, bias=True,
                     qk_norm="rms_norm", processor=HunyuanVideoAttnProcessor2_0()).requires_grad_(False)


def _processor(recipe: str, on_unsupported: str = "error") -> HunyuanVideoProcessor:
    processor = HunyuanVideoProcessor(HunyuanVideoAttnProcessor2_0(), "block 0", on_unsupported)
    processor.recipe = recipe
    return processor


def _inputs(batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    return torch.randn(batch, VIDEO, DIM, generator=noise), torch.randn(batch, TEXT, DIM, generator=noise)


def _padding(*valid: int) -> torch.Tensor:
    return (torch.arange(VIDEO + TEXT) < torch.tensor(valid)[:, None])[:, None, None]


@pytest.mark.parametrize("recipe", ["mxfp8", "fused_mxfp6", "fused_mxfp4"])
def test_a_padding_mask_equals_attention_over_the_trimmed_text(recipe):
    attn, processor, (video, text) = _attention(), _processor(recipe), _inputs()
    masked = processor(attn, video, text, _padding(VIDEO + 4))
    trimmed = processor(attn, video, text[:, :4], None)
    torch.testing.assert_close(masked[0], trimmed[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(masked[1][:, :4], trimmed[1], rtol=1e-5, atol=1e-6)


def test_a_mask_is_not_ignored():
    attn, processor, (video, text) = _attention(), _processor("mxfp8"), _inputs()
    assert (processor(attn, video, text, _padding(VIDEO + 2))[0] - processor(attn, video, text, None)[0]).abs().max() > 1e-3


def test_a_ragged_batch_equals_its_rows_run_alone():
    attn, processor, (video, text) = _attention(), _processor("mxfp8"), _inputs(batch=2)
    both = processor(attn, video, text, _padding(VIDEO + 1, VIDEO + 5))[0]
    for row, valid in enumerate((1, 5)):
        alone = processor(attn, video[row:row + 1], text[row:row + 1], _padding(VIDEO + valid))[0]
        torch.testing.assert_close(both[row:row + 1], alone, rtol=1e-5, atol=1e-6)


def test_one_mask_row_serves_the_whole_batch():
    assert key_lengths(_padding(15), batch=3).tolist() == [15, 15, 15]
    assert key_lengths(_padding(15), batch=3).dtype == torch.int32


@pytest.mark.parametrize("recipe", ["mxfp8", "fused_mxfp4"])
def test_garbage_in_padded_text_does_not_reach_the_latents(recipe):
    """The pipeline with 6 padded tokens of garbage equals the pipeline given the 10 valid tokens alone."""
    pipe = patch(hunyuan(), recipe)
    padded = run_hunyuan(pipe, valid=10)
    trimmed = run_hunyuan(pipe, **hunyuan_text(valid=10, length=10))
    torch.testing.assert_close(padded, trimmed, rtol=1e-4, atol=1e-4)


BAD_MASKS = {
    "additive": torch.zeros(1, 1, 1, VIDEO + TEXT),
    "per query": torch.ones(1, 1, VIDEO + TEXT, VIDEO + TEXT, dtype=torch.bool),
    "two-dimensional": torch.ones(1, VIDEO + TEXT, dtype=torch.bool),
    "of another length": torch.ones(1, 1, 1, VIDEO, dtype=torch.bool),
    "of another batch": torch.ones(2, 1, 1, VIDEO + TEXT, dtype=torch.bool),
    "with a hole": _padding(VIDEO + 3).logical_xor(_padding(1)),
}


@pytest.mark.parametrize("mask", BAD_MASKS.values(), ids=BAD_MASKS.keys())
def test_another_mask_is_refused_by_name(mask):
    video, text = _inputs()
    with pytest.raises(ValueError, match=r"block 0: attention_mask: got .*; accepted: none, or bool key padding"):
        _processor("mxfp8")(_attention(), video, text, mask)


@pytest.mark.parametrize("name", ["additive", "per query", "with a hole"])
def test_another_mask_runs_stock_if_the_schedule_says_so(name):
    attn, (video, text), mask = _attention(), _inputs(), BAD_MASKS[name]
    processor = _processor("mxfp8", on_unsupported="unchanged")
    out = processor(attn, video, text, mask)
    assert torch.equal(out[0], HunyuanVideoAttnProcessor2_0()(attn, video, text, mask)[0])
    assert processor.ran == "bf16"
    assert processor.fell_back == mask_problem(mask, 1, VIDEO + TEXT, trusted=True)


def _additive_masks(pipe):
    """Make the blocks of a pipeline get additive masks, as some model families have."""
    def make_additive(_, args):
        return (*args[:3], torch.zeros(args[3].shape).masked_fill(~args[3], -1e4), *args[4:])

    for block in (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks):
        block.register_forward_pre_hook(make_additive)


def test_calls_that_fall_back_are_reported_and_warned_about_once():
    pipe = hunyuan()
    _additive_masks(pipe)
    patch(pipe, {"version": 1, "name": "f", "attention": {"default": "mxfp8", "on_unsupported": "unchanged"}})
    with pytest.warns(UserWarning, match="not key padding; such calls run unchanged") as caught:
        run_hunyuan(pipe, steps=2)
    assert sum("not key padding" in str(w.message) for w in caught) == 1
    assert report(pipe).counts() == {"bf16": 8}
    assert report(pipe).fallbacks == {"dtype torch.float32": 8}


def test_by_default_a_pipeline_with_other_masks_raises():
    pipe = hunyuan()
    _additive_masks(pipe)
    with pytest.raises(ValueError, match=r"transformer transformer_blocks.0.attn: attention_mask: got dtype torch.float32"):
        run_hunyuan(patch(pipe, "mxfp8"))


def test_a_mask_under_context_parallelism_is_refused_or_runs_stock():
    attn, (video, text), mask = _attention(), _inputs(), _padding(VIDEO + 3)
    refusing, falling_back = _processor("mxfp8"), _processor("mxfp8", on_unsupported="unchanged")
    for processor in (refusing, falling_back):
        processor.stock._parallel_config = object()
    with pytest.raises(ValueError, match="got key padding under context parallelism; accepted: none"):
        refusing(attn, video, text, mask)
    falling_back.stock._parallel_config = None  # what diffusers would do with it is not at issue
    processor = falling_back
    processor(attn, video, text, mask)
    assert processor.ran == "mxfp8"


def test_masks_that_a_model_builds_are_not_looked_up_on_a_device():
    """A meta tensor has no values: whatever waits for them raises."""
    attn, processor = _attention().to("meta"), _processor("mxfp8")
    video, text = (x.to("meta") for x in _inputs())
    out, text_out = processor(attn, video, text, _padding(VIDEO + 3).to("meta"))
    assert (out.shape, text_out.shape) == (video.shape, text.shape)


def test_a_mask_of_the_callers_own_is_looked_up_on_a_device():
    with pytest.raises(Exception, match="meta"):
        mask_problem(_padding(VIDEO + 3).to("meta"), 1, VIDEO + TEXT, trusted=False)


def test_compiled_code_turns_padding_into_lengths_without_reading_a_value_back():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    attn, processor, (video, text) = _attention(), _processor("mxfp8"), _inputs()
    attn.set_processor(processor)
    compiled = torch.compile(attn, backend=keep, fullgraph=True)
    mask = _padding(VIDEO + 3)
    torch.testing.assert_close(compiled(video, text, mask)[0], processor(attn, video, text, mask)[0])
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert any("attention_forward" in name for name in called)
    assert not [name for name in called if any(part in name for part in (".item", "local_scalar", "nonzero", "tolist"))]


def test_compiled_code_refuses_a_mask_whose_values_it_cannot_know():
    torch.compiler.reset()
    processor = WanProcessor(WanAttnProcessor(), "block 0")
    compiled = torch.compile(lambda x, mask: processor.mask_problem(mask, 1, 4), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1), torch.ones(1, 1, 1, 4, dtype=torch.bool)) == "values that compiled code cannot check"
    assert processor.mask_problem(torch.ones(1, 1, 1, 4, dtype=torch.bool), 1, 4) is None


def test_a_fallback_warns_once_and_counts_every_call():
    pipe = hunyuan()
    _additive_masks(pipe)
    patch(pipe, {"version": 1, "name": "u", "attention": {"default": "mxfp8", "on_unsupported": "unchanged"}})
    with pytest.warns(UserWarning, match="is not key padding; such calls run unchanged") as caught:
        run_hunyuan(pipe, steps=3)
    assert len([w for w in caught if "key padding" in str(w.message)]) == 1
    ran = report(pipe)
    assert sum(ran.fallbacks.values()) == 3 * 4
    assert ran.counts() == {"bf16": 12}


@pytest.mark.parametrize("valid", [1, 3, 6])
def test_hunyuan_video_15_padding_equals_the_trimmed_text(valid):
    attn = _attention()
    processor = HunyuanVideo15Processor(HunyuanVideo15AttnProcessor2_0(), "block 0")
    processor.recipe = "mxfp8"
    video, text = _inputs()
    garbage = text.clone()
    garbage[:, valid:] = 1e4
    mask = (torch.arange(TEXT) < valid)[None]
    masked = processor(attn, video, garbage, mask)
    trimmed = processor(attn, video, text[:, :valid], mask[:, :valid])
    torch.testing.assert_close(masked[0], trimmed[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(masked[1][:, :valid], trimmed[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [None, torch.ones(1, TEXT, TEXT), torch.tensor([[1, 0, 1, 0, 0, 0]]), torch.ones(1, 99)])
def test_hunyuan_video_15_refuses_other_masks(mask):
    processor = HunyuanVideo15Processor(HunyuanVideo15AttnProcessor2_0(), "block 0")
    processor.recipe = "mxfp8"
    with pytest.raises(ValueError, match=r"accepted: none, or key padding of the text"):
        processor(_attention(), *_inputs(), mask)


def test_a_ragged_batch_of_prompts_equals_each_prompt_alone():
    pipe = patch(hunyuan(), "mxfp8")
    texts = [hunyuan_text(valid) for valid in (4, 10)]
    latents = torch.randn(2, 4, 2, 4, 4, generator=torch.Generator().manual_seed(5))
    together = run_hunyuan(pipe, latents=latents, **{name: torch.cat([text[name] for text in texts]) for name in texts[0]})
    for row, text in enumerate(texts):
        torch.testing.assert_close(together[row:row + 1], run_hunyuan(pipe, latents=latents[row:row + 1], **text),
                                   rtol=1e-4, atol=1e-4)
