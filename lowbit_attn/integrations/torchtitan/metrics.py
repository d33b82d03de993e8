"""Recipes and the numerics probe in torchtitan's own metrics log, for the metrics processors of both release lines."""

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from lowbit_attn.integrations.torchtitan.attention import LowbitAttention
from lowbit_attn.ops.measure import Measurement, measure
from lowbit_attn.ops.observe import drop_record, record

if TYPE_CHECKING:
    from lowbit_attn.integrations.torchtitan.options import AttentionOptions

PREFIX = "lowbit_attn/"
logger = logging.getLogger("lowbit_attn")


class AttentionMetrics:
    """Comes before a torchtitan MetricsProcessor in a class's bases.

    Adds to every logged step `lowbit_attn/layers(<recipe>)`, the number of layers that run it on this rank, and every
    `probe_every` steps what `ops.measure` finds on the probed layer. Throughput is torchtitan's own and does not count the
    probe's time.
    """

    model_parts: Any
    logger: Any
    time_last_log: float

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float,
            extra_metrics: dict[str, Any] | None = None) -> None:
        """What torchtitan logs, and ours."""
        layers = self._layers()
        counts = Counter(module.recipe for module in layers)
        ours = {f"{PREFIX}layers({recipe})": count for recipe, count in counts.items()}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **ours})  # type: ignore[misc]
        if counts:
            logger.info("attention: " + ", ".join(f"{recipe} in {count} layers" for recipe, count in counts.items()))
        for module in layers:
            if module.probe is not None and step % module.options.probe_every == 0:
                self._probe(step, module)

    def close(self) -> None:
        """Also forgets the probe's tensors."""
        for module in self._layers():
            if module.probe is not None:
                drop_record(module.probe)
        super().close()  # type: ignore[misc]

    def _layers(self) -> list[LowbitAttention]:
        return [module for part in self.model_parts or [] for module in part.modules() if isinstance(module, LowbitAttention)]

    def _probe(self, step: int, module: LowbitAttention) -> None:
        values = probe_values(module)
        self.logger.log({f"{PREFIX}layer{module.options.probe_layer}/{name}": value for name, value in values.items()}, step)
        logger.info(f"attention numerics of layer {module.options.probe_layer}, {module.recipe}: "
                    + ", ".join(f"{name} {value:.3g}" for name, value in values.items()))
        self.time_last_log = time.perf_counter()


def probe_values(module: LowbitAttention) -> dict[str, float]:
    """The measurement of the tensors that last passed the probed layer, as flat names and numbers."""
    assert module.probe is not None
    seen = record(module.probe)
    query, key, value, grad_output = (seen.tensors[name].float() for name in ("query", "key", "value", "grad_output"))
    tokens = query.shape[0]
    boundaries = [0, tokens] if seen.cu_seq is None else sorted({min(x, tokens) for x in seen.cu_seq.tolist()})
    with torch.no_grad():
        found = measure(query, key, value, grad_output, boundaries, module.recipe)
    return _flat(found)


def _flat(found: Measurement) -> dict[str, float]:
    parts = {"saturated": found.saturated, "flushed": found.flushed, "cosine": found.cosine}
    return {f"{part}({name})": value for part, values in parts.items() for name, value in values.items()}


def describe(options: "AttentionOptions", recipes: list[str]) -> str:
    """The start-up line: how many layers run which recipe, and what was asked for besides."""
    counts = ", ".join(f"{count} x {recipe}" for recipe, count in Counter(recipes).items())
    probe = f"; numerics of layer {options.probe_layer} every {options.probe_every} steps" if options.probe_every else ""
    return f"attention: {counts}{probe}"


__all__ = ["AttentionMetrics", "describe", "probe_values"]
