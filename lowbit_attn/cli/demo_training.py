"""The training half of the demo: a small byte-level Llama through torchtitan's trainer, once per recipe, same seed."""

import logging
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lowbit_attn.integrations.torchtitan.launch import StepRecord

TAIL = 10
"""Final losses are means over this many last steps; single steps differ by what their documents are."""


@dataclass(frozen=True)
class TrainingSize:
    """Extent of a training run; `flavor` is one of the demo model's."""

    flavor: str
    seq_len: int
    batch_size: int
    validation_steps: int


@dataclass(frozen=True)
class Training:
    """One run: what torchtitan logged at each step."""

    recipe: str
    size: TrainingSize
    records: "list[StepRecord]"

    @property
    def final_loss(self) -> float:
        """Mean loss of the last steps."""
        return statistics.fmean(record.loss for record in self.records[-TAIL:])

    @property
    def validation_loss(self) -> float | None:
        """Loss on files that were held out, after the last step."""
        return self.records[-1].validation_loss

    @property
    def tokens_per_second(self) -> float:
        """From the median step, so neither warming up nor other programs count."""
        return self.size.seq_len * self.size.batch_size / statistics.median(record.seconds for record in self.records)


def train(recipe: str, steps: int, size: TrainingSize, out: Path, *, seed: int, device: torch.device,
          on_step: Callable[[str], None]) -> Training:
    """Train once, telling `on_step` the loss; torchtitan's log goes to `training-<recipe>.log` in `out`."""
    name = recipe.partition(":")[0]
    with _log_to(out / f"training-{name}.log"):
        from lowbit_attn.integrations.torchtitan.demo import train_demo

        records = train_demo(recipe, steps, out / "torchtitan" / name, lambda record: on_step(f"loss {record.loss:.3f}"),
                             flavor=size.flavor, seq_len=size.seq_len, batch_size=size.batch_size, seed=seed,
                             validation_steps=size.validation_steps, device="cpu" if device.type == "cpu" else None)
    return Training(recipe, size, records)


class _PlainFormatter(logging.Formatter):
    """Without the colors that torchtitan writes for terminals."""

    def format(self, record: logging.LogRecord) -> str:
        return re.sub(r"\x1b\[[\d;]*m", "", super().format(record))


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Everything that is logged or warned goes to a file, for the terminal shows progress."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    handler = logging.FileHandler(path, mode="w")
    handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    root.handlers, root.level = [handler], logging.INFO
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers, root.level = handlers, level
        handler.close()
