"""dQ, dK and dV of FP8 attention in one pass (recipe mxfp8); equals reference.backward on the same codes.

One persistent program per multiprocessor. Two consumer warpgroups hold 64 keys each while the query tiles that see them pass, from
the document's last to the first, each for every query head of the group. Per tile of 64 keys and 64 queries: S^T = K Q^T and
dP^T = V dO^T, then dV += P^T dO and dK += dS^T Q. The codes of dS also go through shared memory to a third warpgroup, which
multiplies them by K of all 128 keys, adds the product to dQ in global memory, and keeps the ring of tiles full: a loader warp
would cost the consumers 16 registers a thread, which they have not.

Operands, all E4M3 codes: q, do, k, v [tokens, heads * D]; do_t, q_t [Hq * D, padded queries], k_t [Hkv * D, padded keys]
(`quantize_gradient`); records and references, see `one_pass_records`. dQ is float16 [padded queries, Hq * D], zero beforehand; its
sums come in no fixed order, so that runs differ in the last bits (the two-kernel form repeats bit for bit).

The FP8 accumulators keep about 13 bits, so every PROMOTE tiles dK and dV are added to float32 masters in global memory (L2), and
dQ's start anew at every tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from lowbit_attn.kernels.hopper.compat import reinterpreted, tma_add, tma_load
from lowbit_attn.kernels.hopper.forward_tiles import ROWS, operand, pack
from lowbit_attn.kernels.hopper.gradient_tiles import (
    blocked,
    column_vector,
    exponent_of,
    flat,
    load_tile,
    operand_layout,
    over_blocks,
    over_rows,
    power,
    promote,
    rotated,
    store_rows,
    sum_layout,
    tiles_of,
    with_master,
)
from lowbit_attn.kernels.hopper.inline import halves, transposed_bytes, uniform, zero_with
from lowbit_attn.kernels.hopper.work_queue import announce, entry_of, following, queue

COLUMNS = gl.constexpr(64)
"""Queries of a tile."""

HALF = gl.constexpr(64)
"""Channels of dQ that the third warpgroup has registers for."""


@gluon.jit
def store_codes(words, memory):
    """dS^T as packed words [64 keys, 64 queries / 4] to shared memory as [64 queries, 32 pairs of keys (r, r + 8)]: one transposing
    store of matrices."""
    parts = words.reshape([4, 2, 8, 4, 4]).permute((0, 2, 3, 4, 1))  # warp, lane / 4, block of 16 queries, c, row
    upper, lower = gl.split(parts)
    first, second = transposed_bytes(upper, lower)
    first_even, first_odd = halves(first)
    second_even, second_odd = halves(second)
    pairs = gl.join(gl.join(first_even, first_odd), gl.join(second_even, second_odd))  # ..., e, j
    memory.store(pairs.permute((2, 5, 3, 4, 0, 1)).reshape([COLUMNS, ROWS // 2]))


@gluon.jit
def probabilities(scores, row_scale, bias, column_scale):
    """P of a tile as `one_pass_records` scales it."""
    s = blocked(scores)
    BY_BLOCK: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, s.type.layout)))
    a = gl.convert_layout(row_scale, gl.SliceLayout(1, BY_BLOCK))[:, None] * column_scale[None, :]
    return flat(gl.exp2(s * over_blocks(a) + over_rows(bias, s)))


@gluon.jit
def score_gradients(p, dp, value_scale, column_scale, weight):
    """dS of a tile, relative to the exponents of its queries."""
    d = blocked(dp)
    BY_BLOCK: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, d.type.layout)))
    u = gl.convert_layout(value_scale, gl.SliceLayout(1, BY_BLOCK))[:, None] * column_scale[None, :]
    return flat(gl.convert_layout(blocked(p), d.type.layout) * (d * over_blocks(u) - over_rows(weight, d)))


@gluon.jit
def score_vectors(vector, BY_BLOCK: gl.constexpr):
    """What a tile's scores need of its record: the exponent beside them and their factor."""
    return column_vector(vector, 0, COLUMNS), vector.slice(128, 2).load(gl.SliceLayout(0, BY_BLOCK))


