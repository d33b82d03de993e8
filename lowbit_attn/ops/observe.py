"""torch.ops.lowbit_attn.observe: the identity, which also keeps a copy of what passes, forward and backward.

An operator and not a hook, so that the real values are seen inside compiled, checkpointed and sharded blocks, where hooks
cannot look.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit_attn.ops.registration import refuse_forward_mode_and_func, refuse_vmap

OBSERVED_TOKENS = 1024
"""Tokens kept of what passes: the first of a packed row, or of the first batch item."""


@dataclass
class Record:
    """What passed last: "query", "key", "value", "output" and "grad_output", each [tokens, H, D]; document boundaries."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    cu_seq: Tensor | None = None


_RECORDS: dict[int, Record] = {}
_NUMBERS = itertools.count()


def new_record() -> int:
    """A number to pass to `observe`, until `drop_record`."""
    number = next(_NUMBERS)
    _RECORDS[number] = Record()
    return number


def record(number: int) -> Record:
    """What has passed under this number so far."""
    return _RECORDS[number]


def drop_record(number: int) -> None:
    """Forget what has passed; `observe` under this number keeps nothing from now on."""
    _RECORDS.pop(number, None)


@torch.library.custom_op("lowbit_attn::observe", mutates_args=())
def _observe(x: Tensor, cu_seq: Tensor | None, number: int, name: str) -> Tensor:
    kept = _RECORDS.get(number)
    if kept is not None:
        tokens = x if x.ndim == 3 else x[0].transpose(0, 1)
        kept.tensors[name] = tokens[:OBSERVED_TOKENS].detach().clone()
        kept.cu_seq = kept.cu_seq if cu_seq is None else cu_seq.detach().clone()
    return x.clone(memory_format=torch.contiguous_format)


@_observe.register_fake
def _(x: Tensor, cu_seq: Tensor | None, number: int, name: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, _, ctx.number, ctx.name = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return (_observe(grad, None, ctx.number, "grad_output") if ctx.name == "output" else grad), None, None, None


_observe.register_autograd(_backward, setup_context=_setup_context)
refuse_forward_mode_and_func(_observe)
refuse_vmap(_observe)


def observe(x: Tensor, cu_seq: Tensor | None, number: int, name: str) -> Tensor:
    """`x` itself, as a contiguous copy, after noting its first tokens in record `number` under `name`.

    Args:
        x: packed [T, H, D] or dense [B, H, S, D]; of the output, the gradient is noted too, as "grad_output".
        cu_seq: document boundaries of the packed rows to note along with it, None if there are none or they are known.
    """
    return _observe(x, cu_seq, number, name)


__all__ = ["OBSERVED_TOKENS", "Record", "drop_record", "new_record", "observe", "record"]
