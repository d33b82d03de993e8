"""Block quantization equals a slow per-block implementation for every layout, and keeps the stated policies at its edges."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from formats_oracle import DEFINITIONS, code_values, magnitudes, midpoints, nearest_codes, shared_exponent, sign_bit
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_attn.formats import (
    ELEMENTS,
    LAYOUTS,
    Quantized,
    block_layout,
    decode,
    decode_e8m0,
    dequantize,
    element_format,
    quantization_counts,
    quantize,
    round_stochastic,
    round_to_blocks,
    scale_per_token,
)


class Definition(NamedTuple):
    """What a layout is: block extent (None: whole axis), scale format, code of an all-zero block's scale."""

    tokens: int | None
    channels: int | None
    scale: str
    zero_scale: int


DEFINED = {
    "mx32": Definition(1, 32, "e8m0", 127),
    "nvfp16": Definition(1, 16, "ue4m3", 0),
    "nvfp16_token": Definition(1, 16, "ue4m3", 0),
    "token_block": Definition(32, None, "e8m0", 0),
    "square32": Definition(32, 32, "e8m0", 127),
    "per_row": Definition(1, None, "e8m0", 0),
    "per_tensor": Definition(None, None, "e8m0", 127),
}
E8M0_LAYOUTS = [name for name, layout in DEFINED.items() if layout.scale == "e8m0"]
NVFP_LAYOUTS = ["nvfp16", "nvfp16_token"]
BOUNDS = {"oas": 7.0, "uos": 7.25}

every_layout = pytest.mark.parametrize("layout", list(DEFINED))
every_element = pytest.mark.parametrize("element", list(ELEMENTS))
every_axis = pytest.mark.parametrize("axis", [-1, -2])


class Expected(NamedTuple):
    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray
    token_scales: np.ndarray | None


def blocks_of(shape, layout):
    """(scale index, slices) of each block of a [tokens, channels] array."""
    tokens, channels = shape
    height, width = DEFINED[layout].tokens or tokens, DEFINED[layout].channels or channels
    for i, first_token in enumerate(range(0, tokens, height)):
        for j, first_channel in enumerate(range(0, channels, width)):
            yield (i, j), (slice(first_token, first_token + height), slice(first_channel, first_channel + width))


def slowly(x, element, layout, rule="ceil", axis=-1, top=None, second_level=1.0):
    """Quantize a finite [tokens, channels] fp32 array one block at a time."""
    if axis == -2:
        flipped = slowly(x.T, element, layout, rule, -1, top, second_level)
        return Expected(flipped.codes.T, flipped.scales.T, flipped.values.T, flipped.token_scales)
    blocks = list(blocks_of(x.shape, layout))
    rows, columns = (1 + max(index[k] for index, _ in blocks) for k in (0, 1))
    codes, values = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float64)
    scales = np.zeros((rows, columns), np.uint8)
    largest = np.float32(magnitudes(element)[-1])
    token_scales = None
    if layout == "nvfp16_token":
        token_scales = np.zeros(x.shape[0], np.uint8)
        for token in range(x.shape[0]):
            maximum = np.abs(x[token]).max() / largest
            token_scales[token] = 127 + (shared_exponent(maximum, "ceil", "e4m3") if maximum else 0)
    for index, part in blocks:
        maximum = np.abs(x[part]).max()
        if DEFINED[layout].scale == "e8m0":
            scales[index] = 127 + shared_exponent(maximum, rule, element, top) if maximum else DEFINED[layout].zero_scale
            scale = np.ldexp(1.0, int(scales[index]) - 127)
            codes[part] = nearest_codes(x[part].astype(np.float64) / scale, element)
        else:
            factor = np.float32(second_level)
            if token_scales is not None:
                factor = factor * np.float32(np.ldexp(1.0, int(token_scales[index[0]]) - 127))
            scales[index] = nearest_codes(np.asarray(maximum / largest / factor), "e4m3")
            scale = np.float32(code_values(scales[index], "e4m3")) * factor
            # Divided in fp32: a scale that is no power of two makes this rounding part of the format.
            codes[part] = nearest_codes(x[part] / scale, element) if scale else 0
        values[part] = code_values(codes[part], element) * np.float64(scale)
    return Expected(codes, scales, values, token_scales)


