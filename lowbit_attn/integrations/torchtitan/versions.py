"""Which torchtitan is installed, and whether this torch can run it."""

import re
from importlib.metadata import PackageNotFoundError, version

ACCEPTED = "0.2.x from 0.2.2, or 0.3.x"
_NEEDED_TORCH = {"0.2": (2, 11), "0.3": (2, 13)}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def release_line() -> str:
    """"0.2" or "0.3"; ImportError for any other torchtitan, and for a torch that it does not import with."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise ImportError(f"torchtitan: not installed; accepted: {ACCEPTED} (pip install 'lowbit-attn[torchtitan]')") from None
    numbers = _numbers(found)
    if not ((0, 2, 2) <= numbers < (0, 4)):
        raise ImportError(f"torchtitan: found version {found}; accepted: {ACCEPTED}")
    line = f"{numbers[0]}.{numbers[1]}"
    torch, needed = version("torch"), _NEEDED_TORCH[line]
    if _numbers(torch) < needed:
        raise ImportError(f"torch: found version {torch} with torchtitan {found}; accepted: {'.'.join(map(str, needed))} or newer")
    return line


__all__ = ["ACCEPTED", "release_line"]
