"""Q, K and V into E4M3 codes, one launch: rotation, scale per token block or token, codes, and V's codes transposed.

Equals `reference.operands.forward_operands` bit for bit: `formats.hadamard` of Q and K where `Recipe.rotates(head_dim)`, then
`code_per_token` with the recipe's layouts and tops; documents never share a block. Input: bf16, fp16 or fp32 in any strides.

    saved        codes [tokens, H, D] uint8, scale codes [B, H, S] or [H, T] uint8 (E8M0)
    v_t          [Hkv, D, 128 k_tiles] uint8: V's codes, keys (j, c, e) -> (c, j, e) inside each 16, so that P needs no shuffle
    k_group      [Hkv, 4 k_tiles] float32: 2^e of each 32 keys, 1 where the block holds NaN or Inf (its codes are NaN)
    v_group      [Hkv, 4 k_tiles] float32: e of each 32 keys, NaN where the block holds NaN or Inf (its codes are 0 in v_t)

A program takes 128 tokens of one head; a lane holds one token with all its channels (half of them at head_dim 256), so that
butterflies and maxima stay inside a thread. 32-bit words carry everything: two bf16 (fp16) or one fp32 in, four codes out.
The transposition swaps two lane bits (tokens) with the two byte bits of a word (channels): 2 SHFL and 2 PRMT per 4 codes.
Pieces of 16 bytes go through swizzled shared memory on their way in (cp.async) and out, so global accesses are whole lines.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from lowbit_attn.formats import E4M3
from lowbit_attn.kernels.hopper.compat import copy_async
from lowbit_attn.kernels.hopper.tiling import TILE, Tiling
from lowbit_attn.recipes import Operand, Recipe

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
BLOCK = 32

ROWS = gl.constexpr(TILE)
GROUP = gl.constexpr(BLOCK)


# ---- layouts -----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _bases(axis: int, first: int, stop: int) -> list[list[int]]:
    """Layout bases 2^first .. 2^(stop - 1) along one of two axes."""
    return [[1 << bit if axis == 0 else 0, 1 << bit if axis == 1 else 0] for bit in range(first, stop)]


@gluon.constexpr_function
def _bits(size: int) -> int:
    return size.bit_length() - 1


@gluon.constexpr_function
def _per_lane(width, halves):
    """[128, width]: a token per lane, 32 per warp; its columns in one lane, or in those of `halves` = 2 warps."""
    held = _bits(width // halves)
    return gl.DistributedLinearLayout(_bases(1, 0, held), _bases(0, 0, 5), _bases(0, 5, 7) + _bases(1, held, _bits(width)), [],
                                      [TILE, width])


@gluon.constexpr_function
def _exchanged(width):
    """`_per_lane(width, 2)` with the two highest column bits swapped between registers and warps."""
    top = _bits(width) - 1
    return gl.DistributedLinearLayout(_bases(1, 0, top - 1) + _bases(1, top, top + 1), _bases(0, 0, 5),
                                      _bases(0, 5, 7) + _bases(1, top - 1, top), [], [TILE, width])


@gluon.constexpr_function
def _pieces(rows, width, warps):
    """[rows, width] words for global memory: 16 bytes a lane, neighbouring lanes along a row, each warp in rows of its own."""
    columns, lines = _bits(width), _bits(rows)
    across = min(5, columns - 2)
    down = 5 - across
    held = lines - _bits(warps)
    return gl.DistributedLinearLayout(_bases(1, 0, 2) + _bases(1, 2 + across, columns) + _bases(0, down, held),
                                      _bases(1, 2, 2 + across) + _bases(0, 0, down), _bases(0, held, lines), [], [rows, width])


@gluon.constexpr_function
def _swizzled(width):
    """Rows of `width` words: eight lanes reach all banks with 16 bytes each, down a column of rows as well as along a row."""
    chunks = min(8, width // 4)
    return gl.SwizzledSharedLayout(4, 8 // chunks, chunks, [1, 0])


@gluon.constexpr_function
def _part(head_dim):
    """Channels that are rotated together, from channel 0 on: head_dim, or 64 of 96."""
    return 64 if head_dim == 96 else head_dim


@gluon.constexpr_function
def _halves(head_dim):
    """Warps that share the channels of a token: 256 of them are too many registers for one."""
    return 2 if head_dim == 256 else 1


@gluon.constexpr_function
def _normalization(size):
    return size ** -0.5


@gluon.jit
def _along(x, like):
    """[128] -> [128, 1], placed as the rows of `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


# ---- one tile in ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy(x, offset, token_stride, valid, WIDTH: gl.constexpr):
    """Start copying [128, WIDTH] words from x + offset; strides count 16 bytes; rows at or past `valid` become zero."""
    LAYOUT: gl.constexpr = _pieces(ROWS, WIDTH, gl.num_warps())
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    buffer = gl.allocate_shared_memory(gl.int32, [ROWS, WIDTH], _swizzled(WIDTH))
    pointers = x + offset * 4 + ((row * token_stride.to(gl.int32) * 4)[:, None] + column[None, :])
    copy_async(buffer, pointers, mask=(row < valid)[:, None])
    return buffer


@gluon.jit
def _gather(x, offset, token_stride, channel_stride, valid, WIDTH: gl.constexpr, TOKENS_FIRST: gl.constexpr):
    """The same for any strides, which count elements, and with one fp32 per word."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1] if TOKENS_FIRST else [1, 32], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    buffer = gl.allocate_shared_memory(gl.int32, [ROWS, WIDTH], _swizzled(WIDTH))
    for first in gl.static_range(0, WIDTH, 32):
        pointers = x + (offset + (row * token_stride)[:, None] + ((first + column) * channel_stride)[None, :])
        value = gl.load(pointers, mask=(row < valid)[:, None], other=0.0).to(gl.float32)
        buffer.slice(first, 32, dim=1).store(value.to(gl.int32, bitcast=True))
    return buffer


@gluon.jit
def _start(x, document, first, head, strides, valid, CHANNEL: gl.constexpr, SIZE: gl.constexpr, MODE: gl.constexpr,
           DTYPE: gl.constexpr):
    """Shared memory that receives channels CHANNEL .. CHANNEL + SIZE of 128 tokens."""
    offset = document * strides[0] + first * strides[1] + head * strides[2]
    if MODE == "vector":
        PER_WORD: gl.constexpr = 1 if DTYPE == "fp32" else 2
        words = x.to(gl.pointer_type(gl.int32), bitcast=True)
        buffer = _copy(words, offset + CHANNEL // PER_WORD // 4, strides[1], valid, SIZE // PER_WORD)
    else:
        buffer = _gather(x, offset + CHANNEL * strides[3], strides[1], strides[3], valid, SIZE, MODE == "tokens")
    return buffer


@gluon.jit
def _half(word, SIDE: gl.constexpr):
    """The lower or upper fp16 of each word as fp32."""
    return gl.inline_asm_elementwise("{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, " + SIDE + "; }", "=f,r", [word],
                                     dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _values(word, DTYPE: gl.constexpr):
    """Even and odd channels of words [128, n], in fp32: two of a word, or one each of two words."""
    if DTYPE == "bf16":
        even, odd = (word << 16).to(gl.float32, bitcast=True), (word & -65536).to(gl.float32, bitcast=True)
    elif DTYPE == "fp16":
        even, odd = _half(word, "l"), _half(word, "h")
    else:
        even, odd = gl.split(gl.reshape(word.to(gl.float32, bitcast=True), [ROWS, word.shape[1] // 2, 2]))
    return even, odd


# ---- rotation, scale, codes ---------------------------------------------------------------------------------------------


@gluon.jit
def _butterfly(x, STRIDE: gl.constexpr):
    """One radix-2 stage over the columns of x [128, n]."""
    WIDTH: gl.constexpr = x.shape[1]
    a, b = gl.split(gl.permute(gl.reshape(x, [ROWS, WIDTH // (2 * STRIDE), 2, STRIDE]), (0, 1, 3, 2)))
    return gl.reshape(gl.permute(gl.join(a + b, a - b), (0, 1, 3, 2)), [ROWS, WIDTH])


@gluon.jit
def _butterflies(x, HALVES: gl.constexpr):
    WIDTH: gl.constexpr = x.shape[1]
    for stage in gl.static_range(8):
        if 2**stage < WIDTH:
            if HALVES == 2 and 2**(stage + 1) == WIDTH:
                x = gl.convert_layout(x, _exchanged(WIDTH))
            x = _butterfly(x, 2**stage)
    return x


@gluon.jit
def _rotated(even, odd, HALVES: gl.constexpr):
    """`formats.hadamard`: strides 1, 2, 4, ... and then one multiplication."""
    NORM: gl.constexpr = _normalization(2 * even.shape[1])
    return _butterflies(even + odd, HALVES) * NORM, _butterflies(even - odd, HALVES) * NORM


@gluon.jit
def _nan_maximum(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _larger_magnitude(a, b):
    return _nan_maximum(gl.abs(a), gl.abs(b))


@gluon.jit
def _larger_pair(a, b):
    """Of two pairs of magnitudes of 16 bits: their bits sort like the numbers, NaN above all."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _tree(x, HALVES: gl.constexpr, COMBINE: gl.constexpr):
    """Combine the columns of x [128, n] inside the thread, in a tree; the 4 that warps share may be left."""
    WIDTH: gl.constexpr = x.shape[1]
    for level in gl.static_range(8):
        if WIDTH >> (level + 1) >= (1 if HALVES == 1 else 4):
            a, b = gl.split(gl.reshape(x, [ROWS, WIDTH >> (level + 1), 2]))
            x = COMBINE(a, b)
    return x


@gluon.jit
def _largest(even, odd, HALVES: gl.constexpr):
    """Largest magnitude of each token, [128]; NaN if it has one."""
    x = _tree(_larger_magnitude(even, odd), HALVES, _nan_maximum)
    if HALVES == 1:
        largest = gl.reshape(x, [ROWS])
    else:
        largest = gl.reduce(x, 1, _nan_maximum)
    return gl.convert_layout(largest, gl.SliceLayout(1, _per_lane(64, HALVES)))


@gluon.jit
def _largest_of_words(word, DTYPE: gl.constexpr, HALVES: gl.constexpr):
    """`_largest` of `_values`, two channels at a time: fewer registers than the values take."""
    even, odd = _values(_tree(word & 0x7FFF7FFF, HALVES, _larger_pair), DTYPE)
    return _largest(even, odd, HALVES)


@gluon.jit
def _block_largest(x):
    """[128] -> [128]: the largest of each 32 tokens, in every one of them."""
    largest = gl.reduce(gl.reshape(x, [ROWS // GROUP, GROUP]), 1, _nan_maximum)
    return gl.reshape(gl.expand_dims(largest, 1).broadcast_to([ROWS // GROUP, GROUP]), [ROWS])


@gluon.jit
def _scale_code(largest, top_exponent, top_fraction):
    """E8M0 code of `formats.shared_exponent`(largest, "ceil") for a bound of 2^top_exponent * (0.1 top_fraction in binary)."""
    bits = largest.to(gl.int32, bitcast=True)
    tiny = bits < 0x00800000  # frexp normalizes subnormals
    normal = gl.where(tiny, largest * 4294967296.0, largest).to(gl.int32, bitcast=True)
    exponent = (normal >> 23) - gl.where(tiny, 126 + 32, 126) - top_exponent
    exponent += ((normal & 0x007FFFFF) > top_fraction).to(gl.int32)
    code = gl.where(bits == 0, 0, gl.minimum(gl.maximum(exponent, -127), 127) + 127)
    return gl.where(bits >= 0x7F800000, 255, code)


@gluon.jit
def _power(code):
    """2^(code - 127) of codes 0 .. 254; fp32 holds 2^-127 as a subnormal."""
    return gl.where(code == 0, 0x00400000, code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _e4m3(a, b, c, d):
    """Four fp32 -> four codes in one word; saturates, NaN -> 0x7F."""
    return gl.inline_asm_elementwise("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; "
                                     "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }",
                                     "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _codes(even, odd, factor):
    """Channels [128, n] each times factor [128] -> code words [128, n / 2]."""
    WORDS: gl.constexpr = even.shape[1] // 2
    a, c = gl.split(gl.reshape(even * _along(factor, even), [ROWS, WORDS, 2]))
    b, d = gl.split(gl.reshape(odd * _along(factor, odd), [ROWS, WORDS, 2]))
    return _e4m3(a, b, c, d)


# ---- one tile out ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _store_codes(codes, words, token, head, heads, stored, CHANNEL: gl.constexpr, D: gl.constexpr):
    """Code words [128, n] of tokens token .. token + stored to codes [tokens, heads, D] from CHANNEL on."""
    WIDTH: gl.constexpr = words.shape[1]
    LAYOUT: gl.constexpr = _pieces(ROWS, WIDTH, gl.num_warps())
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    piece = gl.allocate_shared_memory(gl.int32, [ROWS, WIDTH], _swizzled(WIDTH), words).load(LAYOUT)
    start = (token * heads + head) * (D // 4) + CHANNEL // 4
    pointers = codes.to(gl.pointer_type(gl.int32), bitcast=True) + start + ((row * (heads * (D // 4)))[:, None] + column[None, :])
    gl.store(pointers, piece, mask=(row < stored)[:, None])


@gluon.jit
def _swap(word):
    """Lane bit 0 <-> byte bit 0, lane bit 3 <-> byte bit 1: tokens e and j against the two low channel bits."""
    return gl.inline_asm_elementwise("""{ .reg .b32 p, l, s0, s1; .reg .pred q;
    mov.u32 l, %laneid;
    and.b32 p, l, 1; setp.ne.u32 q, p, 0; selp.b32 s0, 0x3715, 0x6240, q;
    and.b32 p, l, 8; setp.ne.u32 q, p, 0; selp.b32 s1, 0x3276, 0x5410, q;
    shfl.sync.bfly.b32 p, $1, 1, 0x1f, 0xffffffff; prmt.b32 l, $1, p, s0;
    shfl.sync.bfly.b32 p, l, 8, 0x1f, 0xffffffff; prmt.b32 $0, l, p, s1; }""", "=r,r", [word], dtype=gl.int32, is_pure=True,
                                     pack=1)


@gluon.jit
def _store_transposed(v_t, words, head, tile, tiles, CHANNEL: gl.constexpr, D: gl.constexpr):
    """Code words [128 keys, n] to columns 128 tile .. of v_t [heads, D, 128 tiles], from row CHANNEL on, keys permuted."""
    SIZE: gl.constexpr = 4 * words.shape[1]
    LAYOUT: gl.constexpr = _pieces(SIZE, ROWS // 4, gl.num_warps())
    # Tokens are (block of 32, 16, j, c, e) and words (channel bits 2 ..); after the swap e and j stand for channel bits 0 and 1.
    swapped = gl.reshape(_swap(words), [ROWS // 32, 2, 2, 4, 2, SIZE // 4])
    turned = gl.reshape(gl.permute(swapped, (5, 2, 4, 0, 1, 3)), [SIZE, ROWS // 4])
    piece = gl.allocate_shared_memory(gl.int32, [SIZE, ROWS // 4], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]), turned).load(LAYOUT)
    row = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, ROWS // 4, gl.SliceLayout(0, LAYOUT))
    pitch = tiles.to(gl.int64) * (ROWS // 4)
    start = (head * D + CHANNEL) * pitch + tile * (ROWS // 4)
    gl.store(v_t.to(gl.pointer_type(gl.int32), bitcast=True) + start + ((row * pitch)[:, None] + column[None, :]), piece)


@gluon.jit
def _store_group(group, value, head, tile, tiles, row, PER: gl.constexpr, mask):
    """One value of each PER tokens to group [heads, 128 tiles / PER]."""
    index = (head * tiles + tile) * (ROWS // PER) + row // PER
    gl.store(group + index, value, mask=mask & (row % PER == 0))


# ---- the kernel -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _channels(buffer, ROTATE: gl.constexpr, DTYPE: gl.constexpr, HALVES: gl.constexpr):
    """What a lane keeps of its channels until their scale is known: (words, words), or (even, odd); and the largest magnitude."""
    word = buffer.load(_per_lane(buffer.shape[1], HALVES))
    if ROTATE or DTYPE == "fp32":
        first, second = _values(word, DTYPE)
        if ROTATE:
            first, second = _rotated(first, second, HALVES)
        largest = _largest(first, second, HALVES)
    else:
        first, second = word, word
        largest = _largest_of_words(word, DTYPE, HALVES)
    return first, second, largest


@gluon.jit
def _encoded(first, second, factor, ROTATE: gl.constexpr, DTYPE: gl.constexpr):
    """Code words of what `_channels` kept."""
    if ROTATE or DTYPE == "fp32":
        words = _codes(first, second, factor)
    else:
        even, odd = _values(first, DTYPE)
        words = _codes(even, odd, factor)
    return words


@gluon.jit
def _quantize(x, document, first, head, strides, valid, top_exponent, top_fraction, D: gl.constexpr, ROTATE: gl.constexpr,
              PER_TOKEN: gl.constexpr, MODE: gl.constexpr, DTYPE: gl.constexpr):
    """Code words of channels 0 .. _part(D) and of the rest (head_dim 96; else the same again), scale code of each token."""
    SIZE: gl.constexpr = _part(D)
    HALVES: gl.constexpr = _halves(D)
    WORD: gl.constexpr = DTYPE if MODE == "vector" else "fp32"
    buffer = _start(x, document, first, head, strides, valid, 0, SIZE, MODE, DTYPE)
    if SIZE < D:
        rest = _start(x, document, first, head, strides, valid, SIZE, D - SIZE, MODE, DTYPE)
    if MODE == "vector":
        async_copy.commit_group()
        async_copy.wait_group(0)
    a, b, largest = _channels(buffer, ROTATE, WORD, HALVES)
    if SIZE < D:
        c, d, largest2 = _channels(rest, ROTATE, WORD, HALVES)
        largest = _nan_maximum(largest, largest2)
    if not PER_TOKEN:
        largest = gl.convert_layout(_block_largest(largest), largest.type.layout)
    code = _scale_code(largest, top_exponent, top_fraction)
    factor = gl.where(code == 255, float("nan"), _power(254 - code))
    words = _encoded(a, b, factor, ROTATE, WORD)
    if SIZE < D:
        words2 = _encoded(c, d, factor, ROTATE, WORD)
    else:
        words2 = words
    return words, words2, code


@gluon.jit
def _store_saved(codes, scales, words, words2, code, row, document, token, head, heads, scale_document, scale_head, stored,
                 D: gl.constexpr):
    """Codes and scale codes of `stored` tokens from row `token` of [tokens, heads, D] on."""
    SIZE: gl.constexpr = _part(D)
    _store_codes(codes, words, token, head, heads, stored, 0, D)
    if SIZE < D:
        _store_codes(codes, words2, token, head, heads, stored, SIZE, D)
    gl.store(scales + (head * scale_head + document * scale_document + token + row), code.to(gl.uint8), mask=row < stored)


@gluon.jit(do_not_specialize=["q_document", "q_token", "q_head", "q_channel", "k_document", "k_token", "k_head", "k_channel",
                              "v_document", "v_token", "v_head", "v_channel", "q_scale_document", "q_scale_head",
                              "k_scale_document", "k_scale_head", "q_heads", "kv_heads", "q_count", "k_count", "query_documents"])
def quantize_kernel(q, k, v, q_codes, q_scales, k_codes, k_scales, v_codes, v_scales, v_t, k_group, v_group, documents, q_tiles,
                    k_tiles, q_document, q_token, q_head, q_channel, k_document, k_token, k_head, k_channel, v_document, v_token,
                    v_head, v_channel, q_scale_document, q_scale_head, k_scale_document, k_scale_head, q_heads, kv_heads, q_count,
                    k_count, query_documents, D: gl.constexpr, ROTATE: gl.constexpr, SAVE: gl.constexpr,
                    QK_PER_TOKEN: gl.constexpr, V_PER_TOKEN: gl.constexpr, QK_MODE: gl.constexpr, V_MODE: gl.constexpr,
                    DTYPE: gl.constexpr, Q_TOP: gl.constexpr, K_TOP: gl.constexpr, V_TOP: gl.constexpr):
    """Programs: heads x tiles of Q, then of K (heads run fastest), then of V (tiles run fastest: v_t's rows run along tokens).

    x_document, x_token, x_head, x_channel: strides of an input, in units of 16 bytes (mode "vector") or elements.
    x_scale_document, x_scale_head: strides of the scale codes, beside 1 per token.
    q_heads, kv_heads, q_count, k_count: heads and padded tiles; query_documents: documents whose queries are not zero.
    X_TOP: exponent and fraction bits of the bound of scaled maxima (`_bound`).
    """
    program = gl.program_id(0)
    q_programs = q_heads * q_count
    k_programs = kv_heads * k_count
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, _per_lane(64, _halves(D))))
    if program < q_programs + k_programs:
        is_key = program >= q_programs
        index = program - q_programs if is_key else program
        heads = kv_heads if is_key else q_heads
        head = index % heads
        tile = index // heads
        document = gl.load((k_tiles if is_key else q_tiles) + tile)
        if document >= 0:
            entry = documents + document * 8
            start = gl.load(entry + (2 if is_key else 0))
            length = gl.load(entry + (3 if is_key else 1))
            valid = gl.load(entry + 4) if is_key else gl.where(document < query_documents, length, 0)
            first = (tile - gl.load(entry + (6 if is_key else 5))) * ROWS
            x = k if is_key else q
            strides = ((k_document if is_key else q_document).to(gl.int64), (k_token if is_key else q_token).to(gl.int64),
                       (k_head if is_key else q_head).to(gl.int64), (k_channel if is_key else q_channel).to(gl.int64))
            words, words2, code = _quantize(x, document, start + first, head, strides, valid - first,
                                            gl.where(is_key, K_TOP[0], Q_TOP[0]), gl.where(is_key, K_TOP[1], Q_TOP[1]), D, ROTATE,
                                            QK_PER_TOKEN, QK_MODE, DTYPE)
            PER: gl.constexpr = 1 if QK_PER_TOKEN else GROUP
            exists = (code < 255) & (lane // PER * PER < length - first)
            _store_group(k_group, gl.where(exists, _power(code), 1.0), head, tile, k_count, lane, PER, is_key)
            _store_saved(k_codes if is_key else q_codes, k_scales if is_key else q_scales, words, words2, code, lane, document,
                         (start + first).to(gl.int64), head, heads, k_scale_document if is_key else q_scale_document,
                         k_scale_head if is_key else q_scale_head, length - first, D)
    else:
        index = program - q_programs - k_programs
        head = index // k_count
        tile = index % k_count
        document = gl.load(k_tiles + tile)
        if document >= 0:
            entry = documents + document * 8
            start = gl.load(entry + 2)
            length = gl.load(entry + 3)
            first = (tile - gl.load(entry + 6)) * ROWS
            strides = (v_document.to(gl.int64), v_token.to(gl.int64), v_head.to(gl.int64), v_channel.to(gl.int64))
            words, words2, code = _quantize(v, document, start + first, head, strides, gl.load(entry + 4) - first, V_TOP[0], V_TOP[1],
                                            D, False, V_PER_TOKEN, V_MODE, DTYPE)
            PER: gl.constexpr = 1 if V_PER_TOKEN else GROUP
            exponent = gl.where(code == 255, float("nan"), (code - 127).to(gl.float32))
            _store_group(v_group, exponent, head, tile, k_count, lane, PER, True)
            SIZE: gl.constexpr = _part(D)
            finite = gl.where(code == 255, 0, -1)
            _store_transposed(v_t, words & _along(finite, words), head, tile, k_count, 0, D)
            if SIZE < D:
                _store_transposed(v_t, words2 & _along(finite, words2), head, tile, k_count, SIZE, D)
            if SAVE:
                _store_saved(v_codes, v_scales, words, words2, code, lane, document, (start + first).to(gl.int64), head, kv_heads,
                             k_scale_document, k_scale_head, length - first, D)


# ---- host -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """Outputs of `quantize_qkv`; v_codes and v_scales only if saved.

    q_codes, k_codes, v_codes: uint8 in the inputs' shapes, contiguous; q_scales, k_scales, v_scales: uint8 E8M0 codes [B, H, S] or
    [H, T]. v_t: uint8 [Hkv, D, 128 k_tiles]. k_group, v_group: float32 [Hkv, 4 k_tiles], one per 32 keys; [Hkv, 128 k_tiles],
    one per key, where the recipe's layout is per_row. Workspace columns of tiles past the last document are not written.
    """

    q_codes: Tensor
    q_scales: Tensor
    k_codes: Tensor
    k_scales: Tensor
    v_codes: Tensor | None
    v_scales: Tensor | None
    v_t: Tensor
    k_group: Tensor
    v_group: Tensor


def refusal(recipe: Recipe, head_dim: int) -> str | None:
    """Why this quantizer cannot serve an effective recipe at a head_dim, or None if it can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim: got {head_dim}; accepted: {', '.join(map(str, HEAD_DIMS))}"
    for name, operand in (("qk", recipe.qk), ("v", recipe.v)):
        if not (operand.has_token_scales and operand.element == E4M3.name and operand.rule == "ceil"):
            return f"{name}: got {operand}; accepted: e4m3/token_block/ceil, e4m3/per_row/ceil"
    return "q_prescale: got True; accepted: False" if recipe.q_prescale else None


def _bound(top: float) -> tuple[int, int]:
    """Exponent of frexp(top), and its fraction as the 23 bits after the leading one; 2^23, above all, where it rounds up to 1."""
    fraction, exponent = math.frexp(top)
    return exponent, round((2 * fraction - 1) * 2**23)


def _tops(recipe: Recipe, head_dim: int) -> dict[str, tuple[int, int]]:
    """Bounds of the scaled maxima, as `reference.operands.operand_tops` and the element format give them."""
    tops = {"Q_TOP": recipe.q_top, "K_TOP": recipe.k_top * min(1.0, 128 / head_dim), "V_TOP": 0.0}
    return {name: _bound(top or E4M3.max_value) for name, top in tops.items()}


def _is_vector(x: Tensor) -> bool:
    """Whether every token's channels are whole, aligned pieces of 16 bytes, and offsets in a tile fit 32 bits."""
    outer = [stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    near = x.stride(-3) * x.element_size() * TILE // 4 < 2**31
    return x.stride(-1) == 1 and near and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in outer)


def _mode(*operands: Tensor) -> str:
    """How a program loads: 16 bytes a lane, or elements with lanes along tokens or along channels."""
    if all(map(_is_vector, operands)):
        return "vector"
    return "tokens" if operands[0].stride(-3) == 1 and operands[0].stride(-1) != 1 else "channels"


def _strides(x: Tensor, mode: str, packed: bool) -> tuple[int, int, int, int]:
    """Strides of document (beside those of its tokens, which are counted through), token, head and channel."""
    unit = 16 // x.element_size() if mode == "vector" else 1
    *batch, token, head, channel = (stride // unit if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return (0 if packed else batch[0] - x.shape[1] * token), token, head, channel


def _check(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, packed: bool) -> None:
    rank = 3 if packed else 4
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != rank or x.dtype != query.dtype or x.dtype not in DTYPES or x.shape[-1] != query.shape[-1]:
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)} beside query {query.dtype} {tuple(query.shape)}; accepted: one "
                             f"dtype of {', '.join(map(str, DTYPES))}, {rank} dimensions and one head_dim")
    if problem := refusal(recipe, query.shape[-1]):
        raise ValueError(problem)


def _constants(head_dim: int, dtype: torch.dtype, recipe: Recipe, save: bool, qk_mode: str, v_mode: str) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {"D": head_dim, "ROTATE": recipe.rotates(head_dim), "SAVE": save, "QK_PER_TOKEN": recipe.qk.layout == "per_row",
            "V_PER_TOKEN": recipe.v.layout == "per_row", "QK_MODE": qk_mode, "V_MODE": v_mode, "DTYPE": DTYPES[dtype],
            **_tops(recipe, head_dim)}


def _options(head_dim: int, qk_mode: str, v_mode: str) -> dict[str, Any]:
    """Registers for three programs of 4 warps on a multiprocessor; no FMA, since it would change the rotation's roundings."""
    vector = qk_mode == v_mode == "vector"
    return {"num_warps": 4 * (2 if head_dim == 256 else 1), "maxnreg": (128 if head_dim == 96 else 168) if vector else 255,
            "enable_fp_fusion": False}


def quantize_qkv(query: Tensor, key: Tensor, value: Tensor, tiling: Tiling, recipe: Recipe, *, save: bool,
                 packed: bool) -> Quantized:
    """Quantize query [B, Sq, Hq, D], key and value [B, Sk, Hkv, D], or packed [T, H, D], of `tiling`'s documents.

    bf16, fp16 or fp32 in any strides. Keys at or past a document's valid ones count as zero, as do the rows of no document; their
    codes are 0. ValueError for shapes and recipes that this kernel does not serve (`refusal`).
    """
    recipe = recipe.effective()
    _check(query, key, value, recipe, packed)
    q_heads, kv_heads, head_dim = query.shape[-2], key.shape[-2], key.shape[-1]
    q_count, k_count = tiling.q_tiles.numel(), tiling.k_tiles.numel()

    def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    def codes(x: Tensor) -> tuple[Tensor, Tensor]:
        return empty(tuple(x.shape)), empty((*x.shape[:-3], x.shape[-2], x.shape[-3]))

    def group(operand: Operand) -> Tensor:
        return empty((kv_heads, k_count * (TILE if operand.layout == "per_row" else TILE // BLOCK)), torch.float32)

    q_out, k_out = codes(query), codes(key)
    v_out = codes(value) if save else (None, None)
    result = Quantized(*q_out, *k_out, *v_out, empty((kv_heads, head_dim, TILE * k_count)), group(recipe.qk), group(recipe.v))
    programs = q_heads * q_count + 2 * kv_heads * k_count
    if programs == 0:
        return result
    qk_mode, v_mode = _mode(query, key), _mode(value)
    scale_strides = [stride for x in (query, key)
                     for stride in ((0, x.shape[0]) if packed else (x.shape[1] * (x.shape[2] - 1), x.shape[1]))]
    v_saved = (result.v_codes, result.v_scales) if save else (result.v_t, result.v_t)
    documents = tiling.documents.shape[0] - packed  # the last of packed documents holds the rows of none
    with torch.cuda.device(query.device):
        quantize_kernel[(programs,)](
            query, key, value, *q_out, *k_out, *v_saved, result.v_t, result.k_group, result.v_group, tiling.documents,
            tiling.q_tiles, tiling.k_tiles, *_strides(query, qk_mode, packed), *_strides(key, qk_mode, packed),
            *_strides(value, v_mode, packed), *scale_strides, q_heads, kv_heads, q_count, k_count, documents,
            **_constants(head_dim, query.dtype, recipe, save, qk_mode, v_mode),
            **_options(head_dim, qk_mode, v_mode))
    return result


@dataclass(frozen=True)
class Variant:
    """One compilation for the static gate: arguments of GluonASTSource and the compiler's options."""

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


def variants(recipes: tuple[Recipe, ...]) -> Iterator[Variant]:
    """What the static gate cross-compiles: every head_dim, with and without saving; the other dtypes and strides at 128."""
    cases = [(recipe, head_dim, torch.bfloat16, save, "vector") for recipe in recipes for head_dim in HEAD_DIMS
             for save in (False, True)]
    cases += [(recipes[0], 128, dtype, True, mode) for dtype in DTYPES for mode in ("vector", "tokens", "channels")
              if (dtype, mode) != (torch.bfloat16, "vector")]
    for recipe, head_dim, dtype, save, mode in cases:
        constants = _constants(head_dim, dtype, recipe, save, mode, mode)
        pointers = {"q": DTYPES[dtype], "k": DTYPES[dtype], "v": DTYPES[dtype], "k_group": "fp32", "v_group": "fp32",
                    "documents": "i32", "q_tiles": "i32", "k_tiles": "i32"}
        names = quantize_kernel.arg_names
        first_number = names.index("q_document")
        signature = {name: "constexpr" if name in constants else
                     "*" + pointers.get(name, "u8") if position < first_number else "i32" for position, name in enumerate(names)}
        attributes = {(position,): [["tt.divisibility", 16]] for position in range(first_number)}
        yield Variant(f"quantize-{recipe.name}-{head_dim}-{DTYPES[dtype]}-{mode}-{'save' if save else 'infer'}", quantize_kernel,
                      signature, constants, attributes,
                      _options(head_dim, mode, mode))
