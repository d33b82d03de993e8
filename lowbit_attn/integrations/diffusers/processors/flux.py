"""Flux: joint attention over text and image, in that order, in dual and single stream blocks."""

from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from lowbit_attn.integrations.diffusers.processors.base import LowBitProcessor, project_out


class FluxProcessor(LowBitProcessor):
    """Stands for `FluxAttnProcessor`."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None,
                 image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
                 ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one block: in dual stream blocks the image part and the text part, else the whole sequence."""
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        if self.runs_stock(hidden_states, attention_mask, text + hidden_states.shape[1]):
            stock: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
            return stock
        query, key, value = _project(attn, hidden_states, encoder_hidden_states)
        if image_rotary_emb is not None:
            query, key = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (query, key))
        out = self.attend(query, key, value, attention_mask).flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return out
        text_out, image_out = out.split([text, hidden_states.shape[1]], dim=1)
        return project_out(attn, image_out.contiguous()), attn.to_add_out(text_out.contiguous())


def _project(attn: Any, image: torch.Tensor, text: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Query, key and value `[B, text + image, heads, head_dim]`."""
    fused = attn.fused_projections
    parts = attn.to_qkv(image).chunk(3, dim=-1) if fused else (attn.to_q(image), attn.to_k(image), attn.to_v(image))
    query, key, value = (x.unflatten(-1, (-1, attn.head_dim)) for x in parts)
    query, key = attn.norm_q(query), attn.norm_k(key)
    if text is None or attn.added_kv_proj_dim is None:
        return query, key, value
    parts = (attn.to_added_qkv(text).chunk(3, dim=-1) if fused
             else (attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text)))
    text_query, text_key, text_value = (x.unflatten(-1, (-1, attn.head_dim)) for x in parts)
    text_query, text_key = attn.norm_added_q(text_query), attn.norm_added_k(text_key)
    return tuple(torch.cat(pair, dim=1) for pair in ((text_query, query), (text_key, key), (text_value, value)))
