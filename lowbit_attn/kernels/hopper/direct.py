"""Softmax of the kernel that computes E4M3 codes of P directly; float16 arithmetic, see `reference.exponential.direct_codes`.

Scores come as words of two float16. The running state of a thread's rows (maximum in units of 1/126 code, reference exponent,
row sum) is float32 [4, 8, 4, 2] by warp, lane / 4, lane % 4 and row, equal along lane % 4: no shuffle is spent on it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit_attn.kernels.hopper import inline
from lowbit_attn.kernels.hopper.forward_tiles import KEYS, ROWS


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
def row_maximum(x, LAYOUT: gl.constexpr, HIDDEN: gl.constexpr):
    """Largest half of each row of words [4, 2, 8, block, c]: float32 [4, 8, 4, 2], equal along c. NaN is kept, or ignored where
    HIDDEN keys may have made one."""
    a, b, c, d = split_blocks(x)
    if HIDDEN:
        upper, lower = gl.split(inline.largest_of_four(a, b, c, d).permute((0, 2, 3, 1)))
        both = inline.row_maxima_of_numbers(upper, lower)
    else:
        upper, lower = gl.split(inline.largest_of_four_or_nan(a, b, c, d).permute((0, 2, 3, 1)))
        both = inline.row_maxima(upper, lower)
    return gl.convert_layout(gl.join(inline.lower_half(both), inline.upper_half(both)), LAYOUT)


@gluon.jit
def raised(maximum, top, THRESHOLD: gl.constexpr):
    """The lazy maximum; a NaN is taken over, since codes cannot carry it."""
    return gl.where(top <= maximum + THRESHOLD, maximum, top)


@gluon.jit
def softmax_full(scores, row_scale, k_scale, fold, maximum, BASE: gl.constexpr, THRESHOLD: gl.constexpr,
                 UNIT: gl.constexpr, HIDDEN: gl.constexpr):
    """One tile whose reference holds for every row: words of 1024 + code, and the state after it. HIDDEN: some scores are -inf,
    which the caller made so; no scale is NaN then."""
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
    new = raised(maximum, row_maximum(inline.multiply(top, a_top), STATE, HIDDEN), THRESHOLD)
    FOLDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(4, PAIRS))))
    folds = inline.twice(gl.convert_layout(fold, FOLDS) * UNIT)
    folds = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(folds, 0), 0), 0), 4)
    base = inline.twice(BASE - new)
    new = BASE - inline.lower_half(base)              # the maximum that the rounded offset stands for
    base = gl.convert_layout(base.permute((0, 3, 1, 2)), ROWS4)
    b = inline.add(gl.expand_dims(base, 3), folds)
    h = inline.direct_codes(s, gl.expand_dims(a5, 4), gl.expand_dims(b, 4))
    decay = gl.exp2((maximum - new) * (1.0 / UNIT))
    return h.reshape([ROWS, KEYS // 2]), new, decay


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
def key_offsets(LAYOUT: gl.constexpr):
    """32 block + 8 j of score words [rows, block, j, c]: with 2 c, kept per row, a word's first key."""
    of_block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))) * 32
    of_j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))) * 8
    return of_block[None, :][:, :, None][:, :, :, None] + of_j[None, :][:, None, :][:, :, :, None]


