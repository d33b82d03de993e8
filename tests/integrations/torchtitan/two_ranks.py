"""One of two processes (gloo; nccl on GPUs): trains scenarios with torchtitan's trainer and writes the losses as JSON.

    python two_ranks.py OUT RANK PORT...      one port per scenario

Initial weights come from a checkpoint: sharded tensors on a CPU draw other random numbers than whole ones.
"""

import inspect
import json
import os
import random
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from titan_runs import LINE, run
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

STEPS, SEQ_LEN, BATCH = 3, 96, 2
FSDP = {"parallelism__data_parallel_shard_degree": 2, "training__local_batch_size": BATCH // 2}
TP = {"parallelism__tensor_parallel_degree": 2}
FLOAT32 = {"training__mixed_precision_param": "float32"}
PP = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "1F1B",
      "parallelism__pipeline_parallel_microbatch_size": 1, "checkpointing": "none"}
# 0.3.x's default backend needs torch 2.14, and a process for each mesh.
BACKEND = {} if LINE == "0.2" else {"parallelism__spmd_backend": "partial_dtensor"}

# Name, what two processes run, what one process runs in its place.
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": ({**FSDP, **FLOAT32}, FLOAT32),
    "tp": ({"flavor": "small", **TP, **FLOAT32}, {"flavor": "small", **FLOAT32}),
    "tp bfloat16": ({"flavor": "small", **TP}, {"flavor": "small"}),
}
if LINE == "0.2":
    SCENARIOS["pp"] = ({**PP, "flavor": "tiny_sdpa"}, {"checkpointing": "none", "flavor": "tiny_sdpa"})
elif "kwarg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters:  # from torch 2.14 on
    SCENARIOS["pp"] = (PP, {"checkpointing": "none"})


RELATIVE = {**dict.fromkeys(SCENARIOS, 2e-4), "tp bfloat16": 3e-3}
"""One process rounds activations to bfloat16 where two keep float32 (0.2.x); elsewhere only sums are in another order."""


def rows(count: int) -> list[str]:
    """Documents of random letters, three of which fill a row of SEQ_LEN tokens; torchtitan's loader adds the specials."""
    letters = random.Random(0)
    taken = SEQ_LEN + 1 - 3 * 2 if LINE == "0.2" else SEQ_LEN - 3
    texts = []
    for _ in range(count):
        first, second = letters.randint(5, 30), letters.randint(5, 30)
        texts += ["".join(letters.choices("abcdefgh", k=length)) for length in (first, second, taken - first - second)]
    return texts


def register_rows(world_size: int) -> None:
    """Row by row for one process; for two data-parallel ones every second row first, since each reads one half."""
    texts = rows(BATCH * (STEPS + 1))
    grouped = [texts[start:start + 3] for start in range(0, len(texts), 3)]
    ordered = [row for rank in range(world_size) for row in grouped[rank::world_size]]
    DATASETS["rows"] = DatasetConfig("", lambda path: Dataset.from_dict({"text": [text for row in ordered for text in row]}),
                                     lambda sample: sample["text"])


def losses(out_dir: Path, settings: dict[str, Any], world_size: int = 1) -> list[float]:
    """Of one scenario."""
    settings = {**BACKEND, **settings}
    data_parallel = world_size if "parallelism__data_parallel_shard_degree" in settings else 1
    register_rows(data_parallel)
    torch._dynamo.reset()
    weights = out_dir / f"weights-{settings.get('flavor', 'tiny').split('_')[0]}"
    checkpoint = {"checkpoint__enable": True, "checkpoint__initial_load_path": str(weights), "checkpoint__load_only": True}
    return [record.loss for record in run(out_dir, steps=STEPS, seq_len=SEQ_LEN, dataset="rows", **checkpoint, **settings)]


def save_weights(out_dir: Path) -> None:
    """Initial weights of both flavors, one training step old."""
    register_rows(1)
    for flavor in ("tiny", "small"):
        run(out_dir / flavor, steps=1, seq_len=SEQ_LEN, dataset="rows", flavor=flavor, options={"recipe": "bf16"},
            checkpoint__enable=True, **BACKEND)
        (out_dir / flavor / "checkpoint" / "step-1").rename(out_dir / f"weights-{flavor}")


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
    ports = _free_ports(len(SCENARIOS))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [subprocess.Popen([sys.executable, __file__, str(out), str(rank), *ports], env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
    output = [each.communicate(timeout=300)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], "\n".join(text[-3000:] for text in output)
    found = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    last_stage = {name: losses for name, losses in found[1].items() if name == "pp"}  # which alone knows the loss
    return {**found[0], **last_stage}


def compare(out: Path, relative: dict[str, float]) -> None:
    """Two processes give the losses of one, within a relative tolerance for each scenario."""
    save_weights(out)
    two = _two_processes(out)
    assert list(two) == list(SCENARIOS)
    for scenario, found in two.items():
        one = losses(out, SCENARIOS[scenario][1])
        assert len(one) == STEPS
        assert one[-1] < one[0]
        assert found == pytest.approx(one, rel=relative[scenario]), scenario


def main(out: str, rank: str, ports: list[str]) -> None:
    """Every scenario in turn, each in a process group of its own."""
    torch.set_num_threads(1)
    trainer: Any = import_module("torchtitan.train" if LINE == "0.2" else "torchtitan.trainer")
    trainer.time = SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)  # it sleeps after training
    found = {}
    for (name, (settings, _)), port in zip(SCENARIOS.items(), ports, strict=True):
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        found[name] = losses(Path(out), settings, world_size=2)
    Path(out, f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
