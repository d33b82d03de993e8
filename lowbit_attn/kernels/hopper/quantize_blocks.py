"""Q, K and V in blocks of 32 along their contraction axis, as E4M3 operands of the forward (`fused`).

Equals `reference.operands` bit for bit: `working_qk`, then `formats.quantize` with layout mx32 (V: along keys, or per_tensor). What
is written is not the codes and scales but the numbers that they stand for, each as an E4M3 code relative to a power of two:

    q         uint8 [tokens, Hq, D], relative to 2^q_scales (E8M0 codes [B, Hq, S] or [Hq, T])
    k         uint8 [128 k_tiles, Hkv, D], keys in the order that `fused` gives, relative to k_group [Hkv, 4 k_tiles] (float32 2^e)
    v_t       uint8 [Hkv, D, 128 k_tiles], in that of V, relative to v_scale [documents, Hkv, D] (float32 2^e)

E2M3 and E2M1 numbers are E4M3 numbers, so nothing is lost while a block's scale is within some doublings of the largest under its
reference (`SHIFTS`); below, a number is off by at most 2^-9 of its operand's unit. `count` counts those. A block with NaN or Inf
has codes of 0 and NaN in q_scales (255) or k_group; V's has NaN codes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit_attn.formats import element_format
from lowbit_attn.kernels.hopper.inline import pack_e4m3
from lowbit_attn.kernels.hopper.quantize import DTYPES, bound, mode_of, strides_of
from lowbit_attn.kernels.hopper.quantize_tile import (
    GROUP,
    ROWS,
    block_largest,
    halves_of,
    load_channels,
    nan_maximum,
    per_lane,
    power,
    scale_code,
    store_codes,
    store_group,
)
from lowbit_attn.kernels.tiling import TILE, Tiling
from lowbit_attn.recipes import Operand, Recipe

HEAD_DIMS = (64, 128, 256)


@gluon.jit
def block_maxima(even, odd, SIZE: gl.constexpr):
    """[128, n] twice -> the largest magnitude of each SIZE channels, [128, 2 n / SIZE]; NaN if it has one."""
    x = nan_maximum(gl.abs(even), gl.abs(odd))
    return gl.reduce(x.reshape([ROWS, 2 * x.shape[1] // SIZE, SIZE // 2]), 2, nan_maximum)


@gluon.jit
def rounded(x, MANTISSA: gl.constexpr, MIN_EXPONENT: gl.constexpr, LARGEST: gl.constexpr):
    """`formats.round_to_element`: nearest even, subnormals included, saturating."""
    bits = x.to(gl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(gl.float32, bitcast=True)
    # A float32 whose spacing is that of the grid around x: added and taken away it leaves x rounded.
    magic = gl.maximum(bits & 0x7F800000, (127 + MIN_EXPONENT) << 23) + ((23 - MANTISSA) << 23)
    shifted = magic.to(gl.float32, bitcast=True)
    result = gl.minimum((magnitude + shifted) - shifted, LARGEST)
    return (result.to(gl.int32, bitcast=True) | (bits & -2147483648)).to(gl.float32, bitcast=True)


@gluon.jit
def _inexact(x):
    """How many numbers are none of E4M3's: those below its normal ones that are no multiples of its smallest."""
    magic: gl.constexpr = 1.5 * 2.0**14
    tiny = gl.abs(x) < 0.015625
    return gl.sum(gl.sum((tiny & ((x + magic) - magic != x)).to(gl.int32), 1), 0)


@gluon.jit
def _operand(x, block_power, unit, MANTISSA: gl.constexpr, MIN_EXPONENT: gl.constexpr, LARGEST: gl.constexpr):
    """x [128, n] rounded with its blocks' scales, times `unit`; block_power, 2^-e, and unit are [128, n / 16]."""
    BLOCKS: gl.constexpr = block_power.shape[1]
    y = x.reshape([ROWS, BLOCKS, 16])
    factor = gl.expand_dims(gl.convert_layout(block_power, gl.SliceLayout(2, y.type.layout)), 2)
    back = gl.expand_dims(gl.convert_layout(unit, gl.SliceLayout(2, y.type.layout)), 2)
    return (rounded(y * factor, MANTISSA, MIN_EXPONENT, LARGEST) * back).reshape([ROWS, BLOCKS * 16])


