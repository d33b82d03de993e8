"""Triton's interpreter with the number formats of GPUs, which its own lacks: import this before an interpreted kernel runs.

Wrong in Triton 3.6 to 3.9: fp32 to E4M3 and to bfloat16 truncates where a GPU rounds to nearest even (and saturates E4M3);
subnormal bfloat16 becomes another number in fp32, and a NaN of E4M3 480 in bfloat16; a dot of bfloat16 multiplies, and a comparison
compares, the numbers' bits, taken for integers (NaN equals itself); `dot_scaled` (3.9, absent from 3.6) reads scales of type E4M3
as E8M0.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

E4M3_TOP = 448.0
_convert = interpreter._convert_float
_dot = interpreter.InterpreterBuilder.create_dot
_scale = getattr(interpreter, "_dot_scaled_scale_to_f32", None)


def _convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if target.name == "fp8e4nv" and source.name == "fp32":
        wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        narrow = wide.clamp(-E4M3_TOP, E4M3_TOP).to(torch.float8_e4m3fn)
        return narrow.view(torch.uint8).numpy().reshape(data.shape)
    if target.name == "bf16" and source.name == "fp32":
        wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        return wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
    if source.name == "bf16" and target.name == "fp32":
        return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
    if source.name == "fp8e4nv" and target.name in ("fp32", "bf16"):
        codes = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy())
        bits = codes.view(torch.float8_e4m3fn).float().numpy().view(np.uint32).reshape(data.shape)
        return bits if target.name == "fp32" else (bits >> 16).astype(np.uint16)  # bfloat16 holds every E4M3 number
    return _convert(data, source, target, rounding)


def _widened(x: Any) -> Any:
    if x.dtype.name != "bf16":
        return x
    return SimpleNamespace(data=(x.data.astype(np.uint32) << 16).view(np.float32), dtype=tl.float32)


def _comparing(compare: Any) -> Any:
    return lambda self, a, b: compare(self, _widened(a), _widened(b))


def _create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), *rest)


def _scale_to_f32(scale: Any, compute_type: Any) -> np.ndarray:
    if scale.dtype.name == "fp8e4nv":
        codes = torch.from_numpy(np.ascontiguousarray(scale.data).view(np.uint8).copy())
        return codes.view(torch.float8_e4m3fn).float().numpy().reshape(scale.data.shape)
    assert _scale is not None
    return _scale(scale, compute_type)


interpreter._dot_scaled_scale_to_f32 = _scale_to_f32
interpreter._convert_float = _convert_float
interpreter.InterpreterBuilder.create_dot = _create_dot
for _name in [name for name in dir(interpreter.InterpreterBuilder) if name.startswith("create_fcmp")]:
    setattr(interpreter.InterpreterBuilder, _name, _comparing(getattr(interpreter.InterpreterBuilder, _name)))
