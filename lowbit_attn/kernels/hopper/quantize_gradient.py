"""dO into E4M3 codes with D = sum(O dO) of those codes, and the transposed copies that the backward's products contract.

Equals `reference.operands.round_operand(dO, recipe.do)` bit for bit, in token blocks that no two documents share. One launch:

    do_codes   [tokens, H, D] uint8
    do_t       [H, D, 128 q_tiles] uint8: dO's codes, queries (j, c, e) -> (c, j, e) inside each 16, zero past a document's end
    do_group   [H, 4 q_tiles] float32: exponents of each 32 queries, NaN where the block holds NaN or Inf (so are its codes)
    delta      float32, where lse is: D of the quantized dO, minus the gradient of lse
    q_t, k_t   the same transposition of Q's and K's saved codes

For the one-pass kernel, which multiplies dS by K of 128 keys at once and knows from norms how large dS can be, also

    do_size    float32, where lse is: |dO| of the quantized row
    v_size     [Hkv, 4 k_tiles] float32: log2 of the largest |V| of each 32 keys, -200 for zeros
    k_top      [Hkv, k_tiles] float32: the largest exponent of K of each padded tile, -127 for zeros
    k_t        K's codes relative to k_top, keys (j, c, e) -> (c, e, j) inside each 16
    grad_query zeros, float16 [128 q_tiles, H * D]

and no q_t, which waits for what dS is relative to (`transposed_queries`). A program takes 128 tokens of one head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from lowbit_attn.formats import E4M3
from lowbit_attn.kernels.hopper.inline import pack_e4m3, values_of
from lowbit_attn.kernels.hopper.quantize import DTYPES, bound, mode_of, strides_of
from lowbit_attn.kernels.hopper.quantize_tile import (
    ROWS,
    along,
    block_largest,
    channel_values,
    copy_words,
    per_lane,
    pieces,
    power,
    quantize,
    start_copy,
    store_codes,
    store_group,
    store_transposed,
    thread_sum,
)
from lowbit_attn.kernels.tiling import TILE, Tiling

LOWEST_SHIFT = gl.constexpr(-60.0)
"""Codes are brought down by no more than this, which leaves nothing of them."""


@gluon.jit
def _product_sum(words, even, odd):
    """Sum over channels of the codes' values times O, [128]; O in its even and odd channels [128, D / 2]."""
    WORDS: gl.constexpr = words.shape[1]
    a, b, c, d = values_of(words)
    first, third = gl.split(gl.reshape(even, [ROWS, WORDS, 2]))
    second, fourth = gl.split(gl.reshape(odd, [ROWS, WORDS, 2]))
    return _by_token(thread_sum(a * first + b * second + (c * third + d * fourth)))


@gluon.jit
def _by_token(x):
    """[128, 1] -> [128], one a lane."""
    return gl.convert_layout(gl.reshape(x, [ROWS]), gl.SliceLayout(1, per_lane(64, 1)))


@gluon.jit
def _size(words, code):
    """Norm of each token's codes times their scale, [128]; 0 where the scale marks NaN."""
    a, b, c, d = values_of(words)
    squares = _by_token(thread_sum(a * a + b * b + (c * c + d * d)))
    return gl.where(code < 255, gl.sqrt(squares) * power(code), 0.0)


