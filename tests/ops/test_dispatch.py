"""Dispatch gives a recipe to the Hopper kernels exactly where they compute it, and says why where they do not."""

import re
import warnings

import pytest
import torch

from lowbit_attn.ops import Device, dispatch
from lowbit_attn.ops.dispatch import explain
from lowbit_attn.recipes import resolve

HOPPER = Device("cuda", "sm_90")

pytest.importorskip("triton")


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fast", "mxfp8:max_threshold=2", "mxfp8:rotation=none", "mxfp8_fast:q_top=10",
                                    "fused_mxfp8", "fused_mxfp6", "fused_mxfp4", "mxattention", "mxfp4_ocp",
                                    "mxattention:p=e2m3/mx32", "fused_mxfp6:rotation=none", "nvfp4_fp8", "nvfp4_fp8:qk=e2m1/nvfp16",
                                    "nvfp4_fp8:rotation=none", "nvfp4_fp8:maximum=online,max_threshold=0",
                                    "nvfp4_fp8:trains=false"])
def test_what_the_hopper_kernels_compute(recipe):
    assert explain(resolve(recipe), HOPPER).backend == "hopper"


REFUSED = ["mxfp8:causal_safety=exact", "mxfp8:row_sum=quantized", "mxfp8:maximum=online,max_threshold=0", "mxfp8:key_tile=64",
           "mxfp8:qk_grad=e4m3/token_block", "mxfp8:rotation=always", "mxfp8:exponential=mixed_schraudolph",
           "mxfp8_fast:score_accumulator=fp32", "nvfp4", "nvfp4_fp8:causal_safety=exact", "nvfp4_fp8:v=e4m3/mx32",
           "nvfp4_fp8:p=e4m3/per_row", "nvfp4_fp8:row_sum=quantized", "nvfp4_fp8:maximum=lazy,max_threshold=101",
           "nvfp4_fp8:rotation=always", "nvfp4_fp8:key_tile=64", "fused_mxfp6:exponential=exact",
           "fused_mxfp6:max_threshold=4",
           "fused_mxfp8:exponential=exact,maximum=online,max_threshold=0", "mxattention:qk=e2m1/nvfp16_token",
           "mxattention:v=e4m3/token_block", "mxattention:p=e2m1/per_row", "mxattention:trains=true", "mxattention:key_tile=64",
           "mxattention:q_top=3,k_top=3,qk=e2m1/mx32/ceil"]


@pytest.mark.parametrize("recipe", REFUSED)
def test_what_they_do_not(recipe):
    explanation = explain(resolve(recipe), HOPPER)
    assert explanation.backend in ("triton", "reference")
    assert dict(explanation.passed_over)["hopper"]


GFX950 = Device("cuda", "gfx950")


@pytest.mark.parametrize("recipe", ["fused_mxfp8", "fused_mxfp6", "fused_mxfp4"])
def test_what_the_cdna4_kernels_compute_and_that_they_have_not_run(recipe):
    explanation = explain(resolve(recipe), GFX950)
    assert explanation.backend == "cdna4"
    assert "compiled and emulated" in explanation.precision


@pytest.mark.parametrize("recipe", ["mxfp8", "mxattention", "fused_mxfp6:max_threshold=16", "fused_mxfp4:rotation=none"])
def test_other_recipes_and_changed_ones_are_not_theirs(recipe):
    explanation = explain(resolve(recipe), GFX950)
    assert explanation.backend in ("triton", "reference")
    assert dict(explanation.passed_over)["cdna4"].startswith("its kernels compute fused_mxfp8, fused_mxfp6, fused_mxfp4")


def test_heads_wider_than_a_backend_takes_go_to_the_next():
    explanation = explain(resolve("fused_mxfp6"), GFX950, wide_heads=True)
    assert explanation.backend == "triton"
    assert explanation.precision.startswith("emulated: bf16")
    assert dict(explanation.passed_over)["cdna4"] == "its kernels take head_dim up to 128"
    assert explain(resolve("mxfp8"), HOPPER, wide_heads=True).backend == "hopper"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100", "gfx950"])
