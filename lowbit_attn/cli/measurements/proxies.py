"""Fused-Softmax table 8: what each Schraudolph pattern width loses over one doubling."""

import torch
from torch import Tensor

from lowbit_attn.cli.measurements.table import Line, Table
from lowbit_attn.reference import exponential

PROXIES: dict[str, tuple[int, int] | None] = {
    "continuous ramp": None, "U32 / FP32": (23, 127), "U16 / FP16": (10, 15), "U16 / BF16": (7, 127), "U8 / E4M3": (3, 7),
}
"""Mantissa bits and exponent bias; None keeps the pattern unrounded."""

PUBLISHED = {
    "continuous ramp": (-3.939, 1.966, 1.770), "U32 / FP32": (-3.939, 1.966, 1.770), "U16 / FP16": (-3.972, 2.000, 1.770),
    "U16 / BF16": (-4.199, 2.242, 1.777), "U8 / E4M3": (-8.012, 6.398, 3.141),
}
"""Minimum, maximum and RMS relative error in percent."""

TOLERANCE = 0.002


def proxy_value(x: Tensor, proxy: str) -> Tensor:
    """2^x as the proxy's bit pattern reads, in float64; exact fields, so only the pattern is measured."""
    fields = PROXIES[proxy]
    if fields is None:
        shifted = x.double() - exponential.EPSILON
        return torch.exp2(shifted.floor()) * (1 + shifted - shifted.floor())
    mantissa_bits, bias = fields
    pattern = exponential.schraudolph_pattern(x, mantissa_bits, bias).double() * 2.0**-mantissa_bits
    return torch.exp2(pattern.floor() - bias) * (1 + pattern - pattern.floor())


def errors(proxy: str, points: int = 1 << 20) -> tuple[float, float, float]:
    """Minimum, maximum and RMS relative error in percent over the doubling below x = 0."""
    x = -(torch.arange(points, dtype=torch.float64) + 0.5) / points
    relative = 100 * (proxy_value(x, proxy) / torch.exp2(x) - 1)
    return float(relative.min()), float(relative.max()), float(relative.square().mean().sqrt())


def measure(points: int = 1 << 20) -> Table:
    """All proxies."""
    lines = [Line(proxy, f"{quantity} %", measured, published, TOLERANCE)
             for proxy in PROXIES
             for quantity, measured, published in zip(("min", "max", "RMS"), errors(proxy, points), PUBLISHED[proxy],
                                                      strict=True)]
    return Table("Schraudolph proxies over one doubling", "Fused-Softmax table 8",
                 f"{points} points, ε = {exponential.EPSILON}", lines)
