"""Row sums of the attention weights: quantized before the row sum is taken (PNQ), they are one; directly placed, they drift.

Source: MXAttention sections 4.2 and 5.5.2, proposition 1, appendix J.
"""

from dataclasses import replace

import pytest
import torch
from oracle import relative_error

from lowbit_attn.formats import E2M1, block_layout, round_to_blocks
from lowbit_attn.recipes import IDENTITY, RECIPES
from lowbit_attn.reference import Visibility, forward
from lowbit_attn.reference.forward import score_product
from lowbit_attn.reference.operands import forward_operands, score_factor

PNQ = RECIPES["mxattention"]
DIRECT = replace(PNQ, row_sum="exact")
QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.row_sum == "quantized"]
SEEN = Visibility(128, 1024)


def inputs(sharpness=1.0):
    return sharpness * torch.randn(1, 4, 128, 64), torch.randn(1, 4, 1024, 64), torch.randn(1, 4, 1024, 64)


def row_sums(recipe, sharpness=1.0):
    """The weights add up in attention over ones, which every value format holds exactly."""
    q, k, v = inputs(sharpness)
    return forward(q, k, torch.ones_like(v), recipe, SEEN).output[..., 0]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 4.0])
def test_quantized_row_sums_make_weights_that_sum_to_one(name, sharpness):
    # Two float32 sums of the same 1024 numbers in different orders, and one division.
    assert (row_sums(RECIPES[name], sharpness) - 1).abs().max() <= 1024 * 2.0**-24


def test_direct_row_sums_are_mostly_below_one():
    # 0.93 on the paper's model activations; half a step of E2M1, 1/4 of the value, bounds what one weight may lose or gain
    # above 0.25 of its block's unit, everything below is lost.
    sums = row_sums(DIRECT, sharpness=2.0)
    assert 0.85 <= sums.mean() <= 0.97
    assert (sums < 1).float().mean() >= 0.95


def test_floor_scales_lose_more_row_mass_than_uos():
    floor = replace(PNQ.p, rule="floor")
    assert row_sums(replace(DIRECT, p=floor), 2.0).mean() < row_sums(DIRECT, 2.0).mean()


@pytest.mark.parametrize("placement", [DIRECT, PNQ], ids=["direct", "pnq"])
def test_a_row_sum_off_one_scales_the_output(placement):
    # With V constant in every channel, the output is the row sum times that constant.
    q, k, v = inputs(2.0)
    constant = forward(q, k, torch.full_like(v, 4.0), placement, SEEN).output
    assert torch.equal(constant[..., 0], 4 * forward(q, k, torch.ones_like(v), placement, SEEN).output[..., 0])


def test_pnq_removes_the_error_that_a_mean_of_v_makes():
    # Only P is quantized, so the direct placement is off by its row sums' 7 %, PNQ by what P's rounding does to v - mean.
    q, k, v = inputs(2.0)
    v = v + 4.0
    expected = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    direct, pnq = (relative_error(forward(q, k, v, replace(recipe, qk=IDENTITY, v=IDENTITY), SEEN).output, expected)
                   for recipe in (DIRECT, PNQ))
    assert pnq <= 0.25 * direct


def test_the_largest_weight_is_represented_exactly():
    # Appendix J: Q(1) = 1 with the scale 2^-2, in a block of anything smaller.
    block = torch.cat([torch.ones(1), torch.rand(31)]).view(1, 32)
    assert round_to_blocks(block, E2M1, block_layout("mx32"), "uos")[0, 0] == 1


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 8.0])
def test_row_sum_is_at_least_one_in_units_of_the_maximum(sharpness):
    q, k, v = inputs(sharpness)
    lse = forward(q, k, v, PNQ, SEEN).lse
    operands = forward_operands(q, k, v, PNQ, 64**-0.5, save=False, stats=None)
    scores = score_product(operands.q[:, :, None], operands.k) * score_factor(PNQ, 64**-0.5)
    # lse = ln 2 (maximum + log2 of the row sum); float32 rounding of both.
    assert (lse - scores.amax(-1)[:, :, 0] * torch.log(torch.tensor(2.0))).min() >= -1e-5
