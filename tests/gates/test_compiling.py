"""Gates compile variants on several processes, in order, survive a compiler that aborts, and keep results."""

import faulthandler
import os
from dataclasses import dataclass

import pytest

pytest.importorskip("triton", reason="Triton runs on Linux only")

import compiling


@dataclass
class Result:
    name: str
    length: int


def compile_one(variant):
    if variant[0] == "bad":
        faulthandler.disable()  # no trace of an abort that is meant
        os.abort()
    return Result(variant[0], len(variant[1]))


def never(variant):
    raise AssertionError(variant)


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_keep_the_order_of_variants(jobs):
    found = [(f"n{i}", "x" * i) for i in range(6)]
    assert compiling.compile_all(found, compile_one, jobs) == [Result(f"n{i}", i) for i in range(6)]


def test_an_abort_is_named():
    with pytest.raises(RuntimeError, match="bad: the compiler aborted"):
        compiling.compile_all([("a", ""), ("bad", ""), ("c", "")], compile_one, 2)


def test_what_was_compiled_is_not_compiled_again(tmp_path):
    found, path = [("a", "1"), ("b", "22")], tmp_path / "kept" / "results.json"
    first = compiling.results_of(found[:1], compile_one, Result, 1, path, fresh=False)
    assert compiling.results_of(found[:1], never, Result, 1, path, fresh=False) == first
    assert compiling.results_of(found, compile_one, Result, 1, path, fresh=False) == [Result("a", 1), Result("b", 2)]
    with pytest.raises(AssertionError):
        compiling.results_of(found[:1], never, Result, 1, path, fresh=True)


def test_other_sources_have_another_file(tmp_path):
    source = tmp_path / "gate.py"
    source.write_text("1")
    before = compiling.cache_file("kind", source)
    source.write_text("2")
    assert compiling.cache_file("kind", source) != before
