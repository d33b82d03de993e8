"""FP8 attention forward with exact exponentials (recipe mxfp8); equals reference.forward on the same codes.

One persistent program per multiprocessor: a loader warp keeps a ring of K and V tiles full by TMA, and one or two consumer
warpgroups of 64 query rows each compute. Scores are E4M3 x E4M3 in float32; the token-block scales of Q and K multiply
them afterwards, V's are folded into P relative to a reference exponent that runs with the loop (see `records`). Two
warpgroups take turns at the exponentials of full tiles: at the same time each would slow the other while the matrix units idle.

Operands, all in the flattened [tokens, heads, head_dim] view:
    q, k: E4M3 codes [tokens, heads * D];  v: E4M3 codes [Hkv * D, padded tokens], keys permuted (j, c, e) -> (c, j, e) inside
    each 16, which is the order in which the score accumulator holds them: P then needs no shuffle to become an operand.
    q_scales: E8M0 codes [Hq, tokens] (dense: [B, Hq, Sq]);  records: see `records.tile_records`;  v_group: V's exponents.

The FP8 accumulator keeps about 13 bits, so every PROMOTE tiles the partial output is added to a float32 master in shared
memory and the accumulator starts anew.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from lowbit_attn.kernels.hopper.forward_tiles import (
    KEYS,
    ROWS,
    barriers,
    by_thread,
    load_tiles,
    operand,
    pack,
    promote,
    raise_maximum,
    rescale,
    scale_of,
    spread,
    store_rows,
    with_master,
)
from lowbit_attn.kernels.hopper.inline import keep_visible, uniform
from lowbit_attn.kernels.hopper.work_queue import entry_of, following, queue

LOWEST_MAXIMUM = gl.constexpr(-3e38)
"""The maximum of a row that has met no score above -inf: any other exceeds it, and what came before counts nothing."""


@gluon.jit
def load_record(records, exponents, tile, MASKED: gl.constexpr, L3: gl.constexpr):
    """K's scales and V's folds (masked tiles: exponents), the reference's rise and the reference."""
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    record = records + tile * 16
    k_scale = gl.load(record + block)
    if MASKED:
        fold = gl.load(exponents + tile * 4 + block)
    else:
        fold = gl.load(record + 4 + block)
    return k_scale, fold, gl.load(record + 12), gl.load(record + 13)


