"""FP8 attention forward with exact exponentials (recipe mxfp8); equals reference.forward on the same codes.

One persistent program per multiprocessor: a loader warp keeps a ring of K and V tiles full by TMA, and one or two consumer
warpgroups of 64 query rows each compute. Scores are E4M3 x E4M3 in float32; the token-block scales of Q and K multiply
them afterwards, V's are folded into P relative to a reference exponent that runs with the loop (see `records`).

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

from lowbit_attn.kernels.hopper.compat import tma_load
from lowbit_attn.kernels.hopper.inline import (
    keep_visible,
    pack_e4m3,
    pass_turn,
    scale_rows_if_needed,
    take_turn,
    uniform,
    unpack_e4m3,
)

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(128)


@gluon.jit
def entry_of(index, count, GROUP):
    """Work entry and head of a work index: heads in groups, inside a group longest entries first, heads fastest."""
    inside = index % (count * GROUP)
    return inside // GROUP, (index // (count * GROUP)) * GROUP + inside % GROUP


@gluon.jit
def barriers(WARPGROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Full and empty of Q, of the ring of K tiles and of that of V tiles: one loader fills, WARPGROUPS consumers empty."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=WARPGROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=WARPGROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=WARPGROUPS)
    return q_full, q_empty, k_full, k_empty, v_full, v_empty


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, work, count, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
               heads, groups, GROUP, WARPGROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, K_PADDED: gl.constexpr):
    """The loader warp: Q of each work entry, then its K and V tiles in turn. K_PADDED: K's tiles are padded as V's are."""
    step = 0
    turn = 0
    entries = gl.load(count)
    for index in range(gl.program_id(0), entries * heads, gl.num_programs(0)):
        entry, head = entry_of(index, entries, GROUP)
        row = work + entry * 8
        q_row = gl.load(row)
        k_tile = gl.load(row + 4)
        if K_PADDED:
            k_row = k_tile * KEYS
        else:
            k_row = gl.load(row + 2)
        tiles = gl.load(row + 6)
        kv_head = head // groups
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
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma_load(v_desc, [kv_head * D, (k_tile + i) * KEYS], v_full.index(stage), v_smem.index(stage))
            step += 1
        turn += 1


@gluon.jit
def spread(x):
    """[rows, blocks] -> broadcastable to [rows, blocks, 4, 4, 2], the score tile by block, j, c, e."""
    return x[:, :, None][:, :, None, :][:, :, :, :, None]


@gluon.jit
def raise_maximum(maximum, tile_maximum, THRESHOLD: gl.constexpr):
    """The lazy maximum: raised to the tile's only when that exceeds it by more than THRESHOLD doublings."""
    return gl.where(tile_maximum - maximum > THRESHOLD, tile_maximum, maximum)


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
def softmax_full(scores, row_scale, k_scale, fold, lift, tile_reference, maximum, largest, row_sum, P_LOG2: gl.constexpr,
                 THRESHOLD: gl.constexpr):
    """One tile that every row sees in full: folded P, and the state after it. `largest` is the largest score itself, which the
    lazy maximum may lie below."""
    s = scores.reshape([ROWS, 4, 4, 4, 2])
    a = row_scale[:, None] * k_scale[None, :]
    top = gl.max(gl.max(s, 4), 2) * a[:, :, None]
    top = gl.convert_layout(gl.max(gl.max(top, 1), 1), maximum.type.layout)
    new = raise_maximum(maximum, top, THRESHOLD)
    b = (P_LOG2 - new)[:, None] + fold[None, :]
    p = gl.exp2(s * spread(a) + spread(b))
    sums = gl.sum(gl.sum(gl.sum(p, 4), 2) * gl.exp2(-fold - P_LOG2)[None, :, None], 1)
    decay = gl.exp2(maximum - new)
    row_sum = row_sum * gl.convert_layout(decay, gl.SliceLayout(1, row_sum.type.layout))[:, None] + sums
    reference = gl.full([ROWS], tile_reference, gl.float32, new.type.layout)
    return p.reshape([ROWS, KEYS]), new, gl.maximum(largest, top), row_sum, reference, decay * gl.exp2(lift)


