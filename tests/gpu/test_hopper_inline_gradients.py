"""Inline PTX of the one-pass backward equals its plain meaning, which torch computes on the CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton runs on Linux only")

from test_hopper_inline import apply, some_floats
from triton.experimental import gluon

from lowbit_attn.kernels.hopper import inline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                                  reason="needs a Hopper GPU")]


@gluon.jit
def first_columns(upper, lower):
    words, _ = inline.transposed_bytes(upper, lower)
    return words


@gluon.jit
def last_columns(upper, lower):
    _, words = inline.transposed_bytes(upper, lower)
    return words


@gluon.jit
def lower_sixteen(word):
    half, _ = inline.halves(word)
    return half


@gluon.jit
def upper_sixteen(word):
    _, half = inline.halves(word)
    return half


def bits(seed):
    return torch.randint(-2**31, 2**31, (2**12,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def by_byte(words):
    return words.contiguous().view(torch.uint8).view(-1, 4)


def test_two_rows_of_codes_turn_into_pairs_of_each_column():
    upper, lower = bits(0), bits(1)
    pairs = torch.stack([by_byte(upper), by_byte(lower)], -1)  # word, column, row
    assert torch.equal(by_byte(apply(first_columns, upper, lower)), pairs[:, :2].flatten(1))
    assert torch.equal(by_byte(apply(last_columns, upper, lower)), pairs[:, 2:].flatten(1))


def test_halves_are_the_sixteen_bits_of_a_word():
    word = bits(0)
    pairs = word.view(torch.int16).view(-1, 2)
    assert torch.equal(apply(lower_sixteen, word, dtype=torch.int16), pairs[:, 0])
    assert torch.equal(apply(upper_sixteen, word, dtype=torch.int16), pairs[:, 1])


def test_middle_bytes_change_places():
    word = bits(0)
    assert torch.equal(by_byte(apply(inline.swap_middle_bytes, word)), by_byte(word)[:, [0, 2, 1, 3]])


def test_zero_probabilities_zero_whatever_stands_beside_them():
    x, p = some_floats(0), some_floats(1)
    p[::3] = 0.0
    torch.testing.assert_close(apply(inline.zero_with, x, p, dtype=torch.float32), torch.where(p == 0, 0.0, x), rtol=0, atol=0,
                               equal_nan=True)
