"""Does the device understand each instruction as the CDNA4 kernels do (`kernels/cdna4/semantics.h`)?

Every probe runs one kernel of `probes.hip.cpp` and compares with `formats` and torch, which know nothing of the emulator.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.formats import E2M1, E2M3, E4M3, E5M2, ElementFormat
from lowbit_attn.kernels.cdna4.arguments import Launch, ProbeArgs, pointer

Run = Callable[[Launch], None]

E3M2 = ElementFormat("e3m2", 3, 2, 3, 28.0)
ELEMENTS = (E4M3, E5M2, E2M3, E3M2, E2M1)
"""In the order of cbsz and blgp."""
USED = ((E4M3, E4M3), (E2M3, E2M3), (E2M1, E2M1), (E2M1, E2M3), (E2M1, E4M3))
"""Format pairs of the kernels' own products."""
SELECTS = ((0, 0), (1, 3), (2, 1))
"""Which bytes of the scale registers the options of probe_mfma32 take."""
NARROW = ((E2M1, E2M3, (0, 1)), (E2M3, E2M1, (2, 3)))
CONVERSIONS = (("fp6_from_bf16", E2M3, torch.bfloat16), ("fp8_from_bf16", E4M3, torch.bfloat16),
               ("fp6_from_f32", E2M3, torch.float32), ("fp8_from_f32", E4M3, torch.float32), ("fp4_from_f32", E2M1, torch.float32))
SCALES = (1.0, 2.0**-7, 2.0**20, 1.75)
"""Scales of conversions; the last one's mantissa is to be ignored."""


@dataclass(frozen=True)
class Finding:
    """`wrong` of `total` answers differ; `example` is one that does. No kernel depends on the answer to a `question`."""

    name: str
    wrong: int
    total: int
    example: str = ""
    question: bool = False


def probe(run: Run, kernel: str, given: Tensor, output: Tensor, *, scale: float = 1.0, option: int = 0, groups: int = 1,
          waves: int = 1) -> Tensor:
    """Launch probe_<kernel>; returns `output`."""
    args = ProbeArgs(pointer(given), pointer(output), scale, option)
    run(Launch("probes", f"probe_{kernel}", groups, 64 * waves, args, (given, output)))
    return output


