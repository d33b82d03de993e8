"""The inline PTX of P's block scales: every function equals its plain meaning, rounding to a grid equals `formats`."""

import struct

import pytest
import torch

from lowbit_attn import formats
from lowbit_attn.kernels.hopper.grids import GRIDS

pytest.importorskip("triton", reason="Triton runs on Linux only")

from test_hopper_inline import DEVICE, apply, halves, some_floats, some_words, words
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit_attn.kernels.hopper import inline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                                  reason="needs a Hopper GPU")]


@gluon.jit
def rounded(out, patterns, largest, count, BUMP: gl.constexpr, MAGIC: gl.constexpr, LOWEST: gl.constexpr, SHORT: gl.constexpr,
            CLAMP: gl.constexpr):
    index = gl.program_id(0) * 128 + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    threshold = inline.threshold_of(gl.load(largest + index, mask=index < count, other=0), BUMP, LOWEST)
    word = gl.load(patterns + index, mask=index < count, other=0)
    magic = inline.multiply(threshold, gl.full_like(threshold, MAGIC))
    result = inline.round_patterns(word, threshold, magic, inline.add(threshold, threshold), SHORT, CLAMP)
    gl.store(out + index, result, mask=index < count)


@gluon.jit
def offset_rounded_up(x):
    pair, _ = inline.offset_pairs(x)
    return pair


@gluon.jit
def offset_left_over(x):
    _, rest = inline.offset_pairs(x)
    return rest


