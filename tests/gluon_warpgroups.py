"""Whole Gluon kernels on a CPU, their warpgroups too: shared memory, barriers and bulk copies beside `gluon_on_cpu`.

Each warpgroup is a thread. One runs at a time, until a barrier makes it wait, and now and then before or after it arrives at one:
which goes on is drawn, from the same seed every time. Barriers count arrivals and bytes as the hardware's do, and warpgroups that
wait for each other for ever are an error. Memory starts as NaN. A bulk load makes it NaN again, and lands when its barrier is
waited for; what a bulk copy adds to global memory is read when the kernel waits for that. So what is loaded too early, read too
early or overwritten too early shows.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from gluon_on_cpu import LANGUAGE, Pointer, Value, on_cpu, raw, shape_of


class Memory(Value):
    """Shared memory, or a view of it."""

    def index(self, number: Any) -> Memory:
        return Memory(self.data[int(raw(number))])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Memory:
        return Memory(self.data.narrow(dim, int(raw(start)), int(raw(length))))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.data.copy_(value.data.reshape(self.data.shape))


class Barrier:
    """An mbarrier: a phase ends when all its arrivals have come, and all the bytes that it was told to expect."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0
        self.loads: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def index(self, number: Any) -> Barrier:
        return self

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def add(self, arrivals: int, size: int) -> None:
        self.missing -= arrivals
        self.bytes += size
        assert self.missing >= 0, "one arrival too many"
        if self.missing == self.bytes == 0:
            self.phase, self.missing = 1 - self.phase, self.count

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over, if all that was started lands now."""
        while self.loads:
            destination, part, size = self.loads.pop(0)
            destination.zero_()  # past the end
            destination[tuple(slice(0, n) for n in part.shape)] = part
            self.add(0, -size)
        return self.phase != parity


class Barriers:
    """A ring of them."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self.barriers = barriers

    def index(self, number: Any) -> Barrier:
        return self.barriers[int(raw(number))]


class Descriptor:
    """A tensor map, as the kernel sees it."""

    def __init__(self, host: Any) -> None:
        self.base, self.layout, self.dtype = host.base, host.layout, host.base.dtype
        size = self.base.element_size() * torch.Size(host.block_shape).numel()
        self.block_type = SimpleNamespace(shape=list(host.block_shape), nbytes=size)

    def block(self, place: Any) -> torch.Tensor:
        """The part of a block that exists."""
        starts = shape_of(place)
        assert min(starts) >= 0, starts
        return self.base[tuple(slice(start, start + n) for start, n in zip(starts, self.block_type.shape, strict=True))]


