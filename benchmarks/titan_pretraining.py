"""Pretraining in torchtitan 0.2.x, bf16 against low-bit attention: loss, tokens per second, peak memory.

    python benchmarks/titan_pretraining.py --out DIR [--recipes bf16,mxfp8] [--steps 300] [--seq-len 8192] [--batch 8] [--size 400m]

A byte-level Llama (head_dim 128) on packed real text, the standard library's own sources. All runs have the same weights and the
same documents in the same order. On a GPU "bf16" is torchtitan's own varlen attention; on a CPU, where that has no kernel, torch
SDPA under the same mask. One GPU, or several under torchrun.

Writes DIR/<recipe>.jsonl step by step, DIR/report.json and DIR/loss.png. A run that was cut goes on from its last checkpoint (every
--checkpoint steps), a finished one is not run again: call it again with the same arguments until it says "complete". With
--seconds it stops by itself, between steps, after so long.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3 import get_train_spec as llama3_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools.logging import init_logger

from lowbit_attn.api import explain
from lowbit_attn.integrations.torchtitan import build_metrics_processor, documents
from lowbit_attn.integrations.torchtitan.documents import ByteTokenizer
from lowbit_attn.integrations.torchtitan.launch import StepRecord, train

MODEL = "llama3_pretraining_benchmark"
HEAD_DIM = 128
SIZES = {"400m": {"dim": 1536, "n_layers": 16, "n_heads": 12, "n_kv_heads": 4},
         "tiny": {"dim": 256, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1}}
TAIL = 20
"""Final losses are means over this many last steps."""
WARM_UP = 10
"""First steps that the throughput leaves out: they compile and tune."""
LARGEST_FILE = 1 << 20


class OutOfTime(Exception):
    """The run stops here, one step after a checkpoint, and goes on from that at the next call."""


def register() -> None:
    """The model in every size, and the text: whole files, so that long contexts hold long documents."""
    documents.register(LARGEST_FILE)
    flavors = {name: TransformerModelArgs(**size, multiple_of=256, rope_theta=500000, vocab_size=ByteTokenizer.vocab_size,
                                          attn_type="varlen", attn_mask_type="block_causal", eos_id=ByteTokenizer.eos_id)
               for name, size in SIZES.items()}
    register_train_spec(MODEL, replace(llama3_train_spec(), model_args=flavors, state_dict_adapter=None,
                                       build_tokenizer_fn=lambda job_config: ByteTokenizer(),
                                       build_metrics_processor_fn=build_metrics_processor))


def config(recipe: str, options: argparse.Namespace) -> Any:
    """torchtitan's config of one run."""
    args = [
        "--job.custom_config_module=lowbit_attn.integrations.torchtitan", f"--job.dump_folder={options.out / _name(recipe)}",
        f"--model.name={MODEL}", f"--model.flavor={options.size}", "--model.hf_assets_path=.",
        f"--training.dataset={documents.TRAINING}", f"--training.seq_len={options.seq_len}",
        f"--training.local_batch_size={options.batch}", f"--training.steps={options.steps}", f"--optimizer.lr={options.lr}",
        f"--lr_scheduler.warmup_steps={max(1, options.steps // 10)}", "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op", "--metrics.log_freq=1", f"--debug.seed={options.seed}",
        "--comm.trace_buf_size=0", "--checkpoint.enable", f"--checkpoint.interval={options.checkpoint}",
        "--checkpoint.keep_latest_k=2", f"--lowbit_attn.recipe={recipe}",
    ]
    if not options.no_compile:
        args += ["--compile.enable", "--compile.components=model"]
    if _converted(recipe):
        args += ["--model.converters=lowbit_attn"]
    return ConfigManager().parse_args(args)


def _converted(recipe: str) -> bool:
    return recipe != "bf16" or not torch.cuda.is_available()


def _name(recipe: str) -> str:
    return recipe.replace(":", "-").replace("/", "_").replace("=", "-").replace(",", "-")


