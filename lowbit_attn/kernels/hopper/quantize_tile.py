"""Device functions of the quantizer: 128 tokens of one head from global memory to E4M3 codes and back.

A lane holds one token with all its channels (half of them at head_dim 256), so that butterflies and maxima stay inside a thread.
32-bit words carry everything: two bf16 or fp16, or one fp32, on the way in, four codes on the way out. Pieces of 16 bytes go
through swizzled shared memory in both directions, so that global accesses are whole lines. The transposition swaps two lane bits
(tokens) with the two byte bits of a code word (channels): 2 SHFL and 2 PRMT per 4 codes.
"""

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from lowbit_attn.kernels.hopper.compat import barrier, copy_async
from lowbit_attn.kernels.hopper.inline import lower_half, pack_e4m3, swap_middle_bytes, upper_half

ROWS = gl.constexpr(128)
"""Tokens of a tile."""

GROUP = gl.constexpr(32)
"""Tokens of a token block: one per lane of a warp."""


@gluon.constexpr_function
def _bases(axis: int, first: int, stop: int) -> list[list[int]]:
    """Layout bases 2^first .. 2^(stop - 1) along one of two axes."""
    return [[1 << bit if axis == 0 else 0, 1 << bit if axis == 1 else 0] for bit in range(first, stop)]


@gluon.constexpr_function
def _bits(size: int) -> int:
    return size.bit_length() - 1


