"""What differs between the Triton releases that these kernels support (3.6 to 3.9).

Functions are plain names, not constexpr: Triton takes the repr of a constexpr into a kernel's cache key, and a function's has an
address in it, so that every process would compile anew. What `_tma_add` does is in no cache key: who changes it empties the cache.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Starts a bulk tensor copy from global to shared memory; renamed in 3.9."""

tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Starts a bulk tensor copy from shared to global memory; renamed in 3.9."""

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Starts a copy of vectors (cp.async) from global to shared memory; renamed in 3.9."""


@builtin
def _tma_add(descriptor, coordinates, source, _semantic=None):
    """What 3.9 calls async_atomic_add: 3.6 has the operation, and no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle)


tma_add = getattr(tma, "async_atomic_add", None) or _tma_add
"""Starts adding a tile of shared memory to global memory, element by element; public since 3.9."""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""All threads of a program meet; renamed in 3.9."""

_HIDDEN: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


@gluon.jit
def reinterpreted(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory in another type, shape and layout; public since 3.9."""
    if _HIDDEN:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
