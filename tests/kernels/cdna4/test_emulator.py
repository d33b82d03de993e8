"""The emulator's instructions equal torch and `formats` over every code, and it reports what a workgroup must not do."""

import ctypes

import pytest
import torch

from lowbit_attn import formats
from lowbit_attn.formats import E2M1, E2M3, E4M3, E5M2, ElementFormat
from lowbit_attn.kernels.cdna4.arguments import Launch, pointer
from lowbit_attn.kernels.cdna4.emulate import EmulationError

E3M2 = ElementFormat("e3m2", 3, 2, 3, 28.0)
ELEMENTS = [E4M3, E5M2, E2M3, E3M2, E2M1]
"""In the order of cbsz and blgp."""


class ProbeArgs(ctypes.Structure):
    _fields_ = [("input", ctypes.c_void_p), ("out", ctypes.c_void_p), ("more", ctypes.c_void_p), ("count", ctypes.c_int),
                ("option", ctypes.c_int)]


def probe(emulator, kernel, given, out, more=None, option=0, groups=1, waves=1):
    args = ProbeArgs(pointer(given), pointer(out), pointer(more), 0, option)
    emulator(Launch("probes", f"probe_{kernel}", groups, 64 * waves, args, (given, out)))
    return out


def operand_words(matrix_codes, bits, rows):
    """[rows, K] codes -> [64, 8] words of the lanes, by the layout that notes and paper give, written out again here."""
    depth = matrix_codes.shape[1]
    lanes = torch.zeros(64, 32, dtype=torch.int64)
    for lane in range(64):
        part = lane // rows
        for j in range(32):
            k = 32 * (j // 16) + 16 * part + j % 16 if bits == 8 and rows == 32 else 32 * part + j
            assert k < depth
            lanes[lane, j] = matrix_codes[lane % rows, k]
    stream = (lanes[..., None] >> torch.arange(bits)) & 1
    stream = torch.nn.functional.pad(stream.reshape(64, 32 * bits), (0, 256 - 32 * bits)).reshape(64, 8, 32)
    return (stream << torch.arange(32)).sum(-1)


def scale_words(exponents, rows, byte):
    """[rows, blocks] exponents -> [64] words with the code in one byte and other codes in the rest."""
    words = torch.zeros(64, dtype=torch.int64)
    for lane in range(64):
        code = int(exponents[lane % rows, lane // rows]) + 127
        words[lane] = sum((code if i == byte else 13 * (i + 1)) << 8 * i for i in range(4))
    return words


def multiply(emulator, kernel, option, a, b, rows, select, generator):
    """A random product by an MFMA and in float64: D, expected."""
    depth = 2048 // rows
    codes = [torch.randint(0, 2**x.bits, (rows, depth), generator=generator, dtype=torch.int64) for x in (a, b)]
    for code, fmt in zip(codes, (a, b), strict=True):   # no NaN and no Inf
        code[~decoded(code, fmt).isfinite()] = 1
    exponents = [torch.randint(-9, 5, (rows, depth // 32), generator=generator) for _ in range(2)]
    c = torch.randn(rows, rows, generator=generator)
    given = torch.zeros(64, 48, dtype=torch.int64)
    for i, (code, fmt, exponent) in enumerate(zip(codes, (a, b), exponents, strict=True)):
        given[:, 8 * i:8 * i + 8] = operand_words(code, fmt.bits, rows)
        given[:, 32 + i] = scale_words(exponent, rows, select[i])
    lane, r = torch.arange(64)[:, None], torch.arange(rows * rows // 64)
    row = 8 * (r // 4) + 4 * (lane // 32) + r % 4 if rows == 32 else 4 * (lane // 16) + r
    given[:, 16:16 + len(r)] = c[row, lane % rows].view(torch.int32).long()
    words = (given & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    out = probe(emulator, kernel, words, torch.zeros(64, 16), option=option)
    found = torch.empty(rows, rows)
    found[row, lane % rows] = out[:, :len(r)]
    values = [decoded(x, f).double() * 2.0 ** e.repeat_interleave(32, 1) for x, f, e in zip(codes, (a, b), exponents, strict=True)]
    return found, c, values


def decoded(codes, fmt):
    if fmt is not E3M2:
        return formats.decode(codes.to(torch.uint8), fmt)
    exponent, mantissa = codes >> 2 & 7, codes & 3
    magnitude = torch.where(exponent > 0, (1 + mantissa / 4) * 2.0 ** (exponent - 3), mantissa / 4 * 2.0**-2)
    return torch.where(codes >> 5 == 1, -magnitude, magnitude).float()


@pytest.mark.parametrize("select", [(0, 0, 0), (1, 1, 3), (2, 2, 1)], ids=["low bytes", "bytes 1 and 3", "bytes 2 and 1"])
@pytest.mark.parametrize("b", range(5), ids=[f.name for f in ELEMENTS])
@pytest.mark.parametrize("a", range(5), ids=[f.name for f in ELEMENTS])
def test_scaled_products_of_every_pair_of_formats(emulator, a, b, select):
    option, *bytes_of = select
    generator = torch.Generator().manual_seed(10 * a + b)
    found, c, (x, y) = multiply(emulator, "mfma32", a + 8 * b + 64 * option, ELEMENTS[a], ELEMENTS[b], 32, bytes_of, generator)
    blocks = [x[:, k:k + 32] @ y[:, k:k + 32].T for k in (0, 32)]
    expected = (c + blocks[0].float()) + blocks[1].float()
    # Sums of 32 products of these formats are exact in float64 but for E5M2's range; what is left is one rounding a block.
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize(("option", "a", "b", "select"), [(0, E2M1, E2M3, (0, 1)), (1, E2M3, E2M1, (2, 3))])
def test_the_narrow_form_contracts_128(emulator, option, a, b, select):
    generator = torch.Generator().manual_seed(option)
    found, c, (x, y) = multiply(emulator, "mfma16", option, a, b, 16, select, generator)
    expected = c
    for k in range(0, 128, 32):
        expected = expected + (x[:, k:k + 32] @ y[:, k:k + 32].T).float()
    assert torch.equal(found, expected)


def conversion_inputs(dtype):
    """Every BF16 pattern, or every code's value of every format, the middles between them, and their neighbours."""
    if dtype == torch.bfloat16:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.cat([decoded(torch.arange(2**f.bits), f) for f in ELEMENTS])
    values = values[values.isfinite()].unique()
    values = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30, torch.inf, -torch.inf,
                                                                            torch.nan, 2.0**-149])])
    values = torch.cat([values, values.nextafter(torch.tensor(torch.inf)), values.nextafter(torch.tensor(-torch.inf))])
    return torch.nn.functional.pad(values, (0, -len(values) % 2048))


@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**20, 1.75], ids=["1", "2^-7", "2^20", "a mantissa, ignored"])
@pytest.mark.parametrize(("kernel", "fmt", "dtype"), [
    ("fp6_from_f32", E2M3, torch.float32), ("fp6_from_bf16", E2M3, torch.bfloat16), ("fp8_from_f32", E4M3, torch.float32),
    ("fp8_from_bf16", E4M3, torch.bfloat16), ("fp4_from_f32", E2M1, torch.float32)])
def test_conversions_equal_formats(emulator, kernel, fmt, dtype, scale):
    x = conversion_inputs(dtype)
    x = (x.double() * 2.0 ** torch.tensor(scale).log2().floor()).to(dtype) if dtype == torch.float32 else x
    out = torch.zeros(len(x) * fmt.bits // 8, dtype=torch.uint8)
    probe(emulator, kernel, x, out, torch.tensor([scale]), groups=len(x) // 2048)
    unpack = {8: lambda packed: packed, 6: formats.unpack6, 4: formats.unpack4}[fmt.bits]
    power = 2.0 ** torch.tensor(scale).log2().floor()
    assert torch.equal(unpack(out), formats.encode(x.float() / power, fmt))


def test_normalized_conversion_is_the_references(emulator):
    x = torch.tensor([0.0, 1.0, -0.1, 1.5, torch.inf, -torch.inf])
    x = torch.cat([torch.rand(1 << 16), torch.rand(1 << 16) / 4 + 0.125, x])
    x = torch.nn.functional.pad(x, (0, -len(x) % 128))
    out = probe(emulator, "unorm16", x, torch.zeros(len(x), dtype=torch.int16), groups=len(x) // 128)
    expected = torch.round(x.clamp(0, 1) * 65535.0).int()
    assert torch.equal(out.int() & 0xFFFF, expected)
    assert int(probe(emulator, "unorm16", torch.full((128,), torch.nan), torch.ones(128, dtype=torch.int16)).sum()) == 0


def test_lanes_trade_places(emulator):
    out = probe(emulator, "lanes", torch.zeros(1), torch.zeros(128, 4, dtype=torch.int32), waves=2)
    t = torch.arange(128)
    lane = t % 64
    assert torch.equal(out[:, 0].long(), torch.where(lane < 32, 100 + t, 200 + t - 32))
    assert torch.equal(out[:, 1].long(), torch.where(lane < 32, 100 + t + 32, 200 + t))
    assert torch.equal(out[:, 2].long(), t // 64 * 64 + (lane * 5 + 3) % 64)
    assert torch.equal(out[:, 3].long(), t // 64)


def test_copies_to_lds_are_read_after_wait_and_barrier(emulator):
    given = torch.arange(1024, dtype=torch.int32)
    out = probe(emulator, "lds", given, torch.zeros(128, 4, dtype=torch.int32), waves=2)
    assert torch.equal(out.view(2, -1), given[:256].expand(2, -1))


@pytest.mark.parametrize(("option", "message"), [
    (1, "copy of 16 bytes at 4096 from a buffer of 4096"), (2, "LDS access of 16 bytes at 4096, LDS has 4096"),
    (3, "is touched while wave 0's copy to it is in flight"), (4, "in flight|was written by wave 0|never written"),
    (5, "is read and was never written"), (6, "LDS access of 16 bytes at 4[0-9]+, LDS has 4096|never written"),
    (7, "is written over while other waves may read it"), (8, "deadlock"), (9, "in flight|was written by wave"), (10, "deadlock"),
    (11, "lanes of a wave meet at different instructions")])
def test_what_a_workgroup_must_not_do_is_reported(emulator, option, message):
    with pytest.raises(EmulationError, match=message):
        probe(emulator, "lds", torch.zeros(1024, dtype=torch.int32), torch.zeros(128, 4, dtype=torch.int32), option=option, waves=2)
