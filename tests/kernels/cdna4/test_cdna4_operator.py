"""The public calls reach the CDNA4 kernels where the device is a gfx950: here a CPU that says so, with the emulator for HIP."""

import warnings

import pytest
import torch
from cdna4_calls import RECIPES

import lowbit_attn
from lowbit_attn.cli.checks.cases import EXACT, expected, normal, ordinary_allowance, relative
from lowbit_attn.kernels.cdna4 import forward as kernels
from lowbit_attn.kernels.cdna4 import loader
from lowbit_attn.ops import Device, dispatch
from lowbit_attn.recipes import resolve
from lowbit_attn.reference import varlen_forward


@pytest.fixture
def gfx950(emulator, monkeypatch):
    launched = []

    def run(launch):
        launched.append(launch.kernel)
        emulator(launch)

    monkeypatch.setattr(loader, "run", run)
    monkeypatch.setattr(dispatch, "describe", lambda device: Device("cuda", "gfx950"))
    return launched


@pytest.mark.parametrize("name", RECIPES)
def test_attention_runs_on_the_kernels(gfx950, name):
    query, key, value = normal(20, 140, heads=4, kv_heads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")   # no fallback
        output, lse = lowbit_attn.attention(*(x.transpose(1, 2) for x in (query, key, value)), recipe=name, enable_gqa=True,
                                            return_lse=True)
    assert gfx950[-1] == f"attention_{name.removeprefix('fused_')}"
    want, want_lse = expected(query, key, value, name)
    bound = ordinary_allowance(name)
    assert relative(output.transpose(1, 2), want) <= bound
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=max(bound, 2e-6))


def test_packed_documents_run_on_the_kernels(gfx950):
    query, key, value = (x[0] for x in normal(50, 200))
    cu_q, cu_k = torch.tensor([0, 20, 50], dtype=torch.int32), torch.tensor([0, 129, 200], dtype=torch.int32)
    output = lowbit_attn.varlen_attention(query, key, value, cu_q, cu_k, 40, 140, recipe="fused_mxfp6")
    want = varlen_forward(query, key, value, cu_q, cu_k, resolve("fused_mxfp6"), is_causal=False)
    assert gfx950[-1] == "attention_mxfp6"
    assert relative(output, want.output) <= EXACT


@pytest.mark.parametrize(("channels", "backend"), [(64, "attention_mxfp6"), (128, "attention_mxfp6")])
def test_heads_up_to_128_run_on_the_kernels(gfx950, channels, backend):
    query, key, value = (x.transpose(1, 2) for x in normal(8, 8, channels=channels))
    lowbit_attn.attention(query, key, value, recipe="fused_mxfp6")
    assert gfx950[-1] == backend


def test_wide_heads_run_on_the_portable_kernels_with_a_warning(gfx950):
    dispatch._warn_once.cache_clear()
    with pytest.warns(dispatch.LowbitFallbackWarning, match="runs backend 'triton', emulated.*Triton has no FP6 operands"):
        assert dispatch.choose("fused_mxfp4", torch.device("cuda"), None, wide_heads=True) == "triton"


def test_without_triton_wide_heads_run_on_the_reference_with_a_warning(gfx950, monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    dispatch._warn_once.cache_clear()
    query, key, value = (x.transpose(1, 2) for x in normal(8, 8, channels=160))
    with pytest.warns(dispatch.LowbitFallbackWarning, match="runs the PyTorch reference.*backend 'cdna4' takes head_dim up to 128"):
        lowbit_attn.attention(query, key, value, recipe="fused_mxfp4")
    assert not gfx950
    with pytest.raises(ValueError, match="its kernels take head_dim up to 128"):
        lowbit_attn.attention(query, key, value, recipe="fused_mxfp4", backend="cdna4")


def test_the_operator_saves_its_inputs_when_asked(gfx950):
    query, key, value = normal(6, 9)
    result = torch.ops.lowbit_attn.attention_forward(query, key, value, None, "fused_mxfp6", False, False, None, True, False,
                                                     "cdna4", None)
    for x, saved in zip((query, key, value), result[2:8:2], strict=True):
        assert torch.equal(x, saved)
        assert x.data_ptr() != saved.data_ptr()


def test_what_dispatch_offers_is_what_the_kernels_compute():
    assert set(dispatch.CDNA4_RECIPES) == set(kernels.RECIPES)
    assert not dispatch.BACKENDS["cdna4"].takes_wide_heads
    assert dispatch.NARROW_HEAD_DIM == kernels.CHANNELS


def test_a_cpu_is_refused_by_name():
    query, key, value = normal(4, 4)
    with pytest.raises(ValueError, match="device: got cpu; accepted by backend 'cdna4': a GPU of a ROCm build of torch"):
        torch.ops.lowbit_attn.attention_forward(query, key, value, None, "fused_mxfp6", False, False, None, False, False,
                                                "cdna4", None)
