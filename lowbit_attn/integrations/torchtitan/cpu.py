"""What torchtitan's trainer needs to run on a CPU. Nothing happens until `enable_cpu` is called."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

_MISSING = object()


def enable_cpu(*, force: bool = False) -> ExitStack:
    """Let torchtitan train on the CPU with gloo, from now on or for the length of a `with` block.

        with enable_cpu():
            ...            # torchtitan's trainer runs on the CPU
        enable_cpu()       # or: for the rest of the process; `.close()` of the result undoes it

    Args:
        force: hide the accelerator that this machine has.

    Returns:
        A context manager whose exit restores everything that was changed.

    Raises:
        RuntimeError: the machine has an accelerator and `force` is False.
    """
    if torch.accelerator.is_available() and not force:
        raise RuntimeError(f"enable_cpu: this machine has an accelerator ({torch.accelerator.current_accelerator()}), which "
                           "torchtitan uses by itself; accepted: force=True to train on the CPU all the same")
    with ExitStack() as stack:
        _point_torchtitan_at_cpu(stack)
        _complete_torch_cpu(stack)
        _complete_distributed(stack)
        _adapt_to_gloo(stack)
        return stack.pop_all()


def _patch(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    previous = vars(owner).get(name, _MISSING)

    def restore() -> None:
        if previous is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, previous)

    setattr(owner, name, value)
    stack.callback(restore)


def _point_torchtitan_at_cpu(stack: ExitStack) -> None:
    """torchtitan detects its device once, at import, and copies the answer into many modules."""
    from torchtitan.tools import utils

    def point(device_type: str, device_module: ModuleType) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("torchtitan."):
                for attribute, value in (("device_type", device_type), ("device_module", device_module)):
                    if attribute in vars(module):
                        setattr(module, attribute, value)

    stack.callback(point, utils.device_type, utils.device_module)
    point("cpu", torch.cpu)


def _complete_torch_cpu(stack: ExitStack) -> None:
    """Device functions that torchtitan calls and torch.cpu lacks. Memory is not measured: the statistics stay empty."""
    functions: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(name="cpu", total_memory=_physical_memory()),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
    }
    for name, function in functions.items():
        if not hasattr(torch.cpu, name):
            _patch(stack, torch.cpu, name, function)


def _complete_distributed(stack: ExitStack) -> None:
    """torchtitan 0.3.x shortens the timeout of its process groups after the first step, with a function of torch 2.14."""
    if not hasattr(dist, "set_timeout"):
        _patch(stack, dist, "set_timeout", lambda timeout, group=None: None)


def _physical_memory() -> int:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 30


def _adapt_to_gloo(stack: ExitStack) -> None:
    from torch.distributed.fsdp import FSDPModule

    barrier, set_factor = dist.barrier, FSDPModule.set_gradient_divide_factor

    def barrier_without_devices(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs)  # gloo rejects device_ids

    def set_factor_and_sum(self: Any, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    _patch(stack, dist, "barrier", barrier_without_devices)
    _patch(stack, FSDPModule, "set_gradient_divide_factor", set_factor_and_sum)


__all__ = ["enable_cpu"]
