"""What Fused-Softmax's tricks buy in the Hopper kernel of the recipes with blocks of 32, each alone and together: kernel only.

    python benchmarks/fused_ablation.py [--recipe fused_mxfp6] [--seq 1024 ... 131072] [--rounds 3] [--out DIR]
                                        [--variants NAME ...]

Full attention, head_dim 128, bf16 in and out, normal inputs; operands are prepared beforehand. The tricks:

    F  frozen maximum: after the first tile the maximum stays, unless a tile exceeds it by 3 doublings (roll-back)
    R  row sum as a product of the quantized weights with ones, instead of float32 additions
    U  exponentials by Schraudolph in packed 16-bit words (U16), instead of ex2 in float32

Only `conventional`, `R` and `FRU` are what the package runs; `FRU` is the recipe itself. The others put functions of this file in
the place of the kernel's. They do the work that decides the time, and their errors are printed beside the others', but nothing is
promised of their numbers: none has been held to the reference, and broken inputs need not give NaN.

`conventional_always` multiplies O at every tile, where the kernel skips factors of 1. `FRU_two` tells what the third warpgroup is
worth, for which only U leaves the registers. `FRU_unchecked` has neither the roll-back nor the comparison that finds out about it:
wrong where a later tile has much larger scores.

How many query rows a program takes follows from a variant's warpgroups, and so does how full the last turn of the multiprocessors
is: `fill`, printed by rows. Short sequences differ by it, which is no trick's doing.
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

from lowbit_attn.cli.benchmarks.timing import Timing, interleaved
from lowbit_attn.kernels.hopper import block_attention, fused, inline
from lowbit_attn.kernels.hopper.attention import Config, processors
from lowbit_attn.kernels.hopper.blocks import SEED, SEED_LOG2, SMALLEST, block_tops, by_row, exponentials, rounded
from lowbit_attn.recipes import Recipe, resolve

DIM = 128
SEQUENCES = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
RECIPES = ("fused_mxfp6", "fused_mxfp4")
CONVENTIONAL = "maximum=online,max_threshold=0,exponential=exact,row_sum="
CHECKED = 8192
"""The longest sequence whose outputs are compared with exact attention."""

BOUND = 2.0
"""Percent that the roll-back check may cost where nothing rolls back."""

HEADROOM: gl.constexpr = gl.constexpr(8.0 - SEED_LOG2.value)
"""Doublings between a weight of 1 in the first tile and the top of the operands, as the kernel has under a frozen maximum."""

UNIT: gl.constexpr = gl.constexpr(SEED.value + 8.0 * HEADROOM.value)
"""The E4M3 code of a weight of 2^level: 2^8, as the kernel has under an online maximum."""

ROLLBACK: gl.constexpr = gl.constexpr(-0.0931)
"""log2(240 / 256): weights above 240 as operands roll back, as in the kernel."""

# Functions for `fused.online`: slope turns scores into doublings (U: into E4M3 codes, 8 a doubling), and 2^level is the weight
# whose operand is 2^8. All return rounded words, level, the factor on what was accumulated before, and lanes' sums of weights.


@gluon.jit
def level_of(top, level, FIRST: gl.constexpr, FROZEN: gl.constexpr):
    """The next level, for the largest score of the rows in doublings, and the factor on what was accumulated before."""
    if FROZEN:
        if FIRST:
            new = top + HEADROOM
            factor = new
        else:
            above = top - level
            rise = gl.where(above > ROLLBACK, gl.ceil(above + HEADROOM), 0.0)
            new = level + rise
            factor = gl.exp2(-rise)
    elif FIRST:
        new = top
        factor = new
    else:
        new = gl.maximum(level, top)
        factor = gl.exp2(level - new)
    return new, factor


@gluon.jit
def exact_frozen(words, slope, level, FIRST: gl.constexpr, MASKED: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr,
                 P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr):
    """F: exact exponentials relative to a frozen maximum."""
    tops = inline.lower_half(block_tops(words))
    new, factor = level_of(gl.max(tops * slope, 1), level, FIRST, True)
    even = exponentials(inline.lower_half(words), slope[:, None, :], by_row(new), MASKED)
    odd = exponentials(inline.upper_half(words), slope[:, None, :], by_row(new), MASKED)
    largest = exponentials(tops, slope, new[:, None], MASKED)
    patterns = rounded(inline.pair(even, odd), inline.pair(largest, largest) & 0xFFFF, False, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)
    return patterns, new, factor, gl.sum(even + odd, 1)


@gluon.jit
def short_sums(patterns):
    """Words of short patterns [64, 16, 4] -> lanes' sums of their values, float32 [64, 4]. A pattern as the upper half of a float32
    is 2^-112 of its value: one instruction and one addition each."""
    even = (patterns << 16).to(gl.float32, bitcast=True)
    odd = (patterns & -65536).to(gl.float32, bitcast=True)
    return gl.sum(even + odd, 1) * 2.0**112


@gluon.jit
def u16(words, slope, level, FIRST: gl.constexpr, FROZEN: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr,
        P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr):
    """Schraudolph's exponentials in packed words, as `blocks.frozen` has them, relative to either maximum."""
    slope = gl.maximum(slope, SMALLEST)
    tops = block_tops(words)
    new, factor = level_of(gl.max(inline.lower_half(tops) * slope, 1) * 0.125, level, FIRST, FROZEN)
    slopes = inline.twice(slope)
    offsets, rests = inline.offset_pairs(UNIT - new * 8.0)
    patterns = inline.short_patterns(words, slopes[:, None, :], by_row(offsets), by_row(rests))
    largest = (inline.short_patterns(tops, slopes, offsets[:, None], rests[:, None]) & 0xFFFF) << 3
    return rounded(patterns, largest, True, P_KIND, P_BUMP, P_MAGIC, P_LOWEST), new, factor, short_sums(patterns)


