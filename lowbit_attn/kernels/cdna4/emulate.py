"""Runs the kernels' own sources on a CPU, lane by lane, with LDS, barriers and races checked: `emulator.h`.

    run = Emulator(folder)
    output, lse = forward(query, key, value, recipe, run)

About 10 ms for a workgroup of 256 queries and a tile of 128 keys: for tests and for study.
"""

import ctypes
import os
from pathlib import Path

import torch
from torch import Tensor

from lowbit_attn.kernels.cdna4.arguments import Launch
from lowbit_attn.kernels.cdna4.toolchain import SOURCES, host_library


class EmulationError(RuntimeError):
    """A launch broke a rule of the machine: a race, an unwritten or foreign LDS word, a copy out of bounds, a deadlock."""


class Report(ctypes.Structure):
    """`emulator::Report`."""

    _fields_ = [("message", ctypes.c_char * 240), ("observed", ctypes.c_void_p), ("capacity", ctypes.c_longlong)]


class Emulator:
    """Compiles the sources into `folder` when they are first needed; calling it runs a launch on CPU tensors."""

    def __init__(self, folder: Path, sources: dict[str, Path] | None = None) -> None:
        self.folder, self.sources = folder, sources or {}
        self.observed: Tensor | None = None
        """float32 room for what kernels `observe`, or None."""
        self._libraries: dict[str, ctypes.CDLL] = {}

    def library(self, unit: str) -> ctypes.CDLL:
        """The host library of a unit, or of the source that was given for it."""
        if unit not in self._libraries:
            path = self.folder / f"{unit}.so"
            if not path.exists():   # under another name first: several processes may share the folder
                host_library(self.sources.get(unit, SOURCES / f"{unit}.hip.cpp"), path.with_suffix(f".{os.getpid()}"))
                path.with_suffix(f".{os.getpid()}").replace(path)
            self._libraries[unit] = ctypes.CDLL(str(path))
        return self._libraries[unit]

    def __call__(self, launch: Launch) -> None:
        """EmulationError says what a kernel did wrong, and where."""
        if any(x.device.type != "cpu" for x in launch.tensors):
            raise ValueError(f"launch: {launch.kernel} has tensors that are not on the CPU; the emulator accepts CPU tensors")
        observed = self.observed
        report = Report(b"", None if observed is None else observed.data_ptr(), 0 if observed is None else observed.numel())
        kernel = getattr(self.library(launch.unit), launch.kernel)
        if kernel(ctypes.byref(launch.args), ctypes.c_uint(launch.groups), ctypes.byref(report)):
            raise EmulationError(f"{launch.kernel}: {report.message.decode()}")


RECORD = 64 + 2 * 8 + 4
"""Words of a lane's record of a tile: scores, P as two operands, two scale codes, C m and beta (softmax.h)."""


def room(workgroups: int, tiles: int) -> Tensor:
    """Room for the records of an attention launch: [workgroups, 8 waves, tiles (even), 64 lanes, RECORD]."""
    return torch.zeros(workgroups, 8, tiles + tiles % 2, 64, RECORD)
