"""Attention backward of the recipes that train, in plain PyTorch: the specification that kernels must equal.

Sources: FLAMIA sections 3.2-3.4, A.3-A.5 and B.1. P is rebuilt from lse with the forward's codes; dV uses E4M3(P 2^8) without
a stored scale. D = sum(O * dO) uses the dO values that dP uses, and an O of the V values that dP uses: the forward's where one
representation of V serves both products, else the mean of dP with weights P (FLAMIA 3.3, 3.4). dQ accumulates in float32, so
no accumulator scale couples rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.recipes import Recipe
from lowbit_attn.reference.forward import grouped, score_product
from lowbit_attn.reference.masks import Segment, Visibility, key_tiles, row_chunks
from lowbit_attn.reference.noise import uniform
from lowbit_attn.reference.operands import LOG2E, BackwardOperands, Saved, backward_operands, round_operand, score_factor
from lowbit_attn.reference.softmax import visible_product
from lowbit_attn.reference.stats import Stats


@dataclass(frozen=True)
class Gradients:
    """query [N, Hq, Sq, D], key and value [N, Hkv, Sk, D], float32 (float64)."""

    query: Tensor
    key: Tensor
    value: Tensor
    stats: Stats | None = None


def backward(grad_output: Tensor, grad_lse: Tensor | None, saved: Saved, output: Tensor, lse: Tensor, recipe: Recipe,
             visibility: Visibility, *, scale: float | None = None, seed: Tensor | None = None,
             first_token: Tensor | None = None, stats: bool = False) -> Gradients:
    """Gradients from dO [N, Hq, Sq, D] and dlse [N, Hq, Sq] (natural log) or None.

    `output` and `lse` are what the forward returned (`output` possibly rounded to the model's dtype). `seed`, an int64
    scalar tensor (0 if None), drives stochastic rounding together with each element's position; `first_token` [N] is the
    position of each batch item's first token in a packed row.
    """
    refusal = recipe.training_refusal
    if refusal:
        raise ValueError(f"recipe: {recipe.name!r} has no backward: {refusal}")
    recipe = recipe.effective()
    batch, heads, queries, channels = output.shape
    scale = channels**-0.5 if scale is None else scale
    operands = backward_operands(saved, recipe, scale)
    kv_heads, keys = operands.k.shape[1:3]
    if 0 in (batch, heads, queries, keys, channels):
        return Gradients(torch.zeros_like(operands.q), torch.zeros_like(operands.k), torch.zeros_like(operands.v))
    counters = Stats() if stats else None
    rows = _Rows(grad_output, grad_lse, output, lse, recipe, operands, heads // kv_heads)
    if counters is not None:
        counters.record("do", grad_output, recipe.do)
    noise = _Noise(recipe, seed, first_token, batch, kv_heads, heads // kv_heads, rows.delta.device)
    grads = _accumulate(rows, operands, recipe, visibility, score_factor(recipe, scale), noise, counters)
    grad_query, grad_key = grads.query.reshape(batch, heads, queries, channels) * scale, grads.key * scale
    if recipe.rotates(channels):
        grad_query, grad_key = formats.hadamard(grad_query), formats.hadamard(grad_key)
    return Gradients(grad_query, grad_key, grads.value, counters)


class _Rows:
    """Query-side tensors, grouped by key/value head: [N, H, G, R, D] and [N, H, G, R].

    `delta` is D - dlse, still without D where the forward's output is one of other V values than dP's (`needs_mean`).
    """

    def __init__(self, grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, recipe: Recipe,
                 operands: BackwardOperands, groups: int) -> None:
        dtype = operands.q.dtype
        do_dp = round_operand(grad_output, recipe.do).to(dtype)
        do_dv = round_operand(grad_output, recipe.do, axis=-2).to(dtype) if recipe.do.is_one_dimensional else do_dp
        self.needs_mean = recipe.v.is_one_dimensional
        delta = torch.zeros_like(lse, dtype=dtype) if self.needs_mean else (output.to(dtype) * do_dp).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse.to(dtype)
        # +inf makes P and every gradient of a row that saw no key vanish.
        lse_base2 = torch.where(lse == -torch.inf, torch.inf, lse * LOG2E).to(dtype)
        self.q, self.dk_q = grouped(operands.q, groups), grouped(operands.dk_q, groups)
        self.do_dp, self.do_dv = grouped(do_dp, groups), grouped(do_dv, groups)
        self.delta, self.lse_base2 = grouped(delta, groups), grouped(lse_base2, groups)


class _Noise:
    """Uniform numbers for a tile of dS, a function of seed, token positions and head; None for nearest rounding."""

    def __init__(self, recipe: Recipe, seed: Tensor | None, first_token: Tensor | None, batch: int, kv_heads: int, groups: int,
                 device: torch.device) -> None:
        self.active = recipe.ds_stochastic
        if self.active:
            self.seed = torch.zeros((), dtype=torch.int64, device=device) if seed is None else seed
            first = torch.arange(batch, device=device) << 24 if first_token is None else first_token
            self.first_token = first.view(-1, 1, 1, 1, 1)
            self.head = torch.arange(kv_heads * groups, device=device).view(1, kv_heads, groups, 1, 1)

    def tile(self, rows: range, keys: range) -> Tensor | None:
        """[N, H, G, rows, keys], or None."""
        if not self.active:
            return None
        device = self.first_token.device
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)
        return uniform(self.seed, self.first_token + row, self.head, key)


def _accumulate(rows: _Rows, operands: BackwardOperands, recipe: Recipe, visibility: Visibility, factor: float, noise: _Noise,
                stats: Stats | None) -> Gradients:
    """Sums over tiles, dQ and dK still without the softmax scale and in the rotated basis."""
    grad_query = torch.zeros_like(rows.q)
    grad_key, grad_value = torch.zeros_like(operands.k), torch.zeros_like(operands.v)
    batch, kv_heads, groups, queries, _ = rows.q.shape
    tiles = key_tiles(operands.k.shape[2], recipe.key_tile)
    for chunk in row_chunks(batch * kv_heads * groups, queries, recipe.key_tile):
        delta = rows.delta[..., chunk.start:chunk.stop, None]
        if rows.needs_mean:
            delta = delta + _mean_dp(rows, operands, visibility, chunk, tiles, factor)
        for tile in tiles:
            keys = slice(tile.start, tile.stop)
            for segment in visibility.segments(chunk, tile):
                part = (..., slice(segment.rows.start, segment.rows.stop), slice(None))
                p, dp = _probability_and_dp(rows, operands, segment, tile, factor)
                grad_value[:, :, keys] += _over_rows(_round_for_value(p, recipe, stats), rows.do_dv[part])
                ds = p * (dp - delta[..., segment.rows.start - chunk.start:segment.rows.stop - chunk.start, :])
                if segment.visible is not None:
                    ds = ds.masked_fill_(~segment.visible, 0.0)
                if stats is not None:
                    stats.record("ds", ds, recipe.ds)
                for_query = round_operand(ds, recipe.ds)
                grad_query[part] += _times_keys(ds, for_query, operands, recipe, segment, tile)
                for_key = for_query
                if recipe.ds.is_one_dimensional or noise.active:
                    for_key = round_operand(ds, recipe.ds, axis=-2, uniform=noise.tile(segment.rows, tile))
                grad_key[:, :, keys] += _over_rows(for_key, rows.dk_q[part])
    return Gradients(grad_query, grad_key, grad_value)


def _mean_dp(rows: _Rows, operands: BackwardOperands, visibility: Visibility, chunk: range, tiles: list[range],
             factor: float) -> Tensor:
    """sum(P dP) / sum(P) of each row of a chunk, [N, H, G, R, 1]: with it as D, a row of dS sums to zero; 0 without a key."""
    weighted = torch.zeros_like(rows.delta[..., chunk.start:chunk.stop, None])
    weights = torch.zeros_like(weighted)
    for tile in tiles:
        for segment in visibility.segments(chunk, tile):
            p, dp = _probability_and_dp(rows, operands, segment, tile, factor)
            part = (..., slice(segment.rows.start - chunk.start, segment.rows.stop - chunk.start), slice(None))
            product = p * dp if segment.visible is None else (p * dp).masked_fill_(~segment.visible, 0.0)
            weighted[part] += product.sum(-1, keepdim=True)
            weights[part] += p.sum(-1, keepdim=True)
    return weighted / torch.where(weights == 0, 1.0, weights)


def _times_keys(ds: Tensor, rounded: Tensor, operands: BackwardOperands, recipe: Recipe, segment: Segment,
                tile: range) -> Tensor:
    """dS K of one tile; with the K fold, 2^(K's exponents) joins dS before it is rounded."""
    keys = slice(tile.start, tile.stop)
    if operands.folded_k is not None and operands.folded_k_exponent is not None and (
            operands.fold_everywhere or segment.diagonal):
        exponent = operands.folded_k_exponent[:, :, None, None, keys]
        if segment.visible is not None:  # a broken key's is 128: 2^it times a dS of zero would be NaN
            exponent = torch.where(segment.visible, exponent, 0.0)
        folded = round_operand(ds * torch.exp2(exponent), recipe.ds)
        return visible_product(folded, operands.folded_k[:, :, keys], segment.visible)
    return visible_product(rounded, operands.dq_k[:, :, keys], segment.visible)


def _probability_and_dp(rows: _Rows, operands: BackwardOperands, segment: Segment, tile: range,
                        factor: float) -> tuple[Tensor, Tensor]:
    """P = 2^(X - lse), 0 where masked, and dP = dO V of one tile."""
    start, stop, keys = segment.rows.start, segment.rows.stop, slice(tile.start, tile.stop)
    scores = score_product(rows.q[..., start:stop, :], operands.k[:, :, keys]).mul_(factor)
    if segment.visible is not None:
        scores = scores.masked_fill_(~segment.visible, -torch.inf)
    p = scores.sub_(rows.lse_base2[..., start:stop, None]).exp2_()
    return p, score_product(rows.do_dp[..., start:stop, :], operands.v[:, :, keys])


def _round_for_value(probability: Tensor, recipe: Recipe, stats: Stats | None) -> Tensor:
    """P as dV's GEMM sees it: E4M3(P 2^8) 2^-8 without a stored scale (FLAMIA B.1), or in blocks along queries."""
    if recipe.p_grad.layout != "fixed":
        return round_operand(probability, recipe.p_grad, axis=-2)
    scaled = probability * 2.0**recipe.p_grad_log2_scale
    if stats is not None:
        stats.record_scaled("p", probability, scaled, recipe.p_grad)
    element = formats.element_format(recipe.p_grad.element)
    return formats.round_to_element(scaled, element) * 2.0**-recipe.p_grad_log2_scale


def _over_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Contract [N, H, G, R, T] with [N, H, G, R, D] over group and row: [N, H, T, D]."""
    return torch.matmul(weights.flatten(2, 3).transpose(-1, -2), rows.flatten(2, 3))
