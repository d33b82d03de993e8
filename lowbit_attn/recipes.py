"""Recipes: frozen, hashable descriptions of an attention's numerics, and the named ones.

A recipe says what every implementation must compute, nothing about how. Every ingredient is a field of its own, so an
ablation of a paper is one `dataclasses.replace`, and combinations that cannot be right are refused with the reason.

Text form, accepted wherever a recipe is: a name (`"mxfp8"`), or a name with options
(`"mxfp8:causal_safety=exact,v=e4m3/per_row/ceil"`). `Recipe.canonical` is the shortest such text; operators take it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from lowbit_attn.formats import ELEMENTS, LAYOUTS, block_layout, element_format, rule_problem

KEY_TILE = 128
CAUSAL_GROUP = 32
"""Largest number of tokens that share a scale in a causal recipe; key tiles are multiples of it."""
TOKEN_LAYOUTS = ("token_block", "per_row")
"""Layouts with one power-of-two scale per token: valid along either contraction axis."""

DIRECT_UNIT = 8.0 / 126.0
"""Unit of the scores of exponential "direct_u8": a doubling is 8 codes, and 1 is the largest finite code, 126."""

SHARED_FOLD = -1.0
"""Down to this fold of V's exponent, the directly computed codes that P V uses also make up the row sum; below it they would lose
weight that the denominator needs."""

EXPONENTIALS = ("exact", "schraudolph_u8", "schraudolph_u16", "schraudolph_u32", "mixed_schraudolph", "direct_u8", "mitchell")

_CHOICES: dict[str, tuple[str, ...]] = {
    "row_sum": ("exact", "quantized"),
    "exponential": EXPONENTIALS,
    "maximum": ("online", "lazy", "frozen"),
    "rotation": ("none", "always", "d128"),
    "v_exponent": ("operand", "running"),
    "score_accumulator": ("fp32", "fp16"),
    "causal_safety": ("default", "exact"),
}
_ALIASES = {"exp": "exponential"}


@dataclass(frozen=True)
class Operand:
    """Format of one GEMM operand: element format, block layout and scale rule.

    `element` is a name of `formats.ELEMENTS`, "bf16" (rounded, no scale) or "identity" (not rounded at all). `layout` is a
    name of `formats.LAYOUTS`, or "fixed": no scale but the recipe's constant factor, for P. One-dimensional layouts (mx32,
    nvfp16) run along the contraction axis of each product that the operand takes part in.
    """

    element: str
    layout: str = "none"
    rule: str = "ceil"

    def __post_init__(self) -> None:
        if self.element in ("bf16", "identity"):
            if self.layout != "none":
                raise ValueError(f"layout: got {self.layout!r} for element {self.element!r}; accepted: 'none'")
            self._refuse_rule(f"element {self.element!r}")
            return
        fmt = element_format(self.element)
        if self.layout == "fixed" or block_layout(self.layout).scale != "e8m0":
            self._refuse_rule(f"layout {self.layout!r}")
        elif problem := rule_problem(self.rule, fmt):
            raise ValueError(problem)

    def _refuse_rule(self, owner: str) -> None:
        """A rule chooses power-of-two scales; anything but the default would be ignored here."""
        if self.rule != "ceil":
            raise ValueError(f"rule: got {self.rule!r}, but {owner} has no power-of-two scales to choose; accepted: 'ceil'")

    @property
    def is_coded(self) -> bool:
        """Whether the operand is stored as low-bit codes."""
        return self.element in ELEMENTS

    @property
    def has_token_scales(self) -> bool:
        """Whether it is coded with one power-of-two scale per token."""
        return self.is_coded and self.layout in TOKEN_LAYOUTS

    @property
    def is_one_dimensional(self) -> bool:
        """Whether its blocks run along one axis only, the contraction axis."""
        return self.layout in LAYOUTS and LAYOUTS[self.layout].is_one_dimensional

    def shared_tokens(self, along_tokens: bool) -> float:
        """How many tokens a scale depends on in a product that contracts tokens (or channels); inf for a whole sequence."""
        return LAYOUTS[self.layout].shared_tokens(along_tokens) if self.layout in LAYOUTS else 1

    def per_token(self) -> "Operand":
        """The same with a scale for each token instead of 32."""
        return replace(self, layout="per_row") if self.layout == "token_block" else self

    def __str__(self) -> str:
        return f"{self.element}/{self.layout}/{self.rule}" if self.is_coded else self.element

    @classmethod
    def parse(cls, text: str) -> "Operand":
        """`element/layout[/rule]`, or `bf16`, `identity`."""
        return cls(*text.split("/"))


IDENTITY = Operand("identity")
BF16 = Operand("bf16")


@dataclass(frozen=True)
class Recipe:
    """The numerics of one attention call. Scores X are in base two: X = scale * log2(e) * (q . k).

    Operands:
        qk, p, v: formats of Q and K, of the probabilities, of V.
        qk_grad: format of Q in dK and K in dQ if it differs from `qk` (FLAMIA 3.4).
        diagonal: format of V in P V, and of K in dS K, on tiles that the causal diagonal crosses: one scale per key, folded
            into the other operand before that is quantized (FLAMIA 3.2); None where blocks along keys cannot leak.
        p_grad, do, ds: formats of P in dV, of dO and of dS in the backward.
        p_log2_scale: c; P with layout "fixed" is rounded as E4M3(P * 2^c) (FLAMIA B.1). 2^c is at least the smallest normal
            code, or the weights would vanish.
        p_grad_log2_scale: the same for the P of dV.
        v_exponent: "operand" if the GEMM applies V's block scales; "running" if they are folded into P relative to a
            reference exponent that runs with the key loop, raised only by keys that the row sees.
        q_top, k_top: bounds of the scaled block maxima below the largest code, 0 for none. k_top halves above
            head_dim 128, so that |q . k| keeps its bound.
        score_accumulator: "fp32", or "fp16": the code products are rounded to fp16 after every 32 channels.
    Softmax:
        row_sum: denominators from fp32 P ("exact") or from the rounded P ("quantized": MXAttention's PNQ, Fused-Softmax 4.4).
        exponential: "exact"; "schraudolph_u8", "_u16", "_u32" (Fused-Softmax 4.2); "mixed_schraudolph" (FLAMIA 3.7);
            "mitchell" (FLAMIA C.1) with lower window bound -`exp_window`; "direct_u8": E4M3 codes straight from scores.
        maximum: "online"; "lazy", raised when a tile exceeds it by more than `max_threshold` doublings (FLAMIA B.1);
            "frozen" after the first tile, raised by an integer when a tile exceeds it by more than `max_threshold` (rollback,
            Fused-Softmax 4.1).
    Inputs:
        rotation: Walsh-Hadamard of Q and K: "none", "always", "d128" (at head_dim 128 only, FLAMIA A.2).
        q_prescale: fold scale * log2(e) into Q before it is quantized (Fused-Softmax 4) instead of into the scores.
    Safety and permissions:
        causal_safety: "exact" replaces scales shared by tokens with per-token operand scales, per-query-row dS exponents and
            the K fold, so that no later token moves an earlier row of O or dQ by a single bit (FLAMIA 3.2, A.3). Layouts that
            have no such form are refused with it.
        ds_stochastic: round dK's dS operand stochastically (FLAMIA A.5).
        causal, trains: whether a causal mask is allowed and a backward defined.
        key_tile: keys per step of the loop; part of the numerics, since lazy and frozen maxima depend on it.
    """

    name: str
    qk: Operand = IDENTITY
    p: Operand = IDENTITY
    v: Operand = IDENTITY
    p_grad: Operand = IDENTITY
    do: Operand = IDENTITY
    ds: Operand = IDENTITY
    qk_grad: Operand | None = None
    diagonal: Operand | None = None
    p_log2_scale: float = 0.0
    p_grad_log2_scale: float = 0.0
    v_exponent: str = "operand"
    q_top: float = 0.0
    k_top: float = 0.0
    score_accumulator: str = "fp32"
    row_sum: str = "exact"
    exponential: str = "exact"
    exp_window: int = 124
    maximum: str = "online"
    max_threshold: float = 0.0
    rotation: str = "none"
    q_prescale: bool = False
    causal_safety: str = "default"
    ds_stochastic: bool = False
    causal: bool = True
    trains: bool = False
    key_tile: int = KEY_TILE
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name}: got {getattr(self, name)!r}; accepted: {', '.join(accepted)}")
        if self.key_tile <= 0 or self.key_tile % 32:
            raise ValueError(f"key_tile: got {self.key_tile}; accepted: a positive multiple of 32")
        for name in ("max_threshold", "p_log2_scale", "p_grad_log2_scale", "q_top", "k_top"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: got {getattr(self, name)}; accepted: a finite number")
        if self.max_threshold < 0:
            raise ValueError(f"max_threshold: got {self.max_threshold}; accepted: 0 or more doublings")
        if not 0 < self.exp_window < 128:
            raise ValueError(f"exp_window: got {self.exp_window}; accepted: 1 to 127 doublings below the maximum")
        problems = [*self._operand_problems(), *self._window_problems(), *self._training_problems(), *self._causal_problems()]
        if problems:
            raise ValueError(f"recipe {self.name!r}: {problems[0]}")

    def _operand_problems(self) -> list[str]:
        problems = []
        for name in ("qk", "qk_grad", "diagonal", "v", "do", "ds"):
            operand = getattr(self, name)
            if operand is not None and operand.layout == "fixed":
                problems.append(f"{name}: layout 'fixed' has no scale but P's constant factor; accepted: for p and p_grad only")
        if self.v_exponent == "running":
            if self.p.layout != "fixed" and self.exponential != "direct_u8":
                problems.append("v_exponent='running' folds V's exponents into a P of layout 'fixed'; this P has block scales")
            if not self.v.has_token_scales:
                problems.append(f"v_exponent='running' needs one V scale per token, got {self.v}")
        if self.score_accumulator == "fp16" and not (self.qk.has_token_scales and 0 < self.q_top * self.k_top * 128 < 65504):
            problems.append("score_accumulator='fp16' needs token scales on Q and K and q_top * k_top * 128 < 65504; got "
                            f"{self.qk}, q_top={self.q_top:g}, k_top={self.k_top:g}")
        for name, top in (("q_top", self.q_top), ("k_top", self.k_top)):
            bounded = self.qk.is_coded and self.qk.rule == "ceil" and 0 < top <= element_format(self.qk.element).max_value
            if top and not bounded:
                problems.append(f"{name}={top:g} needs a coded Q and K with rule 'ceil' and at most its largest value")
        if self.diagonal is not None and self.diagonal.layout != "per_row":
            problems.append(f"diagonal: got {self.diagonal}; accepted: one scale per key (layout 'per_row')")
        if self.diagonal is not None and self.v_exponent == "running":
            problems.append("diagonal and v_exponent='running' are two ways to fold V's scales into P")
        elif self.diagonal is not None and self.p.layout == "fixed":
            problems.append(f"diagonal folds V's own scales into P, so P needs block scales to take them up; p={self.p} would "
                            "saturate or vanish with the size of V")
        return problems

    def _window_problems(self) -> list[str]:
        """P that would silently leave the range of its code or of its exponential."""
        problems = []
        rise = 0.0 if self.maximum == "online" else self.max_threshold
        if self.maximum == "online" and self.max_threshold:
            problems.append("max_threshold belongs to maximum='lazy' or 'frozen'")
        if self.p.layout == "fixed":
            # Running V exponents are relative to their maximum, so the largest relative one is 0.
            limit = math.log2(element_format(self.p.element).max_value)
            if self.p_log2_scale + rise > limit:
                problems.append(f"p_log2_scale + max_threshold = {self.p_log2_scale + rise:g} exceeds log2 of the largest "
                                f"{self.p.element} value ({limit:.2f}): P would saturate without a NaN (FLAMIA B.1)")
        if self.p_grad.layout == "fixed" and 2.0**self.p_grad_log2_scale > element_format(self.p_grad.element).max_value:
            problems.append(f"p_grad_log2_scale={self.p_grad_log2_scale:g} exceeds log2 of the largest {self.p_grad.element} "
                            "value: P would saturate without a NaN (FLAMIA B.1)")
        for name, operand, log2_scale in (("p_log2_scale", self.p, self.p_log2_scale),
                                          ("p_grad_log2_scale", self.p_grad, self.p_grad_log2_scale)):
            if operand.layout == "fixed" and log2_scale < (lowest := element_format(operand.element).min_exponent):
                problems.append(f"{name}={log2_scale:g} puts even a weight of one below {operand.element}'s smallest normal value "
                                f"(2^{lowest}): P would lose its bits, then vanish; accepted: {lowest} or more")
        top = {"mitchell": 128.0 - self.exp_window, "schraudolph_u8": math.log2(448.0), "schraudolph_u16": 128.0,
               "schraudolph_u32": 128.0, "mixed_schraudolph": 128.0}.get(self.exponential, math.inf)
        # Up to half a doubling is lost to the offsets that centre the approximations.
        if rise > top - 0.5:
            problems.append(f"exponential {self.exponential!r} is valid up to {top:g} doublings above the maximum; "
                            f"max_threshold {self.max_threshold:g} leaves that window, silently corrupting values (FLAMIA C.1)")
        if self.exponential == "direct_u8" and not (self.p == Operand("e4m3", "fixed") and self.row_sum == "quantized"):
            problems.append("exponential 'direct_u8' writes E4M3 codes: it needs p='e4m3/fixed' and row_sum='quantized'")
        if self.exponential == "direct_u8" and self.maximum == "frozen":
            problems.append("exponential 'direct_u8' takes scores relative to a maximum that is 'online' or 'lazy', got 'frozen'")
        return problems

    def _causal_problems(self) -> list[str]:
        if not self.causal:
            return []
        problems = []
        if self.maximum == "frozen":
            problems.append("a frozen maximum is seeded from the first tile and is not defined under a causal mask")
        for name, operand, product, contracts, reaches_row in self._causal_uses():
            shared = operand.shared_tokens(contracts == "tokens")
            if shared > CAUSAL_GROUP:
                problems.append(f"{name}: layout {operand.layout!r} shares a scale over more than {CAUSAL_GROUP} positions where "
                                f"{product} contracts {contracts} (FLAMIA 3.2)")
            elif shared > 1 and operand.rule != "ceil":
                problems.append(f"{name}: {operand.rule} scales clamp the block maximum, which leaks later tokens (FLAMIA 3.2)")
            elif shared > 1 and reaches_row and self.causal_safety == "exact":
                problems.append(f"causal_safety='exact' needs one scale per token, but {name}={operand} shares a scale over "
                                f"{shared:g} tokens where {product} contracts {contracts}")
        return problems

    def _causal_uses(self) -> Iterator[tuple[str, Operand, str, str, bool]]:
        """Each product that reads an operand: field, effective format, product, contracted axis, whether rows of O or dQ see it.

        Left out is what `diagonal` replaces: V in P V and K in dS K on tiles that hold keys which some row may not see.
        """
        operands = self._effective_operands()
        qk, p, v = operands["qk"], operands["p"], operands["v"]
        grad_name = "qk" if self.qk_grad is None else "qk_grad"
        uses = [("qk", qk, "Q K", "channels", True), ("p", p, "P V", "keys", True), ("v", v, "P V", "tokens", True)]
        if self.trains:
            do, ds, grad = operands["do"], operands["ds"], operands[grad_name]
            uses += [("v", v, "dO V", "channels", True), ("do", do, "dO V", "channels", True), ("ds", ds, "dS K", "keys", True),
                     (grad_name, grad, "dS K", "tokens", True), (grad_name, grad, "dS Q", "tokens", False),
                     ("do", do, "P dO", "tokens", False), ("ds", ds, "dS Q", "tokens", False),
                     ("p_grad", operands["p_grad"], "P dO", "tokens", False)]
        for name, operand, product, contracts, reaches_row in uses:
            folded = self.diagonal is not None and contracts == "tokens" and product in ("P V", "dS K")
            if not (folded and operand.shared_tokens(True) <= CAUSAL_GROUP):
                yield name, operand, product, contracts, reaches_row

    def _training_problems(self) -> list[str]:
        if self.trains:
            along_tokens = {"qk_grad": self.qk_grad or self.qk, "v": self.v, "p_grad": self.p_grad, "do": self.do,
                            "ds": self.ds}
            for name, operand in along_tokens.items():
                if operand.layout == "nvfp16_token":
                    return [f"{name}: layout 'nvfp16_token' would share its second level over a whole sequence where the "
                            "backward contracts tokens; accepted: mx32, nvfp16, or a layout valid along both axes"]
        if self.ds_stochastic and self.ds.element not in ("e2m1", "e2m3"):
            return [f"ds_stochastic rounds dS to E2M1 or E2M3, got {self.ds}"]
        return []

    def rotates(self, head_dim: int) -> bool:
        """Whether Q and K of this head_dim are rotated."""
        return self.rotation == "always" or (self.rotation == "d128" and head_dim == 128)

    @property
    def training_refusal(self) -> str | None:
        """Why inputs that require grad are refused, or None if the recipe trains."""
        if not self.trains:
            return "the recipe defines no backward"
        if self.exponential != "exact":
            return f"exponential={self.exponential!r} is not rebuilt exactly by the backward (FLAMIA 3.7)"
        if self.q_prescale or self.maximum == "frozen" or self.score_accumulator != "fp32":
            return "q_prescale, maximum='frozen' and score_accumulator='fp16' are for inference"
        return None

    @property
    def saves_codes(self) -> bool:
        """Whether the backward reads the forward's codes; otherwise it reads Q, K and V themselves."""
        return self.qk_grad is None and self.qk.has_token_scales and self.v.has_token_scales

    def effective(self) -> "Recipe":
        """The recipe with `causal_safety="exact"` spelled out in its operands."""
        return self if self.causal_safety == "default" else replace(self, **self._effective_operands())

    def _effective_operands(self) -> dict[str, Any]:
        operands = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Operand)}
        if self.causal_safety == "default":
            return operands
        if self.ds.layout == "square32":
            operands["ds"] = replace(self.ds, layout="per_row")
        return {name: operand.per_token() for name, operand in operands.items()}

    @property
    def canonical(self) -> str:
        """The shortest text that `resolve` turns into this recipe."""
        base = RECIPES.get(self.name)
        if base is None:
            raise ValueError(f"recipe name: got {self.name!r}; accepted: a named recipe changed by dataclasses.replace")
        options = [f"{f.name}={_text(getattr(self, f.name), getattr(base, f.name))}" for f in fields(self)
                   if f.compare and getattr(self, f.name) != getattr(base, f.name)]
        return f"{self.name}:{','.join(options)}" if options else self.name


