"""One training run: same initial weights and same data order for a seed, whatever the attention; its record as JSON."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lowbit_attn.ops.measure import measure
from study import model, text
from study.attentions import Variant, exact
from study.model import GPT, Attend, Size
from study.text import Text

LEAK_FACTOR = 16.0
"""What later tokens are multiplied by, to see whether earlier ones move."""

EAGER_STEPS = 4
"""First steps, before the whole step becomes a CUDA graph: they compile, tune and allocate."""


@dataclass(frozen=True)
class Settings:
    """What a run depends on beside attention and seed."""

    size: Size = field(default_factory=Size)
    steps: int = 3000
    control_steps: int = 1000
    batch: int = 8
    peak_lr: float = 6e-4
    warm_up: int = 200
    decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 250
    windows: int = 64
    """Validation windows of every evaluation; `final_windows` of the last of a whole run."""
    final_windows: int = 512
    numerics_at: int = 2
    """How many times in a recipe's run three layers are measured against the reference."""

    def learning_rates(self) -> Tensor:
        """Linear warm-up, then a cosine to a tenth of the peak, float32 [steps]."""
        step = torch.arange(self.steps, dtype=torch.float64)
        progress = ((step - self.warm_up) / max(1, self.steps - self.warm_up)).clamp(0, 1)
        cosine = 0.55 + 0.45 * torch.cos(math.pi * progress)
        return (self.peak_lr * torch.minimum((step + 1) / max(1, self.warm_up), cosine)).float()


TINY = Settings(Size(layers=2, width=256, context=96), steps=6, control_steps=4, batch=2, warm_up=2, evaluate_every=2, windows=2,
                final_windows=3, numerics_at=1)
"""For a CPU and for tests."""


@dataclass
class Run:
    """What is written about one run; losses in nats per byte."""

    variant: str
    kind: str
    seed: int
    settings: dict[str, Any]
    text: dict[str, Any]
    environment: dict[str, Any]
    method: str = ""
    train_loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """step, own (loss through its own attention), exact (through exact attention)."""
    final: dict[str, float] | None = None
    """own and exact on more windows, of a run that went to its end."""
    leak: dict[str, float] | None = None
    """How far later tokens move outputs of attention, relatively: of earlier "blocks", and earlier ones "within" their block."""
    numerics: list[dict[str, Any]] = field(default_factory=list)
    """step, layer, shares saturated and flushed of each operand, cosines with exact attention."""
    diverged_at: int | None = None
    milliseconds_per_step: float = 0.0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    peak_memory_gib: float = 0.0


