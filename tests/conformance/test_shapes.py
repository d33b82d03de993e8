"""mxfp8, forward and backward, on the shapes that break attention kernels, against exact attention.

Bounds are relative Frobenius errors. E4M3 has 3 mantissa bits: an element is off by 2^-4 at most and by 0.026 rms. O holds
one rounding of V, one of P, and of the scores of Q and K; the gradients those plus dO and dS. Largest seen over this list, with
three seeds: O 0.059, dV 0.067, dQ 0.102, dK 0.112. A score of unit variance is off by sqrt(2) * 0.026 rms, so the lse of a row
that sees one key by that, and the largest of some thousand rows by 0.22 (six sigma).
"""

from itertools import cycle

import pytest
import torch
from oracle import ALIGNMENTS, ODD_SHAPES, boundaries, exact_attention, relative_error, visible

from lowbit_attn import attention, varlen_attention

BOUNDS = {"output": 0.07, "query": 0.13, "key": 0.13, "value": 0.08}
LSE_BOUND = 0.25
HEADS = [(6, 6), (6, 2), (6, 1), (8, 1), (40, 8), (32, 8), (5, 1), (16, 4)]
BIG = [(4096, 4096), (4224, 4224)]


def inputs(heads, kv_heads, queries, keys, channels=64, batch=1):
    shapes = [(batch, heads, queries, channels), (batch, kv_heads, keys, channels), (batch, kv_heads, keys, channels)]
    return [torch.randn(s, requires_grad=True) for s in shapes]


def assert_conforms(tensors, alignment=None, lengths=None, scale=None):
    query, key, _ = tensors
    output, lse = attention(*tensors, is_causal=alignment is not None, causal_align=alignment, key_lengths=lengths,
                            scale=scale, enable_gqa=True, return_lse=True, backend="reference")
    expected, expected_lse = exact_attention(*tensors, visible(query.shape[2], key.shape[2], alignment, lengths), scale)
    assert_errors(tensors, output, lse, expected, expected_lse)


def assert_errors(tensors, output, lse, expected, expected_lse):
    dead = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, dead)
    assert (output[dead] == 0).all()
    assert ((lse - expected_lse)[~dead].abs() <= LSE_BOUND).all()
    assert relative_error(output, expected) <= BOUNDS["output"]
    grad = torch.randn_like(output)
    actual = torch.autograd.grad(output, tensors, grad)
    wanted = torch.autograd.grad(expected, tensors, grad.double())
    for name, a, e in zip(("query", "key", "value"), actual, wanted, strict=True):
        # A gradient that is zero, such as dQ of rows that see one key, has no relative error: dO's size stands in.
        scale = max(e.double().norm(), 1e-2 * grad.double().norm())
        assert (a.double() - e.double()).norm() / scale <= BOUNDS[name], name


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(("shape", "heads"), list(zip(ODD_SHAPES, cycle([(2, 2), (4, 2), (3, 1)]))), ids=str)
def test_shapes(shape, heads, alignment):
    assert_conforms(inputs(*heads, *shape), alignment)


@pytest.mark.full
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("shape", BIG, ids=str)
def test_long_shapes(shape, alignment):
    assert_conforms(inputs(1, 1, *shape), alignment)


@pytest.mark.parametrize("alignment", [None, "bottom_right"])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_heads(heads, kv_heads, alignment):
    assert_conforms(inputs(heads, kv_heads, 113, 140, channels=32), alignment)


@pytest.mark.parametrize("channels", [8, 16, 32, 60, 64, 96, 100, 128, 192, 256])
def test_head_dims(channels):
    assert_conforms(inputs(2, 2, 113, 140, channels=channels), "bottom_right")


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_key_lengths(alignment):
    assert_conforms(inputs(4, 2, 113, 140, batch=6), alignment, boundaries(0, 1, 32, 33, 129, 140))


@pytest.mark.parametrize("scale", [0.05, -0.125])
def test_scale(scale):
    assert_conforms(inputs(4, 2, 113, 140), "bottom_right", scale=scale)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("cu_q", "cu_k"), [
    ((0, 15), (0, 15)), ((0, 256, 500, 1000), (0, 256, 500, 1000)), ((0, 1), (0, 3)), ((0, 2), (0, 1)), ((0, 511), (0, 1)),
    ((0, 3), (0, 513)), ((0, 307), (0, 256)), ((0, 0, 20, 20), (0, 9, 20, 30)), ((4, 30, 31), (2, 50, 52)),
], ids=str)
def test_packed(cu_q, cu_k, is_causal):
    assert_packed_conforms(cu_q, cu_k, is_causal)


@pytest.mark.parametrize("scale", [0.05, -0.125])
def test_packed_scale(scale):
    assert_packed_conforms((0, 30, 90), (0, 40, 90), True, scale)


def assert_packed_conforms(cu_q, cu_k, is_causal, scale=None):
    tensors = [torch.randn(tokens + 6, heads, 64, requires_grad=True) for tokens, heads in
               ((cu_q[-1], 4), (cu_k[-1], 2), (cu_k[-1], 2))]
    mask = torch.zeros(cu_q[-1] + 6, cu_k[-1] + 6, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        mask[q0:q1, k0:k1] = visible(q1 - q0, k1 - k0, "bottom_right" if is_causal else None)[0, 0]
    output, lse = varlen_attention(*tensors, boundaries(*cu_q), boundaries(*cu_k), 1000, 1000, is_causal=is_causal,
                                   scale=scale, enable_gqa=True, return_lse=True, backend="reference")
    expected, expected_lse = exact_attention(*(x.transpose(0, 1)[None] for x in tensors), mask, scale)
    assert_errors(tensors, output.transpose(0, 1)[None], lse[None], expected, expected_lse)
