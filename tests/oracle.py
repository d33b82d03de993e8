"""Exact attention in float64, written the obvious way, and the measures that tests compare with it."""

import torch
from torch import Tensor

ODD_SHAPES = [
    (1, 1), (3, 3), (64, 1), (64, 32), (64, 128), (113, 128), (108, 256), (128, 192), (128, 217), (239, 1), (799, 3), (255, 256),
    (256, 512), (384, 256), (640, 128), (512, 256), (1023, 1024), (1024, 1023), (1024, 1024),
]
"""(queries, keys) that have broken other attention kernels."""

ALIGNMENTS = [None, "top_left", "bottom_right"]
"""No causal mask, and its two alignments."""


def visible(queries: int, keys: int, alignment: str | None = None, lengths: Tensor | None = None) -> Tensor:
    """Bool [B or 1, 1, queries, keys]: which keys a row sees; bottom_right aligns with `lengths` if given."""
    row, key = torch.arange(queries)[:, None], torch.arange(keys)
    lengths = torch.tensor([keys]) if lengths is None else lengths
    lengths = lengths.long()[:, None, None, None]
    mask = (key < lengths).expand(-1, -1, queries, -1)
    if alignment is None:
        return mask
    return mask & (key <= row + (lengths - queries if alignment == "bottom_right" else 0))


def exact_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
                    scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Output and natural-log lse in float64 of [B, H, S, D] tensors; a row that sees no key gives 0 and -inf."""
    query, key, value = (x.double() for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)
    seen = mask.any(-1, keepdim=True)
    # A row without keys takes any finite scores; its results are replaced, so no NaN enters the gradients.
    scores = scores.masked_fill(~mask & seen, -torch.inf)
    output = torch.where(seen, scores.softmax(-1) @ value, 0.0)
    return output, torch.where(seen[..., 0], scores.logsumexp(-1), -torch.inf)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def cosine(actual: Tensor, expected: Tensor) -> float:
    """Cosine similarity of the flattened tensors."""
    flat = [x.detach().double().flatten() for x in (actual, expected)]
    return float(torch.nn.functional.cosine_similarity(*flat, dim=0))


def boundaries(*values: int) -> Tensor:
    """cu_seq as the operators take it."""
    return torch.tensor(values, dtype=torch.int32)
