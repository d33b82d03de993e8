"""Host side of the forward for operands in blocks of 32 along their contraction axis (`fused`): dense or packed, never causal.

Dense inputs are [B, S, H, D], packed ones [T, H, D], any strides. Nothing here waits for the device.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_attn.formats import hadamard
from lowbit_attn.kernels.hopper import fused
from lowbit_attn.kernels.hopper.attention import Config, descriptor, head_group, kernel_head_dim, processors
from lowbit_attn.kernels.hopper.grids import GRIDS, Grid
from lowbit_attn.kernels.hopper.quantize_blocks import Quantized, quantize_blocks
from lowbit_attn.kernels.tiling import TILE, Tiling, lse_layout, tiling_of
from lowbit_attn.recipes import Recipe

LOG2E = math.log2(math.e)

FROZEN = {64: Config(2, 16, 3, 160), 128: Config(2, 16, 3, 160), 256: Config(2, 16, 1, 240)}
ONLINE = {64: Config(3, 16, 2, 240), 128: Config(3, 16, 2, 240), 256: Config(2, 16, 1, 240)}


@dataclass(frozen=True)
class Prepared:
    """Quantized operands and tables of one call. `head_dim` is the caller's, before padding; row r of head h has its scale at
    h * head_stride + document * document_extra + r."""

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


def config_of(recipe: Recipe, head_dim: int) -> Config:
    """The compile-time choices for a recipe and a kernel head_dim."""
    return (FROZEN if recipe.maximum == "frozen" else ONLINE)[head_dim]


def prepare(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, scale: float | None = None, is_causal: bool = False,
            bottom_right: bool = False, key_lengths: Tensor | None = None, cu_seq: tuple[Tensor, Tensor] | None = None,
            save: bool = False, count: bool = False) -> Prepared:
    """Tile and quantize one call; with `cu_seq` (query's and key's boundaries) the inputs are packed. `count`: see
    `quantize_blocks`. ValueError for a causal mask and for codes to save, which no recipe served here has."""
    if is_causal or bottom_right or save:
        raise ValueError(f"is_causal, bottom_right, save: got {is_causal}, {bottom_right}, {save} with {recipe.canonical}; "
                         "accepted: False")
    head_dim = query.shape[-1]
    dim = kernel_head_dim(head_dim)
    scale = head_dim**-0.5 if scale is None else scale
    rotate = recipe.rotates(head_dim)
    shape, packed = query.shape, cu_seq is not None
    if dim != head_dim:
        if rotate:  # in blocks of its own powers of two
            query, key, rotate = hadamard(query), hadamard(key), False
        query, key, value = (torch.nn.functional.pad(x, (0, dim - head_dim)) for x in (query, key, value))
    rows = config_of(recipe, dim).warpgroups * 64
    tiling = tiling_of(query, key.shape[-3], rows, key_lengths=key_lengths, cu_seq=cu_seq)
    lse_shape, head_stride, document_extra = lse_layout(query, packed)
    prescale = scale * LOG2E if recipe.q_prescale else 1.0
    quantized = quantize_blocks(query, key, value, tiling, recipe, scale=prescale, rotate=rotate, packed=packed, count=count)
    factor = 2.0**-quantized.shift * (1.0 if recipe.q_prescale else scale * LOG2E)
    output = value.new_empty(shape)  # value's dtype is the caller's: rotated queries are float32
    return Prepared(tiling, quantized, recipe, output, head_dim, key.shape[-2], head_stride, document_extra, factor,
                    lse_shape)


def _pair(value: float) -> int:
    """The bits of a float16, twice."""
    return struct.unpack("<H", struct.pack("<e", value))[0] * 0x10001


def run(prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Output (the inputs' dtype, contiguous) and natural-log lse, float32 [B, Hq, Sq] or [Hq, T]."""
    output, quantized, recipe, tiling = prepared.query, prepared.quantized, prepared.recipe, prepared.tiling
    heads, kv_heads = output.shape[-2], prepared.kv_heads
    lse = output.new_empty(prepared.lse_shape, dtype=torch.float32)
    k_tiles = tiling.k_tiles.shape[0]
    if output.numel() == 0 or k_tiles == 0 or kv_heads == 0:
        return output.zero_(), lse.fill_(-math.inf)
    dim = kernel_head_dim(prepared.head_dim)
    if dim != prepared.head_dim:
        output = output.new_empty(*output.shape[:-1], dim)
    config = config_of(recipe, dim)
    frozen = recipe.maximum == "frozen"
    grid = GRIDS[recipe.p.element, recipe.p.rule] if recipe.p.layout == "mx32" else Grid(0, 0.0, 0)  # whole rows: E4M3's own
    # A negative scale that is not part of Q turns Q's codes around: maxima are taken before scores are multiplied.
    q = quantized.q if prepared.factor >= 0 else quantized.q ^ 0x80
    programs = min(processors(output.device), tiling.work.shape[0] * heads)
    constants: dict[str, Any] = {
        "FROZEN": frozen, "EXACT_SUM": recipe.row_sum == "exact", "P_KIND": recipe.p.element, "P_BUMP": grid.bump,
        "P_MAGIC": _pair(grid.magic), "P_LOWEST": grid.lowest, "D": dim, "STAGES": config.stages, "PROMOTE": config.promote,
        "WARPGROUPS": config.warpgroups, "REGISTERS": config.registers}
    with torch.cuda.device(output.device):
        fused.attention[(programs,)](
            descriptor(q.view(-1, heads * dim), 64, dim), descriptor(quantized.k.view(-1, kv_heads * dim), TILE, dim),
            descriptor(quantized.v_t.view(kv_heads * dim, -1), dim, TILE), output, lse, quantized.q_scales, quantized.k_group,
            quantized.v_scale, tiling.work, tiling.count, heads=heads, groups=heads // kv_heads, head_stride=prepared.head_stride,
            document_extra=prepared.document_extra, max_tiles=k_tiles, factor=abs(prepared.factor) * (8.0 if frozen else 1.0),
            GROUP=head_group(heads, kv_heads, 2 * quantized.k.numel() // kv_heads), num_warps=4, **constants)
    return output if dim == prepared.head_dim else output[..., :prepared.head_dim].contiguous(), lse


__all__ = ["Prepared", "prepare", "run"]
