"""The formats from their definition, in exact arithmetic and independent of `lowbit_attn.formats`."""

from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np


class Definition(NamedTuple):
    """Field widths, bias and largest finite code of a format (OCP MX v1.0 section 5.3, OCP FP8 v1.0)."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int


DEFINITIONS = {
    "e4m3": Definition(4, 3, 7, 0x7E),
    "e5m2": Definition(5, 2, 15, 0x7B),
    "e2m3": Definition(2, 3, 1, 0x1F),
    "e2m1": Definition(2, 1, 1, 0x7),
}


def sign_bit(name: str) -> int:
    definition = DEFINITIONS[name]
    return 1 << (definition.exponent_bits + definition.mantissa_bits)


def magnitude(code: int, name: str) -> Fraction:
    """Value of a non-negative finite code."""
    exponent_bits, mantissa_bits, bias, _ = DEFINITIONS[name]
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    assert exponent < 1 << exponent_bits
    if exponent == 0:
        return Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)


@cache
def magnitudes(name: str) -> np.ndarray:
    """Values of the finite non-negative codes, ascending, float64 (exact)."""
    return np.array([float(magnitude(code, name)) for code in range(DEFINITIONS[name].largest_code + 1)])


@cache
def midpoints(name: str) -> np.ndarray:
    """The ties between neighbouring non-negative codes, float64 (exact)."""
    values = magnitudes(name)
    return (values[1:] + values[:-1]) / 2


def nearest_codes(x: np.ndarray, name: str) -> np.ndarray:
    """Code nearest to each element, ties to even, saturating; exact, since it compares |x| with the midpoints as float64."""
    ties = midpoints(name)
    size = np.abs(x.astype(np.float64))
    below = np.searchsorted(ties, size, side="left")
    on_tie = (below < len(ties)) & (size == ties[np.minimum(below, len(ties) - 1)])
    code = below + (on_tie & (below % 2 == 1))
    return (code + np.where(np.signbit(x), sign_bit(name), 0)).astype(np.uint8)


def code_values(codes: np.ndarray, name: str) -> np.ndarray:
    """Values of finite codes as float64."""
    sign = sign_bit(name)
    return np.where(codes & sign, -1.0, 1.0) * magnitudes(name)[codes & (sign - 1)]


def floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def ceil_log2(x: Fraction) -> int:
    floor = floor_log2(x)
    return floor if Fraction(2) ** floor == x else floor + 1


def shared_exponent(maximum: float, rule: str, name: str, top: float | None = None) -> int:
    """Exponent of the power-of-two scale of a block whose largest magnitude is `maximum` > 0."""
    largest = magnitude(DEFINITIONS[name].largest_code, name)
    exact = Fraction(float(maximum))
    if rule == "floor":
        exponent = floor_log2(exact) - floor_log2(largest)
    else:
        boundary = {"oas": Fraction(7), "uos": Fraction(29, 4), "ceil": largest if top is None else Fraction(top)}[rule]
        exponent = ceil_log2(exact / boundary)
    return min(max(exponent, -127), 127)
