"""Random changes of one token, in every operand, dense and packed: `causal_safety=exact` leaves every earlier row of O and dQ
bit-identical, a default recipe every row outside the token's block of 32 (FLAMIA 3.2, 4.5, A.3).
"""

from dataclasses import replace

import pytest

from lowbit_attn.cli.measurements.leaks import (
    OPERANDS,
    POSITIONS,
    Probes,
    broken_promises,
    leaking_control,
    probe,
    silent_operands,
)
from lowbit_attn.recipes import RECIPES, Operand

TRAINS = ["mxfp8", "nvfp4_fp8", "nvfp4"]
COUNT = 200


def exact(name):
    return replace(RECIPES[name], causal_safety="exact")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", TRAINS)
def test_exact_leaves_every_earlier_row_of_output_and_query_gradient(name, packed):
    leak = probe(exact(name), Probes(count=COUNT, packed=packed, channels=32))
    assert {key[:2] for key in leak.largest} == {(operand, position) for operand in OPERANDS for position in POSITIONS}
    assert leak.worst(("O", "dQ")) == 0


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", TRAINS)
def test_exact_at_head_dim_128(name, packed):
    assert probe(exact(name), Probes(seq=200, count=COUNT, packed=packed, channels=128)).worst(("O", "dQ")) == 0


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_fp8"])
def test_exact_mxfp8_codes_leave_key_and_value_gradients_too(name):
    # Not promised, but per-token operands and row exponents of dS share nothing there either.
    assert probe(exact(name), Probes(count=25, channels=32)).worst(("dK", "dV")) == 0


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.causal])
def test_default_leaves_rows_of_earlier_blocks(name):
    leak = probe(RECIPES[name], Probes(count=25, channels=32))
    assert leak.worst(("O", "dQ"), ("earlier blocks",)) == 0


def test_default_moves_rows_of_the_own_block():
    # The residue that FLAMIA A.3 describes, and that `exact` removes.
    leak = probe(RECIPES["mxfp8"], Probes(count=25, channels=32))
    for operand, output in (("q", "O"), ("k", "O"), ("v", "O"), ("dO", "dQ")):
        assert leak.worst((output,), ("same block",), (operand,)) > 0


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", TRAINS)
def test_the_control_leaks_through_every_operand(name, packed):
    control = probe(leaking_control(RECIPES[name]), Probes(count=10, packed=packed, channels=32))
    assert silent_operands(RECIPES[name], control) == []
    for position in POSITIONS:
        assert control.worst(("dQ",), (position,)) > 1e-3


@pytest.mark.parametrize("change", [
    {"v": Operand("e4m3", "per_tensor"), "v_exponent": "operand"},
    {"v": Operand("e4m3", "token_block", "floor"), "v_exponent": "operand"},
    {"qk": Operand("e4m3", "per_tensor")},
    {"do": Operand("e4m3", "per_tensor")},
    {"ds": Operand("e4m3", "per_tensor")},
], ids=["V per tensor", "V floor blocks", "QK per tensor", "dO per tensor", "dS per tensor"])
def test_one_leaking_scale_is_enough_to_be_seen(change):
    # What a causal recipe is refused for, one at a time.
    recipe = replace(RECIPES["mxfp8"], causal=False, **change)
    assert probe(recipe, Probes(count=25, channels=32)).worst(("O", "dQ")) > 0


def test_a_head_wide_dq_scale_would_be_seen():
    # Rounding dQ to a scale taken from the whole sequence, as FLAMIA's fp16 accumulator does by default.
    from lowbit_attn.cli.measurements import leaks

    original = leaks.backward

    def rounding(*args, **kwargs):
        grads = original(*args, **kwargs)
        top = grads.query.abs().amax((-1, -2), keepdim=True)
        return replace(grads, query=(grads.query / top).half().float() * top)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaks, "backward", rounding)
        assert probe(exact("mxfp8"), Probes(count=25, channels=32)).worst(("dQ",)) > 0


def test_broken_promises_name_operand_and_position():
    leak = probe(leaking_control(RECIPES["mxfp8"]), Probes(count=10, channels=32))
    assert broken_promises(leaking_control(RECIPES["mxfp8"]), leak) == []
    default, safe = broken_promises(RECIPES["mxfp8"], leak), broken_promises(exact("mxfp8"), leak)
    assert any("dQ of rows in the earlier blocks" in problem and "of dO changed" in problem for problem in default)
    assert len(safe) > len(default)


def test_same_seed_same_leaks():
    first, second, other = (probe(RECIPES["mxfp8"], Probes(count=10, channels=32, seed=seed)) for seed in (3, 3, 4))
    assert first == second
    assert first != other


def test_recipes_without_a_backward_are_probed_forward_only():
    leak = probe(RECIPES["mxfp8_fast"], Probes(count=10))
    assert {key[2] for key in leak.largest} == {"O"}
    assert {key[0] for key in leak.largest} == {"q", "k", "v"}


def test_sequences_too_short_for_an_earlier_block_are_refused():
    with pytest.raises(ValueError, match="at least 64"):
        Probes(seq=63)
