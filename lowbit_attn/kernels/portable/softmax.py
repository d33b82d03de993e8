"""Device functions of the softmax: how a row's maximum rises, the exponentials, and P in its format (`reference.softmax`).

Scores X are base two, -inf where masked. Shapes: R rows, 128 keys of a tile.
"""

import triton
import triton.language as tl

from lowbit_attn.kernels.portable.numbers import (
    block_largest,
    exponent_bits,
    magnitude_bits,
    round_magnitude,
    scale_code,
    spread,
)

SLOPE = tl.constexpr(2.0**-9)
"""Fusing the score GEMM with Schraudolph's proxy: one doubling in affine coordinates (`reference.exponential`)."""

OFFSET = tl.constexpr(2.0**-9 * (127.0 - 0.05798))
"""The affine coordinate of x = 0."""


@triton.jit
def raised(old, tile_maximum, MAXIMUM: tl.constexpr, THRESHOLD: tl.constexpr, AFFINE: tl.constexpr):
    """The row maxima after a tile, [R]."""
    if MAXIMUM == "online":
        new = tl.maximum(old, tile_maximum)
    elif MAXIMUM == "lazy":
        new = tl.where(tile_maximum - old > THRESHOLD, tile_maximum, old)
    else:
        if AFFINE:
            peak = (OFFSET - SLOPE * old) + SLOPE * tile_maximum
            exceeded = peak > OFFSET + THRESHOLD * SLOPE
            doublings = tl.ceil((peak - OFFSET) / SLOPE)
        else:
            exceeded = tile_maximum - old > THRESHOLD
            doublings = tl.ceil(tile_maximum - old)
        first = old == -float("inf")
        exceeded = exceeded | (first & (tile_maximum > old))
        new = tl.where(exceeded, tl.where(first, tile_maximum, old + doublings), old)
    return new


@triton.jit
def exponential(x, maximum, EXPONENTIAL: tl.constexpr):
    """2^(x - maximum) [R, 128] as the recipe computes it; 0 where x is -inf."""
    shown = tl.where(maximum == -float("inf"), 0.0, maximum)[:, None]
    if EXPONENTIAL == "schraudolph_u16":
        coordinate = (OFFSET - SLOPE * shown) + SLOPE * x
        # Adding 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
        scaled = tl.minimum(tl.maximum(coordinate, 0.0), 1.0) * 65535.0 + 8388608.0
        return (scaled.to(tl.int32, bitcast=True) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.exp2(x - shown)


@triton.jit
def round_probability(p, LAYOUT: tl.constexpr, M: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr,
                      BOUND_EXPONENT: tl.constexpr, BOUND_FRACTION: tl.constexpr, CONVERTS: tl.constexpr,
                      VALUES: tl.constexpr):
    """P >= 0 [R, 128] in its format: the codes' values without their scales, and the scales' E8M0 codes [R, 4].

    CONVERTS: E4M3 by the hardware's conversion. Without VALUES they are scaled and clamped, and still to be rounded."""
    R: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    if LAYOUT == "fixed":
        code = tl.full([R, N // 32], 127, tl.int32)
        scaled = p
    elif LAYOUT == "mx32":
        code = scale_code(block_largest(p, 32), BOUND_EXPONENT, BOUND_FRACTION, 127)
        scaled = p * spread(exponent_bits(254 - tl.minimum(code, 254)), 32)
    else:
        row = scale_code(tl.max(magnitude_bits(p), 1), BOUND_EXPONENT, BOUND_FRACTION, 0)
        scaled = p * exponent_bits(254 - tl.minimum(row, 254))[:, None]
        code = tl.broadcast_to(row[:, None], (R, N // 32))
    if not VALUES:
        return tl.minimum(scaled, TOP), code
    elif CONVERTS and M == 3 and E == -6:
        return tl.minimum(scaled, TOP).to(tl.float8e4nv).to(tl.float32), code
    else:
        return round_magnitude(scaled, M, E, TOP), code
