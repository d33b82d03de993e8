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
from lowbit_attn.reference import exponential
from lowbit_attn.reference.operands import round_operand
from lowbit_attn.reference.stats import Stats


@dataclass(frozen=True)
class ValueTile:
    """V of one key tile [N, H, T, D]; `exponent` [N, H, 1, 1, T] if its scales are folded into P instead.

    `running` folds relative to the reference exponent that runs with the loop; otherwise P's own block scales absorb them.
    """

    value: Tensor
    exponent: Tensor | None = None
    running: bool = False


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

    def update(self, scores: Tensor, tile: ValueTile, visible: Tensor | None, rows: slice) -> None:
        """Fold one tile into `rows` of the chunk; scores [N, H, G, R', T] are overwritten."""
        part = (..., rows, slice(None))
        old = self.maximum[part]
        tile_maximum = scores.amax(-1, keepdim=True)
        exceeded, new = self._raised(old, tile_maximum)
        # -inf - -inf is NaN: a row that has seen nothing has nothing to rescale.
        decay = torch.where(old == -torch.inf, 0.0, torch.exp2(old - new))
        # Integer casts in the approximate exponentials lose NaN; the row sum carries it.
        poison = torch.where(tile_maximum.isnan(), torch.nan, 0.0).to(decay.dtype)
        log2_fold, lift = self._fold(tile, visible, part)
        rounded, weights = self._weights(scores, new, log2_fold)
        self.row_sum[part] = self.row_sum[part] * decay + weights.sum(-1, keepdim=True) + poison
        self.output[part] = self.output[part] * (decay * lift) + _product(rounded, tile.value, visible)
        if self.stats is not None:
            rolled_back = exceeded & (old != -torch.inf) if self.recipe.maximum == "frozen" else torch.zeros_like(exceeded)
            self.stats.record_step(rolled_back)
        self.maximum[part] = new

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
            peak = exponential.affine(tile_maximum, old)
            exceeded = peak > exponential.AFFINE_OFFSET + recipe.max_threshold * exponential.AFFINE_SLOPE
            doublings = torch.ceil((peak - exponential.AFFINE_OFFSET) / exponential.AFFINE_SLOPE)
        else:
            exceeded = tile_maximum - old > recipe.max_threshold
            doublings = torch.ceil(tile_maximum - old)
        seeded = torch.where(old == -torch.inf, tile_maximum, old + doublings)
        exceeded = exceeded | ((old == -torch.inf) & (tile_maximum > old))
        return exceeded, torch.where(exceeded, seeded, old)

    def _fold(self, tile: ValueTile, visible: Tensor | None, part: tuple) -> tuple[Tensor | float, Tensor | float]:
        """log2 of what P is multiplied by before it is rounded, and the factor on what was accumulated before."""
        constant = self.recipe.p_log2_scale if self.recipe.p.layout == "fixed" else 0.0
        if tile.exponent is None:
            return constant, 1.0
        # The exponent of an unseen key may be huge (128 for NaN): 2^it times a probability of zero would be NaN.
        seen = tile.exponent if visible is None else torch.where(visible, tile.exponent, float(MIN_EXPONENT))
        if not tile.running:
            return seen + constant, 1.0
        old = self.reference[part].clone()
        raised = torch.maximum(old, seen.amax(-1, keepdim=True))
        self.reference[part] = raised
        return seen - raised + constant, torch.exp2(old - raised)

    def _weights(self, scores: Tensor, maximum: Tensor, log2_fold: Tensor | float) -> tuple[Tensor, Tensor]:
        """P as the PV GEMM sees it (folded), and the weights that the row sum adds up."""
        recipe = self.recipe
        shown = torch.where(maximum == -torch.inf, 0.0, maximum)
        if recipe.exponential == "direct_u8":
            codes = exponential.direct_codes(scores.sub_(shown) + log2_fold)
            rounded = formats.decode(codes, formats.E4M3).to(scores.dtype)
            return rounded, _unfolded(rounded, log2_fold)
        probability = self._exponential(scores, shown)
        folded = probability if isinstance(log2_fold, float) and log2_fold == 0 else probability * _exp2(log2_fold)
        if recipe.p.layout == "fixed":
            rounded = formats.round_to_element(folded, formats.element_format(recipe.p.element))
            if self.stats is not None:
                self.stats.record_scaled("p", probability, folded, recipe.p)
        else:
            rounded = round_operand(folded, recipe.p)
            if self.stats is not None:
                self.stats.record("p", folded, recipe.p)
        return rounded, _unfolded(rounded, log2_fold) if recipe.row_sum == "quantized" else probability

    def _exponential(self, scores: Tensor, maximum: Tensor) -> Tensor:
        kind = self.recipe.exponential
        if kind == "schraudolph_u16":
            return exponential.schraudolph_u16(exponential.affine(scores, maximum)).to(scores.dtype)
        relative = scores.sub_(maximum)
        if kind == "exact":
            return relative.exp2_()
        if kind == "mitchell":
            return exponential.mitchell(relative, self.recipe.exp_window).to(scores.dtype)
        return getattr(exponential, kind)(relative).to(scores.dtype)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output [N, H, G, R, D] and natural-log lse [N, H, G, R]; rows that saw no key give 0 and -inf."""
        output = self.output / torch.where(self.row_sum == 0, 1.0, self.row_sum)
        if self.recipe.p.layout == "fixed":
            exponent = self.reference if self.recipe.v_exponent == "running" else 0.0
            output = output * _exp2(exponent - self.recipe.p_log2_scale)
        lse = (self.maximum + torch.log2(self.row_sum)) * math.log(2.0)
        return output, torch.where(self.row_sum == 0, -torch.inf, lse)[..., 0]


def _exp2(exponent: Tensor | float) -> Tensor | float:
    return torch.exp2(exponent) if isinstance(exponent, Tensor) else 2.0**exponent


def _unfolded(rounded: Tensor, log2_fold: Tensor | float) -> Tensor:
    """The rounded P without the fold; a P of zero stays zero where 2^-fold overflows (keys whose V is zero)."""
    return torch.where(rounded == 0, 0.0, rounded * _exp2(-log2_fold))


def _product(probability: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """P V for [N, H, G, R, T] and [N, H, T, D]; on a masked tile a NaN in V reaches only rows that see its key."""
    finite = value if visible is None else torch.where(value.isfinite(), value, 0.0)
    lead, (groups, rows, keys) = probability.shape[:2], probability.shape[2:]
    product = torch.matmul(probability.reshape(*lead, groups * rows, keys), finite).view(*lead, groups, rows, -1)
    if visible is not None:
        broken = ~value.isfinite().all(-1)
        reached = (visible & broken[:, :, None, None, :]).any(-1, keepdim=True)
        product = torch.where(reached, torch.nan, product)
    return product
