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
from lowbit_attn.kernels.hopper.forward import KEYS, ROWS, by_thread, entry_of, operand, promote, scale_parts, with_master
from lowbit_attn.kernels.hopper.inline import uniform


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, w_desc, work, count, q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty,
               v_full, v_empty, heads, groups, GROUP, WARPGROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """The loader warp: Q of each work entry, then its K, V and weight tiles in turn."""
    step = 0
    turn = 0
    entries = gl.load(count)
    for index in range(gl.program_id(0), entries * heads, gl.num_programs(0)):
        entry, head = entry_of(index, entries, GROUP)
        row = work + entry * 8
        q_row = gl.load(row)
        k_row = gl.load(row + 2)
        k_tile = gl.load(row + 4)
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
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(w_desc, [kv_head * 8, (k_tile + i) * KEYS], v_full.index(stage), w_smem.index(stage))
            tma_load(v_desc, [kv_head * D, (k_tile + i) * KEYS], v_full.index(stage), v_smem.index(stage))
            step += 1
        turn += 1


@gluon.jit
def split_last_four(x):
    """Score words [4, 2, 8, 4, 4, 4] (warp, row, lane / 4, block, j, c) -> one tensor for each j."""
    y = x.reshape([4, 2, 8, 4, 2, 2, 4]).permute((0, 1, 2, 3, 6, 4, 5))
    even, odd = gl.split(y)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def split_blocks(x):
    """[4, 2, 8, 4, 4] -> one tensor [4, 2, 8, 4] for each block."""
    y = x.reshape([4, 2, 8, 2, 2, 4]).permute((0, 1, 2, 5, 3, 4))
    even, odd = gl.split(y)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def row_maximum(x, LAYOUT: gl.constexpr):
    """Largest half of each row of words [4, 2, 8, block, c]: float32 [4, 8, 4, 2], equal along c; NaN kept."""
    a, b, c, d = split_blocks(x)
    upper, lower = gl.split(inline.largest_of_four_or_nan(a, b, c, d).permute((0, 2, 3, 1)))
    both = inline.row_maxima(upper, lower)
    return gl.convert_layout(gl.join(inline.lower_half(both), inline.upper_half(both)), LAYOUT)


@gluon.jit
def raised(maximum, top, THRESHOLD: gl.constexpr):
    """The lazy maximum; a NaN is taken over, since codes cannot carry it."""
    return gl.where(top <= maximum + THRESHOLD, maximum, top)


