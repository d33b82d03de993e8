"""MXAttention section 4.2: row sums of the attention weights, quantized before (PNQ) or after (direct) the row sum is taken."""

from dataclasses import replace

import torch
from torch import Tensor

from lowbit_attn.cli.measurements.settings import Comparison, Settings
from lowbit_attn.cli.measurements.table import Line, Table
from lowbit_attn.recipes import RECIPES, Recipe
from lowbit_attn.reference import Visibility, forward

PLACEMENTS: dict[str, Recipe] = {
    "direct, OCP scales": RECIPES["mxfp4_ocp"],
    "direct": replace(RECIPES["mxattention"], row_sum="exact"),
    "PNQ": RECIPES["mxattention"],
}

PUBLISHED_MEAN = 0.9266
"""Mean row sum of the direct placement over 80 tensors of Wan2.2 and HunyuanVideo (section 5.5.2); model data, not normal."""


def row_sums(query: Tensor, key: Tensor, recipe: Recipe) -> Tensor:
    """Sums of the weights that multiply V, [N, H, rows]: attention over values that are one, a number every format holds."""
    ones = torch.ones_like(key)
    return forward(query, key, ones, recipe, Visibility(query.shape[2], key.shape[2])).output[..., 0]


def measure(settings: Settings) -> Table:
    """Row sums, and the error of O when V has a mean of 0.5."""
    sums: dict[str, list[Tensor]] = {name: [] for name in PLACEMENTS}
    errors = {name: Comparison() for name in PLACEMENTS}
    for query, key, value in settings.normal_inputs():
        # Model activations have peaked rows; a temperature of one half gives the direct placement something to get wrong.
        sharp = 2 * query
        exact = torch.nn.functional.scaled_dot_product_attention(sharp.float(), key.float(), value.float() + 0.5)
        for name, recipe in PLACEMENTS.items():
            sums[name].append(row_sums(sharp, key, recipe).flatten())
            seen = Visibility(query.shape[2], key.shape[2])
            errors[name].add(forward(sharp, key, value.float() + 0.5, recipe, seen).output, exact)
    lines = []
    for name, parts in sums.items():
        total = torch.cat(parts)
        is_pnq = PLACEMENTS[name].row_sum == "quantized"
        published = 1.0 if is_pnq else PUBLISHED_MEAN
        lines += [
            Line(name, "mean row sum", float(total.double().mean()), published, 1e-6 if is_pnq else None, 6),
            Line(name, "smallest row sum", float(total.min()), 1.0 if is_pnq else None, 1e-5 if is_pnq else None, 6),
            Line(name, "largest row sum", float(total.max()), 1.0 if is_pnq else None, 1e-5 if is_pnq else None, 6),
            Line(name, "error % with V of mean 0.5", errors[name].percent),
        ]
    return Table("Row sums of the attention weights", "MXAttention 4.2, 5.5.2 (model activations)", f"Q doubled, {settings}",
                 lines)
