"""How far the Hopper forward in blocks of 32 may be from the reference, and inputs that raise a frozen maximum where a test says.

The bounds are those of wgmma; a CPU that runs the kernel's source stays within them too.
"""

import math

import torch

from lowbit_attn.recipes import resolve


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def scores(q, k, scale=None):
    """Exact base-two scores of every query with every key of its head group, flattened; q, k [.., H, S, D]."""
    k = k.nan_to_num(posinf=0, neginf=0).float().repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    factor = (q.shape[-1] ** -0.5 if scale is None else scale) * math.log2(math.e)
    return (q.nan_to_num(posinf=0, neginf=0).float() @ k.mT * factor).flatten()


def allowed(x, head_dim, recipe):
    """A relative distance of outputs, how far a score may be off relative to itself, and the codes of P in a doubling.

    A score x is off by up to 2^-13 of itself for each 16 channels that were added and by 2^-11 more in float16; an offset of the
    affine exponential by up to 2^-8 doublings. Of n codes a doubling a score off by e moves a share n e by 1 / n of their values:
    weights by sqrt(n e) / n in the root mean square. The output is also off by its rounding (2^-8 of two) and, where V's mean is
    not zero, by what FP8 sums lose between promotions (2^-7)."""
    recipe = resolve(recipe)
    codes = 2 if recipe.p.element == "e2m1" else 8
    step = (head_dim // 16 + 1) * 2.0**-13 + 2.0**-11
    error = step * (x.square().mean().sqrt().item() if x.numel() else 0.0) + (2.0**-8 if recipe.maximum == "frozen" else 0)
    return 2.0**-8 + 2.0**-7 + math.sqrt(codes * error) / codes, step, codes


def assert_close(actual, expected, x, head_dim, recipe):
    """Within what is allowed; the same NaN, and rows without a key."""
    (output, lse), (reference, reference_lse) = actual, expected
    bound, step, codes = allowed(x, head_dim, recipe)
    assert output.shape == reference.shape
    assert output.dtype == reference.dtype
    assert torch.equal(output.isnan(), reference.isnan())
    assert torch.equal(lse.isneginf(), reference_lse.isneginf())
    seen = lse.isfinite() & reference_lse.isfinite()
    assert relative(output.nan_to_num(), reference.nan_to_num()) < bound
    if seen.any():
        # A flipped code also moves a quantized row sum: at most from 1 to the next code, of the only weight.
        flip = 2.0**-9 if resolve(recipe).row_sum == "exact" else math.log(1 + 1 / codes)
        assert (lse - reference_lse)[seen].abs().max() < step * x.abs().max().item() + flip


TILE = 128
PROMOTE = 16
"""Key tiles that the kernel sums before it promotes."""


def _rise(tiles, first, height, missing=0):
    """Ordinary keys up to tile `first`, then one in 128 `height` doublings above them, the others 20 below."""
    after = {key: height if key % TILE == 37 else -20.0 for key in range(first * TILE, tiles * TILE - missing)}
    return tiles * TILE - missing, {key: after.get(key, 0.0) for key in range(tiles * TILE - missing)}


# A maximum rises by 3 doublings or more. A few keys that much higher, after two thousand, leave either side some of the weight, so
# that what is scaled too little shows, and what is scaled too much. Other keys after the rise lie far below: the kernel takes what
# is 12 doublings below its maximum for nothing, the reference does not, and two thousand ordinary ones would show it.
RISES = {
    "level": _rise(20, 20, 0.0, missing=57),
    "before the promotion": _rise(20, PROMOTE - 1, 10.0),
    "at the promotion": _rise(20, PROMOTE, 10.0),
    "after the promotion": _rise(20, PROMOTE + 1, 10.0, missing=57),
    "in the last tile": _rise(20, 19, 10.5, missing=57),
    "staircase": (20 * TILE, {key: 8.0 * (key // (4 * TILE)) for key in range(20 * TILE)}),
    "between two promotions": _rise(34, PROMOTE + 4, 9.0),
    "at the second promotion": _rise(34, 2 * PROMOTE, 10.5),
}
"""Keys, and by how many doublings the scores of each rise. The first promotion adds to nothing: only a rise between two makes one
scale what was promoted before, which takes more than 32 tiles."""


def rising(q, k, v, heights):
    """q, k and v [.., S, D], the scores of all queries with each key raised by its doublings: both get a part along one direction.
    It crosses all blocks of 32, and still does when it is rotated. Queries keep their own part, so that some rise more. V's mean is
    1 before a rise: what two thousand keys add up to is not small then beside what a few do."""
    dim = q.shape[-1]
    direction = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(0)).mul(2.0).sub(1).to(q.device)
    heights = torch.tensor([heights[key] for key in range(k.shape[-2])], device=k.device)
    own = k.float() @ direction / dim
    part = heights * (math.log(2) * dim**-0.5) - own
    before = ((heights == 0) & heights.any()).to(v.dtype)
    return (q.float() + direction).to(q.dtype), (k.float() + part[..., None] * direction).to(k.dtype), v + before[:, None]
