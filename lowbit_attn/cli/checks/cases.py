"""Attention inputs that find faults, the reference's answer, and how far a right kernel may be from it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn.kernels.cdna4.forward import LOG2E, RECIPES, Run, forward
from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility
from lowbit_attn.reference import forward as reference_forward

EXACT = 2.0**-21
"""Where every score is exact in float32, kernel and reference differ by the order of sums over keys: a few units of 2^-24."""

Inputs = tuple[Tensor, Tensor, Tensor]


def normal(queries: int, keys: int, *, heads: int = 1, kv_heads: int = 1, batch: int = 1, channels: int = 128,
           seed: int = 0) -> Inputs:
    """Query [B, Sq, Hq, D], key and value [B, Sk, Hkv, D], standard normal."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, queries, heads, channels, generator=generator)
    key, value = (torch.randn(batch, keys, kv_heads, channels, generator=generator) for _ in range(2))
    return query, key, value


def climbing(queries: int, keys: int, *, seed: int = 0) -> Inputs:
    """Scores that rise by 40 to 80 doublings from one tile of 128 keys to the next, by other amounts in other rows."""
    query, key, value = normal(queries, keys, seed=seed)
    direction = torch.full((128,), 128**-0.5)
    # Along `direction` only the steps are left, or noise as large as they are would leave each row to one key.
    key = key - (key @ direction)[..., None] * direction + 4 * (torch.arange(keys) // 128)[:, None, None] * direction
    doublings = 40 * (1 + torch.arange(queries) / queries)
    query = query + (doublings / 4 * 128**0.5 / LOG2E)[:, None, None] * direction
    return query, key, value


def late_peak(queries: int, keys: int, *, seed: int = 0, height: float = 30.0) -> Inputs:
    """One late key stands alone, far above all others, for every third row."""
    query, key, value = normal(queries, keys, seed=seed)
    direction = torch.full((128,), 128**-0.5)
    query[:, ::3] += height * direction
    key[:, keys - keys // 3 - 1] += 4 * height * direction
    return query, key, value


def expected(query: Tensor, key: Tensor, value: Tensor, name: str, *, key_lengths: Tensor | None = None,
             scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The reference's output [B, S, H, D] and lse."""
    visibility = Visibility.create(query.shape[0], query.shape[1], key.shape[1], is_causal=False, key_lengths=key_lengths)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    result = reference_forward(q, k, v, resolve(name), visibility, scale=scale)
    return result.output.transpose(1, 2), result.lse


def relative(found: Tensor, want: Tensor) -> float:
    """Frobenius error; 0 for two zeros, infinite for NaN."""
    error = float((found.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


def allowance(largest: float = 0.25) -> float:
    """Relative Frobenius error that float32 scores explain, with affine coordinates and sums on their way up to `largest`.

    Four additions of a coordinate round by at most half a unit each. In units of the 16-bit pattern that is the chance of
    another pattern; one in 16 patterns is next to a rounding boundary of P, and crossing it moves P by one code, an eighth at
    most. Errors of keys are independent, so their root mean square is that of the output; twice it, for small calls have few.
    """
    unit = 2.0 ** (math.floor(math.log2(largest)) - 23)
    other_pattern = min(1.0, 4 * unit / 2 * 65535)
    return 2 * math.sqrt(other_pattern / 16) / 8 + EXACT


def ordinary_allowance(name: str) -> float:
    """For ordinary inputs: scores of 6- and 4-bit operands are multiples of 2^-20 as coordinates, and their sums exact."""
    return allowance() if name == "fused_mxfp8" else EXACT


@dataclass(frozen=True)
class Case:
    """One call; `bound` is the largest relative error of its output, 0 wants NaN where the reference has it."""

    name: str
    recipe: str
    inputs: Inputs
    bound: float
    key_lengths: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """What a case gave: the output's relative error against the reference, and the largest difference of lse."""

    case: Case
    error: float
    lse: float

    @property
    def passed(self) -> bool:
        """Within the bound; lse may move where one key holds a row, by a code of P."""
        return self.error <= self.case.bound and self.lse <= math.log(1.125)


def cases(small: bool = False) -> Iterator[Case]:
    """Every recipe on every kind of input; `small` leaves out the long ones, for the emulator."""
    for recipe in RECIPES:
        bound = ordinary_allowance(recipe)
        for keys in (1, 128, 129) if small else (1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513):
            yield Case(f"{keys} keys", recipe, normal(33, keys, seed=keys), bound)
        yield Case("queries past a tile", recipe, normal(257, 130), bound)
        yield Case("grouped heads", recipe, normal(40, 200, heads=4, kv_heads=2, batch=1 if small else 3), bound)
        yield Case("head_dim 96", recipe, normal(40, 140, channels=96), bound)
        lengths = torch.tensor([200, 97], dtype=torch.int32)
        yield Case("key lengths", recipe, normal(20, 200, batch=2), bound, lengths)
        yield Case("a rollback in every tile", recipe, climbing(256, 384 if small else 1024), allowance(0.5 if small else 1.0))
        yield Case("one late peak", recipe, late_peak(64, 300), allowance(0.5))
        if not small:
            yield Case("2048 tokens", recipe, normal(2048, 2048), bound)


def outcome(case: Case, run: Run, device: torch.device) -> Outcome:
    """Run a case on `device` and the reference on the CPU."""
    lengths = None if case.key_lengths is None else case.key_lengths.to(device)
    query, key, value = (x.to(device) for x in case.inputs)
    output, lse = (x.cpu() for x in forward(query, key, value, resolve(case.recipe), run, key_lengths=lengths))
    want, want_lse = expected(*case.inputs, case.recipe, key_lengths=case.key_lengths)
    difference = float((lse - want_lse).abs().max())
    return Outcome(case, relative(output, want), difference if math.isfinite(difference) else math.inf)
