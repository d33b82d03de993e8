"""Does low-bit attention train like bf16? A byte-level GPT on real text, with paired seeds, and controls that must go wrong.

    python benchmarks/training_study.py --make-text study-text.bin          # needs pip and its index; everything after does not
    python benchmarks/training_study.py --text study-text.bin --out outputs/training-study [--only "bf16:0,mxfp8:0"]
    python benchmarks/training_study.py --report --out outputs/training-study

Every run is VARIANT:SEED: bf16, a recipe (write ; for , inside one) or a control (study/attentions.py). Each writes its JSON to
--out when it ends; one that is there, of the same settings, is not run again. --report judges what is there, draws it, and writes
it into docs/training.md. --tiny is for a CPU. With --seconds no run is begun that the longest so far says would not end in time.
"""

import argparse
import gc
import json
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from study import report, text
from study.attentions import CONTROLS, RECIPE, variant
from study.text import Text
from study.training import TINY, Settings, train

from lowbit_attn.api import explain
from lowbit_attn.recipes import UNQUANTIZED

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
EVERY_RUN = [f"{UNQUANTIZED}:0", f"{RECIPE}:0", *(f"{name}:0" for name in CONTROLS),
             *(f"{name}:{seed}" for seed in SEEDS[1:] for name in (UNQUANTIZED, RECIPE))]
"""The first pair, the controls that are held against it, then the other pairs."""


def parsed_runs(only: str) -> list[tuple[str, int]]:
    """Names and seeds of `--only`."""
    found = []
    for part in (part.strip().replace(";", ",") for part in only.split(",")):
        name, colon, seed = part.rpartition(":")
        if not (colon and name and seed.isdigit()):
            raise SystemExit(f"--only: got {part!r}; accepted: VARIANT:SEED, as in mxfp8:0")
        found.append((name, int(seed)))
    return found


def file_name(name: str, seed: int) -> str:
    """Of a run's JSON."""
    return "run-" + "".join(c if c.isalnum() else "-" for c in name) + f"-{seed}.json"


def finished(path: Path, settings: Settings, sha256: str) -> bool:
    """Whether this run is done; one of other settings or another text is an error."""
    if not path.is_file():
        return False
    known = json.loads(path.read_text())
    if known["settings"] != json.loads(json.dumps(asdict(settings))) or known["text"]["sha256"] != sha256:
        raise SystemExit(f"--out: {path} was made with other settings or another text: {known['settings']}, {known['text']}; "
                         "accepted: the same, or another folder")
    return True


def environment(device: torch.device) -> dict[str, Any]:
    """Where a run was made."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {"device": name, "torch": torch.__version__, "backend": explain(RECIPE, device).backend, "source": text.SOURCE}


def run_all(options: argparse.Namespace, settings: Settings) -> None:
    """What is left of --only, one after another."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    data = Text.read(options.text, settings.size.context)
    options.out.mkdir(parents=True, exist_ok=True)
    began, longest = time.monotonic(), 0.0
    compiled = device.type == "cuda" and not options.no_compile
    for name, seed in parsed_runs(options.only):
        path = options.out / file_name(name, seed)
        chosen = variant(name)
        if finished(path, settings, data.sha256):
            continue
        if time.monotonic() - began + longest > options.seconds:
            print(f"{name}:{seed} is left, and what follows it", flush=True)
            return
        run = train(chosen, seed, settings, data, device, compiled, environment(device),
                    lambda line, title=f"{name}:{seed}": print(f"{title} {line}", flush=True))  # type: ignore[misc]
        gc.collect()  # the graph of the run that ended holds its memory
        longest = max(longest, run.seconds)
        path.write_text(json.dumps(asdict(run)) + "\n")
        print(f"{name}:{seed} took {run.seconds:.1f} s, {run.milliseconds_per_step:.2f} ms a step, "
              f"{run.tokens_per_second:.0f} tokens/s, {run.method}", flush=True)
    print("complete", flush=True)


def settings_of(options: argparse.Namespace) -> Settings:
    """Settings with what was given on the command line."""
    base = TINY if options.tiny else Settings()
    given = {name: getattr(options, name) for name in ("steps", "control_steps", "batch", "peak_lr", "evaluate_every")}
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def main() -> int:
    """Make the text, run, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--make-text", type=Path, metavar="FILE", help=f"download and write the {text.SOURCE}")
    task.add_argument("--text", type=Path, metavar="FILE", help="train on what --make-text wrote")
    task.add_argument("--report", action="store_true", help="judge the runs in --out")
    parser.add_argument("--out", type=Path, default=Path("outputs/training-study"))
    parser.add_argument("--only", default=",".join(EVERY_RUN), help="runs, in this order (default: %(default)s)")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--control-steps", type=int, dest="control_steps")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--peak-lr", type=float, dest="peak_lr")
    parser.add_argument("--evaluate-every", type=int, dest="evaluate_every")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-compile", action="store_true", help="compile nothing (nothing is compiled on a CPU)")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers and a few steps")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of training.md, for --report")
    options = parser.parse_args()
    if options.make_text:
        text.make(options.make_text)
        print(f"wrote {options.make_text}: {options.make_text.stat().st_size} bytes, the {text.SOURCE}")
    elif options.report:
        print(report.write(options.out, options.docs))
    else:
        run_all(options, settings_of(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
