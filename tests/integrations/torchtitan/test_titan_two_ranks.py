"""Two gloo processes compute the loss of one: FSDP2, tensor and pipeline parallelism, in torchtitan's trainer."""

from pathlib import Path

import two_ranks


def test_two_processes_compute_the_loss_of_one(tmp_path: Path) -> None:
    """In one test, so that the processes start once."""
    two_ranks.compare(tmp_path, two_ranks.RELATIVE)
