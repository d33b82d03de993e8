"""Gluon device functions as plain Python on CPU tensors: arithmetic, masks, indices and order of what they do, not layouts.

`on_cpu(module)` runs the bodies of a module's device functions with another `gl`: layouts are forgotten, copies to shared memory
and barriers do nothing, wgmma is a matrix product in float32, a tile in shared memory is a tensor or a queue of them (`Tiles`), and
inline PTX is what its docstring says (tests/gpu/test_hopper_inline*.py hold the PTX to that). Warpgroups that wait for each other
have real memory and barriers: `gluon_warpgroups`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


def raw(x: Any) -> Any:
    """What a Value, or a compile-time number of Triton, holds."""
    if isinstance(x, Value):
        return x.data
    return x.value if type(x).__name__ == "constexpr" else x


def shape_of(sizes: Any) -> list[int]:
    return [int(raw(size)) for size in sizes]


class Value:
    """A tensor, or a scalar as one without dimensions."""

    def __init__(self, data: Any) -> None:
        self.data = torch.as_tensor(raw(data))

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None, shape=self.shape)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.data.dtype)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        if dtype == torch.uint32:  # for which torch has no comparisons: the same number, in int64
            return Value(self.data.long() & 0xFFFFFFFF)
        return Value(self.data.contiguous().view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, sizes: Any) -> Value:
        return Value(self.data.reshape(shape_of(sizes)))

    def permute(self, order: Any) -> Value:
        return Value(self.data.permute(*order))

    def broadcast_to(self, sizes: Any) -> Value:
        return Value(self.data.broadcast_to(shape_of(sizes)))

    def slice(self, start: Any, length: Any, dim: int = 0) -> Value:
        return Value(self.data.narrow(dim, int(raw(start)), int(raw(length))))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)


def _binary(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Value, Any], Any]:
    def apply(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = self.data, raw(other)
        if isinstance(b, float):
            a = a if a.is_floating_point() else a.float()
        elif isinstance(b, int) and not a.is_floating_point() and not isinstance(b, bool):
            b = torch.tensor(b, dtype=a.dtype)
        return Value(function(b, a) if swapped else function(a, b))
    return apply


def _quotient(a: Any, b: Any) -> Any:
    """Triton's whole division, towards zero."""
    return torch.div(a, b, rounding_mode="trunc")


def _remainder(a: Any, b: Any) -> Any:
    return a - b * _quotient(a, b)


for _name in ("add", "sub", "mul", "truediv", "lshift", "rshift"):
    setattr(Value, f"__{_name}__", _binary(getattr(operator, _name), False))
    setattr(Value, f"__r{_name}__", _binary(getattr(operator, _name), True))
