"""What the Hopper attention launches, as its own host code launches it: caught on the CPU just before Triton would compile.

So the gate compiles the very signatures, constants, alignments and options that a GPU run does, and launch code that does not
fit its kernel fails here.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
PROCESSORS = 132


@dataclass(frozen=True)
class _Driver:
    """As much of a Triton driver as a launch asks before it compiles."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Kernels keep a cache per device, target included: real ones are left alone, and every target has its own.
        return -int(str(self.target.arch).removeprefix("gfx"))

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """One call of attention, of a common size: what Triton specializes on (sizes divisible by 16) is as in models."""

    recipe: str
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    packed: bool = False
    backward: bool = False
    deterministic: bool = False
    saves: bool = False
    """Whether a backward follows."""

    def __str__(self) -> str:
        mask, kind = "causal" if self.causal else "full", "packed" if self.packed else "dense"
        name = (self.recipe, str(self.head_dim), str(self.dtype).removeprefix("torch."), mask, kind)
        direction = ("deterministic", "backward") if self.deterministic else ("backward",)
        return "-".join((*direction, *name) if self.backward else (*("saved",) * self.saves, *name))

    def launch(self) -> None:
        """Everything that one forward, or one backward, launches."""
        from lowbit_attn.kernels.hopper import backward
        from lowbit_attn.ops.hopper import host
        from lowbit_attn.recipes import resolve

        recipe = resolve(self.recipe)
        query, key = (torch.zeros(2, 512, heads, self.head_dim, dtype=self.dtype) for heads in (16, 4))
        options: dict[str, Any] = {"is_causal": True} if self.causal else {}
        if self.packed:
            query, key = query.flatten(0, 1), key.flatten(0, 1)
            cu = torch.tensor([0, 100, 1000], dtype=torch.int32)
            options["cu_seq"] = (cu, cu)
        if not self.backward:
            kernels = host(recipe)
            kernels.run(kernels.prepare(query, key, key, recipe, save=self.saves, **options))
            return
        codes = [torch.zeros(x.shape, dtype=torch.uint8) for x in (query, key, key)]
        scales = [torch.zeros((*x.shape[:-3], x.shape[-2], x.shape[-3]), dtype=torch.uint8) for x in (query, key, key)]
        saved = backward.Saved(*(x for pair in zip(codes, scales, strict=True) for x in pair), scales[0])
        backward.backward(query, None, query, scales[0].float(), saved, recipe, deterministic=self.deterministic, **options)


RECIPES = ("mxfp8", "mxfp8_fast")
MIXED = "nvfp4_fp8"
"""The recipe whose scores are bfloat16 products."""

BLOCK_RECIPES = ("fused_mxfp6", "fused_mxfp8", "mxattention", "mxfp4_ocp")
"""Never causal. fused_mxfp4's kernel is fused_mxfp6's."""

HEAD_DIMS = (64, 128, 256)


def calls(everything: bool) -> Iterator[Call]:
    """A call per recipe and head_dim; everything: also the other dtypes, masks and layouts."""
    for recipe, head_dim in product(RECIPES, HEAD_DIMS):
        yield Call(recipe, head_dim)
    yield from (Call("mxfp8", head_dim, saves=True) for head_dim in HEAD_DIMS[:2])
    for head_dim, deterministic in product((64, 128), (False, True)):
        yield Call("mxfp8", head_dim, backward=True, deterministic=deterministic)
    for recipe in ("fused_mxfp6", "mxattention"):
        yield Call(recipe, 128, causal=False)
    yield from (Call(MIXED, head_dim) for head_dim in HEAD_DIMS)
    if everything:
        yield from (Call(recipe, head_dim, causal=False) for recipe, head_dim in product(BLOCK_RECIPES, HEAD_DIMS))
        for dtype, packed in product((torch.float16, torch.float32), (False, True)):
            yield Call("fused_mxfp4", 128, dtype, False, packed)
        for dtype, packed in product((torch.float16, torch.float32), (False, True)):
            yield Call(MIXED, 128, dtype, not packed, packed)
        for recipe, head_dim, dtype in product(RECIPES, (96, 128), (torch.float16, torch.float32)):
            yield Call(recipe, head_dim, dtype)
        for recipe, causal, packed in product(RECIPES, (False, True), (False, True)):
            yield Call(recipe, 128, causal=causal, packed=packed)
        for head_dim, dtype, deterministic in product((96, 128), (torch.float16, torch.float32), (False, True)):
            yield Call("mxfp8", head_dim, dtype, packed=True, backward=True, deterministic=deterministic)


def caught(run: Callable[[], None], target: GPUTarget = TARGET) -> list[tuple[JITFunction, dict, dict, dict, dict]]:
    """Function, signature, constants, attributes and options of each compilation that `run` asks of Triton for `target`."""
    found = []

    def record(function: JITFunction, key: Any, signature: dict, device: int, constants: dict, options: Any, attributes: dict,
               warmup: bool) -> None:
        found.append((function, signature, constants, attributes, dict(options.__dict__)))

    with ExitStack() as stack:
        before = driver.active if driver._active is not None else None
        driver.set_active(_Driver(target))
        stack.callback(driver.set_active, before)
        stack.enter_context(patch.object(JITFunction, "_do_compile", record))
        stack.enter_context(patch.object(torch.cuda, "device", lambda device: nullcontext()))
        stack.enter_context(patch.object(torch.cuda, "get_device_properties",
                                         lambda device: SimpleNamespace(multi_processor_count=PROCESSORS)))
        run()
    return found


def variants(everything: bool, listed: set[str]) -> tuple[list[tuple], list[str]]:
    """Variants of the attention's launches, each once, and the calls that failed. Modules `listed` say for themselves what to
    compile of theirs."""
    found: dict[str, tuple] = {}
    failed = []
    for call in calls(everything):
        try:
            launches = caught(call.launch)
        except Exception as error:  # launch code that does not fit its kernel is what this is for
            failed.append(f"{call}: {type(error).__name__}: {error}")
            continue
        for function, *rest in launches:
            if function.__module__ not in listed:
                module, kernel = function.__module__.rpartition(".")[2], function.__name__
                name = f"{module}{kernel if kernel.startswith('_') and kernel[1:] != module else ''}-{call}"
                found.setdefault(repr((function.__module__, function.__name__, *rest)), (name, function, *rest))
    return list(found.values()), failed
