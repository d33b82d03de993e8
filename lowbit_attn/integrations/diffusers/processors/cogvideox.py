"""CogVideoX: joint attention over text and video, in that order."""

from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from lowbit_attn.integrations.diffusers.processors.base import LowBitProcessor, project_out, split_heads


class CogVideoXProcessor(LowBitProcessor):
    """Stands for `CogVideoXAttnProcessor2_0`."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor,
                 attention_mask: torch.Tensor | None = None,
                 image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one block; returns the video part and the text part."""
        text, video = encoder_hidden_states.shape[1], hidden_states.shape[1]
        if self.runs_stock(hidden_states, attention_mask, text + video):
            stock: tuple[torch.Tensor, torch.Tensor] = self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
            return stock
        query, key, value = split_heads(attn, *self.project(attn, torch.cat([encoder_hidden_states, hidden_states], dim=1)))
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        if image_rotary_emb is not None:
            query, key = (torch.cat([x[:, :text], apply_rotary_emb(x[:, text:], image_rotary_emb, sequence_dim=1)], dim=1)
                          for x in (query, key))
        out = project_out(attn, self.attend(query, key, value, attention_mask).flatten(2, 3))
        text_out, video_out = out.split([text, video], dim=1)
        return video_out, text_out

    def project(self, attn: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value `[B, S, heads * head_dim]`."""
        return attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens)


class FusedCogVideoXProcessor(CogVideoXProcessor):
    """Stands for `FusedCogVideoXAttnProcessor2_0`, which `fuse_qkv_projections` puts in."""

    def project(self, attn: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One projection for all three."""
        return tuple(attn.to_qkv(tokens).chunk(3, dim=-1))