def element_values(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Values of codes; E3M2, which no recipe uses, is not among `formats`."""
    if fmt is not E3M2:
        return formats.decode(codes.to(torch.uint8), fmt)
    exponent, mantissa = codes.long() >> 2 & 7, codes.long() & 3
    magnitude = torch.where(exponent > 0, (1 + mantissa / 4) * 2.0 ** (exponent - 3), mantissa / 16)
    return torch.where(codes.long() >> 5 == 1, -magnitude, magnitude).float()


def _operand_words(codes: Tensor, bits: int, rows: int) -> Tensor:
    """[rows, K] codes -> [64, 8] words of the lanes: element j of a lane is row lane % rows, k as the format's width has it."""
    lane, j = torch.arange(64)[:, None], torch.arange(32)
    part = lane // rows
    k = 32 * (j // 16) + 16 * part + j % 16 if bits == 8 and rows == 32 else 32 * part + j
    stream = (codes[lane % rows, k][..., None] >> torch.arange(bits)) & 1
    stream = torch.nn.functional.pad(stream.reshape(64, 32 * bits), (0, 256 - 32 * bits)).reshape(64, 8, 32)
    return (stream << torch.arange(32)).sum(-1)


def _scale_words(exponents: Tensor, rows: int, byte: int) -> Tensor:
    """[rows, blocks] exponents -> [64] words: lane row + rows * block has the code in one byte, other codes in the rest."""
    lane = torch.arange(64)
    codes = exponents[lane % rows, lane // rows] + 127
    return sum((codes if i == byte else torch.full_like(codes, 13 * (i + 1))) << 8 * i for i in range(4))  # type: ignore[return-value]


def product(run: Run, device: torch.device, kernel: str, option: int, pair: tuple[ElementFormat, ElementFormat], rows: int,
            select: tuple[int, int], seed: int = 0, nan_row: int | None = None) -> tuple[Tensor, Tensor]:
    """A random scaled product by one MFMA, [rows, rows], and what it should be: block by block in float32 on exact block sums.

    `nan_row` gives a row of the first operand the NaN scale, 255, in its first block.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = 2048 // rows
    given = torch.zeros(64, 48, dtype=torch.int64)
    values = []
    for i, fmt in enumerate(pair):
        codes = torch.randint(0, 2**fmt.bits, (rows, depth), generator=generator)
        codes[~element_values(codes, fmt).isfinite()] = 1
        exponents = torch.randint(-9, 5, (rows, depth // 32), generator=generator)
        given[:, 8 * i:8 * i + 8] = _operand_words(codes, fmt.bits, rows)
        if nan_row is not None and i == 0:
            exponents[nan_row, 0] = 128   # code 255
        given[:, 32 + i] = _scale_words(exponents, rows, select[i])
        values.append(element_values(codes, fmt).double() * 2.0 ** exponents.repeat_interleave(32, 1))
    c = torch.randn(rows, rows, generator=generator)
    lane, r = torch.arange(64)[:, None], torch.arange(rows * rows // 64)
    row = 8 * (r // 4) + 4 * (lane // 32) + r % 4 if rows == 32 else 4 * (lane // 16) + r
    given[:, 16:16 + len(r)] = c[row, lane % rows].view(torch.int32).long()
    words = (given & 0xFFFFFFFF).to(torch.uint32).view(torch.int32).to(device)
    output = probe(run, kernel, words, torch.zeros(64, 16, device=device), option=option).cpu()
    found = torch.empty(rows, rows)
    found[row, lane % rows] = output[:, :len(r)]
    expected = c
    for k in range(0, depth, 32):
        expected = expected + (values[0][:, k:k + 32] @ values[1][:, k:k + 32].T).float()
    if nan_row is not None:
        expected[nan_row] = torch.nan
    return found, expected


def conversion_inputs(dtype: torch.dtype) -> Tensor:
    """Every BF16 pattern; or every format's values, the middles between them and their neighbours; a multiple of 2048 numbers."""
    if dtype == torch.bfloat16:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.cat([element_values(torch.arange(2**f.bits), f) for f in ELEMENTS])
    values = values[values.isfinite()].unique()
    ends = torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30, torch.inf, -torch.inf, torch.nan, 2.0**-149])
    values = torch.cat([values, (values[1:] + values[:-1]) / 2, ends])
    infinity = torch.tensor(torch.inf)
    values = torch.cat([values, values.nextafter(infinity), values.nextafter(-infinity)])
    return torch.nn.functional.pad(values, (0, -len(values) % 2048))


def conversion(run: Run, device: torch.device, kernel: str, fmt: ElementFormat, dtype: torch.dtype,
               scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, the device's codes and those of `formats`."""
    power = 2.0 ** torch.tensor(scale).log2().floor()
    x = conversion_inputs(dtype)
    x = (x * power).to(dtype) if dtype == torch.float32 else x
    output = torch.zeros(len(x) * fmt.bits // 8, dtype=torch.uint8, device=device)
    probe(run, kernel, x.to(device), output, scale=scale, groups=len(x) // 2048)
    unpack = {8: lambda packed: packed, 6: formats.unpack6, 4: formats.unpack4}[fmt.bits]
    return x, unpack(output.cpu()), formats.encode(x.float() / power, fmt)


def unorm16(run: Run, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, the device's 16-bit codes, and the reference's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(1 << 16, generator=generator), torch.rand(1 << 16, generator=generator) / 4 + 0.125,
                   torch.tensor([0.0, 1.0, -0.1, 1.5, torch.inf, -torch.inf, torch.nan])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 128))
    output = probe(run, "unorm16", x.to(device), torch.zeros(len(x), dtype=torch.int16, device=device), groups=len(x) // 128)
    return x, output.cpu().int() & 0xFFFF, torch.round(x.nan_to_num(0.0, 1.0, 0.0).clamp(0, 1) * 65535.0).int()


def lanes(run: Run, device: torch.device) -> tuple[Tensor, Tensor]:
    """Swapped halves, a permutation and a vote, over two waves: what came and what should, [128, 4]."""
    output = probe(run, "lanes", torch.zeros(1, device=device), torch.zeros(128, 4, dtype=torch.int32, device=device), waves=2)
    t = torch.arange(128)
    lane = t % 64
    expected = [torch.where(lane < 32, 100 + t, 168 + t), torch.where(lane < 32, 132 + t, 200 + t), t - lane + (lane * 5 + 3) % 64,
                t // 64]
    return output.cpu().long(), torch.stack(expected, 1)


def copies(run: Run, device: torch.device) -> tuple[Tensor, Tensor]:
    """320 words copied to LDS, each lane's from another lane's place: what came back and what should."""
    given = torch.arange(1000, 1320, dtype=torch.int32)
    output = probe(run, "copy", given.to(device), torch.zeros(320, dtype=torch.int32, device=device))
    other = (torch.arange(64) * 7 + 5) % 64
    return output.cpu(), torch.cat([given[:256].view(64, 4)[other].flatten(), given[256:][other]])


def findings(run: Run, device: torch.device) -> Iterator[Finding]:
    """Every instruction that the kernels use."""
    for a, b in USED:
        for option, select in enumerate(SELECTS):
            number = ELEMENTS.index(a) + 8 * ELEMENTS.index(b) + 64 * option
            found, expected = product(run, device, "mfma32", number, (a, b), 32, select, seed=number)
            # The order of additions inside an MFMA is open: a few units of the last place.
            yield _compare(f"v_mfma_scale_f32_32x32x64_f8f6f4 {a.name} x {b.name}, scale bytes {select[0]} and {select[1]}", None,
                           found, expected, (found - expected).abs() > 1e-5 * expected.abs().amax())
    for option, (a, b, select) in enumerate(NARROW):
        found, expected = product(run, device, "mfma16", option, (a, b), 16, select)
        yield _compare(f"v_mfma_scale_f32_16x16x128_f8f6f4 {a.name} x {b.name}", None, found, expected,
                       (found - expected).abs() > 1e-5 * expected.abs().amax())
    found, expected = product(run, device, "mfma32", 18, (E2M3, E2M3), 32, (0, 0), nan_row=9)
    yield _compare("the E8M0 scale 255 is NaN", None, found, expected, found.isnan() != expected.isnan())
    for kernel, fmt, dtype in CONVERSIONS:
        for scale in SCALES:
            x, codes, wanted = conversion(run, device, kernel, fmt, dtype, scale)
            # Kernels give scales without a mantissa; one that is ignored would save them two instructions.
            yield _compare(f"v_cvt_scalef32 {kernel}, scale {scale:g}", x, codes, wanted, (codes != wanted) & x.isfinite(),
                           question=scale == SCALES[-1])
    x, codes, wanted = unorm16(run, device)
    yield _compare("v_cvt_pknorm_u16_f32", x, codes, wanted, codes != wanted)
    found, expected = copies(run, device)
    yield _compare("buffer_load ... lds, 16 and 4 bytes a lane", None, found, expected, found != expected)
    found, expected = lanes(run, device)
    yield _compare("v_permlane32_swap, ds_bpermute, ballot", None, found, expected, found != expected)


def _compare(name: str, given: Tensor | None, found: Tensor, expected: Tensor, wrong: Tensor,
             question: bool = False) -> Finding:
    count = int(wrong.sum())
    if count == 0:
        return Finding(name, 0, wrong.numel(), question=question)
    first = tuple(wrong.nonzero()[0].tolist())
    of = "" if given is None else f" of {float(given[first]):.9g}"
    return Finding(name, count, wrong.numel(), f"at {list(first)}{of}: got {found[first].item():.9g}, read as "
                                               f"{expected[first].item():.9g}", question)
