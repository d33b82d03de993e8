"""Real text as bytes: Django's documentation and Python sources, from its source archive on PyPI.

One file holds all documents in an order that is always the same, each after a zero byte. It needs no network where it is read.
"""

import hashlib
import random
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

PACKAGE, VERSION = "django", "5.2.8"
SOURCE = f"documentation and Python sources of {PACKAGE} {VERSION} (source archive on PyPI)"
ARCHIVE_SHA256 = "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f"
BOUNDARY = b"\0"
VALIDATION_EVERY = 20
"""One document of so many is held out."""


def make(path: Path) -> None:
    """Download the archive with pip and write its text to `path`."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "--dest", folder,
                        f"{PACKAGE}=={VERSION}"], check=True)
        [archive] = Path(folder).glob("*.tar.gz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != ARCHIVE_SHA256:
            raise SystemExit(f"--make-text: {archive.name} has SHA-256 {found}; accepted: {ARCHIVE_SHA256}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(joined(documents(archive)))


def documents(archive: Path) -> list[bytes]:
    """Documentation and Python files of a source archive, shuffled; translations, empty files and copies left out."""
    with tarfile.open(archive) as files:
        members = sorted((member for member in files.getmembers() if member.isfile() and _wanted(PurePosixPath(member.name))),
                         key=lambda member: member.name)
        contents = [stream.read().replace(BOUNDARY, b"") for member in members if (stream := files.extractfile(member))]
    found = list(dict.fromkeys(content for content in contents if content.strip()))
    random.Random(0).shuffle(found)
    return found


def _wanted(path: PurePosixPath) -> bool:
    return (path.suffix == ".py" and "locale" not in path.parts) or (path.suffix == ".txt" and "docs" in path.parts)


def joined(parts: list[bytes]) -> bytes:
    """Every document after a zero byte."""
    return b"".join(BOUNDARY + part for part in parts)


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, uint8; whole documents on either side."""

    train: Tensor
    validation: Tensor
    sha256: str

    @classmethod
    def read(cls, path: Path, context: int) -> "Text":
        """What `make` wrote, or any other file of documents that follow zero bytes."""
        content = path.read_bytes()
        parts = content.split(BOUNDARY)[1:]
        held_out = joined([part for number, part in enumerate(parts) if number % VALIDATION_EVERY == 0])
        rest = joined([part for number, part in enumerate(parts) if number % VALIDATION_EVERY])
        if min(len(held_out), len(rest)) <= context:
            raise SystemExit(f"--text: {path} has {len(rest)} bytes to train on and {len(held_out)} held out in {len(parts)} "
                             f"documents; accepted: more than {context} of each")
        train, validation = (torch.frombuffer(bytearray(half), dtype=torch.uint8) for half in (rest, held_out))
        return cls(train, validation, hashlib.sha256(content).hexdigest())


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [n, context], int64: the bytes at `starts` and those that follow each."""
    taken = text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()
    return taken[:, :-1], taken[:, 1:]


def training_starts(length: int, steps: int, batch: int, context: int, seed: int) -> Tensor:
    """Where the windows of every step begin, int64 [steps, batch]: a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(length - context, (steps, batch), generator=generator)


def validation_starts(length: int, count: int, context: int) -> Tensor:
    """Evenly spaced windows, int64 [count], the same in every run."""
    return torch.linspace(0, length - context - 1, count, dtype=torch.float64).long()
