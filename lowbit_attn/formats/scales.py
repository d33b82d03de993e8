"""Scale formats (E8M0, UE4M3) and the rules that choose a power-of-two scale from a block's maximum.

Sources: OCP Microscaling Formats v1.0 section 5.4.1 (E8M0) and 6.3 (floor rule); MXAttention section 4.1, table 1 and
appendix G (ceil, oas, uos); FLAMIA section 3.2 (why causal recipes round up).

With M the block maximum and sigma = 2^e its scale:

    floor   e = floor(log2 M) - floor(log2 max)     M/sigma may exceed the largest code and clamp (leaks when causal)
    ceil    e = ceil(log2(M / top))                 top is the largest code, or a smaller bound asked for
    oas     e = ceil(log2(M / 7))                   E2M1 only
    uos     e = ceil(log2(M / 7.25))                E2M1 only, MXAttention's optimum
"""

import math

import torch
from torch import Tensor

from lowbit_attn.formats.elements import E4M3, ElementFormat, decode, encode

E8M0_BIAS = 127
E8M0_NAN = 255
MIN_EXPONENT, MAX_EXPONENT = -127, 127

SCALE_RULES = ("floor", "ceil", "oas", "uos")
_E2M1_BOUNDARIES = {"oas": 7.0, "uos": 7.25}


def rule_problem(rule: str, fmt: ElementFormat) -> str | None:
    """Why `rule` cannot choose scales for `fmt`, or None if it can."""
    if rule not in SCALE_RULES:
        return f"scale rule: got {rule!r}; accepted: {', '.join(SCALE_RULES)}"
    if rule in _E2M1_BOUNDARIES and fmt.name != "e2m1":
        return f"scale rule {rule!r} is a boundary of the E2M1 grid; {fmt.name} accepts floor, ceil"
    return None


def _ceil_log2_ratio(maximum: Tensor, boundary: float) -> Tensor:
    """ceil(log2(maximum / boundary)) without a rounded division or logarithm."""
    fraction, exponent = torch.frexp(maximum)
    bound_fraction, bound_exponent = math.frexp(boundary)
    return exponent - bound_exponent + (fraction > bound_fraction).to(exponent.dtype)


def shared_exponent(maximum: Tensor, rule: str, fmt: ElementFormat, *, top: float | None = None,
                    zero_exponent: int = 0) -> Tensor:
    """Exponent of the power-of-two scale for each block maximum, int32 in [-127, 127].

    `maximum` is non-negative float32 or float64. A zero maximum gives `zero_exponent`. Values for non-finite maxima are
    meaningless; `blocks` marks those blocks NaN. `top` (rule ceil only) bounds the scaled maximum below the largest code.
    """
    problem = rule_problem(rule, fmt)
    if problem:
        raise ValueError(problem)
    if top is not None and (rule != "ceil" or not 0 < top <= fmt.max_value):
        raise ValueError(f"top: got {top} with rule {rule!r}; accepted: 0 < top <= {fmt.max_value} with rule 'ceil'")
    finite = torch.where(maximum.isfinite(), maximum, 1.0)
    if rule == "floor":
        _, exponent = torch.frexp(finite)
        exponent = exponent - 1 - fmt.max_exponent
    else:
        exponent = _ceil_log2_ratio(finite, _E2M1_BOUNDARIES.get(rule) or top or fmt.max_value)
    exponent = exponent.clamp(MIN_EXPONENT, MAX_EXPONENT)
    return torch.where(maximum == 0, zero_exponent, exponent).int()


def pow2(exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^exponent, exact for every integer exponent the dtype can represent (subnormals included)."""
    return torch.exp2(exponent.double()).to(dtype)


def encode_e8m0(exponent: Tensor) -> Tensor:
    """E8M0 codes (uint8) of integer exponents, clamped to [-127, 127]; 255 is reserved for NaN."""
    return (exponent.clamp(MIN_EXPONENT, MAX_EXPONENT) + E8M0_BIAS).to(torch.uint8)


def decode_e8m0(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Powers of two of E8M0 codes; code 255 is NaN."""
    value = pow2(code.int() - E8M0_BIAS, dtype)
    return torch.where(code == E8M0_NAN, torch.nan, value)


def encode_ue4m3(value: Tensor) -> Tensor:
    """UE4M3 codes (uint8, sign bit 0) of non-negative scales: nearest, ties to even, saturating at 448, NaN is 0x7F."""
    return encode(value.abs(), E4M3)


def decode_ue4m3(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of UE4M3 codes."""
    return decode(code, E4M3, dtype)
