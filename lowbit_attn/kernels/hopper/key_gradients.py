"""dK and dV of FP8 attention (recipe mxfp8); equals reference.backward on the same codes.

One persistent program per multiprocessor: a loader warp and two consumer warpgroups of 64 keys each, whose K and V stay in
shared memory while the query tiles that see them pass, from the document's last to the first, each for every query head of
the group. Per tile of 64 keys and 64 queries: S^T = K Q^T and dP^T = V dO^T, then dV += P^T dO and dK += dS^T Q.

Operands, all E4M3 codes: q, do, k, v [tokens, heads * D]; q_t, do_t [Hq * D, padded queries] (see `quantize_gradient`). Scales of
keys multiply rows; what belongs to queries comes in records (`gradient_records`). P is exp2(score - lse + 8) folded with dO's
exponents. dS is rounded relative to an exponent of each row that rises with the loop: scales are powers of two, so E4M3 rounds
as with any other of them, but for the smallest values.

The FP8 accumulators keep about 13 bits, so every PROMOTE tiles both are added to float32 masters. These lie in global memory (L2),
for shared memory has no room, and shorter loops never touch them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from lowbit_attn.kernels.hopper.compat import tma_load
from lowbit_attn.kernels.hopper.forward_tiles import ROWS, operand, pack
from lowbit_attn.kernels.hopper.gradient_tiles import (
    LOWEST,
    SLACK,
    barriers,
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
    raised,
    rotated,
    skip,
    start_of,
    store_rows,
    sum_layout,
    tiles_of,
    with_master,
)
from lowbit_attn.kernels.hopper.inline import uniform
from lowbit_attn.kernels.hopper.work_queue import announce, entry_of, following, queue

COLUMNS = gl.constexpr(64)
"""Queries of a tile."""


@gluon.jit
def load_tiles(q_desc, do_desc, q_t_desc, do_t_desc, vector_desc, k_desc, v_desc, work, count, slot, announced, k_smem, v_smem,
               q_smem, do_smem, q_t_smem, do_t_smem, vectors, kv_full, kv_empty, rows_full, columns_full, empty, kv_heads, groups,
               tiles_in_all, GROUP, D: gl.constexpr, STAGES: gl.constexpr):
    """The loader warp: K and V of each work entry, then its query tiles, last first, all heads of the group in turn."""
    step = 0
    turn = 0
    index = gl.program_id(0)
    entries = gl.load(count)
    while index < entries * kv_heads:
        entry, kv_head = entry_of(index, entries, GROUP)
        row = work + entry * 11
        k_row = gl.load(row)
        q_start = gl.load(row + 3)
        document_tile = gl.load(row + 4)
        first = gl.load(row + 6)
        tiles = gl.load(row + 7)
        mbarrier.wait(kv_empty, (turn & 1) ^ 1)
        mbarrier.expect(kv_full, 4 * k_desc.block_type.nbytes)
        for w in gl.static_range(2):
            tma_load(k_desc, [k_row + w * ROWS, kv_head * D], kv_full, k_smem.index(w))
            tma_load(v_desc, [k_row + w * ROWS, kv_head * D], kv_full, v_smem.index(w))
        turn += 1
        for i in range(0, tiles * groups):
            tile = first + tiles - 1 - i // groups
            head = kv_head * groups + i % groups
            load_tile(step, tile, head, q_desc, do_desc, q_t_desc, do_t_desc, vector_desc, q_smem, do_smem, q_t_smem, do_t_smem,
                      vectors, rows_full, columns_full, empty, q_start, document_tile, tiles_in_all, D, STAGES)
            step += 1
        index = announce(count, slot, announced, entries * kv_heads, 1)


@gluon.jit
def advance(i, step, k, v, q_smem, do_smem, q_t_smem, do_t_smem, vectors, rows_full, columns_full, empty, row_scale, v_exponent,
            first_query, last_query, masked, lift, words, reference, dk, dv, D: gl.constexpr, STAGES: gl.constexpr):
    """P, dV and dS of query tile i, and beside them dK of the tile before, whose dS is `words`. Row r sees columns
    first_query + r .. last_query; `lift` undoes a rise of dO's reference."""
    TILE: gl.constexpr = sum_layout(COLUMNS)
    OPERAND: gl.constexpr = operand_layout(D)
    stage = step % STAGES
    phase = (step // STAGES) & 1
    before = gl.maximum(step - 1, 0) % STAGES
    if lift != 1.0:
        dv = dv * lift
    mbarrier.wait(rows_full.index(stage), phase)
    scores = warpgroup_mma(k, q_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, COLUMNS], gl.float32, TILE), use_acc=False,
                           is_async=True)
    dp = warpgroup_mma(v, do_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, COLUMNS], gl.float32, TILE), use_acc=False,
                       is_async=True)
    # The first tile has none before it: zeros times whatever is there, which the second tile overwrites.
    dk = warpgroup_mma(operand(words, OPERAND), q_t_smem.index(before).permute((1, 0)), dk, use_acc=i > 1, is_async=True)
    scores, dp, dk = warpgroup_mma_wait(2, deps=(scores, dp, dk))
    vector = vectors.index(stage)
    s = blocked(scores)
    BY_BLOCK: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, s.type.layout)))
    column_scale = vector.slice(128, 2).load(gl.SliceLayout(0, BY_BLOCK))
    a = gl.convert_layout(row_scale, gl.SliceLayout(1, BY_BLOCK))[:, None] * column_scale[None, :]
    p = flat(gl.exp2(s * over_blocks(a) + over_rows(column_vector(vector, 0, COLUMNS), s)))
    key = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    query = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE))
    if masked:
        p = gl.where((query[None, :] >= key[:, None] + first_query) & (query < last_query)[None, :], p, 0.0)
    codes = pack(p, OPERAND)
    mbarrier.wait(columns_full.index(stage), phase)
    dv = warpgroup_mma(operand(codes, OPERAND), do_t_smem.index(stage).permute((1, 0)), dv, is_async=True)
    dp, dk, dv = warpgroup_mma_wait(1, deps=(dp, dk, dv))
    mbarrier.arrive(empty.index(before), count=1, pred=i > 0)
    inverse = gl.convert_layout(gl.exp2(-reference), gl.SliceLayout(1, BY_BLOCK))
    u = gl.convert_layout(gl.exp2(v_exponent - reference), gl.SliceLayout(1, BY_BLOCK))[:, None] * vector.slice(130, 2).load(
        gl.SliceLayout(0, BY_BLOCK))[None, :]
    w = over_rows(column_vector(vector, COLUMNS, COLUMNS), s) * over_blocks(inverse[:, None])
    ds = flat(gl.convert_layout(blocked(p), s.type.layout) * (blocked(dp) * over_blocks(u) - w))
    if masked:
        ds = gl.where((query[None, :] >= key[:, None] + first_query) & (query < last_query)[None, :], ds, 0.0)
    ds, dk, reference = raised(ds, dk, reference, lift)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    return pack(ds, OPERAND), reference, dk, dv


