"""`lowbit-attn accuracy`: the papers' tables, measured on the reference and printed beside what was published."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lowbit_attn.cli.console import console, fail


class Name(StrEnum):
    """The tables."""

    ABLATION = "ablation"
    PROXIES = "proxies"
    UOS = "uos"
    PNQ = "pnq"
    TRAINING = "training"


def accuracy(
    table: Annotated[Name, typer.Option(help="ablation: Fused-Softmax table 4; proxies: its table 8; uos, pnq: MXAttention; "
                                             "training: FLAMIA table 4.")],
    seq: Annotated[int, typer.Option(min=256, help="Keys per head.")] = 4096,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads per seed (default: enough for the table).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds (default: enough for the table).")] = None,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    csv: Annotated[Path | None, typer.Option(help="Also write the table as CSV.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")] = None,
) -> None:
    """Measure one of the papers' tables and print it beside the published numbers."""
    import torch

    from lowbit_attn.cli.measurements import ablation, normalization, proxies, scaling, training
    from lowbit_attn.cli.measurements.settings import Settings

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        fail(f"--device: got {device!r}: {str(error).splitlines()[0]}")
    defaults = {Name.TRAINING: Settings(heads=2, seeds=1, rows=0), Name.PNQ: Settings(seeds=4), Name.UOS: Settings(seeds=1)}
    base = defaults.get(table, Settings())
    settings = replace(base, seq=seq, heads=heads or base.heads, seeds=seeds or base.seeds, device=device)
    if table is Name.PROXIES:
        result = proxies.measure()
    else:
        measure = {Name.ABLATION: ablation.measure, Name.UOS: scaling.measure, Name.PNQ: normalization.measure,
                   Name.TRAINING: training.measure}[table]
        result = measure(settings)
    console.print(result.rich())
    for path, text in ((csv, result.csv), (markdown, result.markdown)):
        if path is not None:
            path.write_text(text(), encoding="utf-8")
