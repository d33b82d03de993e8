"""What every torchtitan release line shares: the options, their validation, and the module that runs our operator.

Nothing here imports torchtitan. A release line's adapter subclasses `LowbitAttention` with the call signature that its models
use, and builds it from `AttentionOptions`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbit_attn.api import attention, varlen_attention
from lowbit_attn.recipes import RECIPES, UNQUANTIZED, resolve


@dataclass(frozen=True)
class AttentionOptions:
    """The `[lowbit_attn]` section of a training configuration."""

    recipe: str = "mxfp8"
    """Numerics: a name, or a name with options ("mxfp8:max_threshold=2"). "bf16" is torch SDPA under the same mask."""

    deterministic: bool = False
    """Ask for a bitwise reproducible backward (also implied by debug.deterministic)."""

    backend: str | None = None
    """Which implementation runs: None chooses; or "reference", "hopper", "triton", "cdna4"."""


def training_recipes() -> list[str]:
    """Names of the recipes that train under a causal mask."""
    return [UNQUANTIZED, *(name for name, recipe in RECIPES.items() if recipe.trains and recipe.causal)]


def check_options(options: AttentionOptions) -> None:
    """ValueError unless causal pretraining can run with these options."""
    if options.recipe == UNQUANTIZED:
        if options.backend is not None:
            raise ValueError(f"lowbit_attn.backend: got {options.backend!r} with recipe 'bf16', which is torch SDPA; "
                             "accepted: leave it out")
        return
    try:
        recipe = resolve(options.recipe)
    except (TypeError, ValueError) as error:
        raise ValueError(f"lowbit_attn.recipe: {error}") from None
    refusal = recipe.training_refusal
    problem = f"is for inference only ({refusal})" if refusal else "" if recipe.causal else "cannot run under a causal mask"
    if problem:
        raise ValueError(f"lowbit_attn.recipe: got {options.recipe!r}, which {problem}; accepted: "
                         f"{', '.join(training_recipes())}")


class LowbitAttention(nn.Module):
    """Causal attention through `lowbit_attn`, without parameters or buffers, so a state_dict does not see it.

    Args:
        options: recipe, determinism and backend.
        compute_dtype: dtype that attention computes in. Inputs of another dtype (tensor parallelism alone leaves activations
            in float32) are cast to it, the output is cast back.
    """

    def __init__(self, options: AttentionOptions, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.options = options
        self.compute_dtype = compute_dtype

    def extra_repr(self) -> str:
        """The options, for torchtitan's `model.print_after_conversion`."""
        return f"{self.options}, compute_dtype={self.compute_dtype}"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
        """[B, H, L, D] in and out; every row of the batch is one document."""
        q, k, v = (x.to(self.compute_dtype) for x in (query, key, value))
        output = attention(q, k, v, recipe=self.options.recipe, is_causal=is_causal, scale=scale, enable_gqa=True,
                           deterministic=self.options.deterministic, backend=self.options.backend)
        assert isinstance(output, Tensor)
        return output.to(query.dtype)

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
                      max_k: int, *, scale: float | None) -> Tensor:
        """Packed [T, H, D] in and out, causal inside each document."""
        q, k, v = (x.to(self.compute_dtype) for x in (query, key, value))
        output = varlen_attention(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, recipe=self.options.recipe, is_causal=True,
                                  scale=scale, enable_gqa=True, deterministic=self.options.deterministic,
                                  backend=self.options.backend)
        assert isinstance(output, Tensor)
        return output.to(query.dtype)


__all__ = ["AttentionOptions", "LowbitAttention", "check_options", "training_recipes"]