@gluon.jit
def softmax_full(scores, row_scale, k_scale, fold, lift, tile_reference, maximum, BASE: gl.constexpr, THRESHOLD: gl.constexpr,
                 UNIT: gl.constexpr):
    """One tile that every row sees in full: words of 1024 + code, and the state after it."""
    s = scores.reshape([4, 2, 8, 4, 4, 4])
    PAIRS: gl.constexpr = gl.SliceLayout(4, s.type.layout)                        # [4, 2, 8, block, c]
    FACTORS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, PAIRS))           # [4, 8, block]
    BLOCKS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, FACTORS))
    ROWS4: gl.constexpr = gl.SliceLayout(3, PAIRS)                                # [4, 2, 8, c]
    a = inline.twice(row_scale[:, :, None] * gl.convert_layout(k_scale, BLOCKS)[None, :][None, :, :])
    a5 = gl.expand_dims(gl.expand_dims(a, 1), 4)
    first, second, third, fourth = split_last_four(s)
    top = inline.largest_of_four(first, second, third, fourth)
    TOPS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, top.type.layout))
    a_top = gl.expand_dims(gl.expand_dims(gl.convert_layout(a, TOPS), 1), 4)
    STATE: gl.constexpr = maximum.type.layout
    new = raised(maximum, row_maximum(inline.multiply(top, a_top), STATE), THRESHOLD)
    FOLDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(4, PAIRS))))
    folds = inline.twice(gl.convert_layout(fold, FOLDS) * UNIT)
    folds = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(folds, 0), 0), 0), 4)
    base = gl.convert_layout(inline.twice(BASE - new).permute((0, 3, 1, 2)), ROWS4)
    b = inline.add(gl.expand_dims(base, 3), folds)
    h = inline.direct_codes(s, gl.expand_dims(a5, 4), gl.expand_dims(b, 4))
    decay = gl.exp2((maximum - new) * (1.0 / UNIT))
    return h.reshape([ROWS, KEYS // 2]), new, decay, decay * gl.exp2(lift), maximum * 0.0 + tile_reference


@gluon.jit
def to_rows(x, LAYOUT: gl.constexpr):
    """State by warp, lane / 4, lane % 4 and row [4, 8, 4, 2] (equal along lane % 4) -> [64 rows]."""
    return gl.convert_layout(gl.max(x, 2).permute((0, 2, 1)).reshape([ROWS]), LAYOUT)


@gluon.jit
def from_rows(x, like):
    """[64 rows] -> the layout of the running state `like`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, like.type.layout)
    rows = gl.convert_layout(x.reshape([4, 2, 8]).permute((0, 2, 1)), LAYOUT)
    return gl.expand_dims(rows, 2) + like * 0.0


@gluon.jit
def spread_words(x):
    """[rows, blocks] -> broadcastable to score words [rows, blocks, j, c]."""
    return x[:, :, None][:, :, :, None]


@gluon.jit
def softmax_general(scores, row_scale, k_scale, exponent, limit, maximum, reference, BASE: gl.constexpr, THRESHOLD: gl.constexpr,
                    UNIT: gl.constexpr, LOWEST: gl.constexpr, SHARED: gl.constexpr, FIRST: gl.constexpr):
    """One tile of which row r sees keys 0..limit[r]: each row's own reference, masked scores, and the tile's row sums.

    All per-row values are [64] here, the state maximum and reference included.
    """
    s = scores.reshape([ROWS, 4, 4, 4])
    BLOCK_ROWS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, s.type.layout))
    ROW: gl.constexpr = gl.SliceLayout(1, BLOCK_ROWS)
    BLOCKS: gl.constexpr = gl.SliceLayout(0, BLOCK_ROWS)
    last = gl.convert_layout(limit, ROW)
    sees = last[:, None] >= gl.arange(0, 4, BLOCKS)[None, :] * 32
    scale = gl.convert_layout(row_scale, ROW)[:, None] * gl.convert_layout(k_scale, BLOCKS)[None, :]
    scale = gl.where(sees, scale, 0.0)                # the NaN of a block of which a row sees no key stays out
    a = inline.twice(scale)
    # Key 32 block + 8 j + 2 c of a word, split so that only one number per row stays in registers.
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(1, s.type.layout))))
    distance = gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(1, gl.SliceLayout(1, s.type.layout))))
    distance = (distance[:, None] - 2 * lane[None, :])[:, None, :][:, None, :, :]
    of_block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, s.type.layout)))) * 32
    of_j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, s.type.layout)))) * 8
    offset = of_block[None, :][:, :, None][:, :, :, None] + of_j[None, :][:, None, :][:, :, :, None]
    x = inline.keep_visible_pair(inline.multiply(s, spread_words(a)), distance, offset, "0xFC00")
    top = gl.maximum(inline.lower_half(x), inline.upper_half(x))
    top = gl.convert_layout(gl.max(gl.max(gl.max(top, 3), 2), 1), ROW)
    top = top + gl.sum(scale * 0.0, 1)                # maxima drop a NaN, the sum does not
    seen = gl.where(sees, gl.convert_layout(exponent, BLOCKS)[None, :], -127.0)
    before = gl.convert_layout(reference, ROW)
    after = gl.maximum(before, gl.max(seen, 1))
    fold = seen - after[:, None]
    fold = gl.where(fold < LOWEST, LOWEST, fold)
    old = gl.convert_layout(maximum, ROW)
    if FIRST:
        new = gl.where(last < 0, 0.0, top)
        decay = gl.exp2(before - after)
    else:
        new = raised(old, top, THRESHOLD)
        decay = gl.exp2((old - new) * (1.0 / UNIT))
    base = inline.twice(BASE - new)[:, None]
    shared = gl.maximum(fold, SHARED)
    b = inline.add(base, inline.twice(fold * UNIT))
    b_sum = inline.add(base, inline.twice(shared * UNIT))
    h = inline.keep_visible_pair(inline.direct_codes(s, spread_words(a), spread_words(b)), distance, offset, "0x6400")
    h_sum = inline.keep_visible_pair(inline.direct_codes(s, spread_words(a), spread_words(b_sum)), distance, offset, "0x6400")
    sums = gl.sum(gl.sum(inline.code_values(h_sum), 3), 2) * gl.exp2(-shared)
    sums = gl.convert_layout(gl.sum(sums, 1), ROW)
    return h.reshape([ROWS, KEYS // 2]), new, decay, decay * gl.exp2(before - after), after, sums


@gluon.jit
def pack(h, OPERAND: gl.constexpr):
    """Words of 1024 + code [64, 64] -> words of four codes [64, 32], keys in the order of `forward.pack`."""
    CODES: gl.constexpr = gl.zeros([ROWS, KEYS], gl.int32, OPERAND).reshape([ROWS, KEYS // 4, 4]).type.layout
    pairs = h.reshape([ROWS, KEYS // 16, 2, 4]).permute((0, 1, 3, 2))
    first, second = gl.split(pairs)
    return gl.convert_layout(inline.low_bytes(first, second).reshape([ROWS, KEYS // 4]), gl.SliceLayout(2, CODES))


@gluon.jit
def first_full(scores, row_scale, k_scale, fold, tile_reference, state, BASE: gl.constexpr, THRESHOLD: gl.constexpr,
               UNIT: gl.constexpr, OPERAND: gl.constexpr):
    """A first tile that every row sees in full: packed codes, maximum, row sum so far, reference."""
    h, maximum, _, _, reference = softmax_full(scores, row_scale, k_scale, fold, 0.0, tile_reference, state - 3e38, BASE, THRESHOLD, UNIT)
    return pack(h, OPERAND), maximum, state, reference


@gluon.jit
def first_general(scores, row_scale, k_scale, exponent, limit, state, BASE: gl.constexpr, THRESHOLD: gl.constexpr,
                  UNIT: gl.constexpr, LOWEST: gl.constexpr, SHARED: gl.constexpr, OPERAND: gl.constexpr):
    """A first tile that some row sees in part."""
    start = gl.full([ROWS], -127.0, gl.float32, row_scale.type.layout)
    h, new, _, _, after, sums = softmax_general(scores, row_scale, k_scale, exponent, limit, start, start, BASE, THRESHOLD, UNIT, LOWEST,
                                                SHARED, True)
    return pack(h, OPERAND), from_rows(new, state), from_rows(sums, state), from_rows(after, state)


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
def advance(i, step, q, k_smem, v_smem, w_smem, k_full, k_empty, v_full, v_empty, records, exponents, row_scale, general_scale,
            limit, counted, words, maximum, row_sum, reference, accumulator, master, promoted, BASE: gl.constexpr,
            THRESHOLD: gl.constexpr, UNIT: gl.constexpr, LOWEST: gl.constexpr, SHARED: gl.constexpr, GENERAL: gl.constexpr,
            WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr,
            SCORES: gl.constexpr, SUMS: gl.constexpr, OPERAND: gl.constexpr, BLOCKS: gl.constexpr, STATE: gl.constexpr, SETTLE: gl.constexpr):
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
    lift = gl.load(record + 12)
    tile_reference = gl.load(record + 13)
    codes = operand(words, OPERAND)
    mbarrier.wait(k_full.index(next_stage), ((step + 1) // STAGES) & 1)
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    if WARPGROUPS > 1:
        inline.take_turn(WARPGROUP)
    raw = warpgroup_mma(q, k_smem.index(next_stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float16, SCORES), use_acc=False,
                        is_async=True)
    sums = warpgroup_mma(codes, w_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, 8], gl.float32, SUMS), use_acc=False, is_async=True)
    accumulator = warpgroup_mma(codes, v_smem.index(stage).permute((1, 0)), accumulator, use_acc=i % PROMOTE != 0, is_async=True)
    if WARPGROUPS > 1:
        inline.pass_turn((WARPGROUP + 1) % WARPGROUPS)
    raw, accumulator, sums = warpgroup_mma_wait(2, deps=(raw, accumulator, sums))
    mbarrier.arrive(k_empty.index(next_stage), count=1)
    scores = inline.words_of(raw)
    if GENERAL:
        ROW: gl.constexpr = general_scale.type.layout
        h, new, decay, factor, after, tile_sum = softmax_general(
            scores, general_scale, k_scale, fold, limit - (i + 1) * KEYS, to_rows(maximum, ROW), to_rows(reference, ROW), BASE,
            THRESHOLD, UNIT, LOWEST, SHARED, False)
        after = from_rows(after, maximum)
        new = from_rows(new, maximum)
        decay = from_rows(decay, maximum)
        factor = from_rows(factor, maximum)
        tile_sum = from_rows(tile_sum, maximum)
    else:
        h, new, decay, factor, after = softmax_full(scores, row_scale, k_scale, fold, lift, tile_reference, maximum, BASE, THRESHOLD,
                                                    UNIT)
    if SETTLE:
        h = inline.settle_words(h, WARPGROUP)
    accumulator, sums = warpgroup_mma_wait(0, deps=(accumulator, sums))
    mbarrier.arrive(v_empty.index(stage), count=1)
    words = pack(h, OPERAND)  # after the wait: wgmma still reads the registers of the last words
    row_sum = (row_sum + row_sums(sums, STATE) * counted) * decay
    if GENERAL:
        row_sum = row_sum + tile_sum
    if i % PROMOTE == PROMOTE - 1:
        ROW_OUT: gl.constexpr = gl.SliceLayout(1, accumulator.type.layout)
        level = maximum * (1.0 / UNIT) + reference
        promote(accumulator, master, to_rows(promoted - level, ROW_OUT), D)
        promoted = level
    accumulator = rescale_state(accumulator, factor, D)
    return step + 1, words, new, row_sum, after, accumulator, promoted


@gluon.jit
def consume(out, lse, q_scales, records, exponents, quiet, work, count, master, q, k_smem, v_smem, w_smem, q_full, q_empty, k_full,
            k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles, documents, factor, GROUP,
            WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr,
            LOWEST: gl.constexpr, SHARED: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr,
            SETTLE: gl.constexpr):
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
    BY_ROW: gl.constexpr = gl.zeros([ROWS, KEYS], gl.float32, SCORES).reshape([4, 2, 8, 16, 4, 2]).permute((0, 2, 4, 5, 1, 3)).type.layout
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
        kv_head = head // groups
        loud = gl.load(quiet + kv_head * documents + document)
        side = head.to(gl.int64) * head_stride + document.to(gl.int64) * document_extra + q_row + WARPGROUP * ROWS
        kv_tile = kv_head.to(gl.int64) * max_tiles + k_tile
        tile_records = records + kv_tile * 16
        tile_exponents = exponents + kv_tile * 4
        # A token block is 32 rows, and the rows r and r + 8 that a thread holds lie in one.
        first_row = warp[:, None] * 16 + eighth[None, :]
        row_scale = scale_of(gl.load(q_scales + side + first_row, mask=first_row < rows, other=127)) * factor
        general_scale = scale_of(gl.load(q_scales + side + local, mask=local < rows, other=127)) * factor
        limit = gl.minimum(local + diagonal, k_valid - 1)
        last = gl.minimum(rows, ROWS) - 1 + diagonal
        mine = (gl.minimum(gl.maximum(gl.minimum(k_valid, last + 1), 1), KEYS * tiles) + KEYS - 1) // KEYS
        mine = uniform(gl.where(rows > 0, mine, 1))
        full = gl.minimum(gl.maximum(gl.minimum(k_valid, diagonal + 1), 0) // KEYS, mine)
        full = uniform(gl.minimum(full, loud))
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
            words, maximum, row_sum, reference = first_full(scores, row_scale, k_scale, fold, gl.load(tile_records + 13), state, BASE,
                                                            THRESHOLD, UNIT, OPERAND)
        else:
            words, maximum, row_sum, reference = first_general(scores, general_scale, k_scale, exponent, limit, state, BASE, THRESHOLD,
                                                               UNIT, LOWEST, SHARED, OPERAND)
        accumulator = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        master.store(by_thread(accumulator, D).reshape([D // 8, 128, 4]))
        promoted = maximum * (1.0 / UNIT) + reference
        for i in range(0, full - 1):
            step, words, maximum, row_sum, reference, accumulator, promoted = advance(
                i, step, q, k_smem, v_smem, w_smem, k_full, k_empty, v_full, v_empty, tile_records, tile_exponents, row_scale,
                general_scale, limit, 1.0, words, maximum, row_sum, reference, accumulator, master, promoted,
                BASE, THRESHOLD, UNIT, LOWEST, SHARED, False, WARPGROUP, WARPGROUPS, D, STAGES, PROMOTE, SCORES, SUMS, OPERAND,
                BLOCKS, STATE, SETTLE)
        for i in range(gl.maximum(full - 1, 0), mine - 1):
            step, words, maximum, row_sum, reference, accumulator, promoted = advance(
                i, step, q, k_smem, v_smem, w_smem, k_full, k_empty, v_full, v_empty, tile_records, tile_exponents, row_scale,
                general_scale, limit, gl.where(i < full, 1.0, 0.0), words, maximum, row_sum, reference, accumulator,
                master, promoted, BASE, THRESHOLD, UNIT, LOWEST, SHARED, True, WARPGROUP, WARPGROUPS, D, STAGES, PROMOTE, SCORES,
                SUMS, OPERAND, BLOCKS, STATE, SETTLE)
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
        total = with_master(accumulator, master, to_rows(promoted - level, ROW_OUT), D)
        # Scores that left float16 made the maximum infinite: NaN, not a plausible number.
        denominator = to_rows(row_sum + (maximum - maximum), ROW_OUT)
        empty = gl.convert_layout(limit, ROW_OUT) < 0
        inverse = gl.where(empty, 0.0, gl.exp2(to_rows(reference, ROW_OUT)) / gl.where(empty, 1.0, denominator))[:, None]
        result = gl.where(inverse == 0, 0.0, total * inverse).to(out.dtype.element_ty)
        result = gl.convert_layout(result, STORE)
        r = gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
        channel = gl.arange(0, D, gl.SliceLayout(0, STORE))
        place = (q_row + WARPGROUP * ROWS + r).to(gl.int64) * heads + head
        gl.store(out + place[:, None] * D + channel[None, :], result, mask=(r < rows)[:, None])
        log2_sum = to_rows(maximum, ROW_OUT) * (1.0 / UNIT) + gl.log2(gl.where(empty, 1.0, denominator)) - P_LOG2
        value = gl.convert_layout(gl.where(empty, float("-inf"), log2_sum * 0.6931471805599453), ROW)
        gl.store(lse + side + local, value, mask=local < rows)
    if WARPGROUPS > 1 and WARPGROUP == 0:
        inline.take_turn(0)


@gluon.jit
def scale_of(code):
    """Powers of two of E8M0 codes. Code 0 is 2^-127, a subnormal; 255 marks NaN, which the operand's codes and records carry."""
    word = code.to(gl.int32)
    bits = gl.where(word == 0, 1 << 22, gl.where(word == 255, 0x7FC00000, word << 23))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit(do_not_specialize=["heads", "groups", "head_stride", "document_extra", "max_tiles", "documents", "factor", "GROUP"])
def attention(q_desc, k_desc, v_desc, w_desc, out, lse, q_scales, records, exponents, quiet, work, count, heads, groups,
              head_stride, document_extra, max_tiles, documents, factor, GROUP, P_LOG2: gl.constexpr, THRESHOLD: gl.constexpr,
              LOWEST: gl.constexpr, SHARED: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr,
              WARPGROUPS: gl.constexpr, REGISTERS: gl.constexpr, SETTLE: gl.constexpr):
    """The kernel: three consumers of 64 rows and a loader warp."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    master = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, D // 8, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
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
    fence_async_shared()
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (consume, (out, lse, q_scales, records, exponents, quiet, work, count, master.index(0), q_smem.index(0), k_smem, v_smem,
                       w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra,
                       max_tiles, documents, factor, GROUP, 0, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, SHARED, D, STAGES, PROMOTE, SETTLE)),
            (load_tiles, (q_desc, k_desc, v_desc, w_desc, work, count, q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full,
                          k_empty, v_full, v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES)),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (consume, (out, lse, q_scales, records, exponents, quiet, work, count, master.index(0), q_smem.index(0), k_smem, v_smem, w_smem,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles,
                       documents, factor, GROUP, 0, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, SHARED, D, STAGES, PROMOTE, SETTLE)),
            (consume, (out, lse, q_scales, records, exponents, quiet, work, count, master.index(1), q_smem.index(1), k_smem, v_smem, w_smem,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles,
                       documents, factor, GROUP, 1, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, SHARED, D, STAGES, PROMOTE, SETTLE)),
            (consume, (out, lse, q_scales, records, exponents, quiet, work, count, master.index(2), q_smem.index(2), k_smem, v_smem, w_smem,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles,
                       documents, factor, GROUP, 2, WARPGROUPS, P_LOG2, THRESHOLD, LOWEST, SHARED, D, STAGES, PROMOTE, SETTLE)),
            (load_tiles, (q_desc, k_desc, v_desc, w_desc, work, count, q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty,
                          v_full, v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
