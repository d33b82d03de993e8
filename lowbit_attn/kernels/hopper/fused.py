"""Attention forward whose operands have scales of 32 elements along each contraction axis: fused_mxfp8, fused_mxfp6, fused_mxfp4,
mxattention, mxfp4_ocp; equals reference.forward on the same codes.

As `forward`: a loader warp, consumer warpgroups of 64 rows, FP8 products throughout. Every E2M3 and E2M1 number is an E4M3 number
too, so codes and scales travel together as E4M3 operands, relative to one exponent for each query token, each 32 keys of K and each
channel of V (`quantize_blocks`), and for each row of P (`blocks`). Never causal.

Operands, flattened as in `forward`:
    q: [tokens, heads * D];  k: [padded tokens, Hkv * D], tiles of 128 keys in the order (c, u, e, j) -> (u, 1 - j, c, e) of the
    bits 2, 3, 1, 1 of a key's number in its tile;  v: [Hkv * D, padded tokens], (c, u, i) -> (u, c, i) of the bits 2, 3, 2.
    q_scales: E8M0 codes [Hq, tokens] (dense: [B, Hq, Sq]);  k_group: [Hkv, 4 per tile], 2^e of each 32 keys, NaN where one is
    broken;  v_scale: [documents, Hkv, D].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from lowbit_attn.kernels.hopper import inline
from lowbit_attn.kernels.hopper.blocks import ONE_LOG2, SEED, SEED_LOG2, frozen, hide, online, pack
from lowbit_attn.kernels.hopper.forward_tiles import (
    KEYS,
    ROWS,
    barriers,
    by_thread,
    load_tiles,
    operand,
    promote,
    rescale,
    scale_of,
    scale_parts,
    store_rows,
    with_master,
)
from lowbit_attn.kernels.hopper.inline import pass_turn, take_turn, uniform
from lowbit_attn.kernels.hopper.work_queue import entry_of


@gluon.jit
def words_of(scores):
    """Scores [64, 128] -> words [64, 16, 4 lanes]."""
    return inline.words_of(scores).reshape([ROWS, 16, 4])


@gluon.jit
def weights(words, slope, limit, level, pair, rest, FIRST: gl.constexpr, MASKED: gl.constexpr, FROZEN: gl.constexpr,
            EXACT_SUM: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr, P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr):
    """Rounded words and the state of a tile, as the recipe's softmax has them. Online: level, the maximum, and factor, [64]; pair
    and rest say nothing. Frozen: level, the offset, pair, rest and factor, [64, 4]. Then what lanes add to exact row sums: of
    quantized ones, which a product counts, only the NaN of a broken block."""
    if MASKED:
        words = hide(words, limit)
    if FROZEN:
        words, level, pair, rest, factor = frozen(words, slope, level, pair, rest, FIRST, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)
        added = slope * 0.0
    else:
        words, level, factor, sums = online(words, slope, level, FIRST, MASKED, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)
        added = sums + slope * 0.0 if EXACT_SUM else slope * 0.0
    return words, level, pair, rest, factor, added


@gluon.jit
def change_of(before, now, FROZEN: gl.constexpr):
    """The doublings [64] between a level before and the one now, negative where that was raised."""
    if FROZEN:
        return gl.floor(gl.max(now - before, 1) * 0.125 + 0.5)  # offsets fall by whole eights, all lanes alike
    else:
        return before - now


@gluon.jit
def rescale_lanes(accumulator, factor, D: gl.constexpr):
    """`rescale` by a factor [64, 4] that every lane holds already."""
    parts = accumulator.reshape([4, 2, 8, D // 8, 4, 2])
    LAYOUT: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, parts.type.layout))
    lanes = gl.convert_layout(factor.reshape([4, 2, 8, 4]), LAYOUT)[:, :, :, None, :][:, :, :, :, :, None]
    return gl.convert_layout(scale_parts(parts, lanes, D), accumulator.type.layout)


@gluon.jit
def lane_sums(sums, LAYOUT: gl.constexpr):
    """The row-sum product [64, 8], all columns alike, -> [64, 4 lanes]."""
    first, _ = gl.split(sums.reshape([ROWS, 4, 2]))
    return gl.convert_layout(first, LAYOUT)


@gluon.jit
def advance(i, step, q, k_smem, v_smem, ones, k_full, k_empty, v_full, v_empty, k_scales, row_scale, limit, words, level, pair,
            rest, row_sum, accumulator, master, promoted, MASKED: gl.constexpr, FROZEN: gl.constexpr, EXACT_SUM: gl.constexpr,
            P_KIND: gl.constexpr, P_BUMP: gl.constexpr, P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr, WARPGROUP: gl.constexpr,
            WARPGROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, SCORES: gl.constexpr,
            SUMS: gl.constexpr, OPERAND: gl.constexpr, LANES: gl.constexpr):
    """Scores of tile i + 1, row sum and P V of tile i, then, beside the latter, the softmax of tile i + 1. The loop over full tiles
    promotes by itself, see `forward.advance`."""
    stage = step % STAGES
    next_stage = (step + 1) % STAGES
    slope = row_scale[:, None] * gl.load(k_scales + (i + 1) * 4 + gl.arange(0, 4, gl.SliceLayout(0, LANES)))[None, :]
    codes = operand(words, OPERAND)
    mbarrier.wait(k_full.index(next_stage), ((step + 1) // STAGES) & 1)
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    if WARPGROUPS > 1:
        take_turn(WARPGROUP)
    scores = warpgroup_mma(q, k_smem.index(next_stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float16, SCORES), use_acc=False,
                           is_async=True)
    if EXACT_SUM:
        accumulator = warpgroup_mma(codes, v_smem.index(stage).permute((1, 0)), accumulator, use_acc=i % PROMOTE != 0,
                                    is_async=True)
        if WARPGROUPS > 1:
            pass_turn((WARPGROUP + 1) % WARPGROUPS)
        scores, accumulator = warpgroup_mma_wait(1, deps=(scores, accumulator))
    else:
        sums = warpgroup_mma(codes, ones.permute((1, 0)), gl.zeros([ROWS, 8], gl.float32, SUMS), use_acc=False, is_async=True)
        accumulator = warpgroup_mma(codes, v_smem.index(stage).permute((1, 0)), accumulator, use_acc=i % PROMOTE != 0,
                                    is_async=True)
        if WARPGROUPS > 1:
            pass_turn((WARPGROUP + 1) % WARPGROUPS)
        scores, accumulator, sums = warpgroup_mma_wait(2, deps=(scores, accumulator, sums))
    mbarrier.arrive(k_empty.index(next_stage), count=1)
    before = level
    rounded, level, pair, rest, factor, added = weights(words_of(scores), slope, limit - (i + 1) * KEYS, level, pair, rest, False,
                                                        MASKED, FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)
    if EXACT_SUM:
        accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
    else:
        accumulator, sums = warpgroup_mma_wait(0, deps=(accumulator, sums))
        row_sum = row_sum + lane_sums(sums, LANES)
    mbarrier.arrive(v_empty.index(stage), count=1)
    words = pack(rounded, P_KIND)  # after the wait: wgmma still reads the registers of the last words
    row_sum = row_sum * (factor if FROZEN else factor[:, None]) + added
    if MASKED and i % PROMOTE == PROMOTE - 1:
        # At the scale of tile i: the accumulator has not been rescaled for tile i + 1 yet.
        promote(accumulator, master, change_of(promoted, before, FROZEN), D)
        promoted = before
    if FROZEN:
        accumulator = rescale_lanes(accumulator, factor, D)
    else:
        accumulator = rescale(accumulator, factor, D)
    return step + 1, words, level, pair, rest, row_sum, accumulator, promoted


@gluon.jit
def consume(out, lse, q_scales, k_group, v_scale, work, count, master, q, k_smem, v_smem, ones, q_full, q_empty, k_full, k_empty,
            v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles, factor, GROUP, WARPGROUP: gl.constexpr,
            WARPGROUPS: gl.constexpr, FROZEN: gl.constexpr, EXACT_SUM: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr,
            P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr):
    """A consumer warpgroup: 64 query rows of each work entry."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4)
    LANES: gl.constexpr = gl.SliceLayout(1, words_of(gl.zeros([ROWS, KEYS], gl.float16, SCORES)).type.layout)
    ROW: gl.constexpr = gl.SliceLayout(1, LANES)
    local = gl.arange(0, ROWS, ROW)
    if WARPGROUPS > 1 and WARPGROUP == WARPGROUPS - 1:
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
        tiles = uniform(gl.load(info + 6))
        document = gl.load(info + 7)
        side = head.to(gl.int64) * head_stride + document.to(gl.int64) * document_extra + q_row + WARPGROUP * ROWS
        kv_head = head // groups
        k_scales = k_group + (kv_head.to(gl.int64) * max_tiles + k_tile) * 4
        code = gl.load(q_scales + side + local, mask=local < rows, other=127).to(gl.int32)
        row_scale = scale_of(code, 0x7FC00000) * factor
        limit = k_valid - 1
        slope = row_scale[:, None] * gl.load(k_scales + gl.arange(0, 4, gl.SliceLayout(0, LANES)))[None, :]
        mbarrier.wait(q_full, turn & 1)
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float16, SCORES), use_acc=False,
                               is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        nothing = gl.zeros_like(slope) if FROZEN else gl.zeros([ROWS], gl.float32, ROW)
        no_pair = nothing.to(gl.int32)
        rounded, level, pair, rest, _, row_sum = weights(words_of(scores), slope, limit, nothing, no_pair, no_pair, True, True,
                                                         FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)
        words = pack(rounded, P_KIND)
        accumulator = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        master.store(by_thread(accumulator, D).reshape([D // 8, 128, 4]))
        promoted = level
        for begin in range(0, tiles - 2, PROMOTE):
            end = gl.minimum(begin + PROMOTE, tiles - 2)
            for i in range(begin, end):
                step, words, level, pair, rest, row_sum, accumulator, promoted = advance(i, step, q, k_smem, v_smem, ones,
                    k_full, k_empty, v_full, v_empty, k_scales, row_scale, limit, words, level, pair, rest, row_sum,
                    accumulator, master, promoted, False, FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST, WARPGROUP,
                    WARPGROUPS, D, STAGES, PROMOTE, SCORES, SUMS, OPERAND, LANES)
            if end % PROMOTE == 0:
                promote(accumulator, master, change_of(promoted, level, FROZEN), D)
                promoted = level
        for i in range(gl.maximum(tiles - 2, 0), tiles - 1):  # the last tile may hold hidden keys
            step, words, level, pair, rest, row_sum, accumulator, promoted = advance(i, step, q, k_smem, v_smem, ones,
                k_full, k_empty, v_full, v_empty, k_scales, row_scale, limit, words, level, pair, rest, row_sum,
                accumulator, master, promoted, True, FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST, WARPGROUP, WARPGROUPS,
                D, STAGES, PROMOTE, SCORES, SUMS, OPERAND, LANES)
        stage = step % STAGES
        codes = operand(words, OPERAND)
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        if not EXACT_SUM:
            sums = warpgroup_mma(codes, ones.permute((1, 0)), gl.zeros([ROWS, 8], gl.float32, SUMS), use_acc=False, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            row_sum = row_sum + lane_sums(sums, LANES)
        accumulator = warpgroup_mma(codes, v_smem.index(stage).permute((1, 0)), accumulator, use_acc=(tiles - 1) % PROMOTE != 0,
                                    is_async=True)
        accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        mbarrier.arrive(q_empty, count=1)
        step += 1
        turn += 1
        change = change_of(promoted, level, FROZEN)
        if FROZEN:
            level = gl.max(level, 1)
        denominator = gl.sum(row_sum, 1)
        if not EXACT_SUM:
            denominator = denominator * 0.25  # every lane has all of it, but not every NaN
        # Scores that left float32 made the maximum infinite: NaN, not a plausible number.
        denominator = denominator + (level - level)
        empty = k_valid <= 0
        total = with_master(accumulator, master, change, D)
        ONE: gl.constexpr = ONE_LOG2 if EXACT_SUM else 0.0
        inverse = gl.where(empty, 0.0, gl.exp2(denominator * 0.0 - ONE) / gl.where(empty, 1.0, denominator))
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
        column = gl.arange(0, D, gl.SliceLayout(0, OUTPUT))
        channel_scale = gl.load(v_scale + (document.to(gl.int64) * (heads // groups) + kv_head) * D + column)
        result = gl.where(inverse == 0, 0.0, total * inverse * channel_scale[None, :]).to(out.dtype.element_ty)
        store_rows(out, result, q_row + WARPGROUP * ROWS, rows, heads, head, D)
        if FROZEN:
            # The first tile's maximum and the level since, and SEED_LOG2 less: a weight of 1 was 2^SEED_LOG2 as an operand.
            log2_one = (SEED - level) * 0.125 - SEED_LOG2
        else:
            log2_one = level if EXACT_SUM else level - ONE_LOG2
        value = gl.where(empty, float("-inf"), (log2_one + gl.log2(gl.where(empty, 1.0, denominator))) * 0.6931471805599453)
        gl.store(lse + side + local, value, mask=local < rows)
    if WARPGROUPS > 1 and WARPGROUP == 0:
        take_turn(0)


@gluon.jit(do_not_specialize=["heads", "groups", "head_stride", "document_extra", "max_tiles", "factor", "GROUP"])
def attention(q_desc, k_desc, v_desc, out, lse, q_scales, k_group, v_scale, work, count, heads, groups, head_stride,
              document_extra, max_tiles, factor, GROUP, FROZEN: gl.constexpr, EXACT_SUM: gl.constexpr, P_KIND: gl.constexpr,
              P_BUMP: gl.constexpr, P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              PROMOTE: gl.constexpr, WARPGROUPS: gl.constexpr, REGISTERS: gl.constexpr):
    """The kernel: WARPGROUPS consumers of 64 rows and a loader warp. P_KIND: P's element; "e4m3" has no scales but the row's."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    one = gl.full([8, KEYS], 0x38, gl.int8, FLAT).to(gl.float8e4nv, bitcast=True)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [8, KEYS], gl.NVMMASharedLayout(128, 8, rank=2), one)
    master = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, D // 8, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers(WARPGROUPS, STAGES)
    fence_async_shared()
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (consume, (out, lse, q_scales, k_group, v_scale, work, count, master.index(0), q_smem.index(0), k_smem, v_smem, ones,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles,
                       factor, GROUP, 0, WARPGROUPS, FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST, D, STAGES, PROMOTE)),
            (load_tiles, (q_desc, k_desc, v_desc, work, count, 0, 0, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
                          v_full, v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES, True, False)),
        ], [1], [24])
    elif WARPGROUPS == 2:
        gl.warp_specialize([
            (consume, (out, lse, q_scales, k_group, v_scale, work, count, master.index(0), q_smem.index(0), k_smem, v_smem, ones,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles,
                       factor, GROUP, 0, WARPGROUPS, FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST, D, STAGES, PROMOTE)),
            (consume, (out, lse, q_scales, k_group, v_scale, work, count, master.index(1), q_smem.index(1), k_smem, v_smem, ones,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles,
                       factor, GROUP, 1, WARPGROUPS, FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST, D, STAGES, PROMOTE)),
            (load_tiles, (q_desc, k_desc, v_desc, work, count, 0, 0, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
                          v_full, v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES, True, False)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (consume, (out, lse, q_scales, k_group, v_scale, work, count, master.index(0), q_smem.index(0), k_smem, v_smem, ones,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles,
                       factor, GROUP, 0, WARPGROUPS, FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST, D, STAGES, PROMOTE)),
            (consume, (out, lse, q_scales, k_group, v_scale, work, count, master.index(1), q_smem.index(1), k_smem, v_smem, ones,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles,
                       factor, GROUP, 1, WARPGROUPS, FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST, D, STAGES, PROMOTE)),
            (consume, (out, lse, q_scales, k_group, v_scale, work, count, master.index(2), q_smem.index(2), k_smem, v_smem, ones,
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles,
                       factor, GROUP, 2, WARPGROUPS, FROZEN, EXACT_SUM, P_KIND, P_BUMP, P_MAGIC, P_LOWEST, D, STAGES, PROMOTE)),
            (load_tiles, (q_desc, k_desc, v_desc, work, count, 0, 0, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
                          v_full, v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES, True, False)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
