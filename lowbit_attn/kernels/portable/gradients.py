"""Attention backward in plain Triton: must equal `reference.backward` on the same codes, lse and output.

Two kernels without atomics, so that gradients repeat bit for bit: one holds a block of queries and walks over keys (dQ), one holds
a block of keys and walks over the queries of all heads that share it (dK, dV). Both rebuild the same 32 x 32 blocks of dS.

Emulated products run on bf16 matrix units, which hold every operand exactly: codes times scales, E4M3(P 2^c), E4M3 dS times its
block scale. Native ones (`Target.has_native_backward`) are `tl.dot_scaled` of the codes, all seven. Q K^T and dO V^T, in both
kernels, contract head_dim: a token's scale is that of all its blocks. dS K, dS^T Q and P^T dO contract tokens, 32 of which share a
scale, as 32 x 32 elements of dS do; P's scale is 1. Nothing is transposed for them: P^T and dS^T are computed as such, and a right
operand may lie along either axis. The native form was compiled and interpreted and has not run on a device.

Operands are tiles of one document's tokens (`quantize.py`), zero where there is no token: bf16 [heads, tiles * 128, D], or codes in
that shape with scales [heads, tiles * 128, D / 32].
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


@triton.jit
def decoded(code, scale):
    """Values of E4M3 codes [R, D], and of their rows' scales [R] (int32), NaN where a scale is."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(code >= 128, -value, value)
    factor = tl.where(scale == 255, float("nan"), exponent_bits(tl.minimum(scale, 254)))
    return value, factor


