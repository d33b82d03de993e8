"""Runs of the emulated attention kernels: plain, and with what every lane saw."""

import torch
from torch import Tensor

from lowbit_attn.kernels.cdna4 import emulate
from lowbit_attn.kernels.cdna4.forward import RECIPES as SUFFIXES
from lowbit_attn.kernels.cdna4.forward import forward
from lowbit_attn.recipes import resolve

RECIPES = list(SUFFIXES)
BITS_OF_P = {"fused_mxfp8": 8, "fused_mxfp6": 6, "fused_mxfp4": 6}


def run(emulator: emulate.Emulator, name: str, query: Tensor, key: Tensor, value: Tensor, **options) -> tuple[Tensor, Tensor]:
    return forward(query, key, value, resolve(name), emulator, **options)


class Records:
    """What every lane saw in every tile: scores [workgroups, 8, tiles, 64, 64], P's words, scale codes, C m, beta."""

    def __init__(self, observed: Tensor, bits: int) -> None:
        self.scores = observed[..., :64].unflatten(-1, (2, 32))
        self.words = observed[..., 64:80].contiguous().view(torch.int32).unflatten(-1, (2, 8))[..., :bits]
        self.scales = observed[..., 80:82].contiguous().view(torch.int32)
        self.slope_maximum, self.beta = observed[..., 82], observed[..., 83]


def recorded(emulator: emulate.Emulator, name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Records, Tensor, Tensor]:
    """Runs one head with an observer."""
    emulator.observed = emulate.room(-(-query.shape[1] // 256), -(-key.shape[1] // 128))
    output, lse = run(emulator, name, query, key, value)
    records = Records(emulator.observed, BITS_OF_P[name])
    emulator.observed = None
    return records, output, lse
