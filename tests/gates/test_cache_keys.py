"""Kernels that one process has compiled are found on disk by the next: nothing that differs between processes is in their keys."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton runs on Linux only")

KEYS = """
import importlib, json, pkgutil
import launches
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction
import lowbit_attn.kernels

found = {}
for module in pkgutil.walk_packages(lowbit_attn.kernels.__path__, "lowbit_attn.kernels."):
    for name, function in vars(importlib.import_module(module.name)).items():
        if isinstance(function, JITFunction):
            found[f"{module.name}.{name}"] = function.cache_key
variants, failed = launches.variants(True, set())
assert not failed, failed
for number, (name, function, signature, constants, attributes, _) in enumerate(variants):
    source = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    found[f"{number} {name}"] = source(function, signature, constants, attributes).hash()
print(json.dumps(found))
"""


def keys(seed):
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(folders)}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", KEYS], env=environment, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_two_processes_give_every_kernel_and_launch_the_same_key():
    first, second = keys("1"), keys("2")
    assert len(first) > 250
    assert first == second