@gluon.jit
def _copied(codes, entry, first, head, heads, START: gl.constexpr, D: gl.constexpr):
    """Shared memory that receives the codes of 128 tokens from `first` on of the document `entry`."""
    token = (gl.load(entry + START) + first).to(gl.int64)
    row = (heads * (D // 16)).to(gl.int64)
    buffer = copy_words(codes.to(gl.pointer_type(gl.int32), bitcast=True), token * row + head * (D // 16), row,
                        gl.load(entry + START + 1) - first, D // 4)
    async_copy.commit_group()
    return buffer


@gluon.jit
def reencoded(words, shift):
    """Code words [128, n] times 2^shift [128], whole numbers up to 0; left alone where all are 0."""
    if gl.min(shift, 0) < 0.0:
        factor = along(gl.exp2(shift), words)
        a, b, c, d = values_of(words)
        words = pack_e4m3(a * factor, b * factor, c * factor, d * factor)
    return words


@gluon.jit
def _transpose(codes, out, tiles_of, documents, tile, head, heads, tiles, START: gl.constexpr, D: gl.constexpr):
    """Saved codes of one padded tile to out [heads, D, 128 tiles]; START is the documents' column of the first token."""
    document = gl.load(tiles_of + tile)
    if document >= 0:
        entry = documents + document * 8
        first = (tile - gl.load(entry + (5 if START == 0 else 6))) * ROWS
        buffer = _copied(codes, entry, first, head, heads, START, D)
        async_copy.wait_group(0)
        store_transposed(out, buffer.load(per_lane(D // 4, 1)), head, tile, tiles, 0, D)


@gluon.jit
def _key_tile(k_codes, v_codes, k_scales, v_scales, k_t, k_top, v_size, k_tiles, documents, tile, head, heads, tiles, k_head_stride,
              k_document_extra, D: gl.constexpr):
    """K's codes of one padded tile relative to their largest exponent, transposed; norms of V."""
    document = gl.load(k_tiles + tile)
    if document >= 0:
        entry = documents + document * 8
        first = (tile - gl.load(entry + 6)) * ROWS
        keys = _copied(k_codes, entry, first, head, heads, 2, D)
        values = _copied(v_codes, entry, first, head, heads, 2, D)
        lane = gl.arange(0, ROWS, gl.SliceLayout(1, per_lane(64, 1)))
        side = head.to(gl.int64) * k_head_stride + document.to(gl.int64) * k_document_extra + gl.load(entry + 2) + first
        exists = lane < gl.load(entry + 3) - first
        k_code = gl.load(k_scales + side + lane, mask=exists, other=0).to(gl.int32)
        v_code = gl.load(v_scales + side + lane, mask=exists, other=0).to(gl.int32)
        exponent = (k_code - 127).to(gl.float32)
        top = gl.max(gl.where(k_code == 255, -127.0, exponent), 0)
        shift = gl.where(k_code == 255, 0.0, gl.maximum(exponent - top, LOWEST_SHIFT))
        gl.store(k_top + head * tiles + tile, top)
        async_copy.wait_group(0)
        words = reencoded(keys.load(per_lane(D // 4, 1)), shift)
        size = block_largest(_size(values.load(per_lane(D // 4, 1)), v_code))
        size = gl.where(size > 0, gl.log2(size), -200.0)
        store_group(v_size, gl.convert_layout(size, lane.type.layout), head, tile, tiles, lane, 32, True)
        store_transposed(k_t, words, head, tile, tiles, 0, D, True)


@gluon.jit
def _clear(grad_query, tile, head, heads, D: gl.constexpr):
    """Zeros in 128 rows of one head of [rows, heads, D] float16."""
    LAYOUT: gl.constexpr = pieces(ROWS, D // 2, gl.num_warps())
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    start = (tile.to(gl.int64) * ROWS * heads + head) * (D // 2)
    words = grad_query.to(gl.pointer_type(gl.int32), bitcast=True) + start
    gl.store(words + (row * (heads * (D // 2)))[:, None] + column[None, :], gl.zeros([ROWS, D // 2], gl.int32, LAYOUT))


@gluon.jit(do_not_specialize=["g_document", "g_token", "g_head", "g_channel", "o_document", "o_token", "o_head", "head_stride",
                              "document_extra", "k_head_stride", "k_document_extra", "heads", "kv_heads", "q_count", "k_count"])
def gradient_kernel(grad, output, grad_lse, q_codes, k_codes, v_codes, k_scales, v_scales, do_codes, do_t, do_group, delta, do_size,
                    q_t, k_t, k_top, v_size, grad_query, documents, q_tiles, k_tiles, g_document, g_token, g_head, g_channel,
                    o_document, o_token, o_head, head_stride, document_extra, k_head_stride, k_document_extra, heads, kv_heads,
                    q_count, k_count, D: gl.constexpr, MODE: gl.constexpr, DTYPE: gl.constexpr, O_DTYPE: gl.constexpr,
                    HAS_LSE: gl.constexpr, TOP: gl.constexpr, ONE_PASS: gl.constexpr):
    """Programs: heads x query tiles of dO, kv heads x key tiles of K's codes, and unless ONE_PASS heads x query tiles of Q's codes.

    g_*, o_*: strides of dO and O, as `quantize_kernel` has them. Row r of head h has its lse and delta at
    h * head_stride + document * document_extra + r.
    """
    program = gl.program_id(0)
    q_programs = heads * q_count
    if program < q_programs:
        head = program % heads
        tile = program // heads
        document = gl.load(q_tiles + tile)
        if document >= 0:
            entry = documents + document * 8
            first = (tile - gl.load(entry + 5)) * ROWS
            token = gl.load(entry) + first
            rows = gl.load(entry + 1) - first
            o_strides = (o_document.to(gl.int64), o_token.to(gl.int64), o_head.to(gl.int64), o_head.to(gl.int64))
            buffer = start_copy(output, document, token, head, o_strides, rows, 0, D, "vector", O_DTYPE)
            strides = (g_document.to(gl.int64), g_token.to(gl.int64), g_head.to(gl.int64), g_channel.to(gl.int64))
            words, _, code = quantize(grad, document, token, head, strides, rows, TOP[0], TOP[1], D, False, False, MODE, DTYPE)
            async_copy.commit_group()
            async_copy.wait_group(0)
            even, odd = channel_values(buffer.load(per_lane(buffer.shape[1], 1)), O_DTYPE)
            lane = gl.arange(0, ROWS, gl.SliceLayout(1, per_lane(64, 1)))
            side = head.to(gl.int64) * head_stride + document.to(gl.int64) * document_extra + token + lane
            total = _product_sum(words, even, odd) * gl.where(code < 255, power(code), 1.0)
            if HAS_LSE:
                total -= gl.load(grad_lse + side, mask=lane < rows, other=0.0)
            gl.store(delta + side, total, mask=lane < rows)
            if ONE_PASS:
                gl.store(do_size + side, _size(words, code), mask=lane < rows)
                _clear(grad_query, tile, head, heads, D)
            store_group(do_group, gl.where(code == 255, float("nan"), (code - 127).to(gl.float32)), head, tile, q_count, lane, 32,
                        True)
            store_transposed(do_t, words, head, tile, q_count, 0, D)
            store_codes(do_codes, words, token.to(gl.int64), head, heads, rows, 0, D)
    elif program < q_programs + kv_heads * k_count:
        head = (program - q_programs) % kv_heads
        tile = (program - q_programs) // kv_heads
        if ONE_PASS:
            _key_tile(k_codes, v_codes, k_scales, v_scales, k_t, k_top, v_size, k_tiles, documents, tile, head, kv_heads, k_count,
                      k_head_stride, k_document_extra, D)
        else:
            _transpose(k_codes, k_t, k_tiles, documents, tile, head, kv_heads, k_count, 2, D)
    elif not ONE_PASS:
        index = program - q_programs - kv_heads * k_count
        _transpose(q_codes, q_t, q_tiles, documents, index // heads, index % heads, heads, q_count, 0, D)


@gluon.jit(do_not_specialize=["heads", "q_count"])
def _transpose_queries(q_codes, q_t, q_shift, q_tiles, documents, heads, q_count, D: gl.constexpr):
    """q_t of the one-pass kernel: Q's codes times 2^q_shift of their 32 tokens. Programs: heads x query tiles."""
    head = gl.program_id(0) % heads
    tile = gl.program_id(0) // heads
    document = gl.load(q_tiles + tile)
    if document >= 0:
        entry = documents + document * 8
        buffer = _copied(q_codes, entry, (tile - gl.load(entry + 5)) * ROWS, head, heads, 0, D)
        lane = gl.arange(0, ROWS, gl.SliceLayout(1, per_lane(64, 1)))
        shift = gl.load(q_shift + (head * q_count + tile) * 4 + lane // 32)
        async_copy.wait_group(0)
        store_transposed(q_t, reencoded(buffer.load(per_lane(D // 4, 1)), shift), head, tile, q_count, 0, D)


@dataclass(frozen=True)
class Gradient:
    """Outputs of `quantize_gradient`, as the module says; those of the one-pass kernel are empty without it, and q_t with it."""

    do_codes: Tensor
    do_t: Tensor
    do_group: Tensor
    delta: Tensor
    q_t: Tensor
    k_t: Tensor
    do_size: Tensor
    v_size: Tensor
    k_top: Tensor
    grad_query: Tensor


def quantize_gradient(grad: Tensor, output: Tensor, grad_lse: Tensor | None, codes: tuple[Tensor, Tensor, Tensor],
                      scales: tuple[Tensor, Tensor], tiling: Tiling, *, q_sides: tuple[int, int], k_sides: tuple[int, int],
                      packed: bool, one_pass: bool) -> Gradient:
    """Quantize dO [B, S, H, D] or packed [T, H, D], any strides, beside its contiguous O.

    `codes` are the saved ones of Q, K and V, `scales` those of K and V. head_dim 64 or 128; grad_lse float32 [B, H, S] or [H, T],
    contiguous. `q_sides` and `k_sides`: what `lse_layout` says of the query's and the key's per-token tensors.
    """
    heads, kv_heads, head_dim = grad.shape[-2], codes[1].shape[-2], grad.shape[-1]
    q_count, k_count = tiling.q_tiles.numel(), tiling.k_tiles.numel()

    def empty(*shape: int, dtype: torch.dtype = torch.uint8, made: bool = True) -> Tensor:
        return torch.empty(shape if made else (0,), dtype=dtype, device=grad.device)

    tokens = grad.numel() // max(1, heads * head_dim)
    result = Gradient(empty(tokens, heads, head_dim), empty(heads, head_dim, TILE * q_count),
                      empty(heads, 4 * q_count, dtype=torch.float32), empty(heads * tokens, dtype=torch.float32),
                      empty(heads, head_dim, TILE * q_count, made=not one_pass), empty(kv_heads, head_dim, TILE * k_count),
                      empty(heads * tokens, dtype=torch.float32, made=one_pass),
                      empty(kv_heads, 4 * k_count, dtype=torch.float32, made=one_pass),
                      empty(kv_heads, k_count, dtype=torch.float32, made=one_pass),
                      empty(TILE * q_count, heads * head_dim, dtype=torch.float16, made=one_pass))
    mode = mode_of(grad)
    with torch.cuda.device(grad.device):
        gradient_kernel[((1 if one_pass else 2) * heads * q_count + kv_heads * k_count,)](
            grad, output, result.delta if grad_lse is None else grad_lse, *codes, *scales, result.do_codes, result.do_t,
            result.do_group, result.delta, result.do_size, result.q_t, result.k_t, result.k_top, result.v_size, result.grad_query,
            tiling.documents, tiling.q_tiles, tiling.k_tiles, *strides_of(grad, mode, packed),
            *strides_of(output, "vector", packed)[:3], *q_sides, *k_sides, heads, kv_heads, q_count, k_count, D=head_dim, MODE=mode,
            DTYPE=DTYPES[grad.dtype], O_DTYPE=DTYPES[output.dtype], HAS_LSE=grad_lse is not None, TOP=bound(E4M3.max_value),
            ONE_PASS=one_pass, num_warps=4, enable_fp_fusion=False)
    return result


def transposed_queries(q_codes: Tensor, q_shift: Tensor, tiling: Tiling) -> Tensor:
    """q_t [H, D, 128 q_tiles] of the one-pass kernel: each 32 tokens of Q's codes times 2^q_shift [H, 4 q_tiles]."""
    heads, head_dim = q_codes.shape[-2:]
    q_count = tiling.q_tiles.numel()
    q_t = torch.empty((heads, head_dim, TILE * q_count), dtype=torch.uint8, device=q_codes.device)
    with torch.cuda.device(q_codes.device):
        _transpose_queries[(heads * q_count,)](q_codes, q_t, q_shift, tiling.q_tiles, tiling.documents, heads, q_count, D=head_dim,
                                               num_warps=4)
    return q_t