_OPTIONAL_OPERANDS = ("qk_grad", "diagonal")


def _text(value: Any, like: Any) -> str:
    if isinstance(like, float):
        value = float(value)  # 2 and 2.0 are one recipe, so they are one text
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _parse_value(name: str, text: str, like: Any) -> Any:
    kind = Operand if name in _OPTIONAL_OPERANDS else type(like)
    try:
        if name in _OPTIONAL_OPERANDS and text == "none":
            return None
        if kind is Operand:
            return Operand.parse(text)
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, TypeError, ValueError) as error:
        accepted = {bool: "true, false", Operand: "element/layout[/rule]"}.get(kind, kind.__name__)
        raise ValueError(f"recipe option {name}: got {text!r}; accepted: {accepted} ({error})") from None


_E4M3_TOKENS = Operand("e4m3", "token_block")
_E4M3_FIXED = Operand("e4m3", "fixed")
_NVFP4 = Operand("e2m1", "nvfp16_token")
_MXFP4 = Operand("e2m1", "mx32")
_UOS4 = Operand("e2m1", "mx32", "uos")
_FUSED: dict[str, Any] = {"row_sum": "quantized", "exponential": "schraudolph_u16", "maximum": "frozen", "max_threshold": 32.0,
          "rotation": "always", "q_prescale": True, "causal": False}


