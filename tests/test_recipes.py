"""Named recipes are the table's, the canonical text says all of a recipe, and recipes that cannot be right are refused."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_attn.formats import ELEMENTS, LAYOUTS
from lowbit_attn.recipes import BF16, EXPONENTIALS, IDENTITY, RECIPES, Operand, Recipe, canonical_text, recipe_names, resolve

every_recipe = pytest.mark.parametrize("name", list(RECIPES))

E4M3_TOKENS = "e4m3/token_block/ceil"
FUSED = {
    "row_sum": "quantized", "exponential": "schraudolph_u16", "maximum": "frozen", "max_threshold": 32.0, "rotation": "always",
    "q_prescale": True, "causal": False, "trains": False, "score_accumulator": "fp32", "key_tile": 128,
}

TABLE = {
    "mxfp8": {
        "qk": E4M3_TOKENS, "p": "e4m3/fixed/ceil", "p_log2_scale": 4.0, "v": E4M3_TOKENS, "v_exponent": "running",
        "row_sum": "exact", "exponential": "exact", "maximum": "lazy", "max_threshold": 4.0, "rotation": "d128",
        "q_prescale": False, "do": E4M3_TOKENS, "ds": "e4m3/square32/ceil", "p_grad": "e4m3/fixed/ceil",
        "p_grad_log2_scale": 8.0, "score_accumulator": "fp32", "causal_safety": "default", "causal": True, "trains": True,
        "key_tile": 128,
    },
    "mxfp8_fast": {
        "qk": E4M3_TOKENS, "q_top": 14.0, "k_top": 28.0, "score_accumulator": "fp16", "v": E4M3_TOKENS,
        "v_exponent": "running", "row_sum": "quantized", "exponential": "direct_u8", "maximum": "lazy", "max_threshold": 1.0,
        "rotation": "d128", "causal": True, "trains": False, "key_tile": 128,
    },
    "nvfp4_fp8": {
        "qk": "e2m1/nvfp16_token/ceil", "qk_grad": E4M3_TOKENS, "p": "e4m3/mx32/ceil", "v": E4M3_TOKENS, "do": E4M3_TOKENS,
        "row_sum": "exact", "exponential": "exact", "maximum": "lazy", "rotation": "d128", "causal": True, "trains": True,
        "p_grad": "e4m3/fixed/ceil", "p_grad_log2_scale": 8.0, "ds_stochastic": False, "key_tile": 128,
    },
    "nvfp4": {
        "qk": "e2m1/nvfp16_token/ceil", "diagonal": "e2m1/per_row/ceil", "row_sum": "quantized", "maximum": "lazy",
        "rotation": "none", "causal": True, "trains": True, "ds_stochastic": True, "key_tile": 128,
    },
    "fused_mxfp8": {"qk": "e4m3/mx32/ceil", "p": "e4m3/per_row/ceil", "v": "e4m3/per_tensor/ceil", **FUSED},
    "fused_mxfp6": {"qk": "e2m3/mx32/ceil", "p": "e2m3/mx32/ceil", "v": "e2m3/mx32/ceil", **FUSED},
    "fused_mxfp4": {"qk": "e2m1/mx32/uos", "p": "e2m3/mx32/ceil", "v": "e2m1/mx32/uos", **FUSED},
    "mxattention": {
        "qk": "e2m1/mx32/uos", "p": "e2m1/mx32/uos", "v": "e2m1/mx32/uos", "row_sum": "quantized", "exponential": "exact",
        "maximum": "online", "rotation": "always", "q_prescale": False, "causal": False, "trains": False, "key_tile": 128,
    },
    "mxfp4_ocp": {
        "qk": "e2m1/mx32/floor", "p": "e2m1/mx32/floor", "v": "e2m1/mx32/floor", "row_sum": "exact", "exponential": "exact",
        "maximum": "online", "rotation": "none", "q_prescale": False, "causal": False, "trains": False, "key_tile": 128,
    },
}


def field_text(recipe, name):
    """A field as the table writes it: operands as text, the rest as it is."""
    value = getattr(recipe, name)
    return str(value) if isinstance(value, Operand) else value


@pytest.mark.parametrize("name", list(TABLE))
def test_a_named_recipe_has_the_fields_of_the_table(name):
    assert {field: field_text(RECIPES[name], field) for field in TABLE[name]} == TABLE[name]


def test_nvfp4_uses_four_bits_for_every_operand():
    recipe = RECIPES["nvfp4"]
    operands = [recipe.qk, recipe.qk_grad, recipe.p, recipe.p_grad, recipe.v, recipe.do, recipe.ds, recipe.diagonal]
    assert {operand.element for operand in operands} == {"e2m1"}


def test_the_named_recipes_are_those_of_the_table_and_bf16():
    assert list(RECIPES) == list(TABLE)
    assert recipe_names() == ["bf16", *TABLE]


@every_recipe
def test_a_named_recipe_resolves_from_its_name_which_is_its_canonical_text(name):
    assert resolve(name) is RECIPES[name] or resolve(name) == RECIPES[name]
    assert RECIPES[name].canonical == name
    assert RECIPES[name].source


OPERANDS = st.one_of(
    st.sampled_from([IDENTITY, BF16]),
    st.builds(lambda element, layout, rule: (element, layout, rule), st.sampled_from(sorted(ELEMENTS)),
              st.sampled_from([*sorted(LAYOUTS), "fixed"]), st.sampled_from(["ceil", "floor", "oas", "uos"])),
)
OPTIONS = {
    "qk": OPERANDS, "p": OPERANDS, "v": OPERANDS, "p_grad": OPERANDS, "do": OPERANDS, "ds": OPERANDS,
    "qk_grad": st.none() | OPERANDS, "diagonal": st.none() | OPERANDS,
    "p_log2_scale": st.floats(-20, 4), "p_grad_log2_scale": st.floats(-20, 8), "max_threshold": st.floats(0, 40),
    "q_top": st.floats(0, 6), "k_top": st.floats(0, 6),
    "v_exponent": st.sampled_from(["operand", "running"]), "score_accumulator": st.sampled_from(["fp32", "fp16"]),
    "row_sum": st.sampled_from(["exact", "quantized"]), "exponential": st.sampled_from(EXPONENTIALS),
    "maximum": st.sampled_from(["online", "lazy", "frozen"]), "rotation": st.sampled_from(["none", "always", "d128"]),
    "causal_safety": st.sampled_from(["default", "exact"]), "exp_window": st.integers(1, 127),
    "q_prescale": st.booleans(), "ds_stochastic": st.booleans(), "causal": st.booleans(), "trains": st.booleans(),
    "key_tile": st.sampled_from([32, 64, 128, 256]),
}


@st.composite
def recipes(draw):
    """A named recipe with random changes, those left out that make it refused."""
    recipe = RECIPES[draw(st.sampled_from(sorted(RECIPES)))]
    for option in draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=8)):
        value = draw(OPTIONS[option])
        try:
            recipe = replace(recipe, **{option: Operand(*value) if isinstance(value, tuple) else value})
        except ValueError:
            continue
    return recipe


def test_the_options_of_the_round_trip_are_all_there_are():
    assert set(OPTIONS) == {field.name for field in fields(Recipe)} - {"name", "source"}


@given(recipe=recipes())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_canonical_text_resolves_to_an_equal_recipe_and_is_canonical_itself(recipe):
    again = resolve(recipe.canonical)
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.canonical == recipe.canonical


@given(recipe=recipes(), data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_order_and_spacing_of_options_do_not_matter(recipe, data):
    name, _, options = recipe.canonical.partition(":")
    shuffled = data.draw(st.permutations(options.split(","))) if options else []
    spaced = " , ".join(option.replace("=", " = ") for option in shuffled)
    assert resolve(f" {name} : {spaced} " if options else f" {name} ") == recipe


def test_equal_recipes_have_one_canonical_text():
    recipe = RECIPES["mxfp8"]
    assert replace(recipe, max_threshold=2) == replace(recipe, max_threshold=2.0)
    assert replace(recipe, max_threshold=2).canonical == replace(recipe, max_threshold=2.0).canonical
    assert resolve("mxfp8:max_threshold=4").canonical == "mxfp8"


def test_exp_is_short_for_exponential():
    assert resolve("mxfp8:exp=mixed_schraudolph,causal_safety=exact") == replace(
        RECIPES["mxfp8"], exponential="mixed_schraudolph", causal_safety="exact")


def test_a_recipe_resolves_to_itself():
    recipe = replace(RECIPES["mxfp8"], key_tile=64)
    assert resolve(recipe) is recipe


@every_recipe
def test_recipes_are_frozen_and_hashable(name):
    recipe = RECIPES[name]
    with pytest.raises(FrozenInstanceError):
        recipe.key_tile = 64
    with pytest.raises(FrozenInstanceError):
        recipe.qk.element = "e2m1"
    assert {recipe: 1}[replace(recipe)] == 1
    assert replace(recipe, key_tile=64) != recipe


def test_the_source_is_a_note_and_no_part_of_a_recipe_s_identity():
    assert replace(RECIPES["mxfp8"], source="elsewhere") == RECIPES["mxfp8"]


@pytest.mark.parametrize(("text", "reason"), [
    ("mxfp8:p_log2_scale=8,max_threshold=2", r"p_log2_scale \+ max_threshold = 10 exceeds log2 of the largest e4m3"),
    ("mxfp8:p_log2_scale=8", "P would saturate without a NaN"),
    ("mxfp8:max_threshold=4.9", r"= 8\.9 exceeds log2 of the largest e4m3 value \(8\.81\)"),
    ("mxfp8:p=e2m1/fixed", r"= 8 exceeds log2 of the largest e2m1 value \(2\.58\)"),
    ("mxfp8:p_grad_log2_scale=9", "p_grad_log2_scale=9 exceeds log2 of the largest e4m3"),
    ("nvfp4:exponential=mitchell,exp_window=124", "valid up to 4 doublings above the maximum; max_threshold 8 leaves that"),
    ("fused_mxfp8:exponential=schraudolph_u8", "max_threshold 32 leaves that window"),
    ("mxfp8:maximum=online", "max_threshold belongs to maximum='lazy' or 'frozen'"),
    ("mxfp8:p_log2_scale=-7", r"p_log2_scale=-7 puts even a weight of one below e4m3's smallest normal value \(2\^-6\)"),
    ("mxfp8:p_log2_scale=-20", "P would lose its bits, then vanish; accepted: -6 or more"),
    ("mxfp8:p=e2m3/fixed,p_log2_scale=-1,max_threshold=1", "accepted: 0 or more"),
    ("mxfp8_fast:p_log2_scale=-8", "p_log2_scale=-8 puts even a weight of one below"),
    ("mxfp8:p_grad_log2_scale=-6.5", "p_grad_log2_scale=-6.5 puts even a weight of one below e4m3's smallest normal value"),
    ("mxfp8:p_grad=e5m2/fixed,p_grad_log2_scale=-15", r"e5m2's smallest normal value \(2\^-14\).*accepted: -14 or more"),
], ids=lambda value: value if ":" in value and "=" in value else "")
def test_probabilities_that_would_leave_their_range_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        resolve(text)


def test_the_bound_on_p_is_tight():
    assert resolve("mxfp8:max_threshold=4.8").max_threshold == 4.8
    assert resolve("nvfp4:exponential=mitchell,exp_window=116").max_threshold == 8.0
    assert resolve("mxfp8:p_log2_scale=-6,p_grad_log2_scale=-6").p_log2_scale == -6
    assert resolve("mxfp8:v_exponent=operand,p=identity,p_log2_scale=-7").p == IDENTITY


@pytest.mark.parametrize("rule", ["floor", "oas", "uos"])
@pytest.mark.parametrize("operand", ["qk", "v", "do", "ds"])
def test_scales_that_clamp_are_refused_where_a_causal_recipe_trains(operand, rule):
    with pytest.raises(ValueError, match=f"{operand}: {rule} scales clamp the block maximum, which leaks later tokens"):
        resolve(f"mxfp8:v_exponent=operand,{operand}=e2m1/token_block/{rule}")
    assert resolve(f"mxfp8:v_exponent=operand,{operand}=e2m1/token_block/{rule},causal=false").causal is False


@pytest.mark.parametrize("operand", ["qk", "v", "do", "ds", "p"])
def test_scales_over_more_than_32_positions_are_refused_where_a_causal_recipe_trains(operand):
    change = f"v_exponent=operand,{operand}=e4m3/per_tensor/ceil"
    with pytest.raises(ValueError, match=f"{operand}: layout 'per_tensor' shares a scale over more than 32 positions"):
        resolve(f"mxfp8:{change}")
    assert resolve(f"mxfp8:{change},causal=false").causal is False


def test_clamping_scales_are_refused_for_the_gradient_s_own_operands_too():
    with pytest.raises(ValueError, match="qk_grad: floor scales clamp"):
        resolve("nvfp4_fp8:qk_grad=e4m3/token_block/floor")
    with pytest.raises(ValueError, match="qk_grad: layout 'per_tensor' shares a scale"):
        resolve("nvfp4_fp8:qk_grad=e4m3/per_tensor")


@pytest.mark.parametrize(("text", "reason"), [
    ("mxfp8_fast:v_exponent=operand,v=e4m3/token_block/floor", "v: floor scales clamp the block maximum"),
    ("mxfp8_fast:v=e4m3/token_block/floor", "v: floor scales clamp the block maximum"),
    ("mxfp8_fast:v_exponent=operand,v=e4m3/per_tensor", "v: layout 'per_tensor' shares a scale over more than 32 positions"),
    ("fused_mxfp8:maximum=online,max_threshold=0,exp=exact,causal=true", "v: layout 'per_tensor' shares a scale"),
    ("fused_mxfp4:maximum=online,max_threshold=0,exp=exact,causal=true", "v: uos scales clamp the block maximum"),
    ("mxattention:causal=true", "v: uos scales clamp the block maximum"),
    ("mxfp4_ocp:causal=true", "v: floor scales clamp the block maximum"),
    ("mxfp4_ocp:v=e2m1/mx32,p=e2m1/per_tensor,causal=true", "p: layout 'per_tensor' shares a scale over more than 32"),
    ("mxfp4_ocp:v=e2m1/mx32,p=e2m1/square32/floor,causal=true", "p: floor scales clamp the block maximum"),
    ("mxfp4_ocp:v=e2m1/nvfp16_token,causal=true", "v: layout 'nvfp16_token' shares a scale over more than 32 positions"),
    ("nvfp4:trains=false,v=e2m1/nvfp16_token", "v: layout 'nvfp16_token' shares a scale over more than 32 positions"),
], ids=lambda value: value if ":" in value and "=" in value else "")
def test_leaking_scales_are_refused_in_causal_recipes_for_inference_too(text, reason):
    with pytest.raises(ValueError, match=reason):
        resolve(text)
    assert not resolve(text.replace("causal=true", "causal=false") if "causal" in text else f"{text},causal=false").causal


@pytest.mark.parametrize("text", [
    "mxfp4_ocp:v=e2m1/mx32,causal=true",
    "fused_mxfp6:maximum=online,max_threshold=0,exp=exact,causal=true",
    "nvfp4:trains=false,v=e2m1/mx32/uos",
    "nvfp4:trains=false,p=e2m1/mx32/uos",
])
def test_scales_of_one_token_may_clamp_in_causal_recipes(text):
    # Q and K along channels, rows of P, V where diagonal tiles have their own: no later token is in the group.
    assert resolve(text).causal


@pytest.mark.parametrize(("text", "reason"), [
    ("mxfp8:qk=e4m3/mx32", "qk=e4m3/mx32/ceil shares a scale over 32 tokens where dS K contracts tokens"),
    ("mxfp8:qk=e4m3/square32", "qk=e4m3/square32/ceil shares a scale over 32 tokens where Q K contracts channels"),
    ("nvfp4_fp8:v=e4m3/mx32", "v=e4m3/mx32/ceil shares a scale over 32 tokens where P V contracts tokens"),
    ("nvfp4_fp8:v=e4m3/square32", "v=e4m3/square32/ceil shares a scale over 32 tokens where P V contracts tokens"),
    ("nvfp4_fp8:qk_grad=e4m3/mx32", "qk_grad=e4m3/mx32/ceil shares a scale over 32 tokens where dS K contracts tokens"),
    ("nvfp4_fp8:qk_grad=e2m1/nvfp16", "qk_grad=e2m1/nvfp16/ceil shares a scale over 16 tokens where dS K contracts"),
    ("nvfp4_fp8:do=e4m3/square32", "do=e4m3/square32/ceil shares a scale over 32 tokens where dO V contracts channels"),
    ("nvfp4_fp8:p=e4m3/square32", "p=e4m3/square32/ceil shares a scale over 32 tokens where P V contracts keys"),
    ("nvfp4:diagonal=none", "v=e2m1/mx32/ceil shares a scale over 32 tokens where P V contracts tokens"),
    ("nvfp4:v=e2m1/square32", "v=e2m1/square32/ceil shares a scale over 32 tokens where dO V contracts channels"),
])
def test_exact_refuses_scales_that_tokens_share(text, reason):
    assert resolve(text).causal_safety == "default"
    with pytest.raises(ValueError, match="causal_safety='exact' needs one scale per token, but " + reason):
        resolve(f"{text},causal_safety=exact")


def test_exact_turns_token_blocks_into_rows_in_every_operand():
    recipe = resolve("mxfp8:v_exponent=operand,ds=e4m3/token_block,p=e4m3/token_block,causal_safety=exact").effective()
    assert {operand.layout for operand in (recipe.qk, recipe.v, recipe.do, recipe.ds, recipe.p)} == {"per_row"}


@pytest.mark.parametrize(("text", "reason"), [
    ("mxfp8:maximum=frozen", "a frozen maximum is seeded from the first tile and is not defined under a causal mask"),
    ("mxfp8:p=e4m3/mx32", "v_exponent='running' folds V's exponents into a P of layout 'fixed'"),
    ("mxfp8:v=e4m3/mx32", "v_exponent='running' needs one V scale per token, got e4m3/mx32/ceil"),
    ("mxfp8:score_accumulator=fp16", "score_accumulator='fp16' needs token scales on Q and K and q_top"),
    ("mxfp8_fast:q_top=30", r"q_top \* k_top \* 128 < 65504"),
    ("mxfp8:q_top=500", "q_top=500 needs a coded Q and K with rule 'ceil' and at most its largest value"),
    ("mxfp4_ocp:k_top=2", "k_top=2 needs a coded Q and K with rule 'ceil'"),
    ("mxfp8:q_top=-1", "q_top=-1 needs a coded Q and K"),
    ("nvfp4:diagonal=e2m1/mx32", r"diagonal: got e2m1/mx32/ceil; accepted: one scale per key \(layout 'per_row'\)"),
    ("mxfp8:diagonal=e4m3/per_row", "diagonal and v_exponent='running' are two ways to fold V's scales into P"),
    ("mxfp8:v_exponent=operand,diagonal=e4m3/per_row", "diagonal folds V's own scales into P, so P needs block scales"),
    ("mxfp8_fast:causal=false,maximum=frozen",
     "exponential 'direct_u8' takes scores relative to a maximum that is 'online' or 'lazy'"),
    ("mxfp8_fast:row_sum=exact", "exponential 'direct_u8' writes E4M3 codes: it needs p='e4m3/fixed' and row_sum='quantized'"),
    ("nvfp4:v=e2m1/nvfp16_token", "v: layout 'nvfp16_token' would share its second level over a whole sequence"),
    ("mxfp8:ds_stochastic=true", "ds_stochastic rounds dS to E2M1 or E2M3, got e4m3/square32/ceil"),
    ("mxfp8:qk=e4m3/fixed", "qk: layout 'fixed' has no scale but P's constant factor; accepted: for p and p_grad only"),
    ("mxfp8:do=e4m3/fixed", "do: layout 'fixed' has no scale but P's constant factor"),
], ids=lambda value: value if ":" in value and "=" in value.split(" ")[0] else "")
def test_impossible_combinations_are_refused_with_the_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        resolve(text)


@pytest.mark.parametrize(("text", "reason"), [
    ("mxfp8:v=e4m3/token_block/uos", "'uos' is a boundary of the E2M1 grid; e4m3 accepts floor, ceil"),
    ("mxfp8:v=e4m3/token_block/oas", "'oas' is a boundary of the E2M1 grid"),
    ("mxfp8:v=e4m3/token_block/nearest", "scale rule: got 'nearest'; accepted: floor, ceil, oas, uos"),
    ("mxfp8:v=e3m4/token_block", "element: got 'e3m4'; accepted: e4m3, e5m2, e2m3, e2m1"),
    ("mxfp8:v=e4m3/mx64", "layout: got 'mx64'; accepted: mx32"),
    ("mxfp8:v=e4m3", "layout: got 'none'; accepted: mx32"),
    ("mxfp8:v=bf16/mx32", "layout: got 'mx32' for element 'bf16'; accepted: 'none'"),
    ("mxfp8:v=e4m3/mx32/ceil/more", r"recipe option v: got 'e4m3/mx32/ceil/more'; accepted: element/layout\[/rule\]"),
    ("mxfp8:v=none", "element: got 'none'"),
    ("mxfp8:v=", "recipe option v: got ''"),
    ("mxfp8:p=e4m3/fixed/floor", "rule: got 'floor', but layout 'fixed' has no power-of-two scales to choose; accepted"),
    ("nvfp4:qk=e2m1/nvfp16/uos", "rule: got 'uos', but layout 'nvfp16' has no power-of-two scales"),
    ("mxfp8:v=bf16/none/floor", "rule: got 'floor', but element 'bf16' has no power-of-two scales"),
], ids=lambda value: value if value.startswith(("mxfp8:", "nvfp4:")) else "")
def test_malformed_operands_are_refused_with_what_is_accepted(text, reason):
    with pytest.raises(ValueError, match=reason):
        resolve(text)


@pytest.mark.parametrize(("text", "reason"), [
    ("mxfp5", "recipe: got 'mxfp5'; accepted names: mxfp8, "),
    ("", "recipe: got ''; accepted names"),
    ("MXFP8", "recipe: got 'MXFP8'"),
    ("bf16", "recipe: got 'bf16', which is torch SDPA and has no numerics of ours; accepted names: mxfp8, "),
    (" bf16 ", "recipe: got ' bf16 ', which is torch SDPA"),
    ("bf16:key_tile=64", "recipe: got 'bf16:key_tile=64', which is torch SDPA"),
    ("mxfp8:", "recipe option: got '' in 'mxfp8:'; accepted: key=value"),
    ("mxfp8:key_tile=64,", "recipe option: got '' in 'mxfp8:key_tile=64,'"),
    ("mxfp8:,key_tile=64", "recipe option: got '' in"),
    ("mxfp8:key_tile=64,,causal=false", "recipe option: got '' in"),
    ("mxfp8:tile=64", r"recipe option: got 'tile=64' in 'mxfp8:tile=64'; accepted: key=value with key one of qk, p, v,"),
    ("mxfp8:name=other", "recipe option: got 'name=other'"),
    ("mxfp8:source=other", "recipe option: got 'source=other'"),
    ("mxfp8:key_tile", "recipe option: got 'key_tile' in 'mxfp8:key_tile'; accepted: key=value"),
    ("mxfp8:=64", "recipe option: got '=64'"),
    ("mxfp8:key_tile=64;causal=false", "recipe option key_tile: got '64;causal=false'; accepted: int"),
    ("mxfp8:key_tile=64.5", "recipe option key_tile: got '64.5'; accepted: int"),
    ("mxfp8:max_threshold=high", "recipe option max_threshold: got 'high'; accepted: float"),
    ("mxfp8:causal=1", "recipe option causal: got '1'; accepted: true, false"),
    ("mxfp8:max_threshold=2,max_threshold=3", "recipe option: got 'max_threshold' twice"),
    ("mxfp8:exp=exact,exponential=mitchell", "recipe option: got 'exponential' twice"),
    ("mxfp8:exp=taylor", "exponential: got 'taylor'; accepted: exact, schraudolph_u8"),
    ("mxfp8:rotation=d64", "rotation: got 'd64'; accepted: none, always, d128"),
    ("mxfp8:row_sum=fast", "row_sum: got 'fast'; accepted: exact, quantized"),
    ("mxfp8:maximum=max", "maximum: got 'max'; accepted: online, lazy, frozen"),
    ("mxfp8:v_exponent=none", "v_exponent: got 'none'; accepted: operand, running"),
    ("mxfp8:score_accumulator=bf16", "score_accumulator: got 'bf16'; accepted: fp32, fp16"),
    ("mxfp8:causal_safety=yes", "causal_safety: got 'yes'; accepted: default, exact"),
    ("mxfp8:key_tile=48", "key_tile: got 48; accepted: a positive multiple of 32"),
    ("mxfp8:key_tile=0", "key_tile: got 0; accepted: a positive multiple of 32"),
    ("mxfp8:max_threshold=-1", r"max_threshold: got -1\.0; accepted: 0 or more doublings"),
    ("mxfp8:max_threshold=nan", "max_threshold: got nan; accepted: a finite number"),
    ("mxattention:maximum=lazy,max_threshold=inf", "max_threshold: got inf; accepted: a finite number"),
    ("mxfp8:p_log2_scale=-inf", "p_log2_scale: got -inf; accepted: a finite number"),
    ("nvfp4:exp_window=128", "exp_window: got 128; accepted: 1 to 127 doublings"),
    ("nvfp4:exp_window=0", "exp_window: got 0; accepted: 1 to 127 doublings"),
], ids=lambda value: "" if " " in value or "; " in value else value or "empty")
def test_unknown_names_options_and_values_are_refused_with_what_is_accepted(text, reason):
    with pytest.raises(ValueError, match=reason):
        resolve(text)


@pytest.mark.parametrize(("asked", "text"), [
    ("bf16", "bf16"), (" bf16\n", "bf16"), ("mxfp8", "mxfp8"), (" mxfp8 ", "mxfp8"),
    ("mxfp8 : key_tile = 64 ", "mxfp8:key_tile=64"),
    (RECIPES["nvfp4"], "nvfp4"), ("mxfp8:max_threshold=4", "mxfp8"),
])
def test_canonical_text_stands_for_what_was_asked(asked, text):
    assert canonical_text(asked) == text


@pytest.mark.parametrize(("asked", "reason"), [
    ("mxfp5", "recipe: got 'mxfp5'; accepted names: bf16, mxfp8, "),
    ("bf16:", "recipe: got 'bf16:'; accepted: 'bf16' alone, which is torch SDPA and has no options"),
    ("bf16:key_tile=64", "accepted: 'bf16' alone"),
    ("mxfp8:", "recipe option: got ''"),
])
def test_canonical_text_names_what_is_accepted_bf16_included(asked, reason):
    with pytest.raises(ValueError, match=reason):
        canonical_text(asked)


@pytest.mark.parametrize("recipe", [None, 8, torch.float8_e4m3fn, b"mxfp8"])
def test_a_recipe_that_is_neither_text_nor_recipe_is_a_type_error(recipe):
    with pytest.raises(TypeError, match=r"recipe: got .*; accepted: a name, a name with options, or a Recipe"):
        resolve(recipe)


def test_a_recipe_of_an_unknown_name_has_no_canonical_text():
    with pytest.raises(ValueError, match=r"recipe name: got 'mine'; accepted: a named recipe changed by dataclasses\.replace"):
        _ = Recipe("mine").canonical


@every_recipe
def test_rotation_follows_the_head_dimension(name):
    rotated = [head_dim for head_dim in (64, 96, 128, 256) if RECIPES[name].rotates(head_dim)]
    assert rotated == {"none": [], "d128": [128], "always": [64, 96, 128, 256]}[RECIPES[name].rotation]


@every_recipe
def test_a_recipe_refuses_training_exactly_where_it_defines_no_backward(name):
    assert (RECIPES[name].training_refusal is None) == RECIPES[name].trains


@pytest.mark.parametrize("exponential", [e for e in EXPONENTIALS if e not in ("exact", "direct_u8")])
def test_an_approximate_exponential_refuses_training(exponential):
    assert exponential in resolve(f"mxfp8:exp={exponential},exp_window=116").training_refusal


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.trains])
def test_exact_causal_safety_leaves_no_scale_over_several_tokens_in_eight_bit_operands(name):
    recipe = replace(RECIPES[name], causal_safety="exact").effective()
    for operand in (recipe.qk, recipe.v, recipe.do, recipe.qk_grad or recipe.qk):
        assert operand.layout not in ("token_block", "square32", "per_tensor")
    assert recipe.ds.layout != "square32"
    assert RECIPES[name].effective() is RECIPES[name]