@triton.jit(do_not_specialize=["heads", "scale_document", "scale_head", "count"])
def decode_kernel(codes, scales, out, out_scales, documents, tiles, scale_document, scale_head, heads, count, COLUMN: tl.constexpr,
                  D: tl.constexpr, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """Saved E4M3 codes [tokens, heads, HEAD_DIM] with their tokens' scales, to tiles of either form. Programs: (tiles * 4, heads).

    A broken block's codes are 0 in the native form: its scale is NaN, and where that is taken away the block counts as zero."""
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
    if NATIVE:
        value = tl.where((scale == 255)[:, None], 0, code).to(tl.uint8)
    else:
        value, factor = decoded(code, scale)
    row = (head * count + tile).to(tl.int64) * 128 + inner
    if NATIVE:
        group = tl.arange(0, D // 32)
        tl.store(out + row[:, None] * D + channel[None, :], value)
        tl.store(out_scales + row[:, None] * (D // 32) + group[None, :], (scale[:, None] + group[None, :] * 0).to(tl.uint8))
    else:
        tl.store(out + row[:, None] * D + channel[None, :], (value * factor[:, None]).to(tl.bfloat16))


@triton.jit(do_not_specialize=["heads", "count", "head_stride", "document_extra"])
def rows_kernel(output, do, do_scales, lse, grad_lse, delta, lse2, documents, tiles, heads, count, head_stride, document_extra,
                D: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, NATIVE: tl.constexpr):
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
    grads = tl.load(do + row[:, None] * D + channel[None, :])
    if NATIVE:
        grads, factor = decoded(grads.to(tl.int32), tl.load(do_scales + row * (D // 32)).to(tl.int32))
        grads = grads * factor[:, None]
    total = tl.sum(out * grads.to(tl.float32), 1)
    index = head * head_stride + document.to(tl.int64) * document_extra + token
    if HAS_GRAD_LSE:
        total -= tl.load(grad_lse + index, mask=exists, other=0.0)
    natural = tl.load(lse + index, mask=exists, other=-float("inf"))
    tl.store(delta + row, total)
    tl.store(lse2 + row, tl.where(natural == -float("inf"), float("inf"), natural * LOG2E))


@triton.jit
def round_squares(x, NATIVE: tl.constexpr):
    """x [R, N] in E4M3 with one power-of-two scale per 32 x 32 block: codes and scales [R, N / 32] (native), or values; a block
    with NaN or Inf is NaN throughout."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    blocks = tl.reshape(magnitude_bits(x), (R // 32, 32, N // 32, 32))
    of_block = scale_code(tl.max(tl.max(blocks, 3), 1), E4M3_BOUND[0], E4M3_BOUND[1], 127)
    whole = tl.broadcast_to(tl.expand_dims(tl.expand_dims(of_block, 1), 3), (R // 32, 32, N // 32, 32))
    code = tl.reshape(whole, (R, N))
    scaled = x * exponent_bits(254 - tl.minimum(code, 254))
    if NATIVE:
        of_row = tl.broadcast_to(tl.expand_dims(of_block, 1), (R // 32, 32, N // 32))
        return scaled.to(tl.float8e4nv), tl.reshape(of_row, (R, N // 32)).to(tl.uint8)
    else:
        value = round_to_element(scaled, 3, -6, E4M3_TOP)
        return value * tl.where(code == 255, float("nan"), exponent_bits(tl.minimum(code, 254))), code


@triton.jit
def scales_of_rows(scales, row, D: tl.constexpr, NATIVE: tl.constexpr):
    """[R, D / 32]: the scales of rows for products that contract head_dim; nothing where values carry them."""
    if NATIVE:
        return tl.load(scales + row[:, None] * (D // 32) + tl.arange(0, D // 32)[None, :])
    else:
        return 0


@triton.jit
def scales_of_blocks(scales, first, zero, TOKENS: tl.constexpr, D: tl.constexpr):
    """[D, TOKENS / 32]: the scales of whole blocks of 32 tokens from row `first` on, for products that contract tokens."""
    code = tl.load(scales + (first + 32 * tl.arange(0, TOKENS // 32)) * (D // 32))
    # Triton's AMD backend asserts on a scale that is broadcast as it was loaded.
    code = (code.to(tl.float32) + zero).to(tl.uint8)
    return tl.broadcast_to(code[None, :], (D, TOKENS // 32))


@triton.jit
def over_channels(a, a_scales, b, b_scales, zero, NATIVE: tl.constexpr):
    """a b^T [R, N]."""
    if NATIVE:
        # Triton 3.6 does not compile a constant accumulator here.
        total = tl.zeros([a.shape[0], b.shape[0]], tl.float32) + zero
        return tl.dot_scaled(a, a_scales, "e4m3", tl.trans(b), b_scales, "e4m3", total)
    else:
        return tl.dot(a, tl.trans(b))


@triton.jit
def probability_and_ds(a, a_scales, b, b_scales, c, c_scales, d, d_scales, lse2, delta, factor, hidden, zero, AXIS: tl.constexpr,
                       NATIVE: tl.constexpr):
    """P and dS (`round_squares`) from the scores a b^T and dP = c d^T, both 0 where hidden. AXIS: that of keys, 0 where a and c
    are theirs."""
    x = tl.where(hidden, -float("inf"), over_channels(a, a_scales, b, b_scales, zero, NATIVE) * factor)
    p = tl.exp2(x - tl.expand_dims(lse2, AXIS))
    ds = tl.where(hidden, 0.0, p * (over_channels(c, c_scales, d, d_scales, zero, NATIVE) - tl.expand_dims(delta, AXIS)))
    values, scales = round_squares(ds, NATIVE)
    return p, values, scales


@triton.jit
def round_weights(p, P_LOG2: tl.constexpr, CONVERTS: tl.constexpr):
    """E4M3(P 2^c) as the values or, where the hardware converts, as codes; NaN stays NaN."""
    scaled = p * power_of_two(P_LOG2)
    if CONVERTS:
        return tl.where(scaled == scaled, tl.minimum(scaled, E4M3_TOP), scaled).to(tl.float8e4nv)
    else:
        return tl.where(scaled == scaled, round_magnitude(scaled, 3, -6, E4M3_TOP), scaled)


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


@triton.jit(do_not_specialize=["heads", "groups", "q_tiles", "k_tiles", "factor", "scale", "zero"])
def query_gradient(q, q_scales, k, k_scales, grad_k, v, v_scales, do, do_scales, delta, lse2, grad_query, documents, work, count,
                   heads, groups, q_tiles, k_tiles, factor, scale, zero, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
                   HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr, NATIVE: tl.constexpr):
    """dQ of one block of ROWS queries. Programs: (heads, work entries). grad_k: K as dS K reads it, emulated."""
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
    query_scales, grad_scales = scales_of_rows(q_scales, padded, D, NATIVE), scales_of_rows(do_scales, padded, D, NATIVE)
    row_lse, row_delta = tl.load(lse2 + padded), tl.load(delta + padded)
    first = (head // groups * k_tiles + k_tile).to(tl.int64) * 128
    limit = tl.minimum(k_valid, row + diagonal + 1)
    total = tl.zeros([ROWS, D], tl.float32)
    if NATIVE:
        total += zero
    for start in range(0, tl.minimum(k_valid, rows + diagonal), KEYS):
        key = start + tl.arange(0, KEYS)
        place = (first + key)[:, None] * D + channel[None, :]
        keys, values = tl.load(k + place), tl.load(v + place)
        key_scales = scales_of_rows(k_scales, first + key, D, NATIVE)
        value_scales = scales_of_rows(v_scales, first + key, D, NATIVE)
        if not NATIVE:
            grad_keys = tl.load(grad_k + place)
        hidden = key[None, :] >= limit[:, None]
        _, ds, ds_scales = probability_and_ds(queries, query_scales, keys, key_scales, grads, grad_scales, values, value_scales,
                                              row_lse, row_delta, factor, hidden, zero, 1, NATIVE)
        # Rows that see a broken key have NaN in dS; the others multiply it by zero.
        if NATIVE:
            scales = tl.minimum(scales_of_blocks(k_scales, first + start, zero, KEYS, D), 254).to(tl.uint8)
            total = tl.dot_scaled(ds, ds_scales, "e4m3", keys, scales, "e4m3", total)
        else:
            grad_keys = tl.where(grad_keys == grad_keys, grad_keys, 0.0)
            total = tl.dot(ds.to(tl.bfloat16), grad_keys, total)
    store_gradient(grad_query, total, (q_row + row).to(tl.int64), row < rows, head, heads, scale, D, HEAD_DIM, ROTATE)


@triton.jit(do_not_specialize=["kv_heads", "groups", "q_tiles", "k_tiles", "factor", "scale", "zero"])
def key_gradients(q, q_scales, grad_q, k, k_scales, v, v_scales, do, do_scales, delta, lse2, grad_key, grad_value, documents, tiles,
                  kv_heads, groups, q_tiles, k_tiles, factor, scale, zero, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
                  HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr, NATIVE: tl.constexpr, P_LOG2: tl.constexpr,
                  CONVERTS: tl.constexpr):
    """dK and dV of one block of KEYS keys. Programs: (key/value heads, tiles * 128 / KEYS). grad_q: Q as dS Q reads it, emulated.

    The native form computes P^T and dS^T at once, for they are left operands of products over rows."""
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
    place = (head * k_tiles + tile).to(tl.int64) * 128 + tl.program_id(1) % BLOCKS * KEYS + tl.arange(0, KEYS)
    keys, values = tl.load(k + place[:, None] * D + channel[None, :]), tl.load(v + place[:, None] * D + channel[None, :])
    key_scales, value_scales = scales_of_rows(k_scales, place, D, NATIVE), scales_of_rows(v_scales, place, D, NATIVE)
    # The first row that sees a key of the block, down to a whole block of rows; none if the keys do not exist.
    begin = tl.where(first_key < k_valid, tl.maximum(first_key - diagonal, 0) // ROWS * ROWS, q_len)
    grad_k, grad_v = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    if NATIVE:
        grad_k, grad_v = grad_k + zero, grad_v + zero
    for group in range(0, groups):
        base = ((head * groups + group) * q_tiles + q_tile).to(tl.int64) * 128
        for start in range(begin, q_len, ROWS):
            row = start + tl.arange(0, ROWS)
            padded = base + row
            at = padded[:, None] * D + channel[None, :]
            queries, grads = tl.load(q + at), tl.load(do + at)
            query_scales, grad_scales = scales_of_rows(q_scales, padded, D, NATIVE), scales_of_rows(do_scales, padded, D, NATIVE)
            if NATIVE:
                row_lse, row_delta = tl.load(lse2 + padded), tl.load(delta + padded)
                hidden = (key[:, None] >= k_valid) | (key[:, None] > (row + diagonal)[None, :])
                p, ds, ds_scales = probability_and_ds(keys, key_scales, queries, query_scales, values, value_scales, grads,
                                                      grad_scales, row_lse, row_delta, factor, hidden, zero, 0, NATIVE)
                # Ones at run time, for Triton 3.6 and its scales (`forward.add_values`).
                ones = (tl.full([KEYS, ROWS // 32], 127.0, tl.float32) + zero).to(tl.uint8)
                scales = scales_of_blocks(do_scales, base + start, zero, ROWS, D)
                grad_v = tl.dot_scaled(round_weights(p, P_LOG2, CONVERTS), ones, "e4m3", grads, scales, "e4m3", grad_v)
                scales = scales_of_blocks(q_scales, base + start, zero, ROWS, D)
                grad_k = tl.dot_scaled(ds, ds_scales, "e4m3", queries, scales, "e4m3", grad_k)
            else:
                hidden = (key[None, :] >= k_valid) | (key[None, :] > (row + diagonal)[:, None])
                row_lse, row_delta = tl.load(lse2 + padded), tl.load(delta + padded)
                p, ds, _ = probability_and_ds(queries, query_scales, keys, key_scales, grads, grad_scales, values, value_scales,
                                              row_lse, row_delta, factor, hidden, zero, 1, NATIVE)
                weight = round_weights(p, P_LOG2, CONVERTS).to(tl.bfloat16)
                grad_v = tl.dot(tl.trans(weight), grads, grad_v)
                grad_k = tl.dot(tl.trans(ds.to(tl.bfloat16)), tl.load(grad_q + at), grad_k)
    token = (k_start + key).to(tl.int64)
    exists = key < k_len
    store_gradient(grad_key, grad_k, token, exists, head, kv_heads, scale, D, HEAD_DIM, ROTATE)
    store_gradient(grad_value, grad_v, token, exists, head, kv_heads, power_of_two(-P_LOG2), D, HEAD_DIM, False)
