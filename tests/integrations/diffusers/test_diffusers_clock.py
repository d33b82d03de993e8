"""The clock follows the pipeline's scheduler through everything that may happen to it."""

import copy
import inspect

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from family_pipelines import (
    minimax_h3,
    picture,
    run_minimax_h3,
    run_wan_animate,
    run_wan_modular,
    run_wan_v2v,
    wan_animate,
    wan_modular,
    wan_v2v,
)
from tiny_pipelines import WAN_BLOCKS, hunyuan, run_hunyuan, run_wan, wan, wan_scheduler, wan_transformer

from lowbit_attn.integrations.diffusers import patch, report, unpatch
from lowbit_attn.integrations.diffusers.processors.base import STOCK

ENDS = {"version": 1, "name": "ends", "attention": {"default": "fused_mxfp4", "rules": [
    {"steps": {"first": 1}, "recipe": "fused_mxfp6"}, {"steps": {"last": 1}, "recipe": "mxfp8"}]}}


def _steps_ran(pipe):
    """The recipe of block 0 at each step."""
    return [row[0] for row in report(pipe).grid()]


def _expected(steps):
    return ["fused_mxfp6", *["fused_mxfp4"] * (steps - 2), "mxfp8"]


def test_a_changed_number_of_steps_is_followed():
    pipe = patch(wan(), ENDS)
    for steps in (3, 5, 4):
        run_wan(pipe, steps=steps)
        assert _steps_ran(pipe) == _expected(steps)


def test_a_schedule_that_does_not_fit_the_steps_is_refused_before_any_denoising():
    pipe = patch(wan(), {**ENDS, "attention": {"default": "bf16", "rules": [{"steps": 3, "recipe": "mxfp8"}]}})
    calls = []
    pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="got 3; accepted: 0 to 2, there are 3 steps"):
        run_wan(pipe, steps=3)
    assert not calls
    run_wan(pipe, steps=4)
    assert _steps_ran(pipe) == ["bf16", "bf16", "bf16", "mxfp8"]


def test_a_replaced_scheduler_is_followed_from_its_first_step():
    pipe = patch(wan(), ENDS)
    run_wan(pipe, steps=3)
    old, pipe.scheduler = pipe.scheduler, wan_scheduler(flow_shift=12.0)
    run_wan(pipe, steps=5)
    assert _steps_ran(pipe) == _expected(5)
    assert not {"set_timesteps", "step"} & vars(old).keys()
    new = pipe.scheduler
    unpatch(pipe)
    assert not {"set_timesteps", "step"} & vars(new).keys()


def test_a_replaced_scheduler_that_has_run_elsewhere_is_followed():
    pipe, other = patch(wan(), ENDS), wan()
    run_wan(other, steps=3)
    pipe.scheduler = other.scheduler
    run_wan(pipe, steps=4)
    assert _steps_ran(pipe) == _expected(4)


def test_patching_after_a_run_waits_for_the_next_run():
    pipe = wan()
    run_wan(pipe, steps=1)  # a number of steps that the schedule would refuse
    patch(pipe, ENDS)
    assert _steps_ran(pipe) == []
    run_wan(pipe, steps=3)
    assert _steps_ran(pipe) == _expected(3)


def test_an_exception_mid_run_leaves_the_next_run_at_step_zero():
    pipe = patch(wan(), ENDS)

    def stop(pipe, step, timestep, kwargs):
        if step == 1:
            raise RuntimeError("stop")
        return kwargs

    with pytest.raises(RuntimeError, match="stop"):
        run_wan(pipe, steps=5, callback_on_step_end=stop)
    assert _steps_ran(pipe) == ["fused_mxfp6", "fused_mxfp4", "–", "–", "–"]
    run_wan(pipe, steps=4)
    assert _steps_ran(pipe) == _expected(4)


def test_a_failed_forward_leaves_the_next_run_correct():
    pipe = patch(wan(), ENDS)
    handle = pipe.transformer.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        run_wan(pipe, steps=3)
    handle.remove()
    run_wan(pipe, steps=3)
    assert _steps_ran(pipe) == _expected(3)
    assert set(report(pipe).calls.values()) == {2}


