"""`python -m lowbit_attn.kernels.cdna4.build`: makes the code objects that the wheel ships, with the ziglang wheel.

Writes `prebuilt/<unit>.hsaco` and `prebuilt/record.json`: the hash of sources and flags that they were made from, the compiler,
and the hash of each file. `--check` writes nothing and fails where the sources have moved on. Two runs give the same bytes.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lowbit_attn.kernels.cdna4 import toolchain
from lowbit_attn.kernels.cdna4.toolchain import ARCHITECTURE, COMPILER, SOURCES, UNITS, source_hash

PREBUILT = SOURCES / "prebuilt"
RECORD = PREBUILT / "record.json"


def prebuilt(unit: str) -> Path:
    """The shipped code object of a unit."""
    return PREBUILT / f"{unit}.hsaco"


def read_record() -> dict[str, Any]:
    """What the shipped code objects were made from; empty if there is no record."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def stale() -> str | None:
    """Why the shipped code objects are not those of the sources, or None."""
    record = read_record()
    if record.get("sources") != source_hash():
        return "the sources changed after the code objects were made"
    for unit in UNITS:
        path = prebuilt(unit)
        if not path.is_file() or record["objects"].get(path.name) != _hash(path):
            return f"{path.name} is not the file that was recorded"
    return None


def build(folder: Path) -> dict[str, Any]:
    """Compile every unit into `folder`; the record of what was made."""
    objects = {}
    for unit in UNITS:
        path = toolchain.code_object(unit, folder / f"{unit}.hsaco")
        objects[path.name] = _hash(path)
    return {"sources": source_hash(), "architecture": ARCHITECTURE, "compiler": COMPILER, "objects": objects}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Make the gfx950 code objects of the CDNA4 kernels.")
    parser.add_argument("--check", action="store_true", help="only say whether the shipped ones are up to date")
    if parser.parse_args(arguments).check:
        reason = stale()
        print(reason or "up to date")
        return int(reason is not None)
    PREBUILT.mkdir(exist_ok=True)
    with TemporaryDirectory() as scratch:
        record = build(Path(scratch))
        for name in record["objects"]:
            (PREBUILT / name).write_bytes((Path(scratch) / name).read_bytes())
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(*(f"{name}: {(PREBUILT / name).stat().st_size} bytes" for name in record["objects"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
