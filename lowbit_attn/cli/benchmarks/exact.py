"""How far an output lies from exact attention: relative Frobenius error against float32, on a sample of rows."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit_attn.cli.benchmarks.workloads import Inputs

ROWS = 1024
"""Query rows that are compared, evenly spaced over each sequence (over all documents together): the last one included."""

_CHUNK = 1 << 28
"""Scores held at a time."""


def sampled_rows(tokens: int, rows: int = ROWS) -> Tensor:
    """Evenly spaced row numbers, the first and the last among them."""
    return torch.linspace(0, tokens - 1, min(rows, tokens), dtype=torch.float64).round().long().unique()


def _sequences(inputs: Inputs) -> Iterator[tuple[tuple, Tensor, Tensor, Tensor, Tensor]]:
    """Per sequence or document: where its sampled rows lie in an output, their positions in it, and [H, S, D] Q, K, V."""
    workload, device = inputs.workload, inputs.query.device
    if not workload.packed:
        rows = sampled_rows(workload.queries).to(device)
        for item in range(workload.batch):
            yield (item, slice(None), rows), rows, inputs.query[item, :, rows], inputs.key[item], inputs.value[item]
        return
    sampled, start = sampled_rows(sum(workload.documents)), 0
    for length in workload.documents:
        here = sampled[(sampled >= start) & (sampled < start + length)].to(device)
        if len(here):
            q, k, v = inputs.query[here], inputs.key[start:start + length], inputs.value[start:start + length]
            yield (here,), here - start, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        start += length


def _attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, causal: bool) -> Tensor:
    """Exact attention of sampled rows [H, n, D] over [Hkv, S, D] in float32; a causal row sees keys up to its position."""
    heads, group = query.shape[0], query.shape[0] // key.shape[0]
    step = max(1, _CHUNK // (query.shape[1] * key.shape[1]))
    hidden = torch.arange(key.shape[1], device=key.device)[None] > positions[:, None] if causal else None
    parts = []
    for first in range(0, heads, step):
        shared = torch.arange(first, min(first + step, heads), device=key.device) // group
        scores = query[first:first + step].float() @ key[shared].float().mT / math.sqrt(query.shape[-1])
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        parts.append(scores.softmax(-1) @ value[shared].float())
    return torch.cat(parts)


class Exact:
    """Exact attention on the sampled rows of a workload, computed once and compared with many outputs."""

    def __init__(self, inputs: Inputs):
        causal = inputs.workload.causal
        self._packed = inputs.workload.packed
        self._parts = [(where, _attend(q, k, v, positions, causal)) for where, positions, q, k, v in _sequences(inputs)]

    @property
    def largest(self) -> float:
        """Largest magnitude among the sampled rows."""
        return max(float(part.abs().max()) for _, part in self._parts)

    def error(self, output: Tensor) -> float:
        """Relative Frobenius error of an output [B, H, S, D] or [T, H, D]; NaN if it holds one in a sampled row."""
        wrong = total = 0.0
        for where, exact in self._parts:
            rows = output[where].float()
            if self._packed:
                rows = rows.transpose(0, 1)
            wrong += float((rows - exact).double().square().sum())
            total += float(exact.double().square().sum())
        return math.sqrt(wrong / total)
