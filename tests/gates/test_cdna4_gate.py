"""The CDNA4 kernels compile for gfx950 to the instructions that they are about, without spills, and no more of them than recorded.

No GPU is needed: the ziglang wheel is the compiler. `recorded_cdna4.json` has the figures; kernels-log entries say why they moved.
`python tests/gates/test_cdna4_gate.py` writes them anew.
"""

import ctypes
import json
import os
import struct
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cdna4_assembly import Kernel, cost, parse

from lowbit_attn.kernels.cdna4 import build, toolchain
from lowbit_attn.kernels.cdna4.arguments import AttentionArgs, ProbeArgs, QuantizeArgs
from lowbit_attn.kernels.cdna4.emulate import Emulator
from lowbit_attn.kernels.cdna4.forward import forward
from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility
from lowbit_attn.reference import forward as reference_forward

RECORDED = Path(__file__).with_name("recorded_cdna4.json")
CONVENTIONAL = Path(__file__).with_name("conventional.hip.cpp")
RECIPES = ["mxfp8", "mxfp6", "mxfp4"]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
WIDE, NARROW = "v_mfma_scale_f32_32x32x64_f8f6f4", "v_mfma_scale_f32_16x16x128_f8f6f4"
E4M3, E2M3, E2M1 = 0, 2, 4
TILES = 2
"""Key tiles in the loop's body."""

LARGEST_PER_SCORE = {"mxfp8": 1.75, "mxfp6": 1.2, "mxfp4": 1.2}
LARGEST_SHARE = {"mxfp8": 0.40, "mxfp6": 0.36, "mxfp4": 0.36}
"""Of the conventional softmax's vector instructions. FP8 has no conversion of 32 elements: 32 instructions more in both."""

PRODUCTS = {   # of 2 tiles: 16 QK, 16 PV and the row sum, by cbsz and blgp
    "mxfp8": {(WIDE, (E4M3, E4M3)): 32, (WIDE, (E2M1, E4M3)): 4},
    "mxfp6": {(WIDE, (E2M3, E2M3)): 32, (NARROW, (E2M1, E2M3)): 4},
    "mxfp4": {(WIDE, (E2M1, E2M1)): 16, (WIDE, (E2M1, E2M3)): 16, (NARROW, (E2M1, E2M3)): 4},
}
CONVERSIONS = {"mxfp8": {"v_cvt_pknorm_u16_f32": 66, "v_cvt_scalef32_pk_fp8_bf16": 64},
               "mxfp6": {"v_cvt_pknorm_u16_f32": 66, "v_cvt_scalef32_pk32_fp6_bf16": 4},
               "mxfp4": {"v_cvt_pknorm_u16_f32": 66, "v_cvt_scalef32_pk32_fp6_bf16": 4}}
COPIES = {"mxfp8": 18, "mxfp6": 16, "mxfp4": 12}
"""Of K and V by their halves, 16 bytes a lane, and 4 for scales."""


def require_compiler():
    if not toolchain.available():
        message = "the compiler is missing: pip install ziglang==0.17.1"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    require_compiler()
    return compile_all(tmp_path_factory.mktemp("assembly"))


def compile_all(folder: Path) -> dict[str, Kernel]:
    units = {unit: (unit, None) for unit in toolchain.UNITS} | {"conventional": ("attention", CONVENTIONAL)}
    found: dict[str, Kernel] = {}
    for name, (unit, source) in units.items():
        found.update(parse(toolchain.assembly(unit, folder / f"{name}.s", source)))
    return found


def figures(kernels: dict[str, Kernel]) -> dict[str, dict[str, float]]:
    """What is recorded: registers and LDS of every kernel, and the loop of those that attend."""
    table = {}
    for name, kernel in sorted(kernels.items()):
        if name.startswith("probe"):
            continue
        row: dict[str, float] = {"vgpr": kernel.metadata["vgpr_count"], "lds": kernel.metadata["group_segment_fixed_size"]}
        if name.startswith(("attention", "conventional")):
            loop = cost(kernel, TILES)
            row.update(valu=loop.valu, per_score=round(loop.per_score, 4), valu_clocks=loop.valu_clocks,
                       matrix_clocks=loop.matrix_clocks)
        table[name] = row
    return table


@every_recipe
def test_the_loop_multiplies_in_the_recipes_formats_and_nothing_else(kernels, recipe):
    loop = kernels[f"attention_{recipe}"].steady
    assert Counter((x.opcode, x.formats()) for x in loop if x.kind == "mfma") == PRODUCTS[recipe]


