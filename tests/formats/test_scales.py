"""Scales equal ml_dtypes, and the rules that choose them equal exact rational arithmetic on every kind of block maximum."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from formats_oracle import nearest_codes, shared_exponent

from lowbit_attn import formats
from lowbit_attn.formats import (
    ELEMENTS,
    SCALE_RULES,
    decode_e8m0,
    decode_ue4m3,
    element_format,
    encode_e8m0,
    encode_ue4m3,
    pow2,
    rule_problem,
)

RULE_CASES = [("ceil", name) for name in ELEMENTS] + [("floor", name) for name in ELEMENTS] + [("oas", "e2m1"), ("uos", "e2m1")]
every_rule = pytest.mark.parametrize(("rule", "name"), RULE_CASES)
every_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def boundary(rule, name):
    """The largest scaled maximum that a rule allows."""
    return {"oas": 7.0, "uos": 7.25}.get(rule, element_format(name).max_value)


def endpoint_maxima(bound, dtype):
    """`bound` times powers of two over fp32's normal range, all of them near 1, with the neighbours on both sides."""
    exponents = np.unique(np.concatenate([np.arange(-125, 112, 4), np.arange(-12, 13)]))
    exact = np.ldexp(dtype(bound), exponents).astype(dtype)
    return np.concatenate([exact, np.nextafter(exact, dtype(np.inf)), np.nextafter(exact, dtype(0))])


def assert_exponents(maxima, rule, name, top=None):
    got = formats.shared_exponent(torch.from_numpy(maxima), rule, element_format(name), top=top)
    assert got.dtype == torch.int32
    for maximum, exponent in zip(maxima.tolist(), got.tolist(), strict=True):
        assert exponent == shared_exponent(maximum, rule, name, top), (maximum, rule, name, top)


def test_e8m0_decodes_every_code_like_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(decode_e8m0(torch.from_numpy(codes)).numpy(), expected)


def test_e8m0_encodes_every_exponent_like_ml_dtypes():
    exponents = torch.arange(-127, 128)
    expected = np.ldexp(1.0, exponents.numpy()).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    codes = encode_e8m0(exponents)
    assert codes.dtype == torch.uint8
    np.testing.assert_array_equal(codes.numpy(), expected)


