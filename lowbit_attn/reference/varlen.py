"""Packed documents: every document is attended on its own, so tiles, scale groups and references never cross one.

Documents of equal lengths run as one batch of `forward` / `backward`. Reads `cu_seq` on the host.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lowbit_attn.recipes import Recipe
from lowbit_attn.reference.backward import Gradients, backward
from lowbit_attn.reference.forward import Forward, forward
from lowbit_attn.reference.masks import Visibility
from lowbit_attn.reference.operands import Saved


@dataclass(frozen=True)
class DocumentGroup:
    """Documents of one length pair: token indices [documents, length] into the packed query and key rows."""

    query_index: Tensor
    key_index: Tensor

    def visibility(self, is_causal: bool) -> Visibility:
        """Causal masks align the last query of a document with its last key."""
        documents, queries = self.query_index.shape
        return Visibility.create(documents, queries, self.key_index.shape[1], is_causal=is_causal, bottom_right=True,
                                 device=self.query_index.device)


def document_groups(cu_seq_q: Tensor, cu_seq_k: Tensor, tokens_q: int, tokens_k: int) -> list[DocumentGroup]:
    """Group the documents by (query length, key length). Boundaries are clamped into the packed rows."""
    starts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    bounds = [_document_bounds(cu.tolist(), tokens) for cu, tokens in ((cu_seq_q, tokens_q), (cu_seq_k, tokens_k))]
    for (q_start, q_stop), (k_start, k_stop) in zip(*bounds, strict=True):
        if q_stop > q_start or k_stop > k_start:
            starts.setdefault((q_stop - q_start, k_stop - k_start), []).append((q_start, k_start))
    groups = []
    for lengths, firsts in starts.items():
        q_first, k_first = torch.tensor(firsts, device=cu_seq_q.device).unbind(1)
        groups.append(DocumentGroup(*(first[:, None] + torch.arange(length, device=first.device)
                                      for first, length in zip((q_first, k_first), lengths, strict=True))))
    return groups


def _document_bounds(cu: list[int], tokens: int) -> list[tuple[int, int]]:
    clamped = [min(max(x, 0), tokens) for x in cu]
    return [(start, max(start, stop)) for start, stop in pairwise(clamped)]


def _gather(packed: Tensor, index: Tensor) -> Tensor:
    """[T, H, ...] rows -> [documents, H, length, ...]."""
    return packed[index].transpose(1, 2)


def varlen_forward(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, recipe: Recipe, *,
                   is_causal: bool, scale: float | None = None, save: bool = False) -> Forward:
    """`forward` over packed query [Tq, Hq, D], key and value [Tk, Hkv, D].

    Returns output [Tq, Hq, D], lse [Hq, Tq] and packed codes [T, H, D] with scales [H, T]; rows of no document are zero
    with lse -inf.
    """
    results = []
    for group in document_groups(cu_seq_q, cu_seq_k, query.shape[0], key.shape[0]):
        rows = (_gather(query, group.query_index), _gather(key, group.key_index), _gather(value, group.key_index))
        results.append((group, forward(*rows, recipe, group.visibility(is_causal), scale=scale, save=save)))
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = query.new_zeros(query.shape, dtype=wide)
    lse = query.new_full((query.shape[1], query.shape[0]), -torch.inf, dtype=wide)
    for group, result in results:
        output[group.query_index] = result.output.transpose(1, 2)
        lse[:, group.query_index] = result.lse.transpose(0, 1)
    saved = _pack_saved(query, key, value, results) if save else None
    return Forward(output, lse, saved, None)


def _pack_saved(query: Tensor, key: Tensor, value: Tensor, results: list[tuple[DocumentGroup, Forward]]) -> Saved:
    packed = []
    for name, like in (("query", query), ("key", key), ("value", value)):
        codes: Tensor | None = None
        scales = None
        for group, result in results:
            part_codes, part_scales = getattr(result.saved, name)
            index = group.query_index if name == "query" else group.key_index
            if codes is None:
                codes = like.new_zeros(like.shape, dtype=part_codes.dtype)
                scales = None if part_scales is None else like.new_zeros((like.shape[1], like.shape[0]), dtype=torch.uint8)
            codes[index] = part_codes.transpose(1, 2)
            if scales is not None:
                scales[:, index] = part_scales.transpose(0, 1)
        packed.append((like.new_zeros(like.shape, dtype=torch.uint8) if codes is None else codes, scales))
    return Saved(*packed)


def varlen_backward(grad_output: Tensor, grad_lse: Tensor | None, saved: Saved, output: Tensor, lse: Tensor, cu_seq_q: Tensor,
                    cu_seq_k: Tensor, recipe: Recipe, *, is_causal: bool, scale: float | None = None) -> Gradients:
    """`backward` over packed rows, with `saved`, `output` and `lse` as `varlen_forward` returned them."""
    (q_codes, q_scales), (k_codes, k_scales), (v_codes, v_scales) = saved.query, saved.key, saved.value
    wide = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
    grads = [x.new_zeros(x.shape, dtype=wide) for x in (q_codes, k_codes, v_codes)]
    for group in document_groups(cu_seq_q, cu_seq_k, q_codes.shape[0], k_codes.shape[0]):
        if 0 in (group.query_index.shape[1], group.key_index.shape[1]):
            continue
        part = Saved(*((_gather(codes, index), None if scales is None else scales[:, index].transpose(0, 1))
                       for codes, scales, index in ((q_codes, q_scales, group.query_index),
                                                    (k_codes, k_scales, group.key_index),
                                                    (v_codes, v_scales, group.key_index))))
        grad_lse_part = None if grad_lse is None else grad_lse[:, group.query_index].transpose(0, 1)
        result = backward(_gather(grad_output, group.query_index), grad_lse_part, part, _gather(output, group.query_index),
                          lse[:, group.query_index].transpose(0, 1), recipe, group.visibility(is_causal), scale=scale)
        for target, grad, index in zip(grads, (result.query, result.key, result.value),
                                       (group.query_index, group.key_index, group.key_index), strict=True):
            target[index] = grad.transpose(1, 2)
    return Gradients(*grads)
