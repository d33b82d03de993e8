"""torchtitan compiles every block with fullgraph=True; the number of documents varies from step to step."""

import random
from pathlib import Path

import pytest
import torch
from titan_runs import run
from torch._dynamo.utils import counters

from lowbit_attn.integrations.torchtitan import v02

STEPS = 6


@pytest.fixture
def small_documents(tmp_path: Path) -> Path:
    lengths = random.Random(0)
    folder = tmp_path / "documents"
    folder.mkdir()
    for index in range(60):
        (folder / f"{index}.py").write_text("x = 1\n" * lengths.randint(1, 40))
    return folder


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_blocks_compile_once(checkpointing: str, small_documents: Path, tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    documents = []
    attend_packed = v02.LowbitVarlen.attend_packed

    def count(self: v02.LowbitVarlen, *args: torch.Tensor, **kwargs: float) -> torch.Tensor:
        documents.append(len(args[3]) - 1)
        return attend_packed(self, *args, **kwargs)

    args = [f"--activation_checkpoint.mode={checkpointing}", f"--training.dataset_path={small_documents}"]
    with monkeypatch.context() as patch:
        patch.setattr(v02.LowbitVarlen, "attend_packed", count)
        eager = run(tmp_path, *args, steps=STEPS, seq_len=128)
    assert len(set(documents)) > 2

    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = run(tmp_path, *args, "--compile.enable", "--compile.components=model", "--compile.backend=aot_eager",
                       steps=STEPS, seq_len=128)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    assert [r.loss for r in compiled] == pytest.approx([r.loss for r in eager], rel=2e-3)
