"""torchtitan's trainer as a function: one call trains in this process and returns what the trainer measured.

    python -m lowbit_attn.integrations.torchtitan.launch --job.config_file configs/torchtitan-llama3-debug-mxfp8.toml

is torchtitan's own command line (here of 0.2.x), which also works where there is no GPU. Both release lines.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

from lowbit_attn.integrations.torchtitan.cpu import enable_cpu
from lowbit_attn.integrations.torchtitan.versions import release_line

if release_line() == "0.2":
    from torchtitan.train import Trainer
else:
    from torchtitan.trainer import Trainer

# One process. Port 0 lets the store pick a free port.
_SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True)
class StepRecord:
    """One logged training step.

    Attributes:
        step: counted from 1.
        loss: mean over the step's tokens and all ranks, as torchtitan logs it.
        grad_norm: before clipping.
        seconds: wall time of the step.
        peak_memory_gib: of this device since the previous logged step; 0 on a CPU, where torchtitan measures none.
        validation_loss: of the validation that followed the step, if one did.
    """

    step: int
    loss: float
    grad_norm: float
    seconds: float
    peak_memory_gib: float = 0.0
    validation_loss: float | None = None


class RecordingTrainer(Trainer):
    """torchtitan's Trainer, which also keeps what its metrics processor logs (every `metrics.log_freq` steps)."""

    def __init__(self, config: Any, on_step: Callable[[StepRecord], None] | None = None) -> None:
        super().__init__(config)
        self.records: list[StepRecord] = []
        self._on_step = on_step
        self._step_began = time.perf_counter()
        self._log, self._log_validation = self.metrics_processor.log, self.metrics_processor.log_validation
        self.metrics_processor.log = self._record
        self.metrics_processor.log_validation = self._record_validation

    def train_step(self, data_iterator: Any) -> None:
        """One step, timed."""
        self._step_began = time.perf_counter()
        super().train_step(data_iterator)

    def _record(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float,
                extra_metrics: dict[str, Any] | None = None) -> None:
        seconds = time.perf_counter() - self._step_began
        # Read first: logging resets the peak.
        peak = max(0.0, self.metrics_processor.device_memory_monitor.get_peak_stats().max_active_gib)
        record = StepRecord(step, float(global_avg_loss), float(grad_norm), seconds, peak)
        self._log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        self.records.append(record)
        if self._on_step is not None:
            self._on_step(record)

    def _record_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        self._log_validation(loss, step, extra_metrics)
        if self.records and self.records[-1].step == step:
            self.records[-1] = replace(self.records[-1], validation_loss=float(loss))


def train(config: Any, *, on_step: Callable[[StepRecord], None] | None = None,
          device: str | None = None) -> list[StepRecord]:
    """Train with torchtitan's trainer in this process.

    Args:
        config: torchtitan's command line as a list (`["--job.config_file=...", ...]`), the path of a TOML file (0.2.x), or a
            config object (JobConfig of 0.2.x, Trainer.Config of 0.3.x).
        on_step: called with each record as soon as the step is logged.
        device: None takes the accelerator and, without one, the CPU; "cpu" hides the accelerator.

    Under torchrun the launcher's environment is used; otherwise this is a single process of its own. The environment, the
    process group, garbage collection and the determinism flags are left as they were found.
    """
    if device not in (None, "cpu"):
        raise ValueError(f"device: got {device!r}; accepted: None, 'cpu'")
    if isinstance(config, str | Path):
        config = [f"--job.config_file={config}"]
    on_cpu = device == "cpu" or not torch.accelerator.is_available()
    with enable_cpu(force=device == "cpu") if on_cpu else nullcontext(), _process_state():
        trainer = None
        try:
            parsed = ConfigManager().parse_args(list(config)) if isinstance(config, Sequence) else config
            trainer = RecordingTrainer(parsed, on_step)
            trainer.train()
        finally:
            if trainer is not None:
                trainer.close()
        return trainer.records


@contextmanager
def _process_state() -> Iterator[None]:
    environment, collecting = dict(os.environ), gc.isenabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if "RANK" not in os.environ:
        os.environ.update(_SINGLE_PROCESS)
    owns_group = not dist.is_initialized()
    try:
        yield
    finally:
        if owns_group and dist.is_initialized():
            dist.destroy_process_group()
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        if collecting:
            gc.enable()
        os.environ.clear()
        os.environ.update(environment)


def main() -> None:
    """torchtitan's command line, on whatever device there is."""
    init_logger()
    train(sys.argv[1:])


if __name__ == "__main__":
    main()

__all__ = ["RecordingTrainer", "StepRecord", "main", "train"]
