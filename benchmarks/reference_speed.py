"""Time of the reference `mxfp8` forward against the same attention in plain float32 PyTorch operations, on one machine.

    python benchmarks/reference_speed.py [--heads 8] [--seq 4096] [--head-dim 128] [--repeats 3] [--threads N] [--recipe mxfp8]

Prints both times and their ratio; ends with status 1 above --limit (6). Both run in turn, and the best of each counts.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility, forward


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--limit", type=float, default=6.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, options.heads, options.seq, options.head_dim) for _ in range(3))
    recipe, seen = resolve(options.recipe), Visibility(options.seq, options.seq)
    times = [(seconds(lambda: plain_attention(q, k, v)), seconds(lambda: forward(q, k, v, recipe, seen)))
             for _ in range(options.repeats)]
    plain, reference = (min(column) for column in zip(*times, strict=True))
    ratio = reference / plain
    print(f"b1 h{options.heads} s{options.seq} d{options.head_dim}, {options.threads} threads, best of {options.repeats}: "
          f"plain fp32 {plain:.2f} s, {options.recipe} reference {reference:.2f} s, ratio {ratio:.2f} (limit {options.limit:g})")
    return int(ratio > options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