def test_wrapped_methods_keep_their_signatures():
    pipe = wan()
    before = [inspect.signature(method) for method in (pipe.scheduler.set_timesteps, pipe.scheduler.step)]
    patch(pipe, ENDS)
    assert [inspect.signature(method) for method in (pipe.scheduler.set_timesteps, pipe.scheduler.step)] == before


def test_a_deep_copied_scheduler_steps_itself_and_not_the_clock():
    pipe = patch(wan(), ENDS)
    twin = copy.deepcopy(pipe.scheduler)
    twin.set_timesteps(7)
    assert report(pipe).steps == 0
    assert pipe.scheduler.num_inference_steps != 7
    assert twin.num_inference_steps == 7


def test_two_pipelines_sharing_a_scheduler_are_both_clocked_and_undone_in_any_order():
    first, second = wan(), wan()
    second.scheduler = first.scheduler
    patch(first, ENDS)
    patch(second, ENDS)
    run_wan(first, steps=3)
    unpatch(first)
    run_wan(second, steps=4)
    assert _steps_ran(second) == _expected(4)
    unpatch(second)
    assert not {"set_timesteps", "step"} & vars(first.scheduler).keys()


def test_a_wrapper_that_someone_else_put_on_the_scheduler_is_kept():
    pipe = wan()
    calls = []
    original = pipe.scheduler.step

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    pipe.scheduler.step = counted
    patch(pipe, ENDS)
    run_wan(pipe, steps=3)
    assert _steps_ran(pipe) == _expected(3)
    assert len(calls) == 3
    unpatch(pipe)
    assert pipe.scheduler.step is counted


def test_a_run_that_starts_late_counts_from_its_own_first_step():
    pipe = patch(wan(experts=1), ENDS)
    scheduler = pipe.scheduler
    scheduler.set_timesteps(6)
    timesteps = scheduler.timesteps[2:]
    scheduler.set_begin_index(2)
    latents = torch.zeros(1, 16, 1, 4, 4)
    for t in timesteps:
        with pipe.transformer.cache_context("cond"), torch.no_grad():
            noise = pipe.transformer(latents, t[None], torch.ones(1, 4, 32), return_dict=False)[0]
        latents = scheduler.step(noise, t, latents, return_dict=False)[0]
    assert _steps_ran(pipe) == _expected(4)


def test_a_loop_that_opens_no_cache_context_is_clocked_by_the_scheduler_alone():
    pipe = patch(wan(experts=1), ENDS)
    pipe.scheduler.set_timesteps(3)
    latents = torch.zeros(1, 16, 1, 4, 4)
    for t in pipe.scheduler.timesteps:
        noise = pipe.transformer(latents, t[None], torch.ones(1, 4, 32), return_dict=False)[0]
        latents = pipe.scheduler.step(noise, t, latents, return_dict=False)[0]
    assert _steps_ran(pipe) == _expected(3)


def test_custom_sigmas_set_the_number_of_steps():
    pipe = patch(hunyuan(), ENDS)
    run_hunyuan(pipe, steps=50, sigmas=[1.0, 0.8, 0.5, 0.2])
    assert _steps_ran(pipe) == _expected(4)


def test_the_two_calls_of_a_heun_step_are_one_step():
    pipe = wan()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    patch(pipe, ENDS)
    run_wan(pipe, steps=4)
    assert _steps_ran(pipe) == _expected(4)
    assert sum(report(pipe).calls.values()) == 7 * 2 * WAN_BLOCKS


def test_a_model_replaced_after_patching_is_refused_before_any_denoising():
    pipe = patch(wan(), ENDS)
    pipe.transformer_2 = wan_transformer(5)
    with pytest.raises(RuntimeError, match="low_noise: the model was replaced after patch"):
        run_wan(pipe)


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 6), (0.5, 3), (0.34, 2)])
def test_strength_below_one_counts_the_steps_that_run(strength, steps):
    pipe = patch(wan_v2v(), ENDS)
    run_wan_v2v(pipe, steps=6, strength=strength)
    assert _steps_ran(pipe) == _expected(steps)
    assert not _low_bit(pipe)


