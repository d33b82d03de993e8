"""Host side of the Hopper forward: `prepare` tiles and quantizes, `run` attends. One path for dense and packed inputs.

Dense inputs are [B, S, H, D], packed ones [T, H, D], any strides. Nothing here waits for the device.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowbit_attn.kernels.hopper import fast, forward
from lowbit_attn.kernels.hopper.quantize import Quantized, quantize_qkv
from lowbit_attn.kernels.hopper.records import LOWEST_FOLD, Records, Sizes, tile_records
from lowbit_attn.kernels.tiling import TILE, Tiling, lse_layout, tiling_of
from lowbit_attn.recipes import DIRECT_UNIT, SHARED_FOLD, Recipe

HEAD_DIMS = (64, 128, 256)
"""What the kernels are compiled for; other head_dims are padded with zero channels."""

L2_BUDGET = 32 << 20
"""Bytes of K and V codes that the work order keeps in flight, well under the 50 MiB of L2."""


@dataclass(frozen=True)
class Config:
    """Compile-time choices per head_dim: ring stages, tiles per promotion, consumer warpgroups, registers of each thread."""

    stages: int
    promote: int
    warpgroups: int
    registers: int


EXACT = {64: Config(3, 16, 2, 240), 128: Config(3, 16, 2, 240), 256: Config(2, 16, 1, 240)}
FAST = {64: Config(2, 16, 3, 160), 128: Config(2, 16, 3, 160), 256: Config(2, 16, 1, 240)}
TRAINING_PROMOTE = 4
"""Tiles per promotion where a backward follows: dS subtracts D = sum(O dO), which inherits what the sums of O lose (1.3 % of values
with a mean at 16 tiles, 0.4 % at 4), and dQ then gets that part of K's mean (docs/training-torchtitan.md)."""


def config_of(recipe: Recipe, head_dim: int, trains: bool = False) -> Config:
    """The compile-time choices for a recipe and a kernel head_dim."""
    config = (FAST if recipe.exponential == "direct_u8" else EXACT)[head_dim]
    return replace(config, promote=TRAINING_PROMOTE) if trains else config


@dataclass(frozen=True)
class Prepared:
    """Quantized operands and tables of one call. `head_dim` is the caller's, before padding. `sizes` locates row r of head h in
    the per-token side tensors: h * head_stride + document * document_extra + r."""

    tiling: Tiling
    quantized: Quantized
    records: Records
    recipe: Recipe
    query: Tensor
    head_dim: int
    kv_heads: int
    keys: int
    sizes: Sizes
    lse_shape: tuple[int, ...]
    negative: bool
    """Whether the scale is negative. The maximum is taken before the scores are multiplied, so Q's codes take its sign."""


