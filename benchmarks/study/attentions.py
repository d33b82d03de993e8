"""The attentions that are trained: bf16, recipes, and controls that are wrong on purpose.

Every control is the product's own operators with one mistake, a mistake that others have made:

    wrong-dO          D is summed from dO as it came, dP and dV from a dO of 4 bits (FLAMIA 4.5)
    wrong-P           the backward rebuilds P without the causal mask, from an lse that knows only visible keys
    leak-V-tensor     V is 4-bit with one floor-rounded scale for all tokens of a head: later tokens move all earlier outputs
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


def _rounded(x: Tensor, element: str, layout: str, rule: str = "ceil", axis: int = -1) -> Tensor:
    """What quantization in another format leaves of x, in x's dtype."""
    kept = formats.round_to_blocks(x, formats.element_format(element), formats.block_layout(layout), rule, axis=axis)
    return kept.to(x.dtype)


class _OtherDelta(torch.autograd.Function):
    """The identity on (output, lse). Its backward hands on dO' in 4 bits, and through dlse turns sum(O dO') into sum(O dO)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(output)
        ctx.set_materialize_grads(False)
        return output.view_as(output), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor]:
        [output], [grad, _] = ctx.saved_tensors, grads
        assert grad is not None  # nothing reads the lse
        coarse = _rounded(grad, "e2m1", "token_block")
        return coarse, (output.float() * (coarse.float() - grad.float())).sum(-1)


def wrong_do(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """D of another dO than that of dP and dV."""
    result = lowbit_attn.attention(query, key, value, recipe=RECIPE, is_causal=True, return_lse=True)
    assert isinstance(result, tuple)
    return _OtherDelta.apply(*result)[0]  # type: ignore[no-any-return]


class _OtherMask(torch.autograd.Function):
    """The recipe's forward under the causal mask; its backward on the same codes and lse without it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.backend = lowbit_attn.explain(RECIPE, query.device).backend
        results = torch.ops.lowbit_attn.attention_forward(*_native(query, key, value), None, RECIPE, True, False, None, True, False,
                                                          ctx.backend, None)
        ctx.save_for_backward(*results)
        return results[0].transpose(1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return _native(*torch.ops.lowbit_attn.attention_backward(*_native(grads[0]), None, *ctx.saved_tensors, None, RECIPE, False,
                                                                 False, None, False, ctx.backend, None))


def _native(*tensors: Tensor) -> tuple[Tensor, ...]:
    """From [B, H, S, D] to the operators' [B, S, H, D], or back."""
    return tuple(x.transpose(1, 2) for x in tensors)


def wrong_p(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """P of keys that the forward hid."""
    return _OtherMask.apply(query, key, value)  # type: ignore[no-any-return]


def _with_rounded_v(element: str, layout: str, rule: str, axis: int) -> Attend:
    """The recipe on a V that was rounded in another format before; gradients pass straight through."""

    product = _product(RECIPE)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            correction = _rounded(value.float(), element, layout, rule, axis) - value.float()
        return product(query, key, (value.float() + correction).to(value.dtype))

    return attend


CONTROLS: dict[str, Attend] = {
    "wrong-dO": wrong_do,
    "wrong-P": wrong_p,
    "leak-V-tensor": _with_rounded_v("e2m1", "per_tensor", "floor", -1),
    "leak-V-groups": _with_rounded_v("e2m1", "mx32", "ceil", -2),
}
