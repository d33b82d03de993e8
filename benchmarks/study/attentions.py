"""The attentions that are trained: bf16, recipes, and controls that are wrong on purpose.

Every control is the product's own operators with one mistake, a mistake that others have made:

    wrong-dO          D is summed from dO as it came, dP from the codes of dO (FLAMIA 4.5)
    wrong-P           the forward approximates the exponential, the backward rebuilds P with the exact one (FLAMIA 4.5)
    leak-V-tensor     V has one floor-rounded scale for all tokens of a head, so that later tokens move earlier outputs
    leak-V-groups     V is 4-bit with scales shared by 32 keys, across the causal diagonal (FLAMIA 3.2)
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lowbit_attn
from lowbit_attn import formats
from lowbit_attn.recipes import UNQUANTIZED, resolve
from study.model import Attend

RECIPE = "mxfp8"
"""What the controls spoil."""


@dataclass(frozen=True)
class Variant:
    """`kind` is "bf16", "recipe", "mismatch" or "leak"; `recipe` is what the numerics are measured in."""

    name: str
    kind: str
    recipe: str
    attend: Attend


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Exact causal attention in float32."""
    with torch.autocast(query.device.type, enabled=False):
        wide = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
    return wide.to(query.dtype)


def variant(name: str) -> Variant:
    """A control by its name, or a recipe that trains."""
    if name in CONTROLS:
        return Variant(name, "leak" if name.startswith("leak") else "mismatch", RECIPE, CONTROLS[name])
    if name == UNQUANTIZED:
        return Variant(name, "bf16", RECIPE, _product(name))
    refusal = resolve(name).training_refusal
    if refusal:
        raise SystemExit(f"--only: got {name!r}: {refusal}; accepted: bf16, a recipe that trains, {', '.join(CONTROLS)}")
    return Variant(name, "recipe", name, _product(name))


def _product(recipe: str) -> Attend:
    """The public call."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = lowbit_attn.attention(query, key, value, recipe=recipe, is_causal=True)
        assert isinstance(output, Tensor)
        return output

    return attend


class _RawDelta(torch.autograd.Function):
    """The identity on (output, lse) whose backward turns D = sum(O dO') of the rounded dO' into sum(O dO), through dlse."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(output)
        return output.view_as(output), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        [output] = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None, grads[1]
        coded = resolve(RECIPE).do
        rounded = formats.round_to_blocks(grad, formats.element_format(coded.element), formats.block_layout(coded.layout),
                                          coded.rule)
        difference = (output.float() * (rounded - grad.float())).sum(-1)
        return grad, difference if grads[1] is None else grads[1] + difference


def wrong_do(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """D of another dO than dP's."""
    result = lowbit_attn.attention(query, key, value, recipe=RECIPE, is_causal=True, return_lse=True)
    assert isinstance(result, tuple)
    return _RawDelta.apply(*result)[0]  # type: ignore[no-any-return]


class _OtherExponential(torch.autograd.Function):
    """The forward of `mxfp8_fast`, whose probabilities are approximate, with the backward of `mxfp8` on its codes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.backend = lowbit_attn.explain(RECIPE, query.device).backend
        native = (x.transpose(1, 2) for x in (query, key, value))
        results = torch.ops.lowbit_attn.attention_forward(*native, None, "mxfp8_fast", True, False, None, True, False,
                                                          ctx.backend, None)
        ctx.save_for_backward(*results)
        return results[0].transpose(1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        found = torch.ops.lowbit_attn.attention_backward(grads[0].transpose(1, 2), None, *ctx.saved_tensors, None, RECIPE, True,
                                                         False, None, False, ctx.backend, None)
        return tuple(x.transpose(1, 2) for x in found)


def wrong_p(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Other probabilities in the forward than in the backward."""
    return _OtherExponential.apply(query, key, value)  # type: ignore[no-any-return]


def _with_rounded_v(element: str, layout: str, rule: str, axis: int) -> Attend:
    """The recipe on a V that was rounded in another format before; gradients pass straight through."""

    product = _product(RECIPE)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            rounded = formats.round_to_blocks(value, formats.element_format(element), formats.block_layout(layout), rule, axis=axis)
            correction = rounded - value.float()
        return product(query, key, (value.float() + correction).to(value.dtype))

    return attend


CONTROLS: dict[str, Attend] = {
    "wrong-dO": wrong_do,
    "wrong-P": wrong_p,
    "leak-V-tensor": _with_rounded_v("e4m3", "per_tensor", "floor", -1),
    "leak-V-groups": _with_rounded_v("e2m1", "mx32", "ceil", -2),
}
