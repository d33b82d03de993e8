"""Operands of the attention GEMMs: rotation and prescale of Q and K, formats along each contraction axis, saved codes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.recipes import Operand, Recipe
from lowbit_attn.reference.stats import Stats

LOG2E = math.log2(math.e)


def round_operand(x: Tensor, operand: Operand, *, axis: int = -1, top: float | None = None,
                  uniform: Tensor | None = None) -> Tensor:
    """The values that quantization leaves of `x` [..., tokens, channels], in float32 (float64 for float64).

    `axis` is the contraction axis of the product: one-dimensional layouts run along it, the others ignore it.
    """
    x = formats.wide(x)
    if operand.element == "identity":
        return x
    if operand.element == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    return formats.round_to_blocks(x, formats.element_format(operand.element), formats.block_layout(operand.layout),
                                   operand.rule, axis=axis if operand.is_one_dimensional else -1, top=top, uniform=uniform)


def working_qk(query: Tensor, key: Tensor, recipe: Recipe, scale: float) -> tuple[Tensor, Tensor]:
    """Q and K as they are quantized: rotated, then prescaled, in float32 (float64 for float64)."""
    q, k = formats.wide(query), formats.wide(key)
    if recipe.rotates(query.shape[-1]):
        q, k = formats.hadamard(q), formats.hadamard(k)
    if recipe.q_prescale:
        q = q * (scale * LOG2E)
    return q, k


def score_factor(recipe: Recipe, scale: float) -> float:
    """What turns q . k of the quantized operands into base-two scores."""
    return 1.0 if recipe.q_prescale else scale * LOG2E


def operand_tops(recipe: Recipe, head_dim: int) -> tuple[float | None, float | None]:
    """Bounds of the scaled block maxima of Q and K, or None; K's halves above head_dim 128 so that |q . k| keeps its bound."""
    return recipe.q_top or None, recipe.k_top * (1.0 if head_dim <= 128 else 0.5) or None


@dataclass(frozen=True)
class Coded:
    """uint8 codes [N, H, S, D] and one scale code per token [N, H, S]."""

    codes: Tensor
    scales: Tensor

    def values(self, operand: Operand) -> Tensor:
        """What codes and scales stand for."""
        return self.unscaled(operand) * formats.decode_e8m0(self.scales)[..., None]

    def unscaled(self, operand: Operand) -> Tensor:
        """The codes' values without their scales."""
        return formats.decode(self.codes, formats.element_format(operand.element))

    def exponents(self) -> Tensor:
        """Scale exponents as float32 [N, H, S]; 128 for a block that holds NaN or Inf."""
        return (self.scales.int() - formats.scales.E8M0_BIAS).float()


def code_per_token(x: Tensor, operand: Operand, top: float | None = None) -> Coded:
    """Quantize `x` [N, H, S, D] in a layout with one scale per token."""
    quantized = formats.quantize(x, formats.element_format(operand.element), formats.block_layout(operand.layout), operand.rule,
                                 top=top)
    return Coded(quantized.codes, formats.scale_per_token(quantized))


TOP_RANGE = 4
"""How far `Saved.row_top` follows a probability towards 1: further, what dS has of D's rounding is as large as the rest of it."""


@dataclass(frozen=True)
class Saved:
    """What the backward reads: codes of the working Q and K and of V where the recipe saves codes, else the inputs.

    `row_top` [N, H, S] uint8, beside codes: the E8M0 code of a bound on each query's largest probability P, at most twice that,
    or 127 + k where P is over half and 1 - P at most 2^-k, k up to TOP_RANGE. Kernels scale dS by it; the reference's backward
    takes dS's own largest values.
    """

    query: Coded | Tensor
    key: Coded | Tensor
    value: Coded | Tensor
    row_top: Tensor | None = None


