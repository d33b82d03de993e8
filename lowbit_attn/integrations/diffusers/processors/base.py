"""What all attention processors share: a recipe, the stock processor behind it, the masks they understand, one attention call."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch

from lowbit_attn.api import attention
from lowbit_attn.integrations.diffusers.processors.parallel import attend_across_ranks
from lowbit_attn.recipes import UNQUANTIZED

RESTING = "resting"
"""The recipe between runs."""

STOCK = (UNQUANTIZED, "unchanged", RESTING)
"""Recipes that are the stock processor's."""


class LowBitProcessor:
    """An attention processor with a recipe; with `bf16` it is the stock processor.

    Subclasses define `__call__` with the parameter names of the processor they stand for (diffusers inspects them).

    The attributes that change between calls are plain strings, because torch.compile guards strings: one graph per recipe, and
    never a stale one. `ran` is only ever *written* in traced code, which Dynamo replays after each call of the compiled graph
    without guarding it; so it says what ran, compiled or not. What could only be counted by reading is counted in eager code.

    Attributes:
        recipe: recipe of the next call, canonical text.
        ran: recipe of the last call, set to None by whoever reads it.
        fell_back: with `on_unsupported="unchanged"`, why the last call ran in the stock processor instead of its recipe.
        eager_calls: calls since the last look by recipe, in eager code.
        outside: what to do when a call comes between runs, in eager code.
    """

    builds_key_padding: ClassVar[bool] = False
    """Whether the model itself builds its masks, and only with the valid keys first, so that their values need no check."""

    def __init__(self, stock: Any, name: str, on_unsupported: str = "error") -> None:
        self.stock = stock
        self.name = name
        self.on_unsupported = on_unsupported
        self.recipe: str = UNQUANTIZED
        self.ran: str | None = None
        self.fell_back: str | None = None
        self.eager_calls: Counter[str] = Counter()
        self.outside: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "outside": None}  # a copy of the model does not speak for the pipeline

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

    @property
    def _parallel(self) -> Any:
        return getattr(self.stock, "_parallel_config", None)  # CogVideoX's processor has none

    def runs_stock(self, query_source: torch.Tensor, mask: torch.Tensor | None, keys: int) -> bool:
        """Whether this call is the stock processor's; records what runs. `keys` is the length of the key sequence."""
        if self.recipe in STOCK:
            if not torch.compiler.is_compiling() and self.recipe == RESTING and self.outside is not None:
                self.outside()
            self._record(UNQUANTIZED)
            return True
        problem = self.mask_problem(mask, query_source.shape[0], keys)
        if problem is None and mask is not None and self._parallel is not None:
            problem = "key padding under context parallelism"
        if problem is None:
            self._record(self.recipe)
            return False
        if self.on_unsupported == "error":
            raise ValueError(f"{self.name}: attention_mask: got {problem}; accepted: none, or {self.accepted_mask} "
                             "(on_unsupported: unchanged runs such calls in the stock processor)")
        self._record(UNQUANTIZED)
        self.fell_back = problem
        return True

    def _record(self, recipe: str) -> None:
        self.ran = recipe
        if not torch.compiler.is_compiling():
            self.eager_calls[recipe] += 1

    accepted_mask: ClassVar[str] = "bool key padding [B, 1, 1, keys] with the valid keys first"

    def mask_problem(self, mask: torch.Tensor | None, batch: int, keys: int) -> str | None:
        """Why a mask cannot run as key lengths, None if it can."""
        return mask_problem(mask, batch, keys, trusted=self.builds_key_padding)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, *,
               lengths: torch.Tensor | None = None, split: bool = True) -> torch.Tensor:
        """Attention in this call's recipe over `[B, S, H, D]`; the transposes are views on both ways.

        Args:
            query, key, value: as the stock processor hands them to its attention.
            mask: key padding `[1 or B, 1, 1, S]`, for which `mask_problem` has found nothing wrong.
            lengths: the same as int32 `[B]`, for families whose masks look different.
            split: whether context parallelism, if there is any, splits this attention's sequence.
        """
        if split and self._parallel is not None:
            return attend_across_ranks(query, key, value, self.recipe, self._parallel)
        if mask is not None:
            lengths = key_lengths(mask, query.shape[0])
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = attention(query, key, value, recipe=self.recipe, key_lengths=lengths, enable_gqa=query.shape[1] != key.shape[1])
        return cast(torch.Tensor, out).transpose(1, 2)


def mask_problem(mask: torch.Tensor | None, batch: int, keys: int, *, trusted: bool) -> str | None:
    """Why a mask `[1 or B, 1, 1, keys]` cannot run as key lengths, None if it can.

    Dtype and shape are always checked. That the valid keys come first is a matter of values. On a CPU they are always checked;
    on other devices that synchronises, so masks which the model itself builds (`trusted`) are checked only under
    LOWBIT_ATTN_VALIDATE=1. Compiled code cannot check, and refuses masks of unknown origin.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return f"dtype {mask.dtype}"
    if tuple(mask.shape[1:]) != (1, 1, keys) or mask.shape[0] not in (1, batch):
        return f"shape {tuple(mask.shape)} for batch {batch} and {keys} keys"
    if torch.compiler.is_compiling():
        return None if trusted else "values that compiled code cannot check"
    return None if _may_skip_values(mask, trusted) else _hole_in(mask)


def _may_skip_values(mask: torch.Tensor, trusted: bool) -> bool:
    return trusted and mask.device.type != "cpu" and os.environ.get("LOWBIT_ATTN_VALIDATE") != "1"


def _hole_in(mask: torch.Tensor) -> str | None:
    return "valid keys after masked ones" if bool((mask[..., 1:] & ~mask[..., :-1]).any()) else None


def key_lengths(mask: torch.Tensor, batch: int) -> torch.Tensor:
    """Number of valid keys, int32 `[B]`, of a key-padding mask `[1 or B, 1, 1, S]`; on the device, without synchronising."""
    return mask.sum(dim=-1, dtype=torch.int32).flatten().expand(batch).contiguous()


def project_out(attn: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The output projection (and dropout) of an attention module."""
    for layer in attn.to_out:
        hidden_states = layer(hidden_states)
    return hidden_states


def split_heads(attn: Any, *projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`[B, S, H * D]` as `[B, S, H, D]`."""
    return tuple(x.unflatten(2, (attn.heads, -1)) for x in projected)
