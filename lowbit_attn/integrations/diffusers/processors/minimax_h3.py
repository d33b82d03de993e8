"""MiniMax-H3: full self-attention over one packed sequence of video, text and audio rows."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb

from lowbit_attn.integrations.diffusers.processors.base import LowBitProcessor, project_out, split_heads


class MiniMaxH3Processor(LowBitProcessor):
    """Stands for `MiniMaxH3AttnProcessor`."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
                 attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of one `MiniMaxH3Attention` module."""
        if self.runs_stock(hidden_states, attention_mask, hidden_states.shape[1]):
            out: torch.Tensor = self.stock(attn, hidden_states, rotary_emb, attention_mask)
            return out
        parts = (attn.to_qkv(hidden_states).chunk(3, dim=-1) if attn.fused_projections
                 else (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)))
        query, key, value = split_heads(attn, *parts)
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = _apply_rotary_emb(query, *rotary_emb), _apply_rotary_emb(key, *rotary_emb)
        return project_out(attn, self.attend(query, key, value, attention_mask).flatten(2, 3).type_as(query))
