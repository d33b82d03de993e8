"""No later token and no other document moves an earlier row: bit for bit in O, lse and dQ.

A default recipe shares scales inside blocks of 32 positions, so rows of the changed token's own block are exempt; with
`causal_safety="exact"` no earlier row is.
"""

from dataclasses import replace

import pytest
import torch
from oracle import boundaries

from lowbit_attn.recipes import RECIPES, Operand
from lowbit_attn.reference import Visibility, backward, forward, varlen_backward, varlen_forward

TOKENS, BLOCK = 300, 32
CAUSAL = [name for name, recipe in RECIPES.items() if recipe.causal]
# Refused under a causal mask; the reference applies whatever mask it is given.
LEAKING = replace(RECIPES["mxfp8"], v=Operand("e4m3", "per_tensor"), v_exponent="operand", trains=False, causal=False)


def inputs(channels=64):
    return [torch.randn(1, 4, TOKENS, channels), *(torch.randn(1, 2, TOKENS, channels) for _ in range(2))]


def run(tensors, grad, recipe):
    """O, lse and, if the recipe trains, dQ: each [1, H, TOKENS, ...]."""
    seen = Visibility.create(1, TOKENS, TOKENS, is_causal=True)
    result = forward(*tensors, recipe, seen, save=recipe.trains)
    if not recipe.trains:
        return [result.output, result.lse]
    return [result.output, result.lse, backward(grad, None, result.saved, result.output, result.lse, recipe, seen).query]


def moved_rows(recipe, operand, position, *, channels=64, factor=4096.0):
    """Rows of O, lse or dQ that change when one token of Q, K or V (0, 1, 2) grows by `factor`."""
    tensors, grad = inputs(channels), torch.randn(1, 4, TOKENS, channels)
    changed = [x.clone() for x in tensors]
    changed[operand][:, :, position] *= factor
    pairs = zip(run(tensors, grad, recipe), run(changed, grad, recipe), strict=True)
    different = [(a != b).flatten(3).any(-1) if a.ndim > 3 else a != b for a, b in pairs]
    return torch.stack(different).any(0).any(0).any(0).nonzero().flatten()


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("operand", [0, 1, 2], ids="QKV")
@pytest.mark.parametrize("position", [31, 95, 130, 299], ids=["first block", "same tile", "tile start", "last token"])
def test_rows_before_the_block_of_a_later_token_stay(name, operand, position):
    assert moved_rows(RECIPES[name], operand, position).min() >= position // BLOCK * BLOCK


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("operand", [0, 1, 2], ids="QKV")
@pytest.mark.parametrize("position", [31, 95, 130, 299])
def test_exact_safety_keeps_every_earlier_row(name, operand, position):
    assert moved_rows(replace(RECIPES[name], causal_safety="exact"), operand, position).min() >= position


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_fp8"])
def test_rotated_head_dim_128_keeps_them_too(name):
    assert moved_rows(RECIPES[name], 1, 130, channels=128).min() >= 128
    assert moved_rows(replace(RECIPES[name], causal_safety="exact"), 1, 130, channels=128).min() >= 130


def test_the_probe_sees_a_leak():
    assert moved_rows(LEAKING, 2, 299).min() < 256


def test_the_probe_sees_the_block_that_shares_a_scale():
    assert moved_rows(RECIPES["mxfp8"], 1, 95).min() < 95


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", [name for name in CAUSAL if RECIPES[name].trains])
def test_documents_never_meet(name, is_causal):
    cu = boundaries(0, 100, 100, 133, 134, 250)
    tensors = [torch.randn(260, 4, 64), torch.randn(260, 2, 64), torch.randn(260, 2, 64), torch.randn(260, 4, 64)]
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[100:133] *= 1e4
    results = []
    for *rows, grad in (tensors, changed):
        out = varlen_forward(*rows, cu, cu, RECIPES[name], is_causal=is_causal, save=True)
        grads = varlen_backward(grad, None, out.saved, out.output, out.lse, cu, cu, RECIPES[name], is_causal=is_causal)
        results.append([out.output, out.lse.T, grads.query, grads.key, grads.value])
    others = [*range(100), *range(133, 260)]
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[100:133], after[100:133])


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in CAUSAL])
def test_documents_never_meet_in_recipes_for_inference(name):
    cu = boundaries(0, 100, 133, 250)
    tensors = [torch.randn(260, 4, 64), torch.randn(260, 2, 64), torch.randn(260, 2, 64)]
    before = varlen_forward(*tensors, cu, cu, RECIPES[name], is_causal=False).output
    for x in tensors:
        x[100:133] *= 1e4
    after = varlen_forward(*tensors, cu, cu, RECIPES[name], is_causal=False).output
    others = [*range(100), *range(133, 260)]
    assert torch.equal(before[others], after[others])
