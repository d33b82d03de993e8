"""Compile what the portable kernels launch for every architecture, without a GPU, and look at what came out.

    python tests/gates/portable.py [--everything] [--record] [--fresh] [--kernel NAME] [--jobs N] [--json FILE] [ARCHITECTURE ...]

A pair of kernel and architecture fails where the matrix instruction that its mode promises is missing or another one stands in for
it (`tl.dot_scaled` turns into bf16 without a word where tile or warps do not fit), where not every product of a native kernel is
block-scaled, where it spills more than recorded_portable.json
has for it under this Triton, and where it needs more shared memory than the chip gives a program. --record writes the spills of
what was compiled as they are now; do that when a rise is meant, and say why in docs/kernel-log.md.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import compiling  # noqa: E402
import launches  # noqa: E402

from lowbit_attn.kernels.portable.support import has_native_backward  # noqa: E402
from lowbit_attn.kernels.portable.targets import TARGETS  # noqa: E402
from lowbit_attn.recipes import resolve  # noqa: E402

VERSION = ".".join(triton.__version__.split(".")[:2])
RECORDED = HERE / "recorded_portable.json"

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_103", "gfx942", "gfx950")
"""What every run compiles for, one of each kind; --everything adds the others that dispatch offers."""

RECIPES = ("mxfp8", "nvfp4_fp8", "fused_mxfp8", "mxattention", "fused_mxfp6")
"""One of each kind of kernel; `mxfp4_ocp`, `fused_mxfp4` and the options of recipes change constants in them."""

INSTRUCTIONS = {
    "mxf8": r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale", "mxf4": r"tcgen05\.mma\S*kind::mxf4\.block_scale",
    "nvf4": r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale", "tcgen05 bf16": r"tcgen05\.mma\S*kind::f16",
    "wgmma bf16": r"wgmma\.mma_async\S*\.bf16\.bf16", "mma bf16": r"mma\.sync\S*\.bf16\.bf16",
    "mfma scaled": r"v_mfma_scale_f32\w*_f8f6f4", "mfma bf16": r"v_mfma\w*_bf16\w*"}
"""Matrix instructions by what they multiply; everything else is unknown and has no place in these kernels."""

MATRIX = re.compile(r"tcgen05\.mma\.\S+|wgmma\.mma_async\.\S+|mma\.sync\.\S+|\bv_mfma\w+")


def gpu_target(architecture: str) -> GPUTarget:
    """Triton's name of an architecture."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


EMULATED = {"sm_80": "mma bf16", "sm_86": "mma bf16", "sm_89": "mma bf16", "sm_90": "wgmma bf16", "sm_100": "tcgen05 bf16",
            "sm_103": "tcgen05 bf16", "sm_120": "mma bf16", "gfx942": "mfma bf16", "gfx950": "mfma bf16"}


PRODUCTS = {"attention": 2, "query_gradient": 3, "key_gradients": 4}
"""The kernels that multiply matrices, and how many products of theirs are native where their mode is."""

NATIVE_PRODUCT = re.compile(r"\bttng\.tc_gen5_mma_scaled\b|\btt\.dot_scaled\b")
"""Products that the compiler's last tiled form (ttgir) still holds as block-scaled ones."""


def is_native(architecture: str, recipe: str, kernel: str, head_dim: int) -> bool:
    """Whether a kernel's products are native."""
    if kernel == "attention":
        return TARGETS[architecture].is_native(resolve(recipe).effective())
    return kernel in PRODUCTS and has_native_backward(resolve(recipe), architecture, head_dim)


def promised(architecture: str, recipe: str, kernel: str = "attention", head_dim: int = 128) -> set[str]:
    """The matrix instructions of a kernel: nothing else, and all of them."""
    if kernel not in PRODUCTS:
        return set()
    if not is_native(architecture, recipe, kernel, head_dim):
        return {EMULATED[architecture]}
    if architecture.startswith("gfx"):
        return {"mfma scaled"}
    effective = resolve(recipe).effective()
    kinds = {"e2m1": "nvf4" if effective.qk.layout.startswith("nvfp16") else "mxf4", "e4m3": "mxf8"}
    return {kinds[effective.qk.element], kinds[effective.v.element]}