@gluon.jit
def softmax_masked(scores, row_scale, k_scale, own, limit, maximum, largest, row_sum, reference, P_LOG2: gl.constexpr,
                   THRESHOLD: gl.constexpr, LOWEST: gl.constexpr, FIRST: gl.constexpr, L3: gl.constexpr):
    """One tile of which row r sees keys 0..limit[r] only: each row's own reference exponent, masked scores."""
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    s = scores.reshape([ROWS, 4, 4, 4, 2])
    a = row_scale[:, None] * k_scale[None, :]
    column = gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
    distance = gl.convert_layout(limit, gl.SliceLayout(1, scores.type.layout))[:, None] - column[None, :]
    x = keep_visible(s * spread(a), distance.reshape([ROWS, 4, 4, 4, 2]))
    top = gl.convert_layout(gl.max(gl.max(gl.max(gl.max(x, 4), 2), 1), 1), maximum.type.layout)
    if FIRST:
        new = gl.where(limit < 0, 0.0, top)  # rows that see no key at all
    else:
        new = raise_maximum(maximum, top, THRESHOLD)
    # A block is seen when its first key is; unseen ones count as the lowest exponent.
    seen = gl.where(limit[:, None] >= block[None, :] * 32, own[None, :], -127.0)
    raised = gl.maximum(reference, gl.max(seen, 1))
    fold = seen - raised[:, None]
    fold = gl.where(fold < LOWEST, LOWEST, fold)
    b = (P_LOG2 - new)[:, None] + fold
    p = gl.exp2(x + spread(b))
    sums = gl.sum(gl.sum(gl.sum(p, 4), 2) * gl.exp2(-fold - P_LOG2)[:, :, None], 1)
    if FIRST:
        row_sum, factor = sums, new
    else:
        factor = gl.exp2(maximum - new)
        row_sum = row_sum * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
        factor = factor * gl.exp2(reference - raised)
    return p.reshape([ROWS, KEYS]), new, gl.maximum(largest, top), row_sum, raised, factor


