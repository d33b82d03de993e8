"""Seconds per denoising step of Wan2.2-T2V-A14B's transformer at its real shape, for bf16 and for schedules; random weights.

    python benchmarks/wan_step.py                       # one expert of 40 blocks, s=75600, bf16 GEMMs, on the GPU
    python benchmarks/wan_step.py --blocks 8            # fewer blocks, scaled to 40
    python benchmarks/wan_step.py --device cpu --blocks 2 --frames 5 --height 64 --width 64 --heads 2 --repeats 1   # a dry run

A denoising step is two forwards (guidance in two passes). Each different row of a schedule's grid (bf16 steps, 4-bit steps with
block 0 in bf16, ...) is measured once, and a schedule's figure is the mean over its steps. With fewer blocks each recipe is
measured in all of them, and a row is mixed from these as its 40 blocks ask. Also printed: the part of the time that
self-attention calls take, the ratio to bf16, and the peak memory above bf16's. Nothing here asks for a backend, but for bf16
(--bf16-backend): `lowbit_attn.explain` says which one ran. Recipes that would be emulated at this size are left out.
"""

import argparse
import json
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowbit_attn import explain
from lowbit_attn.integrations.diffusers import patch, unpatch
from lowbit_attn.integrations.diffusers.processors import base
from lowbit_attn.recipes import UNQUANTIZED
from lowbit_attn.schedules import PrecisionSchedule, load

PUBLISHED_BLOCKS, PASSES = 40, 2
TEXT_TOKENS, TEXT_DIM = 512, 4096
SCHEDULES = ("mxfp8_fast", "wan2.2-t2v-a14b-hopper", "mxfp8")
EMULATED_LIMIT = 8192
"""Tokens above which the reference takes minutes per call."""

Row = tuple[str, ...]
"""Recipes of one forward, by block."""


def build(args: argparse.Namespace) -> Any:
    """A Wan pipeline with one expert, made on the device in bf16; no text encoder and no autoencoder."""
    from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(args.device):
            model = WanTransformer3DModel(num_attention_heads=args.heads, ffn_dim=13824 * args.heads // 40,
                                          num_layers=args.blocks, cross_attn_norm=True)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():  # as from_pretrained keeps them
        if any(part in model._keep_in_fp32_modules for part in name.split(".")):
            parameter.data = parameter.data.float()
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=model.eval().requires_grad_(False),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=12.0))


