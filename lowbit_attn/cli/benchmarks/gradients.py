"""How far gradients lie from those of exact attention: relative Frobenius errors against float32, all rows."""

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lowbit_attn.cli.benchmarks.workloads import Inputs

NAMES = ("dQ", "dK", "dV")

_CHUNK = 1 << 28
"""Scores held at a time, of which there are a few tensors."""


def _sequences(inputs: Inputs, tensors: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
    """Views [H, S, D] of each tensor, sequence by sequence or document by document."""
    if not inputs.workload.packed:
        for item in range(inputs.workload.batch):
            yield [x[item] for x in tensors]
        return
    for start, stop in pairwise(accumulate(inputs.workload.documents, initial=0)):
        yield [x[start:stop].transpose(0, 1) for x in tensors]


class ExactGradients:
    """dQ, dK and dV of exact attention, computed once and compared with many others."""

    def __init__(self, inputs: Inputs, grad: Tensor):
        leaves = tuple(x.detach() for x in (inputs.query, inputs.key, inputs.value))
        self.exact = tuple(torch.zeros_like(x, dtype=torch.float32) for x in leaves)
        for q, k, v, do, dq, dk, dv in _sequences(inputs, (*leaves, grad, *self.exact)):
            heads = max(1, _CHUNK * k.shape[0] // max(1, q.shape[0] * q.shape[1] * k.shape[1]))
            for first in range(0, k.shape[0], heads):
                kv, group = slice(first, first + heads), q.shape[0] // k.shape[0]
                rows = slice(first * group, (first + heads) * group)
                _accumulate(q[rows], k[kv], v[kv], do[rows], (dq[rows], dk[kv], dv[kv]), inputs.workload.causal)

    def errors(self, gradients: tuple[Tensor, ...]) -> dict[str, float]:
        """Relative Frobenius error of each, NaN if it holds one."""
        return {f"{name} error": math.sqrt(float((mine.float() - exact).double().square().sum())
                                           / float(exact.double().square().sum()))
                for name, mine, exact in zip(NAMES, gradients, self.exact, strict=True)}


def _accumulate(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, into: tuple[Tensor, ...], causal: bool) -> None:
    """Add the gradients of query, grad [H, Sq, D] and key, value [Hkv, Sk, D] to `into`, some rows at a time."""
    kv_heads, keys, channels = key.shape
    k, v = key.float()[:, None], value.float()[:, None]
    scale = 1.0 / math.sqrt(channels)
    dq, dk, dv = into
    step = max(1, _CHUNK // max(1, query.shape[0] * keys))
    for start in range(0, query.shape[1], step):
        q, do = (x[:, start:start + step].float().unflatten(0, (kv_heads, -1)) for x in (query, grad))
        scores = q @ k.mT * scale
        if causal:
            row = torch.arange(start, start + q.shape[2], device=q.device)[:, None]
            scores.masked_fill_(torch.arange(keys, device=q.device) > row, -math.inf)
        p = scores.softmax(-1)
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[:, start:start + step] += (ds @ k).flatten(0, 1)
        dk += (ds.flatten(1, 2).mT @ q.flatten(1, 2))
        dv += (p.flatten(1, 2).mT @ do.flatten(1, 2))
