"""dO into E4M3 codes with D = sum(O dO) of those codes, and the transposed copies that the backward's products contract.

Equals `reference.operands.round_operand(dO, recipe.do)` bit for bit, in token blocks that no two documents share. One launch:

    do_codes   [tokens, H, D] uint8
    do_t       [H, D, 128 q_tiles] uint8: dO's codes, queries (j, c, e) -> (c, j, e) inside each 16, zero past a document's end
    do_group   [H, 4 q_tiles] float32: exponents of each 32 queries, NaN where the block holds NaN or Inf (so are its codes)
    delta      float32, where lse is: D of the quantized dO, minus the gradient of lse
    q_t, k_t   the same transposition of Q's and K's saved codes

A program takes 128 tokens of one head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from lowbit_attn.formats import E4M3
from lowbit_attn.kernels.hopper.inline import values_of
from lowbit_attn.kernels.hopper.quantize import DTYPES, bound, mode_of, strides_of
from lowbit_attn.kernels.hopper.quantize_tile import (
    ROWS,
    channel_values,
    copy_words,
    per_lane,
    power,
    quantize,
    start_copy,
    store_codes,
    store_group,
    store_transposed,
    thread_sum,
)
from lowbit_attn.kernels.tiling import TILE, Tiling


@gluon.jit
def _product_sum(words, even, odd):
    """Sum over channels of the codes' values times O, [128]; O in its even and odd channels [128, D / 2]."""
    WORDS: gl.constexpr = words.shape[1]
    a, b, c, d = values_of(words)
    first, third = gl.split(gl.reshape(even, [ROWS, WORDS, 2]))
    second, fourth = gl.split(gl.reshape(odd, [ROWS, WORDS, 2]))
    total = thread_sum(a * first + b * second + (c * third + d * fourth))
    return gl.convert_layout(gl.reshape(total, [ROWS]), gl.SliceLayout(1, per_lane(64, 1)))


@gluon.jit
def _transpose(codes, out, tiles_of, documents, tile, head, heads, tiles, START: gl.constexpr, D: gl.constexpr):
    """Saved codes of one padded tile to out [heads, D, 128 tiles]; START is the documents' column of the first token."""
    document = gl.load(tiles_of + tile)
    if document >= 0:
        entry = documents + document * 8
        first = (tile - gl.load(entry + (5 if START == 0 else 6))) * ROWS
        token = (gl.load(entry + START) + first).to(gl.int64)
        words = codes.to(gl.pointer_type(gl.int32), bitcast=True)
        row = (heads * (D // 16)).to(gl.int64)
        buffer = copy_words(words, token * row + head * (D // 16), row, gl.load(entry + START + 1) - first, D // 4)
        async_copy.commit_group()
        async_copy.wait_group(0)
        store_transposed(out, buffer.load(per_lane(D // 4, 1)), head, tile, tiles, 0, D)


@gluon.jit(do_not_specialize=["g_document", "g_token", "g_head", "g_channel", "o_document", "o_token", "o_head", "head_stride",
                              "document_extra", "heads", "kv_heads", "q_count", "k_count"])
def gradient_kernel(grad, output, grad_lse, q_codes, k_codes, do_codes, do_t, do_group, delta, q_t, k_t, documents, q_tiles,
                    k_tiles, g_document, g_token, g_head, g_channel, o_document, o_token, o_head, head_stride, document_extra,
                    heads, kv_heads, q_count, k_count, D: gl.constexpr, MODE: gl.constexpr, DTYPE: gl.constexpr,
                    O_DTYPE: gl.constexpr, HAS_LSE: gl.constexpr, TOP: gl.constexpr):
    """Programs: heads x query tiles of dO, the same of Q's codes, kv heads x key tiles of K's codes.

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
            store_group(do_group, gl.where(code == 255, float("nan"), (code - 127).to(gl.float32)), head, tile, q_count, lane, 32,
                        True)
            store_transposed(do_t, words, head, tile, q_count, 0, D)
            store_codes(do_codes, words, token.to(gl.int64), head, heads, rows, 0, D)
    elif program < 2 * q_programs:
        _transpose(q_codes, q_t, q_tiles, documents, (program - q_programs) // heads, (program - q_programs) % heads, heads,
                   q_count, 0, D)
    else:
        index = program - 2 * q_programs
        _transpose(k_codes, k_t, k_tiles, documents, index // kv_heads, index % kv_heads, kv_heads, k_count, 2, D)


@dataclass(frozen=True)
class Gradient:
    """Outputs of `quantize_gradient`, as the module says."""

    do_codes: Tensor
    do_t: Tensor
    do_group: Tensor
    delta: Tensor
    q_t: Tensor
    k_t: Tensor


def quantize_gradient(grad: Tensor, output: Tensor, grad_lse: Tensor | None, q_codes: Tensor, k_codes: Tensor, tiling: Tiling, *,
                      head_stride: int, document_extra: int, packed: bool) -> Gradient:
    """Quantize dO [B, S, H, D] or packed [T, H, D], any strides, beside its contiguous O and the saved codes of Q and K.

    head_dim 64 or 128; grad_lse float32 [B, H, S] or [H, T], contiguous.
    """
    heads, kv_heads, head_dim = grad.shape[-2], k_codes.shape[-2], grad.shape[-1]
    q_count, k_count = tiling.q_tiles.numel(), tiling.k_tiles.numel()

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=grad.device)

    tokens = grad.numel() // max(1, heads * head_dim)
    result = Gradient(empty(tokens, heads, head_dim), empty(heads, head_dim, TILE * q_count),
                      empty(heads, 4 * q_count, dtype=torch.float32), empty(heads * tokens, dtype=torch.float32),
                      empty(heads, head_dim, TILE * q_count), empty(kv_heads, head_dim, TILE * k_count))
    mode = mode_of(grad)
    with torch.cuda.device(grad.device):
        gradient_kernel[(2 * heads * q_count + kv_heads * k_count,)](
            grad, output, result.delta if grad_lse is None else grad_lse, q_codes, k_codes, result.do_codes, result.do_t,
            result.do_group, result.delta, result.q_t, result.k_t, tiling.documents, tiling.q_tiles, tiling.k_tiles,
            *strides_of(grad, mode, packed), *strides_of(output, "vector", packed)[:3], head_stride, document_extra, heads,
            kv_heads, q_count, k_count, D=head_dim, MODE=mode, DTYPE=DTYPES[grad.dtype], O_DTYPE=DTYPES[output.dtype],
            HAS_LSE=grad_lse is not None, TOP=bound(E4M3.max_value), num_warps=4, enable_fp_fusion=False)
    return result
