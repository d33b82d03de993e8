"""The emulator's instructions equal torch and `formats` over every code, and it reports what a workgroup must not do."""

import pytest
import torch

from lowbit_attn.cli.checks import instructions
from lowbit_attn.cli.checks.instructions import CONVERSIONS, ELEMENTS, NARROW, SCALES, SELECTS, conversion, findings, product
from lowbit_attn.formats import E2M3, E5M2
from lowbit_attn.kernels.cdna4.arguments import Launch, ProbeArgs, pointer
from lowbit_attn.kernels.cdna4.emulate import EmulationError

CPU = torch.device("cpu")
NAMES = [f.name for f in ELEMENTS]


@pytest.mark.parametrize("option", range(3), ids=["low bytes", "bytes 1 and 3", "bytes 2 and 1"])
@pytest.mark.parametrize("b", range(5), ids=NAMES)
@pytest.mark.parametrize("a", range(5), ids=NAMES)
def test_scaled_products_of_every_pair_of_formats(emulator, a, b, option):
    number = a + 8 * b + 64 * option
    found, expected = product(emulator, CPU, "mfma32", number, (ELEMENTS[a], ELEMENTS[b]), 32, SELECTS[option], seed=number)
    if E5M2 in (ELEMENTS[a], ELEMENTS[b]):   # sums that float64 does not hold exactly
        torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("option", range(2))
def test_the_narrow_form_contracts_128(emulator, option):
    a, b, select = NARROW[option]
    found, expected = product(emulator, CPU, "mfma16", option, (a, b), 16, select, seed=option)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("kernel", "fmt", "dtype"), CONVERSIONS)
def test_conversions_equal_formats(emulator, kernel, fmt, dtype, scale):
    _, codes, expected = conversion(emulator, CPU, kernel, fmt, dtype, scale)
    assert torch.equal(codes, expected)


def test_normalized_conversion_is_the_references(emulator):
    _, codes, expected = instructions.unorm16(emulator, CPU)
    assert torch.equal(codes, expected)


def test_lanes_trade_places(emulator):
    found, expected = instructions.lanes(emulator, CPU)
    assert torch.equal(found, expected)


def test_a_block_with_the_nan_scale_makes_its_row_nan(emulator):
    found, expected = product(emulator, CPU, "mfma32", 18, (E2M3, E2M3), 32, (0, 0), nan_row=9)
    assert torch.equal(found.isnan(), expected.isnan())
    assert bool(found[9].isnan().all())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_copies_land_side_by_side(emulator):
    found, expected = instructions.copies(emulator, CPU)
    assert torch.equal(found, expected)


def test_findings_cover_every_instruction_and_find_nothing_here(emulator):
    found = list(findings(emulator, CPU))
    assert len(found) == 41
    assert sum(x.question for x in found) == len(CONVERSIONS)
    assert not [x for x in found if x.wrong]
    assert all(x.total >= 256 for x in found)


def test_another_answer_is_found_and_shown(emulator):
    def off_by_one(launch):
        emulator(launch)
        if launch.kernel == "probe_fp6_from_bf16":
            launch.tensors[1][100] ^= 1

    wrong = [x for x in findings(off_by_one, CPU) if x.wrong]
    assert [x.name for x in wrong] == [f"v_cvt_scalef32 fp6_from_bf16, scale {s:g}" for s in SCALES]
    assert "got" in wrong[0].example


def fault(emulator, option, given=None):
    given = torch.zeros(1024, dtype=torch.int32) if given is None else given
    out = torch.zeros(128, 4, dtype=torch.int32)
    emulator(Launch("faults", "fault_lds", 1, 128, ProbeArgs(pointer(given), pointer(out), 1.0, option), (given, out)))
    return out


def test_copies_to_lds_are_read_after_wait_and_barrier(emulator):
    given = torch.arange(1024, dtype=torch.int32)
    assert torch.equal(fault(emulator, 0, given).view(2, -1), given[:256].expand(2, -1))


@pytest.mark.parametrize(("option", "message"), [
    (1, "copy of 16 bytes at 4096 from a buffer of 4096"), (2, "LDS access of 16 bytes at 4096, LDS has 4096"),
    (3, "is touched while wave 0's copy to it is in flight"), (4, "in flight|was written by wave 0|never written"),
    (5, "is read and was never written"), (6, "LDS access of 16 bytes at 4[0-9]+, LDS has 4096|never written"),
    (7, "is written over while other waves may read it"), (8, "deadlock"), (9, "in flight|was written by wave"), (10, "deadlock"),
    (11, "lanes of a wave meet at different instructions")])
def test_what_a_workgroup_must_not_do_is_reported(emulator, option, message):
    with pytest.raises(EmulationError, match=message):
        fault(emulator, option)