@dataclass(frozen=True)
class ForwardOperands:
    """Values that the forward's GEMMs read, [N, H, S, D]; exponents [N, H, S] where scales stay outside the GEMM.

    `diagonal_v` replaces V on tiles that the causal diagonal crosses.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_exponent: Tensor | None = None
    k_exponent: Tensor | None = None
    v_exponent: Tensor | None = None
    diagonal_v: Tensor | None = None
    diagonal_v_exponent: Tensor | None = None
    saved: Saved | None = None


def forward_operands(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, scale: float, *, save: bool,
                     stats: Stats | None) -> ForwardOperands:
    """Quantize Q, K and V of an effective recipe."""
    q, k = working_qk(query, key, recipe, scale)
    q_top, k_top = operand_tops(recipe, query.shape[-1])
    if stats is not None:
        for name, x, operand, axis, top in (("q", q, recipe.qk, -1, q_top), ("k", k, recipe.qk, -1, k_top),
                                            ("v", value, recipe.v, -2, None)):
            stats.record(name, x, operand, axis if operand.is_one_dimensional else -1, top)
    coded_q = coded_k = coded_v = None
    if recipe.qk.has_token_scales:
        coded_q, coded_k = code_per_token(q, recipe.qk, q_top), code_per_token(k, recipe.qk, k_top)
    if recipe.v.has_token_scales:
        coded_v = code_per_token(value, recipe.v)
    saved = None
    if save:
        if recipe.saves_codes and coded_q and coded_k and coded_v:
            saved = Saved(coded_q, coded_k, coded_v)
        else:
            saved = Saved(query, key, value)
    fields: dict[str, Tensor | None] = {}
    if recipe.score_accumulator == "fp16" and coded_q and coded_k:
        q, k = coded_q.unscaled(recipe.qk), coded_k.unscaled(recipe.qk)
        fields.update(q_exponent=coded_q.exponents(), k_exponent=coded_k.exponents())
    elif coded_q and coded_k:
        q, k = coded_q.values(recipe.qk), coded_k.values(recipe.qk)
    else:
        q, k = round_operand(q, recipe.qk, top=q_top), round_operand(k, recipe.qk, top=k_top)
    if recipe.v_exponent == "running" and coded_v:
        v, fields["v_exponent"] = coded_v.unscaled(recipe.v), coded_v.exponents()
    else:
        v = coded_v.values(recipe.v) if coded_v else round_operand(value, recipe.v, axis=-2)
    if recipe.diagonal is not None:
        per_key = code_per_token(formats.wide(value), recipe.diagonal)
        fields.update(diagonal_v=per_key.unscaled(recipe.diagonal), diagonal_v_exponent=per_key.exponents())
    return ForwardOperands(q, k, v, saved=saved, **fields)


@dataclass(frozen=True)
class BackwardOperands:
    """Values of Q, K and V for each product of the backward, [N, H, S, D].

    `q`, `k` rebuild the scores; `v` is dP's; `dk_q` and `dq_k` are the gradient products' Q and K. `folded_k` (with
    `folded_k_exponent` [N, H, S]) replaces `dq_k` where K's scales are per key and folded into dS: everywhere, or on
    diagonal tiles only (`fold_everywhere`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dk_q: Tensor
    dq_k: Tensor
    folded_k: Tensor | None = None
    folded_k_exponent: Tensor | None = None
    fold_everywhere: bool = False


def backward_operands(saved: Saved, recipe: Recipe, scale: float) -> BackwardOperands:
    """Rebuild the operands from what an effective recipe's forward saved."""
    exact = recipe.causal_safety == "exact"
    if isinstance(saved.query, Coded) and isinstance(saved.key, Coded) and isinstance(saved.value, Coded):
        q, k, v = (x.values(o) for x, o in ((saved.query, recipe.qk), (saved.key, recipe.qk), (saved.value, recipe.v)))
        if not exact:
            return BackwardOperands(q, k, v, q, k)
        return BackwardOperands(q, k, v, q, k, saved.key.unscaled(recipe.qk), saved.key.exponents(), True)
    query, key, value = saved.query, saved.key, saved.value
    if isinstance(query, Coded) or isinstance(key, Coded) or isinstance(value, Coded):
        raise TypeError("saved: got codes and values mixed; accepted: one kind for query, key and value")
    source_q, source_k = working_qk(query, key, recipe, scale)
    grad_format = recipe.qk_grad or recipe.qk
    q, k, v = round_operand(source_q, recipe.qk), round_operand(source_k, recipe.qk), round_operand(value, recipe.v)
    dk_q, dq_k = round_operand(source_q, grad_format, axis=-2), round_operand(source_k, grad_format, axis=-2)
    fold = recipe.diagonal if recipe.diagonal is not None else (grad_format if exact and grad_format.has_token_scales else None)
    if fold is None:
        return BackwardOperands(q, k, v, dk_q, dq_k)
    per_key = code_per_token(source_k, fold)
    return BackwardOperands(q, k, v, dk_q, dq_k, per_key.unscaled(fold), per_key.exponents(), recipe.diagonal is None)
