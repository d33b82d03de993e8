"""Attention backward of the recipes that train, in plain PyTorch: the specification that kernels must equal.

Source: FLAMIA sections 3.3, 3.4 and B.1. P is rebuilt from lse with the forward's codes; D = sum(O * dO) uses the dO codes
that dP uses; dV uses E4M3(P 2^8) without a stored scale; dS is quantized once per 32 x 32 block and serves dQ and dK.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.recipes import Recipe
from lowbit_attn.reference.forward import _scores
from lowbit_attn.reference.masks import Visibility, row_chunks
from lowbit_attn.reference.operands import LOG2E, Saved, load_operand, round_operand, score_factor


@dataclass(frozen=True)
class Gradients:
    """query [N, Hq, Sq, D], key and value [N, Hkv, Sk, D], float32 (float64)."""

    query: Tensor
    key: Tensor
    value: Tensor


def backward(grad_output: Tensor, grad_lse: Tensor | None, saved: Saved, output: Tensor, lse: Tensor, recipe: Recipe,
             visibility: Visibility, *, scale: float | None = None) -> Gradients:
    """Gradients from dO [N, Hq, Sq, D] and dlse [N, Hq, Sq] (natural log) or None.

    `output` and `lse` are what the forward returned (`output` possibly rounded to the model's dtype).
    """
    if not recipe.trains:
        raise ValueError(f"recipe: {recipe.name!r} has no backward; accepted: recipes with trains=True")
    q, k, v = (load_operand(x, o) for x, o in ((saved.query, recipe.qk), (saved.key, recipe.qk), (saved.value, recipe.v)))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, heads, queries, channels = q.shape
    kv_heads, keys = k.shape[1:3]
    if 0 in (batch, heads, queries, keys, channels):
        return Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    grad = round_operand(grad_output, recipe.do).to(q.dtype)
    delta = (output.to(q.dtype) * grad).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse.to(q.dtype)
    # +inf makes P and every gradient of a row that saw no key vanish.
    lse_base2 = torch.where(lse == -torch.inf, torch.inf, lse * LOG2E).to(q.dtype)

    groups = heads // kv_heads
    q, grad, delta, lse_base2 = (x.view(batch, kv_heads, groups, *x.shape[2:]) for x in (q, grad, delta, lse_base2))
    grad_query, grad_key, grad_value = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    factor = score_factor(recipe, scale)
    for rows in row_chunks(batch * heads, queries, recipe.key_tile):
        for start in range(0, keys, recipe.key_tile):
            first = max(rows.start, visibility.first_row(start))
            if first >= rows.stop:
                break
            tile = slice(start, min(start + recipe.key_tile, keys))
            part = (..., slice(first, rows.stop), slice(None))
            visible = visibility.tile(range(first, rows.stop), range(tile.start, tile.stop))
            probability = _probability(q[part], k[:, :, tile], lse_base2[..., first:rows.stop, None], factor, visible)
            grad_value[:, :, tile] += _over_rows(_round_for_value(probability, recipe), grad[part])
            ds = probability * (_scores(grad[part], v[:, :, tile], 1.0) - delta[..., first:rows.stop, None])
            if visible is not None:
                ds = ds.masked_fill_(~visible, 0.0)
            ds = round_operand(ds, recipe.ds)
            grad_query[part] += _scores(ds, k[:, :, tile].transpose(-1, -2), 1.0)
            grad_key[:, :, tile] += _over_rows(ds, q[part])
    grad_query, grad_key = grad_query.reshape(batch, heads, queries, channels) * scale, grad_key * scale
    if recipe.rotates(channels):
        grad_query, grad_key = formats.hadamard(grad_query), formats.hadamard(grad_key)
    return Gradients(grad_query, grad_key, grad_value)


def _probability(q: Tensor, k: Tensor, lse_base2: Tensor, factor: float, visible: Tensor | None) -> Tensor:
    """P = 2^(X - lse), 0 where masked."""
    scores = _scores(q, k, factor)
    if visible is not None:
        scores = scores.masked_fill_(~visible, -torch.inf)
    return scores.sub_(lse_base2).exp2_()


def _round_for_value(probability: Tensor, recipe: Recipe) -> Tensor:
    """P as dV's GEMM sees it: E4M3(P 2^8) 2^-8."""
    if recipe.p.layout != "fixed":
        return round_operand(probability, recipe.p)
    factor = 2.0**recipe.p_backward_log2_scale
    return formats.round_to_element(probability * factor, formats.element_format(recipe.p.element)) / factor


def _over_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Contract [N, H, G, R, T] with [N, H, G, R, D] over group and row: [N, H, T, D]."""
    return torch.matmul(weights.flatten(2, 3).transpose(-1, -2), rows.flatten(2, 3))
