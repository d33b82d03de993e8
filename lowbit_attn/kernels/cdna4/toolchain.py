"""The compiler: clang and lld of the ziglang wheel, for gfx950 and for this machine. Sources, and one hash over them."""

import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent
HEADERS = ("isa.h", "layout.h", "softmax.h", "attention.h")
"""What device code includes; the emulator's headers are not part of a code object."""
UNITS = ("quantize", "attention", "probes")
"""Translation units, `<unit>.hip.cpp`; one code object each."""
ARCHITECTURE = "gfx950"
COMPILER = "ziglang 0.17.1"
"""What made the shipped code objects."""

_COMMON = ("-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
_EXTRA = {"attention": ("-fno-honor-nans",)}
"""Scores' maxima must become v_max3_f32, which a fmaxf that honours NaN does not; NaN is carried beside them (attention.h)."""
_HOST = ("-x", "c++", "-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-fno-sanitize=all",
         "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-nostdlib++", "-Wno-deprecated-anon-enum-enum-conversion")


def flags(unit: str) -> tuple[str, ...]:
    """What decides the code of a unit beside its text; hiprtc gets the same."""
    return ("-std=c++17", *_COMMON, *_EXTRA.get(unit, ()))


def source_hash() -> str:
    """SHA-256 over the device sources and flags; line ends count as LF."""
    digest = hashlib.sha256()
    for name in (*HEADERS, *(f"{unit}.hip.cpp" for unit in UNITS)):
        content = (SOURCES / name).read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    for unit in UNITS:
        digest.update("\0".join((unit, ARCHITECTURE, *flags(unit))).encode())
    return digest.hexdigest()


def available() -> bool:
    """Whether the ziglang wheel is installed."""
    return find_spec("ziglang") is not None


def _zig(*arguments: str | Path) -> None:
    if not available():
        raise RuntimeError("ziglang: the package is missing, and with it the compiler; `pip install ziglang==0.17.1`")
    command = [sys.executable, "-m", "ziglang", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")


def _device(unit: str, source: Path) -> list[str | Path]:
    return ["clang", "-x", "c++", "-target", "amdgcn-amd-amdhsa", f"-mcpu={ARCHITECTURE}", "-nogpulib", f"-I{SOURCES}",
            *flags(unit), source]


def assembly(unit: str, to: Path, source: Path | None = None) -> str:
    """gfx950 assembly of a unit, or of another source with that unit's flags."""
    _zig(*_device(unit, source or SOURCES / f"{unit}.hip.cpp"), "-S", "-o", to)
    return to.read_text()


def hip_assembly(unit: str, to: Path) -> str:
    """The same through the HIP front end, whose spellings hiprtc needs."""
    _zig("clang", "-x", "hip", f"--offload-arch={ARCHITECTURE}", "--cuda-device-only", "-nogpulib", "-nogpuinc", f"-I{SOURCES}",
         *flags(unit), SOURCES / f"{unit}.hip.cpp", "-S", "-o", to)
    return to.read_text()


def code_object(unit: str, to: Path) -> Path:
    """A gfx950 code object of a unit; compiling and linking in one step fails."""
    compiled = to.with_suffix(".o")
    _zig(*_device(unit, SOURCES / f"{unit}.hip.cpp"), "-c", "-o", compiled)
    _zig("ld.lld", "-shared", "--strip-all", compiled, "-o", to)
    compiled.unlink()
    return to


def host_library(source: Path, to: Path) -> Path:
    """A shared library of the same source for this machine, where `emulator.h` stands for the device."""
    _zig("cc", *_HOST, f"-I{SOURCES}", source, "-o", to)
    return to
