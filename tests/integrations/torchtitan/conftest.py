import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

collect_ignore_glob: list[str] = []
try:
    import torchtitan  # noqa: F401
except ImportError:
    collect_ignore_glob.append("test_*.py")


@pytest.fixture(autouse=True)
def _no_waiting_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan sleeps two seconds after training."""
    clock = SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)
    monkeypatch.setattr("torchtitan.train.time", clock)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """For tests that use torchtitan's parts without its trainer."""
    import torch

    from lowbit_attn.integrations.torchtitan.cpu import enable_cpu

    with enable_cpu(force=torch.accelerator.is_available()):
        yield
