"""The report of `lowbit-attn check` as Markdown."""

from collections.abc import Sequence

from lowbit_attn.cli.benchmarks.record import Environment
from lowbit_attn.cli.checks.cases import Outcome
from lowbit_attn.cli.checks.instructions import Finding
from lowbit_attn.cli.checks.speed import PAPER_ERROR, PAPER_TFLOPS, Speed
from lowbit_attn.kernels.cdna4 import build, toolchain


def finding_line(x: Finding) -> str:
    """One instruction."""
    differ = f"{x.wrong} of {x.total} differ, {x.example}{'; no kernel depends on it' if x.question else ''}"
    return f"{x.name}: {differ if x.wrong else 'as read'}"


def outcome_line(x: Outcome) -> str:
    """One call of attention."""
    verdict = "equal" if x.passed else "DIFFERS"
    return f"{x.case.recipe}, {x.case.name}: {verdict} (error {x.error:.1e}, allowed {x.case.bound:.1e}; lse {x.lse:.1e})"


def speed_line(x: Speed) -> str:
    """One recipe on one shape."""
    return (f"{x.recipe}, {x.shape}: {x.kernel:.0f} TFLOP/s, {x.with_quantization:.0f} with quantization, SDPA bf16 {x.sdpa:.0f}; "
            f"error {x.error:.2%}, cosine {x.cosine:.5f} (paper, first shape: {PAPER_TFLOPS[x.recipe]} TFLOP/s, "
            f"{PAPER_ERROR[x.recipe]:.2%})")


def failures(findings: Sequence[Finding], outcomes: Sequence[Outcome]) -> int:
    """Instructions and calls that differ, open questions aside."""
    return sum(x.wrong > 0 and not x.question for x in findings) + sum(not x.passed for x in outcomes)


def render(environment: Environment, findings: Sequence[Finding], outcomes: Sequence[Outcome], speeds: Sequence[Speed], *,
           emulated: bool, stopped: str = "") -> str:
    """The whole report; `stopped` is the error that ended the run early."""
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items() if version)
    sections = [("Instructions, against `semantics.h`", [finding_line(x) for x in findings]),
                ("Attention, against the reference", [outcome_line(x) for x in outcomes]),
                ("Speed, normal inputs, medians", [speed_line(x) for x in speeds])]
    head = ["# lowbit-attn check --backend cdna4", "",
            f"{environment.device}{', EMULATED: says nothing of a device' if emulated else ''}, {environment.date}", "",
            f"{versions}. Code objects: {build.stale() or 'up to date'}, {toolchain.COMPILER}. `{environment.command}`", "",
            f"**{failures(findings, outcomes)} differences** in {len(findings)} instructions and {len(outcomes)} calls."]
    if stopped:
        head += ["", f"**STOPPED** by {stopped}"]
    for title, lines in sections:
        if lines:
            head += ["", f"## {title}", "", *(f"- {line}" for line in lines)]
    return "\n".join([*head, "", "Please open an issue with this report: a difference in an instruction corrects one line of "
                      "lowbit_attn/kernels/cdna4/semantics.h.", ""])
