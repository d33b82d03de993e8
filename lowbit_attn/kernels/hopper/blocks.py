"""Softmax of the kernel whose P has scales of its own for every row and 32 keys (or row and key tile); see `fused`.

A key tile's 128 keys are ordered so that lane c of the four that share a row holds keys 32 c .. 32 c + 31: one block. So a block's
maximum and scale stay inside a thread. Scores of a tile come as words of two float16, [64 rows, 16, 4 lanes].

P leaves as E4M3 codes of the rounded weights themselves, relative to an exponent of the row that runs with the loop: at level l an
operand of 1 stands for 2^l times a constant of what the reference calls P. Blocks far below the row's level lose bits of their
smallest weights, and all of those 11.9 doublings under a frozen one; see `docs/numerics.md`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit_attn.kernels.hopper import inline
from lowbit_attn.kernels.hopper.forward_tiles import KEYS, ROWS

SEED_LOG2: gl.constexpr = gl.constexpr(5.0)
"""Frozen maximum: log2 of what a weight of 1 is as an E4M3 operand, 3 doublings below the top of its blocks. The lower, the more
small weights become 0 (attention sinks); the higher, the more often a tile raises the maximum."""

SEED: gl.constexpr = gl.constexpr((65535.0 / 512.0 * (127.0 - 0.05798) - 128.0 * (120.0 - SEED_LOG2.value)) / 16.0)
"""Where a frozen maximum lands, in E4M3 codes."""

CAP: gl.constexpr = gl.constexpr(119.0)
"""Larger weights, those above 240 as E4M3 operands, raise the row's level: rounded to any of the grids they might leave E4M3."""

ONE_LOG2: gl.constexpr = gl.constexpr(8.0)
"""Online maximum: log2 of what a weight of 1 is as an E4M3 operand."""

SMALLEST: gl.constexpr = gl.constexpr(2.0**-24)
"""Slopes under a frozen maximum are raised to it: -inf, a hidden score, times a slope of 0 would be NaN."""


@gluon.jit
def by_row(x):
    """[64] -> broadcastable to [64, 16, 4]."""
    return x[:, None][:, None, :]


@gluon.jit
def hide(words, limit):
    """Score words with -inf for the keys past `limit`."""
    step = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, words.type.layout)))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, words.type.layout)))
    key = step // 2 * 4 + (1 - step % 2) * 2  # of each 16 columns the second 8 hold the earlier pairs of keys
    return inline.keep_visible_pair(words, (limit - lane * 32)[None, None, :], key[None, :, None])


@gluon.jit
def quarter(x):
    """Words [64, 4 n, 4] -> [64, n, 4], the largest of each four halves."""
    COUNT: gl.constexpr = x.shape[1] // 4
    even, odd = gl.split(x.reshape([ROWS, COUNT, 2, 2, 4]).permute((0, 1, 4, 2, 3)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return inline.largest_of_four(first, second, third, fourth)


@gluon.jit
def block_tops(words):
    """The largest score of each row and block, twice in a word, [64, 4]."""
    top = quarter(quarter(words)).reshape([ROWS, 4])
    return gl.convert_layout(inline.larger_half(top), gl.SliceLayout(1, words.type.layout))


@gluon.jit
def pack(words, P_KIND: gl.constexpr):
    """Rounded words of columns 8 j + 2 c [64, 16, 4] -> words of four codes [64, 32]."""
    first, second = gl.split(words.reshape([ROWS, 8, 2, 4]).permute((0, 1, 3, 2)))
    codes = inline.interleave_bytes(first, second) if P_KIND == "e4m3" else inline.codes_of_patterns(first, second)
    return codes.reshape([ROWS, KEYS // 4])


@gluon.jit
def rounded(words, largest, SHORT: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr, P_MAGIC: gl.constexpr,
            P_LOWEST: gl.constexpr):
    """Words of patterns [64, 16, 4] rounded, each block with the scale that its `largest` [64, 4] gives."""
    threshold = inline.threshold_of(largest, P_BUMP, P_LOWEST)
    magic = inline.multiply(threshold, gl.full_like(threshold, P_MAGIC))
    double = inline.add(threshold, threshold)
    return inline.round_patterns(words, threshold[:, None, :], magic[:, None, :], double[:, None, :], SHORT, P_KIND == "e2m1")


@gluon.jit
def frozen(words, slope, offset, pair, rest, FIRST: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr, P_MAGIC: gl.constexpr,
           P_LOWEST: gl.constexpr):
    """Schraudolph's exponential of scores in BF16's pattern (U16), relative to a maximum that is frozen after the first tile and
    raised by whole doublings where a tile would leave E4M3's range. slope [64, 4] turns scores into E4M3 codes, 8 a doubling.

    Returns rounded words [64, 16, 4], then the offset, its `offset_pairs` and the factor on what was accumulated before, [64, 4]
    each and equal along the lanes: where nothing is raised, no shuffle is spent on the row.
    """
    slope = gl.maximum(slope, SMALLEST)
    tops = block_tops(words)
    top = inline.lower_half(tops) * slope
    if FIRST:
        offset = (SEED - gl.max(top, 1))[:, None] + gl.zeros_like(slope)
        pair, rest = inline.offset_pairs(offset)
        factor = offset
    else:
        offset, pair, rest, factor = inline.lower_if_above(offset, pair, rest, top, gl.full_like(top, CAP),
                                                           gl.full_like(top, SEED))
    slopes = inline.twice(slope)
    patterns = inline.short_patterns(words, slopes[:, None, :], pair[:, None, :], rest[:, None, :])
    if P_KIND == "e4m3":
        patterns = inline.e4m3_of_short(patterns)
    else:
        largest = (inline.short_patterns(tops, slopes, pair, rest) & 0xFFFF) << 3
        patterns = rounded(patterns, largest, True, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)
    return patterns, offset, pair, rest, factor


@gluon.jit
def exponentials(scores, slope, maximum, MASKED: gl.constexpr):
    """2^(scores slope - maximum), 0 for hidden scores."""
    result = gl.exp2(scores * slope - maximum)
    return inline.zero_if_hidden(result, scores) if MASKED else result


@gluon.jit
def online(words, slope, maximum, FIRST: gl.constexpr, MASKED: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr,
           P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr):
    """Exact exponentials of scores relative to the largest so far. slope [64, 4] turns scores into doublings.

    Returns rounded words [64, 16, 4], the maximum [64], the factor on what was accumulated before [64], and the sums of the weights
    that each lane holds [64, 4], before they are rounded.
    """
    tops = inline.lower_half(block_tops(words))
    new = gl.max(tops * slope, 1)
    if FIRST:
        factor = new
    else:
        new = gl.maximum(maximum, new)
        factor = gl.exp2(maximum - new)
    even = exponentials(inline.lower_half(words), slope[:, None, :], by_row(new), MASKED)
    odd = exponentials(inline.upper_half(words), slope[:, None, :], by_row(new), MASKED)
    largest = exponentials(tops, slope, new[:, None], MASKED)
    patterns = rounded(inline.pair(even, odd), inline.pair(largest, largest) & 0xFFFF, False, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)
    return patterns, new, factor, gl.sum(even + odd, 1)
