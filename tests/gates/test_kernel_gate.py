"""The Hopper kernels compile for sm_90a without spills, serialised wgmma, other than FP8 products or a longer main loop.

On the Triton of this environment and on 3.6, the oldest supported, in an environment of its own (`make .venv-triton36/ready`).
`python tests/gates/compile_kernels.py --record` writes the figures anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton runs on Linux only")

import compile_kernels  # noqa: E402
import triton.language as tl  # noqa: E402
from compile_kernels import Compiled, compile_variant, judge, problems, read, uncovered  # noqa: E402
from sass import Program  # noqa: E402

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".venv-triton36"


@pytest.mark.parametrize("everything", [pytest.param([], id="few"),
                                        pytest.param(["--everything"], id="all", marks=pytest.mark.full)])
@pytest.mark.parametrize("version", [compile_kernels.VERSION, "3.6"], ids=["this Triton", "Triton 3.6"])
def test_variants_compile_clean_and_no_longer_than_recorded(version, everything, tmp_path):
    python = Path(sys.executable)
    if version != compile_kernels.VERSION:
        python = OLDEST / "bin" / "python"
        if not (OLDEST / "ready").exists():
            message = f"{OLDEST.name} is missing: `make {OLDEST.name}/ready` makes it"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    report = tmp_path / "report.json"
    run = subprocess.run([python, compile_kernels.__file__, "--json", report, *everything], capture_output=True, text=True,
                         check=False)
    assert report.is_file(), run.stderr
    found = json.loads(report.read_text())
    assert found["triton"].startswith(f"{version}.")
    assert not found["problems"], "\n".join(found["problems"])
    assert run.returncode == 0
    if not found["results"]:
        pytest.skip("no kernel lists variants")


@triton.jit
def product(a, b, c, N: tl.constexpr):
    i = tl.arange(0, 64)
    j = tl.arange(0, 64)
    total = tl.zeros([64, 64], tl.float32)
    for start in range(0, N, 64):
        left = tl.load(a + i[:, None] * N + (start + j)[None, :])
        right = tl.load(b + (start + i)[:, None] * 64 + j[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + i[:, None] * 64 + j[None, :], total)


def product_variant(dtype):
    signature = {"a": f"*{dtype}", "b": f"*{dtype}", "c": "*fp32", "N": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    return dtype, product, signature, {"N": 4096}, aligned, {"num_warps": 4}


def test_products_in_fp8_pass_and_their_loop_is_counted():
    compiled = compile_variant(product_variant("fp8e4nv"))
    assert problems(compiled, None) == []
    assert set(compiled.matrix) == {"QGMMA"}
    [loop] = compiled.loops
    assert 0 < loop < compiled.total


def test_products_in_bf16_are_refused():
    [problem] = problems(compile_variant(product_variant("bf16")), None)
    assert "HGMMA where FP8 (QGMMA) is meant" in problem


@pytest.mark.parametrize(("recorded", "problem"), [({"HGMMA": 24}, None), ({"HGMMA": 12}, "24 HGMMA, recorded 12"),
                                                   ({}, "24 HGMMA, recorded 0")])
def test_products_in_bf16_pass_where_they_are_meant_and_are_counted(recorded, problem):
    compiled = Compiled(f"{compile_kernels.MIXED}x", loops=[9], matrix={"QGMMA": 8, "HGMMA": 24}, total=99)
    assert compiled.counted["HGMMA"] == 24
    assert problems(compiled, {"instructions": [9], "QGMMA": 8, **recorded}) == ([problem] if problem else [])
    assert problems(Compiled("x", loops=[9], matrix={"QGMMA": 8, "HGMMA": 24}, total=99), None) == [
        "24 HGMMA where FP8 (QGMMA) is meant"]


def test_what_does_not_compile_is_a_problem_with_the_compilers_words():
    name, function, signature, constants, attributes, options = product_variant("fp8e4nv")
    compiled = compile_variant((name, function, signature | {"b": "*fp32"}, constants, attributes, options))
    [problem] = problems(compiled, None)
    assert problem.startswith("does not compile: ")


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
{warning}
ptxas info    : Function properties for kernel
    {frame} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 7 barriers
"""


def ptxas(warning="", stores=0, loads=0):
    return read("kernel", PTXAS.format(warning=warning, frame=stores, stores=stores, loads=loads), Program(""))