@gluon.jit
def key_distance(limit, LAYOUT: gl.constexpr):
    """limit - 2 c for score words [rows, block, j, c]."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT))))
    rows = gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT))))
    return (rows[:, None] - 2 * lane[None, :])[:, None, :][:, None, :, :]


@gluon.jit
def hide(scores, limit):
    """Score words with -inf for the keys past each row's limit."""
    s = scores.reshape([ROWS, 4, 4, 4])
    LAYOUT: gl.constexpr = s.type.layout
    hidden = inline.keep_visible_pair(s, key_distance(limit, LAYOUT), key_offsets(LAYOUT))
    return gl.convert_layout(hidden.reshape([ROWS, KEYS // 2]), scores.type.layout)


@gluon.jit
def spread_words(x):
    """[rows, blocks] -> broadcastable to score words [rows, blocks, j, c]."""
    return x[:, :, None][:, :, :, None]


@gluon.jit
def pack(h, OPERAND: gl.constexpr):
    """Words of 1024 + code [64, 64] -> words of four codes [64, 32], keys in the order of `forward_tiles.pack`."""
    CODES: gl.constexpr = gl.zeros([ROWS, KEYS], gl.int32, OPERAND).reshape([ROWS, KEYS // 4, 4]).type.layout
    pairs = h.reshape([ROWS, KEYS // 16, 2, 4]).permute((0, 1, 3, 2))
    first, second = gl.split(pairs)
    return gl.convert_layout(inline.low_bytes(first, second).reshape([ROWS, KEYS // 4]), gl.SliceLayout(2, CODES))


@gluon.jit
def decoded_sums(h, fold):
    """Row sums [64] of the values of the codes h [64, block, j, c], each block's times 2^-fold [.., block]."""
    values = gl.sum(gl.sum(inline.code_values(h), 3), 2)
    return gl.sum(values * gl.exp2(-gl.convert_layout(fold, values.type.layout)), 1)


@gluon.jit
def tile_sums(h, fold, state):
    """Row sums of a masked tile's words [64, 64], as running state: bit for bit those of `softmax_general`, so that which of
    the two computes a row, which later keys of its tile decide, shows in nothing."""
    codes = h.reshape([ROWS, 4, 4, 4])
    BLOCK_ROWS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, codes.type.layout))
    BLOCKS: gl.constexpr = gl.SliceLayout(0, BLOCK_ROWS)
    folds = gl.convert_layout(fold, BLOCKS)[None, :] + gl.zeros([ROWS, 4], gl.float32, BLOCK_ROWS)
    return from_rows(decoded_sums(codes, folds), state)


@gluon.jit
def softmax_general(scores, row_scale, k_scale, exponent, limit, maximum, reference, BASE: gl.constexpr, THRESHOLD: gl.constexpr,
                    UNIT: gl.constexpr, LOWEST: gl.constexpr, SHARED: gl.constexpr, FIRST: gl.constexpr, OPERAND: gl.constexpr):
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
    # Hidden scores are -inf: their codes are 0, and maxima drop the NaN of -inf times a factor of zero.
    s = hide(scores, limit).reshape([ROWS, 4, 4, 4])
    top = gl.reduce(gl.reduce(inline.multiply(s, spread_words(a)), 2, inline.larger), 1, inline.larger)
    top = gl.convert_layout(gl.max(gl.maximum(inline.lower_half(top), inline.upper_half(top)), 1), ROW)
    top = top + gl.sum(scale * 0.0, 1)                # the NaN of a broken block; the sum keeps it
    seen = gl.where(sees, gl.convert_layout(exponent, BLOCKS)[None, :], -127.0)
    before = gl.convert_layout(reference, ROW)
    after = gl.maximum(before, gl.max(seen, 1))
    fold = seen - after[:, None]
    fold = gl.where(fold < LOWEST, LOWEST, fold)
    old = gl.convert_layout(maximum, ROW)
    if FIRST:
        new = gl.where(last < 0, 0.0, top)
    else:
        new = raised(old, gl.where(last < 0, float("-inf"), top), THRESHOLD)
    base = inline.twice(BASE - new)
    new = BASE - inline.lower_half(base)              # the maximum that the rounded offset stands for
    base = base[:, None]
    if FIRST:
        decay = gl.exp2(before - after)
    else:
        decay = gl.exp2((old - new) * (1.0 / UNIT))
    shared = gl.maximum(fold, SHARED)
    b = inline.add(base, inline.twice(fold * UNIT))
    b_sum = inline.add(base, inline.twice(shared * UNIT))
    h_sum = inline.direct_codes(s, spread_words(a), spread_words(b_sum))
    sums = gl.convert_layout(decoded_sums(h_sum, shared), ROW)
    h = inline.direct_codes(s, spread_words(a), spread_words(b))
    words = pack(h.reshape([ROWS, KEYS // 2]), OPERAND)
    return words, new, decay, decay * gl.exp2(before - after), after, sums