class Warpgroup(threading.Thread):
    """Runs when `step` says so, until it has to wait."""

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...], chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.function, self.arguments, self.chance = function, arguments, chance
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = lambda: True
        self.error: BaseException | None = None
        self.abandoned = False
        self.start()

    def run(self) -> None:
        self.go.acquire()
        try:
            if not self.abandoned:
                self.function(*self.arguments)
        except BaseException as error:  # `step` raises it
            self.error = error
        self.ready = None
        self.stopped.release()

    def step(self) -> None:
        self.go.release()
        self.stopped.acquire()
        if self.error is not None and not self.abandoned:
            raise self.error

    def wait_until(self, ready: Callable[[], bool]) -> None:
        if not ready():
            self.stop(ready)

    def pause(self) -> None:
        """Let others go on, or not."""
        if self.chance.random() < 0.5:
            self.stop(lambda: True)

    def stop(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.stopped.release()
        self.go.acquire()
        if self.abandoned:
            raise SystemExit

    def abandon(self) -> None:
        if self.ready is not None:
            self.abandoned = True
            self.step()


def _specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    chance = random.Random(0)
    warpgroups = [Warpgroup(*partition, chance) for partition in partitions]
    try:
        while running := [x for x in warpgroups if x.ready is not None]:
            able = [x for x in running if x.ready()]
            assert able, f"{len(running)} warpgroups wait for each other"
            chance.choice(able).step()
    finally:
        for warpgroup in warpgroups:
            warpgroup.abandon()


def _current() -> Warpgroup:
    current = threading.current_thread()
    assert isinstance(current, Warpgroup)
    return current


def _wait(barrier: Barrier, parity: Any) -> None:
    parity = int(raw(parity))
    _current().wait_until(lambda: barrier.passed(parity))


def _arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    _current().pause()
    barrier.add(count * bool(pred), 0)
    _current().pause()


def _allocate(barriers: list[Barrier], dtype: torch.dtype, sizes: Any, layout: Any, value: Any = None) -> Any:
    """Every byte 255: NaN in each format. Adds barriers to the list."""
    if layout == "barrier":
        ring = [Barrier() for _ in range(sizes[0])]
        barriers += ring
        return Barriers(ring) if len(sizes) == 2 else ring[0]
    sizes = shape_of(sizes)
    memory = Memory(torch.full((*sizes[:-1], sizes[-1] * dtype.itemsize), 255, dtype=torch.uint8).view(dtype))
    if value is not None:
        memory.store(value)
    return memory


def _load(descriptor: Descriptor, place: Any, barrier: Barrier, destination: Memory) -> None:
    """Start a bulk tensor copy."""
    assert destination.shape == descriptor.block_type.shape
    destination.data.view(torch.uint8).fill_(255)
    barrier.loads.append((destination.data, descriptor.block(place), descriptor.block_type.nbytes))


class _Additions:
    """Bulk copies that add to global memory: nothing past the end."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, Memory]] = []

    def start(self, descriptor: Descriptor, place: Any, source: Memory) -> None:
        self.pending.append((descriptor.block(place), source))

    def wait(self, left: int) -> None:
        while len(self.pending) > left:
            part, source = self.pending.pop(0)
            part += source.data[tuple(slice(0, n) for n in part.shape)]


def _reinterpreted(memory: Memory, dtype: torch.dtype, sizes: Any, layout: Any) -> Memory:
    return Memory(memory.data.view(dtype).view(shape_of(sizes)))


def _copy_async(destination: Memory, pointers: Pointer, mask: Any) -> None:
    destination.store(pointers.load(mask))


MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: "barrier", init=lambda barrier, count: barrier.init(count), wait=_wait, arrive=_arrive,
    expect=lambda barrier, size: barrier.add(1, size))
COPIES = SimpleNamespace(commit_group=lambda: None, wait_group=lambda left: None)


@contextmanager
def memory_of(*modules: ModuleType) -> Iterator[None]:
    """`on_cpu`, with memory, barriers and copies, none of which may be under way at the end."""
    additions, barriers = _Additions(), list[Barrier]()
    names = {"mbarrier": MBARRIER, "tma": SimpleNamespace(store_wait=additions.wait), "tma_load": _load, "tma_add": additions.start,
             "reinterpreted": _reinterpreted, "async_copy": COPIES, "copy_async": _copy_async, "barrier": lambda: None}
    with ExitStack() as stack:
        stack.enter_context(on_cpu(*modules))
        stack.enter_context(patch.multiple(LANGUAGE, create=True, allocate_shared_memory=partial(_allocate, barriers),
                                           warp_specialize=_specialize))
        for module in modules:
            for name in names.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, names[name]))
        yield
    assert not additions.pending
    assert not any(barrier.loads for barrier in barriers)


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    return Descriptor(x) if hasattr(x, "block_shape") else Value(x)


class Kernel:
    """A Gluon kernel, launched as `kernel[grid](...)` on CPU tensors: program after program."""

    def __init__(self, kernel: Any, *modules: ModuleType) -> None:
        self.body, self.modules = kernel.fn, modules

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, maxnreg: int = 0, enable_fp_fusion: bool = True, **constants: Any) -> None:
            for program in range(grid[0]):
                place = {"program_id": lambda axis: Value(program), "num_programs": lambda axis: Value(grid[0])}  # noqa: B023
                with memory_of(*self.modules), patch.multiple(LANGUAGE, **place):
                    self.body(*map(_argument, arguments), **constants)
        return launch