def _named(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


RECIPES: dict[str, Recipe] = _named(
    Recipe("mxfp8", qk=_E4M3_TOKENS, p=_E4M3_FIXED, v=_E4M3_TOKENS, do=_E4M3_TOKENS, ds=Operand("e4m3", "square32"),
           p_grad=_E4M3_FIXED, p_log2_scale=4.0, p_grad_log2_scale=8.0, v_exponent="running", maximum="lazy", max_threshold=4.0,
           rotation="d128", trains=True,
           source="FLAMIA 3.1-3.4, A, B"),
    Recipe("mxfp8_fast", qk=_E4M3_TOKENS, p=_E4M3_FIXED, v=_E4M3_TOKENS, p_log2_scale=7.5, v_exponent="running",
           q_top=14.0, k_top=28.0, score_accumulator="fp16", row_sum="quantized", exponential="direct_u8", maximum="lazy",
           max_threshold=1.0, rotation="d128", source="ours"),
    Recipe("nvfp4_fp8", qk=_NVFP4, qk_grad=_E4M3_TOKENS, p=Operand("e4m3", "mx32"), v=_E4M3_TOKENS, do=_E4M3_TOKENS,
           ds=Operand("e4m3", "square32"), p_grad=_E4M3_FIXED, p_grad_log2_scale=8.0, maximum="lazy", max_threshold=8.0,
           rotation="d128", trains=True,
           source="FLAMIA 3.4, 3.5.2"),
    Recipe("nvfp4", qk=_NVFP4, qk_grad=_MXFP4, p=_NVFP4, v=_MXFP4, p_grad=_MXFP4, do=_MXFP4, ds=_MXFP4,
           diagonal=Operand("e2m1", "per_row"), row_sum="quantized", exp_window=116, maximum="lazy", max_threshold=8.0,
           ds_stochastic=True, trains=True, source="FLAMIA 3.2, 3.7, A.5"),
    Recipe("fused_mxfp8", qk=Operand("e4m3", "mx32"), p=Operand("e4m3", "per_row"), v=Operand("e4m3", "per_tensor"),
           source="Fused-Softmax 4, table 3", **_FUSED),
    Recipe("fused_mxfp6", qk=Operand("e2m3", "mx32"), p=Operand("e2m3", "mx32"), v=Operand("e2m3", "mx32"),
           source="Fused-Softmax 4, table 3", **_FUSED),
    Recipe("fused_mxfp4", qk=_UOS4, p=Operand("e2m3", "mx32"), v=_UOS4,
           source="Fused-Softmax 4, table 3; scale rule MXAttention 4.1", **_FUSED),
    Recipe("mxattention", qk=_UOS4, p=_UOS4, v=_UOS4, row_sum="quantized", rotation="always", causal=False,
           source="MXAttention algorithm 2"),
    Recipe("mxfp4_ocp", qk=Operand("e2m1", "mx32", "floor"), p=Operand("e2m1", "mx32", "floor"),
           v=Operand("e2m1", "mx32", "floor"), causal=False, source="MXAttention's baseline"),
)

UNQUANTIZED = "bf16"
"""The recipe name that leaves attention to torch SDPA; it never enters our operators."""


def recipe_names() -> list[str]:
    """Every name a recipe may start with, `bf16` included."""
    return [UNQUANTIZED, *RECIPES]


def _unknown(text: str, accepted: Iterable[str]) -> str:
    return f"recipe: got {text!r}; accepted names: {', '.join(accepted)}, with options as in 'mxfp8:max_threshold=2'"


@lru_cache(maxsize=512)
def _parse(text: str) -> Recipe:
    name, separator, options = (part.strip() for part in text.partition(":"))
    if name == UNQUANTIZED:
        raise ValueError(f"recipe: got {text!r}, which is torch SDPA and has no numerics of ours; accepted names: "
                         f"{', '.join(RECIPES)}")
    if name not in RECIPES:
        raise ValueError(_unknown(text, RECIPES))
    base = RECIPES[name]
    settable = {f.name: getattr(base, f.name) for f in fields(base) if f.compare and f.name != "name"}
    changes: dict[str, Any] = {}
    for option in options.split(",") if separator else ():
        key, equals, value = (part.strip() for part in option.partition("="))
        key = _ALIASES.get(key, key)
        if key not in settable or not equals:
            raise ValueError(f"recipe option: got {option!r} in {text!r}; accepted: key=value with key one of "
                             f"{', '.join([*settable, *_ALIASES])}")
        if key in changes:
            raise ValueError(f"recipe option: got {key!r} twice in {text!r}; accepted: each option once")
        changes[key] = _parse_value(key, value, settable[key])
    return replace(base, **changes)


def resolve(recipe: "str | Recipe") -> Recipe:
    """The Recipe that a name, a name with options or a Recipe stands for; ValueError names what is accepted.

    `bf16` is not a low-bit recipe and is refused here: callers send it to torch SDPA (`canonical_text` accepts it).
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe: got {type(recipe).__name__}; accepted: a name, a name with options, or a Recipe")
    return _parse(recipe)


def canonical_text(recipe: "str | Recipe") -> str:
    """The one text of what a caller asked for: "bf16", or `Recipe.canonical`; refuses what `resolve` does, `bf16` excepted."""
    if isinstance(recipe, str):
        name, separator, _ = (part.strip() for part in recipe.partition(":"))
        if name == UNQUANTIZED and separator:
            raise ValueError(f"recipe: got {recipe!r}; accepted: 'bf16' alone, which is torch SDPA and has no options")
        if name == UNQUANTIZED:
            return UNQUANTIZED
        if name not in RECIPES:
            raise ValueError(_unknown(recipe, recipe_names()))
    return resolve(recipe).canonical


__all__ = ["BF16", "CAUSAL_GROUP", "EXPONENTIALS", "IDENTITY", "KEY_TILE", "RECIPES", "UNQUANTIZED", "Operand", "Recipe",
           "canonical_text", "recipe_names", "resolve"]
