"""The running state of one chunk of query rows: maximum, row sum and output, and how a score tile updates them.

Shapes: N batch items, H key/value heads, G query heads each, R rows, T keys of the tile, D channels. A state tensor is
[N, H, G, R, 1] or [N, H, G, R, D]; scores X are base two (X = scale log2(e) q.k), -inf where masked.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.formats.scales import MIN_EXPONENT
from lowbit_attn.recipes import Recipe
from lowbit_attn.reference.exponential import AFFINE_OFFSET, AFFINE_SLOPE, affine, schraudolph_u16
from lowbit_attn.reference.operands import round_operand


@dataclass
class Stats:
    """What happened in a forward: (row, tile) steps taken and rollbacks among them. Device tensors until read."""

    tiles: int = 0
    rollbacks: Tensor | int = 0


class RowState:
    """Online softmax over key tiles for a chunk of rows; `update` folds in one tile, `finish` normalizes.

    `reference` is the running exponent of V relative to which P is folded (recipes with v_exponent='running'): it is
    raised like the maximum, only by keys that the row sees.
    """

    def __init__(self, recipe: Recipe, shape: tuple[int, int, int, int], channels: int, like: Tensor,
                 stats: Stats | None = None) -> None:
        self.recipe, self.stats = recipe, stats
        column = (*shape, 1)
        self.maximum = like.new_full(column, -torch.inf)
        self.row_sum = like.new_zeros(column)
        self.output = like.new_zeros((*shape, channels))
        self.reference = like.new_full(column, float(MIN_EXPONENT))

    def update(self, scores: Tensor, value: Tensor, value_exponent: Tensor | None, visible: Tensor | None,
               first_row: int) -> None:
        """Fold one tile into rows `first_row`... of the chunk.

        scores [N, H, G, R', T] (overwritten); value [N, H, T, D], without its block scales if `value_exponent`
        [N, H, 1, 1, T] holds their exponents; visible [N, 1, 1, R', T] or None.
        """
        rows = (..., slice(first_row, None), slice(None))
        old = self.maximum[rows]
        tile_maximum = scores.amax(-1, keepdim=True)
        exceeded, new = self._raised(old, tile_maximum)
        # -inf - -inf is NaN: a row that has seen nothing has nothing to rescale.
        decay = torch.where(old == -torch.inf, 0.0, torch.exp2(old - new))
        probability = self._exponential(scores, old, new, exceeded)
        # Schraudolph's integer cast loses NaN; the row sum carries it.
        poison = torch.where(tile_maximum.isnan(), torch.nan, 0.0).to(decay.dtype)
        fold, lift = self._fold(value_exponent, visible, rows)
        rounded = self._rounded(probability, fold)
        weights = rounded / fold if self.recipe.row_sum == "quantized" else probability
        row_sum = weights.sum(-1, keepdim=True)
        self.row_sum[rows] = self.row_sum[rows] * decay + row_sum + poison
        self.output[rows] = self.output[rows] * (decay * lift) + _product(rounded, value, visible)
        if self.stats is not None:
            self.stats.tiles += tile_maximum.numel()
            if self.recipe.maximum == "frozen":
                self.stats.rollbacks = self.stats.rollbacks + (exceeded & (old != -torch.inf)).sum()
        self.maximum[rows] = new

    def _raised(self, old: Tensor, tile_maximum: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows raise their maximum, and the new one."""
        recipe = self.recipe
        if recipe.maximum == "online":
            return tile_maximum > old, torch.maximum(old, tile_maximum)
        if recipe.maximum == "lazy":
            exceeded = tile_maximum - old > recipe.max_threshold
            return exceeded, torch.where(exceeded, tile_maximum, old)
        if recipe.exponential == "schraudolph_u16":
            # The gate compares affine coordinates, which is what the hardware has (Fused-Softmax, algorithm 1).
            bias = AFFINE_OFFSET - AFFINE_SLOPE * old
            peak = affine(tile_maximum, bias)
            exceeded = peak > AFFINE_OFFSET + recipe.max_threshold * AFFINE_SLOPE
            doublings = torch.ceil((peak - AFFINE_OFFSET) / AFFINE_SLOPE)
        else:
            exceeded = tile_maximum - old > recipe.max_threshold
            doublings = torch.ceil(tile_maximum - old)
        seeded = torch.where(old == -torch.inf, tile_maximum, old + doublings)
        exceeded = exceeded | ((old == -torch.inf) & (tile_maximum > old))
        return exceeded, torch.where(exceeded, seeded, old)

    def _exponential(self, scores: Tensor, old: Tensor, new: Tensor, exceeded: Tensor) -> Tensor:
        shown = torch.where(new == -torch.inf, 0.0, new)
        if self.recipe.exponential == "exact":
            return scores.sub_(shown).exp2_()
        return schraudolph_u16(affine(scores, AFFINE_OFFSET - AFFINE_SLOPE * shown)).to(scores.dtype)

    def _fold(self, value_exponent: Tensor | None, visible: Tensor | None, rows: tuple) -> tuple[Tensor | float, Tensor | float]:
        """Power of two that P is multiplied by before a fixed-scale rounding, and the factor on what came before."""
        factor = 2.0**self.recipe.p_log2_scale if self.recipe.p.layout == "fixed" else 1.0
        if value_exponent is None:
            return factor, 1.0
        seen = value_exponent if visible is None else torch.where(visible, value_exponent, float(MIN_EXPONENT))
        old, raised = self.reference[rows], torch.maximum(self.reference[rows], seen.amax(-1, keepdim=True))
        self.reference[rows] = raised
        return torch.exp2(value_exponent - raised) * factor, torch.exp2(old - raised)

    def _rounded(self, probability: Tensor, fold: Tensor | float) -> Tensor:
        """P as the PV GEMM sees it."""
        if self.recipe.p.layout != "fixed":
            return round_operand(probability, self.recipe.p)
        return formats.round_to_element(probability * fold, formats.element_format(self.recipe.p.element))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output [N, H, G, R, D] and natural-log lse [N, H, G, R]; rows that saw no key give 0 and -inf."""
        output = self.output / torch.where(self.row_sum == 0, 1.0, self.row_sum)
        if self.recipe.p.layout == "fixed":
            exponent = -float(self.recipe.p_log2_scale)
            output = output * (torch.exp2(self.reference + exponent) if self.recipe.v_exponent == "running" else 2.0**exponent)
        lse = (self.maximum + torch.log2(self.row_sum)) * math.log(2.0)
        return output, torch.where(self.row_sum == 0, -torch.inf, lse)[..., 0]


def _product(probability: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """P V for [N, H, G, R, T] and [N, H, T, D]; on a masked tile a NaN in V reaches only rows that see its key."""
    finite = value
    if visible is not None:
        finite = torch.where(value.isfinite(), value, 0.0)
    lead, (groups, rows, keys) = probability.shape[:2], probability.shape[2:]
    product = torch.matmul(probability.reshape(*lead, groups * rows, keys), finite).view(*lead, groups, rows, -1)
    if visible is not None:
        broken = ~value.isfinite().all(-1)
        reached = (visible & broken[:, :, None, None, :]).any(-1, keepdim=True)
        product = torch.where(reached, torch.nan, product)
    return product
