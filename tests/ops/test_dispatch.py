"""Dispatch gives a recipe to the Hopper kernels exactly where they compute it, and says why where they do not."""

import pytest
import torch

from lowbit_attn.ops import Device
from lowbit_attn.ops.dispatch import explain
from lowbit_attn.recipes import RECIPES, resolve

HOPPER = Device("cuda", "sm_90")

pytest.importorskip("triton")


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fast", "mxfp8:max_threshold=2", "mxfp8:rotation=none", "mxfp8_fast:q_top=10"])
def test_what_the_hopper_kernels_compute(recipe):
    assert explain(resolve(recipe), HOPPER).backend == "hopper"


REFUSED = ["mxfp8:causal_safety=exact", "mxfp8:row_sum=quantized", "mxfp8:maximum=online,max_threshold=0", "mxfp8:key_tile=64",
           "mxfp8:qk_grad=e4m3/token_block", "mxfp8:rotation=always", "mxfp8:exponential=mixed_schraudolph",
           "mxfp8_fast:score_accumulator=fp32", *(name for name in RECIPES if name not in ("mxfp8", "mxfp8_fast"))]


@pytest.mark.parametrize("recipe", REFUSED)
def test_what_they_do_not(recipe):
    explanation = explain(resolve(recipe), HOPPER)
    assert explanation.backend == "reference"
    assert dict(explanation.passed_over)["hopper"]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100", "gfx950"])
def test_other_architectures_are_told_what_they_lack(architecture):
    reasons = dict(explain(resolve("mxfp8"), Device("cuda", architecture)).passed_over)
    assert reasons["hopper"] == f"needs sm_90, this device is cuda ({architecture})"


@pytest.mark.parametrize("backend", ["", "triton", "foo"])
def test_operators_refuse_a_backend_that_they_do_not_implement(backend):
    x, cu = torch.zeros(1, 8, 1, 64), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"backend: got '{backend}'"):
        torch.ops.lowbit_attn.attention_forward(x, x, x, None, "mxfp8", False, False, None, False, False, backend, None)
    with pytest.raises(ValueError, match=f"backend: got '{backend}'"):
        torch.ops.lowbit_attn.varlen_attention_forward(x[0], x[0], x[0], cu, cu, 8, 8, "mxfp8", False, None, False, False,
                                                       backend, None)
