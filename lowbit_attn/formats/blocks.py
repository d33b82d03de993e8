"""Block layouts: which elements share a scale, and quantization of a [..., tokens, channels] tensor into one of them.

    layout        block (tokens x channels)   scale    used for
    mx32          1 x 32                      E8M0     MX operands; along tokens (32 x 1) with axis=-2, for V
    nvfp16        1 x 16                      UE4M3    NVFP4 operands
    nvfp16_token  1 x 16                      UE4M3    the same, times a power of two per token that keeps scales in range
    token_block   32 x all channels           E8M0     FLAMIA section 3.1: valid along either contraction axis
    square32      32 x 32                     E8M0     FLAMIA section 3.3, dS
    per_row       1 x all                     E8M0     per-token exact-causal operands; P per row and key tile
    per_tensor    all x all                   E8M0     one scale per leading index (batch item and head)

Blocks at the end of an axis may be short; they behave as if padded with zeros. A block holding Inf or NaN gets the NaN
scale (255, or UE4M3 0x7F) and NaN or zero codes, so that it decodes to NaN throughout. An all-zero block has zero codes;
its E8M0 scale is 1 (MXAttention algorithm 1), its UE4M3 scale 0, except in token_block and per_row, where exponents are
compared with one another (the reference exponents of the kernels) and zero takes the smallest, 2^-127, so that it never
raises another.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_attn.formats.elements import E4M3, ElementFormat, decode, encode, round_stochastic, round_to_element, wide
from lowbit_attn.formats.scales import (
    E8M0_NAN,
    MIN_EXPONENT,
    decode_e8m0,
    decode_ue4m3,
    encode_e8m0,
    encode_ue4m3,
    pow2,
    shared_exponent,
)


@dataclass(frozen=True)
class BlockLayout:
    """Block extent over tokens and channels; None means the whole axis."""

    name: str
    tokens: int | None
    channels: int | None
    scale: str = "e8m0"
    zero_exponent: int = 0
    second_level: bool = False

    def block_shape(self, tokens: int, channels: int) -> tuple[int, int]:
        """The extent on a concrete tensor, never zero."""
        return max(1, self.tokens or tokens), max(1, self.channels or channels)

    @property
    def is_one_dimensional(self) -> bool:
        """Whether blocks are lines of elements that run along the contraction axis of each product."""
        return self.tokens == 1 and self.channels is not None

    def shared_tokens(self, along_tokens: bool) -> float:
        """How many consecutive tokens a scale depends on where the product contracts tokens or channels; inf for all of them."""
        if along_tokens and self.is_one_dimensional:
            return math.inf if self.second_level else self.channels or math.inf
        return self.tokens or math.inf


LAYOUTS: dict[str, BlockLayout] = {
    layout.name: layout
    for layout in (
        BlockLayout("mx32", 1, 32),
        BlockLayout("nvfp16", 1, 16, scale="ue4m3"),
        BlockLayout("nvfp16_token", 1, 16, scale="ue4m3", second_level=True),
        BlockLayout("token_block", 32, None, zero_exponent=MIN_EXPONENT),
        BlockLayout("square32", 32, 32),
        BlockLayout("per_row", 1, None, zero_exponent=MIN_EXPONENT),
        BlockLayout("per_tensor", None, None),
    )
}


@dataclass(frozen=True)
class Quantized:
    """Codes [..., S, D] (uint8, one element each) and scales [..., ceil(S/bs), ceil(D/bd)] (uint8 scale codes).

    `second_level` is a constant factor on every scale; `token_scales` [..., S] the E8M0 codes of nvfp16_token's second level
    ([..., D] with axis=-2: one per line of blocks).
    """

    codes: Tensor
    scales: Tensor
    element: ElementFormat
    layout: BlockLayout
    axis: int = -1
    second_level: float = 1.0
    token_scales: Tensor | None = None


def block_layout(name: str) -> BlockLayout:
    """The layout called `name`; ValueError names the accepted ones."""
    if name not in LAYOUTS:
        raise ValueError(f"layout: got {name!r}; accepted: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def _blocked(x: Tensor, layout: BlockLayout) -> Tensor:
    """[..., S, D] -> [..., nS, bS, nD, bD], zero-padded to whole blocks."""
    tokens, channels = x.shape[-2:]
    block_tokens, block_channels = layout.block_shape(tokens, channels)
    pad_tokens, pad_channels = -tokens % block_tokens, -channels % block_channels
    if pad_tokens or pad_channels:
        x = torch.nn.functional.pad(x, (0, pad_channels, 0, pad_tokens))
    rows, columns = x.shape[-2] // block_tokens, x.shape[-1] // block_channels
    return x.reshape(*x.shape[:-2], rows, block_tokens, columns, block_channels)


def _unblocked(blocks: Tensor, tokens: int, channels: int) -> Tensor:
    lead, (rows, block_tokens, columns, block_channels) = blocks.shape[:-4], blocks.shape[-4:]
    whole = blocks.reshape(*lead, rows * block_tokens, columns * block_channels)
    return whole[..., :tokens, :channels]


def _block_maximum(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, kept broadcastable: [..., nS, 1, nD, 1]; NaN where the block has one."""
    if blocks.numel() == 0:
        return blocks.new_zeros((*blocks.shape[:-3], 1, blocks.shape[-2], 1))
    return blocks.abs().amax(dim=(-3, -1), keepdim=True)


