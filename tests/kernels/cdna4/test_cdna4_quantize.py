"""Packed Q, K and V hold the codes and scales of `formats`, bit for bit, padding included."""

import pytest
import torch
from cdna4_packing import key_codes, query_codes, value_codes

from lowbit_attn import formats
from lowbit_attn.kernels.cdna4.forward import LOG2E, Shape, quantize
from lowbit_attn.recipes import resolve

RECIPES = ["fused_mxfp8", "fused_mxfp6", "fused_mxfp4"]
every_recipe = pytest.mark.parametrize("name", RECIPES)
BITS = {"e4m3": 8, "e2m3": 6, "e2m1": 4}


def packed(emulator, name, query, key, value, *, scale=0.1, key_lengths=None):
    shape = Shape(query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2], query.shape[3])
    return quantize(query, key, value, resolve(name), shape, emulator, scale=scale, key_lengths=key_lengths, cu_seq=None)


def expected(x, operand, *, axis=-1):
    """Codes and scales of [B, S, H, D] as [B * H, ...], channels padded to 128."""
    heads = torch.nn.functional.pad(x.float(), (0, 128 - x.shape[-1])).transpose(1, 2).flatten(0, 1)
    result = formats.quantize(heads, formats.element_format(operand.element), formats.block_layout(operand.layout), operand.rule,
                              axis=axis)
    return result.codes, result.scales


def rotated(x):
    return formats.hadamard(x)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, s, h, 128, generator=generator) for s, h in ((70, 2), (131, 1), (131, 1)))
    key[0, 5] *= 1e4
    query[1, 3] *= 1e-3
    value[:, 40:50, :, 7] = 0
    query[0, 0] = 0
    return query, key, value


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_query_is_rotated_prescaled_and_blocked_along_channels(emulator, inputs, name, dtype):
    query, key, value = (x.to(dtype) for x in inputs)
    recipe = resolve(name)
    codes, scales = query_codes(packed(emulator, name, query, key, value).query, BITS[recipe.qk.element])
    want_codes, want_scales = expected(rotated(query) * (0.1 * LOG2E), recipe.qk)
    assert torch.equal(codes[:, :70], want_codes)
    assert torch.equal(scales[:, :70], want_scales - 9)
    assert not codes[:, 70:].any()


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_key_is_rotated_and_blocked_along_channels(emulator, inputs, name, dtype):
    query, key, value = (x.to(dtype) for x in inputs)
    recipe = resolve(name)
    codes, scales = key_codes(packed(emulator, name, query, key, value).key, BITS[recipe.qk.element])
    want_codes, want_scales = expected(rotated(key), recipe.qk)
    assert torch.equal(codes[:, :131], want_codes)
    assert torch.equal(scales[:, :131], want_scales)
    assert not codes[:, 131:].any()


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_value_is_blocked_along_keys_or_has_one_scale(emulator, inputs, name, dtype):
    query, key, value = (x.to(dtype) for x in inputs)
    recipe = resolve(name)
    result = packed(emulator, name, query, key, value)
    codes, scales = value_codes(result.value, BITS[recipe.v.element])
    one_dimensional = recipe.v.is_one_dimensional
    want_codes, want_scales = expected(value, recipe.v, axis=-2 if one_dimensional else -1)
    assert torch.equal(codes[:, :131], want_codes)
    assert not codes[:, 131:].any()
    if one_dimensional:
        assert torch.equal(scales[:, :want_scales.shape[1]], want_scales)
        assert bool((scales[:, want_scales.shape[1]:] == 127).all())
    else:
        assert torch.equal(result.peak.view(torch.float32), value.float().abs().amax((1, 3)).flatten())


