"""Runs attention with every input between pages that may not be touched, and boundaries and lengths that hold nonsense.

A read or write outside ends this process with a fault. usage: cdna4_guarded.py FOLDER-OF-THE-EMULATOR
"""

import ctypes
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

from lowbit_attn.cli.checks.cases import normal
from lowbit_attn.kernels.cdna4.emulate import Emulator
from lowbit_attn.kernels.cdna4.forward import RECIPES, forward
from lowbit_attn.recipes import resolve

PAGE = mmap.PAGESIZE
KEPT: list[mmap.mmap] = []


def guarded(x: Tensor, at_end: bool) -> Tensor:
    """A copy whose last byte is followed, or whose first byte is preceded, by a page without access."""
    size = x.numel() * x.element_size()
    room = -(-size // PAGE) * PAGE
    area = mmap.mmap(-1, room + 2 * PAGE)
    KEPT.append(area)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (base, base + PAGE + room):
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (room - size if at_end else 0)
    return torch.frombuffer(area, dtype=x.dtype, count=x.numel(), offset=offset).reshape(x.shape).copy_(x)


def main() -> None:
    run = Emulator(Path(sys.argv[1]))
    nonsense = ([0, 7, 5, 33], [-9, 100000, -5, 12], [40, 20, 10, 0], [0, 2**31 - 1, -(2**31), 7])
    for at_end in (True, False):
        for recipe in map(resolve, RECIPES):
            query, key, value = (guarded(x.bfloat16(), at_end) for x in normal(33, 130, batch=2, channels=96))
            for lengths in ([-1, 1000], [2**31 - 1, -(2**31)], [130, 1]):
                forward(query, key, value, recipe, run, key_lengths=guarded(torch.tensor(lengths, dtype=torch.int32), at_end))
            query, key, value = (x[0] for x in (query, key, value))
            for cu_seq in nonsense:
                starts = guarded(torch.tensor(cu_seq, dtype=torch.int32), at_end)
                forward(query, key, value, recipe, run, cu_seq=(starts, starts), longest=(40, 50))
    print("nothing outside was touched")


if __name__ == "__main__":
    main()
