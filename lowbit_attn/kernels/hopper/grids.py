"""What the forward in blocks of 32 (`block_attention`) serves, and the grids that it rounds P to. No Triton here: dispatch asks."""

from dataclasses import dataclass

from lowbit_attn.recipes import KEY_TILE, Recipe

ELEMENTS = ("e4m3", "e2m3", "e2m1")


@dataclass(frozen=True)
class Grid:
    """How `blocks.rounded` finds a block's scale and rounds to it.

    bump: what makes a largest pattern that needs the next scale carry into its exponent, 1023 less the mantissa of the bound.
    magic: over the threshold where the grid's spacing doubles, the number whose spacing in float16 is the grid's.
    lowest: the smallest exponent field of the threshold.
    """

    bump: int
    magic: float
    lowest: int


GRIDS = {
    ("e2m3", "ceil"): Grid(1023 - 896, 127.0, 2),  # 7.5 is 1.875 times 4
    ("e2m1", "ceil"): Grid(1023 - 512, 511.0, 1),  # 6
    ("e2m1", "oas"): Grid(1023 - 768, 511.0, 1),   # 7
    ("e2m1", "uos"): Grid(1023 - 832, 511.0, 1),   # 7.25
    ("e2m1", "floor"): Grid(0, 511.0, 1),          # the block's own binade
}


def refusal(recipe: Recipe) -> str | None:
    """Why the forward in blocks of 32 cannot serve an effective recipe, or None if it can."""
    qk, p, v = recipe.qk, recipe.p, recipe.v
    if qk.layout != "mx32" or qk.element not in ELEMENTS or recipe.q_top or recipe.k_top:
        return f"qk: got {qk}; accepted: layout mx32 of {', '.join(ELEMENTS)}, with no q_top and k_top"
    if v.layout not in ("mx32", "per_tensor") or v.element not in ELEMENTS:
        return f"v: got {v}; accepted: layouts mx32 and per_tensor of {', '.join(ELEMENTS)}"
    softmax = (recipe.exponential, recipe.maximum, recipe.row_sum)
    frozen = softmax == ("schraudolph_u16", "frozen", "quantized")
    if not frozen and softmax[:2] != ("exact", "online"):
        return f"exponential, maximum, row_sum: got {softmax}; accepted: schraudolph_u16, frozen, quantized; or exact, online, any"
    if not (p.layout == "mx32" and (p.element, p.rule) in GRIDS) and not (frozen and str(p) == "e4m3/per_row/ceil"):
        return f"p: got {p}; accepted: e2m3 and e2m1 in mx32, and e4m3/per_row/ceil with a frozen maximum"
    if (recipe.key_tile, recipe.score_accumulator, recipe.v_exponent, recipe.diagonal) != (KEY_TILE, "fp32", "operand", None):
        return f"{recipe.canonical}: key_tile, score_accumulator, v_exponent and diagonal are those of the named recipes only"
    if recipe.causal or recipe.trains:
        return f"{recipe.canonical} is causal or trains; accepted: recipes for inference without a causal mask"
    if frozen and recipe.max_threshold != 32:
        return f"max_threshold: got {recipe.max_threshold:g}; accepted: 32"
    return None
