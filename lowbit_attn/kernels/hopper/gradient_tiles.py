"""Device functions that both backward kernels share: one tile of P, dP and dS, from scores to E4M3 operands.

A tile is [64 rows, 64 or 128 columns]: rows are keys for dK and dV, queries for dQ; columns are what the product contracts, in
blocks of 32 that share a scale. Rows never mix, so each row has a reference exponent for its dS that rises with the loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lowbit_attn.kernels.hopper.compat import tma_load
from lowbit_attn.kernels.hopper.forward_tiles import ROWS, by_row, by_thread, rescale, scale_of
from lowbit_attn.kernels.hopper.inline import from_lane, uniform

TOP = gl.constexpr(448.0)
"""The largest E4M3 value."""

SLACK = gl.constexpr(90.0)
"""A first reference lies at most this many doublings below D, which dS subtracts: less than float32 holds."""

LOWEST = gl.constexpr(-100.0)
"""First references end here: all-zero blocks of several operands add up to one whose power leaves float32."""

HEADROOM = gl.constexpr(6)
"""A row that exceeds TOP is brought to between 2^6 and 2^7: it may grow fourfold before it is touched again."""


@gluon.constexpr_function
def sum_layout(width):
    """Layout of an accumulator [64, width]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 32])


@gluon.constexpr_function
def operand_layout(head_dim):
    """Layout of the E4M3 operand of a product into an accumulator [64, head_dim]."""
    return gl.DotOperandLayout(0, sum_layout(head_dim), 4)


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """Full and empty of what stays (K and V, or Q and dO), then of the ring of tiles: rows full, transposed columns full, empty.
    One loader fills, two consumers empty."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    stays_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    stays_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    rows_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    columns_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(stays_full, count=1)
    mbarrier.init(stays_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(rows_full.index(stage), count=1)
        mbarrier.init(columns_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return stays_full, stays_empty, rows_full, columns_full, empty


@gluon.jit
def load_tile(step, tile, head, q_desc, do_desc, q_t_desc, do_t_desc, vector_desc, q_smem, do_smem, q_t_smem, do_t_smem, vectors,
              rows_full, columns_full, empty, q_start, document_tile, tiles_in_all, D: gl.constexpr, STAGES: gl.constexpr):
    """Start loading a query tile of a head for dK and dV, the ring's `step`th."""
    COLUMNS: gl.constexpr = q_desc.block_type.shape[0]
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(rows_full.index(stage), 2 * q_desc.block_type.nbytes + vector_desc.block_type.nbytes)
    tma_load(q_desc, [q_start + tile * COLUMNS, head * D], rows_full.index(stage), q_smem.index(stage))
    tma_load(vector_desc, [(head * tiles_in_all + document_tile + tile) * 256], rows_full.index(stage), vectors.index(stage))
    tma_load(do_desc, [q_start + tile * COLUMNS, head * D], rows_full.index(stage), do_smem.index(stage))
    mbarrier.expect(columns_full.index(stage), 2 * q_t_desc.block_type.nbytes)
    tma_load(do_t_desc, [head * D, (document_tile + tile) * COLUMNS], columns_full.index(stage), do_t_smem.index(stage))
    tma_load(q_t_desc, [head * D, (document_tile + tile) * COLUMNS], columns_full.index(stage), q_t_smem.index(stage))


