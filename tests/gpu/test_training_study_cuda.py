"""On a GPU a step of the training study is one CUDA graph, whose replays train as single launches do."""

import math
from dataclasses import replace

import pytest
import torch
from study import text
from study.attentions import CONTROLS, variant
from study.text import Text
from study.training import TINY, Trainer, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GPU = torch.device("cuda")
SETTINGS = replace(TINY, steps=12, control_steps=12)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.bin"
    path.write_bytes(text.joined([f"document {number}: ".encode() + bytes([97 + number % 26]) * 300 for number in range(40)]))
    return Text.read(path, SETTINGS.size.context)


@pytest.mark.parametrize("name", ["bf16", "mxfp8", *CONTROLS])
def test_a_step_is_captured_and_trains_like_single_launches(monkeypatch, data, name):
    run = train(variant(name), 0, SETTINGS, data, GPU, False, {}, lambda line: None)
    if name == "wrong-P" and not all(map(math.isfinite, run.train_loss)):
        return  # its probabilities have no bound: it may end before a step is captured
    assert run.method == "CUDA graph"
    monkeypatch.setattr(Trainer, "_capture", lambda trainer: None)
    single = train(variant(name), 0, SETTINGS, data, GPU, False, {}, lambda line: None)
    assert single.method == "eager"
    # The sums of dQ, and of bf16's gradients, may come in another order each time.
    assert run.train_loss == pytest.approx(single.train_loss, abs=2e-2)
    # Every batch is of other text: the means tell.
    assert sum(run.train_loss[6:]) / 6 < sum(run.train_loss[:3]) / 3 - 0.5
