"""torchtitan compiles every block with fullgraph=True; document lengths and their number vary from step to step."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_runs import LAYERS, run
from torch._dynamo.utils import counters

from lowbit_attn.integrations.torchtitan.attention import LowbitAttention
from lowbit_attn.ops import varlen

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


@pytest.mark.parametrize(("checkpointing", "forwards_per_layer"), [("selective", 1), ("full", 2)])
def test_compiled_checkpointing_runs_attention_forward(checkpointing: str, forwards_per_layer: int, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a compiler. Its graphs do not run under a dispatch mode, so what the operators call is counted."""
    count: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_count(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return function(*args, **kwargs)

        return run_and_count

    for name in ("varlen_forward", "varlen_backward"):
        monkeypatch.setattr(varlen, name, counted(name, getattr(varlen, name)))
    torch._dynamo.reset()
    run(tmp_path, checkpointing=checkpointing, steps=2, compile__enable=True, compile__components=["model"],
        compile__backend="aot_eager_decomp_partition")
    start_up = 1
    assert count["varlen_forward"] == 2 * LAYERS * forwards_per_layer + start_up
    assert count["varlen_backward"] == 2 * LAYERS + start_up


def test_a_probe_and_another_recipe_compile_too(small_documents: Path, tmp_path: Path) -> None:
    """A graph for the probed layer and one for the other, and no more."""
    torch._dynamo.reset()
    counters.clear()
    run(tmp_path, dataset_path=small_documents, steps=6, seq_len=96, compile__enable=True, compile__components=["model"],
        compile__backend="aot_eager",
        options={"probe_every": 2, "layers": "[{blocks: 1, recipe: 'mxfp8:max_threshold=2'}]"})
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
