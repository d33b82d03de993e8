"""Attention forward of recipe nvfp4_fp8: NVFP4 Q and K, P in E4M3 blocks of 32 keys, token-block V; equals reference.forward.

As `forward`: a loader warp, consumer warpgroups of 64 rows, causal or not. The product of an E2M1 number and a UE4M3 scale has up
to six significant bits, E4M3 has four: Q K^T multiplies bfloat16, which holds each such product exactly (`quantize_nvfp4`). P V
multiplies E4M3 codes, 32 keys at a time into an accumulator of their own: those keys share P's scale of the row and V's of the
block, and 2^(both exponents) times their sum is added to the output in float32. So nothing is rounded but P, and no sum of FP8
products is longer than 32.

Operands, flattened as in `forward`:
    q: bfloat16 [tokens, heads * D];  k: bfloat16 [tokens, Hkv * D];  v: E4M3 codes [Hkv * D, padded tokens], keys as in
    `forward`;  v_scale: [Hkv, 4 per tile], 2^e of each 32 keys, NaN where one is broken.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from lowbit_attn.kernels.hopper.forward_tiles import (
    KEYS,
    ROWS,
    barriers,
    load_tiles,
    operand,
    pack,
    raise_maximum,
    spread,
    store_rows,
)
from lowbit_attn.kernels.hopper.inline import keep_visible, uniform
from lowbit_attn.kernels.hopper.work_queue import entry_of, following, queue

LARGEST_LOG2: gl.constexpr = gl.constexpr(8.807354922057604)
"""log2 of E4M3's largest number: a block's scale is the smallest power of two that brings its largest weight down to it."""

LOWEST: gl.constexpr = gl.constexpr(-3.0e38)
"""The maximum of a row that has seen no key, and no score above it: any other exceeds it, and what came before counts nothing."""

SMALLEST: gl.constexpr = gl.constexpr(-126.0)
"""The smallest exponent of a scale. Weights 2^117 below the row's maximum may lose bits to it."""


