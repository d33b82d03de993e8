"""The running state of one chunk of query rows: maximum, row sum and output, and how a score tile updates them.

Shapes: N batch items, H key/value heads, G query heads each, R rows, T keys of the tile, D channels. A state tensor is
[N, H, G, R, 1] or [N, H, G, R, D]; scores X are base two (X = scale log2(e) q.k) in `score_unit`, -inf where masked.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.formats.scales import MIN_EXPONENT
from lowbit_attn.recipes import DIRECT_UNIT, SHARED_FOLD, Recipe
from lowbit_attn.reference import exponential
from lowbit_attn.reference.operands import TOP_RANGE, round_operand
from lowbit_attn.reference.stats import Stats

BROKEN_EXPONENT = 128.0
"""The exponent of a block of V that holds NaN or Inf."""


def score_unit(recipe: Recipe) -> float:
    """Doublings per unit of the scores: codes computed directly take them in DIRECT_UNIT."""
    return DIRECT_UNIT if recipe.exponential == "direct_u8" else 1.0


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
        self.direct = recipe.exponential == "direct_u8"
        self.unit = score_unit(recipe)
        column = (*shape, 1)
        self.maximum = like.new_full(column, -torch.inf)
        self.row_sum = like.new_zeros(column)
        self.output = like.new_zeros((*shape, channels))
        self.reference = like.new_full(column, float(MIN_EXPONENT))
        self.sees_keys = like.new_zeros(column, dtype=torch.bool)
        self.largest = like.new_full(column, -torch.inf)

    def update(self, scores: Tensor, tile: ValueTile, visible: Tensor | None, rows: slice) -> None:
        """Fold one tile into `rows` of the chunk; scores [N, H, G, R', T] are overwritten."""
        part = (..., rows, slice(None))
        old = self.maximum[part]
        tile_maximum = scores.amax(-1, keepdim=True)
        if self.direct:
            tile_maximum = tile_maximum.half().to(scores.dtype)
        self.largest[part] = torch.maximum(self.largest[part], tile_maximum)
        exceeded, new = self._raised(old, tile_maximum)
        if self.direct:
            new = exponential.direct_maximum(new, self.recipe.p_log2_scale)
        # -inf - -inf is NaN: a row that has seen nothing has nothing to rescale.
        decay = torch.where(old == -torch.inf, 0.0, torch.exp2((old - new) / self.unit))
        # Integer casts in the approximate exponentials lose NaN, and Inf has no score relative to it; the row sum carries both.
        poison = torch.where(tile_maximum < torch.inf, 0.0, torch.nan).to(decay.dtype)
        log2_fold, lift = self._fold(tile, visible, part)
        if tile.running and tile.exponent is not None:
            # A kernel folds V's exponent into P, so a broken V breaks the row sum too.
            broken = tile.exponent == BROKEN_EXPONENT
            poison = torch.where((broken if visible is None else broken & visible).any(-1, keepdim=True), torch.nan, poison)
        rounded, weights = self._weights(scores, new, log2_fold)
        self.row_sum[part] = self.row_sum[part] * decay + weights.sum(-1, keepdim=True) + poison
        self.output[part] = self.output[part] * (decay * lift) + visible_product(rounded, tile.value, visible)
        if self.stats is not None:
            rolled_back = exceeded & (old != -torch.inf) if self.recipe.maximum == "frozen" else torch.zeros_like(exceeded)
            self.stats.record_step(rolled_back)
        self.maximum[part] = new
        self.sees_keys[part] |= True if visible is None else visible.any(-1, keepdim=True)

    def _raised(self, old: Tensor, tile_maximum: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows raise their maximum, and the new one."""
        recipe = self.recipe
        if recipe.maximum == "online":
            return tile_maximum > old, torch.maximum(old, tile_maximum)
        if recipe.maximum == "lazy":
            exceeded = tile_maximum - old > recipe.max_threshold * self.unit
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
        """P as the PV GEMM sees it (folded), and the weights that the row sum adds up.

        A quantized row sum adds up P rounded without V's exponents: the fold may take a key with a tiny V below the smallest
        code, which costs the output nothing, but a denominator must not depend on V. Codes computed directly serve both down
        to a fold of SHARED_FOLD; below, the sum takes them folded by that much only.
        """
        recipe = self.recipe
        if self.direct:
            return self._direct_weights(scores, maximum, log2_fold)
        affine = recipe.exponential == "schraudolph_u16"
        relative = scores if affine else scores.sub_(torch.where(maximum == -torch.inf, 0.0, maximum))
        constant = recipe.p_log2_scale if recipe.p.layout == "fixed" else 0.0
        probability = self._exponential(relative, maximum)
        rounded = self._round(probability, log2_fold, count=True)
        if recipe.row_sum == "exact":
            return rounded, probability
        plain = self._round(probability, constant) if isinstance(log2_fold, Tensor) else rounded
        return rounded, plain * 2.0**-constant

    def _direct_weights(self, scores: Tensor, maximum: Tensor, log2_fold: Tensor | float) -> tuple[Tensor, Tensor]:
        constant = self.recipe.p_log2_scale
        base = exponential.direct_base(torch.where(maximum == -torch.inf, 0.0, maximum), constant)

        def values(fold: Tensor | float) -> Tensor:
            return formats.decode(exponential.direct_codes(scores, base, fold), formats.E4M3).to(scores.dtype)

        if not isinstance(log2_fold, Tensor):
            rounded = values(0.0)
            self._count_direct(scores, maximum, rounded)
            return rounded, rounded * 2.0**-constant
        fold = log2_fold - constant
        shared = fold.clamp_min(SHARED_FOLD)
        rounded = values(fold)
        self._count_direct(scores, maximum, rounded)
        return rounded, values(shared) * torch.exp2(-shared - constant)

    def _count_direct(self, scores: Tensor, maximum: Tensor, rounded: Tensor) -> None:
        if self.stats is not None:
            largest = formats.E4M3.max_value
            seen = (scores > -torch.inf) & (maximum > -torch.inf)
            self.stats.add("p", rounded.numel(), (rounded >= largest).sum(), (seen & (rounded == 0)).sum())

    def _round(self, probability: Tensor, log2_fold: Tensor | float, count: bool = False) -> Tensor:
        """P times 2^log2_fold in P's format."""
        p = self.recipe.p
        folded = probability if isinstance(log2_fold, float) and log2_fold == 0 else probability * _exp2(log2_fold)
        if count and self.stats is not None:
            if p.layout == "fixed":
                self.stats.record_scaled("p", probability, folded, p)
            else:
                self.stats.record("p", folded, p)
        if p.layout == "fixed":
            return formats.round_to_element(folded, formats.element_format(p.element))
        return round_operand(folded, p)

    def _exponential(self, relative: Tensor, maximum: Tensor) -> Tensor:
        """2^x of scores relative to the maximum; the affine proxy takes the scores themselves."""
        kind = self.recipe.exponential
        if kind == "schraudolph_u16":
            shown = torch.where(maximum == -torch.inf, 0.0, maximum)
            return exponential.schraudolph_u16(exponential.affine(relative, shown)).to(relative.dtype)
        if kind == "exact":
            return relative.exp2_()
        if kind == "mitchell":
            return exponential.mitchell(relative, self.recipe.exp_window).to(relative.dtype)
        return getattr(exponential, kind)(relative).to(relative.dtype)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output [N, H, G, R, D], natural-log lse and `Saved.row_top` [N, H, G, R]; rows that saw no key give 0, -inf and 0.

        A row that saw keys and has no weight is NaN: its scores left the range of float32, or of the affine proxy.
        """
        row_sum = torch.where(self.row_sum == 0, torch.where(self.sees_keys, torch.nan, 1.0), self.row_sum)
        output = self.output / row_sum
        if self.recipe.p.layout == "fixed":
            exponent = self.reference if self.recipe.v_exponent == "running" else 0.0
            output = output * _exp2(exponent - self.recipe.p_log2_scale)
        log2_sum = self.maximum / self.unit + torch.log2(row_sum)
        lse = torch.where(self.sees_keys, log2_sum * math.log(2.0), -torch.inf)
        top = _top_code(self.largest / self.unit - log2_sum)
        return output, lse[..., 0], torch.where(self.sees_keys, top, 0)[..., 0]


def _top_code(log2_largest: Tensor) -> Tensor:
    """`Saved.row_top` of the largest probabilities."""
    log2_largest = log2_largest.nan_to_num(0.0).clamp(-formats.scales.E8M0_BIAS, 0.0)
    largest = torch.exp2(log2_largest)
    others = sum(((largest > 0.5) & (1.0 - largest <= 2.0**-k)).int() for k in range(1, TOP_RANGE + 1))
    return (log2_largest.ceil() + formats.scales.E8M0_BIAS + others).to(torch.uint8)


def _exp2(exponent: Tensor | float) -> Tensor | float:
    return torch.exp2(exponent) if isinstance(exponent, Tensor) else 2.0**exponent


def visible_product(probability: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """P V for [N, H, G, R, T] and [N, H, T, D]; on a masked tile a NaN in V reaches only rows that see its key."""
    finite = value if visible is None else torch.where(value.isfinite(), value, 0.0)
    lead, (groups, rows, keys) = probability.shape[:2], probability.shape[2:]
    product = torch.matmul(probability.reshape(*lead, groups * rows, keys), finite).view(*lead, groups, rows, -1)
    if visible is not None:
        broken = ~value.isfinite().all(-1)
        reached = (visible & broken[:, :, None, None, :]).any(-1, keepdim=True)
        product = torch.where(reached, torch.nan, product)
    return product
