"""A byte-level GPT: pre-norm, rotary positions, GELU, no biases; its attention is an argument.

What comes before and after attention are functions of tensors alone, so that torch.compile makes one graph of each for all layers
and for every attention: runs differ in nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of query, key and value [B, H, S, D]."""

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """`width` is a multiple of head_dim."""

    layers: int = 6
    width: int = 1024
    head_dim: int = 128
    context: int = 1024

    @property
    def heads(self) -> int:
        """Heads of every layer."""
        return self.width // self.head_dim


def before(x: Tensor, norm: Tensor, projection: Tensor, angles: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [B, S, H, D] of a layer's input [B, S, width]."""
    projected = F.linear(F.rms_norm(x, norm.shape, norm), projection)
    query, key, value = projected.unflatten(-1, (3, heads, -1)).unbind(2)
    return _rotated(query, angles), _rotated(key, angles), value


def after(x: Tensor, attended: Tensor, projection: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A layer's output from its input and its attention's output [B, S, H, D]."""
    x = x + F.linear(attended.flatten(2), projection)
    return x + F.linear(F.gelu(F.linear(F.rms_norm(x, norm.shape, norm), up), approximate="tanh"), down)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions; `angles` are cosines and sines [2, S, 1, D / 2]."""
    first, second = x.float().chunk(2, -1)
    cosine, sine = angles
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1).to(x.dtype)


@lru_cache(maxsize=1)
def _compiled() -> tuple[Callable, Callable]:
    """Both functions, for all models of a process: runs of one seed differ in nothing but attention."""
    return tuple(torch.compile(part, fullgraph=True, dynamic=False) for part in (before, after))  # type: ignore[return-value]


class Layer(nn.Module):
    """The weights of one layer."""

    def __init__(self, size: Size):
        super().__init__()
        width = size.width
        self.norms = nn.Parameter(torch.ones(2, width))
        self.attention_in = nn.Parameter(torch.empty(3 * width, width))
        self.attention_out = nn.Parameter(torch.empty(width, width))
        self.up = nn.Parameter(torch.empty(4 * width, width))
        self.down = nn.Parameter(torch.empty(width, 4 * width))


class GPT(nn.Module):
    """Logits [B, S, 256] of bytes [B, S]."""

    def __init__(self, size: Size, seed: int):
        super().__init__()
        self.size = size
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, size.width))
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.Parameter(torch.ones(size.width))
        self.head = nn.Parameter(torch.empty(VOCABULARY, size.width))
        self.register_buffer("angles", _angles(size), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "norm" not in name:
                into_residual = name.endswith(("attention_out", "down"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if into_residual else 0.02, generator=generator)
        self.before, self.after = before, after

    def compile_parts(self) -> None:
        """Compile what is not attention."""
        self.before, self.after = _compiled()

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        # A product with ones and zeros: unlike that of a table, its gradient is summed in the same order every time.
        chosen = tokens[..., None] == torch.arange(VOCABULARY, device=tokens.device)
        x = (chosen.to(self.embedding.dtype) @ self.embedding).float()  # what layers add to stays float32 under autocast
        angles = self.get_buffer("angles")[:, :tokens.shape[1]]
        for layer in self.layers:
            assert isinstance(layer, Layer)
            query, key, value = self.before(x, layer.norms[0], layer.attention_in, angles, self.size.heads)
            attended = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)
            x = self.after(x, attended, layer.attention_out, layer.norms[1], layer.up, layer.down)
        return F.linear(F.rms_norm(x, self.norm.shape, self.norm), self.head)

    def parameter_groups(self, decay: float) -> list[dict]:
        """Weight decay on matrices only."""
        matrices = [p for name, p in self.named_parameters() if p.ndim == 2 and "norm" not in name]
        others = [p for name, p in self.named_parameters() if p.ndim != 2 or "norm" in name]
        return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, nats per byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _angles(size: Size) -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, size.head_dim, 2) / size.head_dim)
    angle = torch.arange(size.context)[:, None, None] * frequency
    return torch.stack((angle.cos(), angle.sin()))
