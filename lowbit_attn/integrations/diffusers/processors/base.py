"""What all attention processors share: a recipe, the stock processor behind it, and the masks they understand."""

import os
from typing import Any, cast

import torch

from lowbit_attn.api import attention
from lowbit_attn.recipes import UNQUANTIZED


class LowBitProcessor:
    """An attention processor with a recipe; with `bf16` it is the stock processor.

    Subclasses define `__call__` with the parameter names of the processor they stand for (diffusers inspects them).

    The attributes that change between calls are plain strings, because torch.compile guards strings: one graph per recipe, and
    never a stale one. `ran` is only ever *written* in traced code, which Dynamo replays after each call of the compiled graph
    without guarding it; so it says what ran, compiled or not.

    Attributes:
        recipe: recipe of the next call, canonical text.
        ran: recipe of the last call, set to None by whoever reads it.
        fell_back: with `on_unsupported="unchanged"`, why the last call ran in the stock processor instead of its recipe.
    """

    def __init__(self, stock: Any, name: str, on_unsupported: str = "error") -> None:
        self.stock = stock
        self.name = name
        self.on_unsupported = on_unsupported
        self.recipe: str = UNQUANTIZED
        self.ran: str | None = None
        self.fell_back: str | None = None

    # diffusers sets these on whatever processor a module has; they belong to the stock one.
    @property
    def _attention_backend(self) -> Any:
        return self.stock._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.stock._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.stock._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.stock._parallel_config = config

    def runs_stock(self, query_source: torch.Tensor, mask: torch.Tensor | None, keys: int) -> bool:
        """Whether this call is the stock processor's; records what runs. `keys` is the length of the key sequence."""
        if self.recipe == UNQUANTIZED:
            self.ran = UNQUANTIZED
            return True
        if self._parallel_config is not None:
            raise NotImplementedError(f"{self.name}: context parallelism with recipe {self.recipe!r} is not supported; "
                                      "accepted: recipe 'bf16', or no context parallelism")
        problem = mask_problem(mask, query_source.shape[0], keys)
        if problem is None:
            self.ran = self.recipe
            return False
        if self.on_unsupported == "error":
            raise ValueError(f"{self.name}: attention_mask: got {problem}; accepted: none, or bool key padding [B, 1, 1, keys] "
                             "with the valid keys first (on_unsupported: unchanged runs such calls in the stock processor)")
        self.ran = UNQUANTIZED
        self.fell_back = problem
        return True

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention in this call's recipe over `[B, S, H, D]`; the transposes are views on both ways."""
        lengths = None if mask is None else key_lengths(mask, query.shape[0])
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = attention(query, key, value, recipe=self.recipe, key_lengths=lengths)
        return cast(torch.Tensor, out).transpose(1, 2)


def mask_problem(mask: torch.Tensor | None, batch: int, keys: int) -> str | None:
    """Why a mask cannot run as key lengths, None if it can.

    Dtype and shape are always checked. That the valid keys come first is a matter of values: checked on CPU, and on other
    devices under LOWBIT_ATTN_VALIDATE=1 (it synchronises), never in compiled code. The supported models build only such masks.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return f"dtype {mask.dtype}"
    if tuple(mask.shape[1:]) != (1, 1, keys) or mask.shape[0] not in (1, batch):
        return f"shape {tuple(mask.shape)} for batch {batch} and {keys} keys"
    if torch.compiler.is_compiling():
        return None
    if mask.device.type != "cpu" and os.environ.get("LOWBIT_ATTN_VALIDATE") != "1":
        return None
    if bool((mask[..., 1:] & ~mask[..., :-1]).any()):
        return "valid keys after masked ones"
    return None


def key_lengths(mask: torch.Tensor, batch: int) -> torch.Tensor:
    """Number of valid keys, int32 `[B]`, of a key-padding mask `[1 or B, 1, 1, S]`; on the device, without synchronising."""
    return mask.sum(dim=-1, dtype=torch.int32).flatten().expand(batch).contiguous()
