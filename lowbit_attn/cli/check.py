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
    speed: Annotated[bool | None, typer.Option(help="Also time the kernels, against torch SDPA; by default, unless "
                                                    "emulated.")] = None,
    output: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("outputs/check/cdna4.md"),
) -> None:
    """Compare kernels with the reference: every instruction they use, attention at every edge, and their speed.

    Ends with status 1 if anything differs or fails. The report says where to send it.
    """
    if backend not in BACKENDS:
        fail(f"--backend: got {backend!r}; accepted: {', '.join(BACKENDS)}")
    if emulate and speed:
        fail("--speed: got it with --emulate, whose time says nothing of a device; accepted: one of the two")
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

    _check(loader.run, device, output, speed=speed is not False, small=False)


def _check(run: "Run", device: torch.device, output: Path, *, speed: bool, small: bool) -> None:
    from lowbit_attn.cli.benchmarks.record import Environment
    from lowbit_attn.cli.checks import cases, instructions, report
    from lowbit_attn.cli.checks.speed import Speed, speeds

    if output.is_dir():
        fail(f"--output: got the folder {output}; accepted: a file, new or not")
    output.parent.mkdir(parents=True, exist_ok=True)
    environment = Environment.current(device)   # before a fault, after which the device may say nothing
    findings: list[instructions.Finding] = []
    outcomes: list[cases.Outcome] = []
    timed: list[Speed] = []
    stopped = ""
    try:
        for finding in instructions.findings(run, device):
            findings.append(_said(finding, report.finding_line(finding)))
        for case in cases.cases(small):
            outcome = cases.outcome(case, run, device)
            outcomes.append(_said(outcome, report.outcome_line(outcome)))
        for timing in speeds(run, device) if speed else ():
            timed.append(_said(timing, report.speed_line(timing)))
    except RuntimeError as error:   # of HIP, of torch or of the emulator: what came before is still worth a report
        stopped = f"{type(error).__name__}: {error}"
    text = report.render(environment, findings, outcomes, timed, emulated=device.type == "cpu", stopped=stopped)
    output.write_text(text, encoding="utf-8")
    wrong = report.failures(findings, outcomes)
    ended = f"; stopped by {stopped}" if stopped else ""
    console.print(f"{wrong or 'no'} difference{'s' if wrong != 1 else ''}{ended}; the report to paste is {output}", soft_wrap=True,
                  markup=False, style="bold red" if wrong or stopped else "green")
    if wrong or stopped:
        raise typer.Exit(1)


def _said(result: Result, line: str) -> Result:
    console.print(line, soft_wrap=True, markup=False)
    return result
