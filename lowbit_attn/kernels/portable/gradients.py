"""Attention backward in plain Triton: must equal `reference.backward` on the same codes, lse and output.

Two kernels without atomics, so that gradients repeat bit for bit: one holds a block of queries and walks over keys (dQ), one holds
a block of keys and walks over the queries of all heads that share it (dK, dV). Both rebuild the same 32 x 32 blocks of dS. Products
run on bf16 matrix units, which hold every operand exactly: codes times scales, E4M3(P 2^c), E4M3 dS times its block scale.

Operands are bf16 [heads, tiles * 128, D] in tiles of one document's tokens (`quantize.py`), zero where there is no token.
"""

import triton
import triton.language as tl

from lowbit_attn.kernels.portable.numbers import (
    E4M3_BOUND,
    E4M3_TOP,
    exponent_bits,
    magnitude_bits,
    power_of_two,
    round_magnitude,
    round_to_element,
    scale_code,
)
from lowbit_attn.kernels.portable.quantize import rotate

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["heads", "scale_document", "scale_head", "count"])
def decode_kernel(codes, scales, out, documents, tiles, scale_document, scale_head, heads, count, COLUMN: tl.constexpr,
                  D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Saved E4M3 codes [tokens, heads, HEAD_DIM] times their tokens' scales, to bf16 tiles. Programs: (tiles * 4, heads)."""
    tile = tl.program_id(0) // 4
    document = tl.load(tiles + tile)
    if document < 0:
        return
    entry = documents + document * 8
    start, length = tl.load(entry + COLUMN), tl.load(entry + COLUMN + 1)
    head = tl.program_id(1)
    inner = tl.program_id(0) % 4 * 32 + tl.arange(0, 32)
    position = (tile - tl.load(entry + (6 if COLUMN == 2 else 5))) * 128 + inner
    channel = tl.arange(0, D)
    token = (start + position).to(tl.int64)
    exists = position < length
    code = tl.load(codes + ((token * heads + head) * HEAD_DIM)[:, None] + channel[None, :],
                   mask=exists[:, None] & (channel < HEAD_DIM)[None, :], other=0).to(tl.int32)
    scale = tl.load(scales + document.to(tl.int64) * scale_document + head * scale_head + token, mask=exists, other=0).to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(code >= 128, -value, value)
    factor = tl.where(scale == 255, float("nan"), exponent_bits(tl.minimum(scale, 254)))
    row = (head * count + tile).to(tl.int64) * 128 + inner
    tl.store(out + row[:, None] * D + channel[None, :], (value * factor[:, None]).to(tl.bfloat16))


@triton.jit(do_not_specialize=["heads", "count", "head_stride", "document_extra"])
def rows_kernel(output, do, lse, grad_lse, delta, lse2, documents, tiles, heads, count, head_stride, document_extra,
                D: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_GRAD_LSE: tl.constexpr):
    """delta = sum(O dO) - dlse and the base-two lse of each row, float32 [heads, tiles * 128]; +inf where a row saw no key, so that
    P and every gradient of the row vanish. Programs: (tiles * 4, heads)."""
    tile = tl.program_id(0) // 4
    document = tl.load(tiles + tile)
    if document < 0:
        return
    entry = documents + document * 8
    start, length = tl.load(entry), tl.load(entry + 1)
    head = tl.program_id(1)
    inner = tl.program_id(0) % 4 * 32 + tl.arange(0, 32)
    position = (tile - tl.load(entry + 5)) * 128 + inner
    channel = tl.arange(0, D)
    token = (start + position).to(tl.int64)
    exists = position < length
    row = (head * count + tile).to(tl.int64) * 128 + inner
    out = tl.load(output + ((token * heads + head) * HEAD_DIM)[:, None] + channel[None, :],
                  mask=exists[:, None] & (channel < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(out * tl.load(do + row[:, None] * D + channel[None, :]).to(tl.float32), 1)
    index = head * head_stride + document.to(tl.int64) * document_extra + token
    if HAS_GRAD_LSE:
        total -= tl.load(grad_lse + index, mask=exists, other=0.0)
    natural = tl.load(lse + index, mask=exists, other=-float("inf"))
    tl.store(delta + row, total)
    tl.store(lse2 + row, tl.where(natural == -float("inf"), float("inf"), natural * LOG2E))


@triton.jit
def round_squares(x):
    """x [R, N] in E4M3 with one power-of-two scale per 32 x 32 block, as values; a block with NaN or Inf is NaN throughout."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    blocks = tl.reshape(magnitude_bits(x), (R // 32, 32, N // 32, 32))
    code = scale_code(tl.max(tl.max(blocks, 3), 1), E4M3_BOUND[0], E4M3_BOUND[1], 127)
    whole = tl.broadcast_to(tl.expand_dims(tl.expand_dims(code, 1), 3), (R // 32, 32, N // 32, 32))
    code = tl.reshape(whole, (R, N))
    value = round_to_element(x * exponent_bits(254 - tl.minimum(code, 254)), 3, -6, E4M3_TOP)
    return value * tl.where(code == 255, float("nan"), exponent_bits(tl.minimum(code, 254)))


@triton.jit
def probability_and_ds(q, k, do, v, lse2, delta, factor, hidden):
    """P and dS [R, N], both 0 where hidden."""
    x = tl.where(hidden, -float("inf"), tl.dot(q, tl.trans(k)) * factor)
    p = tl.exp2(x - lse2[:, None])
    ds = tl.where(hidden, 0.0, p * (tl.dot(do, tl.trans(v)) - delta[:, None]))
    return p, round_squares(ds)


@triton.jit
def store_gradient(target, gradient, token, exists, head, heads, scale, D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   ROTATE: tl.constexpr):
    """gradient [R, D] times scale, rotated back, to target [tokens, heads, HEAD_DIM]."""
    gradient = gradient * scale
    if ROTATE:
        gradient = rotate(gradient, HEAD_DIM)
    channel = tl.arange(0, D)
    tl.store(target + ((token * heads + head) * HEAD_DIM)[:, None] + channel[None, :], gradient.to(target.dtype.element_ty),
             mask=exists[:, None] & (channel < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["heads", "groups", "q_tiles", "k_tiles", "factor", "scale"])
def query_gradient(q, k, grad_k, v, do, delta, lse2, grad_query, documents, work, count, heads, groups, q_tiles, k_tiles, factor,
                   scale, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr):
    """dQ of one block of ROWS queries. Programs: (heads, work entries). grad_k: K as dS K reads it."""
    if tl.program_id(1) >= tl.load(count):
        return
    entry = work + tl.program_id(1) * 8
    q_row, rows, k_valid = tl.load(entry), tl.load(entry + 1), tl.load(entry + 3)
    k_tile, diagonal, document = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 7)
    head = tl.program_id(0)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    q_start, q_tile = tl.load(documents + document * 8), tl.load(documents + document * 8 + 5)
    padded = (head * q_tiles + q_tile).to(tl.int64) * 128 + (q_row - q_start) + row
    queries = tl.load(q + padded[:, None] * D + channel[None, :])
    grads = tl.load(do + padded[:, None] * D + channel[None, :])
    row_lse, row_delta = tl.load(lse2 + padded), tl.load(delta + padded)
    first = (head // groups * k_tiles + k_tile).to(tl.int64) * 128
    limit = tl.minimum(k_valid, row + diagonal + 1)
    total = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, tl.minimum(k_valid, rows + diagonal), KEYS):
        key = start + tl.arange(0, KEYS)
        place = (first + key)[:, None] * D + channel[None, :]
        keys, values, grad_keys = tl.load(k + place), tl.load(v + place), tl.load(grad_k + place)
        _, ds = probability_and_ds(queries, keys, grads, values, row_lse, row_delta, factor, key[None, :] >= limit[:, None])
        # Rows that see a broken key have NaN in dS; the others multiply it by zero.
        grad_keys = tl.where(grad_keys == grad_keys, grad_keys, 0.0)
        total = tl.dot(ds.to(tl.bfloat16), grad_keys, total)
    store_gradient(grad_query, total, (q_row + row).to(tl.int64), row < rows, head, heads, scale, D, HEAD_DIM, ROTATE)


@triton.jit(do_not_specialize=["kv_heads", "groups", "q_tiles", "k_tiles", "factor", "scale"])
def key_gradients(q, grad_q, k, v, do, delta, lse2, grad_key, grad_value, documents, tiles, kv_heads, groups, q_tiles, k_tiles,
                  factor, scale, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
                  ROTATE: tl.constexpr, P_LOG2: tl.constexpr, CONVERTS: tl.constexpr):
    """dK and dV of one block of KEYS keys. Programs: (key/value heads, tiles * 128 / KEYS). grad_q: Q as dS Q reads it."""
    BLOCKS: tl.constexpr = 128 // KEYS
    tile = tl.program_id(1) // BLOCKS
    document = tl.load(tiles + tile)
    if document < 0:
        return
    entry = documents + document * 8
    q_len, k_start, k_len, k_valid = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    q_tile, diagonal = tl.load(entry + 5), tl.load(entry + 7)
    first_key = (tile - tl.load(entry + 6)) * 128 + tl.program_id(1) % BLOCKS * KEYS
    if first_key >= k_len:
        return
    head = tl.program_id(0)
    channel = tl.arange(0, D)
    key = first_key + tl.arange(0, KEYS)
    place = ((head * k_tiles + tile).to(tl.int64) * 128 + tl.program_id(1) % BLOCKS * KEYS + tl.arange(0, KEYS))[:, None] * D
    keys, values = tl.load(k + place + channel[None, :]), tl.load(v + place + channel[None, :])
    # The first row that sees a key of the block, down to a whole block of rows; none if the keys do not exist.
    begin = tl.where(first_key < k_valid, tl.maximum(first_key - diagonal, 0) // ROWS * ROWS, q_len)
    grad_k, grad_v = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    for group in range(0, groups):
        base = ((head * groups + group) * q_tiles + q_tile).to(tl.int64) * 128
        for start in range(begin, q_len, ROWS):
            row = start + tl.arange(0, ROWS)
            padded = base + row
            at = padded[:, None] * D + channel[None, :]
            queries, grads = tl.load(q + at), tl.load(do + at)
            hidden = (key[None, :] >= k_valid) | (key[None, :] > (row + diagonal)[:, None])
            row_lse, row_delta = tl.load(lse2 + padded), tl.load(delta + padded)
            p, ds = probability_and_ds(queries, keys, grads, values, row_lse, row_delta, factor, hidden)
            scaled = p * power_of_two(P_LOG2)
            if CONVERTS:
                weight = tl.where(scaled == scaled, tl.minimum(scaled, E4M3_TOP), scaled).to(tl.float8e4nv).to(tl.bfloat16)
            else:
                weight = tl.where(scaled == scaled, round_magnitude(scaled, 3, -6, E4M3_TOP), scaled).to(tl.bfloat16)
            grad_v = tl.dot(tl.trans(weight), grads, grad_v)
            grad_k = tl.dot(tl.trans(ds.to(tl.bfloat16)), tl.load(grad_q + at), grad_k)
    token = (k_start + key).to(tl.int64)
    exists = key < k_len
    store_gradient(grad_key, grad_k, token, exists, head, kv_heads, scale, D, HEAD_DIM, ROTATE)
    store_gradient(grad_value, grad_v, token, exists, head, kv_heads, power_of_two(-P_LOG2), D, HEAD_DIM, False)
