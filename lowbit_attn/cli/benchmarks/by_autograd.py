"""Training calls of whatever autograd can take back: any contender whose result has a graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowbit_attn.cli.benchmarks.contenders import Bound, Contender, Trainer, TrainingCall
from lowbit_attn.cli.benchmarks.workloads import Inputs


def trainer(contender: Contender, name: str | None = None) -> Trainer:
    """The contender's forward, and autograd's way back."""
    return Trainer(name or contender.name, lambda inputs, grad: _bind(contender.bind(inputs), inputs, grad), contender.baseline)


def _bind(bound: Bound, inputs: Inputs, grad: Tensor) -> TrainingCall:
    leaves = (inputs.query, inputs.key, inputs.value)

    def whole() -> tuple[Tensor, ...]:
        return torch.autograd.grad(bound.output(bound.run()), leaves, grad)

    return TrainingCall(_Backward(bound, leaves, grad), whole, tuple, saved_bytes(bound.run), bound.note)


class _Backward:
    """The backward of one forward, again and again. Autograd runs it on the forward's stream, so that follows the caller's."""

    def __init__(self, bound: Bound, leaves: tuple[Tensor, ...], grad: Tensor):
        self._bound, self._leaves, self._grad = bound, leaves, grad
        self._stream: object = None
        self._output: Tensor | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        stream = torch.cuda.current_stream(self._grad.device) if self._grad.is_cuda else None
        if self._output is None or stream != self._stream:
            self._stream, self._output = stream, self._bound.output(self._bound.run())
        return torch.autograd.grad(self._output, self._leaves, self._grad, retain_graph=True)


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
