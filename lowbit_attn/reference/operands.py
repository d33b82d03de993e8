"""Quantized operands of one attention call: rotation, prescale and codes of Q, K and V, and what the backward keeps."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.formats import Quantized
from lowbit_attn.recipes import Operand, Recipe

LOG2E = math.log2(math.e)


def quantize_operand(x: Tensor, operand: Operand, *, axis: int = -1) -> Quantized | None:
    """Codes of `x` [..., tokens, channels] in the operand's format, or None for uncoded operands."""
    if not operand.is_coded:
        return None
    return formats.quantize(x, formats.element_format(operand.element), formats.block_layout(operand.layout), operand.rule,
                            axis=axis)


def round_operand(x: Tensor, operand: Operand, *, axis: int = -1) -> Tensor:
    """The values that quantization leaves of `x`, in float32 (float64 for float64)."""
    wide = x if x.dtype == torch.float64 else x.float()
    if operand.element == "identity":
        return wide
    if operand.element == "bf16":
        return wide.to(torch.bfloat16).to(wide.dtype)
    return formats.round_to_blocks(wide, formats.element_format(operand.element), formats.block_layout(operand.layout),
                                   operand.rule, axis=axis)


def value_axis(operand: Operand) -> int:
    """The axis along which V's blocks run: keys, its contraction axis, for one-dimensional layouts."""
    return -2 if operand.layout in ("mx32", "nvfp16") else -1


def working_qk(query: Tensor, key: Tensor, recipe: Recipe, scale: float) -> tuple[Tensor, Tensor]:
    """Q and K as they are quantized: rotated, then prescaled, in float32 (float64 for float64)."""
    wide = [x if x.dtype == torch.float64 else x.float() for x in (query, key)]
    if recipe.rotates(query.shape[-1]):
        wide = [formats.hadamard(x) for x in wide]
    if recipe.q_prescale:
        wide[0] = wide[0] * (scale * LOG2E)
    return wide[0], wide[1]


def score_factor(recipe: Recipe, scale: float) -> float:
    """What turns q . k of the quantized operands into base-two scores."""
    return 1.0 if recipe.q_prescale else scale * LOG2E


@dataclass(frozen=True)
class Saved:
    """Codes of Q, K and V that the backward reads again: [N, H, S, D] uint8 with one scale code per token [N, H, S].

    Uncoded operands (identity formats) keep their values in `codes` and have no scales.
    """

    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]
    value: tuple[Tensor, Tensor | None]


def save_operand(x: Tensor, operand: Operand) -> tuple[Tensor, Tensor | None]:
    """Codes and per-token scale codes of `x` [N, H, S, D], or its rounded values and None."""
    quantized = quantize_operand(x, operand)
    if quantized is None:
        return round_operand(x, operand), None
    return quantized.codes, formats.scale_per_token(quantized)


def load_operand(saved: tuple[Tensor, Tensor | None], operand: Operand) -> Tensor:
    """The values of a saved operand, [N, H, S, D]."""
    codes, scales = saved
    if scales is None:
        return codes
    return formats.decode(codes, formats.element_format(operand.element)) * formats.decode_e8m0(scales)[..., None]
