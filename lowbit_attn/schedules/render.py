"""Step × block grids as text tables."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit_attn.schedules.grid import BoundSchedule

_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red")


def render_schedule(bound: BoundSchedule) -> Group:
    """One table for each expert (one for all if they are equal), and cross-attention in a line or in tables of its own."""
    parts: list[RenderableType] = [render_grids({expert: bound.grid(expert) for expert in bound.recipes})]
    if "cross" in bound.layout.kinds:
        cross = {f"{expert}, cross-attention": bound.grid(expert, "cross") for expert in bound.recipes}
        recipes = {cell for grid in cross.values() for row in grid for cell in row}
        parts.append(Text(f"cross-attention: {recipes.pop()}") if len(recipes) == 1 else render_grids(cross))
    return Group(*parts)


def render_grids(grids: Mapping[str, Sequence[Sequence[str]]]) -> Group:
    """Tables of `[step][block]` grids, one per title; runs of equal steps and of equal blocks are drawn once."""
    names = dict.fromkeys(cell for grid in grids.values() for row in grid for cell in row)
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    shared: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for title, grid in grids.items():
        shared.setdefault(tuple(map(tuple, grid)), []).append(title)
    return Group(*(_table(" = ".join(titles), grid, colors) for grid, titles in shared.items()))


def _table(title: str, grid: tuple[tuple[str, ...], ...], colors: Mapping[str, str]) -> Table:
    columns = _runs(list(zip(*grid, strict=True)))
    table = Table(title=title, title_justify="left")
    table.add_column("step \\ block", justify="right")
    for first, last in columns:
        table.add_column(_span(first, last), justify="center", no_wrap=True)
    for first, last in _runs(grid):
        cells = [grid[first][column] for column, _ in columns]
        table.add_row(_span(first, last), *(Text(cell, style=colors[cell]) for cell in cells))
    return table


def _runs(rows: Sequence[tuple[str, ...]]) -> list[tuple[int, int]]:
    """First and last index of each run of equal rows."""
    runs = []
    for _, group in groupby(range(len(rows)), key=lambda i: rows[i]):
        members = list(group)
        runs.append((members[0], members[-1]))
    return runs


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"
