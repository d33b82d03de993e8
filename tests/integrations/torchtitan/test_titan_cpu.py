"""enable_cpu changes nothing until it is called, and restores what it changed."""

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.distributed import parallel_dims
from torchtitan.tools import utils

import lowbit_attn.integrations.torchtitan.launch  # noqa: F401  importing our modules must not patch anything
from lowbit_attn.integrations.torchtitan.cpu import enable_cpu


def _state() -> list[Any]:
    modules: list[ModuleType] = [utils, metrics, parallel_dims]
    return [*(getattr(module, "device_type", None) for module in modules),
            *(getattr(module, "device_module", None) for module in modules), sorted(vars(torch.cpu)),
            dist.barrier, getattr(dist, "set_timeout", None),
            vars(FSDPModule)["set_gradient_divide_factor"]]


def test_everything_is_restored() -> None:
    before = _state()
    with enable_cpu(force=torch.accelerator.is_available()):
        assert utils.device_type == metrics.device_type == parallel_dims.device_type == "cpu"
        assert utils.device_module is torch.cpu
        assert metrics.build_device_memory_monitor().device_name == "cpu"
        assert _state() != before
    assert _state() == before


def test_restored_after_an_error() -> None:
    before = _state()
    with pytest.raises(KeyError), enable_cpu(force=torch.accelerator.is_available()):
        raise KeyError
    assert _state() == before


def test_as_a_function_it_stays_until_closed() -> None:
    before = _state()
    handle = enable_cpu(force=torch.accelerator.is_available())
    assert utils.device_type == "cpu"
    handle.close()
    assert _state() == before


def test_a_machine_with_an_accelerator_must_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _state()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="force=True"):
        enable_cpu()
    assert _state() == before
