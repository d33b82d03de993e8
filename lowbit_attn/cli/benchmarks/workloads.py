"""What is measured: shapes of attention, their presets, their inputs and their operations."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Preset(StrEnum):
    """The sets of workloads; `small` is the one that a CPU gets through."""

    PAPER = "paper"
    WAN = "wan"
    LLAMA = "llama"
    PACKED = "packed"
    SMALL = "small"


class Layout(StrEnum):
    """How batched inputs lie in memory; every implementation gets the same tensors, as views in the order it wants."""

    BSHD = "bshd"
    BHSD = "bhsd"


@dataclass(frozen=True)
class Workload:
    """Attention of `queries` by `keys` tokens in each of `batch` sequences, or of packed `documents` (their lengths).

    `v_mean` shifts V, which makes a narrow accumulator show.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    batch: int = 1
    queries: int = 0
    keys: int = 0
    documents: tuple[int, ...] = ()
    v_mean: float = 0.0

    @property
    def packed(self) -> bool:
        """Whether the inputs are documents laid end to end."""
        return bool(self.documents)

    @property
    def scores(self) -> float:
        """Query-key pairs under the mask, counted as is usual: half of them if causal."""
        pairs = sum(n * n for n in self.documents) if self.packed else self.batch * self.queries * self.keys
        return self.heads * pairs * (0.5 if self.causal else 1.0)

    @property
    def flops(self) -> float:
        """Floating point operations of the two products of the forward."""
        return 4.0 * self.scores * self.head_dim

    def __str__(self) -> str:
        groups = "" if self.heads == self.kv_heads else f"/{self.kv_heads}"
        size = (f"{sum(self.documents)} tokens in {len(self.documents)} documents" if self.packed
                else f"b{self.batch} s{self.queries}" + ("" if self.queries == self.keys else f"x{self.keys}"))
        shift = f", V mean {self.v_mean:g}" if self.v_mean else ""
        return f"{self.name}: {size}, h{self.heads}{groups} d{self.head_dim} {'causal' if self.causal else 'full'}{shift}"




@dataclass(frozen=True)
class Inputs:
    """Q, K and V of a workload in bfloat16: [B, H, S, D] views, or packed [T, H, D] with `cu` int32 [documents + 1]."""

    workload: Workload
    query: Tensor
    key: Tensor
    value: Tensor
    cu: Tensor | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(self.workload.documents, default=0)

    @classmethod
    def draw(cls, workload: Workload, device: torch.device, layout: Layout = Layout.BSHD, seed: int = 0) -> "Inputs":
        """Standard normal values, V shifted by the workload's `v_mean`."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(tokens: int, heads: int, mean: float = 0.0) -> Tensor:
            shape: tuple[int, ...] = (tokens, heads, workload.head_dim)
            if not workload.packed:
                shape = ((workload.batch, *shape) if layout is Layout.BSHD
                         else (workload.batch, heads, tokens, workload.head_dim))
            drawn = torch.randn(shape, device=device, generator=generator).add_(mean).bfloat16()
            return drawn if workload.packed or layout is Layout.BHSD else drawn.transpose(1, 2)

        tokens = sum(workload.documents)
        queries, keys = (tokens, tokens) if workload.packed else (workload.queries, workload.keys)
        q, k = normal(queries, workload.heads), normal(keys, workload.kv_heads)
        v = normal(keys, workload.kv_heads, workload.v_mean)
        ends = torch.tensor([0, *workload.documents]).cumsum(0).to(device, torch.int32) if workload.packed else None
        return cls(workload, q, k, v, ends)


def _dense(name: str, batch: int, heads: int, tokens: int, *, causal: bool = False, kv_heads: int | None = None,
           head_dim: int = 128, keys: int | None = None, v_mean: float = 0.0) -> Workload:
    return Workload(name, heads, kv_heads or heads, head_dim, causal, batch, tokens, keys or tokens, v_mean=v_mean)


def _packed(name: str, documents: Sequence[int], heads: int = 16, kv_heads: int | None = None, head_dim: int = 128) -> Workload:
    return Workload(name, heads, kv_heads or heads, head_dim, True, documents=tuple(documents))


def log_uniform_documents(count: int, total: int, shortest: int = 128, longest: int = 8192, seed: int = 0) -> tuple[int, ...]:
    """`count` lengths, log-uniform between the two bounds, that fill `total` exactly: drawn until they nearly do, then scaled."""
    draw = random.Random(seed)
    while True:
        lengths = [round(math.exp(draw.uniform(math.log(shortest), math.log(longest)))) for _ in range(count)]
        scale = total / sum(lengths)
        scaled = [min(longest, max(shortest, round(length * scale))) for length in lengths]
        scaled[scaled.index(max(scaled))] += total - sum(scaled)
        if 0.95 < scale < 1.05 and shortest <= min(scaled) and max(scaled) <= longest:
            return tuple(scaled)


PRESETS: dict[Preset, tuple[Workload, ...]] = {
    Preset.PAPER: (
        _dense("long", 1, 24, 32768),
        _dense("4x4096 causal", 4, 16, 4096, causal=True),
        _dense("4x4096", 4, 16, 4096),
        _dense("accumulation 32k", 1, 4, 4096, keys=32768, v_mean=0.5),
        _dense("accumulation 128k", 1, 4, 4096, keys=131072, v_mean=0.5),
    ),
    Preset.WAN: (_dense("Wan2.2 720p", 1, 40, 75600),),
    Preset.LLAMA: tuple(_dense(f"llama {tokens // 1024}k", 32768 // tokens, 32, tokens, causal=True, kv_heads=8)
                        for tokens in (4096, 8192, 16384, 32768)),
    Preset.PACKED: (
        _packed("4x4096", [4096] * 4),
        _packed("16x4096", [4096] * 16),
        _packed("16x1024", [1024] * 16),
        _packed("64x1024", [1024] * 64),
        _packed("8192 + 32x256", [8192, *[256] * 32]),
        _packed("8192 + 224x256", [8192, *[256] * 224]),
        _packed("11 log-uniform in 16k", log_uniform_documents(11, 16384)),
        _packed("11 log-uniform in 16k, 4 kv heads", log_uniform_documents(11, 16384), kv_heads=4),
        _packed("29 log-uniform in 64k", log_uniform_documents(29, 65536)),
    ),
    Preset.SMALL: (
        _dense("small", 1, 2, 256, head_dim=64),
        _dense("small causal", 1, 4, 256, causal=True, kv_heads=2, head_dim=64),
        _packed("small packed", [200, 1, 55], heads=2, head_dim=64),
        _dense("small accumulation", 1, 1, 128, keys=2048, head_dim=64, v_mean=0.5),
    ),
}
