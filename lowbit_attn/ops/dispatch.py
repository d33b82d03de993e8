"""Which backend runs a recipe on a device, and why not a faster one."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch

from lowbit_attn.recipes import KEY_TILE as TILE
from lowbit_attn.recipes import RECIPES, Operand, Recipe, resolve

CDNA4_RECIPES = ("fused_mxfp8", "fused_mxfp6", "fused_mxfp4")
NARROW_HEAD_DIM = 128
"""Some kernels take no wider heads."""


class LowbitFallbackWarning(UserWarning):
    """A recipe runs on a slower or emulated path than its name suggests."""


@dataclass(frozen=True)
class Device:
    """What dispatch needs to know of a device: torch's type, and a GPU's architecture such as 'sm_90' or 'gfx950'."""

    type: str
    architecture: str | None = None

    def __str__(self) -> str:
        return f"{self.type} ({self.architecture})" if self.architecture else self.type


@dataclass(frozen=True)
class Backend:
    """`refusal(recipe, device)` says why this backend cannot run, or None; `precision` is what its matrix units compute in, and
    starts with "emulated" where they do not compute in the recipe's own formats."""

    name: str
    precision: str | Callable[[Recipe, Device], str]
    refusal: Callable[[Recipe, Device], str | None]
    takes_wide_heads: bool = True

    def problem(self, recipe: Recipe, device: Device, wide_heads: bool) -> str | None:
        """`refusal`, or that heads are too wide."""
        reason = self.refusal(recipe, device)
        if reason is None and wide_heads and not self.takes_wide_heads:
            reason = f"its kernels take head_dim up to {NARROW_HEAD_DIM}"
        return reason

    def precision_of(self, recipe: Recipe, device: Device) -> str:
        """The precision for a recipe and device that it does not refuse."""
        return self.precision if isinstance(self.precision, str) else self.precision(recipe, device)


def _hopper_refusal(recipe: Recipe, device: Device) -> str | None:
    """What the kernels of `kernels.hopper` compute: NVFP4 scores (`nvfp4_support`); blocks of 32 along contraction axes (`grids`);
    token blocks, V folded into P, two kinds of softmax (`attention`)."""
    if device.architecture != "sm_90":
        return f"needs sm_90, this device is {device}"
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    effective = recipe.effective()
    if effective.qk.layout.startswith("nvfp16"):
        from lowbit_attn.kernels.hopper import nvfp4_support

        return nvfp4_support.refusal(effective)
    if effective.qk.layout == "mx32":
        from lowbit_attn.kernels.hopper import grids

        return grids.refusal(effective)
    softmax = (effective.exponential, effective.row_sum, effective.score_accumulator)
    accepted = {("exact", "exact", "fp32"), ("direct_u8", "quantized", "fp16")}
    tokens = Operand("e4m3", "token_block")
    if (effective.qk, effective.v, effective.p) != (tokens, tokens, Operand("e4m3", "fixed")) or effective.v_exponent != "running":
        return f"its kernels take token-block E4M3 operands with V's scales folded into P; {recipe.canonical} has others"
    if not effective.saves_codes or effective.rotation == "always":
        return f"its kernels save codes for the backward and rotate at head_dim 128 only; {recipe.canonical} asks for more"
    if softmax not in accepted or effective.maximum != "lazy" or effective.q_prescale or effective.key_tile != TILE:
        return f"its kernels have no softmax like that of {recipe.canonical}"
    return None


def _hopper_precision(recipe: Recipe, device: Device) -> str:
    if recipe.qk.layout.startswith("nvfp16"):
        return "bf16 tensor cores for Q K, which hold its numbers exactly, fp8 ones for P V"
    return "fp8 tensor cores"


def _portable_refusal(recipe: Recipe, device: Device) -> str | None:
    from lowbit_attn.kernels.portable import support

    if device.type != "cuda":
        return f"needs a GPU, this device is {device}"
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    return support.refusal(recipe, device.architecture)


def _portable_precision(recipe: Recipe, device: Device) -> str:
    from lowbit_attn.kernels.portable import support

    return support.precision(recipe, device.architecture)


