"""What quantization does to one attention call: saturated and flushed elements, and distance from exact attention.

For study, on a few documents at a time: it runs the reference, whatever backend trains.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lowbit_attn.ops.sdpa import dense
from lowbit_attn.recipes import Recipe, resolve
from lowbit_attn.reference import Stats, Visibility, backward, forward


@dataclass(frozen=True)
class Measurement:
    """Shares of all elements of each operand ("q", "k", "v", "p", "do", "ds"), and cosines with float32 attention.

    Attributes:
        saturated: share that was clamped at the largest code.
        flushed: share that was not zero and became zero.
        cosine: of "output", "grad_query", "grad_key" and "grad_value", each over all documents together.
    """

    saturated: dict[str, float]
    flushed: dict[str, float]
    cosine: dict[str, float]


_RESULTS = ("output", "grad_query", "grad_key", "grad_value")


def measure(query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, cu_seq: list[int], recipe: str | Recipe, *,
            scale: float | None = None) -> Measurement:
    """Run `recipe`'s forward and backward, causal inside each document, and compare it with exact attention.

    Args:
        query, grad_output: [T, Hq, D]; key, value: [T, Hkv, D], any floating dtype.
        cu_seq: document boundaries, ascending from 0 and at most T; rows after the last are left out.
        recipe: one that trains.
    """
    parsed = resolve(recipe)
    stats: list[Stats] = []
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in _RESULTS}
    for start, stop in pairwise(cu_seq):
        if stop == start:
            continue
        q, k, v, grad = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value, grad_output))
        ours = _quantized(q, k, v, grad, parsed, scale, stats)
        for name, mine, exact in zip(_RESULTS, ours, _exact(q, k, v, grad, scale), strict=True):
            pairs[name].append((mine.flatten().double(), exact.flatten().double()))
    counts = [(name, count) for one in stats for name, count in one.operands.items()]
    names = list(dict.fromkeys(name for name, _ in counts))
    total = {name: max(1, sum(c.total for n, c in counts if n == name)) for name in names}
    return Measurement({name: sum(c.saturated for n, c in counts if n == name) / total[name] for name in names},
                       {name: sum(c.flushed for n, c in counts if n == name) / total[name] for name in names},
                       {name: _cosine(parts) for name, parts in pairs.items()})


def _quantized(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, recipe: Recipe, scale: float | None,
               stats: list[Stats]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    visibility = Visibility.create(1, q.shape[2], k.shape[2], is_causal=True, device=q.device)
    result = forward(q, k, v, recipe, visibility, scale=scale, save=True, stats=True)
    assert result.saved is not None
    gradients = backward(grad, None, result.saved, result.output.to(q.dtype), result.lse, recipe, visibility, scale=scale,
                         stats=True)
    stats += [one for one in (result.stats, gradients.stats) if one is not None]
    return result.output, gradients.query, gradients.key, gradients.value


def _exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
        output = dense(*inputs, is_causal=True, bottom_right=False, key_lengths=None, scale=scale, enable_gqa=True)
        return output.detach(), *torch.autograd.grad(output, inputs, grad.float())


def _cosine(parts: list[tuple[Tensor, Tensor]]) -> float:
    """1 where both are zero."""
    mine, exact = (torch.cat(side) for side in zip(*parts, strict=True)) if parts else (torch.zeros(1),) * 2
    norm = mine.norm() * exact.norm()
    return float(mine @ exact / norm) if norm else float(torch.equal(mine, exact))


__all__ = ["Measurement", "measure"]
