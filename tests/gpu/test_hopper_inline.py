"""Each function of the forward's inline PTX equals its plain meaning, which torch computes on the CPU.

`uniform`, `take_turn` and `pass_turn` have no test of their own: they change no value, and every forward runs through them.
"""

from functools import reduce

import pytest
import torch

from lowbit_attn import formats
from lowbit_attn.reference import exponential

pytest.importorskip("triton", reason="Triton runs on Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit_attn.kernels.hopper import inline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                                  reason="needs a Hopper GPU")]

DEVICE = "cuda"
INF, NAN = torch.inf, torch.nan
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 1 + 2.0**-10, 0.5, 3.0, 65504.0, -65504.0, 2.0**-14, 2.0**-14 - 2.0**-24, 2.0**-24,
                        -(2.0**-24), INF, -INF, NAN], dtype=torch.float16)
ALL_HALVES = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)


@gluon.jit
def elementwise(out, a, b, c, d, count, INPUTS: gl.constexpr, OPERATION: gl.constexpr):
    """out = OPERATION(the first INPUTS of a, b, c, d), one element a thread: four neighbours are lanes that share rows."""
    index = gl.program_id(0) * 128 + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    here = index < count
    first = gl.load(a + index, mask=here, other=0)
    if INPUTS == 1:
        result = OPERATION(first)
    elif INPUTS == 2:
        result = OPERATION(first, gl.load(b + index, mask=here, other=0))
    elif INPUTS == 3:
        result = OPERATION(first, gl.load(b + index, mask=here, other=0), gl.load(c + index, mask=here, other=0))
    else:
        result = OPERATION(first, gl.load(b + index, mask=here, other=0), gl.load(c + index, mask=here, other=0),
                           gl.load(d + index, mask=here, other=0))
    gl.store(out + index, result, mask=here)


