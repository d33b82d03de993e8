"""Two GPUs compute the loss of one: FSDP2, tensor and pipeline parallelism with NCCL, in torchtitan's trainer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
TITAN_TESTS = Path(__file__).parents[1] / "integrations" / "torchtitan"
SCRIPT = """
import sys
from pathlib import Path
import two_ranks
# Matrix products on tensor cores differ by more than the order of sums.
two_ranks.compare(Path(sys.argv[1]), {name: max(each, 2e-3) for name, each in two_ranks.RELATIVE.items()})
"""


def test_two_gpus_compute_the_loss_of_one(tmp_path: Path) -> None:
    """The comparison of the CPU suite, in a process of its own whose device the trainer finds."""
    pytest.importorskip("torchtitan")
    environment = {**os.environ, "TITAN_TEST_DEVICE": "accelerator",
                   "PYTHONPATH": os.pathsep.join([str(TITAN_TESTS), str(Path(__file__).parents[2]), *sys.path])}
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True,
                            timeout=540, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
