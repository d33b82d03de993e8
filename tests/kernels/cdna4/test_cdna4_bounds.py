"""Kernels stay inside their tensors, whatever boundaries and lengths hold: nobody reads those on the host before a launch."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="pages are protected by mprotect")
def test_no_byte_outside_is_touched(compiled, build_folder):
    for unit in ("quantize", "attention"):
        compiled.library(unit)
    script = Path(__file__).with_name("cdna4_guarded.py")
    run = subprocess.run([sys.executable, script, build_folder], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout == "nothing outside was touched\n"