@every_recipe
def test_no_product_outside_the_loop_is_of_another_kind(kernels, recipe):
    """Nothing in BF16, the bias seed included: it is the C operand."""
    opcodes = {(x.opcode, x.formats()) for x in kernels[f"attention_{recipe}"].instructions if x.kind == "mfma"}
    assert opcodes == set(PRODUCTS[recipe])


@every_recipe
def test_the_two_stages_are_packed_conversions_and_maxima_take_three(kernels, recipe):
    opcodes = Counter(x.opcode for x in kernels[f"attention_{recipe}"].steady)
    assert {name: opcodes[name] for name in CONVERSIONS[recipe]} == CONVERSIONS[recipe]
    assert opcodes["v_max3_f32"] == 32 * TILES
    assert not [name for name in opcodes if name.startswith(("v_exp", "v_mul", "v_fma", "v_add_f32", "v_pk_"))]


@every_recipe
def test_vector_instructions_per_score_are_bounded(kernels, recipe):
    fused, conventional = (cost(kernels[f"{kind}_{recipe}"], TILES) for kind in ("attention", "conventional"))
    assert fused.per_score <= LARGEST_PER_SCORE[recipe]
    assert fused.valu / conventional.valu <= LARGEST_SHARE[recipe]


@every_recipe
def test_vector_clocks_stay_below_matrix_clocks(kernels, recipe):
    fused, conventional = (cost(kernels[f"{kind}_{recipe}"], TILES) for kind in ("attention", "conventional"))
    gemms = 2048 if recipe == "mxfp8" else 1024   # the paper's T_GEMM, without the row sum
    assert conventional.matrix_clocks == gemms
    assert fused.valu_clocks < gemms < fused.matrix_clocks
    assert conventional.valu_clocks > gemms, "the paper's bottleneck is gone from its own baseline: is the loop counted?"


@every_recipe
def test_the_loop_copies_reads_and_waits_as_scheduled(kernels, recipe):
    loop = kernels[f"attention_{recipe}"].steady
    waits = [x for x in loop if x.opcode == "s_waitcnt" and "vmcnt" in x.operands]
    assert sum(x.kind == "memory" for x in loop) == COPIES[recipe]
    assert len(waits) == 2 * TILES, "a wait for copies that the schedule does not have ends the prefetch"
    assert sum(x.opcode == "s_barrier" for x in loop) == 2 * TILES
    loops_over_lanes = ("v_readfirstlane", "s_and_saveexec")
    assert not any(x.opcode.startswith(loops_over_lanes) for x in loop), "a buffer descriptor that is not uniform"


def test_nothing_spills_and_everything_fits(kernels):
    for name, kernel in kernels.items():
        assert not any(x.kind == "scratch" for x in kernel.instructions), name
        for kind in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert kernel.metadata[kind] == 0, (name, kind)
        assert kernel.metadata["group_segment_fixed_size"] <= 160 << 10, name