@gluon.jit
def u16_online(words, slope, level, FIRST: gl.constexpr, MASKED: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr,
               P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr):
    """U: relative to the largest score so far."""
    return u16(words, slope, level, FIRST, False, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)


@gluon.jit
def u16_frozen(words, slope, level, FIRST: gl.constexpr, MASKED: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr,
               P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr):
    """FU: relative to a frozen maximum."""
    return u16(words, slope, level, FIRST, True, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)


@gluon.jit
def unchecked(words, slope, offset, pair, rest, FIRST: gl.constexpr, P_KIND: gl.constexpr, P_BUMP: gl.constexpr,
              P_MAGIC: gl.constexpr, P_LOWEST: gl.constexpr):
    """For `fused.frozen`: the same after the first tile, but nothing is compared and nothing rises. Blocks' tops stay: they are P's
    scales."""
    slope = gl.maximum(slope, SMALLEST)
    tops = block_tops(words)
    if FIRST:
        offset = (SEED - gl.max(inline.lower_half(tops) * slope, 1))[:, None] + gl.zeros_like(slope)
        pair, rest = inline.offset_pairs(offset)
    slopes = inline.twice(slope)
    patterns = inline.short_patterns(words, slopes[:, None, :], pair[:, None, :], rest[:, None, :])
    largest = (inline.short_patterns(tops, slopes, pair, rest) & 0xFFFF) << 3
    patterns = rounded(patterns, largest, True, P_KIND, P_BUMP, P_MAGIC, P_LOWEST)
    return patterns, offset, pair, rest, gl.full_like(offset, 1.0)


@gluon.jit
def rescale_never(accumulator, factor, D: gl.constexpr):
    """For `fused.rescale_lanes`: every factor is 1."""
    return accumulator


@gluon.jit
def rescale_always(accumulator, factor, D: gl.constexpr):
    """For `fused.rescale`: no factor is looked at."""
    return accumulator * gl.convert_layout(factor, gl.SliceLayout(1, accumulator.type.layout))[:, None]


TWO, THREE = block_attention.ONLINE[DIM], block_attention.FROZEN[DIM]
"""Two warpgroups with many registers, as the package runs an online maximum, and three with few, as it runs a frozen one."""


@dataclass(frozen=True)
class Variant:
    """A way to run the kernel: its recipe's options, its configuration, and what stands in for the kernel's functions."""

    title: str
    options: str
    config: Config
    replaced: dict[str, object] = field(default_factory=dict)
    codes: bool = False
    """Whether scores are scaled to E4M3 codes, 8 a doubling, although the recipe's maximum is online."""


VARIANTS = {
    "conventional": Variant("online maximum, exact exponentials, fp32 sums", f"{CONVENTIONAL}exact", TWO),
    "conventional_always": Variant("the same, O rescaled at every tile", f"{CONVENTIONAL}exact", TWO, {"rescale": rescale_always}),
    "R": Variant("row sum as a product", f"{CONVENTIONAL}quantized", TWO),
    "F": Variant("frozen maximum", f"{CONVENTIONAL}exact", TWO, {"online": exact_frozen}),
    "U": Variant("U16 exponentials", f"{CONVENTIONAL}exact", THREE, {"online": u16_online}, True),
    "FR": Variant("frozen maximum, product", f"{CONVENTIONAL}quantized", TWO, {"online": exact_frozen}),
    "RU": Variant("product, U16", f"{CONVENTIONAL}quantized", THREE, {"online": u16_online}, True),
    "FU": Variant("frozen maximum, U16", f"{CONVENTIONAL}exact", THREE, {"online": u16_frozen}, True),
    "FRU": Variant("all: the recipe", "", THREE),
    "FRU_two": Variant("all, two warpgroups as conventional has", "", TWO),
    "FRU_unchecked": Variant("all, no roll-back check", "", THREE, {"frozen": unchecked, "rescale_lanes": rescale_never}),
}