def test_strength_with_a_second_order_scheduler_counts_steps_and_not_calls():
    pipe = wan_v2v()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    patch(pipe, ENDS)
    run_wan_v2v(pipe, steps=6, strength=0.5)
    assert _steps_ran(pipe) == _expected(3)
    assert not _low_bit(pipe)


def _low_bit(pipe) -> bool:
    """Whether a call of the model now, outside a run, would be in low bits."""
    return any(block.attn1.processor.recipe not in STOCK for block in pipe.transformer.blocks)


def test_the_run_of_a_heun_scheduler_ends():
    pipe = wan()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    run_wan(patch(pipe, ENDS), steps=3)
    assert not _low_bit(pipe)


def test_each_segment_of_wan_animate_is_a_run_and_the_call_ends_the_last_one():
    pipe = patch(wan_animate(), ENDS)
    for segment in (9, 5):  # 9 frames: one segment, and two of 5 that share a frame
        run_wan_animate(pipe, steps=3, segment_frame_length=segment, pose_video=[picture(i) for i in range(9)],
                        face_video=[picture(i) for i in range(9)])
        assert _steps_ran(pipe) == _expected(3)
        assert not _low_bit(pipe)


def test_an_interrupted_call_ends_its_run():
    pipe = patch(wan(experts=1), ENDS)

    def interrupt(pipe, step, timestep, kwargs):
        pipe._interrupt = step == 0
        return kwargs

    run_wan(pipe, steps=4, callback_on_step_end=interrupt)
    assert _steps_ran(pipe) == ["fused_mxfp6", "–", "–", "–"]
    assert not _low_bit(pipe)


def test_a_scheduler_replaced_in_a_modular_pipeline_is_followed():
    pipe = patch(wan_modular(), ENDS)
    run_wan_modular(pipe, steps=3)
    pipe.update_components(scheduler=wan_scheduler(flow_shift=12.0))
    run_wan_modular(pipe, steps=4)
    assert _steps_ran(pipe) == _expected(4)


def test_a_scheduler_replaced_in_a_pipeline_without_cache_context_is_followed():
    pipe = patch(wan_v2v(), ENDS)
    run_wan_v2v(pipe, steps=3)
    pipe.scheduler = wan_scheduler(flow_shift=12.0)
    run_wan_v2v(pipe, steps=4)
    assert _steps_ran(pipe) == _expected(4)


def test_a_modular_scheduler_replaced_behind_the_pipelines_back_says_so():
    pipe = patch(wan_modular(), ENDS)
    pipe.scheduler = wan_scheduler(flow_shift=12.0)
    with pytest.warns(UserWarning, match="outside a run.*given another scheduler by update_components"):
        run_wan_modular(pipe, steps=4)
    assert _steps_ran(pipe) == []


def test_minimax_h3_follows_the_video_scheduler():
    pipe = patch(minimax_h3(), ENDS)
    ticks = []
    audio_step = pipe.audio_scheduler.step

    def counted(*args, **kwargs):
        ticks.append(pipe.transformer.transformer_blocks[0].attn.processor.recipe)
        return audio_step(*args, **kwargs)

    pipe.audio_scheduler.step = counted
    run_minimax_h3(pipe, steps=3)
    assert _steps_ran(pipe) == _expected(3)
    assert ticks == ["fused_mxfp4", "mxfp8", "resting"]  # of the next step: only the video scheduler moved the clock


def test_a_run_inside_a_run_of_another_pipeline_disturbs_neither():
    outer, inner = patch(wan(experts=1), ENDS), patch(wan(experts=1), "mxfp8")

    def also(pipe, step, timestep, kwargs):
        if step == 1:
            run_wan(inner, steps=5)
        return kwargs

    run_wan(outer, steps=3, callback_on_step_end=also)
    assert _steps_ran(outer) == _expected(3)
    assert _steps_ran(inner) == ["mxfp8"] * 5
