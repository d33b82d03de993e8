"""LTX-Video and LTX-2: self-attention over the video tokens."""

from typing import Any

import torch
from diffusers.models.transformers import transformer_ltx, transformer_ltx2

from lowbit_attn.integrations.diffusers.processors.base import LowBitProcessor, project_out, split_heads

Rotary = tuple[torch.Tensor, torch.Tensor]


class LTXProcessor(LowBitProcessor):
    """Stands for `LTXVideoAttnProcessor`."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None, image_rotary_emb: Rotary | None = None) -> torch.Tensor:
        """Attention of one `LTXAttention` module."""
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if self.runs_stock(hidden_states, attention_mask, context.shape[1]):
            out: torch.Tensor = self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
            return out
        query, key, value = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context)), attn.to_v(context)
        if image_rotary_emb is not None:
            query, key = (transformer_ltx.apply_rotary_emb(x, image_rotary_emb) for x in (query, key))
        query, key, value = split_heads(attn, query, key, value)
        return project_out(attn, self.attend(query, key, value, attention_mask).flatten(2, 3).to(query.dtype))


class LTX2Processor(LowBitProcessor):
    """Stands for `LTX2AudioVideoAttnProcessor`: separate rotary embeddings of query and key, and gated heads."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None, query_rotary_emb: Rotary | None = None,
                 key_rotary_emb: Rotary | None = None) -> torch.Tensor:
        """Attention of one `LTX2Attention` module."""
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if self.runs_stock(hidden_states, attention_mask, context.shape[1]):
            out: torch.Tensor = self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, query_rotary_emb,
                                           key_rotary_emb)
            return out
        return self.run(attn, hidden_states, context, attention_mask, query_rotary_emb, key_rotary_emb, None)

    def run(self, attn: Any, hidden_states: torch.Tensor, context: torch.Tensor, attention_mask: torch.Tensor | None,
            query_rotary_emb: Rotary | None, key_rotary_emb: Rotary | None,
            perturbation_mask: torch.Tensor | None) -> torch.Tensor:
        """The attention in low bits."""
        values = attn.to_v(context)
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context))
        if query_rotary_emb is not None:
            rotate = (transformer_ltx2.apply_interleaved_rotary_emb if attn.rope_type == "interleaved"
                      else transformer_ltx2.apply_split_rotary_emb)
            query = rotate(query, query_rotary_emb)
            key = rotate(key, query_rotary_emb if key_rotary_emb is None else key_rotary_emb)
        query, key, value = split_heads(attn, query, key, values)
        out = self.attend(query, key, value, attention_mask).flatten(2, 3).to(query.dtype)
        if perturbation_mask is not None:
            out = torch.lerp(values, out, perturbation_mask)
        if attn.to_gate_logits is not None:
            gates = 2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))
            out = (out.unflatten(2, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(2, 3)
        return project_out(attn, out)


class LTX2PerturbedProcessor(LTX2Processor):
    """Stands for `LTX2PerturbedAttnProcessor`: some batch rows may skip attention (spatio-temporal guidance)."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None, query_rotary_emb: Rotary | None = None,
                 key_rotary_emb: Rotary | None = None, perturbation_mask: torch.Tensor | None = None,
                 all_perturbed: bool | None = None) -> torch.Tensor:
        """Attention of one `LTX2Attention` module."""
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if all_perturbed is None:
            all_perturbed = perturbation_mask is not None and bool(torch.all(perturbation_mask == 0))
        # A call that all rows skip has no attention, and nothing to record.
        if all_perturbed or self.runs_stock(hidden_states, attention_mask, context.shape[1]):
            out: torch.Tensor = self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, query_rotary_emb,
                                           key_rotary_emb, perturbation_mask, all_perturbed)
            return out
        return self.run(attn, hidden_states, context, attention_mask, query_rotary_emb, key_rotary_emb, perturbation_mask)
