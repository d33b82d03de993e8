"""Normalized Walsh-Hadamard rotation of the channels: spreads an outlier channel over its whole block.

Sources: Fused-Softmax section 4.4, FLAMIA appendix A.2. The order of operations is part of the specification, because
quantized codes depend on every rounding: radix-2 butterflies in float32 with stride 1, 2, 4, ..., then one
multiplication by d^-1/2, no fused multiply-add.
"""

import torch
from torch import Tensor

from lowbit_attn.formats.elements import wide


def rotation_blocks(channels: int) -> list[int]:
    """Sizes of the independently rotated channel blocks: the binary digits of `channels`, largest first (96 -> 64, 32)."""
    return [1 << bit for bit in reversed(range(channels.bit_length())) if channels >> bit & 1]


def _butterflies(x: Tensor) -> Tensor:
    size, stride = x.shape[-1], 1
    while stride < size:
        a, b = x.unflatten(-1, (size // (2 * stride), 2, stride)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        stride *= 2
    return x * (size**-0.5)


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last axis: float32 (float64 for float64 input). Its own inverse up to rounding, and orthogonal.

    An axis that is not a power of two is rotated in the blocks of `rotation_blocks`.
    """
    x = wide(x)
    sizes = rotation_blocks(x.shape[-1])
    if len(sizes) == 1:
        return _butterflies(x)
    return torch.cat([_butterflies(part) for part in x.split(sizes, -1)], -1)
