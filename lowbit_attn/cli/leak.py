"""`lowbit-attn leak`: does a later token move an earlier row of attention under a causal mask?"""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lowbit_attn.cli.console import console, fail

if TYPE_CHECKING:
    from lowbit_attn.cli.measurements import leaks


def leak(
    recipe: Annotated[str, typer.Option(help="A recipe, with options as in 'mxfp8:causal_safety=exact'.")],
    seq: Annotated[int, typer.Option(min=64, help="Tokens per sequence.")] = 160,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs and of the changes.")] = 0,
    probes: Annotated[int, typer.Option(min=1, help="Changes per tensor.")] = 200,
    packed: Annotated[bool, typer.Option(help="Lay the sequences end to end as documents.")] = False,
) -> None:
    """Change one token, look at every row before it, and print the largest relative change that any saw.

    Ends with status 1 if the recipe breaks its promise (default: rows of O and dQ outside the token's block of 32 stay;
    causal_safety=exact: every earlier row stays), or if the leaking control shows no leak.
    """
    from lowbit_attn.cli.measurements import leaks
    from lowbit_attn.recipes import resolve

    try:
        chosen = resolve(recipe)
    except ValueError as error:
        fail(error)
    settings = leaks.Probes(seq=seq, count=probes, seed=seed, packed=packed)
    found, control = leaks.probe(chosen, settings), leaks.probe(leaks.leaking_control(chosen), settings)
    console.print(_render(chosen.canonical, found, control, settings))
    if not chosen.causal:
        console.print(f"{chosen.name} is refused under a causal mask; a leak here is the reason.")
    silent, broken = leaks.silent_operands(chosen, control), leaks.broken_promises(chosen, found)
    for operand in silent:
        console.print(f"the leaking control shows no leak through {operand}: this probe proves nothing", style="bold red")
    for promise in broken:
        console.print(f"leak: {promise}", style="bold red")
    if silent or broken:
        raise typer.Exit(1)


def _render(name: str, found: "leaks.Leak", control: "leaks.Leak", settings: "leaks.Probes") -> Table:
    from lowbit_attn.cli.measurements.leaks import OPERANDS, OUTPUTS, POSITIONS

    kind = "packed" if settings.packed else "dense"
    table = Table(title=f"Largest relative change of an earlier row: {name}, {kind}",
                  caption=f"{settings.count} random changes per tensor, {settings.seq} tokens, {settings.channels} channels. dK "
                          "and dV of an earlier key may depend on later queries, so their dO is zero here; a changed dO leaves "
                          "nothing to ask of them.", caption_justify="left")
    for heading in ("changed", "earlier rows in", *OUTPUTS, *(f"control {output}" for output in OUTPUTS)):
        table.add_column(heading, justify="left" if heading in ("changed", "earlier rows in") else "right")
    for operand in OPERANDS:
        for position in POSITIONS:
            cells = [_number(leak.largest.get((operand, position, output))) for leak in (found, control) for output in OUTPUTS]
            if any(cells):
                table.add_row(operand, position, *cells)
    return table


def _number(change: float | None) -> str:
    if change is None:
        return ""
    return "0" if change == 0 else f"{change:.1e}"