def _cdna4_refusal(recipe: Recipe, device: Device) -> str | None:
    """What the kernels of `kernels.cdna4` compute: the fused recipes as they are named."""
    if device.architecture != "gfx950":
        return f"needs gfx950, this device is {device}"
    if recipe not in (RECIPES[name] for name in CDNA4_RECIPES):
        return f"its kernels compute {', '.join(CDNA4_RECIPES)}, with no option changed"
    return None


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("hopper", _hopper_precision, _hopper_refusal),
        Backend("cdna4", "native: MX matrix cores, by kernels that were compiled and emulated and have not run on a device; "
                "`lowbit-attn check --backend cdna4` runs them", _cdna4_refusal, takes_wide_heads=False),
        Backend("triton", _portable_precision, _portable_refusal),
        Backend("reference", "emulated: PyTorch operations in float32 on quantized values", lambda recipe, device: None),
    )
}
"""In order of preference; `reference` runs everywhere."""


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the chosen backend, its native precision, and why each faster one was passed over."""

    recipe: str
    device: Device
    backend: str
    precision: str
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.recipe} on {self.device}: backend {self.backend!r} ({self.precision})"]
        return "\n".join([*lines, *(f"  not {name!r}: {reason}" for name, reason in self.passed_over)])


@lru_cache(maxsize=64)
def describe(device: torch.device) -> Device:
    """The dispatch description of a torch device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Device(device.type)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Device("cuda", properties.gcnArchName.split(":")[0])
    return Device("cuda", f"sm_{properties.major}{properties.minor}")


def explain(recipe: Recipe, device: Device, wide_heads: bool = False) -> Explanation:
    """Try the backends in order of preference; `wide_heads` for a head_dim above NARROW_HEAD_DIM."""
    passed_over: list[tuple[str, str]] = []
    for backend in BACKENDS.values():
        reason = backend.problem(recipe, device, wide_heads)
        if reason is None:
            return Explanation(recipe.canonical, device, backend.name, backend.precision_of(recipe, device), tuple(passed_over))
        passed_over.append((backend.name, reason))
    raise RuntimeError(f"no backend runs {recipe.canonical} on {device}")


@lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    warnings.warn(text, LowbitFallbackWarning, stacklevel=5)


def require_backend(name: str, implemented: tuple[str, ...] = ("reference", "hopper", "cdna4", "triton")) -> None:
    """Operators take the name of a backend that they implement; the public calls choose one."""
    if name not in implemented:
        raise ValueError(f"backend: got {name!r}; accepted by this operator: {', '.join(implemented)}")


def backward_backend(recipe: Recipe, backend: str, head_dim: int, device: torch.device) -> str:
    """The backend that runs the backward after `backend` ran the forward: its own, the portable kernels or the reference; says
    once why, if it is another one, and if the portable kernels multiply in bf16 where their forward does not."""
    from lowbit_attn.kernels.portable import support

    if backend == "reference":
        return backend
    described, reason = describe(device), f"backend {backend!r} has no backward in this version"
    if backend == "hopper":
        from lowbit_attn.ops import hopper

        if (reason := hopper.backward_refusal(recipe, head_dim) or "") == "":
            return backend
    if (refusal := support.backward_refusal(recipe, described.architecture)) is None:
        native = support.has_native_backward(recipe, described.architecture, head_dim)
        forward_native = backend == "triton" and _portable_precision(recipe, described).startswith("native")
        if not native and (backend != "triton" or forward_native):
            _warn_once(f"lowbit_attn: the backward of {recipe.name} after backend {backend!r} runs Triton kernels on bf16 matrix "
                       "units: exact numbers, no faster than bf16." + ("" if backend == "triton" else f" Why: {reason}."))
        return "triton"
    reason = refusal if backend == "triton" else reason
    _warn_once(f"lowbit_attn: the backward of {recipe.name} after backend {backend!r} runs the PyTorch reference: exact numbers, "
               f"no speed. Why: {reason}.")
    return "reference"


def choose(recipe_text: str, device: torch.device, requested: str | None, wide_heads: bool = False) -> str:
    """The backend's name; a requested one that cannot run raises, an emulated choice warns once."""
    recipe, described = resolve(recipe_text), describe(device)
    if requested is None:
        explanation = explain(recipe, described, wide_heads)
        if explanation.backend == "reference":
            narrow = explain(recipe, described).backend   # what explain() knows, which is told of no head_dim
            why = (f"lowbit_attn.explain({recipe.name!r}) says why" if narrow == "reference" else
                   f"Why: backend {narrow!r} takes head_dim up to {NARROW_HEAD_DIM}")
            _warn_once(f"lowbit_attn: {recipe.name} on {described} runs the PyTorch reference: exact numbers, no speed. {why}; "
                       "backend='reference' asks for it and silences this.")
        elif explanation.precision.startswith("emulated"):
            _warn_once(f"lowbit_attn: {recipe.name} on {described} runs backend {explanation.backend!r}, {explanation.precision}: "
                       f"no faster than bf16. backend={explanation.backend!r} asks for it and silences this.")
        return explanation.backend
    if requested not in BACKENDS:
        raise ValueError(f"backend: got {requested!r}; accepted: None, {', '.join(BACKENDS)}")
    reason = BACKENDS[requested].problem(recipe, described, wide_heads)
    if reason:
        raise ValueError(f"backend: got {requested!r}, which cannot run {recipe.canonical} on {described}: {reason}; accepted: "
                         f"{explain(recipe, described, wide_heads).backend!r}")
    return requested