def rebuilt(name: str, replaced: dict[str, object]) -> ModuleType:
    """A copy of the kernel's module with some functions replaced. Its functions are new ones, which have not been compiled: Triton
    refuses compiled ones whose globals have changed."""
    spec = importlib.util.spec_from_file_location(f"fused_{name}", fused.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if unknown := set(replaced) - set(vars(module)):
        raise AttributeError(f"{fused.__name__} has no {', '.join(sorted(unknown))}")
    vars(module).update(replaced)
    return module


@dataclass(frozen=True)
class Built:
    """A variant with its kernel, for one recipe."""

    name: str
    variant: Variant
    recipe: Recipe
    module: ModuleType

    @contextmanager
    def served(self) -> Iterator[None]:
        """The host code runs this kernel in this configuration."""
        with patch.object(block_attention, "fused", self.module), \
                patch.object(block_attention, "config_of", lambda recipe, head_dim: self.variant.config):
            yield

    def prepare(self, query: Tensor, key: Tensor, value: Tensor) -> block_attention.Prepared:
        """Tiled and quantized operands."""
        with self.served():
            prepared = block_attention.prepare(query, key, value, self.recipe)
        return replace(prepared, factor=prepared.factor * 8.0) if self.variant.codes else prepared

    def run(self, prepared: block_attention.Prepared) -> Tensor:
        """The output of one launch."""
        with self.served():
            return block_attention.run(prepared)[0]


def build(names: list[str], recipe: str) -> dict[str, Built]:
    """Variants of a recipe by name."""
    found = {}
    for name in names:
        variant = VARIANTS[name]
        module = rebuilt(name, variant.replaced) if variant.replaced else fused
        found[name] = Built(name, variant, resolve(f"{recipe}:{variant.options}" if variant.options else recipe), module)
    return found


def heads_of(sequence: int) -> int:
    """24 up to 32k; above fewer, with which 132 multiprocessors are equally full whether a program takes 128 rows or 192."""
    return 24 if sequence <= 32768 else max(1, 3 * 131072 // sequence)


def fill_of(sequence: int, heads: int, rows: int, programs: int) -> float:
    """Work over what the multiprocessors have turns for."""
    work = -(-sequence // rows) * heads
    return work / (-(-work // programs) * programs)


def inputs(sequence: int, heads: int, device: torch.device) -> list[Tensor]:
    """Normal query, key and value [1, S, H, D]."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(1, sequence, heads, DIM, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3)]


@dataclass(frozen=True)
class Point:
    """One variant at one length. The error against exact attention is of the whole pipeline, quantized Q, K and V included."""

    sequence: int
    heads: int
    variant: str
    milliseconds: float
    spread: float
    tflops: float
    speedup: float | None
    """Over `conventional`, if that was timed."""
    fill: float
    error_percent: float | None
    method: str


def measure(variants: dict[str, Built], sequence: int, rounds: int, device: torch.device) -> list[Point]:
    """Time variants in turn at one length."""
    heads = heads_of(sequence)
    tensors = inputs(sequence, heads, device)
    prepared = {name: built.prepare(*tensors) for name, built in variants.items()}
    errors = errors_of(variants, prepared, tensors) if sequence <= CHECKED else {}

    def launch(name: str) -> Callable[[], Tensor]:
        return lambda: variants[name].run(prepared[name])

    times: dict[str, Timing] = interleaved({name: launch(name) for name in variants}, device, rounds)
    base = times["conventional"].milliseconds if "conventional" in times else None
    points = []
    for name, timing in times.items():
        milliseconds, rows = timing.milliseconds, 64 * variants[name].variant.config.warpgroups
        points.append(Point(sequence, heads, name, milliseconds, timing.spread,
                            4e-9 * sequence**2 * DIM * heads / milliseconds, base / milliseconds if base else None,
                            fill_of(sequence, heads, rows, processors(device)), errors.get(name), timing.method))
    return points


def errors_of(variants: dict[str, Built], prepared: dict[str, block_attention.Prepared], tensors: list[Tensor]) -> dict[str, float]:
    """Relative Frobenius errors in percent against exact attention."""
    from fused_softmax import compare, exact

    wanted = exact(*(x.transpose(1, 2) for x in tensors))
    return {name: compare(built.run(prepared[name]).transpose(1, 2), wanted)[0] for name, built in variants.items()}


def check_cost(points: list[Point]) -> dict[int, float]:
    """Percent that the roll-back check costs, by length."""
    times = {(point.sequence, point.variant): point.milliseconds for point in points}
    return {sequence: 100 * (milliseconds / times[sequence, "FRU_unchecked"] - 1)
            for (sequence, name), milliseconds in times.items() if name == "FRU" and (sequence, "FRU_unchecked") in times}


@dataclass(frozen=True)
class Compiling:
    """Stands in for a kernel: launches compile it, and that is all."""

    kernel: JITFunction

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self.kernel.warmup, grid=grid)


def compile_all(variants: dict[str, Built], prepared: dict[str, block_attention.Prepared]) -> None:
    """Compile all kernels side by side: one after the other they would take as long as everything else."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool):
        for name, built in variants.items():
            with patch.object(built.module, "attention", Compiling(built.module.attention)):
                built.run(prepared[name])


def table(points: list[Point], names: list[str]) -> str:
    """Speedups over the conventional softmax by length, its TFLOP/s, and the check's cost."""
    width = max(map(len, names)) + 1
    sequences = sorted({point.sequence for point in points})
    by = {(point.sequence, point.variant): point for point in points}

    def row(title: str, cells: list[str]) -> str:
        return f"{title:<{width}}" + "".join(f"{cell:>9}" for cell in cells)

    def lines_of(show: Callable[[Point], str]) -> list[str]:
        return [row(name, [show(by[sequence, name]) for sequence in sequences]) for name in names]

    blocks = {64 * VARIANTS[name].config.warpgroups: name for name in names}
    head = row("", [f"{sequence // 1024}k" if sequence % 1024 == 0 else str(sequence) for sequence in sequences])
    lines = ["TFLOP/s", head, *lines_of(lambda point: f"{point.tflops:.0f}")]
    if "conventional" in names:
        lines += ["", "times as fast as conventional", head, *lines_of(lambda point: f"{point.speedup:.3f}")]
    lines += ["", "error against exact attention, %", head,
              *lines_of(lambda point: "-" if point.error_percent is None else f"{point.error_percent:.2f}")]
    lines += ["", "fill of the last turn", head,
              *(row(f"{count} rows", [f"{by[sequence, name].fill:.3f}" for sequence in sequences])
                for count, name in sorted(blocks.items()))]
    if costs := check_cost(points):
        lines += ["", f"cost of the roll-back check, % (bound {BOUND:g})", head,
                  row("", [f"{costs[sequence]:+.2f}" for sequence in sequences])]
    if other := {point.method for point in points} - {"graph replays"}:
        lines += ["", *sorted(other)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    parser.add_argument("--seq", type=int, nargs="+", default=list(SEQUENCES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME",
                        help=", ".join(VARIANTS))
    parser.add_argument("--out", type=Path, help="folder for fused_ablation-RECIPE.json")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("needs a Hopper GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cuda.matmul.allow_tf32 = False
    variants = build(options.variants, options.recipe)
    gpu = torch.cuda.get_device_name(device)
    print(f"{options.recipe}, {gpu}, torch {torch.__version__}, Triton {triton.__version__}")
    for built in variants.values():
        config = built.variant.config
        print(f"{built.name}: {built.variant.title}; {config.warpgroups} warpgroups of {config.registers} registers, "
              f"{config.stages} stages", flush=True)
    start, tensors = time.perf_counter(), inputs(1024, 24, device)
    compile_all(variants, {name: built.prepare(*tensors) for name, built in variants.items()})
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    points: list[Point] = []
    for sequence in sorted(options.seq):
        found = measure(variants, sequence, options.rounds, device)
        points += found
        print(f"{sequence} tokens, {found[0].heads} heads: "
              + ", ".join(f"{point.variant} {point.milliseconds:.4f} ms" for point in found), flush=True)
        if options.out:  # after every length: what was measured stays, whatever ends the run
            write(options.out / f"fused_ablation-{options.recipe}.json", gpu, options.recipe, variants, points)
    print("\n" + table(points, options.variants))
    return 0


def write(path: Path, device: str, recipe: str, variants: dict[str, Built], points: list[Point]) -> None:
    """Points and what they are of, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    configurations = {name: {"title": built.variant.title, "recipe": built.recipe.canonical, **asdict(built.variant.config)}
                      for name, built in variants.items()}
    result = {"recipe": recipe, "head_dim": DIM, "device": device, "torch": torch.__version__, "triton": triton.__version__,
              "variants": configurations, "points": [asdict(point) for point in points], "check_cost_percent": check_cost(points)}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    raise SystemExit(main())