@gluon.jit
def unpack(out, words):
    index = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(out + index, inline.unpack_e4m3(gl.load(words + index // 4)).to(gl.uint8, bitcast=True))


@gluon.jit
def words_of(out, halves):
    """Scores [64, 128] in wgmma's layout -> words [64, 64]."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    key = gl.arange(0, 128, gl.SliceLayout(0, SCORES))
    words = inline.words_of(gl.load(halves + row[:, None] * 128 + key[None, :]))
    WORDS: gl.constexpr = words.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, WORDS))
    word = gl.arange(0, 64, gl.SliceLayout(0, WORDS))
    gl.store(out + row[:, None] * 64 + word[None, :], words)


@gluon.jit
def scale_rows(out, x, factors, D: gl.constexpr):
    """One x [64, D], in wgmma's layout, times this program's factors [64]."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    place = row[:, None] * D + channel[None, :]
    parts = gl.load(x + place).reshape([4, 2, 8, D // 8, 4, 2])
    factor = gl.load(factors + gl.program_id(0) * 64 + row[:, None] + 0 * channel[None, :]).reshape([4, 2, 8, D // 8, 4, 2])
    result = inline.scale_rows_if_needed(parts, factor, D // 2).reshape([64, D])
    gl.store(out + gl.program_id(0) * 64 * D + place, gl.convert_layout(result, LAYOUT))


def apply(operation, *inputs, dtype=torch.int32):
    """The operation on flat tensors of one length."""
    count = inputs[0].numel()
    assert all(x.shape == (count,) for x in inputs)
    out = torch.full((count,), 77, dtype=dtype, device=DEVICE)
    on_gpu = [x.contiguous().to(DEVICE) for x in inputs]
    on_gpu += on_gpu[:1] * (4 - len(on_gpu))
    elementwise[((count + 127) // 128,)](out, *on_gpu, count, len(inputs), operation, num_warps=4)
    return out.cpu()


def words(halves):
    """float16 [count, 2] -> int32 [count], the first half lowest."""
    return halves.contiguous().view(torch.int32)[:, 0]


def halves(word):
    return word.view(torch.float16).view(-1, 2)


def some_words(seed, count=2**16):
    """Halves of any bits at all, every other one special."""
    generator = torch.Generator().manual_seed(seed)
    anything = torch.randint(-2**15, 2**15, (count, 2), generator=generator).to(torch.int16).view(torch.float16)
    special = SPECIAL[torch.randint(len(SPECIAL), (count, 2), generator=generator)]
    return words(torch.where(torch.rand(count, 2, generator=generator) < 0.5, anything, special))


def some_floats(seed, count=2**16):
    """float32 of all sizes, infinite and NaN ones among them."""
    bits = torch.randint(-2**31, 2**31, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN])
    return torch.cat([special, bits.view(torch.float32)[len(special):]])


def assert_same(got, wanted):
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def assert_same_signs(got, wanted):
    """Equal, zeros' signs too; NaN have none."""
    assert_same(got, wanted)
    assert torch.equal(got.signbit() & ~got.isnan(), wanted.signbit() & ~wanted.isnan())


def around_every_bfloat16():
    """Each bfloat16, hence every E4M3 value and tie, subnormals, infinities and NaN, with its two neighbours in float32."""
    bits = torch.arange(2**16)[:, None] * 2**16 + torch.tensor([-1, 0, 1])
    return bits.to(torch.int32).view(torch.float32).flatten()


def test_pack_e4m3_rounds_to_even_saturates_and_keeps_nan():
    generator = torch.Generator().manual_seed(0)
    x = around_every_bfloat16()
    places = [x[torch.randperm(x.numel(), generator=generator)] for _ in range(4)]
    codes = apply(inline.pack_e4m3, *places).view(torch.uint8).view(-1, 4)
    for place, value in enumerate(places):
        torch_codes = value.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        finite = ~value.isnan()
        assert torch.equal(codes[:, place], formats.encode(value, formats.E4M3))
        assert torch.equal(codes[finite, place], torch_codes[finite])


@pytest.mark.parametrize(("value", "code"), [
    (0.0, 0x00), (-0.0, 0x80), (448.0, 0x7E), (464.0, 0x7E), (1e30, 0x7E), (-INF, 0xFE), (INF, 0x7E), (NAN, 0x7F),
    (1.0625, 0x38), (1.1875, 0x3A), (2.0**-10, 0x00), (3 * 2.0**-10, 0x02), (-(2.0**-9), 0x81), (7.5 * 2.0**-9, 0x08)])
def test_pack_e4m3_by_hand(value, code):
    x, zero = torch.tensor([value]), torch.zeros(1)
    assert apply(inline.pack_e4m3, x, zero, zero, zero).view(torch.uint8).tolist() == [code, 0, 0, 0]


def test_unpack_e4m3_gives_every_code_in_its_place():
    codes = torch.cat([torch.arange(256), torch.arange(256).flip(0)]).to(torch.uint8)
    out = torch.full((512,), 77, dtype=torch.uint8, device=DEVICE)
    unpack[(1,)](out, codes.view(torch.int32).to(DEVICE), num_warps=4)
    assert torch.equal(out.cpu(), codes)


def test_keep_visible_hides_what_is_past_the_limit():
    x = some_floats(0)
    distance = torch.randint(-3, 4, x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    distance[-2:] = torch.tensor([-2**31, 2**31 - 1])
    assert_same_signs(apply(inline.keep_visible, x, distance, dtype=torch.float32), torch.where(distance >= 0, x, -INF))


def test_keep_visible_pair_hides_each_half_by_its_own_key():
    word = some_words(0)
    generator = torch.Generator().manual_seed(1)
    distance, offset = (torch.randint(-3, 130, word.shape, generator=generator, dtype=torch.int32) for _ in range(2))
    distance[::2] = offset[::2] + torch.randint(-2, 3, offset[::2].shape, generator=generator, dtype=torch.int32)
    key = offset[:, None] + torch.arange(2)
    wanted = torch.where(key <= distance[:, None], halves(word).view(torch.int16), torch.tensor(-0x400, dtype=torch.int16))
    assert torch.equal(apply(inline.keep_visible_pair, word, distance, offset), words(wanted))


def test_words_of_puts_the_earlier_key_in_the_lower_half():
    x = torch.randperm(2**16, generator=torch.Generator().manual_seed(0))[:64 * 128].to(torch.int16).view(64, 128)
    out = torch.zeros(64, 64, dtype=torch.int32, device=DEVICE)
    words_of[(1,)](out, x.view(torch.float16).to(DEVICE), num_warps=4)
    assert torch.equal(out.cpu(), x.view(torch.int32))


def test_twice_rounds_to_the_nearest_half():
    tie = ALL_HALVES[1:0x7C00].float() + ALL_HALVES[:0x7BFF].float()
    x = torch.cat([some_floats(0), ALL_HALVES.float(), tie / 2, -tie / 2, (tie / 2).nextafter(torch.tensor(INF)),
                   torch.tensor([65519.0, 65520.0, -65520.0, 2.0**-25, 2.0**-26])])
    assert_same_signs(halves(apply(inline.twice, x)), x.half()[:, None].repeat(1, 2))


@pytest.mark.parametrize(("name", "model"), [("multiply", torch.mul), ("add", torch.add)])
def test_halves_are_multiplied_and_added(name, model):
    a, b = some_words(0), some_words(1)
    # float32 holds the product exactly, and rounding a float32 sum once more gives the nearest float16.
    assert_same_signs(halves(apply(getattr(inline, name), a, b)), model(halves(a).float(), halves(b).float()).half())


@pytest.mark.parametrize(("name", "count", "model"), [("larger", 2, torch.fmax), ("largest_of_four", 4, torch.fmax),
                                                      ("largest_of_four_or_nan", 4, torch.maximum)])
def test_maxima_of_halves(name, count, model):
    inputs = [some_words(seed) for seed in range(count)]
    assert_same(halves(apply(getattr(inline, name), *inputs)), reduce(model, [halves(x).float() for x in inputs]).half())


@pytest.mark.parametrize(("name", "model"), [("row_maxima", torch.maximum), ("row_maxima_of_numbers", torch.fmax)])
@pytest.mark.parametrize("kind", ["any halves", "few NaN", "one large half"])
def test_row_maxima_cover_the_four_lanes_that_share_rows(name, model, kind):
    rows = [some_words(0), some_words(1)]
    if kind != "any halves":
        rows = [words(torch.randn(2**16, 2, generator=torch.Generator().manual_seed(seed)).half()) for seed in range(2)]
    if kind == "few NaN":
        for row in rows:
            row.view(torch.int16)[::29] = 0x7E00
    if kind == "one large half":  # at each of the eight places in turn
        for shift, row in enumerate(rows):
            row.view(torch.float16)[torch.arange(2**14) * 8 + (torch.arange(2**14) + 3 * shift) % 8] = 100.0
    tops = [reduce(model, halves(row).view(-1, 8).float().unbind(1)) for row in rows]
    wanted = torch.stack(tops, -1).half().repeat_interleave(4, 0)
    assert_same(halves(apply(getattr(inline, name), *rows)), wanted)


@pytest.mark.parametrize(("name", "place"), [("lower_half", 0), ("upper_half", 1)])
def test_halves_as_float32(name, place):
    word = words(torch.stack([ALL_HALVES, ALL_HALVES.roll(12345)], -1))
    assert_same_signs(apply(getattr(inline, name), word, dtype=torch.float32), halves(word)[:, place].float())


def direct_grid():
    """Scores, factors and offsets of direct_codes: every combination of special and usual ones, then a sweep over all codes."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.cat([SPECIAL, (torch.randn(24, generator=generator) * 60).half()])
    factors = torch.cat([SPECIAL, torch.exp2(-torch.rand(24, generator=generator) * 14).half()])
    offsets = torch.cat([SPECIAL, (torch.rand(24, generator=generator) * 3 - 1.5).half()])
    grid = torch.cartesian_prod(scores, factors, offsets)
    ones = torch.ones(0x3C01 + 100, dtype=torch.float16)
    sweep = torch.stack([ALL_HALVES[:ones.numel()], ones, 0 * ones], -1)  # everything in 0..1 and a little more
    return torch.cat([grid, sweep])


def test_direct_codes_equal_the_reference():
    lower = direct_grid()
    upper = lower[torch.randperm(len(lower), generator=torch.Generator().manual_seed(1))]
    both = torch.stack([lower, upper], 1)  # [count, half, s a b]
    s, a, b = both.double().unbind(-1)
    codes = exponential.direct_codes(s * a, b, 0.0)
    assert set(codes.unique().tolist()) == set(range(127))
    got = apply(inline.direct_codes, *(words(x) for x in both.unbind(-1)))
    assert torch.equal(got.view(torch.int16).view(-1, 2), 0x6400 + codes.to(torch.int16))


def test_low_bytes_come_in_order():
    first, second = some_words(0), some_words(1)
    wanted = torch.stack([first, second], -1).view(torch.uint8).view(-1, 8)[:, ::2]
    assert torch.equal(apply(inline.low_bytes, first, second).view(torch.uint8).view(-1, 4), wanted)


@pytest.mark.parametrize("high_byte", [0x64, 0xFF])
def test_code_values_of_every_pair_of_codes(high_byte):
    pairs = torch.cartesian_prod(torch.arange(127), torch.arange(127))
    word = words((high_byte * 256 + pairs).to(torch.int16).view(torch.float16))
    wanted = formats.decode(pairs.to(torch.uint8), formats.E4M3).sum(-1)
    assert_same(apply(inline.code_values, word, dtype=torch.float32), wanted)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_are_scaled_unless_all_factors_of_their_warp_are_one(head_dim):
    x = torch.randn(64, head_dim, generator=torch.Generator().manual_seed(0))
    x[::5, ::7] = INF
    single = torch.where(torch.eye(64) == 1, 2.0**-3, 1.0)           # each row alone
    decays = torch.rand(4, 64, generator=torch.Generator().manual_seed(1))
    zero = torch.where(torch.arange(64) == 37, 0.0, torch.ones(64))
    nan_alone = torch.where(torch.arange(64) % 16 == 5, NAN, torch.ones(64))
    nan_and_less = torch.where(torch.arange(64) % 16 == 12, 0.75, nan_alone)
    one_warp = torch.where(torch.arange(64) // 16 == 2, nan_and_less, nan_alone)
    factors = torch.cat([single, decays, torch.stack([torch.ones(64), zero, nan_alone, nan_and_less, one_warp])])
    out = torch.zeros(len(factors), 64, head_dim, device=DEVICE)
    scale_rows[(len(factors),)](out, x.to(DEVICE), factors.to(DEVICE), head_dim, num_warps=4)
    needed = (factors.view(-1, 4, 16) < 1).any(-1).repeat_interleave(16, -1)  # a NaN is not below 1
    assert_same(out.cpu(), torch.where(needed[..., None], factors[..., None] * x, x))
