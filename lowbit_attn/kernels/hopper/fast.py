"""FP8 attention forward with E4M3 codes of P computed directly (recipe mxfp8_fast); equals reference.forward on the same codes.

As `forward`, with float16 scores and float16 softmax arithmetic in units of 1/126 of an
E4M3 code: code = round(126 clamp(s a + b)), see `reference.exponential.direct_codes`. Row sums add up the codes themselves,
by a GEMM against the powers of two that undo V's folds (`weights`, one row per head written eight times). A tile whose V
blocks lie too far below the running reference for that, and tiles with masked keys, sum decoded codes instead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from lowbit_attn.kernels.hopper import inline
from lowbit_attn.kernels.hopper.compat import tma_load
from lowbit_attn.kernels.hopper.direct import from_rows, hide, pack, softmax_full, softmax_general, tile_sums, to_rows
from lowbit_attn.kernels.hopper.forward_tiles import (
    KEYS,
    ROWS,
    barriers,
    by_thread,
    operand,
    promote,
    scale_of,
    scale_parts,
    with_master,
)
from lowbit_attn.kernels.hopper.inline import uniform
from lowbit_attn.kernels.hopper.work_queue import entry_of


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, w_desc, work, count, q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty,
               v_full, v_empty, sizes, WARPGROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """The loader warp: Q of each work entry, then its K, V and weight tiles in turn."""
    step = 0
    turn = 0
    entries = gl.load(count)
    for index in range(gl.program_id(0), entries * gl.load(sizes), gl.num_programs(0)):
        entry, head = entry_of(index, entries, gl.load(sizes + 6))
        row = work + entry * 8
        q_row = gl.load(row)
        k_row = gl.load(row + 2)
        k_tile = gl.load(row + 4)
        tiles = gl.load(row + 6)
        kv_head = head // gl.load(sizes + 1)
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, WARPGROUPS * q_desc.block_type.nbytes)
        for w in gl.static_range(WARPGROUPS):
            tma_load(q_desc, [q_row + w * ROWS, head * D], q_full, q_smem.index(w))
        for i in range(0, tiles):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma_load(k_desc, [k_row + i * KEYS, kv_head * D], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(w_desc, [kv_head * 8, (k_tile + i) * KEYS], v_full.index(stage), w_smem.index(stage))
            tma_load(v_desc, [kv_head * D, (k_tile + i) * KEYS], v_full.index(stage), v_smem.index(stage))
            step += 1
        turn += 1


@gluon.jit
def promote_to(accumulator, master, levels, level, D: gl.constexpr):
    """Add the accumulator, at each row's log2 scale `level`, to the master, whose scales `levels` in shared memory then are."""
    LAYOUT: gl.constexpr = level.type.layout
    promote(accumulator, master, levels.load(LAYOUT) - level, D)
    levels.store(level)


@gluon.jit
def row_limits(diagonal, k_valid, LAYOUT: gl.constexpr):
    """The last key that each of the 64 rows sees, computed where it is needed: the lean loop has no register for it."""
    return gl.minimum(gl.arange(0, ROWS, LAYOUT) + diagonal, k_valid - 1)


@gluon.jit
def scales_by_row(row_scale, LAYOUT: gl.constexpr):
    """Scales [4 warps, 8] of a thread's rows r and r + 8, which share a block of 32 tokens, -> [64 rows]."""
    BOTH: gl.constexpr = gl.zeros([ROWS], gl.float32, LAYOUT).reshape([4, 2, 8]).type.layout
    rows = gl.expand_dims(gl.convert_layout(row_scale, gl.SliceLayout(1, BOTH)), 1).broadcast_to([4, 2, 8])
    return gl.convert_layout(rows.reshape([ROWS]), LAYOUT)


@gluon.jit
def first_full(scores, row_scale, k_scale, fold, state, BASE: gl.constexpr, THRESHOLD: gl.constexpr, UNIT: gl.constexpr,
               OPERAND: gl.constexpr):
    """A first tile that every row sees in full: packed codes, maximum, row sum so far, reference (the tile's, put in later)."""
    h, maximum, _ = softmax_full(scores, row_scale, k_scale, fold, state - 3e38, BASE, THRESHOLD, UNIT, False)
    return pack(h, OPERAND), maximum, state, state


