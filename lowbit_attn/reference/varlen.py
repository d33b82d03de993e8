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
from lowbit_attn.reference.operands import Coded, Saved


@dataclass(frozen=True)
class DocumentGroup:
    """Documents of one length pair: token indices [documents, length] into the packed query and key rows."""

    query_index: Tensor
    key_index: Tensor

    def index(self, name: str) -> Tensor:
        """The token indices of "query", "key" or "value"."""
        return self.query_index if name == "query" else self.key_index

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
    saved = _pack_saved(query, key, value, recipe.effective(), results) if save else None
    return Forward(output, lse, saved, None)


def _pack_saved(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe,
                results: list[tuple[DocumentGroup, Forward]]) -> Saved:
    if not recipe.saves_codes:
        return Saved(query, key, value)
    packed = {name: Coded(x.new_zeros(x.shape, dtype=torch.uint8), x.new_zeros((x.shape[1], x.shape[0]), dtype=torch.uint8))
              for name, x in (("query", query), ("key", key), ("value", value))}
    for group, result in results:
        for name, target in packed.items():
            part, index = getattr(result.saved, name), group.index(name)
            target.codes[index] = part.codes.transpose(1, 2)
            target.scales[:, index] = part.scales.transpose(0, 1)
    row_top = torch.zeros_like(packed["query"].scales)
    for group, result in results:
        if result.saved is not None and result.saved.row_top is not None:
            row_top[:, group.query_index] = result.saved.row_top.transpose(0, 1)
    return Saved(**packed, row_top=row_top)


def _saved_of(saved: Saved, group: DocumentGroup) -> Saved:
    def part(name: str) -> Coded | Tensor:
        packed, index = getattr(saved, name), group.index(name)
        if isinstance(packed, Coded):
            return Coded(_gather(packed.codes, index), packed.scales[:, index].transpose(0, 1))
        return _gather(packed, index)

    return Saved(part("query"), part("key"), part("value"))


def varlen_backward(grad_output: Tensor, grad_lse: Tensor | None, saved: Saved, output: Tensor, lse: Tensor, cu_seq_q: Tensor,
                    cu_seq_k: Tensor, recipe: Recipe, *, is_causal: bool, scale: float | None = None,
                    seed: Tensor | None = None) -> Gradients:
    """`backward` over packed rows, with `saved`, `output` and `lse` as `varlen_forward` returned them."""
    wide = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
    packed = [x.codes if isinstance(x, Coded) else x for x in (saved.query, saved.key, saved.value)]
    grads = [x.new_zeros(x.shape, dtype=wide) for x in packed]
    for group in document_groups(cu_seq_q, cu_seq_k, packed[0].shape[0], packed[1].shape[0]):
        if 0 in (group.query_index.shape[1], group.key_index.shape[1]):
            continue
        grad_lse_part = None if grad_lse is None else grad_lse[:, group.query_index].transpose(0, 1)
        result = backward(_gather(grad_output, group.query_index), grad_lse_part, _saved_of(saved, group),
                          _gather(output, group.query_index), lse[:, group.query_index].transpose(0, 1), recipe,
                          group.visibility(is_causal), scale=scale, seed=seed, first_token=group.query_index[:, 0])
        for target, name in zip(grads, ("query", "key", "value"), strict=True):
            target[group.index(name)] = getattr(result, name).transpose(1, 2)
    return Gradients(query=grads[0], key=grads[1], value=grads[2])