def kernel_head_dim(head_dim: int) -> int:
    """The compiled head_dim that serves `head_dim`."""
    return next(d for d in HEAD_DIMS if d >= head_dim)


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def prepare(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, scale: float | None = None, is_causal: bool = False,
            bottom_right: bool = False, key_lengths: Tensor | None = None, cu_seq: tuple[Tensor, Tensor] | None = None,
            save: bool = False) -> Prepared:
    """Tile and quantize one call; with `cu_seq` (query's and key's boundaries) the inputs are packed."""
    recipe = recipe.effective()
    head_dim = query.shape[-1]
    dim = kernel_head_dim(head_dim)
    if dim != head_dim:
        recipe = replace(recipe, rotation="always" if recipe.rotates(head_dim) else "none")
        query, key, value = (torch.nn.functional.pad(x, (0, dim - head_dim)) for x in (query, key, value))
    rows = config_of(recipe, dim).warpgroups * 64
    packed = cu_seq is not None
    keys = key.shape[-3]
    tiling = tiling_of(query, keys, rows, is_causal=is_causal, bottom_right=bottom_right, key_lengths=key_lengths, cu_seq=cu_seq)
    lse_shape, head_stride, document_extra = lse_layout(query, packed)
    heads, kv_heads = query.shape[-2], key.shape[-2]
    quantized = quantize_qkv(query, key, value, tiling, recipe, save=save, packed=packed)
    scale = head_dim**-0.5 if scale is None else scale
    direct = recipe.exponential == "direct_u8"
    sizes = Sizes(heads, heads // max(1, kv_heads), head_stride, document_extra, tiling.k_tiles.shape[0],
                  head_group(heads, kv_heads, 2 * quantized.k_codes.numel() // max(1, kv_heads)),
                  abs(scale) * math.log2(math.e) * (DIRECT_UNIT if direct else 1.0))
    records = tile_records(tiling, quantized.k_group, quantized.v_group, sizes, direct=direct)
    return Prepared(tiling, quantized, records, recipe, query, head_dim, kv_heads, keys, sizes, lse_shape, scale < 0)


def head_group(heads: int, kv_heads: int, bytes_per_kv_head: int, budget: int = L2_BUDGET) -> int:
    """Query heads that run side by side: whole groups of a key/value head, as many as L2 holds, dividing the heads."""
    if kv_heads == 0:
        return 1
    fitting = max(1, min(kv_heads, budget // max(1, bytes_per_kv_head)))
    while kv_heads % fitting:
        fitting -= 1
    return heads // kv_heads * fitting


@lru_cache(maxsize=16)
def shared_layout(swizzle: int, bits: int, rank: int = 2) -> Any:
    """How TMA lays tiles out in shared memory; kept, because making one takes as long as a descriptor."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def descriptor(codes: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What loads tiles of rows x columns of E4M3 codes."""
    return TensorDescriptor.from_tensor(codes.view(torch.float8_e4m3fn), [rows, columns], shared_layout(min(128, columns), 8))


def run(prepared: Prepared) -> tuple[Tensor, ...]:
    """Output (query's shape and dtype, contiguous) and natural-log lse, float32 [B, Hq, Sq] or [Hq, T]; from recipes that train
    also `row_top` of `ops.saved`, in lse's shape."""
    query, quantized, recipe = prepared.query, prepared.quantized, prepared.recipe
    lse = query.new_empty(prepared.lse_shape, dtype=torch.float32)
    row_top = torch.empty_like(lse, dtype=torch.uint8)
    if query.numel() == 0 or prepared.keys == 0 or prepared.kv_heads == 0:
        return query.new_zeros(query.shape), lse.fill_(-math.inf), row_top.zero_()
    dim = kernel_head_dim(prepared.head_dim)
    config = config_of(recipe, dim, trains=quantized.v_codes is not None)
    output = query.new_empty(query.shape)
    sizes = prepared.sizes
    q_codes = quantized.q_codes.view(-1, sizes.heads * dim)
    if prepared.negative:
        q_codes = q_codes ^ 0x80
    k_codes = quantized.k_codes.view(-1, prepared.kv_heads * dim)
    v_codes = quantized.v_t.view(prepared.kv_heads * dim, -1)
    tiling = prepared.tiling
    programs = min(processors(query.device), tiling.work.shape[0] * sizes.heads)
    shared: dict[str, Any] = {
        "P_LOG2": recipe.p_log2_scale, "LOWEST": LOWEST_FOLD, "D": dim, "STAGES": config.stages, "PROMOTE": config.promote,
        "WARPGROUPS": config.warpgroups, "REGISTERS": config.registers, "num_warps": 4}
    descriptors = (descriptor(q_codes, 64, dim), descriptor(k_codes, TILE, dim), descriptor(v_codes, dim, TILE))
    records = prepared.records
    with torch.cuda.device(query.device):
        if records.weights is not None:
            fast.attention[(programs,)](
                *descriptors, descriptor(records.weights, 8, TILE), output, lse, quantized.q_scales, records.tiles,
                quantized.v_group, records.quiet, tiling.work, tiling.count, records.sizes,
                THRESHOLD=recipe.max_threshold * DIRECT_UNIT, SHARED=SHARED_FOLD, **shared)
        else:
            forward.attention[(programs,)](
                *descriptors, output, lse, row_top, quantized.q_scales, records.tiles, quantized.v_group, tiling.work, tiling.count,
                heads=sizes.heads, groups=sizes.groups, head_stride=sizes.head_stride, document_extra=sizes.document_extra,
                max_tiles=sizes.max_tiles, factor=sizes.factor, GROUP=sizes.group, THRESHOLD=recipe.max_threshold, **shared)
    output = output if dim == prepared.head_dim else output[..., :prepared.head_dim].contiguous()
    return (output, lse) if records.weights is not None else (output, lse, row_top)


def saved_for_backward(prepared: Prepared) -> tuple[Tensor, ...]:
    """Codes and scale codes of Q, K and V as `ops.saved` lays them out; needs `save`."""
    q = prepared.quantized
    if q.v_codes is None or q.v_scales is None:
        raise ValueError("save: got False; accepted: True where codes are read")
    codes = (q.q_codes, q.q_scales, q.k_codes, q.k_scales, q.v_codes, q.v_scales)
    return tuple(x[..., :prepared.head_dim].contiguous() if i % 2 == 0 else x for i, x in enumerate(codes))


__all__ = ["Config", "Prepared", "config_of", "prepare", "run", "saved_for_backward"]