@gluon.jit
def lowered(out, pairs, top, offset, cap, seed):
    """Rows 2 i and 2 i + 1 in a thread, four lanes to a row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [4, 1], [1, 0])
    row = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    index = row[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]
    before = gl.load(offset + row)[:, None] + gl.zeros([64, 4], gl.float32, LAYOUT)
    pair, rest = inline.offset_pairs(before)
    tops = gl.load(top + index)
    now, pair, rest, factor = inline.lower_if_above(before, pair, rest, tops, gl.full_like(tops, cap), gl.full_like(tops, seed))
    SIZE: gl.constexpr = 64 * 4
    gl.store(out + index, now)
    gl.store(out + gl.num_programs(0) * SIZE + index, factor)
    gl.store(pairs + index, pair)
    gl.store(pairs + gl.num_programs(0) * SIZE + index, rest)


@pytest.mark.parametrize("short", [True, False], ids=["BF16's bits", "twice float16's"])
@pytest.mark.parametrize("kind", GRIDS, ids="-".join)
def test_patterns_round_as_formats_do(kind, short):
    element, grid = formats.element_format(kind[0]), GRIDS[kind]
    generator, unit = torch.Generator().manual_seed(0), 8 if short else 2
    # Blocks from 2^-10 of float16's one (2^-2 as an E4M3 operand) up to the largest that the kernel lets pass.
    largest = torch.randint(5 << 10, (15 << 10) - 127, (2**16,), generator=generator) // unit * unit
    below = (torch.rand(2**16, 2, generator=generator).square() * 6 * 1024).long()
    patterns = (largest[:, None] - below).clamp_min(0) // unit * unit
    patterns[::3, 0] = largest[::3]
    word = words((patterns // unit if short else patterns).to(torch.int16).view(torch.float16)).to(DEVICE)
    out = torch.zeros_like(word)
    magic = struct.unpack("<H", struct.pack("<e", grid.magic))[0] * 0x10001
    rounded[(2**16 // 128,)](out, word, largest.int().to(DEVICE), 2**16, grid.bump, magic, grid.lowest, short, kind[0] == "e2m1",
                             num_warps=4)
    value, top = (x.to(torch.int16).view(torch.float16).float() for x in (patterns, largest))
    scale = formats.scales.pow2(formats.shared_exponent(top, kind[1], element))[:, None]
    wanted = formats.round_to_element(value / scale, element) * scale
    assert torch.equal(halves(out.cpu()).float(), wanted)
    assert (halves(out.cpu()).view(torch.int16) & 127 == 0).all()


def test_codes_of_patterns_are_those_of_e4m3_in_the_order_of_the_keys():
    codes = torch.randint(0, 127, (2**14, 4), generator=torch.Generator().manual_seed(0))
    second, first = (words((codes[:, place] << 7).to(torch.int16).view(torch.float16)) for place in ([0, 2], [1, 3]))
    assert torch.equal(apply(inline.codes_of_patterns, first, second).view(torch.uint8).view(-1, 4), codes.to(torch.uint8))
    # A float16 of 2^-8 of an E4M3 number has its code above 7 zeros.
    assert torch.equal((codes << 7).to(torch.int16).view(torch.float16).float() * 256, formats.decode(codes.to(torch.uint8),
                                                                                                      formats.E4M3))


def test_interleaved_bytes_have_the_same_order():
    first, second = some_words(0), some_words(1)
    a, b = (x.view(torch.uint8).view(-1, 4) for x in (first, second))
    wanted = torch.stack([b[:, 0], a[:, 0], b[:, 2], a[:, 2]], -1)
    assert torch.equal(apply(inline.interleave_bytes, first, second).view(torch.uint8).view(-1, 4), wanted)


def test_short_patterns_become_the_nearest_e4m3_codes():
    pattern = torch.arange(2024).repeat(2).view(2, -1).T.contiguous()
    pattern[:, 1] = pattern[:, 1].flip(0)
    got = apply(inline.e4m3_of_short, words(pattern.to(torch.int16).view(torch.float16))).view(torch.uint8).view(-1, 4)[:, ::2]
    assert torch.equal(got, torch.round(pattern / 16).to(torch.uint8))  # torch.round rounds ties to even


def test_the_larger_half_stands_in_both():
    word = some_words(0)
    wanted = halves(word).float().unbind(-1)
    torch.testing.assert_close(halves(apply(inline.larger_half, word)).float(),
                               torch.fmax(*wanted)[:, None].repeat(1, 2), rtol=0, atol=0, equal_nan=True)


def test_short_patterns_of_scores():
    generator = torch.Generator().manual_seed(0)
    s = (torch.randn(2**16, 2, generator=generator) * 3000).half()
    s[::7, 0] = -torch.inf
    slope = torch.exp2(torch.randint(-24, -4, (2**16, 1), generator=generator).float()).repeat(1, 2).half()
    offset = (torch.rand(2**16, 1, generator=generator) * 127).repeat(1, 2).half()
    rest = torch.randint(0, 5, (2**16, 1), generator=generator).repeat(1, 2)
    t = (s.double() * slope.double() + offset.double()).clamp_min(0).half().double()
    wanted = torch.round(t * 16 - rest).clamp_min(0)
    inside = (t < 127).all(-1)
    negative = (rest | 0x8000).to(torch.int32).to(torch.int16).view(torch.float16)
    got = halves(apply(inline.short_patterns, words(s), words(slope), words(offset), words(negative))).view(torch.int16)
    assert inside.sum() > 2**15
    assert torch.equal(got[inside].double(), wanted[inside])


def test_offsets_round_up_and_what_is_too_much_is_left_over():
    x = torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * 200
    up, rest = (halves(apply(f, x)) for f in (offset_rounded_up, offset_left_over))
    assert torch.equal(up[:, 0], up[:, 1])
    assert (up[:, 0].double() >= x).all()
    below = up[:, 0].contiguous().view(torch.int16) - torch.where(up[:, 0] > 0, 1, -1).to(torch.int16)
    assert (below.view(torch.float16).double() < x).all()
    left = rest.view(torch.int16).int() & 0x7FFF
    assert torch.equal(left.double(), torch.round((up.double() - x[:, None]) * 16))
    assert (rest.view(torch.int16) < 0).all()


def test_pairs_are_rounded_halves_the_first_in_the_lower_one():
    even, odd = some_floats(0), some_floats(1)
    torch.testing.assert_close(halves(apply(inline.pair, even, odd)), torch.stack([even, odd], -1).half(), rtol=0, atol=0,
                               equal_nan=True)


def test_pairs_of_bfloat16_too():
    even, odd = some_floats(0), some_floats(1)
    found = apply(inline.pair_bf16, even, odd).contiguous().view(torch.bfloat16).view(-1, 2)
    torch.testing.assert_close(found, torch.stack([even, odd], -1).bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_hidden_scores_have_no_weight():
    weight, score = some_floats(0), some_floats(1)
    score[::3] = -torch.inf
    torch.testing.assert_close(apply(inline.zero_if_hidden, weight, score, dtype=torch.float32),
                               torch.where(score == -torch.inf, 0.0, weight), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0], ids=["none", "few", "all"])
def test_offsets_fall_by_whole_doublings_where_any_lane_is_above(share):
    """Most warps raise nothing, or one row of their sixteen, or all of them; lanes then agree on what the largest asks for."""
    generator, cap, seed = torch.Generator().manual_seed(0), 119.0, 71.03
    rows = 64 * 128
    offset = torch.rand(rows, generator=generator) * 400 - 200
    reached = 40 + 79 * torch.rand(rows, 4, generator=generator)
    above = torch.rand(rows, generator=generator) < share
    reached[above, torch.randint(4, (rows,), generator=generator)[above]] += torch.rand(int(above.sum()), generator=generator) * 500
    top = reached - offset[:, None]
    reached = (top + offset[:, None]).amax(1)
    raised = torch.where(reached > cap, ((reached - seed) * 0.125).ceil(), 0.0)
    out, pairs = (torch.zeros(2, rows, 4, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.int32))
    lowered[(rows // 64,)](out, pairs, top.to(DEVICE), offset.to(DEVICE), cap, seed, num_warps=4)
    wanted = (offset - 8 * raised)[:, None].expand(rows, 4)
    assert torch.equal(out[0].cpu(), wanted)
    assert torch.equal(out[1].cpu(), torch.exp2(-raised)[:, None].expand(rows, 4))
    flat = wanted.reshape(-1).contiguous().to(DEVICE)
    assert torch.equal(pairs[0].flatten().cpu(), apply(offset_rounded_up, flat, dtype=torch.int32))
    assert torch.equal(pairs[1].flatten().cpu(), apply(offset_left_over, flat, dtype=torch.int32))
