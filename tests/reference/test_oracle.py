"""With formats that round nothing, the reference is exact attention: forward, lse and every gradient, in float64."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from oracle import ALIGNMENTS, ODD_SHAPES, boundaries, exact_attention, visible

from lowbit_attn.recipes import IDENTITY, RECIPES
from lowbit_attn.reference import Visibility, backward, forward, varlen_backward, varlen_forward

TOLERANCE = 1e-10  # float64 sums of about 1e3 terms of order one: 1e3 * 2^-53, with three decades to spare

LAZY = replace(RECIPES["mxfp8"], qk=IDENTITY, p=IDENTITY, v=IDENTITY, p_grad=IDENTITY, do=IDENTITY, ds=IDENTITY,
               v_exponent="operand", p_log2_scale=0.0, p_grad_log2_scale=0.0)
ONLINE = replace(LAZY, maximum="online", max_threshold=0.0)
FROZEN = replace(LAZY, maximum="frozen", max_threshold=32.0, causal=False, trains=False)
RUNNING_SUM = replace(LAZY, row_sum="quantized")
EXACT_SAFETY = replace(LAZY, causal_safety="exact")


def tensors(batch, heads, kv_heads, queries, keys, channels, spread=1.0):
    shapes = [(batch, heads, queries, channels), (batch, kv_heads, keys, channels), (batch, kv_heads, keys, channels)]
    q, k, v = (torch.randn(s, dtype=torch.float64) for s in shapes)
    return [x.requires_grad_() for x in (q * spread, k, v)]


def visibility(queries, keys, batch, alignment, lengths=None):
    return Visibility.create(batch, queries, keys, is_causal=alignment is not None, bottom_right=alignment == "bottom_right",
                             key_lengths=lengths)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def assert_exact(recipe, inputs, alignment=None, lengths=None, scale=None):
    """Forward, lse and gradients of a loss that reads both outputs."""
    q, k, v = inputs
    seen = visibility(q.shape[2], k.shape[2], q.shape[0], alignment, lengths)
    mask = visible(q.shape[2], k.shape[2], alignment, lengths)
    output, lse = exact_attention(q, k, v, mask, scale)
    result = forward(q.detach(), k.detach(), v.detach(), recipe, seen, scale=scale, save=recipe.trains)
    assert_close(result.output, output)
    assert_close(result.lse, lse)
    if not recipe.trains:
        return
    grad_output, grad_lse = torch.randn_like(output), torch.randn_like(lse)
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    expected = torch.autograd.grad((output * grad_output).sum() + (finite * grad_lse).sum(), inputs)
    grads = backward(grad_output, grad_lse, result.saved, result.output, result.lse, recipe, seen, scale=scale)
    for actual, wanted in zip((grads.query, grads.key, grads.value), expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("recipe", [LAZY, ONLINE, RUNNING_SUM, EXACT_SAFETY], ids=["lazy", "online", "quantized sum", "exact"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_equals_exact_attention_for_every_way_to_keep_the_maximum(recipe, alignment):
    assert_exact(recipe, tensors(1, 4, 2, 200, 333, 32, spread=6.0), alignment)


def test_frozen_maximum_equals_exact_attention():
    assert_exact(FROZEN, tensors(1, 4, 2, 200, 333, 32, spread=6.0))


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(("queries", "keys"), ODD_SHAPES)
def test_every_odd_shape(queries, keys, alignment):
    assert_exact(LAZY, tensors(1, 1, 1, queries, keys, 8), alignment)


@pytest.mark.parametrize("channels", [8, 16, 32, 60, 64, 96, 100, 128, 192, 256])
def test_every_head_dim(channels):
    assert_exact(LAZY, tensors(1, 2, 2, 70, 140, channels), "bottom_right")


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1), (8, 1), (40, 8), (32, 8), (5, 1), (16, 4)])
def test_every_head_grouping(heads, kv_heads):
    assert_exact(LAZY, tensors(2, heads, kv_heads, 33, 65, 16), "top_left")


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_key_lengths_down_to_zero(alignment):
    lengths = boundaries(0, 1, 31, 128, 200)
    assert_exact(LAZY, tensors(5, 2, 1, 140, 200, 16), alignment, lengths)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(scale):
    assert_exact(LAZY, tensors(1, 2, 1, 70, 140, 16), "bottom_right", scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("cu_q", "cu_k"), [
    ((0, 15), (0, 15)),
    ((0, 256, 500, 512), (0, 256, 500, 512)),
    ((0, 0, 1, 1, 130, 131), (0, 4, 5, 5, 300, 300)),
    ((0, 1, 3, 4, 515), (0, 3, 4, 517, 518)),
    ((7, 40, 40, 90), (3, 50, 60, 100)),
], ids=["one", "many", "empty", "one token", "late start"])
def test_packed_documents_and_rows_outside_them(cu_q, cu_k, causal):
    tail = 20
    q = torch.randn(cu_q[-1] + tail, 4, 16, dtype=torch.float64)
    k, v = (torch.randn(cu_k[-1] + tail, 2, 16, dtype=torch.float64) for _ in range(2))
    packed = [x.requires_grad_() for x in (q, k, v)]
    result = varlen_forward(*(x.detach() for x in packed), boundaries(*cu_q), boundaries(*cu_k), LAZY, is_causal=causal,
                            save=True)
    output, lse = torch.zeros_like(q), torch.full((4, q.shape[0]), -torch.inf, dtype=torch.float64)
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        rows = (q[q0:q1], k[k0:k1], v[k0:k1])
        o, document_lse = exact_attention(*(x.transpose(0, 1)[None] for x in rows),
                                          visible(q1 - q0, k1 - k0, "bottom_right" if causal else None))
        output = output.index_put((torch.arange(q0, q1),), o[0].transpose(0, 1))
        lse = lse.index_put((torch.arange(4)[:, None], torch.arange(q0, q1)), document_lse[0])
    assert_close(result.output, output)
    assert_close(result.lse, lse)
    grad_output, grad_lse = torch.randn_like(output), torch.randn_like(lse)
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    expected = torch.autograd.grad((output * grad_output).sum() + (finite * grad_lse).sum(), packed)
    grads = varlen_backward(grad_output, grad_lse, result.saved, result.output, result.lse, boundaries(*cu_q), boundaries(*cu_k),
                            LAZY, is_causal=causal)
    for actual, wanted in zip((grads.query, grads.key, grads.value), expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_a_frozen_maximum_that_rolls_back_equals_exact_attention(threshold):
    frozen = replace(FROZEN, max_threshold=threshold)
    inputs = tensors(1, 4, 2, 200, 333, 32, spread=6.0)
    stats = forward(*(x.detach() for x in inputs), frozen, visibility(200, 333, 1, None), stats=True).stats
    assert stats.rollbacks > 0
    assert_exact(frozen, inputs)
