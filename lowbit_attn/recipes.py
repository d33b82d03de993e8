"""Recipes: frozen, hashable descriptions of an attention's numerics, and the named ones.

A recipe says what every implementation must compute, nothing about how. Every ingredient is a field of its own, so an
ablation of a paper is one `dataclasses.replace`, and combinations that cannot be right are refused with the reason.

Text form, accepted wherever a recipe is: a name (`"mxfp8"`), or a name with options
(`"mxfp8:exponential=exact,v=e4m3/per_row/ceil"`). `Recipe.canonical` is the shortest such text; operators take it.
"""


import math
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from lowbit_attn.formats import ELEMENTS, LAYOUTS, block_layout, element_format, rule_problem

KEY_TILE = 128
LOG2_E4M3_MAX = math.log2(448.0)

_CHOICES: dict[str, tuple[str, ...]] = {
    "row_sum": ("exact", "quantized"),
    "exponential": ("exact", "schraudolph_u16"),
    "maximum": ("online", "lazy", "frozen"),
    "rotation": ("none", "always", "d128"),
    "v_exponent": ("operand", "running"),
}


@dataclass(frozen=True)
class Operand:
    """Format of one GEMM operand: element format, block layout and scale rule.

    `element` is a name of `formats.ELEMENTS`, "bf16" (rounded, no scale) or "identity" (not rounded at all). `layout` is a
    name of `formats.LAYOUTS`, or "fixed": no scale but the recipe's constant factor, for P.
    """

    element: str
    layout: str = "none"
    rule: str = "ceil"

    def __post_init__(self) -> None:
        if self.element in ("bf16", "identity"):
            if self.layout != "none":
                raise ValueError(f"layout: got {self.layout!r} for element {self.element!r}; accepted: 'none'")
            return
        fmt = element_format(self.element)
        if self.layout != "fixed":
            block_layout(self.layout)
            if self.layout != "nvfp16" and (problem := rule_problem(self.rule, fmt)):
                raise ValueError(problem)

    @property
    def is_coded(self) -> bool:
        """Whether the operand is stored as low-bit codes."""
        return self.element in ELEMENTS

    @property
    def tokens_per_scale(self) -> int | None:
        """Consecutive positions that share a scale; None means all of them."""
        return LAYOUTS[self.layout].tokens if self.layout in LAYOUTS else 1

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
        qk, p, v: formats of Q and K, of the probabilities, of V (scaled along keys).
        do, ds: formats of dO and dS in the backward.
        p_log2_scale: c; P with layout "fixed" is rounded as E4M3(P * 2^c) (FLAMIA B.1).
        p_backward_log2_scale: the same for the P of dV.
        v_exponent: "operand" if the GEMM applies V's block scales; "running" if they are folded into P relative to a
            reference exponent that runs with the key loop (DESIGN: never over later tokens).
    Softmax:
        row_sum: denominators from fp32 P ("exact") or from the rounded P ("quantized": MXAttention's PNQ, Fused-Softmax 4.4).
        exponential: "exact", or "schraudolph_u16" (Fused-Softmax 4.2, 4.3).
        maximum: "online"; "lazy", raised when a tile exceeds it by more than `max_threshold` doublings (FLAMIA B.1);
            "frozen" after the first tile, raised by an integer when a tile exceeds it by more than `max_threshold` (rollback,
            Fused-Softmax 4.1).
    Inputs:
        rotation: Walsh-Hadamard of Q and K: "none", "always", "d128" (at head_dim 128 only, FLAMIA A.2).
        q_prescale: fold scale * log2(e) into Q before it is quantized (Fused-Softmax 4) instead of into the scores.
    Permissions:
        causal, trains: whether a causal mask and a backward are allowed.
        key_tile: keys per step of the loop; part of the numerics, since lazy and frozen maxima depend on it.
    """

    name: str
    qk: Operand = IDENTITY
    p: Operand = IDENTITY
    v: Operand = IDENTITY
    do: Operand = IDENTITY
    ds: Operand = IDENTITY
    p_log2_scale: int = 0
    p_backward_log2_scale: int = 8
    v_exponent: str = "operand"
    row_sum: str = "exact"
    exponential: str = "exact"
    maximum: str = "online"
    max_threshold: float = 0.0
    rotation: str = "none"
    q_prescale: bool = False
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
        for problem in (*self._saturation_problems(), *self._causal_problems(), *self._training_problems()):
            raise ValueError(f"recipe {self.name!r}: {problem}")

    def _saturation_problems(self) -> list[str]:
        problems = []
        if self.p.layout == "fixed":
            # Running V exponents are relative to their maximum, so the largest relative one is 0.
            reach = self.p_log2_scale + (0.0 if self.maximum == "online" else self.max_threshold)
            limit = math.log2(element_format(self.p.element).max_value)
            if reach > limit:
                problems.append(f"p_log2_scale + max_threshold = {reach:g} exceeds log2 of the largest {self.p.element} value "
                                f"({limit:.2f}): P would saturate without a NaN (FLAMIA B.1)")
        elif self.v_exponent == "running":
            problems.append("v_exponent='running' folds V's exponents into a P of layout 'fixed'; this P carries block scales")
        if self.v_exponent == "running" and self.v.layout not in ("token_block", "per_row"):
            problems.append(f"v_exponent='running' needs one V scale per token, got layout {self.v.layout!r}")
        if self.maximum == "online" and self.max_threshold:
            problems.append("max_threshold belongs to maximum='lazy' or 'frozen'")
        return problems

    def _causal_problems(self) -> list[str]:
        if not self.causal:
            return []
        problems = []
        if self.maximum == "frozen":
            problems.append("a frozen maximum is seeded from the first tile and is not defined under a causal mask")
        for name, operand in (("qk", self.qk), ("v", self.v)):
            if not operand.is_coded:
                continue
            if operand.rule == "floor" and self.trains:
                problems.append(f"{name}: floor scales clamp the block maximum, which leaks later tokens (FLAMIA 3.2)")
            if self.trains and (operand.tokens_per_scale is None or operand.tokens_per_scale > 32):
                problems.append(f"{name}: layout {operand.layout!r} shares a scale over more than 32 positions (FLAMIA 3.2)")
        return problems

    def _training_problems(self) -> list[str]:
        if not self.trains:
            return []
        problems = []
        if self.exponential != "exact":
            problems.append(f"exponential {self.exponential!r} is for inference only: the backward rebuilds P exactly (FLAMIA 3.7)")
        if self.q_prescale:
            problems.append("q_prescale is for inference only")
        if self.maximum == "frozen":
            problems.append("maximum='frozen' is for inference only")
        for name, operand in (("qk", self.qk), ("v", self.v), ("do", self.do)):
            if operand.is_coded and operand.layout not in ("token_block", "per_row"):
                problems.append(f"{name}: layout {operand.layout!r} is not valid along both contraction axes of the backward; "
                                "accepted: token_block, per_row")
        return problems

    def rotates(self, head_dim: int) -> bool:
        """Whether Q and K of this head_dim are rotated."""
        return self.rotation == "always" or (self.rotation == "d128" and head_dim == 128)

    @property
    def canonical(self) -> str:
        """The shortest text that `resolve` turns into this recipe."""
        base = RECIPES.get(self.name)
        if base is None:
            raise ValueError(f"recipe name: got {self.name!r}; accepted: a named recipe changed by dataclasses.replace")
        options = [f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self)
                   if f.compare and getattr(self, f.name) != getattr(base, f.name)]
        return f"{self.name}:{','.join(options)}" if options else self.name


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_value(name: str, text: str, like: Any) -> Any:
    try:
        if isinstance(like, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(like, Operand):
            return Operand.parse(text)
        return type(like)(text)
    except (KeyError, TypeError, ValueError) as error:
        accepted = {bool: "true, false", Operand: "element/layout[/rule]"}.get(type(like), type(like).__name__)
        raise ValueError(f"recipe option {name}: got {text!r}; accepted: {accepted} ({error})") from None


_E4M3_TOKENS = Operand("e4m3", "token_block", "ceil")

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("mxfp8", qk=_E4M3_TOKENS, p=Operand("e4m3", "fixed"), v=_E4M3_TOKENS, do=_E4M3_TOKENS,
               ds=Operand("e4m3", "square32", "ceil"), p_log2_scale=4, v_exponent="running", maximum="lazy", max_threshold=4.0,
               rotation="d128", trains=True, source="FLAMIA 3.1-3.4, A, B"),
        Recipe("fused_mxfp8", qk=Operand("e4m3", "mx32"), p=Operand("e4m3", "per_row"), v=Operand("e4m3", "per_tensor"),
               row_sum="quantized", exponential="schraudolph_u16", maximum="frozen", max_threshold=32.0, rotation="always",
               q_prescale=True, causal=False, source="Fused-Softmax 4, table 3"),
        Recipe("fused_mxfp6", qk=Operand("e2m3", "mx32"), p=Operand("e2m3", "mx32"), v=Operand("e2m3", "mx32"),
               row_sum="quantized", exponential="schraudolph_u16", maximum="frozen", max_threshold=32.0, rotation="always",
               q_prescale=True, causal=False, source="Fused-Softmax 4, table 3"),
        Recipe("fused_mxfp4", qk=Operand("e2m1", "mx32", "uos"), p=Operand("e2m3", "mx32"), v=Operand("e2m1", "mx32", "uos"),
               row_sum="quantized", exponential="schraudolph_u16", maximum="frozen", max_threshold=32.0, rotation="always",
               q_prescale=True, causal=False, source="Fused-Softmax 4, table 3; scale rule MXAttention 4.1"),
        Recipe("mxattention", qk=Operand("e2m1", "mx32", "uos"), p=Operand("e2m1", "mx32", "uos"), v=Operand("e2m1", "mx32", "uos"),
               row_sum="quantized", rotation="always", causal=False, source="MXAttention algorithm 2"),
        Recipe("mxfp4_ocp", qk=Operand("e2m1", "mx32", "floor"), p=Operand("e2m1", "mx32", "floor"), v=Operand("e2m1", "mx32", "floor"),
               causal=False, source="MXAttention's baseline"),
    )
}

UNQUANTIZED = "bf16"
"""The recipe name that leaves attention to torch SDPA; it never enters our operators."""


def recipe_names() -> list[str]:
    """Every name a recipe may start with, `bf16` included."""
    return [UNQUANTIZED, *RECIPES]


@lru_cache(maxsize=512)
def _parse(text: str) -> Recipe:
    name, _, options = text.strip().partition(":")
    if name not in RECIPES:
        raise ValueError(f"recipe: got {text!r}; accepted names: {', '.join(recipe_names())}, "
                         "with options as in 'mxfp8:max_threshold=2'")
    base = RECIPES[name]
    settable = {f.name: getattr(base, f.name) for f in fields(base) if f.compare and f.name != "name"}
    changes: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, separator, value = (part.strip() for part in option.partition("="))
        if key not in settable or not separator:
            raise ValueError(f"recipe option: got {option!r} in {text!r}; accepted: key=value with key one of {', '.join(settable)}")
        changes[key] = _parse_value(key, value, settable[key])
    return replace(base, **changes)


def resolve(recipe: "str | Recipe") -> Recipe:
    """The Recipe that a name, a name with options or a Recipe stands for; ValueError names what is accepted.

    `bf16` is not a low-bit recipe and is refused here: callers send it to torch SDPA.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe: got {type(recipe).__name__}; accepted: a name, a name with options, or a Recipe")
    return _parse(recipe)


__all__ = ["BF16", "IDENTITY", "KEY_TILE", "RECIPES", "UNQUANTIZED", "Operand", "Recipe", "recipe_names",
           "resolve"]