def wild(tokens, channels, seed):
    """fp32 numbers whose magnitudes differ between elements and rows, with zero rows, zero columns and a zero corner."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, channels)) * np.exp2(rng.integers(-6, 6, (tokens, channels)))
    x *= np.exp2(rng.integers(-20, 20, (tokens, 1))) * np.exp2(rng.integers(-4, 4, (1, channels)))
    x[rng.random(tokens) < 0.1] = 0
    x[:, rng.random(channels) < 0.1] = 0
    if rng.random() < 0.3:
        x[:40, :40] = 0
    return x.astype(np.float32)


def assert_equal_to_slow(x, element, layout, axis=-1, **options):
    expected = slowly(x, element, layout, axis=axis, **options)
    given_x, fmt, blocks = torch.from_numpy(x.copy()), element_format(element), block_layout(layout)
    q = quantize(given_x, fmt, blocks, axis=axis, **options)
    sign = sign_bit(element)
    # Codes are compared as numbers: 0/0 scales leave the sign of zero open.
    np.testing.assert_array_equal(np.where(q.codes.numpy() == sign, 0, q.codes.numpy()),
                                  np.where(expected.codes == sign, 0, expected.codes))
    np.testing.assert_array_equal(q.scales.numpy(), expected.scales)
    if expected.token_scales is not None:
        np.testing.assert_array_equal(q.token_scales.numpy(), expected.token_scales)
    else:
        assert q.token_scales is None
    np.testing.assert_array_equal(dequantize(q, torch.float64).numpy(), expected.values)
    np.testing.assert_array_equal(dequantize(q).numpy(), expected.values.astype(np.float32))
    np.testing.assert_array_equal(round_to_blocks(given_x, fmt, blocks, axis=axis, **options).numpy(),
                                  expected.values.astype(np.float32))
    np.testing.assert_array_equal(given_x.numpy(), x)
    return q


@every_axis
@every_layout
@every_element
def test_every_layout_equals_the_slow_implementation(element, layout, axis):
    for shape in ((1, 1), (32, 32), (33, 31), (64, 96), (70, 50)):
        assert_equal_to_slow(wild(*shape, seed=sum(shape)), element, layout, axis)


@given(tokens=st.integers(1, 70), channels=st.integers(1, 70), layout=st.sampled_from(sorted(DEFINED)),
       element=st.sampled_from(sorted(ELEMENTS)), axis=st.sampled_from([-1, -2]), seed=st.integers(0, 2**16))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_odd_shapes_equal_the_slow_implementation(tokens, channels, layout, element, axis, seed):
    assert_equal_to_slow(wild(tokens, channels, seed), element, layout, axis)


@every_axis
@pytest.mark.parametrize("layout", E8M0_LAYOUTS)
@pytest.mark.parametrize(("element", "rule", "top"), [("e4m3", "floor", None), ("e2m1", "floor", None), ("e2m1", "oas", None),
                                                      ("e2m1", "uos", None), ("e4m3", "ceil", 14.0), ("e2m3", "ceil", 5.5)])
def test_every_rule_and_top_reaches_the_blocks(element, layout, rule, top, axis):
    assert_equal_to_slow(wild(70, 50, seed=9), element, layout, axis, rule=rule, top=top)


@pytest.mark.parametrize("layout", NVFP_LAYOUTS)
@pytest.mark.parametrize("second_level", [2.0**-12, 0.3, 7.0])
def test_the_second_level_constant_multiplies_every_scale(layout, second_level):
    x = wild(20, 50, seed=2)
    q = quantize(torch.from_numpy(x), ELEMENTS["e2m1"], block_layout(layout), second_level=second_level)
    expected = slowly(x, "e2m1", layout, second_level=second_level)
    np.testing.assert_array_equal(q.scales.numpy(), expected.scales)
    np.testing.assert_array_equal(decode(q.codes, ELEMENTS["e2m1"]).numpy(), code_values(expected.codes, "e2m1"))
    np.testing.assert_allclose(dequantize(q).numpy(), expected.values, rtol=2**-22)


@pytest.mark.parametrize("layout", NVFP_LAYOUTS)
@pytest.mark.parametrize("second_level", [1.0, 0.3, 7.0])
def test_nvfp4_scales_divide_by_six_and_then_by_the_second_level_each_rounded_once(layout, second_level):
    # Maxima whose scale lies within a few roundings of a tie between UE4M3 codes: a product with 1/6 moves some of them.
    ties = midpoints("e4m3") * 6 * second_level
    offsets = np.arange(-4, 5, dtype=np.int32)[:, None]
    maxima = (ties.astype(np.float32).view(np.int32) + offsets).view(np.float32).ravel()
    x = torch.from_numpy(maxima)[:, None].expand(-1, 16)
    q = quantize(x, ELEMENTS["e2m1"], block_layout(layout), second_level=second_level)
    np.testing.assert_array_equal(q.scales.numpy(), slowly(x.numpy(), "e2m1", layout, second_level=second_level).scales)


@pytest.mark.parametrize("layout", E8M0_LAYOUTS)
def test_float64_input_is_never_narrowed(layout):
    # 1 + 2^-4 is a tie between E4M3 codes; the added 2^-40 decides it and would vanish in fp32.
    x = torch.full((32, 32), 1.0625 + 2.0**-40, dtype=torch.float64)
    x[0, 0] = 256.0
    rounded = round_to_blocks(x, ELEMENTS["e4m3"], block_layout(layout))
    assert rounded.dtype == torch.float64
    assert rounded[0, 1] == 1.125
    assert torch.equal(dequantize(quantize(x, ELEMENTS["e4m3"], block_layout(layout)), torch.float64), rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_layout
def test_16_bit_input_equals_its_float32_copy(layout, dtype):
    x = torch.randn(40, 50).to(dtype)
    narrow, wide = (quantize(t, ELEMENTS["e4m3"], block_layout(layout)) for t in (x, x.float()))
    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.scales, wide.scales)


@every_axis
@every_layout
def test_leading_axes_are_independent(layout, axis):
    x = torch.from_numpy(np.stack([wild(40, 50, seed) for seed in range(6)])).reshape(2, 3, 40, 50)
    whole = quantize(x, ELEMENTS["e2m1"], block_layout(layout), axis=axis)
    rounded = round_to_blocks(x, ELEMENTS["e2m1"], block_layout(layout), axis=axis)
    for batch in range(2):
        for head in range(3):
            alone = quantize(x[batch, head], ELEMENTS["e2m1"], block_layout(layout), axis=axis)
            assert torch.equal(whole.codes[batch, head], alone.codes)
            assert torch.equal(whole.scales[batch, head], alone.scales)
            if alone.token_scales is not None:
                assert torch.equal(whole.token_scales[batch, head], alone.token_scales)
            assert torch.equal(dequantize(whole)[batch, head], dequantize(alone))
            assert torch.equal(rounded[batch, head], dequantize(alone))


@every_axis
@every_layout
@pytest.mark.parametrize("view", ["transposed", "offset", "strided", "heads_last", "expanded"])
def test_views_equal_their_contiguous_copies(layout, axis, view):
    base = torch.from_numpy(wild(90, 80, seed=5))
    x = {
        "transposed": lambda: base.mT,
        "offset": lambda: base.flatten()[13:13 + 45 * 61].view(45, 61),
        "strided": lambda: base[3::2, 1::3],
        "heads_last": lambda: base.view(45, 2, 80).transpose(0, 1),
        "expanded": lambda: base[:, :1].expand(-1, 37),
    }[view]()
    fmt, blocks = ELEMENTS["e2m3"], block_layout(layout)
    from_view, from_copy = (quantize(t, fmt, blocks, axis=axis) for t in (x, x.contiguous()))
    assert from_view.codes.is_contiguous()
    assert from_view.scales.is_contiguous()
    assert torch.equal(from_view.codes, from_copy.codes)
    assert torch.equal(from_view.scales, from_copy.scales)
    assert torch.equal(dequantize(from_view), dequantize(from_copy))
    assert torch.equal(round_to_blocks(x, fmt, blocks, axis=axis), dequantize(from_copy))


@every_axis
@every_layout
def test_an_all_zero_block_has_zero_codes_and_the_stated_scale(layout, axis):
    q = quantize(torch.zeros(40, 50), ELEMENTS["e2m1"], block_layout(layout), axis=axis)
    assert not q.codes.any()
    assert (q.scales == DEFINED[layout].zero_scale).all()
    assert not dequantize(q).any()
    assert not round_to_blocks(torch.zeros(40, 50), ELEMENTS["e2m1"], block_layout(layout), axis=axis).any()
    if q.token_scales is not None:
        assert (q.token_scales == 127).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_axis
@every_layout
@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_nan_and_infinity_make_their_block_nan_and_touch_no_other(element, layout, axis, bad):
    fmt, blocks = element_format(element), block_layout(layout)
    x = torch.from_numpy(wild(70, 50, seed=6))
    x[41, 37] = bad
    poisoned = torch.zeros(70, 50, dtype=torch.bool)
    oriented = poisoned if axis == -1 else poisoned.mT
    token, channel = (41, 37) if axis == -1 else (37, 41)
    for _, (rows, columns) in blocks_of(oriented.shape, layout):
        if rows.start <= token < rows.stop and columns.start <= channel < columns.stop:
            oriented[rows, columns] = True
    assert poisoned.any()
    q = quantize(x, fmt, blocks, axis=axis)
    clean = dequantize(quantize(x.masked_fill(poisoned, 0.0), fmt, blocks, axis=axis))
    for values in (dequantize(q), round_to_blocks(x, fmt, blocks, axis=axis)):
        assert torch.equal(values.isnan(), poisoned)
        assert torch.equal(values[~poisoned], clean[~poisoned])
    assert (q.scales == (255 if DEFINED[layout].scale == "e8m0" else 0x7F)).sum() == 1


@every_axis
@every_layout
@pytest.mark.parametrize("shape", [(0, 64), (2, 3, 0, 40), (0, 5, 64)])
def test_tensors_without_tokens_or_batches_are_legal(layout, axis, shape):
    fmt, blocks, x = ELEMENTS["e2m1"], block_layout(layout), torch.zeros(shape)
    q = quantize(x, fmt, blocks, axis=axis)
    assert q.codes.shape == x.shape
    assert q.scales.numel() == 0
    assert dequantize(q).shape == round_to_blocks(x, fmt, blocks, axis=axis).shape == x.shape
    if q.token_scales is not None:
        assert q.token_scales.shape == (*shape[:-2], shape[axis - 1 if axis == -1 else -1])


@every_axis
@pytest.mark.parametrize("layout", E8M0_LAYOUTS)
@pytest.mark.parametrize(("element", "rule"), [*((e, "ceil") for e in ELEMENTS), ("e2m1", "oas"), ("e2m1", "uos")])
def test_no_scaled_element_exceeds_the_bound_of_its_rule(element, layout, rule, axis):
    x = torch.from_numpy(wild(70, 50, seed=7))
    q = quantize(x, element_format(element), block_layout(layout), rule, axis=axis)
    code_of_one = DEFINITIONS[element].bias << DEFINITIONS[element].mantissa_bits
    ones = Quantized(torch.full_like(q.codes, code_of_one), q.scales, q.element, q.layout, q.axis)
    scaled = x.double() / dequantize(ones, torch.float64)
    assert scaled.abs().max() <= BOUNDS.get(rule, element_format(element).max_value)


def test_top_bounds_every_scaled_element():
    x = torch.from_numpy(wild(70, 50, seed=8))
    q = quantize(x, ELEMENTS["e4m3"], block_layout("token_block"), top=14.0)
    assert decode(q.codes, ELEMENTS["e4m3"]).abs().max() <= 14.0


@pytest.mark.parametrize("element", ["e4m3", "e2m3"])
def test_token_block_codes_and_scales_are_valid_transposed(element):
    q = quantize(torch.from_numpy(wild(70, 50, seed=10)), element_format(element), block_layout("token_block"))
    # The same codes read along tokens: one scale per channel and 32 tokens, the token block's repeated.
    transposed = Quantized(q.codes.mT.contiguous(), q.scales.mT.expand(50, -1).contiguous(), q.element, block_layout("mx32"))
    assert torch.equal(dequantize(transposed), dequantize(q).mT)


@every_element
def test_square_blocks_commute_with_transposition(element):
    x = torch.from_numpy(wild(70, 50, seed=11))
    q, transposed = (quantize(t, element_format(element), block_layout("square32")) for t in (x, x.mT))
    assert torch.equal(q.codes.mT, transposed.codes)
    assert torch.equal(q.scales.mT, transposed.scales)


@pytest.mark.parametrize(("layout", "height"), [("token_block", 32), ("per_row", 1), ("per_tensor", 70)])
def test_scale_per_token_repeats_each_block_s_scale_over_its_tokens(layout, height):
    x = torch.from_numpy(wild(70, 50, seed=12))
    q = quantize(x.expand(2, 70, 50), ELEMENTS["e4m3"], block_layout(layout))
    per_token = scale_per_token(q)
    assert per_token.shape == (2, 70)
    for token in range(70):
        assert torch.equal(per_token[:, token], q.scales[:, token // height, 0])
    values = decode(q.codes, q.element) * decode_e8m0(per_token)[..., None]
    assert torch.equal(values, dequantize(q))


@pytest.mark.parametrize("channels", [1, 16, 32, 50])
@pytest.mark.parametrize(("layout", "axis"), [("mx32", -1), ("square32", -1), ("nvfp16", -1), ("nvfp16_token", -1),
                                              ("token_block", -2), ("per_row", -2)])
def test_scale_per_token_refuses_layouts_with_several_scales_per_token(layout, axis, channels):
    # However few channels there are: with one block of them there happens to be one column, of another meaning.
    q = quantize(torch.randn(70, channels), ELEMENTS["e4m3"], block_layout(layout), axis=axis)
    with pytest.raises(ValueError, match=f"layout: got '{layout}' with axis {axis}; accepted: token_block, per_row, per_tensor"):
        scale_per_token(q)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_shared_tokens_says_how_far_a_change_of_one_token_reaches(layout, axis):
    if axis == -2 and not block_layout(layout).is_one_dimensional:
        axis = -1  # these read the same blocks whichever axis a product contracts
    x = torch.randn(128, 64)
    louder = x.clone()
    louder[37] *= 2.0**20
    before, after = (quantize(t, ELEMENTS["e2m1"], block_layout(layout), axis=axis) for t in (x, louder))
    moved = (dequantize(before) != dequantize(after)).any(-1).nonzero().flatten().tolist()
    shared = block_layout(layout).shared_tokens(along_tokens=axis == -2)
    size = 128 if shared == float("inf") else int(shared)
    assert set(moved) <= set(range(37 // size * size, 37 // size * size + size))
    assert len(moved) > size * 0.9


@every_axis
def test_an_nvfp4_scale_that_underflows_gives_zeros_and_a_second_level_prevents_it(axis):
    fmt = ELEMENTS["e2m1"]
    small = torch.randn(40, 48) * 1e-6
    plain = quantize(small, fmt, block_layout("nvfp16"), axis=axis)
    assert not plain.scales.any()
    assert not plain.codes.any()
    assert not dequantize(plain).any()
    assert not round_to_blocks(small, fmt, block_layout("nvfp16"), axis=axis).any()
    for rescued in (dequantize(quantize(small, fmt, block_layout("nvfp16_token"), axis=axis)),
                    dequantize(quantize(small, fmt, block_layout("nvfp16"), axis=axis, second_level=1e-6))):
        assert ((rescued - small).norm() / small.norm()).item() < 0.15


def test_nvfp4_blocks_beyond_the_scale_s_reach_saturate_without_nan():
    big = torch.full((1, 16), 1e6)
    assert dequantize(quantize(big, ELEMENTS["e2m1"], block_layout("nvfp16"))).unique().tolist() == [6.0 * 448.0]
    assert dequantize(quantize(big, ELEMENTS["e2m1"], block_layout("nvfp16_token"))).sub(big).abs().max() < 0.1 * 1e6


@every_axis
@pytest.mark.parametrize(("element", "rule"), [("e4m3", "floor"), ("e2m1", "floor"), ("e2m1", "uos"), ("e2m1", "ceil"),
                                               ("e2m3", "ceil")])
def test_quantization_counts_equal_the_slow_implementation(element, rule, axis):
    x = wild(70, 50, seed=13)
    expected = slowly(x, element, "mx32", rule, axis)
    oriented, scales = (x, expected.scales) if axis == -1 else (x.T, expected.scales.T)
    saturated, largest = 0, Fraction(float(magnitudes(element)[-1]))
    for index, part in blocks_of(oriented.shape, "mx32"):
        scale = Fraction(2) ** (int(scales[index]) - 127)
        saturated += sum(abs(Fraction(float(v))) / scale > largest for v in oriented[part].flat)
    flushed = int(((x != 0) & (expected.values == 0)).sum())
    counted = quantization_counts(torch.from_numpy(x), element_format(element), block_layout("mx32"), rule, axis=axis)
    assert [int(c) for c in counted] == [saturated, flushed]
    assert (saturated == 0) == (rule == "ceil")


def test_an_element_that_is_the_largest_code_counts_as_neither_saturated_nor_flushed():
    x = torch.tensor([[6.0, -6.0, 6.5, -7.0, 0.25, 0.24, 0.0, -0.0]])
    counted = quantization_counts(x, ELEMENTS["e2m1"], block_layout("mx32"), "floor")
    assert [int(c) for c in counted] == [2, 2]


@every_axis
@every_layout
def test_stochastic_rounding_uses_the_scale_of_the_block_and_the_noise_of_the_element(layout, axis):
    fmt, blocks = ELEMENTS["e2m1"], block_layout(layout)
    x, noise = torch.from_numpy(wild(45, 50, seed=14)), torch.rand(45, 50)
    q = quantize(x, fmt, blocks, axis=axis)
    ones = Quantized(torch.full_like(q.codes, 0b0010), q.scales, fmt, q.layout, axis, token_scales=q.token_scales)
    scale = dequantize(ones)
    scaled = torch.where(scale == 0, 0.0, x / scale)
    assert torch.equal(round_to_blocks(x, fmt, blocks, axis=axis, uniform=noise), round_stochastic(scaled, fmt, noise) * scale)


def test_the_layouts_are_the_defined_ones():
    assert {name: (layout.tokens, layout.channels, layout.scale) for name, layout in LAYOUTS.items()} == {
        name: (d.tokens, d.channels, d.scale) for name, d in DEFINED.items()}


def test_an_unknown_layout_is_refused_with_the_accepted_names():
    with pytest.raises(ValueError, match=r"layout: got 'mx16'; accepted: mx32, nvfp16, nvfp16_token, token_block"):
        block_layout("mx16")
