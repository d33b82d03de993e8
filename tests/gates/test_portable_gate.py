"""The portable kernels compile for every architecture with the matrix instructions that their mode promises, inside its shared
memory, without more spills than recorded; on the Triton of this environment and on 3.6, the oldest supported.

`python tests/gates/portable.py --record` writes the spills anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton runs on Linux only")

import portable  # noqa: E402
from portable import Compiled, problems, promised, read  # noqa: E402

from lowbit_attn.kernels.portable.targets import TARGETS  # noqa: E402

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".venv-triton36"


@pytest.mark.parametrize("everything", [pytest.param([], id="few"),
                                        pytest.param(["--everything"], id="all", marks=pytest.mark.full)])
@pytest.mark.parametrize("version", [portable.VERSION, "3.6"], ids=["this Triton", "Triton 3.6"])
def test_every_pair_of_kernel_and_architecture_compiles_as_promised(version, everything, tmp_path):
    python = Path(sys.executable)
    if version != portable.VERSION:
        python = OLDEST / "bin" / "python"
        if not (OLDEST / "ready").exists():
            message = f"{OLDEST.name} is missing: `make {OLDEST.name}/ready` makes it"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    report = tmp_path / "report.json"
    run = subprocess.run([python, portable.__file__, "--json", report, *everything], capture_output=True, text=True, check=False)
    assert report.is_file(), run.stderr
    found = json.loads(report.read_text())
    assert found["triton"].startswith(f"{version}.")
    assert not found["problems"], "\n".join(found["problems"])
    kernels = {(pair["name"].partition("-")[0], pair["architecture"]) for pair in found["pairs"]}
    wanted = set(TARGETS if everything else portable.ARCHITECTURES)
    assert {architecture for _, architecture in kernels} == wanted
    assert len(kernels) == len({kernel for kernel, _ in kernels}) * len(wanted)


@pytest.mark.parametrize(("architecture", "recipe", "instructions"), [
    ("sm_80", "mxfp8", {"mma bf16"}), ("sm_90", "nvfp4_fp8", {"wgmma bf16"}), ("sm_100", "mxfp8", {"mxf8"}),
    ("sm_103", "nvfp4_fp8", {"nvf4", "mxf8"}), ("sm_100", "mxattention", {"mxf4"}), ("gfx942", "mxfp8", {"mfma bf16"}),
    ("gfx950", "mxfp8", {"mfma scaled"}), ("gfx950", "nvfp4_fp8", {"mfma bf16"}), ("sm_100", "fused_mxfp6", {"tcgen05 bf16"}),
    ("sm_103", "fused_mxfp4", {"tcgen05 bf16"}), ("gfx950", "fused_mxfp4", {"mfma bf16"})])
def test_what_each_mode_promises(architecture, recipe, instructions):
    assert promised(architecture, recipe) == instructions


@pytest.mark.parametrize(("architecture", "recipe", "head_dim", "instructions", "native"), [
    ("sm_100", "mxfp8", 128, {"mxf8"}, True), ("sm_103", "mxfp8", 64, {"mxf8"}, True),
    ("gfx950", "mxfp8", 96, {"mfma scaled"}, True), ("sm_100", "mxfp8", 256, {"tcgen05 bf16"}, False),
    ("gfx950", "nvfp4_fp8", 128, {"mfma bf16"}, False),
    ("sm_100", "nvfp4_fp8", 128, {"tcgen05 bf16"}, False), ("sm_90", "mxfp8", 128, {"wgmma bf16"}, False)])
@pytest.mark.parametrize("kernel", ["query_gradient", "key_gradients"])
def test_what_each_mode_of_the_backward_promises(architecture, recipe, kernel, head_dim, instructions, native):
    assert promised(architecture, recipe, kernel, head_dim) == instructions
    assert portable.is_native(architecture, recipe, kernel, head_dim) == native


PTX = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [ %r1 ], %rd1;\n"
FALLBACK = "tcgen05.mma.cta_group::1.kind::f16 [ %r1 ], %rd1;\n"
GCN = "v_mfma_scale_f32_32x32x64_f8f6f4 a[0:15], v[0:7]\n.vgpr_count: 256\n.vgpr_spill_count: {spills}\n.sgpr_spill_count: 9\n"
LOG = "    0 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads\nptxas info    : Used 168 registers"


def compiled(assembly, architecture="sm_100", promises=("mxf8",), log="", shared=0):
    result = Compiled("attention", architecture, list(promises), shared=shared)
    read(result, assembly, log)
    return result


def test_the_promised_instruction_passes():
    assert problems(compiled(PTX), 0) == []
    assert problems(compiled(GCN.format(spills=0), "gfx950", ["mfma scaled"]), 0) == []


@pytest.mark.parametrize("assembly", ["", FALLBACK, PTX + FALLBACK, PTX + "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 x;\n"])
def test_a_missing_or_another_matrix_instruction_is_a_problem(assembly):
    [problem] = problems(compiled(assembly), 0)
    assert "promised: mxf8" in problem


def test_a_product_where_none_is_meant_is_a_problem():
    [problem] = problems(compiled(PTX, promises=[]), 0)
    assert "promised: nothing" in problem


def test_every_promised_product_is_native():
    result = compiled(PTX)
    result.promised_products, result.native_products = 4, 4
    assert problems(result, 0) == []
    result.native_products = 3
    assert problems(result, 0) == ["3 native products, promised: 4"]


def test_spills_may_not_grow():
    assert problems(compiled(PTX, log=LOG.format(spills=20)), 40) == []
    assert problems(compiled(PTX, log=LOG.format(spills=24)), 40) == ["spills 48, recorded 40"]
    amd = compiled(GCN.format(spills=3), "gfx950", ["mfma scaled"])
    assert problems(amd, 2) == ["spills 3, recorded 2"]


def test_more_shared_memory_than_the_chip_has_is_a_problem():
    limit = TARGETS["gfx942"].shared
    assert problems(compiled("", "gfx942", [], shared=limit), 0) == []
    [problem] = problems(compiled("", "gfx942", [], shared=limit + 1), 0)
    assert problem == f"needs {limit + 1} bytes of shared memory, gfx942 gives {limit}"
