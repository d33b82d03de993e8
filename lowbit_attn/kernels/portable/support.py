"""Which recipes the portable kernels compute, where, and at which precision; imports no Triton."""

from lowbit_attn.kernels.portable.targets import NATIVE_BACKWARD_HEAD_DIM, TARGETS, kernel_head_dim
from lowbit_attn.recipes import KEY_TILE, Operand, Recipe

LAYOUTS = {"qk": ("token_block", "per_row", "mx32", "nvfp16", "nvfp16_token"), "p": ("fixed", "mx32", "per_row"),
           "v": ("token_block", "per_row", "mx32", "per_tensor")}
"""Block layouts of the forward's operands."""

ELEMENTS = ("e4m3", "e2m3", "e2m1")

EXPONENTIALS = ("exact", "schraudolph_u16")

RAN_ON = {"sm_90": "an H200"}
"""Architectures of which a device has run these kernels (`docs/gpu-record.json`)."""


def refusal(recipe: Recipe, architecture: str | None) -> str | None:
    """Why these kernels cannot compute a recipe on an architecture ("sm_100", "gfx950"), or None if they can."""
    if architecture not in TARGETS:
        return f"needs one of {', '.join(TARGETS)}, this device is {architecture or 'no GPU'}"
    effective = recipe.effective()
    for name, accepted in LAYOUTS.items():
        operand = getattr(effective, name)
        if operand.element not in ELEMENTS:
            return f"its kernels multiply {', '.join(ELEMENTS).upper()}; {name} of {recipe.canonical} is {operand}"
        if operand.layout not in accepted:
            return f"its kernels take {name} in {', '.join(accepted)}; that of {recipe.canonical} is {operand}"
    if effective.exponential not in EXPONENTIALS:
        return f"its kernels compute the exponentials {', '.join(EXPONENTIALS)}; {recipe.canonical} has {effective.exponential}"
    if effective.diagonal is not None:
        return f"its kernels have one format of V for all tiles; {recipe.canonical} has another one on the diagonal"
    if effective.score_accumulator != "fp32" or effective.key_tile != KEY_TILE:
        return f"its kernels add scores in fp32 and step by {KEY_TILE} keys; {recipe.canonical} asks for something else"
    return None


def backward_refusal(recipe: Recipe, architecture: str | None) -> str | None:
    """Why these kernels have no backward of a recipe on an architecture, or None if they have."""
    if architecture not in TARGETS:
        return f"needs one of {', '.join(TARGETS)}, this device is {architecture or 'no GPU'}"
    if reason := recipe.training_refusal:
        return reason
    if recipe.causal_safety != "default" or recipe.diagonal is not None or recipe.ds_stochastic:
        return f"its backward folds no scales of K into dS and rounds to nearest; {recipe.canonical} asks for more"
    fixed, squares = Operand("e4m3", "fixed"), Operand("e4m3", "square32")
    gradient = recipe.qk_grad or recipe.qk
    by_token = all(x.has_token_scales and x.element == "e4m3" for x in (gradient, recipe.v, recipe.do))
    if not by_token or (recipe.p_grad, recipe.ds) != (fixed, squares) or recipe.key_tile != KEY_TILE:
        return ("its backward takes E4M3 with token scales, P without scales and dS in 32 x 32 blocks; "
                f"{recipe.canonical} has others")
    if not recipe.saves_codes and recipe.qk.layout not in LAYOUTS["qk"]:
        return f"its kernels take qk in {', '.join(LAYOUTS['qk'])}; that of {recipe.canonical} is {recipe.qk}"
    return None


def is_native(recipe: Recipe, architecture: str) -> bool:
    """Whether the architecture's matrix unit takes the codes and block scales of both products of the forward."""
    return TARGETS[architecture].is_native(recipe.effective())


def has_native_backward(recipe: Recipe, architecture: str | None, head_dim: int) -> bool:
    """Whether the architecture's matrix unit takes the codes and block scales of all products of the backward."""
    return architecture in TARGETS and TARGETS[architecture].has_native_backward(recipe, kernel_head_dim(head_dim))


def _backward_precision(recipe: Recipe, architecture: str) -> str:
    if backward_refusal(recipe, architecture):
        return ""
    if has_native_backward(recipe, architecture, NATIVE_BACKWARD_HEAD_DIM):
        return f", in the backward to head_dim {NATIVE_BACKWARD_HEAD_DIM}, there bf16 ones beyond"
    return ", bf16 ones in the backward"


def _evidence(architecture: str | None) -> str:
    if architecture in RAN_ON:
        return f"by Triton kernels that have run on {RAN_ON[architecture]}"
    return "by Triton kernels that were compiled and interpreted and have not run on a device"


def precision(recipe: Recipe, architecture: str | None) -> str:
    """What multiplies: "native: ..." or "emulated: ..."; where no architecture could be native, why; and who has seen it run."""
    if architecture is None or not is_native(recipe, architecture):
        reason = ", as Triton has no FP6 operands" if "e2m3" in (x.element for x in (recipe.qk, recipe.p, recipe.v)) else ""
        return f"emulated: bf16 matrix units on the codes' exact values{reason}, {_evidence(architecture)}"
    kinds = {"e4m3": "MXFP8", "e2m1": "NVFP4" if recipe.qk.layout.startswith("nvfp16") else "MXFP4"}
    used = " and ".join(dict.fromkeys(kinds[x.element] for x in (recipe.qk, recipe.v)))
    return f"native: block-scaled {used} matrix units{_backward_precision(recipe, architecture)}, {_evidence(architecture)}"


__all__ = ["backward_refusal", "has_native_backward", "is_native", "precision", "refusal"]