@gluon.jit
def quarters(x):
    """[64, 4 n] -> the four [64, n], a renaming of registers."""
    even, odd = gl.split(x.reshape([ROWS, 2, 2, x.shape[1] // 4]).permute((0, 3, 1, 2)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def power_of(exponent):
    """2^exponent of whole numbers from -126 to 127, without a transcendental instruction."""
    # The sum's low bits are the exponent; nine of them survive the shift.
    bits = (exponent + 12582912.0).to(gl.int32, bitcast=True)
    return ((bits << 23) + 0x3F800000).to(gl.float32, bitcast=True)


@gluon.jit
def softmax(scores, factor, v_scale, limit, maximum, row_sum, THRESHOLD: gl.constexpr, FIRST: gl.constexpr, MASKED: gl.constexpr,
            L3: gl.constexpr):
    """Codes of P before they are rounded [64, 128], 2^(exponents of P and V) [64, 4], maximum, row sum of each lane and the factor
    on what was accumulated before. MASKED: row r sees keys 0..limit[r] of the tile only."""
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    x = scores.reshape([ROWS, 4, 4, 4, 2])
    if MASKED:
        column = gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
        distance = gl.convert_layout(limit, gl.SliceLayout(1, scores.type.layout))[:, None] - column[None, :]
        x = keep_visible(x * factor, distance.reshape([ROWS, 4, 4, 4, 2]))
        tops = gl.max(gl.max(gl.max(x, 4), 2), 2)
    else:
        tops = gl.max(gl.max(gl.max(x, 4), 2), 2) * factor
    top = gl.convert_layout(gl.max(tops, 1), maximum.type.layout)
    if FIRST:
        new = gl.maximum(top, LOWEST)
    else:
        new = raise_maximum(maximum, top, THRESHOLD)
    exponent = gl.maximum(gl.ceil(tops - new[:, None] - LARGEST_LOG2), SMALLEST)
    offset = spread(-new[:, None] - exponent)
    if MASKED:
        p = gl.exp2(x + offset)
    else:
        p = gl.exp2(x * factor + offset)
    scale = power_of(exponent)
    sums = gl.sum(gl.sum(gl.sum(p, 4), 2) * scale[:, :, None], 1)
    scale = scale * v_scale[None, :]
    if MASKED:
        # A block is seen when its first key is; an unseen one may be broken.
        scale = gl.where(limit[:, None] >= block[None, :] * 32, scale, 0.0)
    if FIRST:
        row_sum, decay = sums, gl.full([ROWS], 1.0, gl.float32, new.type.layout)
    else:
        decay = gl.exp2(maximum - new)
        row_sum = row_sum * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p.reshape([ROWS, KEYS]), scale, new, row_sum, decay


@gluon.jit
def add_block(accumulator, words, scale, v, BLOCK: gl.constexpr, FIRST: gl.constexpr):
    """accumulator [64, n] + scale [64] * P V of 32 keys, for n channels from FIRST on; 64 at a time, for ptxas keeps two such sums
    in registers."""
    N: gl.constexpr = accumulator.shape[1]
    if N > 64:
        lower, upper = gl.split(accumulator.reshape([ROWS, 2, N // 2]).permute((0, 2, 1)))
        lower = add_block(lower, words, scale, v, BLOCK, FIRST)
        upper = add_block(upper, words, scale, v, BLOCK, FIRST + N // 2)
        joined = gl.join(lower, upper).permute((0, 2, 1)).reshape([ROWS, N])
        return gl.convert_layout(joined, accumulator.type.layout)
    else:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 32])
        codes = operand(words, gl.DotOperandLayout(0, LAYOUT, 4))
        keys = v.slice(FIRST, N, dim=0).slice(BLOCK * 32, 32, dim=1).permute((1, 0))
        partial = warpgroup_mma(codes, keys, gl.zeros([ROWS, N], gl.float32, LAYOUT), use_acc=False, is_async=True)
        partial = gl.convert_layout(warpgroup_mma_wait(0, deps=(partial,)), accumulator.type.layout)
        return accumulator + partial * gl.convert_layout(scale, gl.SliceLayout(1, accumulator.type.layout))[:, None]


@gluon.jit
def add_tile(accumulator, decay, words, scales, v):
    """accumulator * decay [64] + P V of a tile, words [64, 32] of codes with the scales [64, 4] of its blocks."""
    # Always multiplied: a branch around it, as in `forward_tiles.rescale`, would spill here.
    accumulator = accumulator * gl.convert_layout(decay, gl.SliceLayout(1, accumulator.type.layout))[:, None]
    words0, words1, words2, words3 = quarters(words)
    scale0, scale1, scale2, scale3 = quarters(scales)
    accumulator = add_block(accumulator, words0, scale0.reshape([ROWS]), v, 0, 0)
    accumulator = add_block(accumulator, words1, scale1.reshape([ROWS]), v, 1, 0)
    accumulator = add_block(accumulator, words2, scale2.reshape([ROWS]), v, 2, 0)
    return add_block(accumulator, words3, scale3.reshape([ROWS]), v, 3, 0)


@gluon.jit
def start_scores(q, k, SCORES: gl.constexpr):
    """Q K^T of a tile, in flight."""
    return warpgroup_mma(q, k.permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, SCORES), use_acc=False, is_async=True)


@gluon.jit
def advance(i, step, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, v_scales, factor, limit, words, scales, maximum, row_sum,
            decay, accumulator, THRESHOLD: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
            OPERAND: gl.constexpr, L3: gl.constexpr):
    """P V of tile i, scores and softmax of tile i + 1."""
    stage = step % STAGES
    next_stage = (step + 1) % STAGES
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    accumulator = add_tile(accumulator, decay, words, scales, v_smem.index(stage))
    mbarrier.arrive(v_empty.index(stage), count=1)
    mbarrier.wait(k_full.index(next_stage), ((step + 1) // STAGES) & 1)
    scores = start_scores(q, k_smem.index(next_stage), SCORES)
    v_scale = gl.load(v_scales + (i + 1) * 4 + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L3))))
    scores, accumulator = warpgroup_mma_wait(0, deps=(scores, accumulator))
    mbarrier.arrive(k_empty.index(next_stage), count=1)
    p, scales, maximum, row_sum, decay = softmax(scores, factor, v_scale, limit - (i + 1) * KEYS, maximum, row_sum, THRESHOLD,
                                                 False, MASKED, L3)
    return step + 1, pack(p, OPERAND), scales, maximum, row_sum, decay, accumulator


@gluon.jit
def consume(out, lse, v_scale, work, count, slot, announced, q, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            heads, groups, head_stride, document_extra, max_tiles, factor, GROUP, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr,
            THRESHOLD: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """A consumer warpgroup: 64 query rows of each work entry."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4)
    TILES: gl.constexpr = gl.zeros([ROWS, KEYS], gl.float32, SCORES).reshape([ROWS, 4, 4, 4, 2]).type.layout
    L3: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, TILES))
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    local = gl.arange(0, ROWS, ROW)
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
        v_scales = v_scale + ((head // groups).to(gl.int64) * max_tiles + k_tile) * 4
        limit = gl.minimum(local + diagonal, k_valid - 1)
        last = gl.minimum(rows, ROWS) - 1 + diagonal
        mine = (gl.minimum(gl.maximum(gl.minimum(k_valid, last + 1), 1), KEYS * tiles) + KEYS - 1) // KEYS
        mine = uniform(gl.where(rows > 0, mine, 1))
        full = uniform(gl.minimum(gl.maximum(gl.minimum(k_valid, diagonal + 1), 0) // KEYS, mine))
        first_scale = gl.load(v_scales + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L3))))
        mbarrier.wait(q_full, turn & 1)
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma_wait(0, deps=(start_scores(q, k_smem.index(stage), SCORES),))
        mbarrier.arrive(k_empty.index(stage), count=1)
        start = gl.full([ROWS], LOWEST, gl.float32, ROW)
        p, scales, maximum, row_sum, decay = softmax(scores, factor, first_scale, limit, start, start, THRESHOLD, True, True, L3)
        words = pack(p, OPERAND)
        accumulator = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        for i in range(0, full - 1):
            step, words, scales, maximum, row_sum, decay, accumulator = advance(i, step, q, k_smem, v_smem, k_full, k_empty, v_full,
                v_empty, v_scales, factor, limit, words, scales, maximum, row_sum, decay, accumulator, THRESHOLD, False, STAGES,
                SCORES, OPERAND, L3)
        for i in range(gl.maximum(full - 1, 0), mine - 1):
            step, words, scales, maximum, row_sum, decay, accumulator = advance(i, step, q, k_smem, v_smem, k_full, k_empty, v_full,
                v_empty, v_scales, factor, limit, words, scales, maximum, row_sum, decay, accumulator, THRESHOLD, True, STAGES,
                SCORES, OPERAND, L3)
        stage = step % STAGES
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        accumulator = add_tile(accumulator, decay, words, scales, v_smem.index(stage))
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
        for i in range(mine, tiles):  # tiles that only the other warpgroup needs
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
        index = following(slot, announced, turn)
        mbarrier.arrive(q_empty, count=1)
        turn += 1
        denominator = gl.convert_layout(gl.sum(row_sum, 1), ROW)
        empty = limit < 0
        inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, denominator))
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
        result = gl.where(inverse == 0, 0.0, accumulator * inverse).to(out.dtype.element_ty)
        store_rows(out, result, q_row + WARPGROUP * ROWS, rows, heads, head, D)
        value = gl.where(empty, float("-inf"), (maximum + gl.log2(gl.where(empty, 1.0, denominator))) * 0.6931471805599453)
        gl.store(lse + side + local, value, mask=local < rows)


@gluon.jit(do_not_specialize=["heads", "groups", "head_stride", "document_extra", "max_tiles", "factor", "GROUP"])
def attention(q_desc, k_desc, v_desc, out, lse, v_scale, work, count, heads, groups, head_stride, document_extra, max_tiles, factor,
              GROUP, THRESHOLD: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr,
              REGISTERS: gl.constexpr):
    """The kernel: WARPGROUPS consumers of 64 rows and a loader warp."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers(WARPGROUPS, STAGES)
    slot, announced = queue()
    fence_async_shared()
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (consume, (out, lse, v_scale, work, count, slot, announced, q_smem.index(0), k_smem, v_smem, q_full, q_empty, k_full,
                       k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles, factor, GROUP, 0,
                       WARPGROUPS, THRESHOLD, D, STAGES)),
            (load_tiles, (q_desc, k_desc, v_desc, work, count, slot, announced, q_smem, k_smem, v_smem, q_full, q_empty, k_full,
                          k_empty, v_full, v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES, False, True)),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (consume, (out, lse, v_scale, work, count, slot, announced, q_smem.index(0), k_smem, v_smem, q_full, q_empty, k_full,
                       k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles, factor, GROUP, 0,
                       WARPGROUPS, THRESHOLD, D, STAGES)),
            (consume, (out, lse, v_scale, work, count, slot, announced, q_smem.index(1), k_smem, v_smem, q_full, q_empty, k_full,
                       k_empty, v_full, v_empty, heads, groups, head_stride, document_extra, max_tiles, factor, GROUP, 1,
                       WARPGROUPS, THRESHOLD, D, STAGES)),
            (load_tiles, (q_desc, k_desc, v_desc, work, count, slot, announced, q_smem, k_smem, v_smem, q_full, q_empty, k_full,
                          k_empty, v_full, v_empty, heads, groups, GROUP, WARPGROUPS, D, STAGES, False, True)),
        ], [4, 1], [REGISTERS, 24])
