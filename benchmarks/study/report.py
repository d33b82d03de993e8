"""The runs' verdict as text and pictures, written into docs/training.md between two marks."""

from collections.abc import Sequence
from pathlib import Path

from study import judge
from study.attentions import RECIPE
from study.training import Run

BEGIN = "<!-- Written by benchmarks/training_study.py --report; edits here are lost. -->"
END = "<!-- End of what the script writes. -->"
PICTURE = "training-study.png"
NOTHING = "Not measured yet."


def write(folder: Path, docs: Path) -> str:
    """Report on the runs in `folder` into `docs`, and return the text."""
    runs = judge.load(folder) if folder.is_dir() else []
    lines = section(runs)
    page = docs / "training.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, behind = rest.partition(END)
    if not mark:
        raise SystemExit(f"--docs: {page} lacks the marks {BEGIN!r} and {END!r}")
    if runs:
        plot(runs, docs / PICTURE)
    page.write_text(f"{before}{BEGIN}\n\n{lines}\n\n{END}{behind}", encoding="utf-8")
    return lines


def section(runs: Sequence[Run]) -> str:
    """Markdown of all there is to say."""
    if not runs:
        return NOTHING
    parts = [_head(runs[0]), _losses(runs), *_verdicts(runs), _controls(runs), _numerics(runs), f"![Curves of the runs]({PICTURE})"]
    return "\n\n".join(part for part in parts if part)


def _head(run: Run) -> str:
    settings, size = run.settings, run.settings["size"]
    return (f"{run.environment['device']}, torch {run.environment['torch']}, backend `{run.environment['backend']}`; "
            f"{size['layers']} layers, width {size['width']}, head_dim {size['head_dim']}, {settings['steps']} steps of "
            f"{settings['batch']} × {size['context']} bytes, {run.text['train_bytes']} bytes to train on and "
            f"{run.text['validation_bytes']} held out (SHA-256 {run.text['sha256'][:16]}…). Losses in nats per byte on "
            f"{settings['final_windows']} windows.")


def _losses(runs: Sequence[Run]) -> str:
    lines = ["| run | seed | loss, own attention | exact attention | largest gradient norm after warm-up | ms a step | bytes/s |",
             "|---|---|---|---|---|---|---|"]
    for run in runs:
        if run.kind in ("bf16", "recipe"):
            lost = f"diverged at step {run.diverged_at}"
            own, exact = (f"{run.final[name]:.4f}" if run.final else lost for name in ("own", "exact"))
            norm = max(run.grad_norm[run.settings["warm_up"]:], default=float("nan"))
            lines.append(f"| `{run.variant}` | {run.seed} | {own} | {exact} | {norm:.2f} | {run.milliseconds_per_step:.2f} | "
                         f"{run.tokens_per_second:,.0f} |")
    return "\n".join(lines)


def _verdicts(runs: Sequence[Run]) -> list[str]:
    found = []
    for name in dict.fromkeys(run.variant for run in runs if run.kind == "recipe"):
        gap = judge.gap(runs, name)
        if not gap.own:
            found.append(f"`{name}` has no seed in common with bf16 that both finished.")
            continue
        seeds = ", ".join(f"{gap.own[seed]:+.4f} and {gap.exact[seed]:+.4f} (seed {seed})" for seed in gap.own)
        diverged = f"; diverged: seeds {', '.join(map(str, gap.diverged))}" if gap.diverged else "; no seed diverged"
        found.append(f"**`{name}` minus bf16**, own and exact attention: {seeds}. The larger mean is {gap.largest:+.4f}, the "
                     f"tolerance {gap.tolerance:.4f}{diverged}: **{'within' if gap.holds else 'not within'}** it.")
    return found