@gluon.jit
def one_of(vector, PLACE: gl.constexpr):
    """A float of a record, as a scalar."""
    return gl.max(vector.slice(PLACE, 1).load(gl.SliceLayout(0, sum_layout(COLUMNS))), 0)


@gluon.jit
def scores_of(k, q):
    """S^T of a tile, issued."""
    return warpgroup_mma(k, q.permute((1, 0)), gl.zeros([ROWS, COLUMNS], gl.float32, sum_layout(COLUMNS)), use_acc=False,
                         is_async=True)


@gluon.jit
def advance(step, next_step, k, v, q_smem, do_smem, q_t_smem, do_t_smem, vectors, ds_smem, rows_full, columns_full, empty, ds_full,
            ds_empty, scores, bias, column_scale, row_scale, value_scale, first_query, last_query, valid, dk, dv, D: gl.constexpr,
            STAGES: gl.constexpr, WARPGROUP: gl.constexpr, BY_BLOCK: gl.constexpr):
    """dV, dS and dK of a query tile whose scores are there, and beside dK the scores of the next. Row r of `valid` sees columns
    first_query + r .. last_query."""
    TILE: gl.constexpr = sum_layout(COLUMNS)
    OPERAND: gl.constexpr = operand_layout(D)
    stage = step % STAGES
    vector = vectors.index(stage)
    lift_v = one_of(vector, 132)
    lift_k = one_of(vector, 133)
    if (lift_k != 1.0) | (lift_v != 1.0):
        dk = dk * lift_k
        dv = dv * lift_v
    p = probabilities(scores, row_scale, bias, column_scale)
    masked = (first_query > 1 - ROWS) | (last_query < COLUMNS) | (valid < ROWS)
    if masked:
        key = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
        query = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE))
        first = key + first_query
        number = gl.maximum(gl.where(key < valid, last_query - first, 0), 0)
        # One comparison for both ends: a column before the first is a huge number without a sign.
        p = gl.where((query[None, :] - first[:, None]).to(gl.uint32) < number.to(gl.uint32)[:, None], p, 0.0)
    codes = pack(p, OPERAND)
    # Issued after P is packed: ptxas has no registers for dP beside the exponentials.
    dp = warpgroup_mma(v, do_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, COLUMNS], gl.float32, TILE), use_acc=False,
                       is_async=True)
    mbarrier.wait(columns_full.index(stage), (step // STAGES) & 1)
    dv = warpgroup_mma(operand(codes, OPERAND), do_t_smem.index(stage).permute((1, 0)), dv, is_async=True)
    column_scale = vector.slice(130, 2).load(gl.SliceLayout(0, BY_BLOCK))  # ahead of the wait, which hides its latency
    dp, dv = warpgroup_mma_wait(1, deps=(dp, dv))
    ds = score_gradients(p, dp, value_scale, column_scale, column_vector(vector, COLUMNS, COLUMNS))
    if masked:
        ds = zero_with(ds, p)  # zero times a NaN of another document
    words = pack(ds, OPERAND)
    buffer = step & 1
    mbarrier.wait(ds_empty.index(buffer), ((step // 2) & 1) ^ 1)
    store_codes(words, ds_smem.index(buffer * 2 + WARPGROUP))
    dk = warpgroup_mma(operand(words, OPERAND), q_t_smem.index(stage).permute((1, 0)), dk, is_async=True)
    next_stage = next_step % STAGES
    mbarrier.wait(rows_full.index(next_stage), (next_step // STAGES) & 1)
    scores = scores_of(k, q_smem.index(next_stage))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(buffer), count=1)
    bias, column_scale = score_vectors(vectors.index(next_stage), BY_BLOCK)
    dv, dk, scores = warpgroup_mma_wait(0, deps=(dv, dk, scores))
    mbarrier.arrive(empty.index(stage), count=1)
    return scores, bias, column_scale, dk, dv


@gluon.jit
def store_gradient(out, x, staging, first, rows, head, heads, D: gl.constexpr):
    """Rows of an accumulator to out [tokens, heads, D], by way of shared memory for 64 channels."""
    if D == 64:
        store_rows(out, x, staging, first, rows, head, heads, D, D)
    else:
        lower, upper = gl.split(x.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
        store_rows(out, gl.convert_layout(lower, sum_layout(HALF)), staging, first, rows, head, heads, HALF, D)
        store_rows(out + HALF, gl.convert_layout(upper, sum_layout(HALF)), staging, first, rows, head, heads, HALF, D)


@gluon.jit
def consume(grad_key, grad_value, k_scales, v_scales, references_v, references_k, work, count, slot, announced, masters, staging,
            k, v, q_smem, do_smem, q_t_smem, do_t_smem, vectors, ds_smem, kv_full, kv_empty, rows_full, columns_full, empty,
            ds_full, ds_empty, kv_heads, groups, head_stride, document_extra, tiles_in_all, scale, GROUP, WARPGROUP: gl.constexpr,
            D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, ROTATE: gl.constexpr, P_LOG2: gl.constexpr):
    """A consumer warpgroup: 64 keys of each work entry."""
    TILE: gl.constexpr = sum_layout(COLUMNS)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    SUM: gl.constexpr = sum_layout(D)
    BLOCKED: gl.constexpr = blocked(gl.zeros([ROWS, COLUMNS], gl.float32, TILE)).type.layout
    BY_BLOCK: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, BLOCKED)))
    key = gl.arange(0, ROWS, ROW)
    dk_master = masters + (gl.program_id(0) * 4 + WARPGROUP * 2) * (ROWS * D)
    dv_master = dk_master + ROWS * D
    step = 0
    turn = 0
    index = gl.program_id(0)
    entries = gl.load(count)
    while index < entries * kv_heads:
        entry, kv_head = entry_of(index, entries, GROUP)
        info = work + entry * 11
        k_row = gl.load(info) + WARPGROUP * ROWS
        rows = gl.load(info + 1) - WARPGROUP * ROWS
        valid = gl.load(info + 2) - WARPGROUP * ROWS
        document_tile = gl.load(info + 4)
        q_len = gl.load(info + 5)
        first = gl.load(info + 6)
        tiles = uniform(gl.load(info + 7))
        shift = gl.load(info + 8) + WARPGROUP * ROWS
        document = gl.load(info + 9)
        side = kv_head.to(gl.int64) * head_stride + document.to(gl.int64) * document_extra + k_row
        k_code = gl.load(k_scales + side + key, mask=key < rows, other=127).to(gl.int32)
        v_code = gl.load(v_scales + side + key, mask=key < rows, other=127).to(gl.int32)
        row_scale = power(k_code)
        value_scale = gl.exp2(exponent_of(v_code))
        table = kv_head.to(gl.int64) * tiles_in_all + document_tile
        mine = tiles_of(tiles, first, shift, valid, rows, groups, COLUMNS)
        tile = gl.maximum(first + tiles - 1, 0)
        # Keys that no query meets have no tile, and no reference.
        promoted_v = gl.load(references_v + table + tile, mask=mine > 0, other=0.0)
        promoted_k = gl.load(references_k + table + tile, mask=mine > 0, other=0.0)
        dk = gl.zeros([ROWS, D], gl.float32, SUM)
        dv = gl.zeros([ROWS, D], gl.float32, SUM)
        left = groups  # heads whose turn it is for this tile
        first_query = shift - tile * COLUMNS
        last_query = q_len - tile * COLUMNS
        mbarrier.wait(kv_full, turn & 1)
        scores = gl.zeros([ROWS, COLUMNS], gl.float32, TILE)
        bias = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(0, TILE))
        column_scale = gl.zeros([2], gl.float32, gl.SliceLayout(0, BY_BLOCK))
        if mine > 0:
            mbarrier.wait(rows_full.index(step % STAGES), (step // STAGES) & 1)
            scores = scores_of(k, q_smem.index(step % STAGES))
            bias, column_scale = score_vectors(vectors.index(step % STAGES), BY_BLOCK)
            scores = warpgroup_mma_wait(0, deps=(scores,))
        for i in range(0, mine):
            # At the last tile its own scores once more: nobody reads them.
            next_step = gl.where(i + 1 < mine, step + 1, step)
            scores, bias, column_scale, dk, dv = advance(
                step, next_step, k, v, q_smem, do_smem, q_t_smem, do_t_smem, vectors, ds_smem, rows_full, columns_full, empty,
                ds_full, ds_empty, scores, bias, column_scale, row_scale, value_scale, first_query, last_query, valid, dk, dv, D,
                STAGES, WARPGROUP, BY_BLOCK)
            if (i % PROMOTE == PROMOTE - 1) & (i + 1 < mine):
                here = table + (q_len - last_query) // COLUMNS
                base_v = gl.load(references_v + here)
                base_k = gl.load(references_k + here)
                promote(dv, dv_master, gl.full([ROWS], promoted_v - base_v, gl.float32, ROW), i >= PROMOTE, D)
                promote(dk, dk_master, gl.full([ROWS], promoted_k - base_k, gl.float32, ROW), i >= PROMOTE, D)
                promoted_v = base_v
                promoted_k = base_k
                dk = gl.zeros([ROWS, D], gl.float32, SUM)
                dv = gl.zeros([ROWS, D], gl.float32, SUM)
            left -= 1
            first_query = gl.where(left == 0, first_query + COLUMNS, first_query)
            last_query = gl.where(left == 0, last_query + COLUMNS, last_query)
            left = gl.where(left == 0, groups, left)
            step += 1
        for _ in range(mine, tiles * groups):  # tiles that only the other warpgroup's keys meet
            mbarrier.wait(rows_full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.wait(columns_full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(empty.index(step % STAGES), count=1)
            mbarrier.wait(ds_empty.index(step & 1), ((step // 2) & 1) ^ 1)
            mbarrier.arrive(ds_full.index(step & 1), count=1)
            step += 1
        index = following(slot, announced, turn)
        mbarrier.arrive(kv_empty, count=1)
        turn += 1
        # Loaded again: registers that hold these through the loop would be spilled.
        k_row = gl.load(info) + WARPGROUP * ROWS
        rows = gl.load(info + 1) - WARPGROUP * ROWS
        valid = gl.load(info + 2) - WARPGROUP * ROWS
        final = table + gl.maximum(first + tiles - 1 - gl.maximum(mine - 1, 0) // groups, 0)
        base_v = gl.load(references_v + final, mask=mine > 0, other=0.0)
        base_k = gl.load(references_k + final, mask=mine > 0, other=0.0)
        seen = gl.convert_layout(key < valid, gl.SliceLayout(1, SUM))[:, None]
        if mine > PROMOTE:
            dv = with_master(dv, dv_master, gl.full([ROWS], promoted_v - base_v, gl.float32, ROW), D)
            dk = with_master(dk, dk_master, gl.full([ROWS], promoted_k - base_k, gl.float32, ROW), D)
        store_gradient(grad_value, gl.where(seen, dv * gl.exp2(base_v - P_LOG2), 0.0), staging, k_row, rows, kv_head, kv_heads, D)
        dk = gl.where(seen, dk * (gl.exp2(base_k) * scale), 0.0)
        if ROTATE:
            dk = rotated(dk, D) * (D ** -0.5)
        store_gradient(grad_key, dk, staging, k_row, rows, kv_head, kv_heads, D)


@gluon.jit
def product(early, late, keys, half: gl.constexpr, both):
    """dQ of a tile for 64 channels, issued: dS of the first 64 keys, and of the second where they meet it."""
    dq = warpgroup_mma(early, keys.index(0).slice(half * HALF, HALF).permute((1, 0)),
                       gl.zeros([COLUMNS, HALF], gl.float32, sum_layout(HALF)), use_acc=False, is_async=True)
    if both:
        dq = warpgroup_mma(late, keys.index(1).slice(half * HALF, HALF).permute((1, 0)), dq, is_async=True)
    return dq


@gluon.jit
def reduce_queries(q_desc, do_desc, q_t_desc, do_t_desc, vector_desc, k_desc, v_desc, k_t_desc, dq_desc, k_top, work, count, slot,
                   announced, k_smem, v_smem, k_t_smem, q_smem, do_smem, q_t_smem, do_t_smem, vectors, ds_smem, dq_smem, kv_full,
                   kv_empty, k_t_full, rows_full, columns_full, empty, ds_full, ds_empty, kv_heads, groups, tiles_in_all,
                   k_tiles_in_all, GROUP, D: gl.constexpr, STAGES: gl.constexpr):
    """The third warpgroup: all loads, STAGES - 1 tiles ahead, and dQ of each tile from the other two's dS."""
    SUM: gl.constexpr = sum_layout(HALF)
    CODES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    step = 0
    turn = 0
    index = gl.program_id(0)
    entries = gl.load(count)
    while index < entries * kv_heads:
        entry, kv_head = entry_of(index, entries, GROUP)
        info = work + entry * 11
        k_row = uniform(gl.load(info))
        q_start = uniform(gl.load(info + 3))
        document_tile = uniform(gl.load(info + 4))
        first = gl.load(info + 6)
        tiles = uniform(gl.load(info + 7))
        k_tile = uniform(gl.load(info + 10))
        # Tiles that the second 64 keys meet.
        both = tiles_of(tiles, first, gl.load(info + 8) + ROWS, gl.load(info + 2) - ROWS, gl.load(info + 1) - ROWS, groups,
                        COLUMNS)
        k_exponent = gl.load(k_top + kv_head * k_tiles_in_all + k_tile)
        number = tiles * groups
        mbarrier.wait(kv_empty, (turn & 1) ^ 1)
        mbarrier.expect(kv_full, 4 * k_desc.block_type.nbytes)
        for w in gl.static_range(2):
            tma_load(k_desc, [k_row + w * ROWS, kv_head * D], kv_full, k_smem.index(w))
            tma_load(v_desc, [k_row + w * ROWS, kv_head * D], kv_full, v_smem.index(w))
        mbarrier.expect(k_t_full, 2 * k_t_desc.block_type.nbytes)
        for w in gl.static_range(2):
            tma_load(k_t_desc, [kv_head * D, k_tile * 128 + w * ROWS], k_t_full, k_t_smem.index(w))
        last = uniform(first + tiles - 1)
        head0 = kv_head * groups
        tile = last
        head = head0
        row = (document_tile + last) * COLUMNS
        channel = head0 * D
        last_channel = channel + (groups - 1) * D
        # At least once past the lead: K's columns are waited for where no query meets them too, else their barrier would be
        # armed again while they are on their way.
        for i in range(0, gl.maximum(number, 1) + STAGES - 1):
            if i < number:
                load_tile(step + i, tile, head, q_desc, do_desc, q_t_desc, do_t_desc, vector_desc, q_smem, do_smem, q_t_smem,
                          do_t_smem, vectors, rows_full, columns_full, empty, q_start, document_tile, tiles_in_all, D, STAGES)
                head += 1
                if head == head0 + groups:
                    head = head0
                    tile -= 1
            if i == STAGES - 1:
                mbarrier.wait(k_t_full, turn & 1)
                index = announce(count, slot, announced, entries * kv_heads, 4)
            if (i >= STAGES - 1) & (number > 0):
                here = i - (STAGES - 1)
                now = step + here
                buffer = now & 1
                mbarrier.wait(ds_full.index(buffer), (now // 2) & 1)
                early = reinterpreted(ds_smem.index(buffer * 2), gl.float8e4nv, [COLUMNS, ROWS], CODES)
                late = reinterpreted(ds_smem.index(buffer * 2 + 1), gl.float8e4nv, [COLUMNS, ROWS], CODES)
                relative = vectors.index(now % STAGES).slice(192, COLUMNS).load(gl.SliceLayout(1, SUM))
                factor = gl.exp2(gl.minimum(k_exponent - relative, 40.0))[:, None]
                for half in gl.static_range(D // HALF):
                    dq = product(early, late, k_t_smem, half, here < both)
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                    if half == 0:
                        tma.store_wait(0)
                    dq_smem.index(half).store((dq * factor).to(gl.float16))
                fence_async_shared()
                mbarrier.arrive(ds_empty.index(buffer), count=1)
                for half in gl.static_range(D // HALF):
                    tma_add(dq_desc, [row, channel + half * HALF], dq_smem.index(half))
                if channel == last_channel:
                    channel = head0 * D
                    row -= COLUMNS
                else:
                    channel += D
        step += number
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "groups", "head_stride", "document_extra", "tiles_in_all", "k_tiles_in_all", "scale",
                              "GROUP"])
def gradients(q_desc, do_desc, q_t_desc, do_t_desc, vector_desc, k_desc, v_desc, k_t_desc, dq_desc, grad_key, grad_value, k_scales,
              v_scales, k_top, references_v, references_k, work, count, masters, kv_heads, groups, head_stride,
              document_extra, tiles_in_all, k_tiles_in_all, scale, GROUP, D: gl.constexpr, STAGES: gl.constexpr,
              PROMOTE: gl.constexpr, ROTATE: gl.constexpr, P_LOG2: gl.constexpr, REGISTERS: gl.constexpr):
    """The kernel: two consumers of 64 keys, a warpgroup for loads and dQ."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    k_t_smem = gl.allocate_shared_memory(k_t_desc.dtype, [2] + k_t_desc.block_type.shape, k_t_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    q_t_smem = gl.allocate_shared_memory(q_t_desc.dtype, [STAGES] + q_t_desc.block_type.shape, q_t_desc.layout)
    do_t_smem = gl.allocate_shared_memory(do_t_desc.dtype, [STAGES] + do_t_desc.block_type.shape, do_t_desc.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES] + vector_desc.block_type.shape, vector_desc.layout)
    ds_smem = gl.allocate_shared_memory(gl.int16, [4, COLUMNS, ROWS // 2], PAIRS)
    dq_smem = gl.allocate_shared_memory(gl.float16, [D // HALF] + dq_desc.block_type.shape, dq_desc.layout)
    staging = gl.allocate_shared_memory(gl.float32, [2, ROWS, HALF], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_t_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    rows_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    columns_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    mbarrier.init(k_t_full, count=1)
    slot, announced = queue()
    for buffer in gl.static_range(2):
        mbarrier.init(ds_full.index(buffer), count=2)
        mbarrier.init(ds_empty.index(buffer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(rows_full.index(stage), count=1)
        mbarrier.init(columns_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (grad_key, grad_value, k_scales, v_scales, references_v, references_k, work, count, slot, announced, masters,
                   staging.index(0), k_smem.index(0), v_smem.index(0), q_smem, do_smem, q_t_smem, do_t_smem, vectors, ds_smem,
                   kv_full, kv_empty, rows_full, columns_full, empty, ds_full, ds_empty, kv_heads, groups, head_stride,
                   document_extra, tiles_in_all, scale, GROUP, 0, D, STAGES, PROMOTE, ROTATE, P_LOG2)),
        (consume, (grad_key, grad_value, k_scales, v_scales, references_v, references_k, work, count, slot, announced, masters,
                   staging.index(1), k_smem.index(1), v_smem.index(1), q_smem, do_smem, q_t_smem, do_t_smem, vectors, ds_smem,
                   kv_full, kv_empty, rows_full, columns_full, empty, ds_full, ds_empty, kv_heads, groups, head_stride,
                   document_extra, tiles_in_all, scale, GROUP, 1, D, STAGES, PROMOTE, ROTATE, P_LOG2)),
        (reduce_queries, (q_desc, do_desc, q_t_desc, do_t_desc, vector_desc, k_desc, v_desc, k_t_desc, dq_desc, k_top, work, count,
                          slot, announced, k_smem, v_smem, k_t_smem, q_smem, do_smem, q_t_smem, do_t_smem, vectors, ds_smem,
                          dq_smem, kv_full, kv_empty, k_t_full, rows_full, columns_full, empty, ds_full, ds_empty, kv_heads,
                          groups, tiles_in_all, k_tiles_in_all, GROUP, D, STAGES)),
    ], [4, 4], [REGISTERS, 64])