@gluon.jit
def scale_of(code, BROKEN: gl.constexpr):
    """2^(code - 127) of E8M0 codes; code 0 is a subnormal, and 255 marks NaN: the float whose bits are BROKEN."""
    bits = gl.where(code == 0, 1 << 22, gl.where(code == 255, BROKEN, code << 23))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def pack(p, OPERAND: gl.constexpr):
    """P [64, columns] as E4M3 codes, four a word: int32 [64, columns / 4]. Columns (j, c, e) of each 16 come in the order
    (c, j, e), a renaming of registers. Words, because an FP8 tensor carried around the loop would take a register per byte."""
    COLUMNS: gl.constexpr = p.shape[1]
    ordered = p.reshape([ROWS, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, COLUMNS])
    pairs = gl.convert_layout(ordered, OPERAND).reshape([ROWS, COLUMNS // 4, 2, 2])
    even, odd = gl.split(pairs)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return pack_e4m3(first, second, third, fourth)


@gluon.jit
def operand(words, OPERAND: gl.constexpr):
    """The packed words as wgmma's A operand, E4M3 [64, columns]."""
    COLUMNS: gl.constexpr = 4 * words.shape[1]
    CODES: gl.constexpr = gl.zeros([ROWS, COLUMNS], gl.int32, OPERAND).reshape([ROWS, COLUMNS // 4, 4]).type.layout
    repeated = gl.expand_dims(gl.convert_layout(words, gl.SliceLayout(2, CODES)), 2)
    repeated = repeated.broadcast_to([ROWS, COLUMNS // 4, 4]).reshape([ROWS, COLUMNS])
    return unpack_e4m3(gl.convert_layout(repeated, OPERAND))


@gluon.jit
def scale_parts(parts, rows, D: gl.constexpr):
    """Accumulator parts [warp, row, lane / 4, D / 8, lane % 4, pair] times rows, mostly 1, broadcastable to them."""
    if D == 256:
        scaled = parts * rows  # more registers than one assembly statement takes
    else:
        scaled = scale_rows_if_needed(parts, rows, D // 2)
    return scaled.reshape([ROWS, D])


@gluon.jit
def rescale(accumulator, factor, D: gl.constexpr):
    """Rows times factor [64], skipped while no factor of the warp is below 1."""
    parts = accumulator.reshape([4, 2, 8, D // 8, 4, 2])
    LAYOUT: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, parts.type.layout)))
    rows = gl.convert_layout(factor, gl.SliceLayout(1, accumulator.type.layout)).reshape([4, 2, 8])
    rows = gl.convert_layout(rows, LAYOUT)[:, :, :, None][:, :, :, :, None][:, :, :, :, :, None]
    return gl.convert_layout(scale_parts(parts, rows, D), accumulator.type.layout)


@gluon.jit
def by_thread(accumulator, D: gl.constexpr):
    """[D/8, warp, lane / 4, lane % 4, row, pair]: what each thread holds, 16 bytes of shared memory at a time."""
    return accumulator.reshape([4, 2, 8, D // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))


@gluon.jit
def add_master(part, master, change, CHUNK: gl.constexpr, INDEX: gl.constexpr):
    """part + master * 2^change for one chunk of channels; change [64 rows] by warp, lane / 4 and row."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(0, part.type.layout)))
    factor = gl.exp2(gl.convert_layout(change, LAYOUT))[:, :, None, :][:, :, :, :, None][None, :, :, :, :, :]
    FLAT: gl.constexpr = part.reshape([CHUNK, 128, 4]).type.layout
    before = master.slice(INDEX * CHUNK, CHUNK).load(FLAT).reshape([CHUNK, 4, 8, 4, 2, 2])
    return part + gl.convert_layout(before, part.type.layout) * factor


@gluon.jit
def by_row(x, accumulator):
    """x [64 rows] -> [warp, lane / 4, row], as `by_thread` orders those of the accumulator."""
    return gl.convert_layout(x, gl.SliceLayout(1, accumulator.type.layout)).reshape([4, 2, 8]).permute((0, 2, 1))


@gluon.jit
def promote(accumulator, master, change, D: gl.constexpr):
    """Add the accumulator to the float32 master, in four chunks: ptxas then never holds all of both at once."""
    CHUNK: gl.constexpr = D // 32
    rows = by_row(change, accumulator)
    parts = by_thread(accumulator, D).reshape([2, 2, CHUNK, 4, 8, 4, 2, 2]).permute((2, 3, 4, 5, 6, 7, 0, 1))
    even, odd = gl.split(parts)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    master.slice(0, CHUNK).store(add_master(first, master, rows, CHUNK, 0).reshape([CHUNK, 128, 4]))
    master.slice(CHUNK, CHUNK).store(add_master(second, master, rows, CHUNK, 1).reshape([CHUNK, 128, 4]))
    master.slice(2 * CHUNK, CHUNK).store(add_master(third, master, rows, CHUNK, 2).reshape([CHUNK, 128, 4]))
    master.slice(3 * CHUNK, CHUNK).store(add_master(fourth, master, rows, CHUNK, 3).reshape([CHUNK, 128, 4]))


@gluon.jit
def with_master(accumulator, master, change, D: gl.constexpr):
    """accumulator + master * 2^change."""
    total = add_master(by_thread(accumulator, D), master, by_row(change, accumulator), D // 8, 0)
    return gl.convert_layout(total.permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, D]), accumulator.type.layout)


@gluon.jit
def store_rows(out, result, first, rows, heads, head, D: gl.constexpr):
    """The first `rows` rows of a result [64, D] to out [tokens, heads, D] from token `first` on."""
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D if D < 256 else 1, D // 8], [4, 1], [1, 0])
    result = gl.convert_layout(result, STORE)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
    channel = gl.arange(0, D, gl.SliceLayout(0, STORE))
    place = (first + row).to(gl.int64) * heads + head
    gl.store(out + place[:, None] * D + channel[None, :], result, mask=(row < rows)[:, None])


@gluon.jit
def advance(i, step, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, records, exponents, row_scale, limit, words, maximum,
            largest, row_sum, reference, accumulator, master, promoted, P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr,
            LOWEST: gl.constexpr, MASKED: gl.constexpr, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, D: gl.constexpr,
            STAGES: gl.constexpr, PROMOTE: gl.constexpr, SCORES: gl.constexpr, OPERAND: gl.constexpr, L3: gl.constexpr):
    """Scores of tile i + 1 and P V of tile i, then, beside the latter, the softmax of tile i + 1."""
    stage = step % STAGES
    next_stage = (step + 1) % STAGES
    # Issued ahead of every wait: a load after them would expose the latency of L2.
    k_scale, fold, lift, tile_reference = load_record(records, exponents, i + 1, MASKED, L3)
    codes = operand(words, OPERAND)
    mbarrier.wait(k_full.index(next_stage), ((step + 1) // STAGES) & 1)
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    if WARPGROUPS == 2:
        take_turn(WARPGROUP)
    scores = warpgroup_mma(q, k_smem.index(next_stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, SCORES), use_acc=False,
                           is_async=True)
    accumulator = warpgroup_mma(codes, v_smem.index(stage).permute((1, 0)), accumulator, use_acc=i % PROMOTE != 0, is_async=True)
    if WARPGROUPS == 2:
        pass_turn(1 - WARPGROUP)
    scores, accumulator = warpgroup_mma_wait(1, deps=(scores, accumulator))
    mbarrier.arrive(k_empty.index(next_stage), count=1)
    if MASKED:
        p, new, largest, row_sum, raised, factor = softmax_masked(scores, row_scale, k_scale, fold, limit - (i + 1) * KEYS, maximum,
                                                                  largest, row_sum, reference, P_LOG2, THRESHOLD, LOWEST, False, L3)
    else:
        p, new, largest, row_sum, raised, factor = softmax_full(scores, row_scale, k_scale, fold, lift, tile_reference, maximum,
                                                                largest, row_sum, P_LOG2, THRESHOLD)
    accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    words = pack(p, OPERAND)  # after the wait: wgmma still reads the registers of the last words
    if i % PROMOTE == PROMOTE - 1:
        # At the scale of tile i: the accumulator has not been rescaled for tile i + 1 yet.
        promote(accumulator, master, promoted - (maximum + reference), D)
        promoted = maximum + reference
    accumulator = rescale(accumulator, factor, D)
    return step + 1, words, new, largest, row_sum, raised, accumulator, promoted


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
def consume(out, lse, row_top, q_scales, records, exponents, work, count, master, q, k_smem, v_smem, q_full, q_empty, k_full,
            k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles, factor, GROUP, WARPGROUP: gl.constexpr,
            WARPGROUPS: gl.constexpr, P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr, LOWEST: gl.constexpr, D: gl.constexpr,
            STAGES: gl.constexpr, PROMOTE: gl.constexpr):
    """A consumer warpgroup: 64 query rows of each work entry."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4)
    TILES: gl.constexpr = gl.zeros([ROWS, KEYS], gl.float32, SCORES).reshape([ROWS, 4, 4, 4, 2]).type.layout
    L3: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, TILES))
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    local = gl.arange(0, ROWS, ROW)
    if WARPGROUPS == 2 and WARPGROUP == 1:
        pass_turn(0)
    step = 0
    turn = 0
    entries = gl.load(count)
    for index in range(gl.program_id(0), entries * heads, gl.num_programs(0)):
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
        k_scale, fold, _, _ = load_record(tile_records, tile_exponents, 0, True, L3)
        mbarrier.wait(q_full, turn & 1)
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, SCORES), use_acc=False,
                               is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        start = gl.full([ROWS], -127.0, gl.float32, ROW)
        nothing = gl.full([ROWS], float("-inf"), gl.float32, ROW)  # scores may all lie below -127
        p, maximum, largest, row_sum, reference, _ = softmax_masked(scores, row_scale, k_scale, fold, limit, start, nothing, start,
                                                                    start, P_LOG2, THRESHOLD, LOWEST, True, L3)
        words = pack(p, OPERAND)
        accumulator = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        master.store(by_thread(accumulator, D).reshape([D // 8, 128, 4]))
        promoted = maximum + reference
        for i in range(0, full - 1):
            step, words, maximum, largest, row_sum, reference, accumulator, promoted = advance(
                i, step, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_records, tile_exponents, row_scale, limit, words,
                maximum, largest, row_sum, reference, accumulator, master, promoted, P_LOG2, THRESHOLD, LOWEST, False, WARPGROUP,
                WARPGROUPS, D, STAGES, PROMOTE, SCORES, OPERAND, L3)
        for i in range(gl.maximum(full - 1, 0), mine - 1):
            step, words, maximum, largest, row_sum, reference, accumulator, promoted = advance(
                i, step, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_records, tile_exponents, row_scale, limit, words,
                maximum, largest, row_sum, reference, accumulator, master, promoted, P_LOG2, THRESHOLD, LOWEST, True, WARPGROUP,
                WARPGROUPS, D, STAGES, PROMOTE, SCORES, OPERAND, L3)
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
            if WARPGROUPS == 2:
                take_turn(WARPGROUP)
                pass_turn(1 - WARPGROUP)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
        mbarrier.arrive(q_empty, count=1)
        turn += 1
        total = with_master(accumulator, master, promoted - (maximum + reference), D)
        denominator = gl.convert_layout(gl.sum(row_sum, 1), ROW)
        empty = limit < 0
        inverse = gl.where(empty, 0.0, gl.exp2(reference - P_LOG2) / gl.where(empty, 1.0, denominator))
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
        result = gl.where(inverse == 0, 0.0, total * inverse).to(out.dtype.element_ty)
        store_rows(out, result, q_row + WARPGROUP * ROWS, rows, heads, head, D)
        log2_sum = maximum + gl.log2(gl.where(empty, 1.0, denominator))
        gl.store(lse + side + local, gl.where(empty, float("-inf"), log2_sum * 0.6931471805599453), mask=local < rows)
        gl.store(row_top + side + local, gl.where(empty, 0, top_code(largest - log2_sum)).to(gl.uint8), mask=local < rows)
    if WARPGROUPS == 2 and WARPGROUP == 0:
        take_turn(0)


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
    fence_async_shared()
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (consume, (out, lse, row_top, q_scales, records, exponents, work, count, master.index(0), q_smem.index(0), k_smem,
                       v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra,
                       max_tiles, factor, GROUP, 0, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, D, STAGES, PROMOTE)),
            (load_tiles, (q_desc, k_desc, v_desc, work, count, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full,
                          v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES, False)),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (consume, (out, lse, row_top, q_scales, records, exponents, work, count, master.index(0), q_smem.index(0), k_smem,
                       v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra,
                       max_tiles, factor, GROUP, 0, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, D, STAGES, PROMOTE)),
            (consume, (out, lse, row_top, q_scales, records, exponents, work, count, master.index(1), q_smem.index(1), k_smem,
                       v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra,
                       max_tiles, factor, GROUP, 1, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, D, STAGES, PROMOTE)),
            (load_tiles, (q_desc, k_desc, v_desc, work, count, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full,
                          v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES, False)),
        ], [4, 1], [REGISTERS, 24])