@dataclass(frozen=True)
class Call:
    """One forward call on an architecture, of a common size."""

    architecture: str
    recipe: str
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.architecture}-{self.recipe}-{self.head_dim}-{str(self.dtype).removeprefix('torch.')}"

    def launch(self) -> None:
        """Everything that a forward launches, causal where the recipe allows it, and the backward of a recipe that trains."""
        from lowbit_attn.kernels.portable import attention, backward

        query, key = (torch.zeros(2, 512, heads, self.head_dim, dtype=self.dtype) for heads in (16, 4))
        recipe, target = resolve(self.recipe), TARGETS[self.architecture]
        prepared = attention.prepare(query, key, key, recipe, target=target, is_causal=recipe.causal, save=recipe.trains)
        output, lse = attention.run(prepared)
        if recipe.trains:
            saved = attention.saved_for_backward(prepared) if recipe.saves_codes else (query, lse, key, lse, key, lse)
            backward.backward(output, None, output, lse, saved, recipe, target=target, is_causal=True)


def calls(architectures: tuple[str, ...], everything: bool) -> Iterator[Call]:
    """A call of each kind per architecture at head_dim 128; everything: also other head_dims and input dtypes."""
    for architecture in architectures:
        for recipe in RECIPES:
            yield Call(architecture, recipe, 128)
        if everything:
            for recipe, head_dim in (("mxfp8", 64), ("mxfp8", 256), ("mxattention", 64), ("mxattention", 256), ("fused_mxfp6", 64),
                                     ("fused_mxfp6", 256), ("fused_mxfp4", 128)):
                yield Call(architecture, recipe, head_dim)
            yield Call(architecture, "mxfp8", 96, torch.float32)


@dataclass
class Compiled:
    """What a kernel compiled to for an architecture; `error` instead, if it did not."""

    name: str
    architecture: str
    promised: list[str]
    promised_products: int = 0
    """Native ones."""
    seconds: float = 0.0
    matrix: dict[str, int] = field(default_factory=dict)
    native_products: int = 0
    registers: int = 0
    spilled: int = 0
    """Bytes stored and loaded (NVIDIA), vector registers (AMD)."""
    shared: int = 0
    error: str | None = None


def variants(architectures: tuple[str, ...], everything: bool) -> tuple[list[tuple], list[str]]:
    """(name, call, function, signature, constants, attributes, options) of each different launch, and the calls that failed."""
    found: dict[str, tuple] = {}
    failed = []
    for call in calls(architectures, everything):
        try:
            caught = launches.caught(call.launch, gpu_target(call.architecture))
        except Exception as error:  # launch code that does not fit its kernel is what this is for
            failed.append(f"{call}: {type(error).__name__}: {error}")
            continue
        for number, (function, *rest) in enumerate(caught):
            key = repr((call.architecture, function.__module__, function.__name__, *rest))
            found.setdefault(key, (f"{function.__name__}-{call}-{number}", call, function, *rest))
    return list(found.values()), failed


def compile_variant(variant: tuple) -> Compiled:
    """Compile one launch and read the assembly."""
    name, call, function, signature, constants, attributes, options = variant
    about = (call.architecture, call.recipe, function.__name__, call.head_dim)
    products = PRODUCTS[function.__name__] if is_native(*about) else 0
    result = Compiled(name, call.architecture, sorted(promised(*about)), products)
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    start, log = time.perf_counter(), io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            kernel = triton.compile(ASTSource(function, signature, constants, attributes), target=gpu_target(call.architecture),
                                    options=options)
    except Exception as error:  # any failure of the compiler is a result here
        result.error = f"{type(error).__name__}: {str(error).strip()[-600:]}"
        return result
    result.seconds, result.shared = time.perf_counter() - start, kernel.metadata.shared
    result.native_products = len(NATIVE_PRODUCT.findall(kernel.asm["ttgir"]))
    read(result, kernel.asm.get("ptx") or kernel.asm["amdgcn"], log.getvalue())
    return result