@gluon.jit
def first_general(scores, row_scale, k_scale, exponent, limit, state, BASE: gl.constexpr, THRESHOLD: gl.constexpr,
                  UNIT: gl.constexpr, LOWEST: gl.constexpr, SHARED: gl.constexpr, OPERAND: gl.constexpr):
    """A first tile that some row sees in part."""
    start = gl.full([ROWS], -127.0, gl.float32, row_scale.type.layout)
    words, new, _, _, after, sums = softmax_general(scores, row_scale, k_scale, exponent, limit, start, start, BASE, THRESHOLD,
                                                    UNIT, LOWEST, SHARED, True, OPERAND)
    return words, from_rows(new, state), from_rows(sums, state), from_rows(after, state)


@gluon.jit
def row_sums(accumulator, LAYOUT: gl.constexpr):
    """The first column of the row-sum GEMM [64, 8], as running state."""
    first, _ = gl.split(accumulator.reshape([4, 2, 8, 4, 2]).permute((0, 2, 3, 1, 4)))
    return gl.convert_layout(first, LAYOUT)


@gluon.jit
def rescale_state(accumulator, factor, D: gl.constexpr):
    """Rows times a factor in the running state's layout [4, 8, 4, 2], skipped while none of the warp is below 1."""
    parts = accumulator.reshape([4, 2, 8, D // 8, 4, 2])
    LANES: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, parts.type.layout))
    rows = gl.expand_dims(gl.expand_dims(gl.convert_layout(factor.permute((0, 3, 1, 2)), LANES), 3), 5)
    return gl.convert_layout(scale_parts(parts, rows, D), accumulator.type.layout)


@gluon.jit
def advance(i, step, q, k_smem, v_smem, w_smem, k_full, k_empty, v_full, v_empty, records, exponents, row_scale, diagonal,
            k_valid, counted, words, maximum, row_sum, reference, accumulator, master, levels, BASE: gl.constexpr,
            THRESHOLD: gl.constexpr, UNIT: gl.constexpr, LOWEST: gl.constexpr, SHARED: gl.constexpr, GENERAL: gl.constexpr,
            HIDDEN: gl.constexpr, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
            PROMOTE: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr, OPERAND: gl.constexpr, BLOCKS: gl.constexpr,
            STATE: gl.constexpr):
    """Scores of tile i + 1, row sum and P V of tile i, then, beside the latter, the softmax of tile i + 1. `counted` is 1 if tile
    i's row sum comes from the GEMM."""
    stage = step % STAGES
    next_stage = (step + 1) % STAGES
    block = gl.arange(0, 4, BLOCKS)
    record = records + (i + 1) * 16
    k_scale = gl.load(record + block)
    if GENERAL:
        fold = gl.load(exponents + (i + 1) * 4 + block)
    else:
        fold = gl.load(record + 4 + block)
    codes = operand(words, OPERAND)
    mbarrier.wait(k_full.index(next_stage), ((step + 1) // STAGES) & 1)
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    if WARPGROUPS > 1:
        inline.take_turn(WARPGROUP)
    raw = warpgroup_mma(q, k_smem.index(next_stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float16, SCORES), use_acc=False,
                        is_async=True)
    sums = warpgroup_mma(codes, w_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, 8], gl.float32, SUMS), use_acc=False,
                         is_async=True)
    accumulator = warpgroup_mma(codes, v_smem.index(stage).permute((1, 0)), accumulator, use_acc=i % PROMOTE != 0, is_async=True)
    if WARPGROUPS > 1:
        inline.pass_turn((WARPGROUP + 1) % WARPGROUPS)
    MASKED: gl.constexpr = GENERAL or HIDDEN
    raw, accumulator, sums = warpgroup_mma_wait(0 if MASKED else 2, deps=(raw, accumulator, sums))
    mbarrier.arrive(k_empty.index(next_stage), count=1)
    scores = inline.words_of(raw)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROW_OUT: gl.constexpr = gl.SliceLayout(1, accumulator.type.layout)
    if MASKED:
        # The output so far goes to the master, and its registers to the masked tile, general or not: the two must not differ.
        mbarrier.arrive(v_empty.index(stage), count=1)
        promote_to(accumulator, master, levels, to_rows(maximum * (1.0 / UNIT) + reference, ROW_OUT), D)
        row_sum = row_sum + row_sums(sums, STATE) * counted
    if GENERAL:
        words, new, decay, factor, after, tile_sum = softmax_general(scores, scales_by_row(row_scale, ROW), k_scale, fold,
                                                                     row_limits(diagonal, k_valid, ROW) - (i + 1) * KEYS,
                                                                     to_rows(maximum, ROW), to_rows(reference, ROW), BASE,
                                                                     THRESHOLD, UNIT, LOWEST, SHARED, False, OPERAND)
        after = from_rows(after, maximum)
        new = from_rows(new, maximum)
        row_sum = row_sum * from_rows(decay, maximum) + from_rows(tile_sum, maximum)
    else:
        if HIDDEN:
            scores = hide(scores, row_limits(diagonal, k_valid, ROW) - (i + 1) * KEYS)
        h, new, decay = softmax_full(scores, row_scale, k_scale, fold, maximum, BASE, THRESHOLD, UNIT, HIDDEN)
        # Loaded late, when the record's line is in L1: the softmax has no register for them.
        factor = decay * gl.exp2(gl.load(record + 12))
        after = gl.load(record + 13)
        if HIDDEN:
            row_sum = row_sum * decay + tile_sums(h, fold, maximum)
            words = pack(h, OPERAND)
    if MASKED:
        OUTPUT: gl.constexpr = accumulator.type.layout
        accumulator = gl.zeros([ROWS, D], gl.float32, OUTPUT)
    else:
        accumulator, sums = warpgroup_mma_wait(0, deps=(accumulator, sums))
        mbarrier.arrive(v_empty.index(stage), count=1)
        words = pack(h, OPERAND)  # after the wait: wgmma still reads the registers of the last words
        row_sum = (row_sum + row_sums(sums, STATE) * counted) * decay
        if i % PROMOTE == PROMOTE - 1:
            promote_to(accumulator, master, levels, to_rows(maximum * (1.0 / UNIT) + reference, ROW_OUT), D)
        accumulator = rescale_state(accumulator, factor, D)
    return step + 1, words, new, row_sum, after, accumulator