@gluon.jit
def wait_turn(turns, number, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Wait for this warpgroup's turn `number` at the exponentials."""
    if WARPGROUPS == 2:
        mbarrier.wait(turns.index(WARPGROUP), number & 1)


@gluon.jit
def end_turn(turns, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Give the other warpgroup its turn."""
    if WARPGROUPS == 2:
        mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)


@gluon.jit
def late_offset(p_log2, fold, P_LOG2: gl.constexpr, WARPGROUPS: gl.constexpr, L3: gl.constexpr):
    """log2 of P's factor, [64, 4 blocks] or [64, 1]. After a wait for a turn it comes from shared memory, so that ptxas cannot
    compute exponentials ahead of it; but for one block of 32 keys, which fill the time that it takes to hand over a turn."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    if WARPGROUPS == 2:
        block = gl.arange(0, 4, fold.type.layout)
        return gl.where((block == 0)[None, :], P_LOG2, p_log2.load(ROW)[:, None])
    else:
        return gl.full([ROWS], P_LOG2, gl.float32, ROW)[:, None]


@gluon.jit
def softmax_full(scores, row_scale, k_scale, fold, lift, tile_reference, maximum, largest, row_sum, turns, p_log2, number,
                 P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr,
                 L3: gl.constexpr):
    """One tile that every row sees in full: folded P, and the state after it. `largest` is the largest score itself, which the
    lazy maximum may lie below."""
    s = scores.reshape([ROWS, 4, 4, 4, 2])
    a = row_scale[:, None] * k_scale[None, :]
    top = gl.max(gl.max(s, 4), 2) * a[:, :, None]
    top = gl.convert_layout(gl.max(gl.max(top, 1), 1), maximum.type.layout)
    new = raise_maximum(maximum, top, THRESHOLD)
    wait_turn(turns, number, WARPGROUP, WARPGROUPS)
    b = (late_offset(p_log2, fold, P_LOG2, WARPGROUPS, L3) - new[:, None]) + fold[None, :]
    p = gl.exp2(s * spread(a) + spread(b))
    sums = gl.sum(gl.sum(gl.sum(p, 4), 2) * gl.exp2(-fold - P_LOG2)[None, :, None], 1)
    decay = gl.exp2(maximum - new)
    row_sum = row_sum * gl.convert_layout(decay, gl.SliceLayout(1, row_sum.type.layout))[:, None] + sums
    reference = gl.full([ROWS], tile_reference, gl.float32, new.type.layout)
    return p.reshape([ROWS, KEYS]), new, gl.maximum(largest, top), row_sum, reference, decay * gl.exp2(lift)


@gluon.jit
def hide(scores, limit, D: gl.constexpr):
    """Scores, -inf for the keys past `limit`. Comparisons with constants cost half, but would spill at head_dim 256."""
    column = gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
    limit = gl.convert_layout(limit, gl.SliceLayout(1, scores.type.layout))
    if D == 256:
        return keep_visible(scores, limit[:, None] - column[None, :])
    else:
        return gl.where(limit[:, None] >= column[None, :], scores, float("-inf"))


@gluon.jit
def softmax_masked(scores, row_scale, k_scale, own, limit, maximum, largest, row_sum, reference, P_LOG2: gl.constexpr,
                   THRESHOLD: gl.constexpr, LOWEST: gl.constexpr, FIRST: gl.constexpr, D: gl.constexpr, L3: gl.constexpr):
    """One tile of which row r sees keys 0..limit[r] only: each row's own reference exponent, masked scores."""
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    a = row_scale[:, None] * k_scale[None, :]
    a = gl.maximum(a, 2.0**-126)  # hidden scores are -inf, which times 0 would be NaN
    s = hide(scores, limit, D).reshape([ROWS, 4, 4, 4, 2])
    top = gl.max(gl.max(s, 4), 2) * a[:, :, None]
    top = gl.convert_layout(gl.max(gl.max(top, 1), 1), maximum.type.layout)
    if FIRST:
        new = gl.maximum(top, LOWEST_MAXIMUM)  # of rows that have met -inf at most
    else:
        new = raise_maximum(maximum, top, THRESHOLD)
    # A block is seen when its first key is; unseen ones count as the lowest exponent.
    seen = gl.where(limit[:, None] >= block[None, :] * 32, own[None, :], -127.0)
    raised = gl.maximum(reference, gl.max(seen, 1))
    fold = seen - raised[:, None]
    fold = gl.where(fold < LOWEST, LOWEST, fold)
    b = (P_LOG2 - new)[:, None] + fold
    p = gl.exp2(s * spread(a) + spread(b))
    sums = gl.sum(gl.sum(gl.sum(p, 4), 2) * gl.exp2(-fold - P_LOG2)[:, :, None], 1)
    if FIRST:
        row_sum, factor = sums, new
    else:
        factor = gl.exp2(maximum - new)
        row_sum = row_sum * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
        factor = factor * gl.exp2(reference - raised)
    return p.reshape([ROWS, KEYS]), new, gl.maximum(largest, top), row_sum, raised, factor


@gluon.jit
def first_tile(scores, full, record, own, row_scale, limit, P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr, LOWEST: gl.constexpr,
               D: gl.constexpr, OPERAND: gl.constexpr, L3: gl.constexpr):
    """Packed P of a work entry's first tile, which every row sees in full if `full` says so, and the state after it."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    k_scale, fold, lift, tile_reference = record
    nothing = gl.full([ROWS], float("-inf"), gl.float32, ROW)  # scores may all lie below -127
    if full > 0:
        none = gl.zeros([ROWS, 4], gl.float32, gl.SliceLayout(1, L3))
        p, maximum, largest, row_sum, reference, _ = softmax_full(scores, row_scale, k_scale, fold, lift, tile_reference,
                                                                  gl.full([ROWS], LOWEST_MAXIMUM, gl.float32, ROW), nothing, none,
                                                                  0, 0, 0,
                                                                  P_LOG2, THRESHOLD, 0, 1, L3)
        words = pack(p, OPERAND)
    else:
        start = gl.full([ROWS], -127.0, gl.float32, ROW)
        p, maximum, largest, row_sum, reference, _ = softmax_masked(scores, row_scale, k_scale, own, limit, start, nothing, start,
                                                                    start, P_LOG2, THRESHOLD, LOWEST, True, D, L3)
        words = pack(p, OPERAND)
    return words, maximum, largest, row_sum, reference


@gluon.jit
def advance(i, step, turn, record, ahead, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, p_log2, records, exponents,
            row_scale, limit, words, maximum, largest, row_sum, reference, accumulator, master, promoted, P_LOG2: gl.constexpr,
            THRESHOLD: gl.constexpr, LOWEST: gl.constexpr, MASKED: gl.constexpr, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr,
            D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, SCORES: gl.constexpr, OPERAND: gl.constexpr,
            L3: gl.constexpr):
    """Scores of tile i + 1, whose record is at hand, and P V of tile i, then, beside the latter, the softmax of tile i + 1. Loads
    the record of tile `ahead`: one turn early, or the latency of L2 would show. Promotes only in masked tiles: in the loop over
    full ones a branch would keep packing and sums out of the shadow of the exponentials."""
    stage = step % STAGES
    next_stage = (step + 1) % STAGES
    k_scale, fold, lift, tile_reference = record
    record = load_record(records, exponents, ahead, MASKED, L3)
    codes = operand(words, OPERAND)
    mbarrier.wait(k_full.index(next_stage), ((step + 1) // STAGES) & 1)
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    scores = warpgroup_mma(q, k_smem.index(next_stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, SCORES), use_acc=False,
                           is_async=True)
    accumulator = warpgroup_mma(codes, v_smem.index(stage).permute((1, 0)), accumulator, use_acc=i % PROMOTE != 0, is_async=True)
    scores, accumulator = warpgroup_mma_wait(1, deps=(scores, accumulator))
    mbarrier.arrive(k_empty.index(next_stage), count=1)
    if MASKED:
        wait_turn(turns, step - turn, WARPGROUP, WARPGROUPS)
        end_turn(turns, WARPGROUP, WARPGROUPS)
        p, new, largest, row_sum, raised, factor = softmax_masked(scores, row_scale, k_scale, fold, limit - (i + 1) * KEYS, maximum,
                                                                  largest, row_sum, reference, P_LOG2, THRESHOLD, LOWEST, False, D,
                                                                  L3)
    else:
        p, new, largest, row_sum, raised, factor = softmax_full(scores, row_scale, k_scale, fold, lift, tile_reference, maximum,
                                                                largest, row_sum, turns, p_log2, step - turn, P_LOG2, THRESHOLD,
                                                                WARPGROUP, WARPGROUPS, L3)
    accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    words = pack(p, OPERAND)  # after the wait: wgmma still reads the registers of the last words
    if MASKED and i % PROMOTE == PROMOTE - 1:
        # At the scale of tile i: the accumulator has not been rescaled for tile i + 1 yet.
        promote(accumulator, master, promoted - (maximum + reference), D)
        promoted = maximum + reference
    accumulator = rescale(accumulator, factor, D)
    if not MASKED:
        end_turn(turns, WARPGROUP, WARPGROUPS)
    return step + 1, record, words, new, largest, row_sum, raised, accumulator, promoted


@gluon.jit
def top_code(log2_largest):
    """`ops.saved`'s row_top of the largest probabilities."""
    log2_largest = gl.maximum(gl.minimum(log2_largest, 0.0), -127.0)
    log2_largest = gl.where(log2_largest == log2_largest, log2_largest, 0.0)
    others = 1.0 - gl.exp2(log2_largest)
    code = log2_largest.to(gl.int32) + 127  # a conversion rounds negative numbers up
    for k in gl.static_range(1, 5):
        code += gl.where((others < 0.5) & (others <= 2.0 ** -k), 1, 0)
    return code


@gluon.jit
def consume(out, lse, row_top, q_scales, records, exponents, work, count, slot, announced, master, q, k_smem, v_smem, q_full,
            q_empty, k_full, k_empty, v_full, v_empty, turns, p_log2, heads, groups, head_stride, document_extra, max_tiles,
            factor, GROUP, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr,
            LOWEST: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr):
    """A consumer warpgroup: 64 query rows of each work entry."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4)
    TILES: gl.constexpr = gl.zeros([ROWS, KEYS], gl.float32, SCORES).reshape([ROWS, 4, 4, 4, 2]).type.layout
    L3: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, TILES))
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    local = gl.arange(0, ROWS, ROW)
    if WARPGROUP == 1:
        end_turn(turns, WARPGROUP, WARPGROUPS)
    step = 0
    turn = 0
    index = gl.program_id(0)
    entries = gl.load(count)
    while index < entries * heads:
        entry, head = entry_of(index, entries, GROUP)
        info = work + entry * 8
        q_row = gl.load(info)
        rows = gl.load(info + 1) - WARPGROUP * ROWS
        k_valid = gl.load(info + 3)
        k_tile = gl.load(info + 4)
        diagonal = gl.load(info + 5) + WARPGROUP * ROWS
        tiles = uniform(gl.load(info + 6))
        document = gl.load(info + 7)
        side = head.to(gl.int64) * head_stride + document.to(gl.int64) * document_extra + q_row + WARPGROUP * ROWS
        kv_tile = (head // groups).to(gl.int64) * max_tiles + k_tile
        tile_records = records + kv_tile * 16
        tile_exponents = exponents + kv_tile * 4
        code = gl.load(q_scales + side + local, mask=local < rows, other=127).to(gl.int32)
        row_scale = scale_of(code, 127 << 23) * factor  # the codes themselves carry NaN
        limit = gl.minimum(local + diagonal, k_valid - 1)
        last = gl.minimum(rows, ROWS) - 1 + diagonal
        mine = (gl.minimum(gl.maximum(gl.minimum(k_valid, last + 1), 1), KEYS * tiles) + KEYS - 1) // KEYS
        mine = uniform(gl.where(rows > 0, mine, 1))
        full = uniform(gl.minimum(gl.maximum(gl.minimum(k_valid, diagonal + 1), 0) // KEYS, mine))
        record = load_record(tile_records, tile_exponents, 0, False, L3)
        own = gl.load(tile_exponents + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L3))))
        mbarrier.wait(q_full, turn & 1)
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, SCORES), use_acc=False,
                               is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        words, maximum, largest, row_sum, reference = first_tile(scores, full, record, own, row_scale, limit, P_LOG2, THRESHOLD,
                                                                 LOWEST, D, OPERAND, L3)
        accumulator = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        master.store(by_thread(accumulator, D).reshape([D // 8, 128, 4]))
        promoted = maximum + reference
        record = load_record(tile_records, tile_exponents, gl.minimum(1, mine - 1), False, L3)
        for begin in range(0, full - 1, PROMOTE):
            end = gl.minimum(begin + PROMOTE, full - 1)
            for i in range(begin, end):
                step, record, words, maximum, largest, row_sum, reference, accumulator, promoted = advance(
                    i, step, turn, record, gl.minimum(i + 2, mine - 1), q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns,
                    p_log2, tile_records, tile_exponents, row_scale, limit, words, maximum, largest, row_sum, reference,
                    accumulator, master, promoted, P_LOG2, THRESHOLD, LOWEST, False, WARPGROUP, WARPGROUPS, D, STAGES, PROMOTE,
                    SCORES, OPERAND, L3)
            if end % PROMOTE == 0:
                promote(accumulator, master, promoted - (maximum + reference), D)
                promoted = maximum + reference
        masked = gl.maximum(full, 1)
        record = load_record(tile_records, tile_exponents, gl.minimum(masked, mine - 1), True, L3)
        for i in range(masked - 1, mine - 1):
            step, record, words, maximum, largest, row_sum, reference, accumulator, promoted = advance(
                i, step, turn, record, gl.minimum(i + 2, mine - 1), q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns,
                p_log2, tile_records, tile_exponents, row_scale, limit, words, maximum, largest, row_sum, reference, accumulator,
                master, promoted, P_LOG2, THRESHOLD, LOWEST, True, WARPGROUP, WARPGROUPS, D, STAGES, PROMOTE, SCORES, OPERAND, L3)
        stage = step % STAGES
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        accumulator = warpgroup_mma(operand(words, OPERAND), v_smem.index(stage).permute((1, 0)), accumulator,
                                    use_acc=(mine - 1) % PROMOTE != 0, is_async=True)
        accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
        for i in range(mine, tiles):  # tiles that only the other warpgroup needs
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            wait_turn(turns, step - 1 - turn, WARPGROUP, WARPGROUPS)
            end_turn(turns, WARPGROUP, WARPGROUPS)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
        index = following(slot, announced, turn)
        mbarrier.arrive(q_empty, count=1)
        turn += 1
        total = with_master(accumulator, master, promoted - (maximum + reference), D)
        denominator = gl.convert_layout(gl.sum(row_sum, 1), ROW)
        empty = limit < 0
        denominator = gl.where(denominator == 0, float("nan"), denominator)  # every key that the row sees scores -inf
        inverse = gl.where(empty, 0.0, gl.exp2(reference - P_LOG2) / gl.where(empty, 1.0, denominator))
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
        result = gl.where(inverse == 0, 0.0, total * inverse).to(out.dtype.element_ty)
        store_rows(out, result, q_row + WARPGROUP * ROWS, rows, heads, head, D)
        log2_sum = maximum + gl.log2(gl.where(empty, 1.0, denominator))
        gl.store(lse + side + local, gl.where(empty, float("-inf"), log2_sum * 0.6931471805599453), mask=local < rows)
        gl.store(row_top + side + local, gl.where(empty, 0, top_code(largest - log2_sum)).to(gl.uint8), mask=local < rows)


@gluon.jit(do_not_specialize=["heads", "groups", "head_stride", "document_extra", "max_tiles", "factor", "GROUP"])
def attention(q_desc, k_desc, v_desc, out, lse, row_top, q_scales, records, exponents, work, count, heads, groups, head_stride,
              document_extra, max_tiles, factor, GROUP, P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr, LOWEST: gl.constexpr,
              D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, WARPGROUPS: gl.constexpr, REGISTERS: gl.constexpr):
    """The kernel: WARPGROUPS consumers of 64 rows and a loader warp."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    master = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, D // 8, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers(WARPGROUPS, STAGES)
    slot, announced = queue()
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    p_log2 = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    p_log2.store(gl.full([ROWS], P_LOG2, gl.float32, gl.BlockedLayout([1], [32], [4], [0])))
    fence_async_shared()
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (consume, (out, lse, row_top, q_scales, records, exponents, work, count, slot, announced, master.index(0),
                       q_smem.index(0), k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, p_log2, heads,
                       groups, head_stride, document_extra, max_tiles, factor, GROUP, 0, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, D,
                       STAGES, PROMOTE)),
            (load_tiles, (q_desc, k_desc, v_desc, work, count, slot, announced, q_smem, k_smem, v_smem, q_full, q_empty, k_full,
                          k_empty, v_full, v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES, False, True)),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (consume, (out, lse, row_top, q_scales, records, exponents, work, count, slot, announced, master.index(0),
                       q_smem.index(0), k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, p_log2, heads,
                       groups, head_stride, document_extra, max_tiles, factor, GROUP, 0, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, D,
                       STAGES, PROMOTE)),
            (consume, (out, lse, row_top, q_scales, records, exponents, work, count, slot, announced, master.index(1),
                       q_smem.index(1), k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, p_log2, heads,
                       groups, head_stride, document_extra, max_tiles, factor, GROUP, 1, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, D,
                       STAGES, PROMOTE)),
            (load_tiles, (q_desc, k_desc, v_desc, work, count, slot, announced, q_smem, k_smem, v_smem, q_full, q_empty, k_full,
                          k_empty, v_full, v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES, False, True)),
        ], [4, 1], [REGISTERS, 24])
