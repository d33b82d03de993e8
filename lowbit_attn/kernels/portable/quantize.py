"""Quantizer: one operand to what the attention kernels read, and to the codes that are saved for the backward.

Must equal `formats.quantize` bit for bit: rotation (`formats.hadamard`), prescale, then one scale per block. A program takes 32
tokens of one head, the longest run of tokens that shares a scale.

Outputs, in tiles of 128 padded tokens of one document (`kernels.tiling`), zero where there is no token:
    emulated    bf16 [heads, tiles * 128, D]: code times scale, exactly from 2^-133 on; V of running exponents without them.
    native      codes uint8 [heads, tiles * 128, D] (E4M3) or [.., D / 2] (E2M1, even channels low), scales uint8
                [heads, tiles * 128, D / 32] (E8M0) or [.., D / 16] (UE4M3). V contracts tokens: E2M1 packs two tokens a byte,
                [heads, tiles * 64, D], and its scales are [heads, tiles, D, 4].
    side        float32 [heads, tiles * 128]: for Q and K the power of two per token that multiplies UE4M3 scales (native); for V
                the exponent of running scales or 0, and 128 for a token whose block holds NaN or Inf, whose values are then 0.
    saved       codes uint8 in the input's shape and scale codes [B, H, S] or [H, T] (`ops.saved`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit_attn.formats import block_layout, element_format
from lowbit_attn.kernels.portable.numbers import (
    E4M3_BOUND,
    block_largest,
    element_constants,
    encode,
    exponent_bits,
    magnitude_bits,
    pack_columns,
    pack_rows,
    round_to_element,
    rule_constants,
    scale_code,
    spread,
    ue4m3,
)
from lowbit_attn.kernels.portable.targets import kernel_head_dim
from lowbit_attn.kernels.tiling import TILE, Tiling
from lowbit_attn.recipes import Operand

BLOCK = tl.constexpr(32)


@triton.constexpr_function
def rotation_norm(size):
    """What `formats.hadamard` multiplies a rotated block of this size by."""
    return size ** -0.5


@triton.jit
def rotate(x, HEAD_DIM: tl.constexpr):
    """`formats.hadamard` of x [R, D]: blocks of the binary digits of HEAD_DIM, strides 1, 2, 4, ..., then one multiplication."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    column = tl.arange(0, D)
    size = column * 0 + 1
    norm = column.to(tl.float32) * 0.0 + 1.0
    for bit in tl.static_range(8, -1, -1):
        if (HEAD_DIM >> bit) & 1:
            inside = column >= (HEAD_DIM >> (bit + 1)) << (bit + 1)
            size = tl.where(inside, 1 << bit, size)
            norm = tl.where(inside, rotation_norm(1 << bit), norm)
    for stage in tl.static_range(8):
        if (1 << stage) < D:
            a, b = tl.split(tl.permute(tl.reshape(x, (R, D // (2 << stage), 2, 1 << stage)), (0, 1, 3, 2)))
            y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, D))
            x = y if HEAD_DIM == D else tl.where((size > (1 << stage))[None, :], y, x)
    return x * norm[None, :]


@triton.jit
def _by_token(x, largest, M: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, BOUND_EXPONENT: tl.constexpr,
              BOUND_FRACTION: tl.constexpr, ZERO: tl.constexpr):
    """Rounded values, their scales' codes [R]: one power of two per token, from the bits of each token's block maximum."""
    code = scale_code(largest, BOUND_EXPONENT, BOUND_FRACTION, ZERO)
    value = round_to_element(x * exponent_bits(254 - tl.minimum(code, 254))[:, None], M, E, TOP)
    return value, code


@triton.jit(do_not_specialize=["scale_document", "scale_head", "heads", "count", "live", "factor"])
def quantize_kernel(x, out, scales, side, codes, saved_scales, maxima, documents, tiles, document_stride, token_stride, head_stride,
                    channel_stride, scale_document, scale_head, heads, count, live, factor, COLUMN: tl.constexpr,
                    D: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr, PRESCALE: tl.constexpr, LAYOUT: tl.constexpr,
                    ALONG_TOKENS: tl.constexpr, KEEP_SCALE: tl.constexpr, NATIVE: tl.constexpr, SAVE: tl.constexpr,
                    M: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, NAN: tl.constexpr,
                    BOUND_EXPONENT: tl.constexpr, BOUND_FRACTION: tl.constexpr, ZERO: tl.constexpr):
    """Programs: (tiles * 4, heads). COLUMN: 0 for queries, 2 for keys and values. live: documents whose rows are not zero.
    KEEP_SCALE: whether emulated values carry their scale."""
    tile = tl.program_id(0) // 4
    document = tl.load(tiles + tile)
    if document < 0:
        return
    entry = documents + document * 8
    start = tl.load(entry + COLUMN)
    length = tl.load(entry + COLUMN + 1)
    valid = tl.load(entry + 4) if COLUMN == 2 else tl.where(document < live, length, 0)
    head = tl.program_id(1)
    inner = tl.program_id(0) % 4 * BLOCK + tl.arange(0, BLOCK)  # in the tile
    position = (tile - tl.load(entry + (6 if COLUMN == 2 else 5))) * 128 + inner  # in the document
    channel = tl.arange(0, D)
    token = (start + position).to(tl.int64)
    pointers = (x + document.to(tl.int64) * document_stride + head.to(tl.int64) * head_stride
                + (token * token_stride)[:, None] + (channel.to(tl.int64) * channel_stride)[None, :])
    value = tl.load(pointers, mask=(position < valid)[:, None] & (channel < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
    if ROTATE:
        value = rotate(value, HEAD_DIM)
    if PRESCALE:
        value = value * factor

    row = (head * count + tile).to(tl.int64) * 128 + inner
    token_exponent = tl.full([BLOCK], 0.0, tl.float32)
    if LAYOUT == "mx32" and ALONG_TOKENS:
        code = scale_code(tl.max(magnitude_bits(value), 0), BOUND_EXPONENT, BOUND_FRACTION, ZERO)
        broken = tl.max((code == 255).to(tl.int32), 0) + inner * 0 > 0
        rounded = round_to_element(value * exponent_bits(254 - tl.minimum(code, 254))[None, :], M, E, TOP)
        scaled = rounded * exponent_bits(tl.minimum(code, 254))[None, :]
        if NATIVE:
            place = ((head * count + tile).to(tl.int64) * D + channel) * 4 + tl.program_id(0) % 4
            tl.store(scales + place, tl.minimum(code, 254).to(tl.uint8))
    elif LAYOUT == "mx32":
        code = scale_code(block_largest(value, 32), BOUND_EXPONENT, BOUND_FRACTION, ZERO)
        broken = tl.max((code == 255).to(tl.int32), 1) > 0
        rounded = round_to_element(value * spread(exponent_bits(254 - tl.minimum(code, 254)), 32), M, E, TOP)
        scaled = rounded * spread(tl.where(code == 255, float("nan"), exponent_bits(tl.minimum(code, 254))), 32)
        if NATIVE:
            group = tl.arange(0, D // 32)
            tl.store(scales + row[:, None] * (D // 32) + group[None, :], code.to(tl.uint8))
    elif LAYOUT == "nvfp16" or LAYOUT == "nvfp16_token":  # noqa: PLR1714  (Triton compiles no membership tests)
        largest = block_largest(value, 16)
        finite = tl.where(largest < 0x7F800000, largest, 0).to(tl.float32, bitcast=True)
        line = tl.full([BLOCK], 127, tl.int32)
        if LAYOUT == "nvfp16_token":
            line = scale_code(magnitude_bits(tl.math.div_rn(tl.max(finite, 1), TOP)), E4M3_BOUND[0], E4M3_BOUND[1], 127)
        level = exponent_bits(line)
        scale, code = ue4m3(finite, level[:, None], TOP)
        broken = tl.max((largest >= 0x7F800000).to(tl.int32), 1) > 0
        whole = spread(scale, 16)
        rounded = round_to_element(tl.where(whole == 0.0, 0.0, tl.math.div_rn(value, tl.where(whole == 0.0, 1.0, whole))), M, E,
                                   TOP)
        scaled = rounded * spread(tl.where(largest >= 0x7F800000, float("nan"), scale), 16)
        if NATIVE:
            group = tl.arange(0, D // 16)
            tl.store(scales + row[:, None] * (D // 16) + group[None, :],
                     tl.where(largest >= 0x7F800000, 0x7F, code).to(tl.uint8))
            tl.store(side + row, level)
    else:
        largest = tl.max(magnitude_bits(value), 1)
        if LAYOUT == "token_block":
            largest = tl.max(largest, 0) + inner * 0
        elif LAYOUT == "per_tensor":
            largest = tl.load(maxima + document * heads + head) + inner * 0
        rounded, code = _by_token(value, largest, M, E, TOP, BOUND_EXPONENT, BOUND_FRACTION, ZERO)
        broken = code == 255
        factors = exponent_bits(tl.minimum(code, 254))
        if COLUMN == 0 or not ALONG_TOKENS:
            factors = tl.where(broken, float("nan"), factors)
        scaled = rounded * factors[:, None] if KEEP_SCALE else rounded
        if not KEEP_SCALE:
            token_exponent = (code - 127).to(tl.float32)
        if NATIVE and ALONG_TOKENS:
            if KEEP_SCALE:
                shared = tl.max(tl.minimum(code, 254), 0)
                place = ((head * count + tile).to(tl.int64) * D + channel) * 4 + tl.program_id(0) % 4
                tl.store(scales + place, (shared + channel * 0).to(tl.uint8))
        elif NATIVE:
            group = tl.arange(0, D // 32)
            tl.store(scales + row[:, None] * (D // 32) + group[None, :], (code[:, None] + group[None, :] * 0).to(tl.uint8))
        if SAVE:
            exists = position < length
            byte = tl.where(broken[:, None], NAN, encode(rounded, M, E, BITS)).to(tl.uint8)
            tl.store(codes + ((token * heads + head) * HEAD_DIM)[:, None] + channel[None, :], byte,
                     mask=exists[:, None] & (channel < HEAD_DIM)[None, :])
            tl.store(saved_scales + document.to(tl.int64) * scale_document + head * scale_head + token, code.to(tl.uint8),
                     mask=exists)
    if ALONG_TOKENS:
        scaled = tl.where(broken[:, None], 0.0, scaled)
        rounded = tl.where(broken[:, None], 0.0, rounded)
        tl.store(side + row, tl.where(broken, 128.0, token_exponent))
    if not NATIVE:
        tl.store(out + row[:, None] * D + channel[None, :], scaled.to(tl.bfloat16))
    elif BITS == 8:
        tl.store(out + row[:, None] * D + channel[None, :], encode(rounded, M, E, BITS).to(tl.uint8))
    elif ALONG_TOKENS:
        half = tl.program_id(0) % 4 * 16 + tl.arange(0, 16)
        place = ((head * count + tile).to(tl.int64) * 64 + half)[:, None] * D + channel[None, :]
        tl.store(out + place, pack_rows(encode(rounded, M, E, BITS)))
    else:
        pair = tl.arange(0, D // 2)
        tl.store(out + row[:, None] * (D // 2) + pair[None, :], pack_columns(encode(rounded, M, E, BITS)))


@triton.jit(do_not_specialize=["heads"])
def maxima_kernel(x, maxima, documents, tiles, document_stride, token_stride, head_stride, channel_stride, heads,
                  D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Bits of the largest magnitude of every document and head, for one scale per tensor. Programs: (key tiles, heads)."""
    tile = tl.program_id(0)
    document = tl.load(tiles + tile)
    if document < 0:
        return
    entry = documents + document * 8
    start = tl.load(entry + 2)
    valid = tl.load(entry + 4)
    head = tl.program_id(1)
    channel = tl.arange(0, D)
    first = (tile - tl.load(entry + 6)) * 128
    largest = tl.full([BLOCK], 0, tl.int32)
    for part in range(4):
        position = first + part * BLOCK + tl.arange(0, BLOCK)
        pointers = (x + document.to(tl.int64) * document_stride + head.to(tl.int64) * head_stride
                    + ((start + position).to(tl.int64) * token_stride)[:, None] + (channel.to(tl.int64) * channel_stride)[None, :])
        value = tl.load(pointers, mask=(position < valid)[:, None] & (channel < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(magnitude_bits(value), 1))
    tl.atomic_max(maxima + document * heads + head, tl.max(largest, 0))


@dataclass(frozen=True)
class Quantized:
    """What `quantize` wrote; tensors that the mode has no use for are None. Shapes at the top of this file."""

    values: Tensor
    scales: Tensor | None
    side: Tensor | None
    codes: Tensor | None
    saved_scales: Tensor | None


@dataclass(frozen=True)
class Work:
    """How an operand is quantized. `column`: 0 for queries, 2 for keys and values (their columns of `Tiling.documents`)."""

    operand: Operand
    column: int
    along_tokens: bool = False
    rotate: bool = False
    prescale: float = 1.0
    top: float = 0.0
    keep_scale: bool = True
    native: bool = False
    save: bool = False


def strides(x: Tensor, packed: bool) -> tuple[int, int, int, int]:
    """Strides of document (beside those of its tokens, which are counted through), token, head and channel, in elements."""
    *batch, token, head, channel = x.stride()
    return (0 if packed else batch[0] - x.shape[1] * token), token, head, channel


def quantize(x: Tensor, tiling: Tiling, work: Work, *, packed: bool) -> Quantized:
    """Quantize x [B, S, H, D] or packed [T, H, D], any float dtype and strides, of `tiling`'s documents.

    Tokens at or past a document's valid ones count as zero, as do the rows of no document; their saved codes are 0.
    """
    heads, head_dim = x.shape[-2:]
    dim, table = kernel_head_dim(head_dim), tiling.q_tiles if work.column == 0 else tiling.k_tiles
    count = table.numel()
    operand, element, layout = work.operand, element_format(work.operand.element), block_layout(work.operand.layout)

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    values, scales, side, codes, saved_scales = empty(heads, count * TILE, dim, dtype=torch.bfloat16), None, None, None, None
    if work.native:
        packing = 8 // element.bits
        values = empty(heads, count * TILE // packing, dim) if work.along_tokens else empty(heads, count * TILE, dim // packing)
        group = 16 if layout.scale == "ue4m3" else 32
        scales = empty(heads, count, dim, TILE // 32) if work.along_tokens else empty(heads, count * TILE, dim // group)
    if work.along_tokens or (work.native and layout.scale == "ue4m3"):
        side = empty(heads, count * TILE, dtype=torch.float32)
    if work.save:
        codes, saved_scales = empty(*x.shape), empty(*x.shape[:-3], heads, x.shape[-3])
    result = Quantized(values, scales, side, codes, saved_scales)
    if count == 0 or heads == 0:
        return result
    maxima = _maxima(x, tiling, packed) if operand.layout == "per_tensor" else None
    constants: dict[str, Any] = {
        "COLUMN": work.column, "D": dim, "HEAD_DIM": head_dim, "ROTATE": work.rotate, "PRESCALE": work.prescale != 1.0,
        "LAYOUT": operand.layout, "ALONG_TOKENS": work.along_tokens, "KEEP_SCALE": work.keep_scale, "NATIVE": work.native,
        "SAVE": work.save, "BITS": element.bits, "NAN": element.nan_code or 0, "ZERO": layout.zero_exponent + 127,
        **element_constants(operand.element), **rule_constants(operand, work.top)}
    unused = tiling.count
    quantize_kernel[(count * 4, heads)](
        x, values, *(unused if y is None else y for y in (scales, side, codes, saved_scales, maxima)), tiling.documents, table,
        *strides(x, packed), *((0, x.shape[0]) if packed else (x.shape[1] * (heads - 1), x.shape[1])), heads, count,
        tiling.documents.shape[0] - packed, work.prescale, **constants, num_warps=4 if dim < 256 else 8, enable_fp_fusion=False)
    return result


def _maxima(x: Tensor, tiling: Tiling, packed: bool) -> Tensor:
    heads, head_dim = x.shape[-2:]
    maxima = torch.zeros((tiling.documents.shape[0], heads), dtype=torch.int32, device=x.device)
    maxima_kernel[(tiling.k_tiles.numel(), heads)](
        x, maxima, tiling.documents, tiling.k_tiles, *strides(x, packed), heads, D=kernel_head_dim(head_dim), HEAD_DIM=head_dim,
        num_warps=4)
    return maxima


__all__ = ["Quantized", "Work", "quantize"]