def _records(path: Path) -> list[StepRecord]:
    """Steps so far; a step that was run again after a cut counts as it was last."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return sorted({record.step: record for record in (StepRecord(**json.loads(line)) for line in lines)}.values(),
                  key=lambda record: record.step)


def run(recipe: str, options: argparse.Namespace, deadline: float) -> list[StepRecord]:
    """Train, or go on training, to the end or the deadline."""
    path = options.out / f"{_name(recipe)}.jsonl"
    if len(_records(path)) < options.steps:
        settings = json.dumps({name: str(value) for name, value in vars(options).items() if name not in ("seconds", "recipes")})
        known = options.out / f"{_name(recipe)}.settings.json"
        if known.is_file() and known.read_text() != settings:
            raise SystemExit(f"--out: {known} was made with other arguments: {known.read_text()}; accepted: the same, or another "
                             "folder")
        known.write_text(settings)
        with path.open("a") as log:

            def keep(record: StepRecord) -> None:
                if int(os.environ.get("RANK", "0")) == 0:
                    log.write(json.dumps(asdict(record)) + "\n")
                    log.flush()
                if time.monotonic() > deadline and record.step > 1 and (record.step - 1) % options.checkpoint == 0:
                    raise OutOfTime

            train(config(recipe, options), on_step=keep)
    return _records(path)


def summary(recipe: str, records: list[StepRecord], options: argparse.Namespace) -> dict[str, Any]:
    """What the report says of one run."""
    tokens = options.seq_len * options.batch * int(os.environ.get("WORLD_SIZE", "1"))
    steady = [record.seconds for record in records if record.step > WARM_UP] or [record.seconds for record in records]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "recipe": recipe, "attention": str(explain(recipe, device)) if _converted(recipe) else "torchtitan's own varlen attention",
        "steps": len(records), "final_loss": statistics.fmean(record.loss for record in records[-TAIL:]),
        "tokens_per_second": tokens / statistics.median(steady),
        "peak_memory_gib": max(record.peak_memory_gib for record in records), "losses": [record.loss for record in records],
        "grad_norms": [record.grad_norm for record in records], "seconds": [record.seconds for record in records],
    }


def report(runs: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The runs, and each against the first."""
    base = next(iter(runs.values()))
    against = {name: {"loss": found["final_loss"] / base["final_loss"] - 1,
                      "tokens_per_second": found["tokens_per_second"] / base["tokens_per_second"],
                      "peak_memory": found["peak_memory_gib"] / base["peak_memory_gib"] if base["peak_memory_gib"] else None}
               for name, found in runs.items()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    size = SIZES[options.size]
    model = llama3_train_spec().model_cls
    with torch.device("meta"):
        arguments = TransformerModelArgs(**size, multiple_of=256, vocab_size=ByteTokenizer.vocab_size, max_seq_len=options.seq_len)
        parameters = sum(parameter.numel() for parameter in model(arguments).parameters())
    return {"device": device, "torch": torch.__version__, "model": {**size, "head_dim": HEAD_DIM, "parameters": parameters},
            "seq_len": options.seq_len, "batch": options.batch, "complete": all(r["steps"] >= options.steps for r in runs.values()),
            "against": {"baseline": base["recipe"], **against}, "runs": runs}


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Loss curves."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed; report.json has the losses")
        return

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, found in runs.items():
        axes.plot(range(1, len(found["losses"]) + 1), found["losses"], label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> int:
    """Run what is left, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipes", default="bf16,mxfp8", help="the first is the baseline; write ; for , inside one")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", choices=SIZES, default="400m")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    init_logger()
    register()
    runs = {}
    for recipe in (text.replace(";", ",") for text in options.recipes.split(",")):
        try:
            records = run(recipe, options, deadline)
        except OutOfTime:
            records = _records(options.out / f"{_name(recipe)}.jsonl")
        if records:
            runs[recipe] = summary(recipe, records, options)
        if len(records) < options.steps:
            break
    if int(os.environ.get("RANK", "0")) == 0:
        found = report(runs, options)
        (options.out / "report.json").write_text(json.dumps(found, indent=1))
        plot(runs, options.out / "loss.png")
        print(json.dumps({"complete": found["complete"] and len(runs) == len(options.recipes.split(",")),
                          "parameters": found["model"]["parameters"], "against": found["against"]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
