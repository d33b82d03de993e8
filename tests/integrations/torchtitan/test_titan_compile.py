"""torchtitan compiles every block with fullgraph=True; document lengths and their number vary from step to step."""

import random
from pathlib import Path

import pytest
import torch
from titan_runs import run
from torch._dynamo.utils import counters

from lowbit_attn.integrations.torchtitan.attention import LowbitAttention

STEPS = 50


@pytest.fixture
def small_documents(tmp_path: Path) -> Path:
    lengths = random.Random(0)
    folder = tmp_path / "documents"
    folder.mkdir()
    for index in range(60):
        (folder / f"{index}.py").write_text("x = 1\n" * lengths.randint(1, 15))
    return folder


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_blocks_compile_once(checkpointing: str, small_documents: Path, tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of one recipe share one graph, and 50 steps of documents never make another."""
    documents = []
    attend_packed = LowbitAttention.attend_packed

    def count(self: LowbitAttention, *args: torch.Tensor, **kwargs: float) -> torch.Tensor:
        documents.append(len(args[3]) - 1)
        return attend_packed(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LowbitAttention, "attend_packed", count)
        eager = run(tmp_path, checkpointing=checkpointing, dataset_path=small_documents, steps=6, seq_len=96)
    assert len(set(documents)) > 2

    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = run(tmp_path, checkpointing=checkpointing, dataset_path=small_documents, steps=STEPS, seq_len=96,
                       compile__enable=True, compile__components=["model"], compile__backend="aot_eager")
    assert len(compiled) == STEPS
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    # Later steps differ by the learning rate, whose schedule knows the number of steps.
    assert [r.loss for r in compiled[:4]] == pytest.approx([r.loss for r in eager[:4]], rel=2e-3)


def test_a_probe_and_another_recipe_compile_too(small_documents: Path, tmp_path: Path) -> None:
    """A graph for the probed layer and one for the other, and no more."""
    torch._dynamo.reset()
    counters.clear()
    run(tmp_path, dataset_path=small_documents, steps=6, seq_len=96, compile__enable=True, compile__components=["model"],
        compile__backend="aot_eager",
        options={"probe_every": 2, "layers": "[{blocks: 1, recipe: 'mxfp8:max_threshold=2'}]"})
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
