"""Device functions for the numbers of `lowbit_attn.formats`: rounding to an element format, codes, scales. Integer arithmetic on
fp32 bits, so that every architecture and Triton's interpreter give the same bits.

An element format is three compile-time numbers (`element_constants`): fraction bits M, exponent of the smallest normal value E,
largest value TOP. A scale rule is two (`rule_constants`).
"""

import math
from typing import Any

import triton
import triton.language as tl

from lowbit_attn.formats import E4M3, element_format
from lowbit_attn.recipes import Operand

_BOUNDARIES = {"oas": 7.0, "uos": 7.25}
NEVER = 0x7FFFFF
"""A bound that no fraction exceeds: the rule "floor" does not round up."""


def element_constants(name: str) -> dict[str, Any]:
    """M, E and TOP of an element format."""
    fmt = element_format(name)
    return {"M": fmt.mantissa_bits, "E": fmt.min_exponent, "TOP": fmt.max_value}


def rule_constants(operand: Operand, top: float = 0.0) -> dict[str, int]:
    """BOUND_EXPONENT and BOUND_FRACTION of `scale_code` for an operand's scale rule; `top` bounds scaled maxima (rule ceil)."""
    fmt = element_format(operand.element)
    if operand.rule == "floor":
        return {"BOUND_EXPONENT": fmt.max_exponent + 1, "BOUND_FRACTION": NEVER}
    fraction, exponent = math.frexp(_BOUNDARIES.get(operand.rule) or top or fmt.max_value)
    # Rounding may carry to 2^23, which no fraction exceeds either: the bound is then a power of two.
    return {"BOUND_EXPONENT": exponent, "BOUND_FRACTION": round((2 * fraction - 1) * 2**23)}


E4M3_BOUND = tl.constexpr(tuple(rule_constants(Operand("e4m3", "mx32")).values()))
E4M3_TOP = tl.constexpr(E4M3.max_value)


@triton.constexpr_function
def power_of_two(exponent):
    """2^exponent as a compile-time number."""
    return 2.0 ** exponent


@triton.jit
def exponent_bits(code):
    """2^(code - 127) of codes 0 .. 254; fp32 holds 2^-127 as a subnormal."""
    return tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|: they sort like the numbers, NaN above Inf above the rest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_code(largest, BOUND_EXPONENT: tl.constexpr, BOUND_FRACTION: tl.constexpr, ZERO: tl.constexpr):
    """E8M0 code of `formats.shared_exponent` for the bits of a block maximum: 255 for Inf and NaN, ZERO for zero."""
    tiny = largest < 0x00800000  # frexp normalizes subnormals
    normal = tl.where(tiny, (largest.to(tl.float32, bitcast=True) * 4294967296.0).to(tl.int32, bitcast=True), largest)
    exponent = (normal >> 23) - tl.where(tiny, 158, 126) - BOUND_EXPONENT
    exponent += ((normal & 0x007FFFFF) > BOUND_FRACTION).to(tl.int32)
    code = tl.minimum(tl.maximum(exponent, -127), 127) + 127
    code = tl.where(largest == 0, ZERO, code)
    return tl.where(largest >= 0x7F800000, 255, code)


@triton.jit
def round_magnitude(x, M: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr):
    """The value of the code nearest to x >= 0, ties to even, saturating; NaN gives TOP."""
    x = tl.minimum(x, TOP)
    SHIFT: tl.constexpr = 23 - M
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) & -(1 << SHIFT)
    MAGIC: tl.constexpr = power_of_two(23 + E - M)  # its last bit is the spacing of subnormals
    return tl.where(x < power_of_two(E), (x + MAGIC) - MAGIC, bits.to(tl.float32, bitcast=True))


@triton.jit
def round_to_element(x, M: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr):
    """`formats.round_to_element`, but for NaN: the sign of zero is kept."""
    magnitude = round_magnitude(tl.abs(x), M, E, TOP)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def encode(value, M: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr):
    """Codes (int32) of numbers that the format has; the sign in its top bit."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = tl.abs(value) < power_of_two(E)
    subnormal = (tl.abs(value) * power_of_two(M - E)).to(tl.int32)
    code = tl.where(small, subnormal, (magnitude >> (23 - M)) - ((126 + E) << M))
    return code | tl.where(bits < 0, 1 << (BITS - 1), 0)


@triton.jit
def ue4m3(maximum, factor, TOP: tl.constexpr):
    """Value and code of the UE4M3 scale of blocks with this finite maximum, relative to a power of two `factor`; TOP: the largest
    code's value."""
    scale = round_magnitude(tl.math.div_rn(tl.math.div_rn(maximum, TOP), factor), 3, -6, E4M3_TOP)
    return scale * factor, encode(scale, 3, -6, 8)


@triton.jit
def spread(x, REPEAT: tl.constexpr):
    """[R, n] -> [R, n * REPEAT], each column repeated."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(tl.expand_dims(x, 2), (R, N, REPEAT)), (R, N * REPEAT))


@triton.jit
def block_largest(x, SIZE: tl.constexpr):
    """[R, n] -> bits of the largest magnitude of each SIZE neighbouring columns, [R, n / SIZE]."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.max(tl.reshape(magnitude_bits(x), (R, N // SIZE, SIZE)), 2)


@triton.jit
def pack_columns(code):
    """[R, 2 n] 4-bit codes -> [R, n] bytes, even columns in the low half."""
    R: tl.constexpr = code.shape[0]
    N: tl.constexpr = code.shape[1]
    low, high = tl.split(tl.reshape(code, (R, N // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def pack_rows(code):
    """[2 n, C] 4-bit codes -> [n, C] bytes, even rows in the low half."""
    R: tl.constexpr = code.shape[0]
    N: tl.constexpr = code.shape[1]
    low, high = tl.split(tl.permute(tl.reshape(code, (R // 2, 2, N)), (0, 2, 1)))
    return (low | (high << 4)).to(tl.uint8)