for _name, _function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor), ("floordiv", _quotient),
                         ("mod", _remainder)):
    setattr(Value, f"__{_name}__", _binary(_function, False))
    setattr(Value, f"__r{_name}__", _binary(_function, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _binary(getattr(operator, _name), False))


class Pointer:
    """Elements of a tensor, from its first to its last; no others."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        reach = 1 + sum((n - 1) * stride for n, stride in zip(memory.shape, memory.stride(), strict=True)) if memory.numel() else 0
        self.memory, self.offset = memory.as_strided((reach,), (1,)), torch.as_tensor(raw(offset))
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + raw(other))

    def to(self, dtype: torch.dtype, bitcast: bool) -> Pointer:
        memory = self.memory.view(dtype)
        return Pointer(memory, self.offset * self.memory.element_size() // memory.element_size())

    def _checked(self, offset: torch.Tensor) -> torch.Tensor:
        if offset.numel() and not (offset.min() >= 0 and offset.max() < self.memory.numel()):
            raise IndexError(f"offsets {offset.min()} to {offset.max()} of {self.memory.numel()} elements")
        return offset.long()

    def load(self, mask: Any = None, other: Any = 0) -> Value:
        if mask is None:
            return Value(self.memory[self._checked(self.offset)])
        mask = torch.as_tensor(raw(mask)).broadcast_to(self.offset.shape)
        found = torch.full(self.offset.shape, other, dtype=self.memory.dtype)
        found[mask] = self.memory[self._checked(self.offset[mask])]
        return Value(found)

    def store(self, value: Any, mask: Any = None) -> None:
        value = torch.as_tensor(raw(value)).to(self.memory.dtype)
        offset, value = torch.broadcast_tensors(self.offset, value)
        mask = torch.ones(offset.shape, dtype=torch.bool) if mask is None else torch.as_tensor(raw(mask)).broadcast_to(offset.shape)
        self.memory[self._checked(offset[mask])] = value[mask]


class Tiles(Value):
    """Shared memory of one tile or a ring of them, in the order of loading. Waiting for `full` brings the next tile."""

    def __init__(self, loaded: Iterable[torch.Tensor] = ()) -> None:
        self.loaded, self.position, self.full = list(loaded), -1, SimpleNamespace(index=lambda stage: self)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.loaded[self.position]

    def index(self, stage: Any) -> Tiles:
        return self

    def filled(self) -> None:
        self.position += 1


def _reduced(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    return lambda x, axis: Value(function(x.data, dim=axis))


def _both(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def apply(a: Any, b: Any, **_: Any) -> Value:
        a, b = torch.as_tensor(raw(a)), torch.as_tensor(raw(b))
        dtype = torch.result_type(a, b)  # a Python number takes the tensor's type
        return Value(function(a.to(dtype), b.to(dtype)))
    return apply


def _where(condition: Any, a: Any, b: Any) -> Value:
    a, b = raw(a), raw(b)
    if isinstance(a, int | float) and isinstance(b, int | float):
        dtype = torch.float32 if isinstance(a, float) or isinstance(b, float) else torch.int32
        a, b = torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)
    return Value(torch.where(torch.as_tensor(raw(condition)), a, b))


def _reduce(x: Value, axis: int, combine: Any) -> Value:
    parts = x.data.unbind(axis)
    total = Value(parts[0])
    for part in parts[1:]:
        total = combine(total, Value(part))
    return total


def _max_of_numbers(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.where(x.isnan(), -torch.inf, x).amax(dim)


def _min_of_numbers(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.where(x.isnan(), torch.inf, x).amin(dim)


def _atomic_add(pointer: Pointer, value: Any, sem: str = "acq_rel") -> Value:
    before = Value(pointer.load().data.clone())  # not a view of the memory
    pointer.store(before + value)
    return before


LANGUAGE = SimpleNamespace(
    constexpr=lambda x: x, float32=torch.float32, float16=torch.float16, uint8=torch.uint8, int8=torch.int8, int16=torch.int16,
    int32=torch.int32, uint32=torch.uint32, int64=torch.int64, float8e4nv=torch.float8_e4m3fn, min=_reduced(_min_of_numbers),
    max=_reduced(_max_of_numbers), sum=_reduced(torch.sum), reduce=_reduce, where=_where, maximum=_both(torch.fmax),
    minimum=_both(torch.fmin), sqrt=lambda x: Value(x.data.sqrt()), to_tensor=Value,
    div_rn=_both(torch.div), abs=lambda x: Value(x.data.abs()), ceil=lambda x: Value(x.data.ceil()),
    floor=lambda x: Value(x.data.floor()), exp2=lambda x: Value(torch.exp2(torch.as_tensor(raw(x)))),
    log2=lambda x: Value(torch.log2(x.data)),
    arange=lambda start, stop, layout: Value(torch.arange(start, int(raw(stop)), dtype=torch.int32)),
    zeros=lambda sizes, dtype, layout: Value(torch.zeros(shape_of(sizes), dtype=dtype)),
    full=lambda sizes, value, dtype, layout: Value(torch.full(shape_of(sizes), raw(value), dtype=dtype)),
    full_like=lambda x, value: Value(torch.full_like(x.data, raw(value))), zeros_like=lambda x: Value(torch.zeros_like(x.data)),
    convert_layout=lambda x, layout: x, expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis)),
    split=lambda x: tuple(Value(part) for part in x.data.unbind(-1)),
    join=lambda a, b: Value(torch.stack([a.data, b.data], -1)), static_range=range,
    load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
    store=lambda pointer, value, mask=None: pointer.store(value, mask),
    atomic_add=_atomic_add,
    reshape=lambda x, sizes: x.reshape(sizes), permute=lambda x, order: x.permute(order), pointer_type=lambda dtype: dtype,
    program_id=lambda axis: Value(0), num_programs=lambda axis: Value(1), num_warps=lambda: 4, BlockedLayout=lambda *_: None,
    SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None, NVMMADistributedLayout=lambda **_: None,
    DistributedLinearLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None, NVMMASharedLayout=lambda *_, **__: None)
"""`gl`. NaN is no number to maxima, unless a caller combines by itself."""


def _pack_e4m3(*parts: Value) -> Value:
    codes = torch.stack([part.data.clamp(-448, 448).to(torch.float8_e4m3fn) for part in parts], -1)
    return Value(codes.view(torch.int32)[..., 0])


def _unpack_e4m3(words: Value) -> Value:
    column = torch.arange(words.shape[-1], dtype=torch.int32) % 4
    return Value((words.data >> (8 * column) & 0xFF).to(torch.uint8).view(torch.float8_e4m3fn))


def _pair_bf16(even: Value, odd: Value) -> Value:
    return Value(torch.stack([even.data.bfloat16(), odd.data.bfloat16()], -1).view(torch.int32)[..., 0])


def _bytes_of(words: Value) -> torch.Tensor:
    """[..., 4] uint8, the lowest byte first."""
    return words.data.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))


def _words_of(parts: torch.Tensor) -> Value:
    """The inverse of `_bytes_of`."""
    return Value(parts.contiguous().view(torch.int32)[..., 0])


def _values_of(words: Value) -> tuple[Value, ...]:
    return tuple(Value(x.float()) for x in _bytes_of(words).view(torch.float8_e4m3fn).unbind(-1))


def _transposed_bytes(upper: Value, lower: Value) -> tuple[Value, Value]:
    pairs = torch.stack([_bytes_of(upper), _bytes_of(lower)], -1).flatten(-2)
    return _words_of(pairs[..., :4]), _words_of(pairs[..., 4:])


def _halves(words: Value) -> tuple[Value, ...]:
    return tuple(Value(x) for x in words.data.contiguous().view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1))


def _from_lane(x: Value, distance: int) -> Value:
    """Lanes hold pairs of the columns of an accumulator."""
    return Value(x.data[:, torch.arange(x.shape[1]) ^ 2 * distance])


def _swap(words: Value) -> Value:
    """Rows (.., j, c of 4, e), one a lane, against the two low channel bits: j with the higher, e with the lower."""
    parts = _bytes_of(words).reshape(-1, 2, 4, 2, words.shape[1], 2, 2)
    return _words_of(parts.permute(0, 5, 2, 6, 4, 1, 3).reshape(*words.shape, 4))


def _larger_pair(a: Value, b: Value) -> Value:
    """Of 16 bits without a sign, which magnitudes do not use."""
    return Value(torch.stack([torch.maximum(x.data, y.data) for x, y in zip(_halves(a), _halves(b), strict=True)], -1)
                 .view(torch.int32)[..., 0])


def _warpgroup_mma(a: Value, b: Value, c: Value, *, use_acc: bool = True, is_async: bool) -> Value:
    product = a.data.float() @ b.data.float()
    return Value((product + c.data if use_acc else product).to(c.data.dtype))


INLINE = {
    "keep_visible": lambda x, distance: _where(distance >= 0, x, -torch.inf), "pack_e4m3": _pack_e4m3, "unpack_e4m3": _unpack_e4m3,
    "pair_bf16": _pair_bf16, "uniform": lambda x: x, "take_turn": lambda _: None, "pass_turn": lambda _: None,
    "nan_maximum": lambda a, b: Value(torch.maximum(a.data, b.data)), "zero_with": lambda x, p: _where(p == 0, 0.0, x),
    "values_of": _values_of, "transposed_bytes": _transposed_bytes, "halves": _halves, "from_lane": _from_lane, "_swap": _swap,
    "swap_middle_bytes": lambda words: _words_of(_bytes_of(words)[..., [0, 2, 1, 3]]), "_larger_pair": _larger_pair,
    "scale_rows_if_needed": lambda x, factor, count: x * factor,
    "pair": lambda even, odd: Value(torch.stack([even.data.half(), odd.data.half()], -1).view(torch.int32)[..., 0]),
    "lower_half": lambda words: Value(_halves(words)[0].data.view(torch.float16).float()),
    "upper_half": lambda words: Value(_halves(words)[1].data.view(torch.float16).float())}
"""By the name of the function; "module.name" is that of one module only, where others have their own function of the name."""


def _wait(barrier: Any, phase: Any) -> None:
    """A barrier that has something to tell is told that it was waited for."""
    if hasattr(barrier, "filled"):
        barrier.filled()


NOTHING = SimpleNamespace(wait=_wait, arrive=lambda *_, **__: None, expect=lambda *_: None)
BARRIER = SimpleNamespace(index=lambda _: None)
"""A barrier, or a ring of them."""


def body_of(function: Any) -> Any:
    """The Python function that a device function was made of; anything else as it is."""
    return getattr(function, "fn", function)


def _inline(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, model in INLINE.items():
        only, _, name_there = name.rpartition(".")
        if hasattr(module, name_there) and only in ("", module.__name__.rpartition(".")[2]):
            yield name_there, model


@contextmanager
def on_cpu(*modules: ModuleType) -> Iterator[None]:
    """Inside, the device functions of these modules are Python functions, which may be called."""
    replaced = []
    for module in modules:
        names = {name: body_of(value) for name, value in vars(module).items() if type(value).__name__ == "GluonJITFunction"}
        names |= {name: value.value for name, value in vars(module).items() if type(value).__name__ == "constexpr"}
        names |= dict(_inline(module))
        hardware = {"warpgroup_mma": _warpgroup_mma, "mbarrier": NOTHING, "fence_async_shared": lambda: None,
                    "warpgroup_mma_wait": lambda _, deps: deps if len(deps) > 1 else deps[0]}
        names |= {name: model for name, model in hardware.items() if hasattr(module, name)}
        replaced.append(patch.multiple(module, gl=LANGUAGE, **names))
    for replacement in replaced:
        replacement.start()
    try:
        yield
    finally:
        for replacement in replaced:
            replacement.stop()
