"""Recipe `bf16`: the same calls through torch's scaled_dot_product_attention, in the inputs' own dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor


def dense(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, bottom_right: bool, key_lengths: Tensor | None,
          scale: float | None, enable_gqa: bool) -> Tensor:
    """torch SDPA on [B, H, S, D]; key_lengths and bottom-right alignment become a boolean mask."""
    queries, keys = query.shape[-2], key.shape[-2]
    if key_lengths is None and not (is_causal and bottom_right and queries != keys):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    row = torch.arange(queries, device=query.device)[:, None]
    column = torch.arange(keys, device=query.device)[None]
    lengths = torch.full((query.shape[0],), keys, device=query.device) if key_lengths is None else key_lengths
    lengths = lengths[:, None, None, None]
    live = column < lengths
    key, value = _without_padding(key, live.mT), _without_padding(value, live.mT)
    mask = live.expand(-1, -1, queries, -1)
    if is_causal:
        mask = mask & (column <= row + (lengths - queries if bottom_right else 0))
    return _masked(query, key, value, mask, scale, enable_gqa)


def packed(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, *, is_causal: bool,
           scale: float | None, enable_gqa: bool) -> Tensor:
    """torch SDPA on packed [T, H, D] with a block-diagonal mask of the documents, so memory grows with Tq x Tk."""
    q_document, q_row = _documents(cu_seq_q, query.shape[0])
    k_document, k_row = _documents(cu_seq_k, key.shape[0])
    documents = cu_seq_q.shape[0] - 1
    q_live, k_live = (q_row >= 0) & (q_document < documents), (k_row >= 0) & (k_document < documents)
    query = _without_padding(query, q_live[:, None, None])
    key, value = (_without_padding(x, k_live[:, None, None]) for x in (key, value))
    mask = (q_document[:, None] == k_document[None]) & q_live[:, None] & k_live[None]
    if is_causal and documents:
        shift = (cu_seq_k.diff() - cu_seq_q.diff())[q_document.clamp_max(documents - 1)]
        mask = mask & (k_row[None] <= (q_row + shift)[:, None])
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return _masked(q, k, v, mask[None, None], scale, enable_gqa)[0].transpose(0, 1)


def _documents(cu_seq: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Document number of each packed row, and the row's place in it (negative before the first document)."""
    row = torch.arange(tokens, device=cu_seq.device, dtype=torch.int32)
    document = torch.searchsorted(cu_seq[1:].contiguous(), row, right=True)
    return document, row - cu_seq[document.clamp_max(cu_seq.shape[0] - 1)]


def _without_padding(x: Tensor, live: Tensor) -> Tensor:
    # A weight of zero times a NaN in the padding is a NaN in every row.
    return torch.where(live, x, 0.0)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, enable_gqa: bool) -> Tensor:
    # Rows without a visible key attend to key 0 instead of nothing, then are zeroed: no NaN reaches their gradients.
    empty = ~mask.any(-1, keepdim=True)
    first = torch.arange(mask.shape[-1], device=mask.device) == 0
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask | (empty & first), scale=scale,
                                            enable_gqa=enable_gqa)
    return torch.where(empty, 0.0, output)