def inputs(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """What one forward gets: latents of the video's size."""
    latents = (1, 16, (args.frames - 1) // 4 + 1, args.height // 8, args.width // 8)
    noise = torch.Generator(args.device).manual_seed(0)
    return {"hidden_states": torch.randn(latents, generator=noise, device=args.device, dtype=torch.bfloat16),
            "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=noise, device=args.device,
                                                 dtype=torch.bfloat16),
            "timestep": torch.tensor([500], device=args.device)}


class AttentionClock:
    """Adds up the time of attention calls, ours and torch's, where the processors make them."""

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "AttentionClock":
        from diffusers.models.transformers import transformer_wan

        for module, name in ((base, "attention"), (transformer_wan, "dispatch_attention_fn")):
            original = getattr(module, name)
            self._originals.append((module, name, original))
            setattr(module, name, self._timed(original))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in self._originals:
            setattr(module, name, original)

    def _timed(self, function: Any) -> Any:
        def timed(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if query.shape != key.shape:  # cross-attention
                return function(query, key, *args, **kwargs)
            start = self._mark()
            result = function(query, key, *args, **kwargs)
            self._marks.append((start, self._mark()))
            return result

        return timed

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """Of all calls so far."""
        if self._cuda:
            torch.cuda.synchronize()
            return sum(start.elapsed_time(end) for start, end in self._marks) / 1e3
        return sum(end - start for start, end in self._marks)


class Forward(NamedTuple):
    """Of one forward: seconds, seconds of its self-attention calls, and peak memory in GiB."""

    seconds: float
    attention: float
    peak: float


class Meter:
    """Measures forwards of a patched model, each row once."""

    def __init__(self, pipe: Any, args: argparse.Namespace) -> None:
        self._model, self._args = pipe.transformer, args
        self._processors = [block.attn1.processor for block in pipe.transformer.blocks]
        self._given = inputs(args)
        self._cuda = torch.device(args.device).type == "cuda"
        self._known: dict[Row, Forward] = {}

    def __getitem__(self, row: Row) -> Forward:
        if row not in self._known:
            for processor, recipe in zip(self._processors, row, strict=True):
                processor.recipe = recipe
            self._known[row] = self._measure()
        return self._known[row]

    def _measure(self) -> Forward:
        self._forward()  # compiles, allocates
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds, attention = [], []
        for _ in range(self._args.repeats):
            with AttentionClock(self._args.device) as clock:
                began = time.perf_counter()
                self._forward()
                seconds.append(time.perf_counter() - began)
            attention.append(clock.seconds())
        peak = torch.cuda.max_memory_allocated() / 2**30 if self._cuda else 0.0
        return Forward(statistics.median(seconds), statistics.median(attention), peak)

    def _forward(self) -> None:
        with torch.no_grad(), self._model.cache_context("cond"):
            self._model(**self._given, return_dict=False)
        if self._cuda:
            torch.cuda.synchronize()


def forward_of(row: Row, meter: Meter, blocks: int) -> Forward:
    """A forward of all published blocks. With fewer on the device, a mixture of forwards in each of the row's recipes: 1 block of
    40 in bf16 is not 1 of 8."""
    if blocks == PUBLISHED_BLOCKS:
        return meter[row]
    parts = [(meter[(recipe,) * blocks], number / len(row)) for recipe, number in Counter(row).items()]
    scale = PUBLISHED_BLOCKS / blocks
    return Forward(scale * sum(forward.seconds * part for forward, part in parts),
                   scale * sum(forward.attention * part for forward, part in parts), max(forward.peak for forward, _ in parts))


def measure_schedule(schedule: PrecisionSchedule, meter: Meter, blocks: int) -> dict[str, Any]:
    """Mean figures of a denoising step."""
    steps = schedule.sampling.steps or 20
    rows = Counter(map(tuple, schedule.bind(steps, PUBLISHED_BLOCKS, ("transformer",), "wan").grid("transformer")))
    forwards = [(forward_of(row, meter, blocks), number / steps) for row, number in rows.items()]
    seconds = sum(forward.seconds * part for forward, part in forwards)
    return {"seconds per step": PASSES * seconds,
            "attention share": sum(forward.attention * part for forward, part in forwards) / seconds,
            "peak GiB": max(forward.peak for forward, _ in forwards), "recipes": sorted({recipe for row in rows for recipe in row})}


def chosen(names: list[str], device: str, tokens: int) -> dict[str, PrecisionSchedule]:
    """Schedules by the name that is shown, bf16 first; those that would be emulated at this size are left out, with a word."""
    found = {UNQUANTIZED: load(UNQUANTIZED)}
    for name in names:
        schedule = load(name)
        recipes = {schedule.attention.default, *(rule.recipe for rule in schedule.attention.rules)}
        emulated = [recipe for recipe in recipes if explain(recipe, device).backend == "reference"]
        if emulated and tokens > EMULATED_LIMIT:
            print(f"{name}: left out, {', '.join(emulated)} is emulated on {device}", flush=True)
        else:
            found[name] = schedule
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("schedules", nargs="*", default=list(SCHEDULES), help="recipes, shipped schedules or files")
    parser.add_argument("--blocks", type=int, default=PUBLISHED_BLOCKS)
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--bf16-backend", default="_native_cudnn" if on_gpu else "native", help="diffusers' name for it")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    pipe = build(args)
    pipe.transformer.set_attention_backend(args.bf16_backend)
    tokens = ((args.frames - 1) // 4 + 1) * (args.height // 16) * (args.width // 16)
    print(f"{args.blocks} blocks (figures scaled to {PUBLISHED_BLOCKS}), {args.heads} heads of 128, {tokens} tokens, "
          f"{PASSES} passes per step, bf16 attention by {args.bf16_backend}, {args.device}, torch {torch.__version__}", flush=True)
    patch(pipe, UNQUANTIZED)
    meter, results = Meter(pipe, args), dict[str, dict[str, Any]]()
    for name, schedule in chosen(args.schedules, args.device, tokens).items():
        results[name] = row = measure_schedule(schedule, meter, args.blocks)
        bf16 = results[UNQUANTIZED]
        row["ratio"] = bf16["seconds per step"] / row["seconds per step"]
        row["backends"] = {recipe: explain(recipe, args.device).backend for recipe in row["recipes"]}
        print(f"{name}: {row['seconds per step']:.3f} s per step ({row['ratio']:.2f}x), attention {row['attention share']:.0%}, "
              f"peak {row['peak GiB']:.1f} GiB ({row['peak GiB'] - bf16['peak GiB']:+.2f}), {row['backends']}", flush=True)
    unpatch(pipe)
    if args.json:
        args.json.write_text(json.dumps({"arguments": {**vars(args), "json": str(args.json)}, "results": results}, indent=2))


if __name__ == "__main__":
    main()
