"""Attention forward in plain Triton: must equal `reference.forward` on the operands that `quantize.py` writes.

One program per block of query rows and head, one step per tile of 128 keys, which is part of the recipes' numerics. Operands are
either bf16 values (emulated) or codes with scales for `tl.dot_scaled` (native); layouts at the top of `quantize.py`. What differs
between recipes is chosen at compile time, field by field as `recipes.Recipe` has them.
"""

import triton
import triton.language as tl

from lowbit_attn.kernels.portable.numbers import encode, exponent_bits, pack_columns, power_of_two, spread
from lowbit_attn.kernels.portable.softmax import exponential, raised, round_probability

TILE = tl.constexpr(128)


@triton.jit
def score_tile(q, q_scales, q_side, k, k_scales, k_side, first, zero, ROWS: tl.constexpr, D: tl.constexpr, NATIVE: tl.constexpr,
               ELEMENT: tl.constexpr, GROUP: tl.constexpr):
    """Q K^T [ROWS, 128] for the keys from row `first` of the padded tiles on."""
    key = first + tl.arange(0, TILE)
    if NATIVE:
        WIDTH: tl.constexpr = D // 2 if ELEMENT == "e2m1" else D
        column = tl.arange(0, WIDTH)
        group = tl.arange(0, D // GROUP)
        keys = tl.load(k + key[:, None] * WIDTH + column[None, :])
        key_scales = tl.load(k_scales + key[:, None] * (D // GROUP) + group[None, :])
        if GROUP == 16:
            key_scales = key_scales.to(tl.float8e4nv, bitcast=True)
        # Triton 3.6 does not compile a constant accumulator here.
        total = tl.zeros([ROWS, TILE], tl.float32) + zero
        total = tl.dot_scaled(q, q_scales, ELEMENT, tl.trans(keys), key_scales, ELEMENT, total)
        if GROUP == 16:
            total = total * q_side[:, None] * tl.load(k_side + key)[None, :]
        return total
    else:
        keys = tl.load(k + key[:, None] * D + tl.arange(0, D)[None, :])
        return tl.dot(q, tl.trans(keys))


@triton.jit
def add_values(total, p, code, v, v_scales, head_tile, zero, D: tl.constexpr, NATIVE: tl.constexpr, P_ELEMENT: tl.constexpr,
               V_ELEMENT: tl.constexpr, V_SCALED: tl.constexpr, M: tl.constexpr, E: tl.constexpr, LAYOUT: tl.constexpr):
    """total + P V [ROWS, D]: `p` holds the codes' values, `code` their scales."""
    channel = tl.arange(0, D)
    if NATIVE:
        group = tl.arange(0, TILE // 32)
        p_scales = code.to(tl.uint8)
        if V_SCALED:
            value_scales = tl.load(v_scales + (head_tile * D + channel)[:, None] * 4 + group[None, :])
        else:
            # One at run time: Triton 3.6 does not compile two operands that share a constant tensor of scales.
            value_scales = (tl.full([D, TILE // 32], 127.0, tl.float32) + zero).to(tl.uint8)
        if V_ELEMENT == "e2m1":
            values = tl.load(v + (head_tile * 64 + tl.arange(0, 64))[:, None] * D + channel[None, :])
        else:
            values = tl.load(v + (head_tile * TILE + tl.arange(0, TILE))[:, None] * D + channel[None, :])
        if P_ELEMENT == "e2m1":
            return tl.dot_scaled(pack_columns(encode(p, M, E, 4)), p_scales, P_ELEMENT, values, value_scales, V_ELEMENT, total)
        else:
            return tl.dot_scaled(p.to(tl.float8e4nv), p_scales, P_ELEMENT, values, value_scales, V_ELEMENT, total)
    else:
        values = tl.load(v + (head_tile * TILE + tl.arange(0, TILE))[:, None] * D + channel[None, :])
        scaled = p if LAYOUT == "fixed" else p * spread(exponent_bits(tl.minimum(code, 254)), 32)
        return tl.dot(scaled.to(tl.bfloat16), values, total)


@triton.jit
def shifted(p, exponent, reference):
    """p 2^(exponent - reference) [R, 128] for p >= 0 [R, 128], integers exponent [128] <= reference [R] wherever p is not 0.

    Added to the exponent field, for the powers of two may leave fp32's range by themselves. Below 2^-126 it is 0.
    """
    field = exponent.to(tl.int32)[None, :] - reference.to(tl.int32)[:, None]
    bits = p.to(tl.int32, bitcast=True) + (field << 23)
    return tl.where((p > 0.0) & (bits >= 0x00800000), bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit(do_not_specialize=["heads", "groups", "q_tiles", "k_tiles", "head_stride", "document_extra", "factor", "zero"])
def attention(q, q_scales, q_side, k, k_scales, k_side, v, v_scales, v_side, output, lse, documents, work, count, heads, groups,
              q_tiles, k_tiles, head_stride, document_extra, factor, zero, ROWS: tl.constexpr, D: tl.constexpr,
              HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr, CONVERTS: tl.constexpr, QK_ELEMENT: tl.constexpr,
              QK_GROUP: tl.constexpr, P_ELEMENT: tl.constexpr, P_LAYOUT: tl.constexpr, V_ELEMENT: tl.constexpr,
              V_SCALED: tl.constexpr, RUNNING: tl.constexpr, P_LOG2: tl.constexpr, QUANTIZED_SUM: tl.constexpr,
              EXPONENTIAL: tl.constexpr, MAXIMUM: tl.constexpr, THRESHOLD: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
              TOP: tl.constexpr, BOUND_EXPONENT: tl.constexpr, BOUND_FRACTION: tl.constexpr):
    """Programs: (heads, work entries). factor: what turns the products into base-two scores; zero: 0.0 at run time.

    P_LOG2: c of a P without stored scales; RUNNING: V's exponents are folded into P relative to a reference that each row raises.
    """
    if tl.program_id(1) >= tl.load(count):
        return
    entry = work + tl.program_id(1) * 8
    q_row, rows, k_valid = tl.load(entry), tl.load(entry + 1), tl.load(entry + 3)
    k_tile, diagonal, tiles, document = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    head = tl.program_id(0)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    q_start, q_tile = tl.load(documents + document * 8), tl.load(documents + document * 8 + 5)
    padded = (head * q_tiles + q_tile).to(tl.int64) * TILE + (q_row - q_start) + row
    q_scale, q_factor = 0, 0.0
    # Where the product takes P's codes from a conversion of its own, nobody needs their values but a quantized row sum.
    VALUES: tl.constexpr = QUANTIZED_SUM or not (NATIVE and CONVERTS and P_ELEMENT == "e4m3")
    if NATIVE:
        WIDTH: tl.constexpr = D // 2 if QK_ELEMENT == "e2m1" else D
        query = tl.load(q + padded[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
        q_scale = tl.load(q_scales + padded[:, None] * (D // QK_GROUP) + tl.arange(0, D // QK_GROUP)[None, :])
        if QK_GROUP == 16:
            q_scale = q_scale.to(tl.float8e4nv, bitcast=True)
            q_factor = tl.load(q_side + padded)
    else:
        query = tl.load(q + padded[:, None] * D + channel[None, :])
    first_tile = (head // groups * k_tiles + k_tile).to(tl.int64)

    limit = tl.minimum(k_valid, row + diagonal + 1)  # row i sees the keys before limit[i]
    full = tl.minimum(k_valid, diagonal + 1) // TILE  # tiles that every row sees whole
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    reference = tl.full([ROWS], -127.0, tl.float32)
    total = tl.zeros([ROWS, D], tl.float32) + zero
    for tile in range(0, tiles):
        head_tile = first_tile + tile
        x = score_tile(query, q_scale, q_factor, k, k_scales, k_side, head_tile * TILE, zero, ROWS, D, NATIVE, QK_ELEMENT,
                       QK_GROUP) * factor
        key = tile * TILE + tl.arange(0, TILE)
        exponent = tl.load(v_side + head_tile * TILE + tl.arange(0, TILE))
        largest = tl.max(exponent, 0) + row * 0.0
        if tile >= full:
            hidden = key[None, :] >= limit[:, None]
            x = tl.where(hidden, -float("inf"), x)
            largest = tl.max(tl.where(hidden, -127.0, exponent[None, :]), 1)
        new = raised(maximum, tl.max(x, 1), MAXIMUM, THRESHOLD, EXPONENTIAL == "schraudolph_u16")
        decay = tl.where(maximum == -float("inf"), 0.0, tl.exp2(maximum - new))
        p = exponential(x, new, EXPONENTIAL)
        maximum = new
        # A broken block of V breaks the rows that see its keys: its values are zero here. The row sum has it too where V's
        # exponents are folded into P, and scores of Inf or NaN, which integers would lose.
        broken = tl.where(largest == 128.0, float("nan"), 0.0)
        poison = broken if RUNNING else 0.0
        if QUANTIZED_SUM or EXPONENTIAL != "exact":
            lost = tl.max(tl.where(x < float("inf"), 0, 1), 1)
            poison = tl.where(lost > 0, float("nan"), poison)
        if RUNNING:
            now = tl.maximum(reference, largest)
            lift = exponent_bits(tl.maximum(reference - now, -127.0).to(tl.int32) + 127)
            folded = shifted(p * power_of_two(P_LOG2), exponent, now)
            reference = now
            total = total * (decay * lift)[:, None]
        else:
            folded = p if P_LOG2 == 0.0 else p * power_of_two(P_LOG2)
            total = total * (decay + broken)[:, None]
        weight, code = round_probability(folded, P_LAYOUT, M, E, TOP, BOUND_EXPONENT, BOUND_FRACTION, CONVERTS, VALUES)
        if not QUANTIZED_SUM:
            added = tl.sum(p, 1)
        elif RUNNING:
            plain, _ = round_probability(p * power_of_two(P_LOG2), P_LAYOUT, M, E, TOP, BOUND_EXPONENT, BOUND_FRACTION, CONVERTS,
                                         True)
            added = tl.sum(plain, 1) * power_of_two(-P_LOG2)
        elif P_LAYOUT == "fixed":
            added = tl.sum(weight, 1) * power_of_two(-P_LOG2)
        else:
            added = tl.sum(weight * spread(exponent_bits(tl.minimum(code, 254)), 32), 1)
        row_sum = row_sum * decay + added + poison
        total = add_values(total, weight, code, v, v_scales, head_tile, zero, D, NATIVE, P_ELEMENT, V_ELEMENT, V_SCALED, M, E,
                           P_LAYOUT)

    sees = limit > 0
    divisor = tl.where(row_sum == 0.0, tl.where(sees, float("nan"), 1.0), row_sum)
    result = total / divisor[:, None]
    if P_LAYOUT == "fixed":
        result = result * power_of_two(-P_LOG2)
    if RUNNING:
        result = result * exponent_bits(tl.minimum(reference, 127.0).to(tl.int32) + 127)[:, None]
    result = tl.where(sees[:, None], result, 0.0)
    token = (q_row + row).to(tl.int64)
    exists = row < rows
    tl.store(output + (token * heads + head)[:, None] * HEAD_DIM + channel[None, :], result.to(output.dtype.element_ty),
             mask=exists[:, None] & (channel < HEAD_DIM)[None, :])
    natural = (maximum + tl.log2(divisor)) * 0.6931471805599453
    tl.store(lse + head * head_stride + document.to(tl.int64) * document_extra + token, tl.where(sees, natural, -float("inf")),
             mask=exists)