def _controls(runs: Sequence[Run]) -> str:
    honest = {run.seed: run for run in runs if run.variant == RECIPE}
    controls = [run for run in runs if run.kind in ("mismatch", "leak") and run.seed in honest]
    if not controls:
        return ""
    allowed = judge.tolerance([run.final["own"] for run in runs if run.kind == "bf16" and run.final])
    lines = [f"Controls, beside `{RECIPE}` of the same seed{_leak(honest[controls[0].seed])}:", "",
             "| control | seed | steps | what went wrong |", "|---|---|---|---|"]
    for run in controls:
        wrong = "; ".join(judge.went_wrong(run, honest[run.seed], allowed)) or "**nothing that this study sees**"
        lines.append(f"| `{run.variant}` | {run.seed} | {len(run.train_loss)} | {wrong} |")
    return "\n".join(lines)


def _leak(run: Run) -> str:
    if run.leak is None:
        return ""
    return (f", where later tokens move outputs of earlier blocks of 32 by {run.leak['blocks']:.2%} and earlier ones of their own "
            f"block by {run.leak['within']:.2%}")


def _numerics(runs: Sequence[Run]) -> str:
    measured = [(run, entry) for run in runs for entry in run.numerics]
    if not measured:
        return ""
    lines = ["Quantization of one held-out window, by the reference: shares of dS, P and dO that become zero, and cosines with "
             "exact attention.", "",
             "| run | seed | step | layer | dS | P | dO | cosine of dQ | of dK | of dV |", "|---|" + "---|" * 9]
    for run, entry in measured:
        flushed, cosine = entry["flushed"], entry["cosine"]
        shares = " | ".join(f"{flushed[name]:.3%}" if name in flushed else "" for name in ("ds", "p", "do"))
        cosines = " | ".join(f"{cosine[f'grad_{name}']:.5f}" for name in ("query", "key", "value"))
        lines.append(f"| `{run.variant}` | {run.seed} | {entry['step']} | {entry['layer']} | {shares} | {cosines} |")
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Validation loss, its gap to bf16, gradient norms, and dS that becomes zero; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (loss, gap), (norm, flush) = figure.subplots(2, 2)
    base = {run.seed: {entry["step"]: entry for entry in run.evaluations} for run in runs if run.kind == "bf16"}
    names = list(dict.fromkeys(run.variant for run in runs))
    for run in runs:
        style = {"color": f"C{names.index(run.variant)}", "alpha": 0.8, "linewidth": 1.0,
                 "label": run.variant if run.seed == min(r.seed for r in runs if r.variant == run.variant) else None,
                 "linestyle": "--" if run.kind in ("mismatch", "leak") else "-"}
        steps = [entry["step"] for entry in run.evaluations]
        loss.plot(steps, [entry["exact"] for entry in run.evaluations], **style)
        shared = [entry for entry in run.evaluations if entry["step"] in base.get(run.seed, {})]
        if run.kind != "bf16":
            gap.plot([entry["step"] for entry in shared],
                     [entry["exact"] - base[run.seed][entry["step"]]["exact"] for entry in shared], **style)
        norm.plot(range(1, len(run.grad_norm) + 1), run.grad_norm, **style | {"linewidth": 0.4})
        for layer in sorted({entry["layer"] for entry in run.numerics}):
            part = [entry for entry in run.numerics if entry["layer"] == layer]
            flush.plot([entry["step"] for entry in part], [100 * entry["flushed"]["ds"] for entry in part], **style,
                       marker="osv^"[layer % 4])
            style["label"] = None
    loss.set(title="validation loss through exact attention", ylabel="nats per byte")
    gap.set(title="the same minus bf16 of the same seed", ylabel="nats per byte")
    gap.axhspan(-judge.TOLERANCE, judge.TOLERANCE, color="0.9")
    norm.set(title="gradient norm before clipping", yscale="log", xlabel="step")
    flush.set(title="dS that becomes zero (one mark a layer)", ylabel="%", xlabel="step")
    for axes in (loss, gap, norm, flush):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, facecolor="white")