@gluon.jit
def consume(out, lse, q_scales, records, exponents, quiet, work, count, master, levels, q, k_smem, v_smem, w_smem, q_full,
            q_empty, k_full, k_empty, v_full, v_empty, sizes, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr,
            P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr, LOWEST: gl.constexpr, SHARED: gl.constexpr, D: gl.constexpr,
            STAGES: gl.constexpr, PROMOTE: gl.constexpr):
    """A consumer warpgroup: 64 query rows of each work entry."""
    UNIT: gl.constexpr = 8.0 / 126.0
    BASE: gl.constexpr = (8.0 * (P_LOG2 + 7.0) - 0.4584) / 126.0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4)
    ROW_OUT: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    WORDS: gl.constexpr = inline.words_of(gl.zeros([ROWS, KEYS], gl.float16, SCORES)).reshape([4, 2, 8, 4, 4, 4]).type.layout
    FACTORS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, gl.SliceLayout(4, WORDS)))
    SCALES: gl.constexpr = gl.SliceLayout(2, FACTORS)
    BLOCKS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, FACTORS))
    BY_ROW: gl.constexpr = gl.zeros([ROWS, KEYS], gl.float32, SCORES).reshape([4, 2, 8, 16, 4, 2]).permute((0, 2, 4, 5, 1,
        3)).type.layout
    STATE: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, BY_ROW))           # [4, 8, 4, 2]
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D if D < 256 else 1, D // 8], [4, 1], [1, 0])
    warp = gl.arange(0, 4, gl.SliceLayout(1, SCALES))
    eighth = gl.arange(0, 8, gl.SliceLayout(0, SCALES))
    block = gl.arange(0, 4, BLOCKS)
    local = gl.arange(0, ROWS, ROW)
    NEXT: gl.constexpr = (WARPGROUP + 1) % WARPGROUPS
    if WARPGROUPS > 1 and WARPGROUP == WARPGROUPS - 1:
        inline.pass_turn(0)
    step = 0
    turn = 0
    entries = gl.load(count)
    for index in range(gl.program_id(0), entries * gl.load(sizes), gl.num_programs(0)):
        entry, head = entry_of(index, entries, gl.load(sizes + 6))
        info = work + entry * 8
        q_row = gl.load(info)
        rows = gl.load(info + 1) - WARPGROUP * ROWS
        k_valid = gl.load(info + 3)
        k_tile = gl.load(info + 4)
        diagonal = gl.load(info + 5) + WARPGROUP * ROWS
        tiles = uniform(gl.load(info + 6))
        document = gl.load(info + 7)
        # Sizes are read where they are used: as arguments each would hold a register of the lean loop.
        kv_head = head // gl.load(sizes + 1)
        loud = gl.load(quiet + kv_head * gl.load(sizes + 5) + document)
        side = head.to(gl.int64) * gl.load(sizes + 2) + document.to(gl.int64) * gl.load(sizes + 3) + q_row + WARPGROUP * ROWS
        kv_tile = kv_head.to(gl.int64) * gl.load(sizes + 4) + k_tile
        factor = gl.load(sizes + 7).to(gl.float32, bitcast=True)
        tile_records = records + kv_tile * 16
        tile_exponents = exponents + kv_tile * 4
        # A token block is 32 rows, and the rows r and r + 8 that a thread holds lie in one.
        first_row = warp[:, None] * 16 + eighth[None, :]
        code = gl.load(q_scales + side + first_row, mask=first_row < rows, other=127).to(gl.int32)
        row_scale = scale_of(code, 0x7FC00000) * factor
        last = gl.minimum(rows, ROWS) - 1 + diagonal
        mine = (gl.minimum(gl.maximum(gl.minimum(k_valid, last + 1), 1), KEYS * tiles) + KEYS - 1) // KEYS
        mine = uniform(gl.where(rows > 0, mine, 1))
        full = gl.minimum(gl.maximum(gl.minimum(k_valid, diagonal + 1), 0) // KEYS, mine)
        full = uniform(gl.minimum(full, loud))
        # The last tile may only lack keys on the diagonal: then it needs a mask, but no
        # reference of each row's own.
        record = tile_records + (mine - 1) * 16
        whole = gl.load(record) + gl.load(record + 1) + gl.load(record + 2) + gl.load(record + 3)
        plain = (full > 0) & (full == mine - 1) & (mine <= loud) & (gl.load(record + 12) == 0) & (whole == whole)
        plain = plain & (gl.minimum(diagonal, k_valid - 1) >= (mine - 1) * KEYS)  # every row sees a key of it
        diagonal_tiles = uniform(gl.where(plain, 1, 0))
        k_scale = gl.load(tile_records + block)
        fold = gl.load(tile_records + 4 + block)
        exponent = gl.load(tile_exponents + block)
        mbarrier.wait(q_full, turn & 1)
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        raw = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float16, SCORES), use_acc=False,
                            is_async=True)
        raw = warpgroup_mma_wait(0, deps=(raw,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        scores = inline.words_of(raw)
        state = gl.zeros([4, 8, 4, 2], gl.float32, STATE)
        if full > 0:
            words, maximum, row_sum, reference = first_full(scores, row_scale, k_scale, fold, state, BASE, THRESHOLD, UNIT, OPERAND)
        else:
            words, maximum, row_sum, reference = first_general(scores, scales_by_row(row_scale, ROW), k_scale, exponent,
                                                               row_limits(diagonal, k_valid, ROW), state, BASE, THRESHOLD, UNIT,
                                                               LOWEST, SHARED, OPERAND)
        accumulator = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        master.store(by_thread(accumulator, D).reshape([D // 8, 128, 4]))
        # While every row sees every key so far, one reference serves them all.
        shared = gl.load(tile_records + 13)
        reference = gl.where(full > 0, state + shared, reference)
        levels.store(to_rows(maximum * (1.0 / UNIT) + reference, ROW_OUT))
        for i in range(0, full - 1):
            step, words, maximum, row_sum, shared, accumulator = advance(i, step, q, k_smem, v_smem, w_smem, k_full, k_empty,
                                                                         v_full, v_empty, tile_records, tile_exponents, row_scale,
                                                                         diagonal, k_valid, 1.0, words, maximum, row_sum, shared,
                                                                         accumulator, master, levels, BASE, THRESHOLD, UNIT,
                                                                         LOWEST, SHARED, False, False, WARPGROUP, WARPGROUPS, D,
                                                                         STAGES, PROMOTE, SCORES, SUMS, OPERAND, BLOCKS, STATE)
        for i in range(full - 1, full - 1 + diagonal_tiles):
            step, words, maximum, row_sum, shared, accumulator = advance(i, step, q, k_smem, v_smem, w_smem, k_full, k_empty,
                                                                         v_full, v_empty, tile_records, tile_exponents, row_scale,
                                                                         diagonal, k_valid, 1.0, words, maximum, row_sum, shared,
                                                                         accumulator, master, levels, BASE, THRESHOLD, UNIT,
                                                                         LOWEST, SHARED, False, True, WARPGROUP, WARPGROUPS, D,
                                                                         STAGES, PROMOTE, SCORES, SUMS, OPERAND, BLOCKS, STATE)
        reference = gl.where(full > 0, state + shared, reference)
        for i in range(gl.maximum(full - 1 + diagonal_tiles, 0), mine - 1):
            step, words, maximum, row_sum, reference, accumulator = advance(i, step, q, k_smem, v_smem, w_smem, k_full, k_empty,
                                                                            v_full, v_empty, tile_records, tile_exponents,
                                                                            row_scale, diagonal, k_valid, gl.where(i < full, 1.0,
                0.0), words, maximum, row_sum, reference, accumulator, master, levels, BASE, THRESHOLD, UNIT, LOWEST, SHARED,
                True, False, WARPGROUP, WARPGROUPS, D, STAGES, PROMOTE, SCORES, SUMS, OPERAND, BLOCKS, STATE)
        stage = step % STAGES
        codes = operand(words, OPERAND)
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        sums = warpgroup_mma(codes, w_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, 8], gl.float32, SUMS), use_acc=False,
                             is_async=True)
        accumulator = warpgroup_mma(codes, v_smem.index(stage).permute((1, 0)), accumulator, use_acc=(mine - 1) % PROMOTE != 0,
                                    is_async=True)
        accumulator, sums = warpgroup_mma_wait(0, deps=(accumulator, sums))
        mbarrier.arrive(v_empty.index(stage), count=1)
        row_sum = row_sum + row_sums(sums, STATE) * gl.where(mine - 1 < full, 1.0, 0.0)
        step += 1
        for i in range(mine, tiles):  # tiles that only the other warpgroups need
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            if WARPGROUPS > 1:
                inline.take_turn(WARPGROUP)
                inline.pass_turn(NEXT)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
        mbarrier.arrive(q_empty, count=1)
        turn += 1
        level = maximum * (1.0 / UNIT) + reference
        total = with_master(accumulator, master, levels.load(ROW_OUT) - to_rows(level, ROW_OUT), D)
        # Scores that left float16 made the maximum infinite: NaN, not a plausible number.
        denominator = to_rows(row_sum + (maximum - maximum), ROW_OUT)
        empty = row_limits(diagonal, k_valid, ROW_OUT) < 0
        inverse = gl.where(empty, 0.0, gl.exp2(to_rows(reference, ROW_OUT)) / gl.where(empty, 1.0, denominator))[:, None]
        result = gl.where(inverse == 0, 0.0, total * inverse).to(out.dtype.element_ty)
        result = gl.convert_layout(result, STORE)
        r = gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
        channel = gl.arange(0, D, gl.SliceLayout(0, STORE))
        place = (q_row + WARPGROUP * ROWS + r).to(gl.int64) * gl.load(sizes) + head
        gl.store(out + place[:, None] * D + channel[None, :], result, mask=(r < rows)[:, None])
        log2_sum = to_rows(maximum, ROW_OUT) * (1.0 / UNIT) + gl.log2(gl.where(empty, 1.0, denominator)) - P_LOG2
        value = gl.convert_layout(gl.where(empty, float("-inf"), log2_sum * 0.6931471805599453), ROW)
        gl.store(lse + side + local, value, mask=local < rows)
    if WARPGROUPS > 1 and WARPGROUP == 0:
        inline.take_turn(0)


@gluon.jit
def attention(q_desc, k_desc, v_desc, w_desc, out, lse, q_scales, records, exponents, quiet, work, count, sizes,
              P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr, LOWEST: gl.constexpr, SHARED: gl.constexpr, D: gl.constexpr,
              STAGES: gl.constexpr, PROMOTE: gl.constexpr, WARPGROUPS: gl.constexpr, REGISTERS: gl.constexpr):
    """The kernel: three consumers of 64 rows and a loader warp."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    master = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, D // 8, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    levels = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers(WARPGROUPS, STAGES)
    fence_async_shared()
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (consume, (out, lse, q_scales, records, exponents, quiet, work, count, master.index(0), levels.index(0),
                       q_smem.index(0), k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, sizes, 0,
                       WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, SHARED, D, STAGES, PROMOTE)),
            (load_tiles, (q_desc, k_desc, v_desc, w_desc, work, count, q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full,
                          k_empty, v_full, v_empty, sizes, WARPGROUPS, D, STAGES)),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (consume, (out, lse, q_scales, records, exponents, quiet, work, count, master.index(0), levels.index(0),
                       q_smem.index(0), k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, sizes, 0,
                       WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, SHARED, D, STAGES, PROMOTE)),
            (consume, (out, lse, q_scales, records, exponents, quiet, work, count, master.index(1), levels.index(1),
                       q_smem.index(1), k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, sizes, 1,
                       WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, SHARED, D, STAGES, PROMOTE)),
            (consume, (out, lse, q_scales, records, exponents, quiet, work, count, master.index(2), levels.index(2),
                       q_smem.index(2), k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, sizes, 2,
                       WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, SHARED, D, STAGES, PROMOTE)),
            (load_tiles, (q_desc, k_desc, v_desc, w_desc, work, count, q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full,
                          k_empty, v_full, v_empty, sizes, WARPGROUPS, D, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
