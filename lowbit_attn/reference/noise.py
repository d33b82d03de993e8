"""Counter-based uniform numbers for stochastic rounding: a function of seed and position, so that a replay is identical.

The hash is a 32-bit multiply-xorshift finalizer over the coordinates, in int64 so that it is the same on every device.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(state: Tensor) -> Tensor:
    state = ((state ^ (state >> 16)) * 0x7FEB352D) & _MASK
    state = ((state ^ (state >> 15)) * 0x846CA68B) & _MASK
    return state ^ (state >> 16)


def uniform(seed: Tensor, *coordinates: Tensor) -> Tensor:
    """Multiples of 2^-24 in [0, 1), of the coordinates' broadcast shape; `seed` is an int64 scalar tensor."""
    state = _mix(seed.to(torch.int64) & _MASK)
    for coordinate in coordinates:
        state = _mix((state + coordinate.to(torch.int64) * 0x9E3779B9 + 1) & _MASK)
    return (state >> 8).to(torch.float32) * 2.0**-24
