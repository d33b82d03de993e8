"""The numbers: element formats, scales, block layouts, packing and the Hadamard rotation. Pure torch, no kernels."""

from lowbit_attn.formats.blocks import (
    LAYOUTS,
    BlockLayout,
    Quantized,
    block_layout,
    dequantize,
    quantize,
    round_to_blocks,
    scale_per_token,
)
from lowbit_attn.formats.elements import (
    E2M1,
    E2M3,
    E4M3,
    E5M2,
    ELEMENTS,
    ElementFormat,
    decode,
    element_format,
    encode,
    round_to_element,
)
from lowbit_attn.formats.hadamard import hadamard
from lowbit_attn.formats.packing import pack4, pack6, unpack4, unpack6
from lowbit_attn.formats.scales import (
    SCALE_RULES,
    decode_e8m0,
    decode_ue4m3,
    encode_e8m0,
    encode_ue4m3,
    pow2,
    rule_problem,
    shared_exponent,
)

__all__ = [
    "E2M1", "E2M3", "E4M3", "E5M2", "ELEMENTS", "LAYOUTS", "SCALE_RULES", "BlockLayout", "ElementFormat", "Quantized",
    "block_layout", "decode", "decode_e8m0", "decode_ue4m3", "dequantize", "element_format", "encode", "encode_e8m0",
    "encode_ue4m3", "hadamard", "pack4", "pack6", "pow2", "quantize", "round_to_blocks", "round_to_element",
    "rule_problem", "scale_per_token", "shared_exponent", "unpack4", "unpack6",
]