class Trainer:
    """The state of one run, and its step as a function of static buffers, so that it can be captured."""

    def __init__(self, variant: Variant, seed: int, settings: Settings, data: Text, device: torch.device, compiled: bool):
        self.variant, self.settings, self.device = variant, settings, device
        self.model = GPT(settings.size, seed).to(device)
        if compiled:
            self.model.compile_parts()
        self.starts = text.training_starts(len(data.train), settings.steps, settings.batch, settings.size.context, seed).to(device)
        self.train, self.validation = data.train.to(device), data.validation.to(device)
        self.rates = settings.learning_rates().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(settings.decay), lr=self.rates[0].clone(), betas=(0.9, 0.95),
                                           fused=True, **({"capturable": True} if device.type == "cuda" else {}))
        self.now = self.starts[0].clone()
        self.result = torch.zeros(2, device=device)
        self.history = torch.zeros(settings.steps, 2, device=device)
        self.method = "eager"
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._replay: Callable[[], None] | None = None

    def _logits(self, tokens: Tensor, attend: Attend) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.model(tokens, attend)

    def _step(self) -> None:
        tokens, targets = text.windows(self.train, self.now, self.settings.size.context)
        self.optimizer.zero_grad(set_to_none=True)
        loss = model.loss(self._logits(tokens, self.variant.attend), targets)
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), self.settings.clip, foreach=True)
        self.optimizer.step()
        self.result.copy_(torch.stack((loss.detach(), norm.detach())))

    def step(self, number: int) -> None:
        """Train one step; on a GPU, from the fifth on, as one replay."""
        self.now.copy_(self.starts[number])
        for group in self.optimizer.param_groups:
            group["lr"].copy_(self.rates[number])  # in place: a captured step reads these tensors
        if self.device.type == "cuda" and number == EAGER_STEPS:
            self._capture()
        if self._replay is not None:
            self._replay()
        elif self._stream is None:
            self._step()
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # the one that is captured: autograd works where the forward did
                self._step()
            torch.cuda.current_stream().wait_stream(self._stream)
        self.history[number].copy_(self.result)

    def _capture(self) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._step()
        except Exception as error:  # slower, not wrong: the record says so
            torch.cuda.synchronize()
            self.method = f"eager (no CUDA graph: {type(error).__name__}: {str(error).partition(chr(10))[0]})"
            return
        self.method, self._replay = "CUDA graph", graph.replay

    @contextmanager
    def _uncompiled(self) -> Iterator[None]:
        parts = self.model.before, self.model.after
        self.model.before, self.model.after = model.before, model.after
        try:
            yield
        finally:
            self.model.before, self.model.after = parts

    @torch.no_grad()
    def evaluate(self, count: int) -> dict[str, float]:
        """Validation loss on `count` windows through its own attention and through exact attention."""
        context, batch = self.settings.size.context, 2 * self.settings.batch
        starts = text.validation_starts(len(self.validation), count, context).to(self.device)
        total = {"own": 0.0, "exact": 0.0}
        with self._uncompiled():
            for part in starts.split(batch):
                tokens, targets = text.windows(self.validation, part, context)
                for name, attend in (("own", self.variant.attend), ("exact", exact)):
                    total[name] += float(model.loss(self._logits(tokens, attend), targets)) * len(part)
        return {name: value / count for name, value in total.items()}

    def _watched(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Logits, and query, key, value and output [B, H, S, D] of every layer's attention."""
        seen: list[tuple[Tensor, ...]] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            seen.append((query, key, value, self.variant.attend(query, key, value)))
            return seen[-1][-1]

        with self._uncompiled():
            return self._logits(tokens, attend), seen

    @torch.no_grad()
    def leak(self) -> dict[str, float]:
        """What later tokens do to earlier outputs of attention, on the model's own activations (FLAMIA 4.5): query, key and value
        are raised by LEAK_FACTOR from some position on. Relative changes: the largest in earlier blocks of 32 tokens, and the root
        mean square in the position's own block; of the layer where they are largest."""
        context = self.settings.size.context
        block, position = context // 2 // 32 * 32, context // 2 // 32 * 32 + 16
        starts = text.validation_starts(len(self.validation), self.settings.batch, context).to(self.device)
        largest = {"blocks": 0.0, "within": 0.0}
        for *operands, output in self._watched(text.windows(self.validation, starts, context)[0])[1]:
            raised = [torch.cat((x[:, :, :position], x[:, :, position:] * LEAK_FACTOR), 2) for x in operands]
            old = output.float()
            moved = old - self.variant.attend(*raised).float()
            within = slice(block, position)
            largest["blocks"] = max(largest["blocks"], float(moved[:, :, :block].abs().max() / old[:, :, :block].abs().max()))
            largest["within"] = max(largest["within"], float(moved[:, :, within].norm() / old[:, :, within].norm()))
        return largest

    def numerics(self, step: int) -> list[dict[str, Any]]:
        """What the recipe's quantization does to Q, K, V and dO of one window in three layers, by the reference."""
        tokens, targets = text.windows(self.validation, torch.zeros(1, dtype=torch.int64, device=self.device),
                                       self.settings.size.context)
        logits, seen = self._watched(tokens)
        loss = model.loss(logits, targets)
        grads = torch.autograd.grad(loss, [output for *_, output in seen])
        found = []
        for layer in sorted({0, len(seen) // 2, len(seen) - 1}):
            q, k, v, grad = (x.detach()[0].transpose(0, 1) for x in (*seen[layer][:3], grads[layer]))
            measured = measure(q, k, v, grad, [0, q.shape[0]], self.variant.recipe)
            found.append({"step": step, "layer": layer, **asdict(measured)})
        return found


def train(variant: Variant, seed: int, settings: Settings, data: Text, device: torch.device, compiled: bool,
          environment: dict[str, Any], say: Callable[[str], None]) -> Run:
    """Run to the end, or a control to its step; stops at the first evaluation after a loss that is not finite."""
    began = time.perf_counter()
    run = Run(variant.name, variant.kind, seed, asdict(settings), {"sha256": data.sha256, "train_bytes": len(data.train),
              "validation_bytes": len(data.validation)}, environment)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(variant, seed, settings, data, device, compiled)
    whole = variant.kind in ("bf16", "recipe")
    last = settings.steps if whole else min(settings.steps, settings.control_steps)
    measured_at = {round(last * (i + 1) / settings.numerics_at) for i in range(settings.numerics_at)}
    paces: list[float] = []
    done = 0
    while done < last:
        stop = min(last, done + settings.evaluate_every)
        first = EAGER_STEPS + 1 if done == 0 and device.type == "cuda" else done  # compiling and capturing are no pace
        for number in range(done, stop):
            if number == first:
                _wait(device)
                clock = time.perf_counter()
            trainer.step(number)
        _wait(device)
        if stop > first:
            paces.append((time.perf_counter() - clock) / (stop - first))
        recent = trainer.history[done:stop].cpu()
        run.train_loss += recent[:, 0].tolist()
        run.grad_norm += recent[:, 1].tolist()
        before, done = done, stop
        if not bool(recent.isfinite().all()):
            run.diverged_at = before + int((~recent.isfinite().all(1)).nonzero()[0])
            say(f"step {done}: not finite since step {run.diverged_at}")
            break
        run.evaluations.append({"step": done, **trainer.evaluate(settings.windows)})
        if variant.kind == "recipe" and any(before < step <= done for step in measured_at):
            run.numerics += trainer.numerics(done)
        found = run.evaluations[-1]
        say(f"step {done}: loss {run.train_loss[-1]:.4f}, validation {found['own']:.4f} own, {found['exact']:.4f} exact, "
            f"gradient norm {run.grad_norm[-1]:.3f}, {1e3 * paces[-1] if paces else 0:.1f} ms")
    if run.diverged_at is None:
        run.leak = trainer.leak()
        if whole:
            run.final = trainer.evaluate(settings.final_windows)
    run.method = trainer.method
    if paces:
        run.milliseconds_per_step = 1e3 * statistics.median(paces)
        run.tokens_per_second = settings.batch * settings.size.context / statistics.median(paces)
    if device.type == "cuda":
        run.peak_memory_gib = torch.cuda.max_memory_allocated() / 2**30
    run.seconds = time.perf_counter() - began
    return run


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
