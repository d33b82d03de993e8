"""Speed and accuracy of the CDNA4 kernels against torch SDPA in bf16, on the paper's shape and on a video's."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from lowbit_attn.cli.benchmarks.timing import Run, current, interleaved
from lowbit_attn.cli.checks.cases import relative
from lowbit_attn.kernels.cdna4 import forward as kernels
from lowbit_attn.recipes import resolve

SHAPES = {"paper: 32768 tokens, 24 heads": (32768, 24), "Wan2.2 720p: 75600 tokens, 40 heads": (75600, 40)}
PAPER_TFLOPS = {"fused_mxfp8": 2978, "fused_mxfp6": 3973, "fused_mxfp4": 4586}
"""Fused-Softmax table 5, MI355X, the first shape."""
PAPER_ERROR = {"fused_mxfp8": 0.0569, "fused_mxfp6": 0.0646, "fused_mxfp4": 0.2053}
"""Fused-Softmax table 4, against BF16 attention."""


@dataclass(frozen=True)
class Speed:
    """TFLOP/s of the kernel alone and with quantization, and of SDPA in the same run; the error and cosine against SDPA."""

    shape: str
    recipe: str
    kernel: float
    with_quantization: float
    sdpa: float
    error: float
    cosine: float


def speeds(run: kernels.Run, device: torch.device, shapes: dict[str, tuple[int, int]] | None = None,
           rounds: int = 3) -> Iterator[Speed]:
    """Every recipe on every shape; the calls of a shape take turns."""
    for name, (tokens, heads) in (shapes or SHAPES).items():
        generator = torch.Generator(device).manual_seed(0)
        query, key, value = (torch.randn(1, tokens, heads, 128, device=device, generator=generator, dtype=torch.float32).bfloat16()
                             for _ in range(3))
        shape = kernels.Shape(1, tokens, tokens, heads, heads, 128)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        sdpa = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)
        with current(device):
            exact = sdpa().transpose(1, 2).float()
            flops = 4 * tokens**2 * heads * 128
            for recipe in kernels.RECIPES:
                resolved = resolve(recipe)
                packed = kernels.quantize(query, key, value, resolved, shape, run, scale=128**-0.5, key_lengths=None, cu_seq=None)
                alone = partial(kernels.attend, packed, query, tokens, resolved, shape, run, key_lengths=None, cu_seq=None)
                whole = partial(kernels.forward, query, key, value, resolved, run)
                calls: dict[str, Run] = {"kernel": alone, "whole": whole, "sdpa": sdpa}
                times = interleaved(calls, device, rounds)
                rate = {call: flops / (1e9 * timing.milliseconds) for call, timing in times.items()}
                output = alone()[0].float()
                cosine = float(torch.nn.functional.cosine_similarity(output.flatten(), exact.flatten(), dim=0))
                yield Speed(name, recipe, rate["kernel"], rate["whole"], rate["sdpa"], relative(output, exact), cosine)
