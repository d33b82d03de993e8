"""With the scores that the kernel has, its P is the reference's bit for bit: patterns, scales and codes."""

import pytest
import torch
from cdna4_calls import BITS_OF_P, RECIPES, recorded
from cdna4_packing import UNPACK

from lowbit_attn import formats
from lowbit_attn.cli.checks.cases import climbing, late_peak, normal
from lowbit_attn.recipes import resolve
from lowbit_attn.reference import exponential

LIFT = {"fused_mxfp8": 8, "fused_mxfp6": 2, "fused_mxfp4": 2}
"""The MFMA's scale of P is 2^LIFT times P's."""

INPUTS = {"normal": lambda: normal(256, 300), "climbing": lambda: climbing(64, 500),
          "late peak": lambda: late_peak(64, 300, height=200.0)}


def block_peaks(probabilities, name):
    """The maxima that share a scale: of a lane's 32 keys, or of a row's 128."""
    peaks = probabilities.amax(-1)
    if BITS_OF_P[name] == 8:
        row = peaks.amax(-1)   # lanes l and l + 32 hold the two halves of a row
        row = torch.maximum(row, row.roll(32, -1))
        peaks = row[..., None].expand(peaks.shape)
    return peaks


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", RECIPES)
def test_p_is_the_references_given_the_scores(emulator, name, kind):
    records, *_ = recorded(emulator, name, *INPUTS[kind]())
    p = resolve(name).p
    fmt = formats.element_format(p.element)
    probabilities = exponential.schraudolph_u16(records.scores)
    peaks = block_peaks(probabilities, name)
    lowest = 2.0 ** (LIFT[name] + 1 - 127)   # the kernel's floor: below it scales stay, and P is below 2^-117 of the row's largest
    ordinary = peaks >= lowest
    exponent = formats.shared_exponent(peaks, p.rule, fmt)
    assert bool(ordinary.any())
    assert torch.equal((records.scales - LIFT[name] - 127)[ordinary], exponent[ordinary])
    raw = records.words.contiguous().view(torch.uint8)
    codes = UNPACK[BITS_OF_P[name]](raw)
    want = formats.encode(probabilities / formats.pow2(exponent)[..., None], fmt)
    assert torch.equal(codes[ordinary], want[ordinary])
    assert int(codes[ordinary].amax()) > 0


@pytest.mark.parametrize("name", RECIPES)
def test_frozen_maxima_and_their_beta_are_the_references(emulator, name):
    query, key, value = climbing(32, 400)
    records, *_ = recorded(emulator, name, query, key, value)
    maximum = records.slope_maximum / exponential.AFFINE_SLOPE
    offset = torch.tensor(exponential.AFFINE_OFFSET, dtype=torch.float32)
    assert torch.equal(records.beta, offset - exponential.AFFINE_SLOPE * maximum)
    rises = maximum.diff(dim=2)
    assert bool((rises >= 0).all())
    assert bool(((rises == 0) | (rises > 32)).all())


@pytest.mark.parametrize("name", RECIPES)
def test_patterns_end_to_end_differ_by_no_more_than_the_scores_rounding(emulator, name):
    """Scores of the kernel against the reference's own, not injected: the rate of other BF16 patterns."""
    query, key, value = normal(32, 256)
    records, *_ = recorded(emulator, name, query, key, value)
    recipe = resolve(name)
    q, k = (formats.hadamard(x[0, :, 0]) for x in (query, key))
    q = q * (128**-0.5 * 1.4426950408889634)
    q, k = (formats.round_to_blocks(x, formats.element_format(recipe.qk.element), formats.block_layout("mx32"), recipe.qk.rule)
            for x in (q, k))
    scores = (q.double() @ k.double().T).float()
    want = exponential.affine(scores, scores[:, :128].amax(-1, keepdim=True))
    wide = BITS_OF_P[name] == 8
    lane, tile, r = torch.arange(64)[:, None], torch.arange(64) // 16, torch.arange(64) % 16
    half = lane // 32
    place = 64 * (tile // 2) + (32 * (tile % 2) + 16 * half if wide else 32 * half + 16 * (tile % 2)) + r
    for j in range(2):
        found = records.scores[0, 0, j].flatten(-2)
        mine = want[lane % 32, 128 * j + place]
        other = exponential.schraudolph_u16(found) != exponential.schraudolph_u16(mine)
        assert float(other.float().mean()) <= (0.004 if wide else 0.0)   # 4 roundings of 2^-27, in patterns of 1 / 65535
