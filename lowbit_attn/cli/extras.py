"""Optional dependencies: which are missing, and the pip command that brings them."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

EXTRAS: dict[str, tuple[str, ...]] = {
    "torchtitan": ("torchtitan", "datasets", "torchdata", "tokenizers"),
    "diffusers": ("diffusers", "transformers"),
    "video": ("av",),
    "demo": ("matplotlib", "torchmetrics"),
}
"""Packages by the extra of `lowbit-attn` that installs them; `demo` includes the other extras."""


class MissingExtraError(ImportError):
    """Packages of an extra are not installed; says which, and the command that installs them."""


def pip_command(extra: str) -> str:
    """What to type to get an extra."""
    return f"pip install 'lowbit-attn[{extra}]'"


def installed_version(package: str) -> str | None:
    """Version of an installed package, None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require(extra: str, packages: Iterable[str] | None = None) -> None:
    """MissingExtraError unless the packages of an extra (default: its own in `EXTRAS`) can be imported."""
    missing = [name for name in packages or EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"not installed: {', '.join(missing)}; the extra {extra!r} brings them: {pip_command(extra)}")
