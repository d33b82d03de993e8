"""Rows of a measurement with everything needed to repeat them, as JSON and CSV."""

import csv
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lowbit_attn.cli.extras import installed_version

_PACKAGES = ("lowbit-attn", "torch", "triton", "flash-attn-4", "nvidia-cudnn-frontend", "sageattention")


@dataclass(frozen=True)
class Environment:
    """Where and how rows were measured."""

    date: str
    device: str
    versions: dict[str, str | None]
    command: str

    @classmethod
    def current(cls, device: torch.device) -> "Environment":
        """Of this process; versions are None for packages that are not installed."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, "\
            f"{torch.get_num_threads()} threads"
        versions: dict[str, str | None] = {"python": platform.python_version()}
        versions |= {package: installed_version(package) for package in _PACKAGES}
        versions |= {"torch": torch.__version__, "cuda": torch.version.cuda,
                     "cudnn": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None}
        command = shlex.join(["lowbit-attn", *sys.argv[1:]])
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), name, versions, command)


@dataclass(frozen=True)
class Row:
    """One contender on one workload; without a time, `note` says why."""

    workload: str
    shape: str
    contender: str
    scope: str
    milliseconds: float | None = None
    rate: float | None = None
    """TFLOP/s of attention, GB/s of a quantizer."""
    unit: str = ""
    error: float | None = None
    """Relative Frobenius error against exact attention in float32."""
    spread: float | None = None
    """Slowest round over fastest, minus 1."""
    rounds: tuple[float, ...] = ()
    """Median of each round, milliseconds."""
    method: str = ""
    note: str = ""
    baseline: bool = False
    figures: dict[str, float] = field(default_factory=dict)
    """What one kind of measurement alone has, by name with its unit; each gets a column."""

    def ratio_to(self, other: "Row") -> float | None:
        """How many times the other row's rate; None if either was not timed."""
        return None if self.rate is None or other.rate is None else self.rate / other.rate


@dataclass(frozen=True)
class Record:
    """All rows of one command."""

    environment: Environment
    rows: Sequence[Row]

    def workloads(self) -> dict[str, list[Row]]:
        """Rows by shape, in the order they were measured; presets may give two shapes one name."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.shape, []).append(row)
        return found

    def baselines(self) -> list[str]:
        """Contenders that others are compared with, in the order they came."""
        return list(dict.fromkeys(row.contender for row in self.rows if row.baseline))

    def ratios(self, row: Row) -> dict[str, float | None]:
        """How many times each baseline's rate the row has, on the same workload: of the same scope if the baseline has it."""
        others = [other for other in self.workloads()[row.shape] if other.baseline]
        others.sort(key=lambda other: other.scope == row.scope)  # the last of a name counts
        peers = {other.contender: other for other in others}
        return {name: row.ratio_to(peers[name]) if name in peers else None for name in self.baselines()}

    def write(self, stem: Path) -> list[Path]:
        """Write `stem`.json and `stem`.csv."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_suffix(".json"), stem.with_suffix(".csv")]
        rows = [{**asdict(row), "faster_than": self.ratios(row), "environment": asdict(self.environment)} for row in self.rows]
        paths[0].write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        with paths[1].open("w", newline="", encoding="utf-8") as stream:
            names = [part.name for part in fields(Row) if part.name != "figures"]
            figures = list(dict.fromkeys(name for row in self.rows for name in row.figures))
            versions = list(self.environment.versions)
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow([*names, *figures, *(f"x {name}" for name in self.baselines()), "date", "device", *versions, "command"])
            for row in self.rows:
                cells = [_cell(getattr(row, name)) for name in names] + [_cell(row.figures.get(name)) for name in figures]
                ratios = [_cell(value) for value in self.ratios(row).values()]
                versioned = [_cell(self.environment.versions[name]) for name in versions]
                writer.writerow([*cells, *ratios, self.environment.date, self.environment.device, *versioned,
                                 self.environment.command])
        return paths

    @classmethod
    def read(cls, path: Path) -> "Record":
        """What `write` put into the JSON file."""
        loaded = json.loads(path.read_text(encoding="utf-8"))
        names = {part.name for part in fields(Row)}
        rows = []
        for entry in loaded:
            values: dict[str, Any] = {name: value for name, value in entry.items() if name in names}
            rows.append(Row(**values | {"rounds": tuple(entry["rounds"])}))
        return cls(Environment(**loaded[0]["environment"]), rows)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return " ".join(f"{x:.6g}" for x in value) if isinstance(value, tuple) else value
