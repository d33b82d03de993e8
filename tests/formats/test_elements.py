"""Element formats equal ml_dtypes, torch and brute force on every input in range; beyond it they follow our stated policy."""

import ml_dtypes
import numpy as np
import pytest
import torch
from formats_oracle import DEFINITIONS, code_values, magnitudes, midpoints, nearest_codes, sign_bit

from lowbit_attn import formats
from lowbit_attn.formats import ELEMENTS, decode, element_format, encode, round_stochastic, round_to_element

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SPECIAL_CODES = {
    "e4m3": {0x7F: np.nan},
    "e5m2": {0x7C: np.inf, 0x7D: np.nan, 0x7E: np.nan, 0x7F: np.nan},
    "e2m3": {},
    "e2m1": {},
}

every_format = pytest.mark.parametrize("name", list(ELEMENTS))
every_16_bit_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def every_pattern(dtype):
    """All 65536 values of a 16-bit dtype."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def in_range(x, name):
    """The elements that lie between the smallest and largest finite values."""
    return x[x.abs().double() <= magnitudes(name)[-1]]


def ml_codes(x, name):
    """What ml_dtypes makes of fp32 or narrower inputs."""
    return x.float().numpy().astype(ML_DTYPES[name]).view(np.uint8)


def assert_codes(x, expected, name):
    """Compare codes bit for bit and name the first input that differs."""
    codes = encode(x, element_format(name)).numpy()
    wrong = [(float(x[i]), hex(codes[i]), hex(expected[i])) for i in np.flatnonzero(codes != expected)]
    assert not wrong, f"{len(wrong)} differ, first (input, got, expected): {wrong[0]}"


def ties_and_neighbours(name, dtype):
    """Every midpoint between neighbouring codes with the representable numbers next to it, both signs."""
    ties = midpoints(name).astype(dtype)
    around = np.concatenate([ties, np.nextafter(ties, dtype(np.inf)), np.nextafter(ties, dtype(0))])
    return torch.from_numpy(np.concatenate([around, -around]))


@every_16_bit_dtype
@every_format
def test_encode_equals_ml_dtypes_on_every_16_bit_input_in_range(name, dtype):
    x = in_range(every_pattern(dtype), name)
    assert x.numel() > 2**14
    assert_codes(x, ml_codes(x, name), name)


@every_16_bit_dtype
@every_format
def test_encode_equals_brute_force_on_every_finite_16_bit_input(name, dtype):
    x = every_pattern(dtype)
    x = x[x.isfinite()]
    assert_codes(x, nearest_codes(x.double().numpy(), name), name)


@every_16_bit_dtype
@pytest.mark.parametrize("name", list(TORCH_DTYPES))
def test_encode_equals_torch_float8_on_every_16_bit_input_in_range(name, dtype):
    x = in_range(every_pattern(dtype), name)
    assert_codes(x, x.to(TORCH_DTYPES[name]).view(torch.uint8).numpy(), name)


@every_format
def test_encode_equals_ml_dtypes_on_every_tie_and_its_fp32_neighbours(name):
    x = ties_and_neighbours(name, np.float32)
    assert_codes(x, ml_codes(x, name), name)
    if name in TORCH_DTYPES:
        assert_codes(x, x.to(TORCH_DTYPES[name]).view(torch.uint8).numpy(), name)


@every_format
def test_encode_sends_ties_to_the_even_code(name):
    ties = torch.from_numpy(midpoints(name))
    assert not (encode(ties, element_format(name)) % 2).any()


@every_format
def test_encode_of_fp32_subnormals_keeps_only_the_sign(name):
    bits = torch.cat([torch.arange(0, 1024), torch.randint(0, 1 << 23, (4096,)), torch.tensor([(1 << 23) - 1])]).int()
    x = bits.view(torch.float32)
    for signed in (x, -x):
        assert_codes(signed, ml_codes(signed, name), name)
        assert not decode(encode(signed, element_format(name)), element_format(name)).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_format
def test_encode_equals_brute_force_on_random_input(name, dtype):
    rng = np.random.default_rng(0)
    largest = magnitudes(name)[-1]
    uniform = rng.uniform(-largest, largest, 20_000)
    spread = np.exp2(rng.uniform(-30, np.log2(largest), 20_000)) * rng.choice([-1, 1], 20_000)
    x = np.concatenate([uniform, spread]).astype(dtype)
    assert_codes(torch.from_numpy(x), nearest_codes(x, name), name)


@every_format
def test_encode_of_fp64_rounds_once(name):
    x = ties_and_neighbours(name, np.float64)
    # Each of these becomes a tie when it is first rounded to fp32.
    assert (x.float().double() != x).any()
    expected = nearest_codes(x.numpy(), name)
    assert_codes(x, expected, name)
    assert torch.equal(round_to_element(x, element_format(name)), torch.from_numpy(code_values(expected, name)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@every_format
def test_decode_of_every_code_equals_the_formula(name, dtype):
    sign, special = sign_bit(name), SPECIAL_CODES[name]
    finite = np.array([code for code in range(2 * sign) if code & (sign - 1) not in special], np.uint8)
    value = decode(torch.from_numpy(finite), element_format(name), dtype)
    assert value.dtype == dtype
    assert torch.equal(value.double(), torch.from_numpy(code_values(finite, name)))
    assert torch.equal(value.signbit(), torch.from_numpy(finite & sign != 0))
    for code, expected in special.items():
        pair = decode(torch.tensor([code, code | sign], dtype=torch.uint8), element_format(name), dtype).double().numpy()
        np.testing.assert_array_equal(pair, [expected, -expected])


@every_format
def test_decode_equals_ml_dtypes_on_every_code(name):
    codes = np.arange(2 * sign_bit(name), dtype=np.uint8)
    expected = codes.view(ML_DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(decode(torch.from_numpy(codes), element_format(name)).numpy(), expected)


@every_format
def test_encode_inverts_decode_on_every_finite_code(name):
    sign, largest = sign_bit(name), DEFINITIONS[name].largest_code
    codes = torch.tensor([*range(largest + 1), *(sign | code for code in range(largest + 1))], dtype=torch.uint8)
    assert torch.equal(encode(decode(codes, element_format(name)), element_format(name)), codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@every_format
def test_magnitudes_above_the_largest_code_saturate_infinity_included(name, dtype):
    largest = DEFINITIONS[name].largest_code
    x = torch.tensor([magnitudes(name)[-1] * 1.1, 60000.0, torch.finfo(dtype).max, torch.inf], dtype=dtype)
    assert encode(x, element_format(name)).tolist() == [largest] * 4
    assert encode(-x, element_format(name)).tolist() == [largest | sign_bit(name)] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@every_format
def test_nan_becomes_the_nan_code_or_positive_zero(name, dtype):
    nans = torch.tensor([torch.nan, -torch.nan], dtype=dtype)
    expected = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m3": 0, "e2m1": 0}[name]
    assert encode(nans, element_format(name)).tolist() == [expected] * 2
    assert round_to_element(nans, element_format(name)).isnan().all()


@every_format
def test_the_sign_of_zero_is_kept_by_zeros_and_by_numbers_that_round_to_zero(name):
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    assert encode(x, element_format(name)).tolist() == [0, sign_bit(name)] * 2
    assert round_to_element(x, element_format(name)).signbit().tolist() == [False, True] * 2


@every_16_bit_dtype
@every_format
def test_round_to_element_equals_decode_of_encode_except_that_nan_survives(name, dtype):
    x, fmt = every_pattern(dtype), element_format(name)
    rounded = round_to_element(x, fmt)
    expected = torch.where(x.isnan(), torch.nan, decode(encode(x, fmt), fmt))
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded.view(torch.int32)[~x.isnan()], expected.view(torch.int32)[~x.isnan()])
    assert torch.equal(rounded.isnan(), x.isnan())


@every_format
def test_shapes_and_strides_are_kept(name):
    fmt, x = element_format(name), torch.randn(6, 10, 4)
    view = x.permute(2, 0, 1)[1:, ::2]
    assert torch.equal(encode(view, fmt), encode(view.contiguous(), fmt))
    assert torch.equal(decode(encode(x, fmt).permute(2, 0, 1), fmt), decode(encode(x, fmt), fmt).permute(2, 0, 1))
    assert encode(torch.tensor(1.5), fmt).shape == ()
    assert encode(torch.empty(0, 3), fmt).shape == (0, 3)


@every_format
def test_the_description_matches_the_codes(name):
    fmt, definition = element_format(name), DEFINITIONS[name]
    values = magnitudes(name)
    assert 2**fmt.bits == 2 * sign_bit(name)
    assert fmt.max_value == values[-1]
    assert 2.0**fmt.max_exponent <= values[-1] < 2.0 ** (fmt.max_exponent + 1)
    assert 2.0**fmt.min_exponent == values[1 << definition.mantissa_bits]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int8])
@every_format
def test_decode_refuses_codes_that_are_not_uint8(name, dtype):
    with pytest.raises(TypeError, match=r"codes: got dtype .*accepted: torch\.uint8"):
        decode(torch.zeros(2, dtype=dtype), element_format(name))


def test_an_unknown_element_is_refused_with_the_accepted_names():
    with pytest.raises(ValueError, match=r"element: got 'e3m2'; accepted: e4m3, e5m2, e2m3, e2m1"):
        element_format("e3m2")


@every_format
def test_stochastic_rounding_goes_up_exactly_as_often_as_the_fraction_says(name):
    values = torch.from_numpy(magnitudes(name))
    eighths = torch.arange(8, dtype=torch.float64) / 8
    between = values[:-1, None] + (values[1:] - values[:-1])[:, None] * eighths
    noise = torch.arange(64, dtype=torch.float64) / 64
    for sign in (1.0, -1.0):
        rounded = round_stochastic(sign * between[..., None].expand(-1, -1, 64), element_format(name), noise)
        went_up = (rounded == sign * values[1:, None, None]).sum(-1)
        stayed = (rounded == sign * values[:-1, None, None]).sum(-1)
        assert torch.equal(went_up, (eighths * 64).long().expand_as(went_up))
        assert torch.equal(stayed, 64 - went_up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_format
def test_stochastic_rounding_never_moves_a_code_nor_leaves_the_range(name, dtype):
    values = torch.from_numpy(magnitudes(name)).to(dtype)
    signed = torch.cat([values, -values])
    most = torch.full_like(signed, 1 - 2**-24)
    assert torch.equal(round_stochastic(signed, element_format(name), most), signed)
    beyond = torch.tensor([1e9, torch.inf, -torch.inf], dtype=dtype)
    limit = round_stochastic(beyond, element_format(name), most[:3])
    assert limit.abs().tolist() == [values[-1].item()] * 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("convert", [
    lambda x: formats.encode(x, formats.E2M1), lambda x: formats.encode(x, formats.E4M3),
    lambda x: formats.round_to_element(x, formats.E2M1), lambda x: formats.round_stochastic(x, formats.E4M3, torch.zeros(4, 32)),
    lambda x: formats.quantize(x, formats.E4M3, formats.LAYOUTS["mx32"]),
    lambda x: formats.quantize(x, formats.E2M1, formats.LAYOUTS["nvfp16"], axis=-2),
    lambda x: formats.round_to_blocks(x, formats.E4M3, formats.LAYOUTS["per_row"]),
    lambda x: formats.quantization_counts(x, formats.E4M3, formats.LAYOUTS["mx32"]), formats.hadamard,
], ids=["encode E2M1", "encode E4M3", "round_to_element", "round_stochastic", "quantize", "quantize along tokens",
        "round_to_blocks", "quantization_counts", "hadamard"])
def test_numbers_that_are_not_floating_are_refused_by_name(convert, dtype):
    # An integer is likelier a code than a value.
    with pytest.raises(TypeError, match=rf"x: got dtype {dtype}; accepted: a floating dtype"):
        convert(torch.zeros(4, 32, dtype=dtype))
