"""Attention whose sequence is split over ranks: diffusers' Ulysses and ring schemes around our attention call."""

from typing import Any, cast

import torch

from lowbit_attn.api import attention


def attend_across_ranks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, recipe: str, config: Any) -> torch.Tensor:
    """This rank's part of attention over the whole sequence, `[B, S_local, H, D]`.

    Ulysses exchanges heads for tokens, so each rank runs whole rows of some heads: every recipe gives what one device gives. The
    ring runs this rank's queries over one rank's keys at a time and merges by the log-sum-exp: quantization blocks then end at
    the ranks' borders, and a row sum taken over quantized probabilities is taken per rank.

    Args:
        config: the `ParallelConfig` that diffusers' `enable_parallelism` put on the stock processor.
    """
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: None, dropout_p: float,
                is_causal: bool, scale: float | None, enable_gqa: bool, return_lse: bool, _save_ctx: bool = True,
                _parallel_config: Any = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if not return_lse:
            return cast(torch.Tensor, attention(q, k, v, recipe=recipe, scale=scale)).transpose(1, 2)
        out, lse = attention(q, k, v, recipe=recipe, scale=scale, return_lse=True)
        return out.transpose(1, 2), lse.transpose(1, 2)  # diffusers' lse is [B, S, H]

    def backward(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"context parallelism with recipe {recipe!r} has no backward; accepted: torch.no_grad()")

    out = _templated_context_parallel_attention(query, key, value, forward_op=forward, backward_op=backward,
                                                _parallel_config=config)
    return cast(torch.Tensor, out)
