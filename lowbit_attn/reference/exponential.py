"""Base-two exponentials of the recipes: exact, Schraudolph's and Mitchell's.

Sources: Fused-Softmax sections 4.2, 4.3 and appendix B; FLAMIA section 3.7 and appendix C.

`x` is the score relative to the row's (possibly stale) maximum, in doublings; -inf, a masked key, gives 0 everywhere.
Both approximations write x in fixed point into exponent and mantissa bits, which yields 2^floor(x) (1 + frac(x)).
"""

import math

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.recipes import DIRECT_UNIT

EPSILON = 0.05798
"""Offset of the Schraudolph proxies; minimizes the RMS error over one doubling (Fused-Softmax 4.2)."""

AFFINE_SLOPE = 2.0**-9
"""C: one doubling is 128 BF16 pattern units of 2^-16 (Fused-Softmax 4.3)."""

AFFINE_OFFSET = AFFINE_SLOPE * (127.0 - EPSILON)
"""D: the affine coordinate of x = 0."""

SIGMA = 0.0573
"""FLAMIA's offset: the ratio to 2^x averages one (C.2)."""

DIRECT_OFFSET = 0.4584
"""8 * SIGMA: the same offset in units of one E4M3 code."""


MITCHELL_DELTA = math.log2(1.25) - 0.25
"""log2(1.25) - 0.25 centres Mitchell's error (FLAMIA C.1)."""


def affine(scores: Tensor, maximum: Tensor) -> Tensor:
    """a = C X + beta with beta = D - C m: what the score GEMM of Fused-Softmax delivers."""
    return torch.add(AFFINE_OFFSET - AFFINE_SLOPE * maximum, scores, alpha=AFFINE_SLOPE)


def schraudolph_u16(coordinate: Tensor) -> Tensor:
    """Stage A: P from affine coordinates, values exactly representable in BF16.

    The packed conversion multiplies by 65535, not 65536. Coordinates above 1 saturate at code 0xFFFF, a NaN pattern; the
    rollback gate keeps them out.
    """
    code = torch.round(coordinate.clamp(0.0, 1.0).float() * 65535.0).to(torch.int32)
    return (code << 16).view(torch.float32)


def schraudolph_pattern(x: Tensor, mantissa_bits: int, bias: int, offset: float = EPSILON) -> Tensor:
    """Integer bit pattern of 2^x in a float format: round(2^M (x + bias - offset)), 0 below its range. int64."""
    pattern = torch.round((x.double() + (bias - offset)) * 2.0**mantissa_bits)
    return torch.where(x == -torch.inf, 0.0, pattern).clamp_min(0.0).to(torch.int64)


def schraudolph_u32(x: Tensor) -> Tensor:
    """The FP32 proxy."""
    return schraudolph_pattern(x, 23, 127).clamp_max(0x7F7FFFFF).to(torch.int32).view(torch.float32)


def schraudolph_u8(x: Tensor) -> Tensor:
    """The E4M3 proxy: 7 doublings below the maximum to 8.8 above; saturates at 448, the code before NaN."""
    code = schraudolph_pattern(x, 3, 7).clamp_max(0x7E).to(torch.uint8)
    return formats.decode(code, formats.E4M3)


def mixed_schraudolph(x: Tensor) -> Tensor:
    """FLAMIA's BF16 Schraudolph for five of every eight pairs of neighbouring keys (the first five), exact for the rest."""
    pattern = schraudolph_pattern(x, 7, 127, SIGMA).clamp_max(0x7F7F).to(torch.int32)
    pair = torch.arange(x.shape[-1], device=x.device) // 2 % 8
    return torch.where(pair < 5, (pattern << 16).view(torch.float32), torch.exp2(x.float()))


def mitchell(x: Tensor, window: int) -> Tensor:
    """FLAMIA C.1: exact fixed point while x - delta is in [-window, 128 - window); below it the value stays at 2^-window."""
    magic = torch.tensor(2.0**23 + window * 2.0**16, dtype=torch.float32)
    lowest = torch.tensor(2.0**23, dtype=torch.float32).view(torch.int32)
    # The product and sum are exact in float64, so the cast rounds once, like a fused multiply-add.
    shifted = ((x.double() - MITCHELL_DELTA) * 2.0**16 + magic.double()).float()
    bits = shifted.view(torch.int32).clamp_min(int(lowest)).to(torch.int64)
    offset = (127 << 23) - (int(magic.view(torch.int32)) << 7)
    pattern = ((bits << 7) + offset) & 0xFFFFFFFF
    value = torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32).view(torch.float32)
    return torch.where(x == -torch.inf, 0.0, value)


def _direct_top(log2_code_value: float) -> float:
    """Where the row's maximum lands, in DIRECT_UNIT: the code of 2^log2_code_value, less the centring offset."""
    return (8.0 * (log2_code_value + 7.0) - DIRECT_OFFSET) / 126.0


def direct_base(maximum: Tensor, log2_code_value: float) -> Tensor:
    """The float16 offset that takes the row's maximum (in DIRECT_UNIT) to the code of 2^log2_code_value."""
    return _half(_direct_top(log2_code_value) - maximum)


def direct_maximum(maximum: Tensor, log2_code_value: float) -> Tensor:
    """The maximum that the float16 offset stands for: what lse and decays must use, or its rounding would show in them."""
    return _direct_top(log2_code_value) - direct_base(maximum, log2_code_value)


def direct_codes(scores: Tensor, base: Tensor, log2_fold: Tensor | float) -> Tensor:
    """E4M3 codes of 2^(x + fold) straight from scores x in DIRECT_UNIT, in float16 arithmetic: uint8.

    `scores` holds exact products of float16 numbers; `base` is `direct_base`. Added to them, rounded once (a fused
    multiply-add), clamped to 0..1, times 126, rounded to a code. A NaN becomes code 0: row maxima carry it.
    """
    fold = _half(torch.as_tensor(log2_fold, device=scores.device) * DIRECT_UNIT)
    offset = _half(base + fold.to(base.dtype))
    clamped = _half(scores + offset).clamp(0.0, 1.0)
    return torch.round(torch.nan_to_num(_half(clamped * 126.0 + 1024.0) - 1024.0, nan=0.0)).to(torch.uint8)


def _half(x: Tensor) -> Tensor:
    """x rounded to float16, in x's dtype."""
    return x.half().to(x.dtype)
