"""Which backend runs a backward, and that a slower one is never silent."""

import warnings

import pytest
import torch

from lowbit_attn.ops import Device, dispatch
from lowbit_attn.ops.dispatch import LowbitFallbackWarning, backward_backend
from lowbit_attn.recipes import resolve

pytest.importorskip("triton", reason="Triton runs on Linux only")

CPU = torch.device("cpu")


@pytest.fixture
def on(monkeypatch):
    """Makes dispatch see a GPU architecture, with nothing said so far."""
    dispatch._warn_once.cache_clear()
    return lambda architecture: monkeypatch.setattr(dispatch, "describe", lambda device: Device("cuda", architecture))


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_hopper_runs_its_own_backward(head_dim):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backward_backend(resolve("mxfp8"), "hopper", head_dim, CPU) == "hopper"


@pytest.mark.parametrize(("recipe", "head_dim", "reason"), [
    ("mxfp8", 256, "head_dims up to 128, got 256"), ("mxfp8:ds=bf16", 128, "ds=e4m3/square32"),
    ("mxfp8:do=bf16", 128, "do=e4m3/token_block"),
    ("mxfp8:p_grad_log2_scale=7", 128, "2\\^8")])
def test_what_no_kernel_can_do_goes_to_the_reference_with_the_reason(recipe, head_dim, reason):
    with pytest.warns(LowbitFallbackWarning, match=reason):
        assert backward_backend(resolve(recipe), "hopper", head_dim, CPU) == "reference"


def test_the_reference_needs_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backward_backend(resolve("mxfp8"), "reference", 64, CPU) == "reference"


def test_what_hopper_cannot_do_goes_to_the_portable_kernels_with_the_reason(on):
    on("sm_90")
    with pytest.warns(LowbitFallbackWarning, match="Triton kernels on bf16 matrix units.*head_dims up to 128, got 256"):
        assert backward_backend(resolve("mxfp8"), "hopper", 256, CPU) == "triton"


def test_recipes_that_save_their_inputs_go_to_the_portable_kernels(on):
    on("sm_90")
    with pytest.warns(LowbitFallbackWarning, match="nvfp4_fp8 after backend 'hopper' runs Triton kernels.*read saved codes"):
        assert backward_backend(resolve("nvfp4_fp8"), "hopper", 128, CPU) == "triton"


def test_an_emulated_forward_has_warned_for_its_backward_too(on):
    on("sm_80")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backward_backend(resolve("nvfp4_fp8"), "triton", 64, CPU) == "triton"


@pytest.mark.parametrize(("recipe", "head_dim"), [("mxfp8", 256), ("nvfp4_fp8", 128), ("mxfp8:do=e4m3/per_row", 128)])
def test_after_a_native_forward_the_backward_says_that_it_is_not(on, recipe, head_dim):
    on("sm_100")
    with pytest.warns(LowbitFallbackWarning, match=r"after backend 'triton' runs Triton kernels on bf16"):
        assert backward_backend(resolve(recipe), "triton", head_dim, CPU) == "triton"


@pytest.mark.parametrize("architecture", ["sm_100", "sm_103", "gfx950"])
def test_a_native_backward_says_nothing(on, architecture):
    on(architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backward_backend(resolve("mxfp8"), "triton", 128, CPU) == "triton"


def test_what_the_portable_kernels_cannot_do_goes_to_the_reference(on):
    on("sm_100")
    with pytest.warns(LowbitFallbackWarning, match="runs the PyTorch reference.*folds no scales of K"):
        assert backward_backend(resolve("mxfp8:causal_safety=exact"), "triton", 128, CPU) == "reference"