@gluon.jit
def consume(grad_key, grad_value, k_scales, v_scales, vector_table, references, lifts, work, count, slot, announced, masters,
            staging, k, v, q_smem, do_smem, q_t_smem, do_t_smem, vectors, kv_full, kv_empty, rows_full, columns_full, empty,
            kv_heads, groups, head_stride, document_extra, tiles_in_all, scale, GROUP, WARPGROUP: gl.constexpr, D: gl.constexpr,
            STAGES: gl.constexpr, PROMOTE: gl.constexpr, ROTATE: gl.constexpr, P_LOG2: gl.constexpr):
    """A consumer warpgroup: 64 keys of each work entry."""
    ROW: gl.constexpr = gl.SliceLayout(1, sum_layout(COLUMNS))
    SUM: gl.constexpr = sum_layout(D)
    TILE: gl.constexpr = sum_layout(COLUMNS)
    OPERAND: gl.constexpr = operand_layout(D)
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
        v_exponent = exponent_of(v_code)
        last = gl.maximum(first + tiles - 1, 0)
        reference_row = references + kv_head.to(gl.int64) * tiles_in_all + document_tile
        lift_row = lifts + kv_head.to(gl.int64) * tiles_in_all + document_tile
        # Keys that no query meets have no tile, and no reference.
        base = gl.load(reference_row + last, mask=tiles > 0, other=0.0)
        # Far below what dS can be, and far above where it would overflow: the first tile raises it.
        record = vector_table + ((kv_head * groups).to(gl.int64) * tiles_in_all + document_tile + last) * 256
        q_exponent = gl.maximum(gl.load(record + 132, mask=tiles > 0, other=0.0), gl.load(record + 133, mask=tiles > 0, other=0.0))
        weight = gl.maximum(gl.load(record + 134, mask=tiles > 0, other=0.0), gl.load(record + 135, mask=tiles > 0, other=0.0))
        reference = gl.maximum(gl.maximum(start_of(v_exponent) + (q_exponent - 7.0), weight - SLACK), LOWEST)
        # Tiles that only the other warpgroup's keys see come last.
        mine = tiles_of(tiles, first, shift, valid, rows, groups, COLUMNS)
        dk = gl.zeros([ROWS, D], gl.float32, SUM)
        dv = gl.zeros([ROWS, D], gl.float32, SUM)
        promoted_v = base
        promoted_k = reference + base
        mbarrier.wait(kv_full, turn & 1)
        words = pack(gl.zeros([ROWS, COLUMNS], gl.float32, TILE), OPERAND)
        lift = 1.0
        tile = last
        left = groups  # heads whose turn it is for this tile
        for i in range(0, mine):
            left -= 1
            next_tile = gl.where(left == 0, tile - 1, tile)
            left = gl.where(left == 0, groups, left)
            # Issued ahead of every wait: a load after them would expose the latency of L2.
            coming = gl.load(lift_row + gl.maximum(next_tile, 0))
            first_query = shift - tile * COLUMNS
            last_query = q_len - tile * COLUMNS
            masked = (first_query > 1 - ROWS) | (last_query < COLUMNS)
            words, reference, dk, dv = advance(i, step, k, v, q_smem, do_smem, q_t_smem, do_t_smem, vectors, rows_full,
                                               columns_full, empty, row_scale, v_exponent, first_query, last_query, masked,
                                               lift, words, reference, dk, dv, D, STAGES)
            lift = gl.where(next_tile == tile, 1.0, coming)
            if i % PROMOTE == PROMOTE - 1:
                base = gl.load(reference_row + tile)
                promote(dv, dv_master, gl.full([ROWS], promoted_v - base, gl.float32, ROW), i >= PROMOTE, D)
                promote(dk, dk_master, promoted_k - (reference + base), i >= PROMOTE, D)
                promoted_v = base
                promoted_k = reference + base
                dk = gl.zeros([ROWS, D], gl.float32, SUM)
                dv = gl.zeros([ROWS, D], gl.float32, SUM)
            tile = next_tile
            step += 1
        before = gl.maximum(step - 1, 0) % STAGES
        if mine > 0:
            dk = warpgroup_mma(operand(words, OPERAND), q_t_smem.index(before).permute((1, 0)), dk, use_acc=mine > 1, is_async=True)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            mbarrier.arrive(empty.index(before), count=1)
        step = skip(mine, tiles * groups, step, rows_full, columns_full, empty, STAGES)
        index = following(slot, announced, turn)
        mbarrier.arrive(kv_empty, count=1)
        turn += 1
        # Loaded again: registers that hold these through the loop would be spilled.
        k_row = gl.load(info) + WARPGROUP * ROWS
        rows = gl.load(info + 1) - WARPGROUP * ROWS
        valid = gl.load(info + 2) - WARPGROUP * ROWS
        last = gl.maximum(gl.load(info + 6) + tiles - 1, 0)
        base = gl.load(reference_row + gl.maximum(last - gl.maximum(mine - 1, 0) // groups, 0), mask=mine > 0, other=0.0)
        seen = gl.convert_layout(key < valid, gl.SliceLayout(1, SUM))[:, None]
        if mine >= PROMOTE:
            dv = with_master(dv, dv_master, gl.full([ROWS], promoted_v - base, gl.float32, ROW), D)
            dk = with_master(dk, dk_master, promoted_k - (reference + base), D)
        store_rows(grad_value, gl.where(seen, dv * gl.exp2(base - P_LOG2), 0.0), staging, k_row, rows, kv_head, kv_heads, D, D)
        dk *= gl.convert_layout(gl.exp2(reference + (base - P_LOG2)), gl.SliceLayout(1, SUM))[:, None] * scale
        dk = gl.where(seen, dk, 0.0)
        if ROTATE:
            dk = rotated(dk, D) * (D ** -0.5)
        store_rows(grad_key, dk, staging, k_row, rows, kv_head, kv_heads, D, D)


@gluon.jit(do_not_specialize=["kv_heads", "groups", "head_stride", "document_extra", "tiles_in_all", "scale", "GROUP"])
def key_gradients(q_desc, do_desc, q_t_desc, do_t_desc, vector_desc, k_desc, v_desc, grad_key, grad_value, k_scales, v_scales,
                  vector_table, references, lifts, work, count, masters, kv_heads, groups, head_stride, document_extra,
                  tiles_in_all, scale, GROUP, D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr,
                  ROTATE: gl.constexpr, P_LOG2: gl.constexpr,
                  REGISTERS: gl.constexpr):
    """The kernel: two consumers of 64 keys and a loader warp."""
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    q_t_smem = gl.allocate_shared_memory(q_t_desc.dtype, [STAGES] + q_t_desc.block_type.shape, q_t_desc.layout)
    do_t_smem = gl.allocate_shared_memory(do_t_desc.dtype, [STAGES] + do_t_desc.block_type.shape, do_t_desc.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES] + vector_desc.block_type.shape, vector_desc.layout)
    staging = gl.allocate_shared_memory(gl.float32, [2, ROWS, D], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    kv_full, kv_empty, rows_full, columns_full, empty = barriers(STAGES)
    slot, announced = queue()
    fence_async_shared()
    gl.warp_specialize([
        (consume, (grad_key, grad_value, k_scales, v_scales, vector_table, references, lifts, work, count, slot, announced, masters,
                   staging.index(0), k_smem.index(0), v_smem.index(0), q_smem, do_smem, q_t_smem, do_t_smem, vectors, kv_full,
                   kv_empty, rows_full, columns_full, empty, kv_heads, groups, head_stride, document_extra, tiles_in_all, scale,
                   GROUP, 0, D, STAGES, PROMOTE, ROTATE, P_LOG2)),
        (consume, (grad_key, grad_value, k_scales, v_scales, vector_table, references, lifts, work, count, slot, announced, masters,
                   staging.index(1), k_smem.index(1), v_smem.index(1), q_smem, do_smem, q_t_smem, do_t_smem, vectors, kv_full,
                   kv_empty, rows_full, columns_full, empty, kv_heads, groups, head_stride, document_extra, tiles_in_all, scale,
                   GROUP, 1, D, STAGES, PROMOTE, ROTATE, P_LOG2)),
        (load_tiles, (q_desc, do_desc, q_t_desc, do_t_desc, vector_desc, k_desc, v_desc, work, count, slot, announced, k_smem,
                      v_smem, q_smem, do_smem, q_t_smem, do_t_smem, vectors, kv_full, kv_empty, rows_full, columns_full, empty,
                      kv_heads, groups, tiles_in_all, GROUP, D, STAGES)),
    ], [4, 1], [REGISTERS, 24])
