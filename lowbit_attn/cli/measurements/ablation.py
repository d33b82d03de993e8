"""Fused-Softmax table 4: the components of the pipeline, one after the other, on four operand formats."""

from dataclasses import replace
from typing import Any

from lowbit_attn.cli.measurements.settings import Comparison, Settings
from lowbit_attn.cli.measurements.table import Line, Table
from lowbit_attn.recipes import BF16, RECIPES, Operand, Recipe
from lowbit_attn.reference import Visibility, forward

_CEIL4 = Operand("e2m1", "mx32", "ceil")

COLUMNS: dict[str, Recipe] = {
    "BF16": Recipe("bf16_components", qk=BF16, p=BF16, v=BF16, causal=False),
    "MXFP8": RECIPES["fused_mxfp8"],
    "MXFP6": RECIPES["fused_mxfp6"],
    "MXFP4 ceil": replace(RECIPES["fused_mxfp4"], qk=_CEIL4, v=_CEIL4),
    "MXFP4 uos": RECIPES["fused_mxfp4"],
}
"""Operands. `fused_mxfp4` scales by UOS; with ceil, as MXFP8 and MXFP6 have it, the published column is met."""

_FROZEN = {"row_sum": "quantized", "maximum": "frozen", "max_threshold": 32.0}

STEPS: dict[str, dict[str, Any]] = {
    "conventional softmax": {"row_sum": "exact", "maximum": "online", "max_threshold": 0.0, "exponential": "exact"},
    "+ row sum of quantized P": {"row_sum": "quantized", "maximum": "online", "max_threshold": 0.0, "exponential": "exact"},
    "+ frozen maximum": {**_FROZEN, "exponential": "exact"},
    "+ Schraudolph U16": {**_FROZEN, "exponential": "schraudolph_u16"},
    "U32 proxy": {**_FROZEN, "exponential": "schraudolph_u32"},
    # E4M3 ends at 2^8.8: a gate of 2^32 is refused. Normal inputs reach neither gate.
    "U8 proxy": {**_FROZEN, "exponential": "schraudolph_u8", "max_threshold": 8.0},
}

PUBLISHED: dict[str, dict[str, tuple[float, float] | None]] = {
    "conventional softmax": {"BF16": None, "MXFP8": (5.39, 0.99855), "MXFP6": (6.17, 0.99810), "MXFP4": (20.45, 0.97890)},
    "+ row sum of quantized P": {"BF16": (0.026, 1.0), "MXFP8": (5.39, 0.99855), "MXFP6": (6.17, 0.99810),
                                 "MXFP4": (20.45, 0.97890)},
    "+ frozen maximum": {"BF16": (0.310, 1.0), "MXFP8": (5.42, 0.99853), "MXFP6": (6.17, 0.99810), "MXFP4": (20.45, 0.97890)},
    "+ Schraudolph U16": {"BF16": (1.798, 0.99984), "MXFP8": (5.69, 0.99838), "MXFP6": (6.46, 0.99791),
                          "MXFP4": (20.53, 0.97872)},
    "U32 proxy": {"BF16": (1.798, 0.99984), "MXFP8": (5.69, 0.99838), "MXFP6": (6.46, 0.99791), "MXFP4": (20.53, 0.97872)},
    "U8 proxy": {"BF16": (3.69, 0.99934), "MXFP8": (5.99, 0.99822), "MXFP6": (6.71, 0.99775), "MXFP4": (20.64, 0.97854)},
}
"""Error in percent and cosine, b=1 h=24 s=32768 d=128, ten seeds."""

TOLERANCE = {"BF16": 0.03, "MXFP8": 0.15, "MXFP6": 0.15, "MXFP4 ceil": 0.35, "MXFP4 uos": None}
COSINE_TOLERANCE = 3e-4


def recipe_of(column: str, step: str) -> Recipe:
    """The recipe of one cell: the column's, changed by the step."""
    return replace(COLUMNS[column], **STEPS[step])


def measure(settings: Settings, columns: list[str] | None = None, steps: list[str] | None = None) -> Table:
    """Error and cosine of every cell against BF16 attention with the conventional softmax; outputs rounded to bf16."""
    cells = {(column, step): Comparison() for column in columns or COLUMNS for step in steps or STEPS}
    conventional = recipe_of("BF16", "conventional softmax")
    for query, key, value in settings.normal_inputs():
        seen = Visibility(query.shape[2], key.shape[2])
        reference = forward(query, key, value, conventional, seen).output.bfloat16()
        for (column, step), comparison in cells.items():
            comparison.add(forward(query, key, value, recipe_of(column, step), seen).output.bfloat16(), reference)
    lines = []
    for (column, step), comparison in cells.items():
        published = PUBLISHED[step][column.split()[0]]
        if published is None:
            continue
        tolerance = TOLERANCE[column]
        lines.append(Line(f"{column}, {step}", "error %", comparison.percent, published[0], tolerance))
        lines.append(Line(f"{column}, {step}", "cosine", comparison.cosine, published[1], tolerance and COSINE_TOLERANCE, 5))
    return Table("Component ablation of the fused recipes", "Fused-Softmax table 4 (h=24, s=32768, ten seeds)", str(settings),
                 lines, ("'MXFP4 uos' is the recipe fused_mxfp4: the scale rule of MXAttention is better than the published "
                         "column, which 'ceil' meets.",))
