"""The launches of one attention call: quantize Q, K and V, then attend. One path for dense, GQA, key lengths and packed inputs.

Dense inputs are [B, S, H, D], packed ones [T, H, D], any strides. Nothing here waits for the device. Whoever runs the launches,
`loader` on a GPU or `emulate` on a CPU, gets the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn.kernels.cdna4.arguments import AttentionArgs, Launch, QuantizeArgs, pointer
from lowbit_attn.recipes import Recipe, resolve

Run = Callable[[Launch], None]

TILE, QUERY_TILE, CHANNELS = 128, 256, 128
SCALES = 1024
"""Bytes for a key tile's scales, half of them padding."""
LARGEST_KEYS = (2**31 - 1) // (16384 + SCALES) * TILE
"""A head's packed keys are addressed by 31 bits."""
LOG2E = 1.4426950408889634
_BITS = {"e4m3": 8, "e2m3": 6, "e2m1": 4}
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_QUANTIZE_ROWS, _QUANTIZE_THREADS, _WIDE_THREADS = 64, 256, 512

RECIPES = {"fused_mxfp8": "mxfp8", "fused_mxfp6": "mxfp6", "fused_mxfp4": "mxfp4"}
"""Recipe names and the suffixes of their kernels."""


def kernel_suffix(recipe: Recipe) -> str | None:
    """The kernels that compute a recipe, or None: the recipe is one of RECIPES with nothing changed."""
    return next((suffix for name, suffix in RECIPES.items() if recipe.effective() == resolve(name)), None)