def test_spills_are_a_problem():
    assert problems(ptxas(), None) == []
    assert problems(ptxas(stores=16, loads=24), None) == ["spills 40 bytes of registers"]


def test_accepted_spills_may_not_grow():
    accepted = {"instructions": [0], "QGMMA": 0, "spilled": 40}
    assert problems(ptxas(stores=16, loads=24), accepted) == []
    assert problems(ptxas(stores=20, loads=24), accepted) == ["spills 44 bytes of registers, recorded 40"]
    hot = Program("/*0000*/ FMUL R1, R1 ;\n.L_x_0:\n/*0010*/ QGMMA R1, R2 ;\n/*0020*/ LDL R1, [R1] ;\n"
                  "/*0030*/ @P0 BRA `(.L_x_0) ;\n")
    assert problems(read("kernel", "", hot), None) == ["1 spill instructions in main loops"]
    loop = read("kernel", "", hot).counted
    assert problems(read("kernel", "", hot), loop) == []
    assert problems(read("kernel", "", hot), loop | {"loop_spills": 0}) == ["1 spill instructions in main loops"]


@pytest.mark.parametrize("code", range(7510, 7518))
def test_serialised_wgmma_is_a_problem(code):
    warning = f"ptxas info    : (C{code}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x"
    [problem] = problems(ptxas(warning), None)
    assert f"C{code}" in problem


RECORDED = {"instructions": [900, 400], "QGMMA": 72}


@pytest.mark.parametrize(("loops", "products", "expected"), [
    ([900, 400], 72, []),
    ([899, 399], 72, []),
    ([899, 401], 72, ["kernel: [899, 401] instructions in the main loops, recorded [900, 400]"]),
    ([901, 400], 72, ["kernel: [901, 400] instructions in the main loops, recorded [900, 400]"]),
    ([900], 72, ["kernel: [900] instructions in the main loops, recorded [900, 400]"]),
    ([900, 400], 36, ["kernel: 36 QGMMA, recorded 72"]),
])
def test_main_loops_may_only_shrink(loops, products, expected):
    assert judge([Compiled("kernel", loops=loops, matrix={"QGMMA": products}, total=4000)], {"kernel": RECORDED}) == expected


def test_a_kernel_without_products_is_counted_as_a_whole():
    assert judge([Compiled("kernel", total=401)], {"kernel": {"instructions": [400], "QGMMA": 0}}) == [
        "kernel: [401] instructions in the main loops, recorded [400]"]


def test_recorded_names_and_listed_variants_are_the_same():
    assert judge([Compiled("new")], {"old": RECORDED}) == [
        "new: no figures in recorded.json", "old: in recorded.json, but no kernel lists it"]


def test_variants_left_out_are_not_missed():
    assert judge([Compiled("new")], {"new": {"instructions": [0], "QGMMA": 0}, "old": RECORDED}, everything=False) == []


def test_a_triton_without_recorded_figures_is_held_to_the_absolute_rules_only():
    assert judge([Compiled("kernel", loops=[10**6]), Compiled("other", spilled=8)], None) == ["other: spills 8 bytes of registers"]


def modules_of(tmp_path, monkeypatch, **sources):
    """Modules made from source text."""
    import importlib

    monkeypatch.syspath_prepend(tmp_path)
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text("import triton\n" + source)
    return [importlib.import_module(name) for name in sources]


KERNEL = "\n@triton.jit\ndef kernel(x):\n    pass\n"
OTHER = "\n@triton.jit\ndef entry(x):\n    pass\n"


def compiled_of(modules):
    """A variant of a device function of each module."""
    return [("", vars(module)["entry" if "entry" in vars(module) else "kernel"]) for module in modules]


def test_a_module_whose_device_functions_nobody_compiles_is_named(tmp_path, monkeypatch):
    modules = modules_of(tmp_path, monkeypatch, gate_listed=KERNEL, gate_forgotten=KERNEL)
    assert list(uncovered(modules, compiled_of(modules[:1]))) == ["gate_forgotten"]


def test_helpers_of_a_listed_module_are_covered(tmp_path, monkeypatch):
    modules = modules_of(tmp_path, monkeypatch, gate_helper=KERNEL, gate_helper_module=KERNEL,
                         gate_user="import gate_helper_module\nfrom gate_helper import kernel" + OTHER)
    assert list(uncovered(modules, compiled_of(modules[2:]))) == []
