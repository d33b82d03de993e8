"""Packed codes are the little-endian bit stream that an arbitrary-precision integer spells out, and unpack exactly."""

import pytest
import torch

from lowbit_attn.formats import pack4, pack6, unpack4, unpack6

WIDTHS = {4: (pack4, unpack4, 2), 6: (pack6, unpack6, 4)}
every_width = pytest.mark.parametrize("width", list(WIDTHS))


def stream_bytes(codes, width):
    """Code i at bits [i * width, (i + 1) * width) of one integer, written little-endian."""
    stream = sum(code << (i * width) for i, code in enumerate(codes))
    return list(stream.to_bytes(len(codes) * width // 8, "little"))


@every_width
@pytest.mark.parametrize("groups", [1, 2, 7, 32])
def test_packed_bytes_equal_the_integer_bit_stream(width, groups):
    pack, _, multiple = WIDTHS[width]
    codes = torch.randint(0, 1 << width, (5, groups * multiple), dtype=torch.uint8)
    assert pack(codes).tolist() == [stream_bytes(row, width) for row in codes.tolist()]


@every_width
def test_each_code_alone_lands_on_its_own_bits(width):
    pack, _, multiple = WIDTHS[width]
    codes = torch.eye(multiple, dtype=torch.uint8) * ((1 << width) - 1)
    assert pack(codes).tolist() == [stream_bytes(row, width) for row in codes.tolist()]


@every_width
def test_unpack_inverts_pack_for_every_code_in_every_position(width):
    pack, unpack, multiple = WIDTHS[width]
    codes = torch.stack([torch.arange(1 << width, dtype=torch.uint8).roll(shift) for shift in range(multiple)])
    assert torch.equal(unpack(pack(codes)), codes)
    assert pack(codes).dtype == unpack(pack(codes)).dtype == torch.uint8


@every_width
def test_pack_inverts_unpack_for_every_byte_string(width):
    pack, unpack, _ = WIDTHS[width]
    packed = torch.randint(0, 256, (11, 3 * 8), dtype=torch.uint8)
    assert torch.equal(pack(unpack(packed)), packed)


@every_width
def test_leading_axes_and_views_pack_like_contiguous_rows(width):
    pack, unpack, multiple = WIDTHS[width]
    base = torch.randint(0, 1 << width, (8 * multiple, 3, 10), dtype=torch.uint8)
    view = base.permute(2, 1, 0)[1::2]
    assert torch.equal(pack(view), pack(view.contiguous()))
    packed = pack(view)
    strided = torch.stack([packed, packed], 1)[:, 0]
    assert torch.equal(unpack(strided), view)
    assert pack(base[:0].permute(2, 1, 0)).shape == (10, 3, 0)


@every_width
def test_codes_that_are_not_uint8_are_refused(width):
    pack, unpack, _ = WIDTHS[width]
    with pytest.raises(TypeError, match=r"codes: got dtype torch\.int32; accepted: torch\.uint8"):
        pack(torch.zeros(12, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"packed: got dtype torch\.float32; accepted: torch\.uint8"):
        unpack(torch.zeros(12))


@pytest.mark.parametrize(("function", "length", "multiple"), [(pack4, 7, 2), (pack6, 6, 4), (pack6, 5, 4), (unpack6, 8, 3)])
def test_lengths_that_do_not_fill_whole_bytes_are_refused(function, length, multiple):
    with pytest.raises(ValueError, match=f"last axis is {length}; accepted: a multiple of {multiple}"):
        function(torch.zeros(2, length, dtype=torch.uint8))
