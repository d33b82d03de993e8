"""MXAttention section 4.1, tables 4 and 5: the exact optimum of the MXFP4 scale boundary, and where data put it."""

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from lowbit_attn.cli.measurements.settings import HEAD_DIM, Settings
from lowbit_attn.cli.measurements.table import Line, Table
from lowbit_attn.formats import E2M1, round_to_element, uos

PUBLISHED_ERROR = {"0.25": "1/192", "0.75": "1/64", "1.25": "5/192", "1.75": "7/192", "2.5": "1/12", "3.5": "1/6", "5": "13/24",
                   "6": "7/8"}
"""E(x), MXAttention table 5."""

SWEEP = tuple(6 + 0.05 * step for step in range(41))
"""The boundaries of the paper's empirical oracle (section 5.5.1)."""


def _spread(x: Tensor, generator: torch.Generator) -> Tensor:
    """Give every token a magnitude of its own, as activations have."""
    return x * torch.exp(0.5 * torch.randn(x.shape[0], 1, generator=generator))


def _signed(x: Tensor, generator: torch.Generator) -> Tensor:
    return x * (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1)


def _student(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    normal = torch.randn(5, *shape, generator=generator)
    return normal[0] / normal[1:].square().mean(0).sqrt()


DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": lambda shape, g: torch.randn(shape, generator=g),
    "normal, token magnitudes vary": lambda shape, g: _spread(torch.randn(shape, generator=g), g),
    "Laplace": lambda shape, g: _signed(torch.empty(shape).exponential_(generator=g), g),
    "logistic": lambda shape, g: torch.logit(torch.rand(shape, generator=g).clamp(1e-6, 1 - 1e-6)),
    "Student t, 4 degrees of freedom": _student,
    "uniform, token magnitudes vary": lambda shape, g: _spread(torch.rand(shape, generator=g) * 2 - 1, g),
    "log-normal": lambda shape, g: _signed(torch.exp(torch.randn(shape, generator=g)), g),
}


def quantization_error(x: Tensor, boundary: float) -> float:
    """Mean squared error of MXFP4 with scales 2^ceil(log2(M / boundary)) over blocks of 32 channels."""
    blocks = x.double().unflatten(-1, (-1, 32))
    maximum = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(maximum / boundary)))
    return float((round_to_element(blocks / scale, E2M1) * scale - blocks).square().mean())


def empirical_optimum(x: Tensor, sweep: tuple[float, ...] = SWEEP) -> float:
    """The boundary of the sweep with the smallest error on `x`."""
    return min(sweep, key=lambda boundary: quantization_error(x, boundary))


def samples(name: str, tokens: int, seed: int = 0) -> Tensor:
    """[tokens, 128] from one of DISTRIBUTIONS."""
    return DISTRIBUTIONS[name]((tokens, HEAD_DIM), torch.Generator().manual_seed(seed))


def measure(settings: Settings) -> Table:
    """The exact analysis and the empirical optimum of every distribution, over seq * heads tokens."""
    lines = [Line("exact", f"E({x})", float(uos.cumulative_error(Fraction(x))), float(Fraction(published)), 0.0, 6)
             for x, published in PUBLISHED_ERROR.items()]
    minimiser = uos.minimiser()
    lines.append(Line("exact", "minimiser of J", float(minimiser), 7.25, 0.0, 2))
    tokens = settings.seq * settings.heads
    for name in DISTRIBUTIONS:
        x = samples(name, tokens)
        lines.append(Line(name, "empirical optimum", empirical_optimum(x), 7.25, 0.25, 2))
        best = quantization_error(x, 7.25)
        lines += [Line(name, f"MSE at {boundary:g} / at 7.25", quantization_error(x, boundary) / best)
                  for boundary in (6.0, 7.0, 8.0)]
    return Table("Boundary of MXFP4 scales", "MXAttention tables 4-6", f"{tokens} tokens of {HEAD_DIM} channels", lines)
