"""Base-two exponentials of the recipes: exact, and Schraudolph's affine map read as a BF16 pattern.

Source: Fused-Softmax sections 4.2, 4.3 and appendix B.

The Schraudolph path works in the affine coordinate a = C (X - m) + D, which the score GEMM delivers on hardware; the
conversion then rounds 65535 a to an unsigned 16-bit code (stage A) whose bits are read as BF16.
"""

import torch
from torch import Tensor

SCHRAUDOLPH_EPSILON = 0.05798
"""Minimizes the RMS error of the linear mantissa over one doubling (Fused-Softmax 4.2)."""

AFFINE_SLOPE = 2.0**-9
"""C: one doubling is 128 BF16 pattern units of 2^-16."""

AFFINE_OFFSET = AFFINE_SLOPE * (127.0 - SCHRAUDOLPH_EPSILON)
"""D: the coordinate of X = m."""


def affine(x: Tensor, bias: Tensor) -> Tensor:
    """a = C x + bias, with bias = D - C m, in x's dtype."""
    return torch.add(bias, x, alpha=AFFINE_SLOPE)


def schraudolph_u16(coordinate: Tensor) -> Tensor:
    """Stage A: P from affine coordinates, values exactly representable in BF16. -inf (a masked key) gives 0.

    Coordinates above 1 saturate at code 0xFFFF, a NaN pattern; the rollback gate keeps them out.
    """
    code = torch.round(coordinate.clamp(0.0, 1.0).float() * 65535.0).to(torch.int32)
    return (code << 16).view(torch.float32)
