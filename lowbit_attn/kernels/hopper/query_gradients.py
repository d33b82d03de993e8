"""dQ of FP8 attention (recipe mxfp8); equals reference.backward on the same codes.

One persistent program per multiprocessor: a loader warp and two consumer warpgroups of 64 queries each, whose Q and dO stay in
shared memory while the key tiles that they see pass. Per tile of 128 keys: S = Q K^T and dP = dO V^T, then dQ += dS K. Every dQ is
one program's sum in one order: runs repeat bit for bit.

Operands, all E4M3 codes: q, do, k, v [tokens, heads * D]; k_t [Hkv * D, padded keys] (see `quantize_gradient`). K's block exponents
are folded into dS, which is rounded relative to an exponent of each row that rises with the loop: it depends on no later key.

The FP8 accumulator keeps about 13 bits, so every PROMOTE tiles it is added to a float32 master in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from lowbit_attn.kernels.hopper.compat import reinterpreted, tma_load
from lowbit_attn.kernels.hopper.forward_tiles import ROWS, by_thread, operand, pack, promote, with_master
from lowbit_attn.kernels.hopper.gradient_tiles import (
    LOWEST,
    SLACK,
    barriers,
    blocked,
    exponent_of,
    flat,
    magnitude,
    operand_layout,
    over_blocks,
    power,
    raised,
    rotated,
    skip,
    start_of,
    store_rows,
    sum_layout,
)
from lowbit_attn.kernels.hopper.inline import uniform
from lowbit_attn.kernels.hopper.work_queue import announce, entry_of, following, queue

COLUMNS = gl.constexpr(128)
"""Keys of a tile."""


@gluon.jit
def tiles_seen(rows, k_valid, diagonal):
    """Key tiles that `rows` queries see, whose first sees keys 0 .. diagonal."""
    return (gl.maximum(gl.minimum(k_valid, rows + diagonal), 0) + COLUMNS - 1) // COLUMNS


@gluon.jit
def load_tiles(q_desc, do_desc, k_desc, v_desc, k_t_desc, work, count, slot, announced, q_smem, do_smem, k_smem, v_smem, k_t_smem,
               q_full, q_empty, rows_full, columns_full, empty, heads, groups, GROUP, D: gl.constexpr, STAGES: gl.constexpr):
    """The loader warp: Q and dO of each work entry, then its key tiles in turn."""
    step = 0
    turn = 0
    index = gl.program_id(0)
    entries = gl.load(count)
    while index < entries * heads:
        entry, head = entry_of(index, entries, GROUP)
        row = work + entry * 8
        q_row = gl.load(row)
        k_row = gl.load(row + 2)
        k_tile = gl.load(row + 4)
        tiles = tiles_seen(gl.load(row + 1), gl.load(row + 3), gl.load(row + 5))
        kv_head = head // groups
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, 4 * q_desc.block_type.nbytes)
        for w in gl.static_range(2):
            tma_load(q_desc, [q_row + w * ROWS, head * D], q_full, q_smem.index(w))
            tma_load(do_desc, [q_row + w * ROWS, head * D], q_full, do_smem.index(w))
        turn += 1
        for i in range(0, tiles):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(rows_full.index(stage), 2 * k_desc.block_type.nbytes)
            tma_load(k_desc, [k_row + i * COLUMNS, kv_head * D], rows_full.index(stage), k_smem.index(stage))
            tma_load(v_desc, [k_row + i * COLUMNS, kv_head * D], rows_full.index(stage), v_smem.index(stage))
            mbarrier.expect(columns_full.index(stage), k_t_desc.block_type.nbytes)
            tma_load(k_t_desc, [kv_head * D, (k_tile + i) * COLUMNS], columns_full.index(stage), k_t_smem.index(stage))
            step += 1
        index = announce(count, slot, announced, entries * heads, 1)


@gluon.jit
def block_exponents(scales, tile, keys, LAYOUT: gl.constexpr):
    """Scale codes of the blocks of a key tile, 1 past the document's `keys`."""
    key = tile * COLUMNS + gl.arange(0, COLUMNS // 32, LAYOUT) * 32
    return gl.load(scales + key, mask=key < keys, other=127).to(gl.int32)


@gluon.jit
def advance(i, step, q, do, k_smem, v_smem, k_t_smem, rows_full, columns_full, empty, k_code, v_code, row_scale, bias, do_exponent,
            delta, limit, masked, reference, dq, D: gl.constexpr, STAGES: gl.constexpr, BY_BLOCK: gl.constexpr):
    """One key tile, of which row r sees keys 0 .. limit[r]."""
    TILE: gl.constexpr = sum_layout(COLUMNS)
    OPERAND: gl.constexpr = operand_layout(D)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, BY_BLOCK)
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(rows_full.index(stage), phase)
    scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, COLUMNS], gl.float32, TILE), use_acc=False,
                           is_async=True)
    dp = warpgroup_mma(do, v_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, COLUMNS], gl.float32, TILE), use_acc=False,
                       is_async=True)
    scores, dp = warpgroup_mma_wait(1, deps=(scores, dp))
    s = blocked(scores)
    k_scale = power(k_code)
    a = gl.convert_layout(row_scale, BY_ROW)[:, None] * k_scale[None, :]
    p = flat(gl.exp2(s * over_blocks(a) + over_blocks(gl.convert_layout(bias, BY_ROW)[:, None])))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    inverse = gl.convert_layout(gl.exp2(-reference), BY_ROW)[:, None] * k_scale[None, :]
    u = inverse * (gl.exp2(gl.convert_layout(do_exponent, BY_ROW))[:, None] * gl.exp2(exponent_of(v_code))[None, :])
    w = inverse * gl.convert_layout(delta, BY_ROW)[:, None]
    ds = flat(gl.convert_layout(blocked(p), s.type.layout) * (blocked(dp) * over_blocks(u) - over_blocks(w)))
    if masked:
        key = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE)) + i * COLUMNS
        ds = gl.where(key[None, :] <= limit[:, None], ds, 0.0)
    ds, dq, reference = raised(ds, dq, reference, 1.0)
    codes = pack(ds, OPERAND)
    mbarrier.wait(columns_full.index(stage), phase)
    dq = warpgroup_mma(operand(codes, OPERAND), k_t_smem.index(stage).permute((1, 0)), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(empty.index(stage), count=1)
    return reference, dq


@gluon.jit
def consume(grad_query, q_scales, do_group, lse, delta_of, k_scales, v_scales, documents, work, count, slot, announced, master, q,
            do, k_smem, v_smem, k_t_smem, q_full, q_empty, rows_full, columns_full, empty, heads, groups, head_stride,
            document_extra, k_head_stride, k_document_extra, q_count, factor, scale, GROUP, WARPGROUP: gl.constexpr,
            D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, ROTATE: gl.constexpr):
    """A consumer warpgroup: 64 query rows of each work entry."""
    ROW: gl.constexpr = gl.SliceLayout(1, sum_layout(COLUMNS))
    SUM: gl.constexpr = sum_layout(D)
    STAGING: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    BLOCKED: gl.constexpr = blocked(gl.zeros([ROWS, COLUMNS], gl.float32, sum_layout(COLUMNS))).type.layout
    BY_BLOCK: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, BLOCKED)))
    BLOCK: gl.constexpr = gl.SliceLayout(0, BY_BLOCK)
    local = gl.arange(0, ROWS, ROW)
    step = 0
    turn = 0
    index = gl.program_id(0)
    entries = gl.load(count)
    while index < entries * heads:
        entry, head = entry_of(index, entries, GROUP)
        info = work + entry * 8
        q_row = gl.load(info)
        stored = gl.load(info + 1)
        k_row = gl.load(info + 2)
        k_valid = gl.load(info + 3)
        diagonal = gl.load(info + 5)
        document = gl.load(info + 7)
        tiles = uniform(tiles_seen(stored, k_valid, diagonal))
        kv_head = head // groups
        rows = stored - WARPGROUP * ROWS
        start = q_row - gl.load(documents + document * 8)
        group = do_group + (head.to(gl.int64) * q_count + gl.load(documents + document * 8 + 5)) * 4 + (start + WARPGROUP * ROWS
                                                                                                    ) // 32
        q_row += WARPGROUP * ROWS
        diagonal += WARPGROUP * ROWS
        side = head.to(gl.int64) * head_stride + document.to(gl.int64) * document_extra + q_row
        k_side = kv_head.to(gl.int64) * k_head_stride + document.to(gl.int64) * k_document_extra + k_row
        here = local < rows
        code = gl.load(q_scales + side + local, mask=here, other=127).to(gl.int32)
        row_scale = power(code) * factor
        exponent = gl.load(group + local // 32, mask=here, other=0.0)
        exponent = gl.where(exponent == exponent, exponent, 0.0)  # codes of NaN make the products NaN
        natural = gl.load(lse + side + local, mask=here, other=float("-inf"))
        bias = gl.where(natural == float("-inf"), natural, natural * -1.4426950408889634)
        delta = gl.load(delta_of + side + local, mask=here, other=0.0)
        limit = gl.minimum(local + diagonal, k_valid - 1)
        # Far below what dS can be, and far above where it would overflow: the first tile raises it.
        first = gl.load(k_scales + k_side, mask=k_valid > 0, other=127).to(gl.int32)
        first_v = gl.load(v_scales + k_side, mask=k_valid > 0, other=127).to(gl.int32)
        k_first = start_of(exponent_of(first))
        reference = start_of(exponent) + (k_first + start_of(exponent_of(first_v)) - 15.0)
        reference = gl.maximum(gl.maximum(reference, magnitude(delta) + (k_first - SLACK)), LOWEST)
        mine = uniform(gl.where(rows > 0, tiles_seen(gl.minimum(rows, ROWS), k_valid, diagonal), 0))
        full = gl.minimum(k_valid, diagonal + 1) // COLUMNS
        dq = gl.zeros([ROWS, D], gl.float32, SUM)
        master.store(by_thread(dq, D).reshape([D // 8, 128, 4]))
        promoted = reference
        mbarrier.wait(q_full, turn & 1)
        k_code = block_exponents(k_scales + k_side, 0, k_valid, BLOCK)
        v_code = block_exponents(v_scales + k_side, 0, k_valid, BLOCK)
        for i in range(0, mine):
            # Issued a tile ahead: a load beside its use would expose the latency of L2.
            next_k = block_exponents(k_scales + k_side, i + 1, k_valid, BLOCK)
            next_v = block_exponents(v_scales + k_side, i + 1, k_valid, BLOCK)
            reference, dq = advance(i, step, q, do, k_smem, v_smem, k_t_smem, rows_full, columns_full, empty, k_code, v_code,
                                    row_scale, bias, exponent, delta, limit, i >= full, reference, dq, D, STAGES, BY_BLOCK)
            k_code = next_k
            v_code = next_v
            if i % PROMOTE == PROMOTE - 1:
                promote(dq, master, promoted - reference, D)
                promoted = reference
                dq = gl.zeros([ROWS, D], gl.float32, SUM)
            step += 1
        step = skip(mine, tiles, step, rows_full, columns_full, empty, STAGES)
        index = following(slot, announced, turn)
        mbarrier.arrive(q_empty, count=1)
        turn += 1
        total = with_master(dq, master, promoted - reference, D)
        total *= gl.convert_layout(gl.exp2(reference), gl.SliceLayout(1, SUM))[:, None] * scale
        if ROTATE:
            total = rotated(total, D) * (D ** -0.5)
        store_rows(grad_query, total, reinterpreted(master, gl.float32, [ROWS, D], STAGING), q_row, rows, head, heads, D, D)


@gluon.jit(do_not_specialize=["heads", "groups", "head_stride", "document_extra", "k_head_stride", "k_document_extra", "q_count",
                              "factor", "scale", "GROUP"])
def query_gradients(q_desc, do_desc, k_desc, v_desc, k_t_desc, grad_query, q_scales, do_group, lse, delta_of, k_scales, v_scales,
                    documents, work, count, heads, groups, head_stride, document_extra, k_head_stride, k_document_extra, q_count,
                    factor, scale, GROUP, D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, ROTATE: gl.constexpr,
                    REGISTERS: gl.constexpr):
    """The kernel: two consumers of 64 queries and a loader warp."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [2] + do_desc.block_type.shape, do_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    k_t_smem = gl.allocate_shared_memory(k_t_desc.dtype, [STAGES] + k_t_desc.block_type.shape, k_t_desc.layout)
    master = gl.allocate_shared_memory(gl.float32, [2, D // 8, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    q_full, q_empty, rows_full, columns_full, empty = barriers(STAGES)
    slot, announced = queue()
    fence_async_shared()
    gl.warp_specialize([
        (consume, (grad_query, q_scales, do_group, lse, delta_of, k_scales, v_scales, documents, work, count, slot, announced,
                   master.index(0), q_smem.index(0), do_smem.index(0), k_smem, v_smem, k_t_smem, q_full, q_empty, rows_full,
                   columns_full, empty, heads, groups, head_stride, document_extra, k_head_stride, k_document_extra, q_count,
                   factor, scale, GROUP, 0, D, STAGES, PROMOTE, ROTATE)),
        (consume, (grad_query, q_scales, do_group, lse, delta_of, k_scales, v_scales, documents, work, count, slot, announced,
                   master.index(1), q_smem.index(1), do_smem.index(1), k_smem, v_smem, k_t_smem, q_full, q_empty, rows_full,
                   columns_full, empty, heads, groups, head_stride, document_extra, k_head_stride, k_document_extra, q_count,
                   factor, scale, GROUP, 1, D, STAGES, PROMOTE, ROTATE)),
        (load_tiles, (q_desc, do_desc, k_desc, v_desc, k_t_desc, work, count, slot, announced, q_smem, do_smem, k_smem, v_smem,
                      k_t_smem, q_full, q_empty, rows_full, columns_full, empty, heads, groups, GROUP, D, STAGES)),
    ], [4, 1], [REGISTERS, 24])