def test_other_architectures_are_told_what_they_lack(architecture):
    reasons = dict(explain(resolve("mxfp8"), Device("cuda", architecture)).passed_over)
    assert reasons["hopper"] == f"needs sm_90, this device is cuda ({architecture})"


FP6 = "emulated: bf16 matrix units on the codes' exact values, as Triton has no FP6 operands, by Triton kernels"
PORTABLE = {  # recipe, architecture -> the start of what multiplies
    ("mxfp8", "sm_80"): "emulated: bf16", ("mxfp8", "gfx942"): "emulated: bf16",
    ("mxfp8", "sm_100"): "native: block-scaled MXFP8 matrix units, in the backward to head_dim 128",
    ("mxattention", "sm_103"): "native: block-scaled MXFP4 matrix units, by",
    ("nvfp4_fp8", "sm_100"): "native: block-scaled NVFP4 and MXFP8 matrix units, bf16 ones in the backward",
    ("nvfp4_fp8", "gfx950"): "emulated: bf16", ("nvfp4_fp8:rotation=always", "sm_90"): "emulated: bf16",
    ("fused_mxfp6", "sm_80"): FP6, ("fused_mxfp4", "sm_100"): FP6, ("mxattention:p=e2m3/mx32", "gfx950"): FP6,
    ("fused_mxfp6:exponential=exact", "sm_90"): FP6}


@pytest.mark.parametrize(("recipe", "architecture"), PORTABLE)
def test_what_the_portable_kernels_compute_and_how(recipe, architecture):
    explanation = explain(resolve(recipe), Device("cuda", architecture))
    assert explanation.backend == "triton"
    assert explanation.precision.startswith(PORTABLE[recipe, architecture])
    assert ("have run on an H200" in explanation.precision) == (architecture == "sm_90")
    assert ("have not run" in explanation.precision) == (architecture != "sm_90")


@pytest.mark.parametrize(("recipe", "architecture", "reason"), [
    ("fused_mxfp6:exponential=schraudolph_u8,max_threshold=8", "sm_100", "compute the exponentials exact, schraudolph_u16"),
    ("mxfp8", "sm_75", "needs one of sm_80"), ("mxfp8", None, "no GPU")])
def test_pairs_that_they_do_not_compute_are_named(recipe, architecture, reason):
    explanation = explain(resolve(recipe), Device("cuda", architecture))
    assert explanation.backend == "reference"
    assert reason in dict(explanation.passed_over)["triton"]


@pytest.mark.parametrize(("recipe", "architecture", "warning"), [
    ("mxfp8", "sm_100", None), ("mxfp8", "sm_86", "mxfp8 on cuda .sm_86. runs backend 'triton', emulated: bf16"),
    ("fused_mxfp4", "sm_100", "fused_mxfp4 on cuda .sm_100. runs backend 'triton', emulated: .* no FP6 operands")])
def test_an_emulated_choice_warns_once_by_name(recipe, architecture, warning, monkeypatch):
    monkeypatch.setattr(dispatch, "describe", lambda device: Device("cuda", architecture))
    dispatch._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert dispatch.choose(recipe, torch.device("cpu"), None) == "triton"
    assert len(caught) == (warning is not None)
    assert all(re.search(warning, str(x.message)) for x in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose(recipe, torch.device("cpu"), "triton") == "triton"


@pytest.mark.parametrize("backend", ["", "cuda", "foo"])
def test_operators_refuse_a_backend_that_they_do_not_implement(backend):
    x, cu = torch.zeros(1, 8, 1, 64), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"backend: got '{backend}'"):
        torch.ops.lowbit_attn.attention_forward(x, x, x, None, "mxfp8", False, False, None, False, False, backend, None)
    with pytest.raises(ValueError, match=f"backend: got '{backend}'"):
        torch.ops.lowbit_attn.varlen_attention_forward(x[0], x[0], x[0], cu, cu, 8, 8, "mxfp8", False, None, False, False,
                                                       backend, None)
