"""What the gates share: compiling many variants on all cores, and keeping what these very sources and this compiler gave."""

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from kernel_sources import fingerprint

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

_compile: Callable[[Any], Any]
_shared: Sequence[Any] = ()


def _compile_numbered(number: int) -> Any:
    return _compile(_shared[number])


def compile_all(found: Sequence[Any], compile_one: Callable[[Any], Any], jobs: int) -> list[Any]:
    """`compile_one` of each variant; RuntimeError names one whose process the compiler aborts.

    Functions made by a decorator do not pickle: children inherit variants and imported kernels, and find them by number.
    """
    global _compile, _shared
    _compile, _shared = compile_one, found
    if jobs == 1 or len(found) < 2:
        return [compile_one(variant) for variant in found]
    results: dict[int, Any] = {}
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, fork) as pool:
        for number, future in enumerate([pool.submit(_compile_numbered, number) for number in range(len(found))]):
            if not isinstance(future.exception(), BrokenProcessPool):
                results[number] = future.result()
    for number in set(range(len(found))) - set(results):  # an abort ends the other processes too
        with ProcessPoolExecutor(1, fork) as pool:
            try:
                results[number] = pool.submit(_compile_numbered, number).result()
            except BrokenProcessPool:
                raise RuntimeError(f"{found[number][0]}: the compiler aborted") from None
    return [results[number] for number in range(len(found))]


def cache_file(kind: str, *sources: Path) -> Path:
    """Where the results of one gate are kept, for these kernels, gate sources and compiler."""
    package = ROOT / "lowbit_attn"
    digest = hashlib.sha256("".join((fingerprint(), fingerprint(package / "formats"),
                                     hashlib.sha256((package / "recipes.py").read_bytes()).hexdigest())).encode())
    for source in (*sources, Path(__file__), HERE / "launches.py"):
        digest.update(source.read_bytes())
    return ROOT / "build" / "gates" / f"{kind}-triton-{triton.__version__}-{digest.hexdigest()[:16]}.json"


def results_of(found: Sequence[Any], compile_one: Callable[[Any], Any], kind: type, jobs: int, path: Path,
               fresh: bool) -> list[Any]:
    """Results, dataclasses of `kind`, of variants whose first item is the result's name: kept in `path`, or compiled now."""
    known: dict[str, Any] = {}
    if path.is_file() and not fresh:
        known = {entry["name"]: kind(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))}
    known |= {x.name: x for x in compile_all([x for x in found if x[0] not in known], compile_one, jobs)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(x) for x in known.values()]), encoding="utf-8")
    return [known[name] for name, *_ in found]
