"""Tests of both release lines. A file named *_v02 or *_v03 belongs to that line; the others run with either."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

try:
    from lowbit_attn.integrations.torchtitan.versions import release_line

    LINE = release_line()
except ImportError:
    LINE = None

collect_ignore_glob = {None: ["test_*.py"], "0.2": ["*_v03.py"], "0.3": ["*_v02.py"]}[LINE]


@pytest.fixture(autouse=True)
def _no_waiting_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan sleeps two seconds after training."""
    if LINE is None:
        return
    clock = SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)
    monkeypatch.setattr("torchtitan.train.time" if LINE == "0.2" else "torchtitan.trainer.time", clock)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """For tests that use torchtitan's parts without its trainer."""
    from lowbit_attn.integrations.torchtitan.cpu import enable_cpu

    with enable_cpu(force=torch.accelerator.is_available()):
        yield
