"""The package keeps its allowed-imports table, imports light, and its modules short.

Rooms are the top-level modules and packages of lowbit_attn. Inside `kernels` and `integrations` each folder is a family: it
sees itself and the modules that lie beside the families, never another family.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import lowbit_attn

PACKAGE = Path(lowbit_attn.__file__).parent
ROOT = ""
"""The package's own __init__: the public names."""

ALLOWED = {
    ROOT: {"api", "recipes"},
    "recipes": {"formats"},
    "formats": set(),
    "reference": {"formats", "recipes"},
    "kernels": {"formats", "recipes"},
    "ops": {"reference", "kernels", "recipes", "formats"},
    "api": {"ops", "recipes"},
    "schedules": {"recipes"},
    "integrations": {"api", "schedules", "recipes", "ops", ROOT},
}
UNRESTRICTED = {"cli"}
LAZY = {("ops", "kernels")}
"""Imports that may only stand inside functions."""

TORCH_ONLY = {"recipes", "formats"}
"""Rooms that import nothing but torch, the standard library and what the table allows them."""

FAMILIES = {"kernels", "integrations"}
HEAVY = {"diffusers", "torchtitan", "transformers", "pydantic", "yaml", "rich", "typer", "triton"}
MODULES = sorted(PACKAGE.rglob("*.py"))

every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


class Import(NamedTuple):
    """One imported module by its full dotted name; `lazy` inside a function."""

    module: str
    line: int
    lazy: bool


def dotted_name(path: Path, package: Path = PACKAGE) -> str:
    parts = ("lowbit_attn", *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str, package: Path = PACKAGE) -> bool:
    """Whether lowbit_attn.<...> names a file or folder of the package, rather than something inside a module."""
    path = package.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def _targets(node: ast.AST, path: Path, package: Path) -> list[str]:
    """Full dotted names of the modules that one node imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = dotted_name(path, package).split(".")
            above = here[:len(here) - node.level + (path.stem == "__init__")]
            base = ".".join([*above, *filter(None, [node.module])])
        inner = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name.split(".")[0] == "lowbit_attn" and is_module(name, package) else base for name in inner]
    if isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__"):
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                return [name.value.rstrip(".")]
    return []


def imports_of(path: Path, package: Path = PACKAGE) -> Iterator[Import]:
    """Every import statement of a module, `import_module` calls with a literal name or prefix included."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for name in _targets(node, path, package):
            yield Import(name, node.lineno, lazy)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ROOT


def family_of(module: str, package: Path = PACKAGE) -> str | None:
    """The family that a module of `kernels` or `integrations` belongs to; None beside the families and in other rooms."""
    parts = module.split(".")
    in_family = len(parts) > 2 and parts[1] in FAMILIES and package.joinpath(*parts[1:3]).is_dir()
    return parts[2] if in_family else None


def problem_with(importer: str, target: Import, package: Path = PACKAGE) -> str | None:
    """Why a module may not import another one, or None."""
    room, other = room_of(importer), room_of(target.module)
    if room in UNRESTRICTED:
        return None
    if target.module.split(".")[0] != "lowbit_attn":
        outside = target.module.split(".")[0]
        if room in TORCH_ONLY and importer != "lowbit_attn" and outside != "torch" and outside not in sys.stdlib_module_names:
            return f"{room} imports only torch and the standard library"
        return None
    if room == other:
        own, theirs = family_of(importer, package), family_of(target.module, package)
        return f"{room}.{own} may not see {room}.{theirs}" if own and theirs and own != theirs else None
    if other not in ALLOWED[room]:
        return f"{room or 'lowbit_attn'} may import {', '.join(sorted(filter(None, ALLOWED[room]))) or 'no other room'}"
    if (room, other) in LAZY and not target.lazy:
        return f"{room} imports {other} inside functions only"
    return None


@every_module
def test_a_module_imports_only_what_the_table_allows(path):
    importer = dotted_name(path)
    problems = [f"line {target.line}: {target.module}: {problem}" for target in imports_of(path)
                if (problem := problem_with(importer, target))]
    assert not problems


@every_module
def test_a_module_belongs_to_a_room_of_the_table(path):
    assert room_of(dotted_name(path)) in {*ALLOWED, *UNRESTRICTED}


@every_module
def test_a_module_has_at_most_500_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


