"""Running tests in Triton's interpreter. Triton reads TRITON_INTERPRET when it is imported, so they get a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
starts_interpreter = pytest.mark.skipif(INTERPRETED, reason="starts the interpreter")


def run_interpreted(file: str, test: str) -> None:
    """Run tests of a file, by the name of their class or function, under the interpreter; fail as they do."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", f"{Path(file)}::{test}"]
    result = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
