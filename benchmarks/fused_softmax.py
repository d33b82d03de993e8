"""Errors of the recipes with blocks of 32 against exact attention, beside Fused-Softmax table 4, and how often they roll back.

    python benchmarks/fused_softmax.py [--seq 32768] [--heads 24] [--seeds 10] [--device cuda] [--scale 1] [RECIPE ...]

Normal inputs of head_dim 128 on the backend that `attention` picks; all rows count, exact attention in float32. The share of (row,
key tile) steps that raise a frozen maximum at the recipe's gate is the reference's, over the first head and --rows of its rows.
--scale multiplies K: larger ones give scores that climb.
"""

import argparse

import torch
from torch import Tensor

import lowbit_attn
from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility, forward

PUBLISHED = {"fused_mxfp8": (5.69, 0.99838), "fused_mxfp6": (6.46, 0.99791), "fused_mxfp4": (20.53, 0.97872)}
"""Relative error in percent and cosine of the complete pipeline (U16), against BF16 attention."""

CHUNK = 1 << 28
"""Scores of exact attention held at a time."""


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V in float32, [1, H, S, D]."""
    output = torch.empty_like(query, dtype=torch.float32)
    step = max(1, CHUNK // key.shape[2])
    for head in range(query.shape[1]):
        k, v = key[0, head].float(), value[0, head].float()
        for start in range(0, query.shape[2], step):
            scores = query[0, head, start:start + step].float() @ k.T * query.shape[-1] ** -0.5
            output[0, head, start:start + step] = scores.softmax(-1) @ v
    return output


def compare(output: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Relative Frobenius error in percent, and the cosine of all elements together."""
    a, b = output.flatten().float(), wanted.flatten()
    difference, norm = (a - b).norm().double(), b.norm().double()
    return float(100 * difference / norm), float((a * b).sum(dtype=torch.float64) / (a.norm().double() * norm))


def rollback_rate(query: Tensor, key: Tensor, value: Tensor, recipe: str, rows: int) -> float:
    """Of the first head's first rows, by the reference."""
    q = query[:, :1, :rows]
    stats = forward(q, key[:, :1], value[:, :1], resolve(recipe), Visibility(q.shape[2], key.shape[2]), stats=True).stats
    assert stats is not None
    return stats.rollback_rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=[*PUBLISHED, "mxattention", "mxfp4_ocp", "mxfp8_fast"])
    parser.add_argument("--seq", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    results: dict[str, list[tuple[float, float, float]]] = {recipe: [] for recipe in options.recipes}
    for seed in range(options.seeds):
        generator = torch.Generator(options.device).manual_seed(seed)
        query, key, value = (torch.randn(1, options.heads, options.seq, 128, generator=generator, device=options.device)
                             .to(torch.bfloat16) for _ in range(3))
        key = key * options.scale
        wanted = exact(query, key, value)
        for recipe, found in results.items():
            backend = lowbit_attn.explain(recipe, options.device).backend
            output = lowbit_attn.attention(query, key, value, recipe=recipe, backend=backend)
            found.append((*compare(output, wanted), rollback_rate(query, key, value, recipe, options.rows)))
    print(f"{options.seeds} seeds, {options.heads} heads, {options.seq} tokens, {options.device}")
    for recipe, found in results.items():
        error, cosine, rate = (torch.tensor(x) for x in zip(*found, strict=True))
        published = "published {} %, {}".format(*PUBLISHED[recipe]) if recipe in PUBLISHED else ""
        print(f"{recipe} ({lowbit_attn.explain(recipe, options.device).backend}): error {error.mean():.3f} % "
              f"({error.min():.3f} to {error.max():.3f}), cosine {cosine.mean():.5f}, rolled back {rate.mean():.3%}  {published}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
