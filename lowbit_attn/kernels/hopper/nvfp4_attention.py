"""Host side of the forward of nvfp4_fp8 (`nvfp4`): `prepare` tiles and quantizes, `run` attends; dense or packed, causal or not.

Dense inputs are [B, S, H, D], packed ones [T, H, D], any strides. Nothing here waits for the device.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowbit_attn.kernels.hopper import nvfp4
from lowbit_attn.kernels.hopper.attention import Config, descriptor, head_group, kernel_head_dim, processors, shared_layout
from lowbit_attn.kernels.hopper.nvfp4_support import refusal
from lowbit_attn.kernels.hopper.quantize_nvfp4 import Quantized, quantize_nvfp4
from lowbit_attn.kernels.tiling import TILE, Tiling, lse_layout, tiling_of
from lowbit_attn.recipes import Recipe

CONFIGS = {64: Config(3, 0, 2, 240), 128: Config(3, 0, 2, 240), 256: Config(1, 0, 1, 240)}
"""Nothing is promoted: sums of FP8 products end after 32 keys."""


@dataclass(frozen=True)
class Prepared:
    """Quantized operands and tables of one call. `head_dim` is the caller's, before padding; row r of head h is at h * head_stride
    + document * document_extra + r of lse; `factor` makes base-two scores of products."""

    tiling: Tiling
    quantized: Quantized
    recipe: Recipe
    query: Tensor
    head_dim: int
    kv_heads: int
    head_stride: int
    document_extra: int
    factor: float
    lse_shape: tuple[int, ...]


def prepare(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, scale: float | None = None, is_causal: bool = False,
            bottom_right: bool = False, key_lengths: Tensor | None = None, cu_seq: tuple[Tensor, Tensor] | None = None,
            save: bool = False) -> Prepared:
    """Tile and quantize one call; with `cu_seq` (query's and key's boundaries) the inputs are packed. `save` changes nothing: the
    backward of these recipes reads the inputs. ValueError for what `nvfp4_support.refusal` names."""
    recipe = recipe.effective()
    if problem := refusal(recipe):
        raise ValueError(f"recipe: {problem}")
    head_dim = query.shape[-1]
    dim = kernel_head_dim(head_dim)
    if dim != head_dim:  # no recipe served here rotates head_dims that need padding
        query, key, value = (torch.nn.functional.pad(x, (0, dim - head_dim)) for x in (query, key, value))
    packed = cu_seq is not None
    tiling = tiling_of(query, key.shape[-3], CONFIGS[dim].warpgroups * 64, is_causal=is_causal, bottom_right=bottom_right,
                       key_lengths=key_lengths, cu_seq=cu_seq)
    lse_shape, head_stride, document_extra = lse_layout(query, packed)
    quantized = quantize_nvfp4(query, key, value, tiling, recipe, rotate=recipe.rotates(head_dim), packed=packed)
    scale = head_dim**-0.5 if scale is None else scale
    return Prepared(tiling, quantized, recipe, query, head_dim, key.shape[-2], head_stride, document_extra,
                    scale * math.log2(math.e), lse_shape)


def _wide(numbers: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What loads tiles of rows x columns of bfloat16 numbers."""
    return TensorDescriptor.from_tensor(numbers, [rows, columns], shared_layout(128, 16))


def run(prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Output (query's shape and dtype, contiguous) and natural-log lse, float32 [B, Hq, Sq] or [Hq, T]."""
    query, quantized, tiling, kv_heads = prepared.query, prepared.quantized, prepared.tiling, prepared.kv_heads
    lse = query.new_empty(prepared.lse_shape, dtype=torch.float32)
    if query.numel() == 0 or quantized.k.numel() == 0:
        return query.new_zeros(query.shape[:-1] + (prepared.head_dim,)), lse.fill_(-math.inf)
    heads, dim = query.shape[-2:]
    config = CONFIGS[dim]
    output = query.new_empty(query.shape)
    # The maximum is taken before scores are multiplied, so Q takes the sign of a negative scale.
    q = quantized.q if prepared.factor >= 0 else -quantized.q
    programs = min(processors(query.device), tiling.work.shape[0] * heads)
    constants: dict[str, Any] = {"THRESHOLD": prepared.recipe.max_threshold, "D": dim, "STAGES": config.stages,
                                 "WARPGROUPS": config.warpgroups, "REGISTERS": config.registers, "num_warps": 4}
    with torch.cuda.device(query.device):
        nvfp4.attention[(programs,)](
            _wide(q.view(-1, heads * dim), 64, dim), _wide(quantized.k.view(-1, kv_heads * dim), TILE, dim),
            descriptor(quantized.v_t.view(kv_heads * dim, -1), dim, TILE), output, lse, quantized.v_scale, tiling.work,
            tiling.count, heads=heads, groups=heads // kv_heads, head_stride=prepared.head_stride,
            document_extra=prepared.document_extra, max_tiles=tiling.k_tiles.shape[0], factor=abs(prepared.factor),
            GROUP=head_group(heads, kv_heads, 3 * quantized.v_t.numel() // kv_heads), **constants)
    return output if dim == prepared.head_dim else output[..., :prepared.head_dim].contiguous(), lse


__all__ = ["Prepared", "prepare", "run"]
