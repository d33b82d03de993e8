"""Element formats: what one low-bit code means, and how a number becomes a code.

Source: OCP Microscaling Formats v1.0, section 5.3 (element data types) and OCP 8-bit Floating Point v1.0.

Policy, the same for every format:
    * rounding is to nearest, ties to even, over normals and subnormals alike; the sign of zero is kept;
    * conversion saturates: a magnitude above the largest finite value, infinity included, becomes that value;
    * NaN becomes the NaN code where the format has one (E4M3 0x7F, E5M2 0x7F) and the code of +0 where it has none
      (E2M3, E2M1): a block that held a NaN carries it in its scale instead (see `blocks`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ElementFormat:
    """One sign bit, `exponent_bits`, `mantissa_bits`; subnormals at exponent field 0.

    `max_value` is the largest finite magnitude, `nan_code` the positive NaN or None, `torch_dtype` the torch dtype
    with the same codes where there is one.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    nan_code: int | None = None
    torch_dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; subnormals share its spacing."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the binade of the largest finite value (`emax` of the OCP specification)."""
        return math.frexp(self.max_value)[1] - 1


E4M3 = ElementFormat("e4m3", 4, 3, 7, 448.0, 0x7F, torch.float8_e4m3fn)
E5M2 = ElementFormat("e5m2", 5, 2, 15, 57344.0, 0x7F, torch.float8_e5m2)
E2M3 = ElementFormat("e2m3", 2, 3, 1, 7.5)
E2M1 = ElementFormat("e2m1", 2, 1, 1, 6.0)

ELEMENTS: dict[str, ElementFormat] = {f.name: f for f in (E4M3, E5M2, E2M3, E2M1)}


def element_format(name: str) -> ElementFormat:
    """The format called `name`; ValueError names the accepted ones."""
    if name not in ELEMENTS:
        raise ValueError(f"element: got {name!r}; accepted: {', '.join(ELEMENTS)}")
    return ELEMENTS[name]


def wide(x: Tensor) -> Tensor:
    """`x` in float32 (float64 stays); TypeError for integers, which would be taken for values where codes are meant."""
    if not x.is_floating_point():
        raise TypeError(f"x: got dtype {x.dtype}; accepted: a floating dtype")
    return x if x.dtype == torch.float64 else x.float()


def _spacing(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    """Distance between neighbouring codes around each magnitude, a power of two."""
    if magnitude.dtype == torch.float32:
        # Clearing the mantissa leaves 2^floor(log2 |x|), which is cheaper than frexp.
        binade = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32)
    else:
        _, exponent = torch.frexp(magnitude)
        binade = torch.ldexp(torch.ones_like(magnitude), exponent - 1)
    return binade.clamp_min_(2.0**fmt.min_exponent).mul_(2.0**-fmt.mantissa_bits)


def round_to_element(x: Tensor, fmt: ElementFormat) -> Tensor:
    """The value of the nearest code, in x's shape; float32 out (float64 for float64 in). NaN stays NaN.

    Equal to `decode(encode(x))` except that NaN survives in the formats that have no NaN code.
    """
    clamped = wide(x).clamp(-fmt.max_value, fmt.max_value)
    if fmt.torch_dtype is not None and clamped.dtype == torch.float32:
        return clamped.to(fmt.torch_dtype).float()
    spacing = _spacing(clamped.abs(), fmt)
    return torch.copysign(torch.round(clamped / spacing) * spacing, clamped)


def round_stochastic(x: Tensor, fmt: ElementFormat, uniform: Tensor) -> Tensor:
    """A neighbouring code's value, the upper one with probability equal to the fraction of the way there; saturating.

    `uniform` holds numbers in [0, 1), one per element. Magnitudes round up where fraction + uniform >= 1, so the mean over
    uniform noise is x itself for every |x| up to the largest value, and a code's own value never moves.
    """
    clamped = wide(x).clamp(-fmt.max_value, fmt.max_value)
    spacing = _spacing(clamped.abs(), fmt)
    steps = clamped.abs() / spacing
    below = torch.floor(steps)
    # Not floor(steps + uniform): the sum would round up to the next code, past the largest one too.
    return torch.copysign((below + (steps - below >= 1 - uniform)) * spacing, clamped)


def encode(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Codes of `x` (any float dtype, any shape) as uint8, one per element, sign in the format's top bit."""
    if fmt.torch_dtype is not None:
        value = round_to_element(x, fmt).to(fmt.torch_dtype).view(torch.uint8)
        return torch.where(x.isnan(), fmt.nan_code or 0, value) if fmt.nan_code else value
    value = round_to_element(x, fmt).float()
    value = torch.where(value.isnan(), 0.0, value)
    magnitude = value.abs()
    normal = (magnitude.view(torch.int32) >> (23 - fmt.mantissa_bits)) - ((127 - fmt.bias) << fmt.mantissa_bits)
    subnormal = (magnitude * 2.0 ** (fmt.mantissa_bits - fmt.min_exponent)).int()
    code = torch.where(magnitude < 2.0**fmt.min_exponent, subnormal, normal)
    sign = torch.signbit(value).int() << (fmt.bits - 1)
    return (code | sign).to(torch.uint8)


def decode(codes: Tensor, fmt: ElementFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of uint8 `codes`, exact in any `dtype` of at least bfloat16's range and 4 significant bits."""
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes: got dtype {codes.dtype}; accepted: torch.uint8")
    if fmt.torch_dtype is not None:
        return codes.contiguous().view(fmt.torch_dtype).to(dtype)
    # In integers, so that it is exact in every dtype and needs no table on the device.
    code = codes.int() & (2**fmt.bits - 1)
    exponent = (code >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    significand = (code & (2**fmt.mantissa_bits - 1)) | ((exponent > 0).int() << fmt.mantissa_bits)
    steps = significand << (exponent.clamp_min(1) - 1)
    magnitude = steps.to(dtype) * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    return torch.where(code >> (fmt.bits - 1) == 1, -magnitude, magnitude)
