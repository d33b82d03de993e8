"""Two gloo processes compute the loss of one: FSDP2, tensor and pipeline parallelism, in torchtitan's trainer."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import two_ranks

RELATIVE = {"tp bfloat16": 3e-3}
"""One process rounds activations to bfloat16 where two keep float32 (0.2.x); elsewhere only sums are in another order."""


def _free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _two_processes(out: Path) -> dict[str, list[float]]:
    """Losses of every scenario, of the rank whose log has them."""
    ports = _free_ports(len(two_ranks.SCENARIOS))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [subprocess.Popen([sys.executable, two_ranks.__file__, str(out), str(rank), *ports], env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
    output = [each.communicate(timeout=300)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], "\n".join(text[-3000:] for text in output)
    found = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    last_stage = {name: losses for name, losses in found[1].items() if name == "pp"}  # which alone knows the loss
    return {**found[0], **last_stage}


def test_two_processes_compute_the_loss_of_one(tmp_path: Path) -> None:
    """In one test, so that the processes start once."""
    two_ranks.save_weights(tmp_path)
    two = _two_processes(tmp_path)
    assert list(two) == list(two_ranks.SCENARIOS)
    for scenario, losses in two.items():
        one = two_ranks.losses(tmp_path, two_ranks.SCENARIOS[scenario][1])
        assert len(one) == two_ranks.STEPS
        assert one[-1] < one[0]
        assert losses == pytest.approx(one, rel=RELATIVE.get(scenario, 2e-4)), scenario
