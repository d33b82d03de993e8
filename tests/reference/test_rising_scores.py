"""Maxima that climb, arrive late or stand on one token: the output keeps the accuracy of ordinary scores, in every recipe."""

import math

import pytest
import torch
from oracle import exact_attention, relative_error, visible

from lowbit_attn.recipes import RECIPES
from lowbit_attn.reference import Visibility, forward

TILES, TILE, QUERIES = 6, 128, 64
CAUSAL = [name for name, recipe in RECIPES.items() if recipe.causal]
CLIMBS = {
    "12 doublings or more every tile": [0.0, 12.0, 24.0, 48.0, 96.0, 192.0],
    "within every threshold": [0.0, 1.0, 2.0, 3.0, 4.0, 4.0],
    "within some thresholds": [0.0, 3.0, 6.0, 8.0, 12.0, 16.0],
    "falls": [192.0, 96.0, 48.0, 24.0, 12.0, 0.0],
    "up and down": [0.0, 24.0, 0.0, 48.0, -24.0, 48.0],
}
"""Doublings above the first tile, all of them 1 or 1.5 times a power of two, which every format holds exactly."""


def usual_error(name):
    """What the recipe makes of normal inputs."""
    q, k, v = torch.randn(1, 2, QUERIES, 64), *(torch.randn(1, 2, TILES * TILE, 64) for _ in range(2))
    return relative_error(forward(q, k, v, RECIPES[name], Visibility(QUERIES, TILES * TILE)).output, exact_attention(q, k, v)[0])


def along_one_direction(doublings):
    """Q and K of one channel: with scale BASE_TWO, key j scores doublings[j] in base two. Quantization moves no score."""
    keys = len(doublings)
    q, k = torch.zeros(1, 2, QUERIES, 64), torch.zeros(1, 2, keys, 64)
    q[..., 0] = 1.0
    k[..., 0] = torch.as_tensor(doublings)
    return q, k, torch.randn(1, 2, keys, 64)


BASE_TWO = math.log(2.0)
"""The softmax scale with which q . k is the base-two score."""


@pytest.mark.parametrize("climb", CLIMBS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_climbing_maximum(name, climb):
    q, k, v = along_one_direction(torch.tensor(CLIMBS[climb]).repeat_interleave(TILE))
    result = forward(q, k, v, RECIPES[name], Visibility(QUERIES, TILES * TILE), scale=BASE_TWO)
    expected, _ = exact_attention(q, k, v, scale=BASE_TWO)
    # Where a row sees one tile only, its P is one number; what an exact row sum leaves of its rounding is at most 2^-4.
    assert relative_error(result.output, expected) <= usual_error(name) + 2.0**-4


@pytest.mark.parametrize("name", RECIPES)
def test_a_single_late_key_40_doublings_above_takes_all_the_weight(name):
    heights = torch.zeros(TILES * TILE)
    heights[-5] = 40.0
    q, k, v = along_one_direction(heights)
    output = forward(q, k, v, RECIPES[name], Visibility(QUERIES, TILES * TILE), scale=BASE_TWO).output
    # What is left is the rounding of V itself.
    expected = v[:, :, -5:-4].expand_as(output)
    assert relative_error(output, expected) <= 0.2
    assert (output - output[:, :, :1]).abs().max() == 0


@pytest.mark.parametrize("name", CAUSAL)
def test_a_late_key_leaves_the_rows_before_it(name):
    tokens = 384
    q, k, v = (torch.randn(1, 2, tokens, 64) for _ in range(3))
    direction = torch.nn.functional.normalize(torch.randn(64), dim=0)
    q = q + 8 * direction
    loud = k.clone()
    loud[:, :, 300] += 40 * direction
    seen = Visibility.create(1, tokens, tokens, is_causal=True)
    before, after = (forward(q, x, v, RECIPES[name], seen).output for x in (k, loud))
    assert torch.equal(before[:, :, :288], after[:, :, :288])
    expected, _ = exact_attention(q, loud, v, visible(tokens, tokens, "top_left"))
    assert relative_error(after[:, :, 300:], expected[:, :, 300:]) <= 0.25


@pytest.mark.parametrize(("name", "is_causal"), [*((name, False) for name in RECIPES), *((name, True) for name in CAUSAL)])
def test_a_row_of_one_token_returns_its_value(name, is_causal):
    q, k, v = (torch.randn(1, 4, 1, 64) for _ in range(3))
    result = forward(q, k, v, RECIPES[name], Visibility.create(1, 1, 1, is_causal=is_causal))
    # P is one weight of one; V's rounding is left: half a step of E4M3, E2M3 (2^-4) or E2M1 (2^-2), of each element.
    step = {"e4m3": 2.0**-4, "e2m3": 2.0**-4, "e2m1": 2.0**-2}[RECIPES[name].v.element]
    if RECIPES[name].row_sum == "exact":
        step += 2.0**-4
    assert relative_error(result.output, v) <= step
    expected = (q * k).sum(-1) / 8
    assert (result.lse - expected).abs().max() <= 0.5


@pytest.mark.parametrize("name", CAUSAL)
def test_the_first_causal_row_sees_one_key(name):
    q, k, v = (torch.randn(1, 2, 200, 64) for _ in range(3))
    long = forward(q, k, v, RECIPES[name], Visibility.create(1, 200, 200, is_causal=True)).output[:, :, :1]
    assert relative_error(long, v[:, :, :1]) <= 0.2


@pytest.mark.parametrize("operand", [0, 1, 2], ids="QKV")
@pytest.mark.parametrize("name", RECIPES)
def test_denormal_operands_are_finite_and_close_to_zeros(name, operand):
    tensors = [torch.randn(1, 2, 40, 64) for _ in range(3)]
    tensors[operand] *= 1e-40
    actual = forward(*tensors, RECIPES[name], Visibility(40, 40))
    tensors[operand] *= 0.0
    expected = forward(*tensors, RECIPES[name], Visibility(40, 40))
    assert actual.output.isfinite().all()
    # With Q or K next to zero all weights are equal; with V, so is the output next to zero.
    assert (actual.output - expected.output).abs().max() <= 1e-6
