"""A record as tables for the terminal and as a bar chart."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from lowbit_attn.cli import plots
from lowbit_attn.cli.benchmarks.record import Record, Row


def table(record: Record, rows: Sequence[Row]) -> Table:
    """One workload: a line per contender, with a ratio to each baseline that was timed."""
    timed = {row.contender for row in rows if row.baseline and row.milliseconds is not None}
    baselines = [name for name in record.baselines() if name in timed]
    unit = rows[0].unit
    title = Table(title=rows[0].shape, title_justify="left", caption="x NAME: times the rate of NAME", caption_justify="left")
    with_error = any(row.error is not None for row in rows)
    figures = list(dict.fromkeys(name for row in rows for name in row.figures))
    measured = [*(["error"] if with_error else []), *figures]
    for heading in ("", "", "ms", unit, *measured, "spread", *(f"x {name}" for name in baselines)):
        title.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        if row.milliseconds is None:
            continue
        ratios = record.ratios(row)
        shown = [*([_percent(row.error)] if with_error else []), *(_figure(name, row.figures.get(name)) for name in figures)]
        cells = [row.contender, row.scope, f"{row.milliseconds:.3f}", _rate(row), *shown, _percent(row.spread),
                 *(_ratio(ratios[name]) for name in baselines)]
        title.add_row(*cells)
    return title


def notes(rows: Sequence[Row]) -> list[Text]:
    """What did not run and why, and what a reader must know to compare; each line names its contender."""
    lines: dict[str, str] = {}
    for row in rows:
        note = "; ".join(filter(None, (row.note, row.method if row.method.startswith("calls (") else "")))
        if note:
            lines[f"{row.contender}, {row.scope}: {note}"] = "yellow" if row.milliseconds is None else "dim"
    return [Text(line, style=style) for line, style in lines.items()]


def _rate(row: Row) -> str:
    assert row.rate is not None
    return f"{row.rate:.0f}" if row.rate >= 100 else f"{row.rate:.3g}"


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return _percent(value) if name.endswith("error") else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def plot(record: Record, path: Path) -> None:
    """Bars of the rate, one panel per workload; needs matplotlib. ValueError if nothing was timed."""
    if not any(row.rate for row in record.rows):
        raise ValueError("nothing in it was timed")
    panels = {rows[0].shape: [(f"{row.contender} ({row.scope})", row.rate, row.baseline) for row in rows if row.rate]
              for rows in record.workloads().values()}
    versions = record.environment.versions
    plots.save_bars({name: bars for name, bars in panels.items() if bars}, record.rows[0].unit, path,
                    f"{record.environment.device}, torch {versions['torch']}, Triton {versions['triton']}")
