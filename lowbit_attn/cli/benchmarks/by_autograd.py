"""Training calls of whatever autograd can take back: any contender whose result has a graph."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowbit_attn.cli.benchmarks.contenders import Bound, Contender, Trainer, TrainingCall
from lowbit_attn.cli.benchmarks.workloads import Inputs


def trainer(contender: Contender, name: str | None = None) -> Trainer:
    """The contender's forward, and autograd's way back."""
    return Trainer(name or contender.name, lambda inputs, grad: _bind(contender, inputs, grad), contender.baseline)


def _bind(contender: Contender, inputs: Inputs, grad: Tensor) -> TrainingCall:
    calls = _Calls(contender, inputs, grad)
    bound = contender.bind(inputs)
    return TrainingCall(calls.backward, calls.whole, tuple, saved_bytes(bound.run), bound.note)


class _Calls:
    """A forward and its way back, on leaves of the caller's stream.

    Autograd ties a leaf to the stream that first used it, and waits for that one: in a capture on another stream it may not.
    """

    def __init__(self, contender: Contender, inputs: Inputs, grad: Tensor):
        self._contender, self._inputs, self._grad = contender, inputs, grad
        self._stream: object = None
        self._here: tuple[Bound, tuple[Tensor, ...]] | None = None
        self._output: Tensor | None = None

    def _on_stream(self) -> tuple[Bound, tuple[Tensor, ...]]:
        stream = torch.cuda.current_stream(self._grad.device) if self._grad.is_cuda else None
        if self._here is None or stream != self._stream:
            leaves = tuple(x.detach().requires_grad_() for x in (self._inputs.query, self._inputs.key, self._inputs.value))
            own = replace(self._inputs, query=leaves[0], key=leaves[1], value=leaves[2])
            self._stream, self._here, self._output = stream, (self._contender.bind(own), leaves), None
        return self._here

    def whole(self) -> tuple[Tensor, ...]:
        """Forward and backward."""
        bound, leaves = self._on_stream()
        return torch.autograd.grad(bound.output(bound.run()), leaves, self._grad)

    def backward(self) -> tuple[Tensor, ...]:
        """The backward of one forward, again and again."""
        bound, leaves = self._on_stream()
        if self._output is None:
            self._output = bound.output(bound.run())
        return torch.autograd.grad(self._output, leaves, self._grad, retain_graph=True)


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes of all storages that a forward keeps for its backward, its inputs and output included if it keeps them."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        result = run()  # held, so that no storage is freed and its address used again
    del result
    return sum(storages.values())
