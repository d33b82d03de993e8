"""Pictures of several commands; needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

BACKGROUND = "white"
_COLORS = ("#4477aa", "#ddaa33", "#228833", "#aa3377", "#66ccee", "#ee6677")
_NOT_RUN = "–"
_MAX_TICKS = 30


def save_grids(grids: Mapping[str, Sequence[Sequence[str]]], path: Path) -> None:
    """A PNG of `[step][block]` grids, one panel per title and one color per recipe; steps run to the right."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = sorted({cell for grid in grids.values() for row in grid for cell in row})
    colors = ListedColormap([_color(name, index) for index, name in enumerate(names)])
    norm = BoundaryNorm([index - 0.5 for index in range(len(names) + 1)], len(names))
    blocks = max(len(grid[0]) for grid in grids.values())
    figure = Figure(figsize=(8, 1.1 + len(grids) * max(1.2, 0.06 * blocks)), layout="constrained")
    for axes, (title, grid) in zip(figure.subplots(len(grids), 1, squeeze=False)[:, 0], grids.items(), strict=True):
        image = [[names.index(cell) for cell in column] for column in zip(*grid, strict=True)]
        axes.pcolormesh(image, cmap=colors, norm=norm, edgecolors=BACKGROUND, linewidth=1 if blocks <= _MAX_TICKS else 0.3)
        axes.invert_yaxis()
        steps, rows = _ticks(len(grid)), _ticks(len(image))
        axes.set(title=title, ylabel="block", xticks=[i + 0.5 for i in steps], xticklabels=list(steps),
                 yticks=[i + 0.5 for i in rows], yticklabels=list(rows))
    axes.set_xlabel("step")
    figure.legend(handles=[Patch(color=colors(index), label="did not run" if name == _NOT_RUN else name)
                           for index, name in enumerate(names)], loc="outside right")
    figure.savefig(path, dpi=130, facecolor=BACKGROUND)


Line = tuple[Sequence[int], Sequence[float]]
"""Frames, and a number of each."""


def save_series(series: Mapping[str, Mapping[str, Line]], path: Path) -> None:
    """A PNG of numbers by frame: one panel per measure, one line per comparison."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.4 * len(series)), layout="constrained")
    panels = figure.subplots(len(series), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (measure, lines) in zip(panels, series.items(), strict=True):
        for name, (numbers, values) in lines.items():
            axes.plot(numbers, values, marker=".", label=name)
        axes.set_ylabel(measure)
        axes.grid(alpha=0.3)
        axes.legend()
    axes.set_xlabel("frame")
    figure.savefig(path, dpi=130, facecolor=BACKGROUND)


def save_bars(panels: Mapping[str, Sequence[tuple[str, float, bool]]], unit: str, path: Path, title: str) -> None:
    """A PNG of horizontal bars (label, value, whether it is what others are compared with), one panel per name."""
    from matplotlib.figure import Figure

    heights = [0.8 + 0.28 * len(bars) for bars in panels.values()]
    figure = Figure(figsize=(9, sum(heights) + 0.5), layout="constrained")
    axes_list = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, bars) in zip(axes_list, panels.items(), strict=True):
        labels, values, compared = zip(*bars, strict=True)
        drawn = axes.barh(labels, values, color=["#bbbbbb" if other else _COLORS[0] for other in compared])
        axes.bar_label(drawn, [f"{value:.4g}" for value in values], padding=3, fontsize=8)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set_title(name, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_xlabel(unit, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130, facecolor=BACKGROUND)


def _ticks(count: int) -> range:
    return range(0, count, -(-count // _MAX_TICKS))


def _color(name: str, index: int) -> str:
    return "#ececec" if name == _NOT_RUN else _COLORS[index % len(_COLORS)]