def read(result: Compiled, assembly: str, log: str) -> None:
    """Put the assembly and ptxas's report (`-v`) into figures."""
    for instruction in MATRIX.findall(assembly):
        kind = next((kind for kind, pattern in INSTRUCTIONS.items() if re.match(pattern, instruction)), instruction)
        result.matrix[kind] = result.matrix.get(kind, 0) + 1
    if result.architecture.startswith("gfx"):
        result.registers = max(map(int, re.findall(r"\.vgpr_count:\s+(\d+)", assembly)), default=0)
        # Scalar registers spill into lanes of vector registers, not to memory.
        result.spilled = sum(map(int, re.findall(r"\.vgpr_spill_count:\s+(\d+)", assembly)))
    else:
        result.registers = max(map(int, re.findall(r"Used (\d+) registers", log)), default=0)
        result.spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))


def problems(result: Compiled, accepted: int) -> list[str]:
    """What is wrong with a pair; `accepted` spills are recorded for it."""
    if result.error:
        return [f"does not compile: {result.error}"]
    found = []
    if set(result.matrix) != set(result.promised):
        found.append(f"multiplies by {result.matrix or 'nothing'}, promised: {', '.join(result.promised) or 'nothing'}")
    if result.native_products != result.promised_products:
        found.append(f"{result.native_products} native products, promised: {result.promised_products}")
    if result.spilled > accepted:
        found.append(f"spills {result.spilled}, recorded {accepted}")
    if result.shared > (limit := TARGETS[result.architecture].shared):
        found.append(f"needs {result.shared} bytes of shared memory, {result.architecture} gives {limit}")
    return found


def main() -> int:
    """The command of this file's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE",
                        help=f"of {', '.join(TARGETS)}; by default one of each kind, with --everything all")
    parser.add_argument("--everything", action="store_true", help="other head_dims and dtypes, and every architecture")
    parser.add_argument("--record", action="store_true", help="write the spills into recorded_portable.json")
    parser.add_argument("--fresh", action="store_true", help="compile again, whatever an earlier run found")
    parser.add_argument("--kernel", default="", help="only kernels whose name starts so")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write results and problems to this file")
    options = parser.parse_args()
    if unknown := set(options.architectures) - set(TARGETS):
        parser.error(f"architecture: got {', '.join(sorted(unknown))}; accepted: {', '.join(TARGETS)}")
    chosen = tuple(options.architectures) or (tuple(TARGETS) if options.everything else ARCHITECTURES)
    found, failed = variants(chosen, options.everything)
    found = [x for x in found if x[0].startswith(options.kernel)]
    cached = compiling.cache_file("portable", Path(__file__))
    results = compiling.results_of(found, compile_variant, Compiled, options.jobs, cached, options.fresh)
    by_version: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {}
    if options.record:
        now = by_version.get(VERSION, {}) | {x.name: x.spilled for x in results}
        by_version[VERSION] = {name: spilled for name, spilled in now.items() if spilled}
        RECORDED.write_text(json.dumps(by_version, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    recorded = by_version.get(VERSION, {})
    wrong = [f"{x.name}: {problem}" for x in results for problem in problems(x, recorded.get(x.name, 0))]
    wrong += [f"launch {problem}" for problem in failed]
    for x in results:
        print(f"{x.name:56s} {x.seconds:5.1f} s  registers {x.registers:3d}  spilled {x.spilled:4d}  shared {x.shared:6d}  "
              f"{x.matrix or 'no products'}{f', {x.native_products} native products' if x.native_products else ''}")
    print(f"Triton {triton.__version__}: {len(results)} pairs, {len(wrong)} problems")
    print("\n".join(wrong))
    if options.json:
        report = {"triton": triton.__version__, "problems": wrong, "pairs": [asdict(x) for x in results]}
        options.json.write_text(json.dumps(report), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