@gluon.jit
def _code_words(even, odd):
    """Channels [128, n] twice -> words of four E4M3 codes [128, n / 2]."""
    a, c = gl.split(gl.reshape(even, [ROWS, even.shape[1] // 2, 2]))
    b, d = gl.split(gl.reshape(odd, [ROWS, odd.shape[1] // 2, 2]))
    return pack_e4m3(a, b, c, d)


@gluon.jit
def _power_of(exponent):
    """2^exponent for -252 .. 127 as a product of two float32, exact where the result is."""
    half = exponent // 2
    return ((half + 127) << 23).to(gl.float32, bitcast=True) * ((exponent - half + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit(do_not_specialize=["q_document", "q_token", "q_head", "q_channel", "k_document", "k_token", "k_head", "k_channel",
                              "q_scale_document", "q_scale_head", "q_heads", "kv_heads", "q_count", "k_count", "query_documents",
                              "prescale"])
def _quantize_qk(q, k, q_codes, q_scales, k_codes, k_group, inexact, documents, q_tiles, k_tiles, q_document, q_token, q_head,
                q_channel, k_document, k_token, k_head, k_channel, q_scale_document, q_scale_head, q_heads, kv_heads, q_count,
                k_count, query_documents, prescale, D: gl.constexpr, ROTATE: gl.constexpr, PRESCALE: gl.constexpr,
                MODE: gl.constexpr, DTYPE: gl.constexpr, BOUND: gl.constexpr, ELEMENT: gl.constexpr, Q_SHIFT: gl.constexpr,
                K_SHIFT: gl.constexpr, COUNT: gl.constexpr):
    """Programs: heads x tiles of Q, then of K. Strides as in `quantize.quantize_kernel`; prescale multiplies the rotated Q.

    BOUND: exponent and fraction bits of the bound of scaled maxima. ELEMENT: mantissa bits, smallest exponent and largest value.
    X_SHIFT: log2 of what one unit of the largest scale under a reference is as an operand.
    """
    program = gl.program_id(0)
    q_programs = q_heads * q_count
    is_key = program >= q_programs
    index = program - q_programs if is_key else program
    heads = kv_heads if is_key else q_heads
    head = index % heads
    tile = index // heads
    document = gl.load((k_tiles if is_key else q_tiles) + tile)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, per_lane(64, halves_of(D))))
    if document >= 0:
        entry = documents + document * 8
        start = gl.load(entry + (2 if is_key else 0))
        length = gl.load(entry + (3 if is_key else 1))
        valid = gl.load(entry + 4) if is_key else gl.where(document < query_documents, length, 0)
        first = (tile - gl.load(entry + (6 if is_key else 5))) * ROWS
        x = k if is_key else q
        strides = ((k_document if is_key else q_document).to(gl.int64), (k_token if is_key else q_token).to(gl.int64),
                   (k_head if is_key else q_head).to(gl.int64), (k_channel if is_key else q_channel).to(gl.int64))
        even, odd = load_channels(x, document, start + first, head, strides, valid - first, D, ROTATE, MODE, DTYPE)
        if PRESCALE:
            factor = gl.where(is_key, 1.0, prescale)
            even, odd = even * factor, odd * factor
        maxima = block_maxima(even, odd, 32)
        codes = scale_code(maxima, BOUND[0], BOUND[1])
        top = gl.convert_layout(gl.reduce(maxima, 1, nan_maximum), lane.type.layout)
        if is_key:
            top = gl.convert_layout(block_largest(top), lane.type.layout)
        reference = scale_code(top, BOUND[0], BOUND[1])
        broken = gl.convert_layout(reference, gl.SliceLayout(1, codes.type.layout))[:, None] == 255
        under = gl.convert_layout(reference, gl.SliceLayout(1, codes.type.layout))[:, None]
        shift = gl.where(is_key, K_SHIFT, Q_SHIFT)
        # The reference's tokens beside a broken one lose their codes too: their rows or the keys' columns are NaN all the same.
        block_power = gl.where(broken, 0.0, power(254 - gl.where(broken, 127, codes)))
        unit = gl.where(broken, 0.0, _power_of(gl.where(broken, 0, gl.maximum(codes - under + shift, -252))))
        even = _operand(even, block_power, unit, ELEMENT[0], ELEMENT[1], ELEMENT[2])
        odd = _operand(odd, block_power, unit, ELEMENT[0], ELEMENT[1], ELEMENT[2])
        if COUNT:
            gl.atomic_add(inexact + gl.where(is_key, 1, 0), _inexact(even) + _inexact(odd))
        words = _code_words(even, odd)
        if is_key:
            scale = gl.where(reference < 255, power(gl.minimum(reference, 254)), float("nan"))
            scale = gl.where(lane // GROUP * GROUP < length - first, scale, 1.0)
            store_group(k_group, scale, head, tile, k_count, lane, GROUP, True)
            store_codes(k_codes, words, tile.to(gl.int64) * ROWS, head, heads, ROWS, 0, D, True)
        else:
            token = (start + first).to(gl.int64)
            store_codes(q_codes, words, token, head, heads, length - first, 0, D, False)
            gl.store(q_scales + (head * q_scale_head + document * q_scale_document + token + lane), reference.to(gl.uint8),
                     mask=lane < length - first)


@triton.jit
def _channels(x, document, first, head, s_document, s_token, s_head, s_channel, valid, D: tl.constexpr):
    """128 keys of a head, [128, D] in fp32; zeros past `valid`."""
    row, channel = tl.arange(0, 128), tl.arange(0, D)
    base = x + document.to(tl.int64) * s_document + first.to(tl.int64) * s_token + head.to(tl.int64) * s_head
    pointers = base + row.to(tl.int64)[:, None] * s_token + channel.to(tl.int64)[None, :] * s_channel
    return tl.load(pointers, mask=(row < valid)[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["kv_heads"])
def _channel_maxima(v, maxima, documents, k_tiles, s_document, s_token, s_head, s_channel, kv_heads, D: tl.constexpr,
                   WHOLE: tl.constexpr):
    """Largest magnitude of each document, head and channel, into the bits of maxima [documents, Hkv, D], zero before. NaN and Inf
    break their own blocks only and do not count, unless one scale serves the WHOLE head: then they do."""
    tile, head = tl.program_id(0), tl.program_id(1)
    document = tl.load(k_tiles + tile)
    if document >= 0:
        entry = documents + document * 8
        first = (tile - tl.load(entry + 6)) * 128
        x = tl.abs(_channels(v, document, tl.load(entry + 2) + first, head, s_document, s_token, s_head, s_channel,
                             tl.load(entry + 4) - first, D))
        bits = x.to(tl.int32, bitcast=True)
        if not WHOLE:
            bits = tl.where(bits >= 0x7F800000, 0, bits)
        tl.atomic_max(maxima + (document * kv_heads + head) * D + tl.arange(0, D), tl.max(bits, 0), sem="relaxed")


@triton.jit
def _exponent(largest, TOP: tl.constexpr, FRACTION: tl.constexpr):
    """`formats.shared_exponent` of finite maxima; -127 for 0."""
    bits = largest.to(tl.int32, bitcast=True)
    tiny = bits < 0x00800000
    normal = tl.where(tiny, largest * 4294967296.0, largest).to(tl.int32, bitcast=True)
    exponent = (normal >> 23) - tl.where(tiny, 126 + 32, 126) - TOP + ((normal & 0x007FFFFF) > FRACTION).to(tl.int32)
    return tl.where(bits == 0, -127, tl.minimum(tl.maximum(exponent, -127), 127))


@triton.jit
def _power(exponent):
    """2^exponent for -254 .. 254, rounded once."""
    half = exponent // 2
    return ((half + 127) << 23).to(tl.float32, bitcast=True) * ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["kv_heads", "k_count"])
def _quantize_v(v, maxima, v_t, v_scale, inexact, documents, k_tiles, s_document, s_token, s_head, s_channel, kv_heads, k_count,
               D: tl.constexpr, WHOLE: tl.constexpr, TOP: tl.constexpr, FRACTION: tl.constexpr, MANTISSA: tl.constexpr,
               MIN_EXPONENT: tl.constexpr, LARGEST: tl.constexpr, SHIFT: tl.constexpr, COUNT: tl.constexpr):
    """V in blocks of 32 keys, or with one scale for the WHOLE head and document, transposed. TOP, FRACTION: the bound of scaled
    maxima; MANTISSA, MIN_EXPONENT, LARGEST: the element; SHIFT: log2 of what one unit of the largest scale of a channel becomes."""
    tile, head = tl.program_id(0), tl.program_id(1)
    document = tl.load(k_tiles + tile)
    if document >= 0:
        entry = documents + document * 8
        first = (tile - tl.load(entry + 6)) * 128
        x = _channels(v, document, tl.load(entry + 2) + first, head, s_document, s_token, s_head, s_channel,
                      tl.load(entry + 4) - first, D)
        place = (document * kv_heads + head) * D + tl.arange(0, D)
        largest = tl.load(maxima + place)
        if WHOLE:
            largest = tl.max(largest, 0) + tl.zeros([D], tl.int32)
        whole_broken = largest >= 0x7F800000
        reference = _exponent(tl.where(whole_broken, 0, largest).to(tl.float32, bitcast=True), TOP, FRACTION)
        blocks = tl.reshape(x, [4, 32, D])
        bits = tl.abs(blocks).to(tl.int32, bitcast=True)
        block_largest = tl.max(bits, 1)
        broken = (block_largest >= 0x7F800000) | whole_broken[None, :]
        if WHOLE:
            exponent = reference[None, :] + tl.zeros([4, D], tl.int32)
        else:
            exponent = _exponent(tl.where(broken, 0, block_largest).to(tl.float32, bitcast=True), TOP, FRACTION)
        scaled = blocks * _power(-exponent)[:, None, :]
        magnitude = tl.abs(scaled)
        magic = (tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, (127 + MIN_EXPONENT) << 23)
                 + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
        rounded = tl.minimum((magnitude + magic) - magic, LARGEST)
        rounded = tl.where(scaled < 0, -rounded, rounded)
        rounded *= _power(tl.maximum(exponent - reference[None, :] + SHIFT, -250))[:, None, :]
        if COUNT:
            unit: tl.constexpr = 1.5 * 2.0**14
            lost = (tl.abs(rounded) < 0.015625) & ((rounded + unit) - unit != rounded) & ~broken[:, None, :]
            tl.atomic_add(inexact + 2, tl.sum(lost.to(tl.int32)))
        codes = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        codes = tl.where(broken[:, None, :], 0x7F, codes).to(tl.uint8)
        # Keys (c, u, j, e) -> (u, c, e, j): lane c of P holds those of block c, the pairs of the second 8 columns first.
        turned = tl.permute(tl.reshape(codes, [4, 8, 2, 2, D]), (4, 1, 0, 3, 2))
        column = tl.arange(0, 128)
        row = head.to(tl.int64) * D + tl.arange(0, D)
        tl.store(v_t + row[:, None] * (k_count.to(tl.int64) * 128) + tile.to(tl.int64) * 128 + column[None, :],
                 tl.reshape(turned, [D, 128]))
        if first == 0:
            tl.store(v_scale + place, _power(reference - SHIFT))


SHIFTS = {"e2m3": (1, 2, 5), "e2m1": (1, 2, 6), "e4m3": (-5, -4, 0)}
"""log2 of an operand's unit for Q, K and V: |q . k| is at most 57600 at head_dim 128, inside float16; V uses E4M3's whole range."""


@dataclass(frozen=True)
class Quantized:
    """Outputs of `quantize_blocks`, as the module describes them; `inexact` int32 [3], for Q, K and V, if counted."""

    q: Tensor
    q_scales: Tensor
    k: Tensor
    k_group: Tensor
    v_t: Tensor
    v_scale: Tensor
    shift: int
    """Scores of the operands are 2^shift times those of the numbers they stand for."""
    inexact: Tensor | None


def _bounds(operand: Operand) -> tuple[tuple[int, int], tuple[int, int, float]]:
    """The bound of scaled maxima (`quantize.bound`), and mantissa bits, smallest exponent and largest value of the element."""
    element = element_format(operand.element)
    top = {"oas": 7.0, "uos": 7.25}.get(operand.rule, element.max_value)
    bits = (1 + element.max_exponent, 1 << 23) if operand.rule == "floor" else bound(top)
    return bits, (element.mantissa_bits, element.min_exponent, element.max_value)


def _options(head_dim: int) -> dict[str, Any]:
    """No FMA, which would change the roundings of rotation and prescale."""
    return {"num_warps": 8 if head_dim == 256 else 4, "maxnreg": 168, "enable_fp_fusion": False}


def quantize_blocks(query: Tensor, key: Tensor, value: Tensor, tiling: Tiling, recipe: Recipe, *, scale: float, rotate: bool,
                    packed: bool, count: bool = False) -> Quantized:
    """Quantize query [B, Sq, Hq, D], key and value [B, Sk, Hkv, D], or packed [T, H, D], of `tiling`'s documents; D of HEAD_DIMS.

    bf16, fp16 or fp32 in any strides, query and key of one dtype. `scale` multiplies Q after the rotation (1: not at all). Keys at
    or past a document's valid ones count as zero. `count` also counts what E4M3 does not represent exactly.
    """
    q_heads, kv_heads, head_dim = query.shape[-2], key.shape[-2], key.shape[-1]
    q_count, k_count = tiling.q_tiles.numel(), tiling.k_tiles.numel()
    documents = tiling.documents.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    q_shift, k_shift, _ = SHIFTS[recipe.qk.element]
    k_shift -= head_dim == 256
    v_shift = SHIFTS[recipe.v.element][2]
    result = Quantized(empty(*query.shape), empty(*query.shape[:-3], q_heads, query.shape[-3]),
                       empty(TILE * k_count, kv_heads, head_dim), empty(kv_heads, 4 * k_count, dtype=torch.float32),
                       empty(kv_heads, head_dim, TILE * k_count),
                       empty(documents, kv_heads, head_dim, dtype=torch.float32), q_shift + k_shift,
                       torch.zeros(3, dtype=torch.int32, device=query.device) if count else None)
    programs = q_heads * q_count + kv_heads * k_count
    if programs == 0:
        return result
    inexact = tiling.count if result.inexact is None else result.inexact
    mode = mode_of(query, key)
    scale_strides = (0, query.shape[0]) if packed else (query.shape[1] * (query.shape[2] - 1), query.shape[1])
    top, element = _bounds(recipe.qk)
    with torch.cuda.device(query.device):
        _quantize_qk[(programs,)](
            query, key, result.q, result.q_scales, result.k, result.k_group, inexact, tiling.documents, tiling.q_tiles,
            tiling.k_tiles, *strides_of(query, mode, packed), *strides_of(key, mode, packed), *scale_strides, q_heads, kv_heads,
            q_count, k_count, documents - packed, float(scale), D=head_dim, ROTATE=rotate, PRESCALE=scale != 1.0, MODE=mode,
            DTYPE=DTYPES[query.dtype], BOUND=top, ELEMENT=element, Q_SHIFT=q_shift, K_SHIFT=k_shift, COUNT=count,
            **_options(head_dim))
        if kv_heads and k_count:
            whole = recipe.v.layout == "per_tensor"
            maxima = torch.zeros(documents, kv_heads, head_dim, dtype=torch.int32, device=query.device)
            strides = strides_of(value, "channels", packed)
            _channel_maxima[(k_count, kv_heads)](value, maxima, tiling.documents, tiling.k_tiles, *strides, kv_heads, D=head_dim,
                                                WHOLE=whole, num_warps=8)
            (exponent, fraction), (mantissa, smallest, largest) = _bounds(recipe.v)
            _quantize_v[(k_count, kv_heads)](value, maxima, result.v_t, result.v_scale, inexact, tiling.documents, tiling.k_tiles,
                                            *strides, kv_heads, k_count, D=head_dim, WHOLE=whole, TOP=exponent, FRACTION=fraction,
                                            MANTISSA=mantissa, MIN_EXPONENT=smallest, LARGEST=largest, SHIFT=v_shift, COUNT=count,
                                            num_warps=8, enable_fp_fusion=False)
    return result


__all__ = ["HEAD_DIMS", "SHIFTS", "Quantized", "quantize_blocks"]
