"""The packed instructions of `kernels.hopper.inline` as plain arithmetic, for `gluon_on_cpu`: what a word of two halves means.

tests/gpu/test_hopper_inline*.py hold the instructions to the same. NaN is not modelled: `clamp` and `amax` keep it.
"""

from contextlib import contextmanager
from unittest.mock import patch

import gluon_on_cpu
import torch
from gluon_on_cpu import Value


def halves(words):
    """Words -> their float16 numbers as float64, [..., 2]."""
    return words.data.to(torch.int32).contiguous().view(torch.float16).unflatten(-1, (-1, 2)).double()


def words(numbers):
    """The inverse, rounding to nearest even."""
    return Value(numbers.half().contiguous().view(torch.int32)[..., 0])


def integers(words):
    return words.data.to(torch.int32).contiguous().view(torch.int16).unflatten(-1, (-1, 2)).double()


def words_of_integers(numbers):
    return Value(numbers.to(torch.int16).contiguous().view(torch.int32)[..., 0])


def words_of(scores):
    """float16 only: the kernel rounds its scores by the type of their accumulator."""
    assert scores.data.dtype == torch.float16
    return Value(scores.data.contiguous().view(torch.int32))


def keep_visible_pair(word, distance, offset):
    visible = torch.stack([(distance.data - offset.data) >= key for key in (0, 1)], -1)
    return words(torch.where(visible, halves(word), -torch.inf))


def short_patterns(s, slope, offset, rest):
    """Rests are positive integers here."""
    t = (halves(s) * halves(slope) + halves(offset)).clamp_min(0).half().double()
    return words_of_integers((t * 16 - integers(rest)).round().clamp_min(0))


def offset_pairs(x):
    near = x.data.half()
    up = torch.where(near.double() < x.data, torch.nextafter(near, torch.full_like(near, torch.inf)), near).double()
    rest = ((up - x.data) * 16).round()
    return words(up[..., None].expand(*up.shape, 2)), words_of_integers(rest[..., None].expand(*up.shape, 2))


def lower_if_above(offset, pair, rest, top, cap, seed):
    """Everything again from the offset; which rows are raised is the largest of their lanes' business."""
    largest = (top.data + offset.data).amax(-1, keepdim=True)
    raised = torch.where(largest > cap.data, ((largest - seed.data) / 8).ceil(), 0.0)
    lowered = Value(offset.data - 8 * raised)
    return lowered, *offset_pairs(lowered), Value(torch.exp2(-raised).expand(offset.data.shape))


def round_patterns(word, threshold, magic, double, short, clamp):
    """E2M3: three bits below the leading one, and the spacing of the smallest binade below. E2M1 (`clamp`): one, and at most 6."""
    pattern = halves(words_of_integers(integers(word) * (8 if short else 1)))
    spacing = halves(threshold) / (4 if clamp else 16)
    spacing = spacing * torch.where(pattern >= halves(double), 4, torch.where(pattern >= halves(threshold), 2, 1))
    rounded = (pattern / spacing).round() * spacing
    return words(torch.minimum(rounded, 3 * halves(threshold)) if clamp else rounded)


def codes_in_order(first, second):
    """The low bytes of halves: the lower half of `second`, of `first`, then the upper ones."""
    (a, b), (c, d) = (integers(x).unbind(-1) for x in (second, first))
    return Value(torch.stack([a, c, b, d], -1).to(torch.uint8).view(torch.int32)[..., 0])


def shifted(word, bits):
    return words_of_integers((integers(word) / 2**bits).floor())


PLAIN = {
    "multiply": lambda a, b: words(halves(a) * halves(b)), "add": lambda a, b: words(halves(a) + halves(b)),
    "twice": lambda x: words(x.data.double()[..., None].expand(*x.data.shape, 2)),
    "largest_of_four": lambda *x: words(torch.stack([halves(y) for y in x]).amax(0)),
    "larger_half": lambda x: words(halves(x).amax(-1, keepdim=True).expand(*x.data.shape, 2)),
    "zero_if_hidden": lambda weight, score: Value(torch.where(score.data == -torch.inf, 0.0, weight.data)),
    "short_patterns": short_patterns, "offset_pairs": offset_pairs, "lower_if_above": lower_if_above,
    "round_patterns": round_patterns, "inline.words_of": words_of, "keep_visible_pair": keep_visible_pair,
    "codes_of_patterns": lambda first, second: codes_in_order(shifted(first, 7), shifted(second, 7)),
    "e4m3_of_short": lambda word: words_of_integers((integers(word) / 16).round()), "interleave_bytes": codes_in_order}


@contextmanager
def packed_instructions():
    """Inside, `gluon_on_cpu` knows them."""
    with patch.dict(gluon_on_cpu.INLINE, PLAIN):
        yield
