"""`Saved.row_top` bounds each query's largest probability by a power of two, or if it is over half, all the others' sum; and by
none twice as large."""

import math

import pytest
import torch
from oracle import boundaries

from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility, forward, varlen_forward
from lowbit_attn.reference.operands import backward_operands


def inputs(queries, keys, heads=4, kv_heads=2, channels=32, sharpness=1.0):
    generator = torch.Generator().manual_seed(queries)
    shapes = ((2, heads, queries, channels), (2, kv_heads, keys, channels), (2, kv_heads, keys, channels))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return sharpness * q, k, v


def largest(saved, recipe, lse, visible):
    """log2 of the largest probability of each row, by the codes that the forward saved."""
    scale = saved.query.codes.shape[-1] ** -0.5
    operands = backward_operands(saved, recipe.effective(), scale)
    k = operands.k.repeat_interleave(operands.q.shape[1] // operands.k.shape[1], 1)
    scores = (operands.q @ k.mT * scale).masked_fill(~visible, -math.inf)
    return ((scores - lse[..., None]) * math.log2(math.e)).amax(-1)


def assert_bounds(row_top, log2_largest, sees):
    bound, largest = row_top.float() - 127, torch.exp2(log2_largest)
    assert row_top.dtype == torch.uint8
    # Scores are summed in another order here: 2^-16 of a doubling.
    near = 2.0**-16
    below = sees & (bound <= 0)
    assert (largest <= 0.5 + near)[below].all()
    assert (bound >= log2_largest - near)[below].all()
    assert (bound < log2_largest + 1 + near)[below].all()
    above = sees & (bound > 0)
    assert (largest > 0.5 - near)[above].all()
    assert (1 - largest <= torch.exp2(-bound) + near)[above].all()
    assert ((1 - largest > torch.exp2(-bound - 1) - near) | (bound == 4))[above].all()
    assert not row_top[~sees].any()


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("text", ["mxfp8", "mxfp8:max_threshold=2", "mxfp8:causal_safety=exact"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_it_bounds_the_largest_probability_of_a_row(causal, text, sharpness):
    recipe, (q, k, v) = resolve(text), inputs(150, 300, sharpness=sharpness)
    visibility = Visibility.create(2, 150, 300, is_causal=causal, bottom_right=False, device=q.device)
    result = forward(q, k, v, recipe, visibility, save=True)
    visible = torch.ones(150, 300, dtype=torch.bool).tril() if causal else torch.ones(150, 300, dtype=torch.bool)
    found = largest(result.saved, recipe, result.lse, visible)
    assert_bounds(result.saved.row_top, found, torch.ones_like(found, dtype=torch.bool))


def test_rows_that_see_no_key_have_none():
    q, k, v = inputs(150, 100)
    visibility = Visibility.create(2, 150, 100, is_causal=True, bottom_right=True, device=q.device)
    result = forward(q, k, v, resolve("mxfp8"), visibility, save=True)
    visible = torch.ones(150, 100, dtype=torch.bool).tril(-50)
    assert_bounds(result.saved.row_top, largest(result.saved, resolve("mxfp8"), result.lse, visible),
                  visible.any(-1).expand_as(result.lse))


def test_packed_documents_have_their_own_and_other_rows_none():
    q, k, v = (x[0].transpose(0, 1) for x in inputs(190, 190))
    cu = boundaries(0, 60, 60, 61, 180)
    result = varlen_forward(q, k, v, cu, cu, resolve("mxfp8"), is_causal=True, save=True)
    for start, stop in ((0, 60), (60, 61), (61, 180)):
        alone = forward(*(x[start:stop].transpose(0, 1)[None] for x in (q, k, v)), resolve("mxfp8"),
                        Visibility.create(1, stop - start, stop - start, is_causal=True, device=q.device), save=True)
        assert torch.equal(result.saved.row_top[:, start:stop], alone.saved.row_top[0])
    assert not result.saved.row_top[:, 180:].any()
