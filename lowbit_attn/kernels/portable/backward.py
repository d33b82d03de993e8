"""Host side of the portable backward: rebuild the operands from what the forward saved, then dQ, and dK with dV.

Works on the saved tensors of every backend (`ops.saved`), so it may follow another family's forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_attn.kernels.portable import gradients
from lowbit_attn.kernels.portable.attention import LOG2E, target_of
from lowbit_attn.kernels.portable.quantize import Work, quantize
from lowbit_attn.kernels.portable.support import backward_refusal
from lowbit_attn.kernels.portable.targets import Target, kernel_head_dim
from lowbit_attn.kernels.tiling import TILE, Tiling, lse_layout, on_device, tiling_of
from lowbit_attn.recipes import Recipe


@dataclass(frozen=True)
class _Operand:
    """Tiles [heads, tiles * 128, D] of one operand: bf16 values, or codes with their scales [heads, tiles * 128, D / 32]."""

    values: Tensor
    scales: Tensor | None = None


def _decoded(codes: Tensor, scales: Tensor, tiling: Tiling, column: int, packed: bool, native: bool) -> _Operand:
    """Tiles of saved codes [B, S, H, D] or [T, H, D] with one scale per token and head."""
    heads, head_dim = codes.shape[-2:]
    dim, table = kernel_head_dim(head_dim), tiling.q_tiles if column == 0 else tiling.k_tiles
    shape = (heads, table.numel() * TILE)
    out = codes.new_empty((*shape, dim), dtype=torch.uint8 if native else torch.bfloat16)
    out_scales = codes.new_empty((*shape, dim // 32)) if native else None
    strides = (0, codes.shape[0]) if packed else (codes.shape[1] * (heads - 1), codes.shape[1])
    gradients.decode_kernel[(table.numel() * 4, heads)](
        codes.contiguous(), scales.contiguous(), out, out_scales, tiling.documents, table, *strides, heads, table.numel(),
        COLUMN=column, D=dim, HEAD_DIM=head_dim, NATIVE=native)
    return _Operand(out, out_scales)


def _operands(saved: Sequence[Tensor], recipe: Recipe, tiling: Tiling, packed: bool, native: bool) -> tuple[_Operand, ...]:
    """Tiles of Q, K and V as the scores and dP read them, then of Q in dK and of K in dQ."""
    query, q_scales, key, k_scales, value, v_scales, *_ = saved  # these kernels read no row_top
    if recipe.saves_codes:
        q, k = (_decoded(*x, tiling, column, packed, native) for x, column in (((query, q_scales), 0), ((key, k_scales), 2)))
        return q, k, _decoded(value, v_scales, tiling, 2, packed, native), q, k
    rotated = recipe.rotates(query.shape[-1])

    def values(x: Tensor, operand: Any, column: int, rotate: bool) -> _Operand:
        return _Operand(quantize(x, tiling, Work(operand, column, rotate=rotate), packed=packed).values)

    gradient = recipe.qk_grad or recipe.qk
    return (values(query, recipe.qk, 0, rotated), values(key, recipe.qk, 2, rotated), values(value, recipe.v, 2, False),
            values(query, gradient, 0, rotated), values(key, gradient, 2, rotated))


def backward(grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, saved: Sequence[Tensor], recipe: Recipe, *,
             target: Target | None = None, scale: float | None = None, is_causal: bool = False, bottom_right: bool = False,
             key_lengths: Tensor | None = None, cu_seq: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, [B, S, H, D] or packed [T, H, D] in grad_output's dtype.

    `output`, `lse` and `saved` are the forward operator's. ValueError for what `backward_refusal` names.
    """
    target = target_of(grad_output.device) if target is None else target
    if problem := backward_refusal(recipe, target.architecture):
        raise ValueError(f"recipe: got {recipe.canonical}: {problem}")
    packed = cu_seq is not None
    grad_query, grad_key, grad_value = (x.new_empty(x.shape, dtype=grad_output.dtype) for x in saved[:6:2])
    if 0 in (grad_query.numel(), grad_key.numel()):
        return grad_query.zero_(), grad_key.zero_(), grad_value.zero_()
    heads, head_dim = output.shape[-2:]
    kv_heads, dim = grad_key.shape[-2], kernel_head_dim(head_dim)
    native = target.has_native_backward(recipe, dim)
    config = target.backward(dim, native)
    scale = head_dim**-0.5 if scale is None else scale
    _, head_stride, document_extra = lse_layout(output, packed)
    with on_device(grad_output):
        tiling = tiling_of(output, grad_key.shape[-3], config.rows, is_causal=is_causal, bottom_right=bottom_right,
                           key_lengths=key_lengths, cu_seq=cu_seq)
        q_tiles, k_tiles = tiling.q_tiles.numel(), tiling.k_tiles.numel()
        q, k, v, grad_q, grad_k = _operands(saved, recipe, tiling, packed, native)
        do = quantize(grad_output, tiling, Work(recipe.do, 0, native=native), packed=packed)
        delta, lse2 = (torch.empty((heads, q_tiles * TILE), dtype=torch.float32, device=lse.device) for _ in range(2))
        lse = lse.contiguous()
        gradients.rows_kernel[(q_tiles * 4, heads)](
            output.contiguous(), do.values, do.scales, lse, lse if grad_lse is None else grad_lse.contiguous(), delta, lse2,
            tiling.documents, tiling.q_tiles, heads, q_tiles, head_stride, document_extra, D=dim, HEAD_DIM=head_dim,
            HAS_GRAD_LSE=grad_lse is not None, NATIVE=native)
        shared: dict[str, Any] = {"D": dim, "HEAD_DIM": head_dim, "ROTATE": recipe.rotates(head_dim), "NATIVE": native,
                                  "num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
        numbers = (heads // kv_heads, q_tiles, k_tiles, scale * LOG2E, scale, 0.0 if native else None)
        values_and_grads = (v.values, v.scales, do.values, do.scales, delta, lse2)
        gradients.query_gradient[(heads, tiling.work.shape[0])](
            q.values, q.scales, k.values, k.scales, None if native else grad_k.values, *values_and_grads, grad_query,
            tiling.documents, tiling.work, tiling.count, heads, *numbers, ROWS=config.rows, KEYS=config.step, **shared)
        gradients.key_gradients[(kv_heads, k_tiles * TILE // config.rows)](
            q.values, q.scales, None if native else grad_q.values, k.values, k.scales, *values_and_grads, grad_key, grad_value,
            tiling.documents, tiling.k_tiles, kv_heads, *numbers, ROWS=config.step, KEYS=config.rows,
            P_LOG2=recipe.p_grad_log2_scale, CONVERTS=target.converts, **shared)
    return grad_query, grad_key, grad_value


__all__ = ["backward"]
