"""The kernels' arguments, as C lays them out: `QuantizeArgs` and `AttentionArgs` of the sources."""

import ctypes
from dataclasses import dataclass, field

from torch import Tensor

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class QuantizeArgs(ctypes.Structure):
    """quantize.hip.cpp."""

    _fields_ = [*((name, _POINTER) for name in ("input", "packed", "found", "starts", "lengths")),
                *((name, _LONG) for name in ("batch_stride", "row_stride", "head_stride", "channel_stride")),
                *((name, _INT) for name in ("rows", "heads", "channels", "type", "blocks")), ("prescale", ctypes.c_float)]


class AttentionArgs(ctypes.Structure):
    """attention.h."""

    _fields_ = [*((name, _POINTER) for name in ("query", "key", "value", "broken", "peak", "query_starts", "key_starts", "lengths",
                                                "output", "lse")),
                *((name, _LONG) for name in ("lse_batch", "lse_head")),
                *((name, _INT) for name in ("queries", "keys", "query_heads", "kv_heads", "query_tiles", "key_tiles", "channels",
                                            "type"))]


class ProbeArgs(ctypes.Structure):
    """probes.hip.cpp."""

    _fields_ = [("input", _POINTER), ("output", _POINTER), ("scale", ctypes.c_float), ("option", _INT)]


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `groups` workgroups of `threads` threads. `tensors` keeps what `args` points to alive."""

    unit: str
    kernel: str
    groups: int
    threads: int
    args: ctypes.Structure
    tensors: tuple[Tensor, ...] = field(default=(), repr=False)


def pointer(x: Tensor | None) -> int | None:
    """The address of a tensor's first element, null for None."""
    return None if x is None else x.data_ptr()