@every_module
def test_a_module_has_no_star_import(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    stars = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    assert not stars


def test_importing_the_package_loads_no_framework_no_schedule_reader_and_no_gpu_runtime():
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import lowbit_attn\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))\n"
        "print(torch.cuda.is_initialized())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    loaded, gpu = result.stdout.splitlines()
    assert "lowbit_attn" in loaded.split()
    assert not HEAVY & set(loaded.split())
    assert gpu == "False"


PROBES = [
    # module, source, the problem it must raise (None: allowed)
    ("formats/a.py", "import lowbit_attn.recipes", "formats may import no other room"),
    ("formats/a.py", "from ..recipes import Recipe", "formats may import no other room"),
    ("formats/a.py", "from lowbit_attn import ops", "formats may import no other room"),
    ("formats/a.py", "import lowbit_attn", "formats may import no other room"),
    ("formats/a.py", "import numpy", "formats imports only torch and the standard library"),
    ("formats/a.py", "from . import b\nfrom .b import c\nimport math, torch.nn", None),
    ("formats/__init__.py", "from .a import x\nfrom . import a", None),
    ("recipes.py", "def f():\n    import numpy", "recipes imports only torch and the standard library"),
    ("recipes.py", "from lowbit_attn.formats import E4M3", None),
    ("recipes.py", "from .reference import forward", "recipes may import formats"),
    ("reference/a.py", "from lowbit_attn.ops import x", "reference may import formats, recipes"),
    ("reference/a.py", "import numpy\nfrom lowbit_attn.formats import x", None),
    ("kernels/hopper/a.py", "from ..portable import b", "kernels.hopper may not see kernels.portable"),
    ("kernels/hopper/a.py", "from .b import c\nfrom ..shared import d\nfrom ...formats import e", None),
    ("kernels/hopper/a.py", "from lowbit_attn.reference import x", "kernels may import formats, recipes"),
    ("ops/a.py", "from lowbit_attn.kernels import hopper", "ops imports kernels inside functions only"),
    ("ops/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lowbit_attn.kernels.hopper",
     "ops imports kernels inside functions only"),
    ("ops/a.py", "import importlib\nimportlib.import_module('lowbit_attn.kernels.hopper')",
     "ops imports kernels inside functions only"),
    ("ops/a.py", "def f(name):\n    import importlib\n    importlib.import_module(f'lowbit_attn.kernels.{name}')", None),
    ("ops/a.py", "def f():\n    from lowbit_attn.kernels.hopper import a", None),
    ("ops/a.py", "from lowbit_attn.api import attention", "ops may import formats, kernels, recipes, reference"),
    ("api.py", "from lowbit_attn.formats import E4M3", "api may import ops, recipes"),
    ("api.py", "from lowbit_attn import ops\nfrom lowbit_attn.recipes import resolve", None),
    ("schedules/a.py", "import pydantic\nfrom lowbit_attn.recipes import resolve", None),
    ("schedules/a.py", "from lowbit_attn.api import explain", "schedules may import recipes"),
    ("integrations/torchtitan/a.py", "from lowbit_attn.integrations.diffusers import b",
     "integrations.torchtitan may not see integrations.diffusers"),
    ("integrations/torchtitan/a.py", "from lowbit_attn.reference import x",
     "integrations may import api, ops, recipes, schedules"),
    ("integrations/torchtitan/a.py", "import lowbit_attn.ops\nfrom lowbit_attn import attention\nimport torchtitan", None),
    ("__init__.py", "from .api import attention\nfrom lowbit_attn.recipes import Recipe", None),
    ("__init__.py", "from lowbit_attn import schedules", "lowbit_attn may import api, recipes"),
    ("cli/main.py", "import typer\nfrom lowbit_attn.kernels import hopper", None),
]


@pytest.mark.parametrize(("module", "source", "problem"), PROBES)
def test_the_check_itself_sees_every_way_to_import(tmp_path, module, source, problem):
    package = tmp_path / "lowbit_attn"
    for room in ("formats", "reference", "kernels/hopper", "kernels/portable", "ops", "schedules", "integrations/torchtitan",
                 "integrations/diffusers", "cli"):
        (package / room).mkdir(parents=True)
    for name in ("recipes", "api", "formats/b", "kernels/shared"):
        (package / f"{name}.py").touch()
    path = package / module
    path.write_text(source, encoding="utf-8")
    found = {problem_with(dotted_name(path, package), target, package) for target in imports_of(path, package)}
    assert found - {None} == ({problem} if problem else set())
