"""How commands speak: one console, one way to fail."""

import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

console = Console(width=None if sys.stdout.isatty() else 160)
"""As wide as the terminal; wide enough for every table where there is none (a pipe, a log)."""


def fail(problem: str | Exception) -> NoReturn:
    """End the command with a message on stderr and status 2; for what the user can put right."""
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(problem)), soft_wrap=True)
    raise typer.Exit(2)
