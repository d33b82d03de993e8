"""HunyuanVideo and HunyuanVideo 1.5: joint attention over video and text."""

from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from lowbit_attn.integrations.diffusers.processors.base import LowBitProcessor, project_out, split_heads

Rotary = tuple[torch.Tensor, torch.Tensor]


class HunyuanVideoProcessor(LowBitProcessor):
    """Stands for `HunyuanVideoAttnProcessor2_0`. The sequence is video, then text; the mask is key padding of the text."""

    builds_key_padding = True

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None,
                 image_rotary_emb: Rotary | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one block; returns the video part and the text part."""
        video = hidden_states.shape[1]
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        if self.runs_stock(hidden_states, attention_mask, video + text):
            stock: tuple[torch.Tensor, torch.Tensor | None] = self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
            return stock
        query, key, value = _project(attn, hidden_states, encoder_hidden_states, image_rotary_emb)
        return _split(attn, self.attend(query, key, value, attention_mask).flatten(2, 3).to(query.dtype), video, text)


class HunyuanVideo15Processor(LowBitProcessor):
    """Stands for `HunyuanVideo15AttnProcessor2_0`. The mask `[B, text]` is of the text alone, which the model packs first.

    The stock processor makes padded rows attend to nothing; here they attend to the valid keys. No valid row sees them.
    """

    builds_key_padding = True
    accepted_mask = "key padding of the text [B, text] with the valid tokens first"

    def mask_problem(self, mask: torch.Tensor | None, batch: int, keys: int) -> str | None:
        """As for any key padding, once the mask has the usual form."""
        if mask is None or mask.ndim != 2 or mask.shape[1] > keys:
            return "none" if mask is None else f"shape {tuple(mask.shape)} for batch {batch} and {keys} keys"
        return super().mask_problem(mask[:, None, None].bool(), batch, mask.shape[1])

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None,
                 image_rotary_emb: Rotary | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one block; returns the video part and the text part."""
        video = hidden_states.shape[1]
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        if self.runs_stock(hidden_states, attention_mask, video + text) or attention_mask is None:
            stock: tuple[torch.Tensor, torch.Tensor | None] = self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
            return stock
        query, key, value = _project(attn, hidden_states, encoder_hidden_states, image_rotary_emb)
        unmasked = video + text - attention_mask.shape[1]
        lengths = unmasked + attention_mask.bool().sum(dim=1, dtype=torch.int32)
        return _split(attn, self.attend(query, key, value, lengths=lengths).flatten(2, 3).to(query.dtype), video, text)


def _split(attn: Any, out: torch.Tensor, video: int, text: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output projections of the two parts; single stream blocks have none."""
    if text == 0:
        return out, None
    out, text_out = out.split([video, text], dim=1)
    if getattr(attn, "to_out", None) is not None:
        out = project_out(attn, out)
    if getattr(attn, "to_add_out", None) is not None:
        text_out = attn.to_add_out(text_out)
    return out, text_out


def _project(attn: Any, video: torch.Tensor, text: torch.Tensor | None,
             rotary_emb: Rotary | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value `[B, video + text, heads, head_dim]`; text has its own projections in dual stream blocks only."""
    own_text = attn.add_q_proj is not None and text is not None
    tokens = video if text is None or own_text else torch.cat([video, text], dim=1)
    query, key, value = split_heads(attn, attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens))
    query, key = _norm(attn.norm_q, query), _norm(attn.norm_k, key)
    if rotary_emb is not None:
        query, key = (_rotate_video(x, video.shape[1], rotary_emb) for x in (query, key))
    if own_text and text is not None:
        text_query, text_key, text_value = split_heads(attn, attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text))
        text_query, text_key = _norm(attn.norm_added_q, text_query), _norm(attn.norm_added_k, text_key)
        query, key, value = (torch.cat(pair, dim=1) for pair in
                             ((query, text_query), (key, text_key), (value, text_value)))
    return query, key, value


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = x if norm is None else norm(x)
    return normed


def _rotate_video(x: torch.Tensor, video: int, rotary_emb: Rotary) -> torch.Tensor:
    rotated: torch.Tensor = apply_rotary_emb(x[:, :video], rotary_emb, sequence_dim=1)
    return rotated if x.shape[1] == video else torch.cat([rotated, x[:, video:]], dim=1)
