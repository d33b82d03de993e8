"""Inline PTX of the forward, one small function per trick; tests/gpu/test_hopper_inline.py holds each to its plain meaning.

Why assembly at all: FP8 conversion of four values into one register, and branches around rarely needed work that ptxas would
otherwise predicate or serialise against wgmma.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pack_e4m3(a, b, c, d):
    """Four float32 tensors -> one int32 tensor of their E4M3 codes, a lowest: round to nearest even, saturating, NaN kept."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_e4m3(words):
    """Words, each repeated for its four codes along the last axis, -> those E4M3 values: no instruction at all."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def transposed_bytes(upper, lower):
    """Two words of four codes -> (u0 l0 u1 l1, u2 l2 u3 l3): what a thread's rows r and r + 8 hold of four columns, by column."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;", "=r,=r,r,r", [upper, lower],
                                     dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def halves(word):
    """The lower and the upper 16 bits of a word."""
    return gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [word], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)


@gluon.jit
def swap_middle_bytes(word):
    """Bytes 0 2 1 3 of a word."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x3120;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def keep_visible(x, distance):
    """x where distance >= 0, else -inf; as one predicated select per value, which leaves wgmma's registers alone."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r", [x, distance], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def zero_with(x, p):
    """x, or 0 where p is 0. Not pure, so that it stays in the branch that it stands in."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.neu.f32 q, $2, 0f00000000; selp.f32 $0, $1, 0f00000000, q; }",
        "=f,f,f", [x, p], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def uniform(x):
    """x, told to ptxas as equal in all lanes of the warp: loop bounds and wgmma descriptors then use uniform registers."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def from_lane(x, DISTANCE: gl.constexpr):
    """x of the lane whose number differs in the bit DISTANCE, 1 or 2."""
    if DISTANCE == 1:
        return gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", "=f,f", [x], dtype=gl.float32,
                                         is_pure=True, pack=1)
    return gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;", "=f,f", [x], dtype=gl.float32,
                                     is_pure=True, pack=1)


