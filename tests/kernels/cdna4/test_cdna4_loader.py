"""The loader hands HIP what it takes: code objects, kernel names, grids, arguments by value, the stream; and hiprtc the sources.

A library with HIP's names stands in for the runtime (fake_hip.cpp): it checks calls and runs the emulator's kernels on the bytes
that it was given. Memory and streams of a device are not tested here.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbit_attn.cli.checks.cases import EXACT, expected, normal, relative
from lowbit_attn.kernels.cdna4 import build, loader, toolchain
from lowbit_attn.kernels.cdna4.arguments import AttentionArgs
from lowbit_attn.kernels.cdna4.forward import forward
from lowbit_attn.kernels.cdna4.loader import Hip, HipError, Hiprtc, load
from lowbit_attn.recipes import resolve

ARCHITECTURE = "gfx950:sramecc+:xnack-"
STREAM = 77


@pytest.fixture
def library(compiled, build_folder, tmp_path, monkeypatch):
    for unit in toolchain.UNITS:
        compiled.library(unit)
    monkeypatch.setenv("FAKE_HIP_KERNELS", str(build_folder))
    return str(toolchain.host_library(Path(__file__).parent / "fake_hip.cpp", tmp_path / "libamdhip64.so"))


def attend(runtime, name="fused_mxfp6"):
    """One call through the loader's own functions; the difference from the reference."""
    def run(launch):
        function = load(runtime, launch.unit, launch.kernel, ARCHITECTURE)
        runtime.launch(function, launch.groups, launch.threads, launch.args, STREAM)

    inputs = normal(40, 150, heads=2)
    output, _ = forward(*inputs, resolve(name), run)
    return relative(output, expected(*inputs, name)[0])


def test_launches_arrive_with_their_arguments_and_compute_attention(library):
    runtime = Hip(library)
    assert attend(runtime) <= EXACT
    assert runtime.library.fake_calls() == 4   # query, key, value, attention


def test_a_code_object_that_the_runtime_refuses_is_compiled_anew_and_says_so(library, monkeypatch):
    monkeypatch.setenv("FAKE_HIP_REFUSES", "1")
    monkeypatch.setattr(loader, "hiprtc", lambda: Hiprtc(library))
    runtime = Hip(library)
    with pytest.warns(RuntimeWarning, match=r"quantize.hsaco does not serve \(hipModuleLoadData: device kernel image is invalid"):
        load(runtime, "quantize", "key_mxfp6", ARCHITECTURE)


def test_sources_that_moved_on_are_compiled_and_not_mixed_with_old_objects(library, monkeypatch):
    monkeypatch.setattr(build, "stale", lambda: "the sources changed after the code objects were made")
    monkeypatch.setattr(loader, "hiprtc", lambda: Hiprtc(library))
    with pytest.warns(RuntimeWarning, match="the sources changed"):
        load(Hip(library), "attention", "attention_mxfp8", ARCHITECTURE)


def test_the_compiler_gets_the_flags_that_decide_the_code_and_its_log_is_told(library):
    with pytest.raises(HipError, match=r"hiprtcCompileProgram: HIPRTC_ERROR_COMPILATION(.|\n)*-ffp-contract=off -fno-honor-nans"):
        Hiprtc(library).compile("attention", "gfx942")


def test_a_failing_call_is_named(library):
    runtime = Hip(library)
    function = load(runtime, "attention", "attention_mxfp4", ARCHITECTURE)
    with pytest.raises(HipError, match=r"hipModuleLaunchKernel: launch failure \(204\)"):
        runtime.launch(function, 1, 64, AttentionArgs(), STREAM)


def test_without_rocm_the_import_loads_nothing_and_a_launch_names_what_is_missing():
    script = ("import sys, lowbit_attn.kernels.cdna4.loader as loader\n"
              "assert not any('hip' in line for line in open('/proc/self/maps')), 'a HIP library is loaded'\n"
              "try:\n    loader.hip()\nexcept loader.HipError as error:\n    print(error)\n")
    if torch.version.hip or not Path("/proc/self/maps").exists():
        pytest.skip("this torch brings HIP, or the system does not list what a process loaded")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("libamdhip64.so: not found; backend 'cdna4' needs a ROCm build of torch")
