"""The emulator, compiled once for a test run and shared by its processes."""

import hashlib
import os
from pathlib import Path

import pytest

from lowbit_attn.kernels.cdna4 import toolchain
from lowbit_attn.kernels.cdna4.emulate import Emulator

FAULTS = Path(__file__).parent / "faults.cpp"


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory):
    """A folder named by everything that its libraries are compiled from."""
    if not toolchain.available():
        message = "the compiler is missing: pip install ziglang==0.17.1"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    sources = [*sorted(toolchain.SOURCES.glob("*.h")), *sorted(toolchain.SOURCES.glob("*.cpp")), FAULTS]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "popen" in shared.name else shared   # pytest-xdist gives each worker a folder of its own
    folder = shared / f"cdna4-{digest}"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def compiled(build_folder):
    """The emulator whose libraries every test shares."""
    return Emulator(build_folder, {"faults": FAULTS})


@pytest.fixture
def emulator(compiled):
    """The emulator with no observer."""
    compiled.observed = None
    return compiled
