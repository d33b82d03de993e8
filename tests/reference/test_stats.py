"""stats=True counts what it says: elements that clamp or vanish, (row, key tile) steps, and rollbacks among them."""

from dataclasses import replace

import pytest
import torch

from lowbit_attn.recipes import IDENTITY, RECIPES, Operand
from lowbit_attn.reference import Count, Stats, Visibility, backward, forward

PLAIN = replace(RECIPES["mxfp4_ocp"], qk=IDENTITY, p=IDENTITY, v=IDENTITY)
FLOOR4 = Operand("e2m1", "mx32", "floor")


def zeros(queries=1, keys=1, channels=32):
    return [torch.zeros(1, 1, n, channels) for n in (queries, keys, keys)]


def count(tensors, recipe, operand, visibility=None):
    seen = visibility or Visibility(tensors[0].shape[2], tensors[1].shape[2])
    return forward(*tensors, recipe, seen, stats=True).stats.operands[operand]


@pytest.mark.parametrize(("operand", "index"), [("q", 0), ("k", 1)])
def test_q_and_k_along_channels(operand, index):
    # Block maximum 7.5: the floor rule takes scale 1, so 7.5 and 6.5 clamp at 6, and 0.2 is below half of the step 0.5.
    tensors = zeros()
    tensors[index][0, 0, 0, :5] = torch.tensor([7.5, 6.5, 6.0, 0.2, 0.3])
    assert count(tensors, replace(PLAIN, qk=FLOOR4), operand) == Count(total=32, saturated=2, flushed=1)


def test_v_along_keys():
    tensors = zeros(keys=32)
    tensors[2][0, 0, :3, 0] = torch.tensor([7.5, 0.2, -0.2])
    tensors[2][0, 0, 0, 1] = 0.25  # a block of its own: nothing is lost
    assert count(tensors, replace(PLAIN, v=FLOOR4), "v") == Count(total=32 * 32, saturated=1, flushed=2)


def test_zeros_are_not_flushed():
    assert count(zeros(), replace(PLAIN, qk=FLOOR4), "q") == Count(total=32, saturated=0, flushed=0)


def test_a_negative_value_saturates_like_a_positive_one():
    tensors = zeros()
    tensors[0][0, 0, 0, 0] = -7.5
    assert count(tensors, replace(PLAIN, qk=FLOOR4), "q").saturated == 1


def score_inputs(doublings):
    """One query whose base-two score of key j is doublings[j]; 32 channels."""
    q, k, v = zeros(keys=len(doublings))
    q[..., 0] = 1.0
    k[0, 0, :, 0] = torch.tensor(doublings) / (32**-0.5 * torch.log2(torch.tensor(torch.e)))
    return q, k, v


def test_p_in_blocks_along_keys():
    # Maximum 1 has scale 1/4: 2^-3 is half a unit, a code; 2^-4.5 is below a quarter and vanishes.
    tensors = score_inputs([0.0, -3.0, -4.5, -9.0])
    assert count(tensors, replace(PLAIN, p=FLOOR4), "p") == Count(total=4, saturated=0, flushed=2)


def test_p_without_scales_saturates_above_a_lazy_maximum():
    # Key 128 exceeds the first tile by 3.9 doublings, so the lazy maximum stays; 2^(3.9 + 4) = 239 still fits E4M3.
    recipe = replace(PLAIN, p=Operand("e4m3", "fixed"), p_log2_scale=4.0, maximum="lazy", max_threshold=4.0)
    tensors = score_inputs([0.0] * 128 + [3.9])
    assert count(tensors, recipe, "p") == Count(total=129, saturated=0, flushed=0)


def test_p_without_scales_flushes_below_its_smallest_code():
    # 2^-9 is E4M3's smallest code; with the factor 2^4, what lies under 2^-14 becomes zero.
    recipe = replace(PLAIN, p=Operand("e4m3", "fixed"), p_log2_scale=4.0)
    assert count(score_inputs([0.0, -12.9, -13.9, -14.5, -20.0]), recipe, "p") == Count(total=5, saturated=0, flushed=2)


@pytest.mark.parametrize(("queries", "keys", "tiles"), [(1, 1, 1), (5, 128, 5), (5, 129, 10), (130, 300, 390)])
def test_tiles_are_rows_times_key_tiles(queries, keys, tiles):
    stats = forward(*zeros(queries, keys), PLAIN, Visibility(queries, keys), stats=True).stats
    assert (stats.tiles, stats.rollbacks) == (tiles, 0)


def test_causal_tiles_skip_blocks_of_rows_above_the_diagonal():
    # The second key tile is visited from row 128 on.
    seen = Visibility.create(1, 256, 256, is_causal=True)
    assert forward(*zeros(256, 256), RECIPES["mxfp8"], seen, stats=True).stats.tiles == 256 + 128


