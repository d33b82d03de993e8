"""Wan 2.1 and 2.2, with their VACE and Animate variants: self-attention, and cross-attention to the text."""

from typing import Any

import torch

from lowbit_attn.integrations.diffusers.processors.base import LowBitProcessor, project_out, split_heads


class WanProcessor(LowBitProcessor):
    """Stands for `WanAttnProcessor`."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None,
                 rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """Attention of one `WanAttention` module."""
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if self.runs_stock(hidden_states, attention_mask, context.shape[1]):
            out: torch.Tensor = self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            return out
        query, key, value = _project(attn, hidden_states, context)
        query, key, value = split_heads(attn, attn.norm_q(query), attn.norm_k(key), value)
        if rotary_emb is not None:
            query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
        out = self.attend(query, key, value, attention_mask, split=encoder_hidden_states is None)
        return project_out(attn, out.flatten(2, 3).type_as(query))


def _project(attn: Any, hidden_states: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not attn.fused_projections:
        return attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
    if attn.is_cross_attention:
        return (attn.to_q(hidden_states), *attn.to_kv(context).chunk(2, dim=-1))
    return tuple(attn.to_qkv(hidden_states).chunk(3, dim=-1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding over adjacent pairs, in the operation order of the stock processor (the result is bit-identical)."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out
