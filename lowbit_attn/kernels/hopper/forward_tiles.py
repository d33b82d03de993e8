"""What the forward kernels share: work entries, the ring of tiles and its loader, P as an operand, and accumulators of wgmma with
their float32 master in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lowbit_attn.kernels.hopper.compat import tma_load
from lowbit_attn.kernels.hopper.inline import pack_e4m3, scale_rows_if_needed, unpack_e4m3
from lowbit_attn.kernels.hopper.work_queue import announce, entry_of

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(128)


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
def load_tiles(q_desc, k_desc, v_desc, work, count, slot, announced, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
               v_full, v_empty, heads, groups, GROUP, WARPGROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
               K_PADDED: gl.constexpr, QUEUED: gl.constexpr):
    """The loader warp: Q of each work entry, then its K and V tiles in turn. K_PADDED: K's tiles are padded as V's are. QUEUED:
    entries come from the queue; otherwise by a fixed stride, which nobody needs to be told."""
    step = 0
    turn = 0
    index = gl.program_id(0)
    entries = gl.load(count)
    while index < entries * heads:
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
        if QUEUED:
            index = announce(count, slot, announced, entries * heads, 1)
        else:
            index += gl.num_programs(0)


@gluon.jit
def spread(x):
    """[rows, blocks] -> broadcastable to [rows, blocks, 4, 4, 2], the score tile by block, j, c, e."""
    return x[:, :, None][:, :, None, :][:, :, :, :, None]


@gluon.jit
def raise_maximum(maximum, tile_maximum, THRESHOLD: gl.constexpr):
    """The lazy maximum: raised to the tile's only when that exceeds it by more than THRESHOLD doublings."""
    return gl.where(tile_maximum - maximum > THRESHOLD, tile_maximum, maximum)


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