@dataclass(frozen=True)
class _Scales:
    """Scale codes and values [..., nS, 1, nD, 1]; `line` the second-level codes [..., nS, 1, 1, 1] or None."""

    codes: Tensor
    values: Tensor
    line: Tensor | None = None


def _e8m0_codes(maximum: Tensor, exponent: Tensor) -> Tensor:
    return torch.where(maximum.isfinite(), encode_e8m0(exponent), E8M0_NAN).to(torch.uint8)


def _block_scales(maximum: Tensor, element: ElementFormat, layout: BlockLayout, rule: str, top: float | None,
                  second_level: float) -> _Scales:
    """Scales of blocks with these maxima; NaN for those that hold Inf or NaN."""
    if layout.scale == "e8m0":
        exponent = shared_exponent(maximum, rule, element, top=top, zero_exponent=layout.zero_exponent)
        codes = _e8m0_codes(maximum, exponent)
        return _Scales(codes, torch.where(maximum.isfinite(), pow2(exponent, maximum.dtype), torch.nan))
    line: Tensor | None = None
    # Divisors are tensors: CUDA divides by a Python number as a product with its rounded reciprocal.
    largest, factor = maximum.new_full((), element.max_value), maximum.new_full((), second_level)
    if layout.second_level:
        # The largest scale of the line lands in UE4M3's top binade, so that small scales keep their bits.
        finite = torch.where(maximum.isfinite(), maximum, 0.0)
        line_maximum = torch.nn.functional.pad(finite, (0, 0, 0, 1)).amax(-2, keepdim=True) / largest
        line = _e8m0_codes(line_maximum, shared_exponent(line_maximum, "ceil", E4M3))
        factor = decode_e8m0(line, maximum.dtype) * second_level
    codes = torch.where(maximum.isfinite(), encode_ue4m3(maximum / largest / factor), 0x7F).to(torch.uint8)
    return _Scales(codes, decode_ue4m3(codes, maximum.dtype) * factor, line)


def _scaled(blocks: Tensor, scale: Tensor) -> Tensor:
    """blocks / scale; 0 where the scale is 0 (an underflowed UE4M3 scale holds nothing)."""
    return torch.where(scale == 0, 0.0, blocks / scale)