@pytest.mark.parametrize(("rise", "rollbacks"), [(31.9, 0), (32.1, 1), (300.0, 1)])
def test_rollbacks_are_rises_above_the_gate(rise, rollbacks):
    recipe = replace(RECIPES["fused_mxfp6"], qk=IDENTITY, rotation="none")
    tensors = score_inputs([0.0] * 128 + [rise] + [0.0] * 127 + [rise])
    assert forward(*tensors, recipe, Visibility(1, 257), stats=True).stats.rollbacks == rollbacks


def test_only_the_rising_row_rolls_back():
    q, k, v = score_inputs([0.0] * 128 + [40.0])
    q = torch.cat([q, torch.zeros_like(q), q], 2)
    recipe = replace(RECIPES["fused_mxfp6"], qk=IDENTITY, rotation="none")
    assert forward(q, k, v, recipe, Visibility(3, 129), stats=True).stats.rollbacks == 2


def backward_stats(tensors, grad, recipe):
    seen = Visibility(tensors[0].shape[2], tensors[1].shape[2])
    result = forward(*tensors, recipe, seen, save=True)
    return backward(grad, None, result.saved, result.output, result.lse, recipe, seen, stats=True).stats.operands


def test_do_of_a_token_block():
    # 448 fits exactly with scale 1; 2^-11 is a quarter of the smallest code 2^-9.
    tensors, grad = zeros(queries=32, keys=32), torch.zeros(1, 1, 32, 32)
    grad[0, 0, :2, 0] = torch.tensor([448.0, 2.0**-11])
    assert backward_stats(tensors, grad, RECIPES["mxfp8"])["do"] == Count(total=32 * 32, saturated=0, flushed=1)


def test_ds_flush_fraction_counts_every_vanished_gradient():
    # Two keys share the row; dS of the thirty others is tiny beside theirs and leaves E4M3's range in the shared block.
    q, k, v = zeros(queries=32, keys=32)
    v[0, 0, 0, 0], v[0, 0, 1, 0] = 1.0, -1.0
    k[0, 0, 2:, 0], q[..., 0] = -120.0, 1.0
    grad = torch.zeros(1, 1, 32, 32)
    grad[..., 0] = 1.0
    v[0, 0, 2:, 0] = 0.5
    count = backward_stats((q, k, v), grad, RECIPES["mxfp8"])["ds"]
    # Scores of -120 / sqrt(32) nats give P = 2^-30.6 next to 0.5: below 2^-18 of the block's maximum.
    assert (count.total, count.flushed) == (32 * 32, 32 * 30)
    assert count.flushed_fraction == 30 / 32


def test_shared_ds_scales_flush_more_than_block_scales():
    tensors, grad = [torch.randn(1, 2, 256, 64) for _ in range(3)], torch.randn(1, 2, 256, 64)
    grad[:, :, ::32] *= 2.0**14
    # A causal recipe may not share dS scales over a tensor.
    free = replace(RECIPES["mxfp8"], causal=False)
    fractions = [backward_stats(tensors, grad, replace(free, ds=Operand("e4m3", layout)))["ds"].flushed_fraction
                 for layout in ("per_row", "square32", "per_tensor")]
    assert fractions == sorted(fractions)
    assert fractions[2] > fractions[0]


@pytest.mark.parametrize("name", RECIPES)
def test_counting_changes_no_result(name):
    tensors = [torch.randn(1, 2, 150, 64) for _ in range(3)]
    plain, counted = (forward(*tensors, RECIPES[name], Visibility(150, 150), stats=stats) for stats in (False, True))
    assert torch.equal(plain.output, counted.output)
    assert plain.stats is None
    assert set(counted.stats.operands) >= {"q", "k", "v"}


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "mxfp4_ocp"])
def test_only_floor_and_uos_scales_saturate_operands(name):
    tensors = [torch.randn(1, 2, 150, 64) for _ in range(3)]
    operands = forward(*tensors, RECIPES[name], Visibility(150, 150), stats=True).stats.operands
    for operand in ("q", "k", "v"):
        rule = (RECIPES[name].v if operand == "v" else RECIPES[name].qk)
        # NVFP4 scales are E4M3 numbers themselves: rounded down, they clamp the block's maximum a little.
        if rule.rule == "ceil" and not rule.layout.startswith("nvfp"):
            assert operands[operand].saturated == 0
        else:
            assert operands[operand].saturated > 0


def test_the_share_of_rollbacks_is_printed():
    stats = Stats()
    assert stats.rollback_rate == 0
    stats.record_step(torch.tensor([True, False, False, False]))
    stats.add("p", 8, torch.tensor(1), torch.tensor(2))
    assert str(stats) == "p: 8 elements, 1 saturated, 2 flushed (25.000%)\nrolled back: 1 of 4 row steps (25.000%)"
