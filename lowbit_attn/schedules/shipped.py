"""The configuration files that come with the package, `configs/` of the repository."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# Inside the package `configs` is a link to the repository's folder, and a copy of it in a wheel; the second place is for a
# checkout on a file system without links.
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def folder() -> Path:
    """Where the shipped files are."""
    return next(path for path in _FOLDERS if path.is_dir())


def schedule_names() -> list[str]:
    """Names of the shipped schedules."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def find_schedule(name: str | Path) -> Path:
    """A path, or the shipped schedule of that name if there is no such file."""
    path = Path(name)
    if str(name) in schedule_names() and not path.exists():
        return folder() / f"{name}.yaml"
    return path
