"""Which recipes the Hopper forward of NVFP4 Q and K (`nvfp4`) computes. No Triton here: dispatch asks."""

from lowbit_attn.recipes import KEY_TILE, Recipe

LAYOUTS = ("nvfp16_token", "nvfp16")
"""Of Q and K: UE4M3 scales times a power of two per token, or alone."""

LARGEST_THRESHOLD = 100.0
"""A weight of 2^100 still has a scale of its own, and 2^100 times V's largest number is far outside of what attention gives."""


def refusal(recipe: Recipe) -> str | None:
    """Why this forward cannot serve an effective recipe, or None if it can."""
    qk, p, v = recipe.qk, recipe.p, recipe.v
    if qk.element != "e2m1" or qk.layout not in LAYOUTS or recipe.q_top or recipe.k_top:
        return f"qk: got {qk}; accepted: e2m1 in {', '.join(LAYOUTS)}, with no q_top and k_top"
    if str(p) != "e4m3/mx32/ceil" or str(v) != "e4m3/token_block/ceil":
        return f"p, v: got {p}, {v}; accepted: e4m3/mx32/ceil, e4m3/token_block/ceil"
    softmax = (recipe.exponential, recipe.row_sum, recipe.score_accumulator)
    if softmax != ("exact", "exact", "fp32") or recipe.maximum not in ("lazy", "online"):
        return (f"exponential, row_sum, score_accumulator, maximum: got {', '.join((*softmax, recipe.maximum))}; accepted: exact, "
                "exact, fp32, and lazy or online")
    if recipe.max_threshold > LARGEST_THRESHOLD:
        return f"max_threshold: got {recipe.max_threshold:g}; accepted: up to {LARGEST_THRESHOLD:g}"
    if (recipe.key_tile, recipe.v_exponent, recipe.diagonal, recipe.q_prescale) != (KEY_TILE, "operand", None, False):
        return f"{recipe.canonical}: key_tile, v_exponent, diagonal and q_prescale are those of nvfp4_fp8 only"
    if recipe.rotation == "always":
        return f"rotation: got {recipe.rotation}; accepted: none, d128"
    return None