@gluon.constexpr_function
def per_lane(width, halves):
    """[128, width]: a token per lane, 32 per warp; its columns in one lane, or in those of `halves` = 2 warps."""
    held = _bits(width // halves)
    return gl.DistributedLinearLayout(_bases(1, 0, held), _bases(0, 0, 5), _bases(0, 5, 7) + _bases(1, held, _bits(width)), [],
                                      [ROWS, width])


@gluon.constexpr_function
def _exchanged(width):
    """`per_lane(width, 2)` with the two highest column bits swapped between registers and warps."""
    top = _bits(width) - 1
    return gl.DistributedLinearLayout(_bases(1, 0, top - 1) + _bases(1, top, top + 1), _bases(0, 0, 5),
                                      _bases(0, 5, 7) + _bases(1, top - 1, top), [], [ROWS, width])


@gluon.constexpr_function
def pieces(rows, width, warps):
    """[rows, width] words for global memory: 16 bytes a lane, neighbouring lanes along a row, each warp in rows of its own."""
    columns, lines = _bits(width), _bits(rows)
    across = min(5, columns - 2)
    down = 5 - across
    held = lines - _bits(warps)
    return gl.DistributedLinearLayout(_bases(1, 0, 2) + _bases(1, 2 + across, columns) + _bases(0, down, held),
                                      _bases(1, 2, 2 + across) + _bases(0, 0, down), _bases(0, held, lines), [], [rows, width])


@gluon.constexpr_function
def swizzled(width):
    """Rows of `width` words: eight lanes reach all banks with 16 bytes each, down a column of rows as well as along a row."""
    chunks = min(8, width // 4)
    return gl.SwizzledSharedLayout(4, 8 // chunks, chunks, [1, 0])


@gluon.constexpr_function
def part(head_dim):
    """Channels that are rotated together, from channel 0 on: head_dim, or 64 of 96."""
    return 64 if head_dim == 96 else head_dim


@gluon.constexpr_function
def halves_of(head_dim):
    """Warps that share the channels of a token: 256 of them are too many registers for one."""
    return 2 if head_dim == 256 else 1


@gluon.constexpr_function
def _normalization(size):
    return size ** -0.5


@gluon.jit
def along(x, like):
    """[128] -> [128, 1], placed as the rows of `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def copy_words(x, offset, token_stride, valid, WIDTH: gl.constexpr):
    """Start copying [128, WIDTH] words from x + offset; strides count 16 bytes; rows at or past `valid` become zero."""
    LAYOUT: gl.constexpr = pieces(ROWS, WIDTH, gl.num_warps())
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    buffer = gl.allocate_shared_memory(gl.int32, [ROWS, WIDTH], swizzled(WIDTH))
    pointers = x + offset * 4 + ((row * token_stride.to(gl.int32) * 4)[:, None] + column[None, :])
    copy_async(buffer, pointers, mask=(row < valid)[:, None])
    return buffer


@gluon.jit
def _gather(x, offset, token_stride, channel_stride, valid, WIDTH: gl.constexpr, TOKENS_FIRST: gl.constexpr):
    """The same for any strides, which count elements, and with one fp32 per word."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1] if TOKENS_FIRST else [1, 32], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    buffer = gl.allocate_shared_memory(gl.int32, [ROWS, WIDTH], swizzled(WIDTH))
    pointers = x + offset + ((row * token_stride)[:, None] + (column * channel_stride)[None, :])
    for first in gl.static_range(0, WIDTH, 32):
        value = gl.load(pointers, mask=(row < valid)[:, None], other=0.0).to(gl.float32)
        buffer.slice(first, 32, dim=1).store(value.to(gl.int32, bitcast=True))
        pointers += 32 * channel_stride
        barrier()  # keeps the compiler from loading all of a row at once, which takes too many registers
    return buffer


@gluon.jit
def start_copy(x, document, first, head, strides, valid, CHANNEL: gl.constexpr, SIZE: gl.constexpr, MODE: gl.constexpr,
           DTYPE: gl.constexpr):
    """Shared memory that receives channels CHANNEL .. CHANNEL + SIZE of 128 tokens."""
    offset = document * strides[0] + first * strides[1] + head * strides[2]
    if MODE == "vector":
        PER_WORD: gl.constexpr = 1 if DTYPE == "fp32" else 2
        words = x.to(gl.pointer_type(gl.int32), bitcast=True)
        buffer = copy_words(words, offset + CHANNEL // PER_WORD // 4, strides[1], valid, SIZE // PER_WORD)
    else:
        buffer = _gather(x, offset + CHANNEL * strides[3], strides[1], strides[3], valid, SIZE, MODE == "tokens")
    return buffer


@gluon.jit
def channel_values(word, DTYPE: gl.constexpr):
    """Even and odd channels of words [128, n], in fp32: two of a word, or one each of two words."""
    if DTYPE == "bf16":
        even, odd = (word << 16).to(gl.float32, bitcast=True), (word & -65536).to(gl.float32, bitcast=True)
    elif DTYPE == "fp16":
        even, odd = lower_half(word), upper_half(word)
    else:
        even, odd = gl.split(gl.reshape(word.to(gl.float32, bitcast=True), [ROWS, word.shape[1] // 2, 2]))
    return even, odd


@gluon.jit
def _butterfly(x, STRIDE: gl.constexpr):
    """One radix-2 stage over the columns of x [128, n]."""
    WIDTH: gl.constexpr = x.shape[1]
    a, b = gl.split(gl.permute(gl.reshape(x, [ROWS, WIDTH // (2 * STRIDE), 2, STRIDE]), (0, 1, 3, 2)))
    return gl.reshape(gl.permute(gl.join(a + b, a - b), (0, 1, 3, 2)), [ROWS, WIDTH])


@gluon.jit
def _butterflies(x, HALVES: gl.constexpr):
    WIDTH: gl.constexpr = x.shape[1]
    for stage in gl.static_range(8):
        if 2**stage < WIDTH:
            if HALVES == 2 and 2**(stage + 1) == WIDTH:
                x = gl.convert_layout(x, _exchanged(WIDTH))
            x = _butterfly(x, 2**stage)
    return x


@gluon.jit
def _rotated(even, odd, HALVES: gl.constexpr):
    """`formats.hadamard`: strides 1, 2, 4, ... and then one multiplication."""
    NORM: gl.constexpr = _normalization(2 * even.shape[1])
    return _butterflies(even + odd, HALVES) * NORM, _butterflies(even - odd, HALVES) * NORM


@gluon.jit
def nan_maximum(a, b):
    """The larger; NaN if either is."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _larger_magnitude(a, b):
    return nan_maximum(gl.abs(a), gl.abs(b))


@gluon.jit
def _larger_pair(a, b):
    """Of two pairs of magnitudes of 16 bits: their bits sort like the numbers, NaN above all."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _tree(x, HALVES: gl.constexpr, COMBINE: gl.constexpr):
    """Combine the columns of x [128, n] inside the thread, in a tree; the 4 that warps share may be left."""
    WIDTH: gl.constexpr = x.shape[1]
    for level in gl.static_range(8):
        if WIDTH >> (level + 1) >= (1 if HALVES == 1 else 4):
            a, b = gl.split(gl.reshape(x, [ROWS, WIDTH >> (level + 1), 2]))
            x = COMBINE(a, b)
    return x


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def thread_sum(x):
    """Sum over the columns of x [128, n], in a tree inside the thread: [128, 1]."""
    return _tree(x, 1, _sum)


@gluon.jit
def _largest(even, odd, HALVES: gl.constexpr):
    """Largest magnitude of each token, [128]; NaN if it has one."""
    x = _tree(_larger_magnitude(even, odd), HALVES, nan_maximum)
    largest = gl.reshape(x, [ROWS]) if HALVES == 1 else gl.reduce(x, 1, nan_maximum)
    return gl.convert_layout(largest, gl.SliceLayout(1, per_lane(64, HALVES)))


@gluon.jit
def _largest_of_words(word, DTYPE: gl.constexpr, HALVES: gl.constexpr):
    """`_largest` of `channel_values`, two channels at a time: fewer registers than the values take."""
    even, odd = channel_values(_tree(word & 0x7FFF7FFF, HALVES, _larger_pair), DTYPE)
    return _largest(even, odd, HALVES)


@gluon.jit
def block_largest(x):
    """[128] -> [128]: the largest of each 32 tokens, in every one of them."""
    largest = gl.reduce(gl.reshape(x, [ROWS // GROUP, GROUP]), 1, nan_maximum)
    return gl.reshape(gl.expand_dims(largest, 1).broadcast_to([ROWS // GROUP, GROUP]), [ROWS])


@gluon.jit
def scale_code(largest, top_exponent, top_fraction):
    """E8M0 code of `formats.shared_exponent`(largest, "ceil") for a bound of 2^top_exponent * (0.1 top_fraction in binary)."""
    bits = largest.to(gl.int32, bitcast=True)
    tiny = bits < 0x00800000  # frexp normalizes subnormals
    normal = gl.where(tiny, largest * 4294967296.0, largest).to(gl.int32, bitcast=True)
    exponent = (normal >> 23) - gl.where(tiny, 126 + 32, 126) - top_exponent
    exponent += ((normal & 0x007FFFFF) > top_fraction).to(gl.int32)
    code = gl.where(bits == 0, 0, gl.minimum(gl.maximum(exponent, -127), 127) + 127)
    return gl.where(bits >= 0x7F800000, 255, code)


@gluon.jit
def power(code):
    """2^(code - 127) of codes 0 .. 254; fp32 holds 2^-127 as a subnormal."""
    return gl.where(code == 0, 0x00400000, code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _codes(even, odd, factor):
    """Channels [128, n] each times factor [128] -> code words [128, n / 2]."""
    WORDS: gl.constexpr = even.shape[1] // 2
    a, c = gl.split(gl.reshape(even * along(factor, even), [ROWS, WORDS, 2]))
    b, d = gl.split(gl.reshape(odd * along(factor, odd), [ROWS, WORDS, 2]))
    return pack_e4m3(a, b, c, d)


@gluon.jit
def place_of_key(key):
    """Where a key of a tile of 128 goes so that each lane of a score tile gets 32 neighbours: bits c, u, j, e of 2, 3, 1 and 1 to
    u, 1 - j, c, e."""
    return (key & 1) | ((key >> 5) << 1) | ((~key & 2) << 2) | ((key & 28) << 2)


@gluon.jit
def store_codes(codes, words, token, head, heads, stored, CHANNEL: gl.constexpr, D: gl.constexpr,
                KEYS_BY_LANE: gl.constexpr = False):
    """Code words [128, n] of tokens token .. token + stored to codes [tokens, heads, D] from CHANNEL on; KEYS_BY_LANE: each at
    `place_of_key` instead of its own row."""
    WIDTH: gl.constexpr = words.shape[1]
    LAYOUT: gl.constexpr = pieces(ROWS, WIDTH, gl.num_warps())
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    piece = gl.allocate_shared_memory(gl.int32, [ROWS, WIDTH], swizzled(WIDTH), words).load(LAYOUT)
    start = (token * heads + head) * (D // 4) + CHANNEL // 4
    mask = (row < stored)[:, None]
    if KEYS_BY_LANE:
        row = place_of_key(row)
    pointers = codes.to(gl.pointer_type(gl.int32), bitcast=True) + start + ((row * (heads * (D // 4)))[:, None] + column[None, :])
    gl.store(pointers, piece, mask=mask)


@gluon.jit
def _swap(word):
    """Lane bit 0 <-> byte bit 0, lane bit 3 <-> byte bit 1: tokens e and j against the two low channel bits."""
    return gl.inline_asm_elementwise("""{ .reg .b32 p, l, s0, s1; .reg .pred q;
    mov.u32 l, %laneid;
    and.b32 p, l, 1; setp.ne.u32 q, p, 0; selp.b32 s0, 0x3715, 0x6240, q;
    and.b32 p, l, 8; setp.ne.u32 q, p, 0; selp.b32 s1, 0x3276, 0x5410, q;
    shfl.sync.bfly.b32 p, $1, 1, 0x1f, 0xffffffff; prmt.b32 l, $1, p, s0;
    shfl.sync.bfly.b32 p, l, 8, 0x1f, 0xffffffff; prmt.b32 $0, l, p, s1; }""", "=r,r", [word], dtype=gl.int32, is_pure=True,
                                     pack=1)


@gluon.jit
def store_transposed(v_t, words, head, tile, tiles, CHANNEL: gl.constexpr, D: gl.constexpr, BY_ROW: gl.constexpr = False):
    """Code words [128 keys, n] to columns 128 tile .. of v_t [heads, D, 128 tiles], from row CHANNEL on, keys permuted; BY_ROW: in
    the order (c, e, j) of each 16, so that the two rows of a thread are neighbours."""
    SIZE: gl.constexpr = 4 * words.shape[1]
    LAYOUT: gl.constexpr = pieces(SIZE, ROWS // 4, gl.num_warps())
    # Tokens are (block of 32, 16, j, c, e) and words (channel bits 2 ..); after the swap e and j stand for channel bits 0 and 1.
    turned = swap_middle_bytes(_swap(words)) if BY_ROW else _swap(words)
    swapped = gl.reshape(turned, [ROWS // 32, 2, 2, 4, 2, SIZE // 4])
    turned = gl.reshape(gl.permute(swapped, (5, 2, 4, 0, 1, 3)), [SIZE, ROWS // 4])
    piece = gl.allocate_shared_memory(gl.int32, [SIZE, ROWS // 4], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]), turned).load(LAYOUT)
    row = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, ROWS // 4, gl.SliceLayout(0, LAYOUT))
    pitch = tiles.to(gl.int64) * (ROWS // 4)
    start = (head * D + CHANNEL) * pitch + tile * (ROWS // 4)
    gl.store(v_t.to(gl.pointer_type(gl.int32), bitcast=True) + start + ((row * pitch)[:, None] + column[None, :]), piece)


@gluon.jit
def store_group(group, value, head, tile, tiles, row, PER: gl.constexpr, mask):
    """One value of each PER tokens to group [heads, 128 tiles / PER]."""
    index = (head * tiles + tile) * (ROWS // PER) + row // PER
    gl.store(group + index, value, mask=mask & (row % PER == 0))


@gluon.jit
def load_channels(x, document, first, head, strides, valid, D: gl.constexpr, ROTATE: gl.constexpr, MODE: gl.constexpr,
                  DTYPE: gl.constexpr):
    """Even and odd channels of 128 tokens, [128, D / 2] in fp32, rotated or not; D is a power of two."""
    buffer = start_copy(x, document, first, head, strides, valid, 0, D, MODE, DTYPE)
    if MODE == "vector":
        async_copy.commit_group()
        async_copy.wait_group(0)
    even, odd = channel_values(buffer.load(per_lane(buffer.shape[1], halves_of(D))), DTYPE if MODE == "vector" else "fp32")
    if ROTATE:
        even, odd = _rotated(even, odd, halves_of(D))
    return even, odd


@gluon.jit
def _statistics(buffer, ROTATE: gl.constexpr, DTYPE: gl.constexpr, HALVES: gl.constexpr):
    """The largest magnitude of each token; rotated channels (even, odd) stay in registers until their scale is known."""
    even = buffer.load(per_lane(buffer.shape[1], HALVES))
    odd = even
    if ROTATE or DTYPE == "fp32":
        even, odd = channel_values(even, DTYPE)
        if ROTATE:
            even, odd = _rotated(even, odd, HALVES)
        largest = _largest(even, odd, HALVES)
    else:
        largest = _largest_of_words(even, DTYPE, HALVES)
    return even, odd, largest


@gluon.jit
def _encoded(buffer, even, odd, factor, ROTATE: gl.constexpr, DTYPE: gl.constexpr, HALVES: gl.constexpr):
    """Code words of the channels; those that were not rotated are read a second time, which saves half of the registers."""
    if not ROTATE:
        even, odd = channel_values(buffer.load(per_lane(buffer.shape[1], HALVES)), DTYPE)
    return _codes(even, odd, factor)


@gluon.jit
def quantize(x, document, first, head, strides, valid, top_exponent, top_fraction, D: gl.constexpr, ROTATE: gl.constexpr,
             PER_TOKEN: gl.constexpr, MODE: gl.constexpr, DTYPE: gl.constexpr):
    """Code words of channels 0 .. part(D) and of the rest (head_dim 96; else the same again), scale code of each token."""
    SIZE: gl.constexpr = part(D)
    HALVES: gl.constexpr = halves_of(D)
    WORD: gl.constexpr = DTYPE if MODE == "vector" else "fp32"
    buffer = start_copy(x, document, first, head, strides, valid, 0, SIZE, MODE, DTYPE)
    if SIZE < D:
        rest = start_copy(x, document, first, head, strides, valid, SIZE, D - SIZE, MODE, DTYPE)
    if MODE == "vector":
        async_copy.commit_group()
        async_copy.wait_group(0)
    even, odd, largest = _statistics(buffer, ROTATE, WORD, HALVES)
    if SIZE < D:
        even2, odd2, largest2 = _statistics(rest, ROTATE, WORD, HALVES)
        largest = nan_maximum(largest, largest2)
    if not PER_TOKEN:
        largest = gl.convert_layout(block_largest(largest), largest.type.layout)
    code = scale_code(largest, top_exponent, top_fraction)
    factor = gl.where(code == 255, float("nan"), power(254 - code))
    if not ROTATE:
        barrier()  # else the compiler would merge the two readings
    words = _encoded(buffer, even, odd, factor, ROTATE, WORD, HALVES)
    words2 = _encoded(rest, even2, odd2, factor, ROTATE, WORD, HALVES) if SIZE < D else words
    return words, words2, code


@gluon.jit
def store_saved(codes, scales, words, words2, code, row, document, token, head, heads, scale_document, scale_head, stored,
                D: gl.constexpr):
    """Codes and scale codes of `stored` tokens from row `token` of [tokens, heads, D] on."""
    SIZE: gl.constexpr = part(D)
    store_codes(codes, words, token, head, heads, stored, 0, D)
    if SIZE < D:
        store_codes(codes, words2, token, head, heads, stored, SIZE, D)
    gl.store(scales + (head * scale_head + document * scale_document + token + row), code.to(gl.uint8), mask=row < stored)
