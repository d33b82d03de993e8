"""Context parallelism over two real processes gives what one process gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_worker import RANKS, build

from lowbit_attn.integrations.diffusers import patch

WORKER = Path(__file__).with_name("parallel_worker.py")


def _across_ranks(folder, scheme, recipe, name):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(WORKER.parent), *sys.path]))}
    ranks = [subprocess.Popen([sys.executable, WORKER, str(rank), folder, scheme, recipe, name], env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(RANKS)]
    for rank in ranks:
        output, _ = rank.communicate(timeout=180)
        assert rank.returncode == 0, output
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize(("scheme", "name", "tolerance"), [
    ("ulysses", "wan", 1e-5),
    pytest.param("ring", "wan", 0.02, marks=pytest.mark.full),
    pytest.param("ulysses", "minimax-h3", 1e-4, marks=pytest.mark.full),
])
def test_ranks_agree_with_one_process(tmp_path, scheme, name, tolerance):
    """The ring ends quantization blocks at the ranks' borders, so its latents differ by quantization."""
    pipe, run = build(name)
    alone = run(patch(pipe, "mxfp8"), steps=2)
    for rank in _across_ranks(tmp_path, scheme, "mxfp8", name):
        assert rank["ran"].keys() == {"mxfp8"}
        assert float((rank["latents"] - alone).norm() / alone.norm()) < tolerance