@gluon.jit
def tiles_of(tiles, first, shift, valid, rows, groups, COLUMNS: gl.constexpr):
    """How many of an entry's query tiles of COLUMNS, times heads, 64 keys meet, whose first is seen from query `shift` on: those
    that only earlier keys meet come last."""
    mine = gl.maximum(tiles - (gl.maximum(shift, 0) // COLUMNS - first), 0) * groups
    return uniform(gl.where((valid > 0) & (rows > 0), gl.minimum(mine, tiles * groups), 0))


@gluon.jit
def skip(first, stop, step, rows_full, columns_full, empty, STAGES: gl.constexpr):
    """Tiles first .. stop that only the other warpgroup needs; the step after them."""
    for _ in range(first, stop):
        stage = step % STAGES
        mbarrier.wait(rows_full.index(stage), (step // STAGES) & 1)
        mbarrier.wait(columns_full.index(stage), (step // STAGES) & 1)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def blocked(x):
    """[64, columns] -> [64, block of 32, 4, lane, pair], a renaming of registers."""
    return x.reshape([ROWS, x.shape[1] // 32, 4, 4, 2])


@gluon.jit
def flat(x):
    """The inverse of `blocked`."""
    COLUMNS: gl.constexpr = 32 * x.shape[1]
    return gl.convert_layout(x.reshape([ROWS, COLUMNS]), sum_layout(COLUMNS))


@gluon.jit
def over_blocks(x):
    """[64, blocks] -> broadcastable to `blocked`."""
    return x[:, :, None][:, :, :, None][:, :, :, :, None]


@gluon.jit
def over_rows(x, like):
    """[columns] -> broadcastable to the `blocked` tile `like`."""
    return gl.convert_layout(x.reshape([x.shape[0] // 32, 4, 4, 2]), gl.SliceLayout(0, like.type.layout))[None, :, :, :, :]


@gluon.jit
def column_vector(memory, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Floats of shared memory as columns of a tile. They are stored (c, j, e) inside each 16, so that a thread's are
    neighbours."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, sum_layout(COLUMNS))
    stored = gl.zeros([COLUMNS], gl.float32, LAYOUT).reshape([COLUMNS // 16, 2, 4, 2]).permute((0, 2, 1, 3)).reshape([COLUMNS])
    x = memory.slice(FIRST, COLUMNS).load(stored.type.layout)
    x = x.reshape([COLUMNS // 16, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([COLUMNS])
    return gl.convert_layout(x, LAYOUT)


@gluon.jit
def raised(ds, sums, reference, lift):
    """dS, its sums so far and the rows' reference exponents, brought down where a row of dS exceeds E4M3. The sums are also
    multiplied by `lift`, one number for all rows."""
    largest = gl.max(gl.abs(ds), 1)
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) - 127
    rise = gl.where(largest > TOP, exponent - HEADROOM, 0).to(gl.float32)
    factor = gl.exp2(-rise)
    return rescale(ds, factor, ds.shape[1]), rescale(sums, factor * lift, sums.shape[1]), reference + rise


@gluon.jit
def power(code):
    """2^(code - 127) of E8M0 codes; 255 marks NaN, which the codes carry: 1."""
    return scale_of(code, 127 << 23)


@gluon.jit
def exponent_of(code):
    """code - 127 as a float; 0 for 255."""
    return gl.where(code == 255, 0, code - 127).to(gl.float32)


@gluon.jit
def start_of(exponent):
    """A block's exponent as a first reference takes it: that of an all-zero block, -127, says nothing about dS."""
    return gl.where(exponent < -126.5, -60.0, exponent)


@gluon.jit
def magnitude(x):
    """floor(log2 |x|) as a float, -127 for zero."""
    return (((x.to(gl.int32, bitcast=True) >> 23) & 255) - 127).to(gl.float32)


@gluon.jit
def _across_registers(x, WIDTH: gl.constexpr, STRIDE: gl.constexpr):
    """One Hadamard stage over channels that one thread holds."""
    LAYOUT: gl.constexpr = x.type.layout
    parts = x.reshape([ROWS, WIDTH // (2 * STRIDE), 2, STRIDE]).permute((0, 1, 3, 2))
    a, b = gl.split(parts)
    return gl.convert_layout(gl.join(a + b, a - b).permute((0, 1, 3, 2)).reshape([ROWS, WIDTH]), LAYOUT)


@gluon.jit
def _across_lanes(x, WIDTH: gl.constexpr, STRIDE: gl.constexpr):
    """One Hadamard stage over channels that neighbouring lanes hold: channels 2 and 4 apart are lanes 1 and 2 apart."""
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, x.type.layout))
    sign = gl.where((channel & STRIDE) == 0, 1.0, -1.0)[None, :]
    return x * sign + from_lane(x, STRIDE // 2)


@gluon.jit
def rotated(x, D: gl.constexpr):
    """`formats.hadamard` of the rows of an accumulator [64, D]: the same stages in the same order."""
    x = _across_registers(x, D, 1)
    x = _across_lanes(x, D, 2)
    x = _across_lanes(x, D, 4)
    x = _across_registers(x, D, 8)
    x = _across_registers(x, D, 16)
    x = _across_registers(x, D, 32)
    if D == 128:
        x = _across_registers(x, D, 64)
    return x


@gluon.jit
def store_rows(out, x, staging, first, rows, head, heads, WIDTH: gl.constexpr, D: gl.constexpr):
    """Rows of an accumulator [64, WIDTH] to out [tokens, heads, D] from token `first` on, by way of shared memory [64, WIDTH]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    staging.store(x)
    result = staging.load(LAYOUT).to(out.dtype.element_ty)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    place = (first + r).to(gl.int64) * heads + head
    gl.store(out + place[:, None] * D + channel[None, :], result, mask=(r < rows)[:, None])


@gluon.jit
def _places(CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets in a master of what each thread holds, 16 bytes at a time: [CHUNK, 128, 4]."""
    PLANE: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    chunk = gl.arange(0, CHUNK, gl.SliceLayout(1, PLANE))[:, None] * 512
    thread = gl.arange(0, 128, gl.SliceLayout(0, PLANE))[None, :] * 4
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    return (chunk + thread)[:, :, None] + four[None, :][None, :, :]


@gluon.jit
def _with_part(part, master, change, again, INDEX: gl.constexpr):
    """part + master * 2^change for one chunk of channels, and the master's places; change [64 rows] by warp, lane / 4 and row."""
    CHUNK: gl.constexpr = part.shape[0]
    LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(0, part.type.layout)))
    factor = gl.exp2(gl.convert_layout(change, LAYOUT))[:, :, None, :][:, :, :, :, None][None, :, :, :, :, :]
    FLAT: gl.constexpr = part.reshape([CHUNK, 128, 4]).type.layout
    places = master + (_places(CHUNK, FLAT) + INDEX * CHUNK * 512)
    before = gl.load(places, mask=again, other=0.0).reshape([CHUNK, 4, 8, 4, 2, 2])
    return part + gl.convert_layout(before, part.type.layout) * factor, places


@gluon.jit
def promote(sums, master, change, again, D: gl.constexpr):
    """Add an accumulator to its float32 master in global memory, in four chunks: ptxas then never holds all of both at once.
    The master counts as zero unless `again`."""
    CHUNK: gl.constexpr = D // 32
    rows = by_row(change, sums)
    parts = by_thread(sums, D).reshape([2, 2, CHUNK, 4, 8, 4, 2, 2]).permute((2, 3, 4, 5, 6, 7, 0, 1))
    even, odd = gl.split(parts)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    total, places = _with_part(first, master, rows, again, 0)
    gl.store(places, total.reshape([CHUNK, 128, 4]))
    total, places = _with_part(second, master, rows, again, 1)
    gl.store(places, total.reshape([CHUNK, 128, 4]))
    total, places = _with_part(third, master, rows, again, 2)
    gl.store(places, total.reshape([CHUNK, 128, 4]))
    total, places = _with_part(fourth, master, rows, again, 3)
    gl.store(places, total.reshape([CHUNK, 128, 4]))


@gluon.jit
def with_master(sums, master, change, D: gl.constexpr):
    """sums + master * 2^change."""
    total, _ = _with_part(by_thread(sums, D), master, by_row(change, sums), True, 0)
    return gl.convert_layout(total.permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, D]), sums.type.layout)