@dataclass(frozen=True)
class Packed:
    """Operands as the attention kernel reads them (layout.h): bytes per 32 rows of Q, per 128 keys of K and V.

    `broken` [B * Hkv] is not 0 where keys hold NaN or Inf; `peak` [B * Hkv] has the bits of V's largest magnitude (MXFP8).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    broken: Tensor
    peak: Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of one call. `sequences` is the batch size, or the number of documents; `queries` and `keys` bound a sequence's."""

    sequences: int
    queries: int
    keys: int
    query_heads: int
    kv_heads: int
    channels: int

    @property
    def query_tiles(self) -> int:
        """Workgroups of the attention kernel for a sequence and head."""
        return -(-self.queries // QUERY_TILE)

    @property
    def key_tiles(self) -> int:
        """Key tiles of the longest sequence."""
        return -(-self.keys // TILE)


def _bits(recipe: Recipe) -> tuple[int, int, bool]:
    """Bits of Q's and K's codes, of V's, and whether V has block scales."""
    return _BITS[recipe.qk.element], _BITS[recipe.v.element], recipe.v.layout == "mx32"


def _quantize_args(x: Tensor, packed: Tensor, found: Tensor, blocks: int, *, starts: Tensor | None, lengths: Tensor | None,
                   prescale: float = 1.0) -> QuantizeArgs:
    batch_stride = x.stride(0) if x.ndim == 4 else 0
    row_stride, head_stride, channel_stride = x.stride()[-3:]
    return QuantizeArgs(pointer(x), pointer(packed), pointer(found), pointer(starts), pointer(lengths), batch_stride, row_stride,
                        head_stride, channel_stride, x.shape[-3], x.shape[-2], x.shape[-1], _TYPES[x.dtype], blocks, prescale)


def quantize(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, shape: Shape, run: Run, *, scale: float,
             key_lengths: Tensor | None, cu_seq: tuple[Tensor, Tensor] | None) -> Packed:
    """Pack the operands; see Packed."""
    suffix = kernel_suffix(recipe)
    narrow, v_bits, block_scales = _bits(recipe)
    heads, kv_heads = shape.sequences * shape.query_heads, shape.sequences * shape.kv_heads
    rows = shape.query_tiles * QUERY_TILE

    def bytes_of(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=query.device)

    packed = Packed(bytes_of(heads, rows // 32, narrow * 512 + 128), bytes_of(kv_heads, shape.key_tiles, narrow * 2048 + SCALES),
                    bytes_of(kv_heads, shape.key_tiles, v_bits * 2048 + (SCALES if block_scales else 0)),
                    torch.zeros(kv_heads, dtype=torch.int32, device=query.device),
                    torch.zeros(kv_heads, dtype=torch.int32, device=query.device))
    q_starts, k_starts = cu_seq or (None, None)

    def launch(kernel: str, groups: int, threads: int, args: QuantizeArgs, *tensors: Tensor | None) -> None:
        run(Launch("quantize", kernel, groups, threads, args, tuple(x for x in tensors if x is not None)))

    blocks = rows // _QUANTIZE_ROWS
    args = _quantize_args(query, packed.query, packed.broken, blocks, starts=q_starts, lengths=None, prescale=scale * LOG2E)
    launch(f"query_{suffix}", heads * blocks, _QUANTIZE_THREADS, args, query, packed.query, packed.broken, q_starts)
    blocks = shape.key_tiles * TILE // _QUANTIZE_ROWS
    args = _quantize_args(key, packed.key, packed.broken, blocks, starts=k_starts, lengths=key_lengths)
    launch(f"key_{suffix}", kv_heads * blocks, _QUANTIZE_THREADS, args, key, packed.key, packed.broken, k_starts, key_lengths)
    args = _quantize_args(value, packed.value, packed.peak, shape.key_tiles, starts=k_starts, lengths=key_lengths)
    tensors = (value, packed.value, packed.peak, k_starts, key_lengths)
    if not block_scales:
        launch("value_peak", kv_heads * shape.key_tiles, _WIDE_THREADS, args, *tensors)
    launch(f"value_{suffix}", kv_heads * shape.key_tiles, _WIDE_THREADS, args, *tensors)
    return packed


def _nothing_seen(query: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Output and lse of rows that see no key."""
    heads = (shape.sequences, shape.query_heads) if query.ndim == 4 else (shape.query_heads,)
    lse = torch.full((*heads, query.shape[-3]), -torch.inf, dtype=torch.float32, device=query.device)
    return torch.zeros(query.shape, dtype=query.dtype, device=query.device), lse


def attend(packed: Packed, query: Tensor, keys: int, recipe: Recipe, shape: Shape, run: Run, *, key_lengths: Tensor | None,
           cu_seq: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Output in query's shape and dtype, and lse; `keys` are key's rows. Rows of no document are zero, with lse -inf."""
    dense = cu_seq is None
    rows = query.shape[-3]
    if dense:   # every row is written
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty((shape.sequences, shape.query_heads, rows), dtype=torch.float32, device=query.device)
    else:
        output, lse = _nothing_seen(query, shape)
    q_starts, k_starts = cu_seq or (None, None)
    args = AttentionArgs(pointer(packed.query), pointer(packed.key), pointer(packed.value), pointer(packed.broken),
                         pointer(packed.peak), pointer(q_starts), pointer(k_starts), pointer(key_lengths), pointer(output),
                         pointer(lse), lse.stride(0) if dense else 0, lse.stride(-2), rows, keys, shape.query_heads, shape.kv_heads,
                         shape.query_tiles, shape.key_tiles, shape.channels, _TYPES[query.dtype])
    tensors = (packed.query, packed.key, packed.value, packed.broken, packed.peak, q_starts, k_starts, key_lengths, output, lse)
    run(Launch("attention", f"attention_{kernel_suffix(recipe)}", shape.sequences * shape.query_heads * shape.query_tiles,
               _WIDE_THREADS, args, tuple(x for x in tensors if x is not None)))
    return output, lse


def forward(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, run: Run, *, scale: float | None = None,
            key_lengths: Tensor | None = None, cu_seq: tuple[Tensor, Tensor] | None = None,
            longest: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Attention of query over key and value; `cu_seq` and `longest` (upper bounds) are query's and key's of packed inputs.

    Returns output in query's shape and dtype and lse float32 [B, Hq, Sq] ([Hq, T]). ValueError names a head_dim above 128.
    """
    channels = query.shape[-1]
    if channels > CHANNELS:
        raise ValueError(f"head_dim: got {channels}; accepted by backend 'cdna4': up to {CHANNELS}")
    if key.shape[-3] > LARGEST_KEYS:
        raise ValueError(f"keys: got {key.shape[-3]}; accepted by backend 'cdna4': up to {LARGEST_KEYS}")
    if kernel_suffix(recipe) is None:
        raise ValueError(f"recipe: got {recipe.canonical!r}; accepted by backend 'cdna4': {', '.join(RECIPES)}")
    scale = channels**-0.5 if scale is None else scale
    sequences = query.shape[0] if cu_seq is None else cu_seq[0].shape[0] - 1
    queries, keys = (query.shape[-3], key.shape[-3]) if longest is None else longest
    shape = Shape(sequences, min(queries, query.shape[-3]), min(keys, key.shape[-3]), query.shape[-2], key.shape[-2], channels)
    lengths = None if key_lengths is None else key_lengths.to(torch.int32).contiguous()
    starts = None if cu_seq is None else (cu_seq[0].to(torch.int32).contiguous(), cu_seq[1].to(torch.int32).contiguous())
    if 0 in (shape.sequences, shape.queries, shape.keys, shape.query_heads, channels):
        return _nothing_seen(query, shape)
    packed = quantize(query, key, value, recipe, shape, run, scale=scale, key_lengths=lengths, cu_seq=starts)
    return attend(packed, query, key.shape[-3], recipe, shape, run, key_lengths=lengths, cu_seq=starts)
