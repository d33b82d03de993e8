"""torch.ops.lowbit_attn.quantize: codes and scales of one operand, as the attention operators compute them."""

import torch
from torch import Tensor

from lowbit_attn import formats
from lowbit_attn.recipes import Operand


def _quantized(x: Tensor, operand: str, along_tokens: bool, rotate: bool, prescale: float) -> formats.Quantized:
    parsed = Operand.parse(operand)
    if not parsed.is_coded or parsed.layout == "fixed":
        raise ValueError(f"operand: got {operand!r}; accepted: element/layout[/rule] with element one of "
                         f"{', '.join(formats.ELEMENTS)} and layout one of {', '.join(formats.LAYOUTS)}")
    wide = x.transpose(1, 2).float()
    if rotate:
        wide = formats.hadamard(wide)
    if prescale != 1.0:
        wide = wide * prescale
    return formats.quantize(wide, formats.element_format(parsed.element), formats.block_layout(parsed.layout), parsed.rule,
                            axis=-2 if along_tokens else -1)


def _check(x: Tensor) -> None:
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(f"x: got {x.dtype} of shape {tuple(x.shape)}; accepted: floating [B, S, H, D]")


@torch.library.custom_op("lowbit_attn::quantize", mutates_args=())
def quantize(x: Tensor, operand: str, along_tokens: bool, rotate: bool, prescale: float) -> tuple[Tensor, Tensor]:
    """Quantize x [B, S, H, D] (any strides) to uint8 codes [B, S, H, D] and scale codes [B, H, token blocks, channel blocks].

    `operand` is `element/layout[/rule]`. In order: Hadamard rotation of the channels if `rotate`, multiplication by
    `prescale`, quantization with the layout along channels, or along tokens if `along_tokens`.
    """
    _check(x)
    result = _quantized(x, operand, along_tokens, rotate, prescale)
    return result.codes.transpose(1, 2).contiguous(), result.scales.contiguous()


@quantize.register_fake
def _(x: Tensor, operand: str, along_tokens: bool, rotate: bool, prescale: float) -> tuple[Tensor, Tensor]:
    _check(x)
    batch, tokens, heads, channels = x.shape
    layout = formats.block_layout(Operand.parse(operand).layout)
    block = [layout.tokens or tokens, layout.channels or channels]
    if along_tokens:
        block = [layout.channels or tokens, layout.tokens or channels]
    blocks = [-(-size // max(1, width)) for size, width in zip((tokens, channels), block, strict=True)]
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty((batch, heads, *blocks), dtype=torch.uint8)
