"""Compile every Hopper kernel variant for sm_90a, without a GPU, and look at what came out.

    python tests/gates/compile_kernels.py [--everything] [--record [--accept-spills]] [--fresh] [--jobs N] [--json FILE] [NAME ...]

A variant fails on register spills, on wgmma instructions that ptxas serialises, on matrix instructions other than the FP8 ones
(MIXED: and bfloat16 ones), and on more instructions in one of its main loops (innermost ones over matrix instructions; without
any: in the whole kernel) than recorded.json has for this Triton version. --record writes the figures as they are now into
recorded.json; do that when a rise is meant, and say why in docs/kernel-log.md. Spills can be accepted too, by --accept-spills;
they then stand in recorded.json, those of main loops apart, may not grow, and docs/kernel-log.md says why they stay. Names are
prefixes of variants; by default all of them are compiled.

What is compiled: what attention launches (launches.py), and what a kernel module lists: `variants()` yields (name, jit function,
signature, constants, attributes, options), the arguments of Triton's ASTSource and compile. With a parameter,
`variants(everything)`, it lists a few that stand for all by default, and all of them under --everything (`make test-full`). A
module that lists variants lists all that it wants compiled.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

import compiling  # noqa: E402
import launches  # noqa: E402
from sass import Program  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
VERSION = ".".join(triton.__version__.split(".")[:2])
RECORDED = HERE / "recorded.json"
MATRIX = ("HMMA", "IMMA", "DMMA", "BMMA", "HGMMA", "IGMMA", "BGMMA", "QGMMA")
FP8, BF16 = "QGMMA", "HGMMA"
MIXED = "nvfp4-"
"""How the names begin of variants that multiply in bfloat16 too: numbers that E4M3 does not hold (`kernels.hopper.nvfp4`)."""
SERIALISED = re.compile(r"C751[0-7].*")

Figures = dict[str, Any]
"""Of a variant in recorded.json: "instructions" of each main loop, the largest first; the number of products; accepted bytes
"spilled" and instructions "loop_spills" in main loops, if any."""

Variant = tuple[str, JITFunction, dict[str, str], dict[str, Any], dict[tuple[int, ...], list], dict[str, Any]]


@dataclass
class Compiled:
    """What a variant compiled to; `error` instead, if it did not."""

    name: str
    seconds: float = 0.0
    registers: int = 0
    spilled: int = 0
    """Bytes stored and loaded."""
    loop_spills: int = 0
    """Spill instructions (local loads and stores) inside main loops."""
    warnings: list[str] = field(default_factory=list)
    matrix: dict[str, int] = field(default_factory=dict)
    """Matrix instructions by opcode, in the whole kernel."""
    loops: list[int] = field(default_factory=list)
    """Instructions of each main loop: an innermost one over matrix instructions."""
    total: int = 0
    error: str | None = None

    @property
    def counted(self) -> Figures:
        """The figures that recorded.json holds."""
        figures = {"instructions": self.loops or [self.total], FP8: self.matrix.get(FP8, 0), "spilled": self.spilled,
                   "loop_spills": self.loop_spills}
        return figures | ({BF16: self.matrix[BF16]} if BF16 in self.matrix and self.name.startswith(MIXED) else {})


def kernel_modules() -> list[ModuleType]:
    """The shared tiling and every module of lowbit_attn.kernels.hopper, imported."""
    try:
        package = importlib.import_module("lowbit_attn.kernels.hopper")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("lowbit_attn.kernels"):
            raise
        return []
    names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [importlib.import_module(name) for name in ("lowbit_attn.kernels.tiling", *names)]


def variants(modules: list[ModuleType], everything: bool = False) -> tuple[list[Variant], list[str]]:
    """What to compile, by unique names, and what went wrong on the way to it."""
    found: list[Variant] = []
    failed: list[str] = []
    listing = {module.__name__: module for module in modules if hasattr(module, "variants")}
    for module in listing.values():
        found += module.variants(everything) if inspect.signature(module.variants).parameters else module.variants()
    if any(module.__name__.endswith(".attention") for module in modules):
        launched, failed = launches.variants(everything, set(listing))
        found += launched
    names = [name for name, *_ in found]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"variants: two are named {', '.join(sorted(doubled))}")
    return found, failed


def uncovered(modules: list[ModuleType], found: list[Variant]) -> Iterator[str]:
    """Modules with device functions of which no variant is compiled, and that serve no module of which one is."""
    def device_functions(module: ModuleType) -> set[int]:
        return {id(x) for x in vars(module).values() if isinstance(x, JITFunction)}

    names = {variant[1].__module__ for variant in found}
    compiled = [module for module in modules if module.__name__ in names]
    served = set().union(*(device_functions(module) for module in compiled)) if compiled else set()
    named = {id(x) for module in compiled for x in vars(module).values() if isinstance(x, ModuleType)}
    for module in modules:
        own = {id(x) for x in vars(module).values() if isinstance(x, JITFunction) and x.__module__ == module.__name__}
        if own and module not in compiled and not own & served and id(module) not in named:
            yield module.__name__


def compile_variant(variant: Variant) -> Compiled:
    """Compile one variant and read ptxas's report and the SASS."""
    name, function, signature, constants, attributes, options = variant
    source = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    knobs.compilation.always_compile = True  # a cached kernel has no report
    knobs.nvidia.dump_ptxas_log = True
    start, log = time.perf_counter(), io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            kernel = triton.compile(source(function, signature, constants, attributes), target=launches.TARGET, options=options)
    except Exception as error:  # any failure of the compiler is a result here
        return Compiled(name, time.perf_counter() - start, error=f"{type(error).__name__}: {str(error).strip()[-600:]}")
    program = Program(disassemble(kernel.asm["cubin"]))
    return read(name, log.getvalue(), program, time.perf_counter() - start)


