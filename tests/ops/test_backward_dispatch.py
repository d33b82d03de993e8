"""Which backend runs a backward, and that a slower one is never silent."""

import warnings

import pytest

from lowbit_attn.ops.dispatch import LowbitFallbackWarning, backward_backend
from lowbit_attn.recipes import resolve

pytest.importorskip("triton", reason="Triton runs on Linux only")


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_hopper_runs_its_own_backward(head_dim):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backward_backend(resolve("mxfp8"), "hopper", head_dim) == "hopper"


@pytest.mark.parametrize(("recipe", "head_dim", "reason"), [
    ("mxfp8", 256, "head_dims up to 128, got 256"), ("mxfp8:ds=bf16", 128, "ds=e4m3/square32"),
    ("mxfp8:do=bf16", 128, "do=e4m3/token_block"),
    ("mxfp8:p_grad_log2_scale=7", 128, "2\\^8")])
def test_what_hopper_cannot_do_goes_to_the_reference_with_the_reason(recipe, head_dim, reason):
    with pytest.warns(LowbitFallbackWarning, match=reason):
        assert backward_backend(resolve(recipe), "hopper", head_dim) == "reference"


def test_the_reference_needs_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backward_backend(resolve("mxfp8"), "reference", 64) == "reference"