def quantize(x: Tensor, element: ElementFormat, layout: BlockLayout, rule: str = "ceil", *, axis: int = -1,
             top: float | None = None, second_level: float = 1.0) -> Quantized:
    """Quantize `x` [..., tokens, channels] (any float dtype and strides) block by block.

    `axis=-2` runs the layout along tokens instead of channels (MX32 blocks of V along keys). `top` bounds the scaled
    block maximum (rule 'ceil'). `second_level` is a constant factor on every UE4M3 scale.
    """
    if axis == -2:
        flipped = quantize(x.transpose(-1, -2), element, layout, rule, top=top, second_level=second_level)
        return Quantized(flipped.codes.transpose(-1, -2).contiguous(), flipped.scales.transpose(-1, -2).contiguous(),
                         element, layout, axis, second_level, flipped.token_scales)
    tokens, channels = x.shape[-2:]
    blocks = _blocked(wide(x), layout)
    scales = _block_scales(_block_maximum(blocks), element, layout, rule, top, second_level)
    codes = encode(_scaled(blocks, scales.values), element)
    line = None if scales.line is None else scales.line[..., 0, 0, 0].contiguous()
    return Quantized(_unblocked(codes, tokens, channels).contiguous(), scales.codes[..., 0, :, 0].contiguous(), element, layout,
                     axis, second_level, line)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that the codes and scales stand for, [..., tokens, channels]."""
    codes, scales = q.codes, q.scales
    if q.axis == -2:
        codes, scales = codes.transpose(-1, -2), scales.transpose(-1, -2)
    tokens, channels = codes.shape[-2:]
    blocks = _blocked(decode(codes, q.element, dtype), q.layout)
    values = decode_e8m0(scales, dtype) if q.layout.scale == "e8m0" else decode_ue4m3(scales, dtype) * q.second_level
    if q.token_scales is not None:
        values = values * decode_e8m0(q.token_scales, dtype)[..., None]
    result = _unblocked(blocks * values[..., :, None, :, None], tokens, channels)
    return result.transpose(-1, -2) if q.axis == -2 else result


def round_to_blocks(x: Tensor, element: ElementFormat, layout: BlockLayout, rule: str = "ceil", *, axis: int = -1,
                    top: float | None = None, second_level: float = 1.0, uniform: Tensor | None = None) -> Tensor:
    """`dequantize(quantize(x))` without the codes, in float32 (float64 for float64): what a tile loop wants.

    With `uniform`, numbers in [0, 1) of x's shape, elements are rounded stochastically.
    """
    if axis == -2:
        noise = None if uniform is None else uniform.transpose(-1, -2)
        return round_to_blocks(x.transpose(-1, -2), element, layout, rule, top=top, second_level=second_level,
                               uniform=noise).transpose(-1, -2)
    tokens, channels = x.shape[-2:]
    blocks = _blocked(wide(x), layout)
    scale = _block_scales(_block_maximum(blocks), element, layout, rule, top, second_level).values
    scaled = blocks / scale if layout.scale == "e8m0" else _scaled(blocks, scale)
    rounded = round_to_element(scaled, element) if uniform is None else round_stochastic(scaled, element, _blocked(uniform, layout))
    return _unblocked(rounded * scale, tokens, channels)


def quantization_counts(x: Tensor, element: ElementFormat, layout: BlockLayout, rule: str = "ceil", *, axis: int = -1,
                        top: float | None = None) -> tuple[Tensor, Tensor]:
    """How many elements clamp at the largest code, and how many non-zero ones become zero."""
    if axis == -2:
        x = x.transpose(-1, -2)
    blocks = _blocked(wide(x), layout)
    scaled = _scaled(blocks, _block_scales(_block_maximum(blocks), element, layout, rule, top, 1.0).values)
    return element_counts(blocks, scaled, element)


def element_counts(source: Tensor, scaled: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
    """Saturated and flushed elements of `source` once it is `scaled` and rounded."""
    saturated = (scaled.abs() > element.max_value).sum()
    flushed = ((source != 0) & (round_to_element(scaled, element) == 0)).sum()
    return saturated, flushed


def scale_per_token(q: Quantized) -> Tensor:
    """Scale codes [..., tokens] of a layout whose blocks span all channels, however many: token_block, per_row, per_tensor."""
    if q.layout.channels is not None or q.axis != -1:
        spanning = ", ".join(layout.name for layout in LAYOUTS.values() if layout.channels is None)
        raise ValueError(f"layout: got {q.layout.name!r} with axis {q.axis}; accepted: {spanning} with axis -1")
    tokens = q.codes.shape[-2]
    block_tokens, _ = q.layout.block_shape(tokens, 1)
    return q.scales[..., 0].repeat_interleave(block_tokens, -1)[..., :tokens]