def read(name: str, log: str, program: Program, seconds: float = 0.0) -> Compiled:
    """Put ptxas's report (`-v`) and the SASS into figures."""
    opcodes, loops = program.opcodes, program.main_loops(FP8)
    registers = re.search(r"Used (\d+) registers", log)
    return Compiled(name, seconds, int(registers[1]) if registers else 0,
                    sum(int(count) for count in re.findall(r"(\d+) bytes spill", log)), sum(x["LDL"] + x["STL"] for x in loops),
                    sorted({match.strip() for match in SERIALISED.findall(log)}),
                    {opcode: opcodes[opcode] for opcode in MATRIX if opcodes[opcode]},
                    [loop.total() for loop in loops], opcodes.total())


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout


def problems(compiled: Compiled, recorded: Figures | None) -> list[str]:
    """What is wrong with a variant; without recorded figures only what is wrong by itself."""
    if compiled.error:
        return [f"does not compile: {compiled.error}"]
    found = [f"ptxas: {warning}" for warning in compiled.warnings]
    accepted = (recorded or {}).get("loop_spills", 0)
    if compiled.loop_spills > accepted:
        found.append(f"{compiled.loop_spills} spill instructions in main loops" + (f", recorded {accepted}" if accepted else ""))
    accepted = (recorded or {}).get("spilled", 0)
    if compiled.spilled > accepted:
        found.append(f"spills {compiled.spilled} bytes of registers" + (f", recorded {accepted}" if accepted else ""))
    meant = (FP8, BF16) if compiled.name.startswith(MIXED) else (FP8,)
    found += [f"{count} {opcode} where FP8 ({FP8}) is meant" for opcode, count in compiled.matrix.items() if opcode not in meant]
    if recorded:
        now = compiled.counted
        here, there = now["instructions"], recorded["instructions"]
        if len(here) != len(there) or any(count > limit for count, limit in zip(here, there, strict=True)):
            found.append(f"{here} instructions in the main loops, recorded {there}")
        for opcode in (FP8, BF16):
            if now.get(opcode, 0) != recorded.get(opcode, 0):
                found.append(f"{now.get(opcode, 0)} {opcode}, recorded {recorded.get(opcode, 0)}")
    return found


def judge(results: list[Compiled], recorded: dict[str, Figures] | None, everything: bool = True) -> list[str]:
    """Every problem as one line. `recorded` holds this Triton version's figures by variant, None if it has none; `everything`:
    whether no variant was left out."""
    lines = [f"{result.name}: {problem}" for result in results for problem in problems(result, (recorded or {}).get(result.name))]
    if recorded is not None:
        names = {result.name for result in results}
        lines += [f"{name}: no figures in recorded.json" for name in sorted(names - set(recorded))]
        lines += [f"{name}: in recorded.json, but no kernel lists it" for name in sorted(set(recorded) - names) if everything]
    return lines


def as_text(by_version: dict[str, dict[str, Figures]]) -> str:
    """recorded.json with one variant a line, so that a change shows as one."""
    versions = []
    for version, variants in sorted(by_version.items()):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in variants.items())
        versions.append(f" {json.dumps(version)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(versions) + "\n}\n"


def main() -> int:
    """The command of this file's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--everything", action="store_true", help="also the variants that modules leave out by default")
    parser.add_argument("--record", action="store_true", help="write the figures into recorded.json")
    parser.add_argument("--accept-spills", action="store_true", help="with --record: spills may stay as they are")
    parser.add_argument("--fresh", action="store_true", help="compile again, whatever an earlier run found")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write results and problems to this file")
    options = parser.parse_args()
    if options.record and options.names:
        parser.error("--record: takes all variants, not some by name")
    everything = options.everything or options.record
    modules = kernel_modules()
    known, failed = variants(modules, everything)
    found = [x for x in known if not options.names or x[0].startswith(tuple(options.names))]
    cached = compiling.cache_file("hopper", Path(__file__), HERE / "sass.py")
    results = compiling.results_of(found, compile_variant, Compiled, options.jobs, cached, options.fresh)
    by_version = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {}
    if options.record:
        kept = {"instructions", FP8, BF16, *(["spilled", "loop_spills"] if options.accept_spills else [])}
        by_version[VERSION] = {x.name: {key: value for key, value in x.counted.items() if key in kept and (value or key == FP8)}
                               for x in sorted(results, key=lambda result: result.name)}
        RECORDED.write_text(as_text(by_version), encoding="utf-8")
    recorded = by_version.get(VERSION)
    wrong = judge(results, recorded, everything and not options.names)
    wrong += [f"launch {problem}" for problem in failed]
    wrong += [f"{module}: has device functions that no variant compiles" for module in uncovered(modules, known)]
    for x in results:
        print(f"{x.name:48s} {x.seconds:6.1f} s  registers {x.registers:3d}  total {x.total:6d}  "
              f"{f'main loops {x.loops} {x.matrix}' if x.matrix else 'no products'}")
    print(f"Triton {triton.__version__}: {len(results)} variants, {len(wrong)} problems"
          + ("" if recorded is not None else f"; recorded.json has no figures for Triton {VERSION}"))
    print("\n".join(wrong))
    if options.json:
        options.json.write_text(json.dumps({"triton": triton.__version__, "recorded": recorded is not None, "problems": wrong,
                                            "results": [asdict(result) for result in results]}), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
