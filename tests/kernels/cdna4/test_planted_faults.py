"""Faults planted in the kernels' text are seen: as another result than the reference's, or as what a workgroup must not do."""

import shutil

import pytest

from lowbit_attn.cli.checks.cases import climbing, expected, late_peak, normal, ordinary_allowance, relative
from lowbit_attn.kernels.cdna4 import toolchain
from lowbit_attn.kernels.cdna4.emulate import EmulationError, Emulator
from lowbit_attn.kernels.cdna4.forward import forward
from lowbit_attn.recipes import resolve

LDS = "LDS word|deadlock"
FAULTS = {   # name: file, text, replacement, the emulator's message (None: a wrong result)
    "the gate never fires": ("softmax.h", "> CAP), 0)", "> 1e30f), 0)", None),
    "the row sum is not rescaled": ("attention.h", "sum *= isa::from_lane(factor, sum_row());", "{}", None),
    "the row sum is rescaled by its own lane": ("attention.h", "isa::from_lane(factor, sum_row())", "factor", None),
    "the output is not rescaled": ("attention.h", "o[i] *= factor;", "o[i] *= 1.0f;", None),
    "beta is not rebuilt": ("softmax.h", "seed[i] = __builtin_fminf(seed[i], beta);", "seed[i] = seed[i] + 0.0f * beta;", None),
    "a rollback looks at one lane of a row": ("softmax.h", "    peak = over_halves(peak);\n", "", None),
    "K's scale comes from the other step": ("attention.h", "(2 * T + 1) % 4, 1>", "2 * T % 4, 1>", None),
    "V's scale comes from the other part": ("attention.h", "R::block_scales ? D + 1 : 0", "R::block_scales ? D : 0", None),
    "a scale of P rounds down": ("softmax.h", "CARRY = 15", "CARRY = 0", None),
    "the second scale of P is the first": ("attention.h", "BYTE = F / 2 ? 3 : 1", "BYTE = 1", None),
    "the tail is not masked": ("attention.h", "w.mask(keys - TILE * j);", "{}", None),
    "the early half does not wait for K": ("attention.h", "if (!is_late()) isa::wait_copies();", "", LDS),
    "the late half does not wait for V": ("attention.h", "if (is_late()) isa::wait_copies();", "", LDS),
    "K is copied a phase early": ("attention.h", "      w.probabilities(record", "      if (!is_late()) copy_keys(j + 2, SLOT);\n"
                                  "      w.probabilities(record", LDS),
    "V is copied into the slot in use": ("attention.h", "copy_values(j + 1, 1 - SLOT)", "copy_values(j + 1, SLOT)", LDS),
    "the late half is not late": ("attention.h", "    if (is_late()) isa::barrier();\n    else", "    if (!is_late())", LDS),
    "one half has a barrier less": ("attention.h", "    if (!is_late()) isa::barrier();\n    //", "    //", "deadlock"),
    "a scale is copied past the slot": ("attention.h", "to + CODES<E> + wave * 4 * WAVE", "to + 99999 + wave * 4 * WAVE",
                                        "LDS access of 4 bytes at"),
    "keys are not permuted": ("layout.h", "8 * (key % 16 / 4) + 4 * half + key % 4}", "16 * half + key % 16}", None),
    "the rotation forgets a step": ("quantize.hip.cpp", "step < 4; step *= 2", "step < 2; step *= 2", None),
    "Q's exponents keep their nine": ("quantize.hip.cpp", "code < 9 ? 0 : code - 9", "code", None),
}
FEW = ["the gate never fires", "the early half does not wait for K", "the tail is not masked"]


def mutated(folder, name):
    file, text, replacement, _ = FAULTS[name]
    for path in toolchain.SOURCES.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    content = (folder / file).read_text()
    assert content.count(text) >= 1, f"{file} no longer has the text of {name!r}"
    (folder / file).write_text(content.replace(text, replacement))
    return {unit: folder / f"{unit}.hip.cpp" for unit in toolchain.UNITS}


def largest_error(run):
    """Over ordinary scores with a tail, rows that all roll back, and rows of which a third does, with tiles after the peak."""
    name, errors = "fused_mxfp6", []
    for inputs in (normal(40, 140), climbing(256, 500), late_peak(64, 300)):
        error = relative(forward(*inputs, resolve(name), run)[0], expected(*inputs, name)[0])
        errors.append(error)
    return max(errors)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in FAULTS])
def test_a_planted_fault_is_seen(name, tmp_path, compiled, build_folder):
    run = Emulator(tmp_path, mutated(tmp_path, name))
    if FAULTS[name][0] in ("attention.h", "softmax.h"):   # the quantizers are as they were
        compiled.library("quantize")
        shutil.copy(build_folder / "quantize.so", tmp_path)
    message = FAULTS[name][3]
    if message is not None:
        with pytest.raises(EmulationError, match=message):
            largest_error(run)
    else:
        assert largest_error(run) > 4 * ordinary_allowance("fused_mxfp6")


def test_without_a_fault_the_same_run_is_right(emulator):
    assert largest_error(emulator) <= ordinary_allowance("fused_mxfp6")