def test_e8m0_clamps_exponents_and_leaves_255_to_nan():
    assert encode_e8m0(torch.tensor([-1000, -128, 128, 1000])).tolist() == [0, 0, 254, 254]
    assert decode_e8m0(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_ue4m3_decodes_every_code_like_ml_dtypes():
    codes = np.arange(128, dtype=np.uint8)
    np.testing.assert_array_equal(decode_ue4m3(torch.from_numpy(codes)).numpy(),
                                  codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@every_dtype
def test_ue4m3_encodes_to_the_nearest_code_saturating_and_without_a_sign(dtype):
    rng = np.random.default_rng(1)
    special = [0.0, -0.0, 2**-10, 3 * 2**-10, 464.0, 1e30, np.inf]
    values = np.concatenate([np.exp2(rng.uniform(-14, 12, 5000)), special]).astype(dtype)
    codes = encode_ue4m3(torch.from_numpy(values)).numpy()
    np.testing.assert_array_equal(codes, nearest_codes(np.abs(values), "e4m3"))
    assert encode_ue4m3(torch.tensor([torch.nan])).tolist() == [0x7F]


@every_dtype
@every_rule
def test_rules_equal_exact_arithmetic_on_random_maxima(rule, name, dtype):
    rng = np.random.default_rng(2)
    assert_exponents(np.exp2(rng.uniform(-149, 127.99, 800)).astype(dtype), rule, name)


@every_dtype
@every_rule
def test_rules_equal_exact_arithmetic_where_the_ratio_is_a_power_of_two_and_next_to_it(rule, name, dtype):
    assert_exponents(endpoint_maxima(boundary(rule, name), dtype), rule, name)
    assert_exponents(endpoint_maxima(1.0, dtype), rule, name)


@every_rule
def test_rules_equal_exact_arithmetic_on_subnormal_and_largest_maxima(rule, name):
    bits = np.concatenate([np.array([1, 2, 3, (1 << 23) - 1, 1 << 23, 0x7F7FFFFF, 0x7F7FFFFE], np.int32),
                           np.random.default_rng(3).integers(1, 1 << 23, 500, dtype=np.int32)])
    assert_exponents(bits.view(np.float32), rule, name)


@pytest.mark.parametrize(("name", "top"), [("e4m3", 14.0), ("e4m3", 28.0), ("e4m3", 448.0), ("e2m1", 4.0), ("e2m3", 0.3)])
@every_dtype
def test_top_replaces_the_largest_code_as_the_bound_of_ceil(name, top, dtype):
    stored = float(dtype(top))
    assert_exponents(np.exp2(np.random.default_rng(4).uniform(-60, 60, 500)).astype(dtype), "ceil", name, stored)
    assert_exponents(endpoint_maxima(stored, dtype), "ceil", name, stored)


@every_rule
def test_scaled_maxima_obey_the_bound_of_their_rule(rule, name):
    random = np.exp2(np.random.default_rng(5).uniform(-100, 100, 5000)).astype(np.float32)
    maxima = torch.from_numpy(np.concatenate([random, endpoint_maxima(boundary(rule, name), np.float32)]))
    scaled = maxima.double() / pow2(formats.shared_exponent(maxima, rule, element_format(name)), torch.float64)
    if rule == "floor":
        # The block maximum lands in the binade of the largest code, and may exceed it.
        assert scaled.min() >= 2.0 ** element_format(name).max_exponent
        assert scaled.max() < 2.0 ** (element_format(name).max_exponent + 1)
    else:
        assert scaled.max() <= boundary(rule, name)
        inside = maxima > 2.0**-100
        assert scaled[inside].min() > boundary(rule, name) / 2


def test_the_four_rules_part_where_the_e2m1_boundaries_lie():
    maxima = torch.tensor([4.0, 6.0, 6.5, 7.0, 7.125, 7.25, 7.5, 8.0])
    exponents = {rule: formats.shared_exponent(maxima, rule, element_format("e2m1")).tolist() for rule in SCALE_RULES}
    assert exponents == {
        "floor": [0, 0, 0, 0, 0, 0, 0, 1],
        "ceil": [0, 0, 1, 1, 1, 1, 1, 1],
        "oas": [0, 0, 0, 0, 1, 1, 1, 1],
        "uos": [0, 0, 0, 0, 0, 0, 1, 1],
    }


@every_rule
def test_a_zero_maximum_takes_the_exponent_that_was_asked_for(rule, name):
    zero, fmt = torch.zeros(2), element_format(name)
    assert formats.shared_exponent(zero, rule, fmt).tolist() == [0, 0]
    assert formats.shared_exponent(zero, rule, fmt, zero_exponent=-127).tolist() == [-127, -127]


@pytest.mark.parametrize("rule", ["oas", "uos"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3"])
def test_boundaries_of_the_e2m1_grid_are_refused_for_other_elements(rule, name):
    with pytest.raises(ValueError, match=f"'{rule}' is a boundary of the E2M1 grid; {name} accepts floor, ceil"):
        formats.shared_exponent(torch.ones(1), rule, element_format(name))
    assert rule_problem(rule, element_format("e2m1")) is None


def test_an_unknown_rule_is_refused_with_the_accepted_ones():
    with pytest.raises(ValueError, match=r"scale rule: got 'round'; accepted: floor, ceil, oas, uos"):
        formats.shared_exponent(torch.ones(1), "round", element_format("e2m1"))


@pytest.mark.parametrize(("rule", "top"), [("floor", 4.0), ("uos", 4.0), ("oas", 4.0), ("ceil", 6.5), ("ceil", 0.0),
                                           ("ceil", -1.0), ("ceil", math.nan)])
def test_a_top_that_is_no_bound_of_ceil_is_refused(rule, top):
    with pytest.raises(ValueError, match=r"top: got .* accepted: 0 < top <= 6\.0 with rule 'ceil'"):
        formats.shared_exponent(torch.ones(1), rule, element_format("e2m1"), top=top)


@pytest.mark.parametrize(("dtype", "lowest", "highest"), [(torch.float32, -149, 127), (torch.float64, -1074, 1023),
                                                          (torch.bfloat16, -133, 127)])
def test_pow2_is_exact_for_every_exponent_of_the_dtype(dtype, lowest, highest):
    exponents = torch.arange(lowest, highest + 1)
    value = pow2(exponents, dtype)
    assert value.dtype == dtype
    assert value.double().tolist() == [math.ldexp(1.0, e) for e in exponents.tolist()]
