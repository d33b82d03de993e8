"""The quantizer's host side on the CPU: bounds, load modes, strides, launches, and what it refuses."""

import contextlib
import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from lowbit_attn import formats
from lowbit_attn.recipes import resolve

pytest.importorskip("triton", reason="Triton runs on Linux only")

from lowbit_attn.kernels.hopper import quantize
from lowbit_attn.kernels.hopper.quantize import bound, mode_of, quantize_qkv, refusal, strides_of, variants


@pytest.mark.parametrize("top", [448.0, 28.0, 14.0, 0.37, 13.3, 18.666666666666668, 1.0, 13.99999999, 2.0**-140])
def test_bounds_as_bits_give_the_exponents_of_formats(top):
    exponent, fraction = bound(top)
    around = (1.0, top, math.nextafter(top, 0), top * (1 + 2.0**-22))
    maxima = torch.tensor([m * 2.0**e for e in range(-140, 120, 13) for m in around])
    maxima = torch.cat([maxima, torch.tensor([1.0, 1.5]).nextafter(torch.tensor(2.0)), torch.rand(200)]).float()
    maxima = maxima[maxima > 0]
    size, power = torch.frexp(maxima)
    bits = (size * 2**24).long() - 2**23  # what the kernel reads from the fp32 bits of a normalized maximum
    wanted = formats.shared_exponent(maxima, "ceil", formats.E4M3, top=top)
    assert torch.equal((power - exponent + (bits > fraction)).clamp(-127, 127).int(), wanted)


VIEWS = {
    "contiguous": (lambda x: x, "vector"),
    "heads first": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "vector"),
    "fused": (lambda x: torch.cat([x, x], -1)[..., 64:], "vector"),
    "expanded": (lambda x: x[:, :, :1].expand(-1, -1, 3, -1), "vector"),
    "channels first": (lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), "tokens"),
    "odd offset": (lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), "channels"),
    "odd pitch": (lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1], "channels"),
    "every other channel": (lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2], "channels"),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", quantize.DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_strides_lead_to_the_elements_of_any_view(view, dtype, packed):
    make, mode = VIEWS[view]
    x = make(torch.arange(2 * 5 * 3 * 64, dtype=torch.int32).view(2, 5, 3, 64).to(dtype))
    x = x[1] if packed else x
    assert mode_of(x) == mode
    unit = 16 // x.element_size() if mode == "vector" else 1
    strides = [unit * stride for stride in strides_of(x, mode, packed)]
    memory = torch.empty(0, dtype=dtype).set_(x.untyped_storage())
    tokens, heads, channels = torch.arange(x.shape[-3]), torch.arange(3)[:, None], torch.arange(64)
    for document in range(1 if packed else 2):
        flat_token = (document * 5 + tokens)[:, None, None]
        offset = document * strides[0] + flat_token * strides[1] + heads * strides[2]
        offset = offset + channels * (1 if mode == "vector" else strides[3]) + x.storage_offset()
        assert torch.equal(memory[offset], x if packed else x[document])


def test_rows_too_far_apart_for_32_bits_are_not_copied_as_vectors():
    for stride, mode in ((2**25, "channels"), (2**25 - 8, "vector")):
        assert mode_of(torch.empty_strided((1, 2, 1, 64), (0, stride, 0, 1), dtype=torch.bfloat16, device="meta")) == mode


@pytest.mark.parametrize(("recipe", "head_dim", "named"), [
    ("mxfp8", 80, "head_dim: got 80"),
    ("nvfp4_fp8", 128, "qk: got e2m1/nvfp16_token/ceil"),
    ("fused_mxfp8", 128, "qk: got e4m3/mx32/ceil"),
    ("mxfp8:q_prescale=true", 128, "q_prescale: got True"),
])
def test_what_it_cannot_serve_is_named(recipe, head_dim, named):
    assert named in (refusal(resolve(recipe).effective(), head_dim) or "")


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fast", "mxfp8:causal_safety=exact", "mxfp8:rotation=always"])
def test_named_recipes_of_token_scales_are_served(recipe):
    assert [refusal(resolve(recipe).effective(), head_dim) for head_dim in quantize.HEAD_DIMS] == [None] * 4


@pytest.mark.parametrize(("change", "named"), [
    ({"key": torch.zeros(1, 4, 1, 64)}, "key: got torch.float32"),
    ({"value": torch.zeros(1, 4, 1, 96, dtype=torch.bfloat16)}, "value: got torch.bfloat16 (1, 4, 1, 96)"),
    ({"query": torch.zeros(4, 1, 64, dtype=torch.bfloat16)}, "query: got torch.bfloat16 (4, 1, 64)"),
])
def test_operands_that_do_not_fit_together_are_named(change, named):
    operands = {name: torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16) for name in ("query", "key", "value")} | change
    tiling = SimpleNamespace(q_tiles=torch.zeros(1), k_tiles=torch.zeros(1))
    with pytest.raises(ValueError, match="accepted") as error:
        quantize_qkv(**operands, tiling=tiling, recipe=resolve("mxfp8"), save=True, packed=False)
    assert named in str(error.value)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_launch_covers_every_tile_and_fits_the_kernel(monkeypatch, save, packed):
    launches = []

    class Recorder:
        def __init__(self, kernel):
            self.signature = inspect.signature(kernel.fn)

        def __getitem__(self, grid):
            def launch(*arguments, num_warps, maxnreg, enable_fp_fusion, **constants):
                launches.append((grid, self.signature.bind(*arguments, **constants).arguments, enable_fp_fusion))
            return launch

    monkeypatch.setattr(quantize, "quantize_kernel", Recorder(quantize.quantize_kernel))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    q, k = torch.zeros(2, 300, 6, 128, dtype=torch.bfloat16), torch.zeros(2, 200, 2, 128, dtype=torch.bfloat16)
    tiling = SimpleNamespace(documents=torch.zeros(2 + packed, 8), q_tiles=torch.zeros(6), k_tiles=torch.zeros(4))
    q, k = (x.flatten(0, 1) if packed else x for x in (q, k))
    result = quantize_qkv(q, k, k, tiling, resolve("mxfp8"), save=save, packed=packed)
    [(grid, arguments, fused)] = launches
    assert grid == (6 * 6 + 2 * 2 * 4,)
    assert not fused
    assert arguments["query_documents"] == 2
    assert result.q_codes.shape == q.shape
    assert result.q_scales.shape == ((6, 600) if packed else (2, 6, 300))
    assert result.v_t.shape == (2, 128, 4 * 128)
    assert result.k_group.shape == result.v_group.shape == (2, 4 * 4)
    assert (result.v_codes is not None) == save


def test_variants_name_every_argument_once():
    for _, kernel, signature, constants, attributes, _ in variants(everything=True):
        assert list(signature) == kernel.arg_names
        assert {name for name, kind in signature.items() if kind == "constexpr"} == set(constants)
        assert all(signature[kernel.arg_names[position]].startswith("*") for (position,) in attributes)
