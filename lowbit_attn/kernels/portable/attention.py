"""Host side of the portable forward: `prepare` tiles and quantizes, `run` attends. One path for dense and packed inputs.

Dense inputs are [B, S, H, D], packed ones [T, H, D], any strides. Nothing here waits for the device.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowbit_attn.kernels.portable import forward
from lowbit_attn.kernels.portable.numbers import element_constants, rule_constants
from lowbit_attn.kernels.portable.quantize import Quantized, Work, quantize
from lowbit_attn.kernels.portable.support import refusal
from lowbit_attn.kernels.portable.targets import TARGETS, Target, kernel_head_dim
from lowbit_attn.kernels.tiling import Tiling, lse_layout, on_device, tiling_of
from lowbit_attn.recipes import Recipe

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Prepared:
    """Quantized operands and tables of one call. Row r of head h is at h * head_stride + document * document_extra + r of lse."""

    tiling: Tiling
    query: Quantized
    key: Quantized
    value: Quantized
    recipe: Recipe
    target: Target
    like: Tensor
    kv_heads: int
    keys: int
    head_stride: int
    document_extra: int
    factor: float
    lse_shape: tuple[int, ...]


@lru_cache(maxsize=16)
def target_of(device: torch.device) -> Target:
    """The architecture of a torch device; ValueError if these kernels do not know it."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        if name in TARGETS:
            return TARGETS[name]
    raise ValueError(f"device: got {device}; accepted: a GPU of {', '.join(TARGETS)}")


def prepare(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, target: Target | None = None, scale: float | None = None,
            is_causal: bool = False, bottom_right: bool = False, key_lengths: Tensor | None = None,
            cu_seq: tuple[Tensor, Tensor] | None = None, save: bool = False) -> Prepared:
    """Tile and quantize one call; with `cu_seq` (query's and key's boundaries) the inputs are packed. ValueError for what
    `refusal` names; `target` defaults to the inputs' device."""
    target = target_of(query.device) if target is None else target
    if problem := refusal(recipe, target.architecture):
        raise ValueError(f"recipe: got {recipe.canonical}: {problem}")
    recipe = recipe.effective()
    head_dim, packed, native = query.shape[-1], cu_seq is not None, target.is_native(recipe)
    rows = target.forward(recipe, kernel_head_dim(head_dim)).rows
    scale = head_dim**-0.5 if scale is None else scale
    prescale = scale * LOG2E if recipe.q_prescale else 1.0
    save, rotated = save and recipe.saves_codes, recipe.rotates(head_dim)
    k_top = recipe.k_top * (1.0 if head_dim <= 128 else 0.5)
    with on_device(query):
        tiling = tiling_of(query, key.shape[-3], rows, is_causal=is_causal, bottom_right=bottom_right, key_lengths=key_lengths,
                           cu_seq=cu_seq)
        q = quantize(query, tiling, Work(recipe.qk, 0, rotate=rotated, prescale=prescale, top=recipe.q_top, native=native,
                                         save=save), packed=packed)
        k = quantize(key, tiling, Work(recipe.qk, 2, rotate=rotated, top=k_top, native=native, save=save), packed=packed)
        v = quantize(value, tiling, Work(recipe.v, 2, along_tokens=True, keep_scale=recipe.v_exponent != "running", native=native,
                                         save=save), packed=packed)
    shape, head_stride, document_extra = lse_layout(query, packed)
    return Prepared(tiling, q, k, v, recipe, target, query, key.shape[-2], key.shape[-3], head_stride, document_extra,
                    1.0 if recipe.q_prescale else scale * LOG2E, shape)


def constants(recipe: Recipe, target: Target, head_dim: int) -> dict[str, Any]:
    """The forward's compile-time arguments and options; no fused multiply-add, whose single rounding the reference has not."""
    dim = kernel_head_dim(head_dim)
    config = target.forward(recipe, dim)
    rule = {"BOUND_EXPONENT": 0, "BOUND_FRACTION": 0} if recipe.p.layout == "fixed" else rule_constants(recipe.p)
    return {"ROWS": config.rows, "D": dim, "HEAD_DIM": head_dim, "NATIVE": target.is_native(recipe), "CONVERTS": target.converts,
            "QK_ELEMENT": recipe.qk.element, "QK_GROUP": 16 if recipe.qk.layout.startswith("nvfp16") else 32,
            "P_ELEMENT": recipe.p.element, "P_LAYOUT": recipe.p.layout, "V_ELEMENT": recipe.v.element,
            "V_SCALED": recipe.v_exponent != "running", "RUNNING": recipe.v_exponent == "running",
            "P_LOG2": recipe.p_log2_scale if recipe.p.layout == "fixed" else 0.0,
            "QUANTIZED_SUM": recipe.row_sum == "quantized", "EXPONENTIAL": recipe.exponential, "MAXIMUM": recipe.maximum,
            "THRESHOLD": recipe.max_threshold, **element_constants(recipe.p.element), **rule,
            "num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}


def run(prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Output (query's shape and dtype, contiguous) and natural-log lse, float32 [B, Hq, Sq] or [Hq, T]."""
    query, tiling = prepared.like, prepared.tiling
    lse = query.new_empty(prepared.lse_shape, dtype=torch.float32)
    if query.numel() == 0 or prepared.keys == 0 or prepared.kv_heads == 0:
        return query.new_zeros(query.shape), lse.fill_(-math.inf)
    output = query.new_empty(query.shape)
    heads, head_dim = query.shape[-2:]
    unused = tiling.count
    operands = [unused if y is None else y for x in (prepared.query, prepared.key, prepared.value)
                for y in (x.values, x.scales, x.side)]
    with on_device(query):
        forward.attention[(heads, tiling.work.shape[0])](
            *operands, output, lse, tiling.documents, tiling.work, tiling.count, heads, heads // prepared.kv_heads,
            tiling.q_tiles.numel(), tiling.k_tiles.numel(), prepared.head_stride, prepared.document_extra, prepared.factor, 0.0,
            **constants(prepared.recipe, prepared.target, head_dim))
    return output, lse


def saved_for_backward(prepared: Prepared) -> tuple[Tensor, ...]:
    """Codes and scale codes of Q, K and V as `ops.saved` lays them out; needs `save` and a recipe that saves codes."""
    saved = [y for x in (prepared.query, prepared.key, prepared.value) for y in (x.codes, x.saved_scales)]
    if any(x is None for x in saved):
        raise ValueError(f"save: got no codes from recipe {prepared.recipe.name!r}; accepted: save=True with a recipe that saves "
                         "codes")
    return tuple(saved)  # type: ignore[arg-type]


__all__ = ["Prepared", "constants", "prepare", "run", "saved_for_backward", "target_of"]
