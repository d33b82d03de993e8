"""One fingerprint of the kernel sources that the GPU record is about, the same on every machine and checkout."""

import hashlib
from pathlib import Path

import lowbit_attn

KERNELS = Path(lowbit_attn.__file__).parent / "kernels"
GENERATED = {"__pycache__"}
OTHER_HARDWARE = {"cdna4"}
"""Families that no NVIDIA GPU runs: the record says nothing of them, and tests of their own hold their code objects."""


def sources(folder: Path = KERNELS) -> list[Path]:
    """Every file under the folder except what Python generates and other hardware runs, sorted by its path."""
    found = (path for path in folder.rglob("*")
             if path.is_file() and not (GENERATED | OTHER_HARDWARE) & set(path.relative_to(folder).parts))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def fingerprint(folder: Path = KERNELS) -> str:
    """SHA-256 over names and contents; line ends count as LF, so that a Windows checkout agrees."""
    digest = hashlib.sha256()
    for path in sources(folder):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