@gluon.jit
def values_of(words):
    """Words of four E4M3 codes -> their values, four float32 tensors, the lowest code first."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi, a, b, c, d; .reg .b32 x, y; mov.b32 {lo, hi}, $4; cvt.rn.f16x2.e4m3x2 x, lo; "
        "cvt.rn.f16x2.e4m3x2 y, hi; mov.b32 {a, b}, x; mov.b32 {c, d}, y; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; "
        "cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }",
        "=f,=f,=f,=f,r", [words], dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1)


def _scale_asm(count: int) -> str:
    """Multiply `count` registers by their factors, unless every factor of the warp is 1 (or NaN)."""
    # A thread holds two rows: the factors of registers 0 and 2 are theirs.
    head = (f"{{ .reg .pred p; .reg .f32 a; min.f32 a, ${2 * count}, ${2 * count + 2}; setp.lt.f32 p, a, 0f3F800000; "
            "vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE; ")
    return head + "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i}; " for i in range(count)) + "DONE: }"


def _scale_constraints(count: int) -> str:
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


SCALE_32: gl.constexpr = gl.constexpr(_scale_asm(32))
SCALE_32_CONSTRAINTS: gl.constexpr = gl.constexpr(_scale_constraints(32))
SCALE_64: gl.constexpr = gl.constexpr(_scale_asm(64))
SCALE_64_CONSTRAINTS: gl.constexpr = gl.constexpr(_scale_constraints(64))


@gluon.jit
def scale_rows_if_needed(x, factor, COUNT: gl.constexpr):
    """x * factor for COUNT values a thread, rows alternating in pairs; skipped by the whole warp while all factors are 1."""
    if COUNT == 32:
        return gl.inline_asm_elementwise(SCALE_32, SCALE_32_CONSTRAINTS, [x, factor], dtype=gl.float32, is_pure=True, pack=32)
    return gl.inline_asm_elementwise(SCALE_64, SCALE_64_CONSTRAINTS, [x, factor], dtype=gl.float32, is_pure=True, pack=64)


@gluon.jit
def take_turn(WARPGROUP: gl.constexpr):
    """Wait for this warpgroup's turn to issue wgmma: named barriers 10, 11 and 12 pass a token around the warpgroups."""
    if WARPGROUP == 0:
        gl.inline_asm_elementwise("bar.sync 10, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WARPGROUP == 1:
        gl.inline_asm_elementwise("bar.sync 11, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 12, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(WARPGROUP: gl.constexpr):
    """Give the turn to warpgroup WARPGROUP."""
    if WARPGROUP == 0:
        gl.inline_asm_elementwise("bar.arrive 10, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WARPGROUP == 1:
        gl.inline_asm_elementwise("bar.arrive 11, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 12, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# From here on, "words" are int32 that hold two float16: the lower half is the earlier key. Tensors of float16 carried around a
# loop would be taken apart and put together again at every turn.


@gluon.jit
def words_of(x):
    """float16 [rows, keys] -> words [rows, keys / 2]."""
    # The second output of each pair is not written: it costs no instruction.
    every = gl.inline_asm_elementwise("mov.b32 $0, $2;", "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2)
    first, _ = gl.split(every.reshape([every.shape[0], every.shape[1] // 2, 2]))
    return first


@gluon.jit
def twice(x):
    """float32 -> a word with its float16, nearest even, in both halves."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def multiply(a, b):
    """Halves multiplied."""
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def add(a, b):
    """Halves added."""
    return gl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


def _largest_of_four_asm(maximum: str) -> str:
    return f"{{ .reg .b32 t; {maximum} t, $1, $2; {maximum} t, t, $3; {maximum} $0, t, $4; }}"


def _row_maxima_asm(maximum: str) -> str:
    return (f"{{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x5410; prmt.b32 b, $1, $2, 0x7632; {maximum} a, a, b; "
            f"shfl.sync.bfly.b32 b, a, 1, 0x1f, 0xffffffff; {maximum} a, a, b; "
            f"shfl.sync.bfly.b32 b, a, 2, 0x1f, 0xffffffff; {maximum} $0, a, b; }}")


LARGEST_OF_FOUR: gl.constexpr = gl.constexpr(_largest_of_four_asm("max.f16x2"))
LARGEST_OF_FOUR_OR_NAN: gl.constexpr = gl.constexpr(_largest_of_four_asm("max.NaN.f16x2"))
ROW_MAXIMA: gl.constexpr = gl.constexpr(_row_maxima_asm("max.NaN.f16x2"))
ROW_MAXIMA_OF_NUMBERS: gl.constexpr = gl.constexpr(_row_maxima_asm("max.f16x2"))


@gluon.jit
def largest_of_four(a, b, c, d):
    """Maxima of halves, NaN ignored: one instruction of three inputs and one of two."""
    return gl.inline_asm_elementwise(LARGEST_OF_FOUR, "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def larger(a, b):
    """Maxima of halves, NaN ignored."""
    return gl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def largest_of_four_or_nan(a, b, c, d):
    """The same with NaN kept."""
    return gl.inline_asm_elementwise(LARGEST_OF_FOUR_OR_NAN, "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def row_maxima(upper, lower):
    """Largest half of each of a thread's two rows over the four lanes that share them, NaN kept; both rows travel in one word:
    the upper row's in the lower half."""
    return gl.inline_asm_elementwise(ROW_MAXIMA, "=r,r,r", [upper, lower], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def row_maxima_of_numbers(upper, lower):
    """`row_maxima` with NaN ignored: the -inf of a hidden key times a factor of zero is one."""
    return gl.inline_asm_elementwise(ROW_MAXIMA_OF_NUMBERS, "=r,r,r", [upper, lower], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def lower_half(word):
    """The lower half as float32."""
    return gl.inline_asm_elementwise("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a; }", "=f,r", [word],
                                     dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def upper_half(word):
    """The upper half as float32."""
    return gl.inline_asm_elementwise("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }", "=f,r", [word],
                                     dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def direct_codes(s, a, b):
    """E4M3 codes from scores: halves 1024 + round(126 clamp(s a + b, 0, 1)), whose low byte is the code. The clamp is part of
    the first instruction, the rounding of the second; a NaN becomes code 0 (row maxima carry it instead)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t, scale, magic; mov.b32 scale, 0x57E057E0; mov.b32 magic, 0x64006400; fma.rn.sat.f16x2 t, $1, $2, $3; "
        "fma.rn.f16x2 $0, t, scale, magic; }", "=r,r,r,r", [s, a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def low_bytes(first, second):
    """The low bytes of four halves: four codes in a word."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True,
                                     pack=1)


@gluon.jit
def code_values(word):
    """Sum of the values of the two E4M3 codes in the low bytes of the halves, float32. A code shifted left by 7 is a float16 of
    2^-8 of its value, subnormals included."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 a, b; .reg .f32 x, y; and.b32 t, $1, 0x00FF00FF; shl.b32 t, t, 7; mov.b32 {a, b}, t; "
        "cvt.f32.f16 x, a; cvt.f32.f16 y, b; add.f32 x, x, y; mul.f32 $0, x, 0f43800000; }", "=f,r", [word], dtype=gl.float32,
        is_pure=True, pack=1)


@gluon.jit
def keep_visible_pair(word, distance, offset):
    """Halves of the keys offset and offset + 1 where the key is at most `distance`; -inf elsewhere."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .b16 a, b; mov.b32 {a, b}, $1; setp.ge.s32 p, $2, $3; setp.gt.s32 q, $2, $3; "
        "selp.b16 a, a, 0xFC00, p; selp.b16 b, b, 0xFC00, q; mov.b32 $0, {a, b}; }",
        "=r,r,r,r", [word, distance, offset], dtype=gl.int32, is_pure=True, pack=1)


# Block-scaled P (`blocks`). A pattern is a float16 whose bits are the exponent and mantissa fields of a weight: 2^-8 of its value
# as an E4M3 operand, so that E4M3 codes are patterns without their 7 lowest bits, subnormals included. A short pattern has 7 bits
# of mantissa, as BF16 has: a pattern shifted right by 3, at most 2047, which as a float16 is the number pattern * 2^-24.


@gluon.jit
def short_patterns(s, slope, offset, rest):
    """Words of scores s -> words of short patterns max(round(16 max(s slope + offset, 0)) + rest, 0). Halves throughout; the result
    is subnormal or nearly so, which rounds it to a whole number. `rest` is one too, not above 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t, unit; mov.b32 unit, 0x00100010; fma.rn.relu.f16x2 t, $1, $2, $3; fma.rn.relu.f16x2 $0, t, unit, $4; }",
        "=r,r,r,r,r", [s, slope, offset, rest], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def offset_pairs(x):
    """float32 -> the pair of its float16, rounded up, and the pair of what that is too much, as a short pattern of x in 1/16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 h; .reg .f32 f; cvt.rp.f16.f32 h, $2; mov.b32 $0, {h, h}; cvt.f32.f16 f, h; sub.f32 f, f, $2; "
        "fma.rn.f32 f, f, 0f41800000, 0f4B400000; prmt.b32 $1, f, f, 0x1010; or.b32 $1, $1, 0x80008000; }",
        "=r,=r,f", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


def _raise_asm() -> str:
    row = ("shfl.sync.bfly.b32 u, t{0}, 1, 0x1f, 0xffffffff; max.f32 t{0}, t{0}, u; shfl.sync.bfly.b32 u, t{0}, 2, 0x1f, "
           "0xffffffff; max.f32 t{0}, t{0}, u; setp.gt.f32 p, t{0}, $16; sub.f32 u, t{0}, $18; mul.f32 u, u, 0f3E000000; "
           "cvt.rpi.f32.f32 u, u; selp.f32 u, u, 0f00000000, p; fma.rn.f32 ${0}, u, 0fC1000000, ${0}; neg.f32 u, u; "
           "ex2.approx.ftz.f32 ${3}, u; cvt.rp.f16.f32 h, ${0}; mov.b32 ${1}, {{h, h}}; cvt.f32.f16 u, h; sub.f32 u, u, ${0}; "
           "fma.rn.f32 u, u, 0f41800000, 0f4B400000; prmt.b32 ${2}, u, u, 0x1010; or.b32 ${2}, ${2}, 0x80008000; ")
    rows = "".join(row.format(r, 2 + r, 4 + r, 6 + r) for r in (0, 1))
    return ("{ .reg .pred p; .reg .b16 h; .reg .f32 t0, t1, u; add.rn.f32 t0, $14, $0; add.rn.f32 t1, $15, $1; "
            "mov.b32 $6, 0f3F800000; mov.b32 $7, 0f3F800000; setp.gt.f32 p, t0, $16; setp.gt.or.f32 p, t1, $16, p; "
            f"vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE; {rows}DONE: }}")


RAISE: gl.constexpr = gl.constexpr(_raise_asm())
RAISE_CONSTRAINTS: gl.constexpr = gl.constexpr("=f,=f,=r,=r,=r,=r,=f,=f,0,1,2,3,4,5,f,f,f,f,f,f")


@gluon.jit
def lower_if_above(offset, pair, rest, top, cap, seed):
    """`offset` less 8 for each doubling by which a row's maximum is raised: the least that brings the largest `top` + offset of its
    four lanes to `seed`, if that is above `cap`. With it `offset_pairs` of the new offset, and the factor 2^-raised.

    Two rows a thread; one vote skips everything while no lane of the warp is above: no shuffle and no exponential.
    """
    return gl.inline_asm_elementwise(RAISE, RAISE_CONSTRAINTS, [offset, pair, rest, top, cap, seed],
                                     dtype=(gl.float32, gl.int32, gl.int32, gl.float32), is_pure=True, pack=2)


@gluon.jit
def larger_half(word):
    """The larger half, NaN ignored, in both halves."""
    return gl.inline_asm_elementwise("{ .reg .b32 t; prmt.b32 t, $1, $1, 0x1032; max.f16x2 $0, t, $1; }", "=r,r", [word],
                                     dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def pair(even, odd):
    """Two float32 -> word of their float16, nearest even, the first in the lower half."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def pair_bf16(even, odd):
    """Two float32 -> word of their bfloat16, nearest even, the first in the lower half."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def zero_if_hidden(weight, score):
    """weight, or 0 where the score is -inf, whatever a slope of 0 made of it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.neu.f32 p, $2, 0fFF800000; selp.f32 $0, $1, 0f00000000, p; }", "=f,f,f", [weight, score],
        dtype=gl.float32, is_pure=True, pack=1)


def _round_asm(shift: bool, clamp: bool) -> str:
    """A word of patterns, the pairs B = 2^(e + 1), G and 2 B -> patterns rounded to a grid that is even below B and doubles its
    spacing at B and at 2 B."""
    # Above 2 B numbers are halved towards 2 B, so that the spacing of G + u, which doubles where u is B, is the grid's.
    return ("{ .reg .b32 p, u, half, two, minus, c; mov.b32 half, 0x38003800; mov.b32 two, 0x40004000; xor.b32 minus, $4, "
            "0x80008000; " + ("shl.b32 p, $1, 3; " if shift else "mov.b32 p, $1; ")
            + ("add.rn.f16x2 c, $2, $4; min.f16x2 p, p, c; " if clamp else "")
            + "fma.rn.f16x2 u, p, half, $2; min.f16x2 u, u, p; add.rn.f16x2 u, u, $3; sub.rn.f16x2 u, u, $3; "
            "fma.rn.f16x2 p, u, two, minus; max.f16x2 $0, p, u; }")


ROUND_SHORT: gl.constexpr = gl.constexpr(_round_asm(True, False))
ROUND_SHORT_CLAMPED: gl.constexpr = gl.constexpr(_round_asm(True, True))
ROUND_LONG: gl.constexpr = gl.constexpr(_round_asm(False, False))
ROUND_CLAMPED: gl.constexpr = gl.constexpr(_round_asm(False, True))


@gluon.jit
def round_patterns(word, threshold, magic, double, SHORT: gl.constexpr, CLAMP: gl.constexpr):
    """Words of patterns (SHORT ones) -> patterns of the weights rounded to E2M3 or E2M1 (CLAMP: at 6, above which a scale of that
    grid's best boundary leaves some).

    Exact where the last bit of a pattern is 0; else within 2^-10 of a tie the farther neighbour may be taken. All are pairs:
    `threshold` B = 2^(e + 1) of the block's scale 2^e, where the grid's spacing doubles, `magic` G with spacing
    2^(e - 3) or 2^(e - 1) below 2^11 times it, which G + B reaches, `double` 2 B.
    """
    ASM: gl.constexpr = ROUND_SHORT_CLAMPED if SHORT and CLAMP else ROUND_SHORT if SHORT else ROUND_CLAMPED if CLAMP else ROUND_LONG
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [word, threshold, magic, double], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def codes_of_patterns(first, second):
    """Words of patterns that E4M3 holds -> codes: the lower half of `second`, of `first`, then the upper halves in that order."""
    return gl.inline_asm_elementwise("{ .reg .b32 a, b; shl.b32 a, $1, 1; shr.u32 b, $2, 7; add.u32 $0, a, b; }", "=r,r,r",
                                     [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def e4m3_of_short(word):
    """Words of short patterns -> words with E4M3 codes, nearest even, in the low bytes of the halves."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 scale, magic; mov.b32 scale, 0x78007800; mov.b32 magic, 0x50005000; fma.rn.f16x2 $0, $1, scale, magic; }",
        "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def interleave_bytes(first, second):
    """The low bytes of four halves, in the order of `codes_of_patterns`."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x2604;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True,
                                     pack=1)


@gluon.jit
def threshold_of(largest, BUMP: gl.constexpr, LOWEST: gl.constexpr):
    """Pair 2^(e + 1) for a block whose largest pattern is `largest`: e is 2 less than its exponent, or 1 less where BUMP carries
    its mantissa over; LOWEST is the smallest exponent field of the result."""
    field = gl.maximum(((largest + BUMP) >> 10) - 1, LOWEST) << 10
    return field | (field << 16)
