"""What takes part in a measurement: a name, what its time covers, and a way to bind it to inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from lowbit_attn.cli.benchmarks.workloads import Inputs


class Scope(StrEnum):
    """What a time covers."""

    CALL = "whole call"
    KERNEL = "kernel only"
    QUANTIZED = "including quantization"
    BACKWARD = "backward only"
    TRAINING = "training call"


class UnavailableError(Exception):
    """Why a contender does not run here, in words for the table."""


@dataclass(frozen=True)
class Bound:
    """A call ready to be timed, and how to read an output [B, H, S, D] or [T, H, D] from what it returns."""

    run: Callable[[], Any]
    output: Callable[[Any], Tensor]
    note: str = ""
    """What a reader must know to compare the row."""


@dataclass(frozen=True)
class TrainingCall:
    """Two calls ready to be timed: the backward of a forward that was run before, and both together.

    `gradients` reads dQ, dK and dV, in the inputs' shapes, from what either returned. `saved_bytes` is what the forward keeps
    for the backward.
    """

    backward: Callable[[], Any]
    whole: Callable[[], Any]
    gradients: Callable[[Any], tuple[Tensor, ...]]
    saved_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Trainer:
    """What takes part in a measurement of training: `bind` gets inputs that require grad and dO in the query's shape. `scopes`:
    the backward alone, the whole call, or both."""

    name: str
    bind: Callable[[Inputs, Tensor], TrainingCall]
    baseline: bool = False
    scopes: tuple[Scope, ...] = (Scope.BACKWARD, Scope.TRAINING)


@dataclass(frozen=True)
class Contender:
    """`bind` raises UnavailableError where it cannot run; `baseline`: other rows get a ratio to this one."""

    name: str
    scope: Scope
    bind: Callable[[Inputs], Bound]
    baseline: bool = False


def importable(module: str, package: str) -> ModuleType:
    """Import a module of an optional package, or say which package is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UnavailableError(f"{package} is not installed (no module {error.name})") from error
    except Exception as error:  # a broken installation is reported like a missing one, with its reason
        raise UnavailableError(f"{package} cannot be imported: {type(error).__name__}: "
                               f"{str(error).partition(chr(10))[0]}") from error


def first(result: Any) -> Tensor:
    """The output among what a call returned."""
    return result[0] if isinstance(result, tuple) else result
