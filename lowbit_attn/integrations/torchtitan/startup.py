"""What both release lines check before any data is read, and how they hand each layer its recipe.

Every refusal names the setting, the value and what is accepted. Nothing here imports torchtitan.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit_attn.integrations.torchtitan.attention import LowbitAttention
from lowbit_attn.integrations.torchtitan.options import AttentionOptions
from lowbit_attn.ops.observe import new_record
from lowbit_attn.ops.validation import MAX_HEAD_DIM

MASTER_DTYPES = ("float32", "bfloat16")
MEMORY_BUDGET = ("activation_checkpoint: a memory budget lets the compiler run attention's forward again in the backward; "
                 "selective checkpointing saves its output")


@dataclass(frozen=True)
class Heads:
    """Shape of one layer's attention."""

    query: int
    key_value: int
    head_dim: int


def check_precision(dtype: str, mixed_precision_param: str) -> None:
    """Weights and activations in a dtype that low-bit attention trains in."""
    for setting, value in (("training.dtype", dtype), ("training.mixed_precision_param", mixed_precision_param)):
        if value not in MASTER_DTYPES:
            raise ValueError(f"{setting}: got {value!r}, whose range gradients of low-bit attention leave; lowbit_attn accepts: "
                             f"{', '.join(MASTER_DTYPES)}")


def check_context_parallel(degree: int) -> None:
    """Every rank needs the whole sequence."""
    if degree > 1:
        raise NotImplementedError(f"parallelism.context_parallel_degree: got {degree}; lowbit_attn accepts: 1 (every rank needs "
                                  "the whole sequence)")


def check_heads(heads: Heads, model: str) -> None:
    """A head_dim that the recipes are defined for."""
    if not 1 <= heads.head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim: got {heads.head_dim} from model {model!r}; lowbit_attn accepts: 1 to {MAX_HEAD_DIM}")


def try_once(module: LowbitAttention, heads: Heads, recipes: Iterable[str], device: str, *, packed: bool) -> None:
    """A few tokens through the real call, so that what it refuses (backend, head dim, device) is refused at start-up.

    The packed rows hold a document of one token, an empty one and one of two tokens. The module is left as it was.
    """
    previous = module.recipe
    with torch.enable_grad():
        for module.recipe in dict.fromkeys(recipes):
            shape = (3, heads.head_dim)
            query, key, value = (
                torch.zeros(1, count, *shape, dtype=module.compute_dtype, device=device, requires_grad=True)
                for count in (heads.query, heads.key_value, heads.key_value))
            if packed:
                boundaries = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=device)
                q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
                output = module.attend_packed(q, k, v, boundaries, boundaries, 2, 2, scale=None)
            else:
                output = module.attend(query, key, value, is_causal=True, scale=None)
            output.sum().backward()
    module.recipe = previous


def assign(layers: Iterable[tuple[int, LowbitAttention]], recipes: list[str], options: AttentionOptions) -> None:
    """Give each layer its recipe, and the probed one its record."""
    for index, module in layers:
        module.recipe = recipes[index]
        if options.probe_every and index == options.probe_layer:
            module.probe = new_record()


class DocumentCheck:
    """Forward pre-hook of a model: the documents of a step fit its rows, and their number does not recompile blocks.

    torchtitan's own loaders cut documents at the end of a row; metadata made otherwise could say what our bound of the
    document lengths, the row, does not cover.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads host values only: no wait for the device."""
        metadata = kwargs.get("attention_masks")
        boundaries = [getattr(metadata, name, None) for name in ("cu_seq_q", "cu_seq_k")]
        if metadata is None or not all(isinstance(cu_seq, Tensor) for cu_seq in boundaries):
            return
        longest = max(int(metadata.max_q), int(metadata.max_k))
        if longest > self.seq_len:
            raise ValueError(f"attention_masks.max_q: got a document of {longest} tokens with training.seq_len {self.seq_len}; "
                             "lowbit_attn accepts: documents that end with their row")
        for cu_seq in boundaries:
            # Without this, compiled blocks recompile when the number of documents first changes.
            torch._dynamo.maybe_mark_dynamic(cu_seq, 0)


__all__ = ["MEMORY_BUDGET", "DocumentCheck", "Heads", "assign", "check_context_parallel", "check_heads",
           "check_precision", "try_once"]
