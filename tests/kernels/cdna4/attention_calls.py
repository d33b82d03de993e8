"""Inputs, the reference's answer and the allowance between the two, for tests of the emulated attention kernels."""

import math

import torch
from torch import Tensor

from lowbit_attn.kernels.cdna4 import emulate
from lowbit_attn.kernels.cdna4.forward import forward
from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility
from lowbit_attn.reference import forward as reference_forward

RECIPES = ["fused_mxfp8", "fused_mxfp6", "fused_mxfp4"]
BITS_OF_P = {"fused_mxfp8": 8, "fused_mxfp6": 6, "fused_mxfp4": 6}
EXACT = 2.0**-21
"""Where every score is exact in float32, kernel and reference differ by the order of sums over keys: a few units of 2^-24."""


def normal(queries: int, keys: int, *, heads: int = 1, kv_heads: int = 1, batch: int = 1, channels: int = 128, seed: int = 0,
           ) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, queries, heads, channels, generator=generator)
    key, value = (torch.randn(batch, keys, kv_heads, channels, generator=generator) for _ in range(2))
    return query, key, value


def climbing(queries: int, keys: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that rise by 35 to 70 doublings from one tile of 128 keys to the next, by other amounts in other rows."""
    query, key, value = normal(queries, keys, seed=seed)
    direction = torch.full((128,), 128**-0.5)
    lift = 400 * (1 + torch.arange(queries) / queries)
    query += (lift[:, None, None] * direction) * 128**0.5 / 1.4427 / 12
    key += ((torch.arange(keys) // 128)[:, None, None] * direction) * 12
    return query, key, value


def late_peak(queries: int, keys: int, *, seed: int = 0, height: float = 30.0) -> tuple[Tensor, Tensor, Tensor]:
    """One key of the last tiles stands alone, far above all others, for every third row."""
    query, key, value = normal(queries, keys, seed=seed)
    direction = torch.full((128,), 128**-0.5)
    query[:, ::3] += height * direction
    key[:, keys - keys // 3 - 1] += 4 * height * direction
    return query, key, value


def expected(query: Tensor, key: Tensor, value: Tensor, name: str, *, key_lengths: Tensor | None = None,
             scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The reference's output [B, S, H, D] and lse."""
    visibility = Visibility.create(query.shape[0], query.shape[1], key.shape[1], is_causal=False, key_lengths=key_lengths)
    result = reference_forward(*(x.transpose(1, 2) for x in (query, key, value)), resolve(name), visibility, scale=scale)
    return result.output.transpose(1, 2), result.lse


def relative(found: Tensor, want: Tensor) -> float:
    """Frobenius error; 0 for two zeros."""
    return float((found.float() - want).norm() / want.norm().clamp_min(1e-30))


def allowance(largest: float = 0.25) -> float:
    """Relative Frobenius error that float32 scores explain, with affine coordinates up to `largest`.

    Four additions of a coordinate round by at most half a unit each. In units of the 16-bit pattern that is the chance of
    another pattern; one in 16 patterns is next to a rounding boundary of P, and crossing it moves P by one code, an eighth at
    most. Errors of keys are independent, so their root mean square is that of the output.
    """
    unit = 2.0 ** (math.floor(math.log2(largest)) - 23)
    other_pattern = min(1.0, 4 * unit / 2 * 65535)
    return math.sqrt(other_pattern / 16) / 8 + EXACT


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
