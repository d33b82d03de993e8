"""On a GPU: offloading, a device that is not the current one, and memory; run where one is present."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "diffusers"))


@pytest.fixture
def wan_and_run():
    pytest.importorskip("diffusers")
    from tiny_pipelines import run_wan, wan

    return wan, run_wan


@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloading_gives_the_latents_of_a_resident_model(wan_and_run, offload):
    from lowbit_attn.integrations.diffusers import patch

    wan, run = wan_and_run
    resident = run(patch(wan().to("cuda"), "mxfp8"))
    pipe = patch(wan(), "mxfp8")
    getattr(pipe, offload)()
    torch.testing.assert_close(run(pipe).cpu(), resident.cpu(), rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_pipeline_runs_on_a_device_that_is_not_the_current_one(wan_and_run):
    from lowbit_attn.integrations.diffusers import patch

    wan, run = wan_and_run
    torch.cuda.set_device(0)
    first = run(patch(wan().to("cuda:0"), "mxfp8"))
    second = run(patch(wan().to("cuda:1"), "mxfp8"))
    assert second.device.index == 1
    torch.testing.assert_close(first.cpu(), second.cpu(), rtol=0, atol=0)


def test_a_run_waits_for_the_device_no_more_often_than_the_unpatched_one(wan_and_run):
    from lowbit_attn.integrations.diffusers import patch

    wan, run = wan_and_run
    pipe = wan(experts=1).to("cuda")

    def synchronisations(recipe):
        patch(pipe, recipe)
        run(pipe)  # first use of the backend
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run(pipe)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return len([warning for warning in caught if "synchronizing" in str(warning.message)])

    assert synchronisations("mxfp8") <= synchronisations("bf16")


def test_a_kernel_takes_hardly_more_memory_than_torchs_attention():
    from lowbit_attn import attention, explain

    if explain("mxfp8", "cuda").backend == "reference":
        pytest.skip("no kernel for this GPU")
    tensors = torch.randn(3, 1, 20_000, 24, 128, device="cuda", dtype=torch.bfloat16).transpose(2, 3)

    def peak(recipe):
        attention(*tensors, recipe=recipe)
        torch.cuda.reset_peak_memory_stats()
        attention(*tensors, recipe=recipe)
        return torch.cuda.max_memory_allocated() / 2**30

    assert peak("mxfp8") < peak("bf16") + 0.5