@every_recipe
def test_occupancy_is_one_workgroup_of_two_waves_a_simd(kernels, recipe):
    metadata = kernels[f"attention_{recipe}"].metadata
    registers = -(-metadata["vgpr_count"] // 8) * 8
    assert 512 // registers == 2   # 8 waves on 4 SIMDs: the ping-pong pair


def test_figures_are_those_recorded(kernels):
    recorded = json.loads(RECORDED.read_text())
    if recorded["compiler"] != installed_compiler():
        pytest.skip(f"recorded with {recorded['compiler']}, this is {installed_compiler()}; the other gates hold")
    assert figures(kernels) == recorded["kernels"], "python tests/gates/test_cdna4_gate.py records them; the kernel log says why"


def installed_compiler() -> str:
    from importlib.metadata import version

    return f"ziglang {version('ziglang')}"


def test_arguments_lie_as_the_kernels_read_them(kernels):
    for name, kernel in kernels.items():
        args = {"query": QuantizeArgs, "key": QuantizeArgs, "value": QuantizeArgs, "probe": ProbeArgs}.get(name.split("_")[0],
                                                                                                           AttentionArgs)
        assert kernel.metadata["kernarg_segment_size"] == ctypes.sizeof(args), name


def test_shipped_code_objects_are_those_of_the_sources(tmp_path):
    assert build.stale() is None, f"{build.stale()}: run `python -m lowbit_attn.kernels.cdna4.build`"
    require_compiler()
    if installed_compiler() == toolchain.COMPILER:
        assert build.build(tmp_path) == build.read_record()


@pytest.mark.parametrize("unit", toolchain.UNITS)
def test_shipped_code_objects_are_elf_for_gfx950_and_hold_every_kernel(unit, kernels):
    content = build.prebuilt(unit).read_bytes()
    machine, flags = struct.unpack_from("<H", content, 18)[0], struct.unpack_from("<I", content, 48)[0]
    assert content[:4] == b"\x7fELF"
    assert machine == 224   # EM_AMDGPU
    assert flags & 0xFF == 0x4F   # EF_AMDGPU_MACH_AMDGCN_GFX950
    prefixes = {"attention": ("attention",), "quantize": ("query", "key", "value"), "probes": ("probe",)}[unit]
    names = [name for name in kernels if name.startswith(prefixes)]
    assert len(names) >= 3
    assert all(f"{name}.kd".encode() in content for name in names)


def test_a_changed_source_makes_the_shipped_objects_stale(tmp_path, monkeypatch):
    for path in toolchain.SOURCES.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(toolchain, "SOURCES", tmp_path)
    assert build.stale() is None
    header = tmp_path / "softmax.h"
    header.write_bytes(header.read_bytes().replace(b"\n", b"\r\n"))
    assert build.stale() is None, "line ends are not a change"
    header.write_text(header.read_text().replace("0.05798", "0.05799"))
    assert build.stale() == "the sources changed after the code objects were made"


def test_the_text_is_hip_too_and_makes_the_same_loop(kernels, tmp_path):
    """hiprtc compiles the same text as HIP, where device functions, kernels and LDS are spelled otherwise."""
    found = {}
    for unit in toolchain.UNITS:
        found.update(parse(toolchain.hip_assembly(unit, tmp_path / f"{unit}.s")))
    assert figures(found) == {name: row for name, row in figures(kernels).items() if not name.startswith("conventional")}


@every_recipe
def test_the_conventional_kernel_computes_attention(recipe, tmp_path):
    """Its count is worth something only if it is a whole softmax."""
    require_compiler()
    emulator = Emulator(tmp_path, {"conventional": CONVENTIONAL})

    def run(launch):
        if launch.unit == "attention":
            launch = replace(launch, unit="conventional", kernel=f"conventional_{recipe}")
        emulator(launch)

    query, key, value = torch.randn(1, 70, 1, 128), torch.randn(1, 384, 1, 128), torch.randn(1, 384, 1, 128)
    name = f"fused_{recipe}"
    output, lse = forward(query, interleaved(key) if recipe != "mxfp8" else key, value, resolve(name), run)
    exact = replace(resolve(name), exponential="exact", maximum="online", max_threshold=0.0, row_sum="exact")
    visibility = Visibility.create(1, 70, 384, is_causal=False)
    want = reference_forward(*(x.transpose(1, 2) for x in (query, key, value)), exact, visibility)
    # The row sum of unrounded P, and one P in ten thousand at another code.
    assert float((output.transpose(1, 2) - want.output).norm() / want.output.norm()) < 2e-3
    torch.testing.assert_close(lse, want.lse, rtol=0, atol=1e-4)


def interleaved(key):
    """Position 32 n + 16 t + i takes key 32 n + 2 i + t."""
    return key.unflatten(1, (-1, 16, 2)).transpose(2, 3).flatten(1, 3)


class TestCounting:
    SOURCE = """
    #include "isa.h"
    struct Args { LB_GLOBAL float* x; int n; };
    LB_KERNEL(counted, 1, 1, Args) {
      float a = args.x[isa::lane()];
      v16f s = {};
      v8i code = {};
      for (int i = 0; i < args.n; i++) {
        asm volatile("v_exp_f32 %0, %0\\n\\tv_exp_f32 %0, %0\\n\\tv_mul_f32 %0, %0, %0" : "+v"(a));
        s = isa::mfma32<E2M1, E2M3, 0, 0>(code, code, s, 127, 127);
        if (__builtin_expect(a > 3.0f, 0)) {
          isa::cold();
          asm volatile("v_exp_f32 %0, %0" : "+v"(a));
        }
      }
      args.x[isa::lane()] = a + s[0];
    }
    """

    def test_of_a_loop_without_its_cold_block(self, tmp_path):
        require_compiler()
        source = tmp_path / "counted.cpp"
        source.write_text(self.SOURCE)
        kernel = parse(toolchain.assembly("attention", tmp_path / "counted.s", source))["counted"]
        loop = cost(kernel, tiles=1)
        assert loop.transcendental == 2
        assert loop.matrix_clocks == 64
        assert sum(x.opcode.startswith("v_exp") for x in kernel.instructions) == 3
        assert loop.valu_clocks == 8 * (loop.valu + 2)


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as scratch:
        table = {"compiler": installed_compiler(), "kernels": figures(compile_all(Path(scratch)))}
    RECORDED.write_text(json.dumps(table, indent=1) + "\n")
    json.dump(table, sys.stdout, indent=1)
