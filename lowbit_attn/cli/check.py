"""`lowbit-attn check`: what the owner of a device that nobody here has runs, and a report to paste."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, TypeVar

import torch
import typer

from lowbit_attn.cli.console import console, fail
from lowbit_attn.ops import describe

if TYPE_CHECKING:
    from lowbit_attn.kernels.cdna4.forward import Run

BACKENDS = ("cdna4",)
Result = TypeVar("Result")


def check(
    backend: Annotated[str, typer.Option(help="Whose kernels to check: cdna4.")],
    emulate: Annotated[bool, typer.Option(help="Run the kernels' source on the CPU instead: no GPU, no speed, a minute; needs "
                                               "ziglang.")] = False,
    speed: Annotated[bool, typer.Option(help="Also time the kernels, against torch SDPA.")] = True,
    output: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("outputs/check/cdna4.md"),
) -> None:
    """Compare kernels with the reference: every instruction they use, attention at every edge, and their speed.

    Ends with status 1 if anything differs. The report says where to send it.
    """
    if backend not in BACKENDS:
        fail(f"--backend: got {backend!r}; accepted: {', '.join(BACKENDS)}")
    if emulate:
        from lowbit_attn.kernels.cdna4 import toolchain
        from lowbit_attn.kernels.cdna4.emulate import Emulator

        if not toolchain.available():
            fail("--emulate: the compiler is missing; pip install ziglang==0.17.1")
        with TemporaryDirectory() as folder:
            _check(Emulator(Path(folder)), torch.device("cpu"), output, speed=False, small=True)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    described = describe(device)
    if described.architecture != "gfx950":
        fail(f"--backend cdna4: needs a gfx950 (MI350X, MI355X) and a ROCm build of torch, this device is {described}; accepted "
             "here: --emulate")
    from lowbit_attn.kernels.cdna4 import loader

    _check(loader.run, device, output, speed=speed, small=False)


def _check(run: "Run", device: torch.device, output: Path, *, speed: bool, small: bool) -> None:
    from lowbit_attn.cli.benchmarks.record import Environment
    from lowbit_attn.cli.checks import cases, instructions, report
    from lowbit_attn.cli.checks.speed import speeds

    findings = [_said(x, report.finding_line(x)) for x in instructions.findings(run, device)]
    outcomes = [_said(x, report.outcome_line(x)) for x in (cases.outcome(case, run, device) for case in cases.cases(small))]
    timed = [_said(x, report.speed_line(x)) for x in speeds(run, device)] if speed else []
    text = report.render(Environment.current(device), findings, outcomes, timed, emulated=device.type == "cpu")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    wrong = report.failures(findings, outcomes)
    console.print(f"{wrong or 'no'} difference{'s' if wrong != 1 else ''}; the report to paste is {output}", soft_wrap=True,
                  style="bold red" if wrong else "green")
    if wrong:
        raise typer.Exit(1)


def _said(result: Result, line: str) -> Result:
    console.print(line, soft_wrap=True, markup=False)
    return result
