"""Every layout on every operand: what a causal recipe accepts does not leak, and what it refuses for leaking would.

`causal_safety=exact` promises O and dQ of all earlier rows, a default recipe those of earlier blocks of 32 tokens. The
constructor decides by a table of products and axes; here the leak probe decides, for every operand and layout.
"""

from dataclasses import replace

import pytest

from lowbit_attn.cli.measurements.leaks import POSITIONS, Probes, probe
from lowbit_attn.formats import LAYOUTS
from lowbit_attn.recipes import BF16, RECIPES, Operand

OPERANDS = ("qk", "qk_grad", "p", "v", "do", "ds", "p_grad", "diagonal")
BASES = {
    "mxfp8": replace(RECIPES["mxfp8"], v_exponent="operand"),
    "nvfp4_fp8": RECIPES["nvfp4_fp8"],
    "nvfp4": RECIPES["nvfp4"],
    "nvfp4 for inference": replace(RECIPES["nvfp4"], trains=False),
    "mxfp8_fast": replace(RECIPES["mxfp8_fast"], v_exponent="operand", q_top=0.0, k_top=0.0, score_accumulator="fp32"),
}
# E2M1 has three exponents, so a scale that moves shows in its codes; UOS clamps, which leaks where several tokens share it.
FORMATS = [None, BF16, *(Operand("e2m1", layout) for layout in LAYOUTS), Operand("e2m1", "token_block", "uos"),
           Operand("e2m1", "mx32", "uos")]
PROBES = Probes(seq=64, count=4, channels=32)
MORE = replace(PROBES, count=25)
REFUSED = "causal_safety='exact' needs one scale per token"


def changed(base, field, operand, **options):
    """The recipe, or the reason why there is none."""
    try:
        return replace(BASES[base], **{field: operand}, **options)
    except ValueError as error:
        return str(error)


def cases(base):
    """(field, operand) of every change that is one: fields other than the optional ones need a format."""
    return [(field, operand) for field in OPERANDS for operand in FORMATS
            if (operand is not None or field in ("qk_grad", "diagonal")) and getattr(BASES[base], field) != operand]


def rows_moved(recipe, positions, probes=PROBES):
    """Whether any row of O or dQ in these positions moves when a later token changes."""
    return probe(recipe, probes).worst(("O", "dQ"), positions) > 0


@pytest.mark.parametrize("base", BASES)
def test_whatever_exact_accepts_moves_no_earlier_row(base):
    accepted = [(field, str(operand), recipe) for field, operand in cases(base)
                if not isinstance(recipe := changed(base, field, operand, causal_safety="exact"), str)]
    assert len(accepted) > 15
    assert [case for *case, recipe in accepted if rows_moved(recipe, POSITIONS)] == []


@pytest.mark.parametrize("base", BASES)
def test_whatever_exact_refuses_for_sharing_a_scale_does_move_one(base):
    # A recipe that is declared non-causal is built, and the reference applies whatever mask it is given. P's block maxima are
    # 1 in nearly every block, so only a fine P scale (nvfp4's fold) moves often enough to be seen.
    refused = [(field, str(operand), changed(base, field, operand, causal_safety="exact", causal=False))
               for field, operand in cases(base)
               if REFUSED in str(changed(base, field, operand, causal_safety="exact")) and (field != "p" or base == "nvfp4")]
    assert refused
    assert [case for *case, recipe in refused if not rows_moved(recipe, ("same block",), MORE)] == []


@pytest.mark.parametrize("base", BASES)
def test_whatever_a_default_recipe_accepts_moves_no_row_of_an_earlier_block(base):
    accepted = [(field, str(operand), recipe) for field, operand in cases(base)
                if not isinstance(recipe := changed(base, field, operand), str)]
    assert len(accepted) > 15
    assert [case for *case, recipe in accepted if rows_moved(recipe, ("earlier blocks",))] == []
