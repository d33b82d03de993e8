"""Dense packing of sub-byte codes: two 4-bit codes a byte, four 6-bit codes in three bytes.

Bit order is little-endian (OCP Microscaling Formats v1.0 leaves it open; this is the order in which CDNA4 and Blackwell
read their operands): code i occupies bits [i*w, (i+1)*w) of the packed stream along the last axis.
"""

import torch
from torch import Tensor


def _check(codes: Tensor, multiple: int, argument: str) -> None:
    if codes.dtype != torch.uint8:
        raise TypeError(f"{argument}: got dtype {codes.dtype}; accepted: torch.uint8")
    if codes.shape[-1] % multiple:
        raise ValueError(f"{argument}: last axis is {codes.shape[-1]}; accepted: a multiple of {multiple}")


def pack4(codes: Tensor) -> Tensor:
    """[..., 2n] uint8 codes below 16 -> [..., n] bytes; the even code is in the low half."""
    _check(codes, 2, "codes")
    low, high = (codes & 15).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack4(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] codes."""
    _check(packed, 1, "packed")
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def pack6(codes: Tensor) -> Tensor:
    """[..., 4n] uint8 codes below 64 -> [..., 3n] bytes."""
    _check(codes, 4, "codes")
    a, b, c, d = (codes & 63).unflatten(-1, (-1, 4)).unbind(-1)
    return torch.stack([a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)], -1).flatten(-2)


def unpack6(packed: Tensor) -> Tensor:
    """[..., 3n] bytes -> [..., 4n] codes."""
    _check(packed, 3, "packed")
    x, y, z = packed.unflatten(-1, (-1, 3)).unbind(-1)
    return torch.stack([x & 63, (x >> 6) | ((y & 15) << 2), (y >> 4) | ((z & 3) << 4), z >> 2], -1).flatten(-2)