@every_recipe
@pytest.mark.parametrize("channels", [1, 32, 40, 64, 96, 100, 127])
def test_other_head_dims_are_rotated_in_their_binary_digits_and_padded(emulator, name, channels):
    generator = torch.Generator().manual_seed(channels)
    query, key, value = torch.randn(3, 1, 9, 2, channels, generator=generator).unbind()
    recipe = resolve(name)
    result = packed(emulator, name, query, key, value)
    bits = BITS[recipe.qk.element]
    assert torch.equal(query_codes(result.query, bits)[0][:, :9], expected(rotated(query) * (0.1 * LOG2E), recipe.qk)[0])
    codes, scales = key_codes(result.key, bits)
    want_codes, want_scales = expected(rotated(key), recipe.qk)
    assert torch.equal(codes[:, :9], want_codes)
    assert torch.equal(scales[:, :9], want_scales)
    assert torch.equal(value_codes(result.value, BITS[recipe.v.element])[0][:, :9],
                       expected(value, recipe.v, axis=-2 if recipe.v.is_one_dimensional else -1)[0])


@every_recipe
def test_any_strides_and_offset(emulator, inputs, name):
    contiguous = packed(emulator, name, *inputs)
    strange = [torch.empty(x.shape[3], x.shape[0] + 1, x.shape[2], x.shape[1] + 3)[:, 1:, :, 2:-1].permute(1, 3, 2, 0).copy_(x)
               for x in inputs]
    found = packed(emulator, name, *strange)
    for x, y, bits in zip((contiguous.query, contiguous.key, contiguous.value), (found.query, found.key, found.value),
                          (BITS[resolve(name).qk.element],) * 2 + (BITS[resolve(name).v.element],), strict=True):
        used = slice(0, x.shape[-1] if x is contiguous.query else bits * 2048 + 512)
        assert torch.equal(x[..., used], y[..., used])


@every_recipe
def test_keys_past_their_length_are_zero_before_any_scale(emulator, inputs, name):
    query, key, value = inputs
    lengths = torch.tensor([131, 37], dtype=torch.int32)
    zeroed_key, zeroed_value = key.clone(), value.clone()
    zeroed_key[1, 37:], zeroed_value[1, 37:] = 0, 0
    key[1, 37:], value[1, 37:] = torch.nan, 1e30
    found, want = (packed(emulator, name, query, k, v, key_lengths=n)
                   for k, v, n in ((key, value, lengths), (zeroed_key, zeroed_value, None)))
    recipe = resolve(name)
    for read, x, y, bits in ((key_codes, found.key, want.key, BITS[recipe.qk.element]),
                             (value_codes, found.value, want.value, BITS[recipe.v.element])):
        assert all(torch.equal(a, b) for a, b in zip(read(x, bits), read(y, bits), strict=True) if a is not None)
    assert torch.equal(found.peak, want.peak)
    assert not found.broken.any()


@every_recipe
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_blocks_with_nan_or_inf_get_the_nan_scale_and_broken_keys_are_told(emulator, inputs, name, poison):
    query, key, value = inputs
    query[0, 69, 1, 3] = key[1, 130, 0, 100] = value[0, 33, 0, 5] = poison
    recipe = resolve(name)
    result = packed(emulator, name, query, key, value)
    bits = BITS[recipe.qk.element]
    scales = query_codes(result.query, bits)[1]
    assert bool((scales[1, 69] == 255).all())   # the rotation spreads it over the row
    assert int((scales == 255).sum()) == 4
    assert result.broken.tolist() == [0, 1]
    if recipe.v.is_one_dimensional:
        scales = value_codes(result.value, BITS[recipe.v.element])[1]
        assert (scales == 255).nonzero().tolist() == [[0, 1, 5]]
    else:
        assert (result.peak.view(torch.float32).isfinite()).tolist() == [False, True]


@every_recipe
def test_tiny_queries_keep_their_exponents_in_range(emulator, name):
    query = torch.zeros(1, 4, 1, 128)
    query[0, 0, 0, 0], query[0, 1, 0, 0], query[0, 2, 0, 0] = 2.0**-120, 2.0**-100, 1.0
    key = torch.randn(1, 4, 1, 128)
    recipe = resolve(name)
    bits = BITS[recipe.qk.element]
    codes, scales = query_codes(packed(emulator, name, query, key, key).query, bits)
    want_codes, want_scales = expected(rotated(query) * (0.1 * LOG2E), recipe.qk)
    for row in range(4):
        if int(want_scales[0, row, 0]) < 9:
            assert not codes[0, row].any()
        else:
            assert torch.equal(codes[0, row], want_codes[0, row])
            assert torch.equal(scales[0, row], want_scales[0, row] - 9)
