"""torch.library operators under torch.ops.lowbit_attn, and which backend runs them."""

from lowbit_attn.ops.dense import attention_backward, attention_forward
from lowbit_attn.ops.dispatch import (
    BACKENDS,
    NARROW_HEAD_DIM,
    Device,
    Explanation,
    LowbitFallbackWarning,
    choose,
    describe,
    explain,
)
from lowbit_attn.ops.quantize import quantize
from lowbit_attn.ops.varlen import varlen_attention_backward, varlen_attention_forward

__all__ = [
    "BACKENDS", "NARROW_HEAD_DIM", "Device", "Explanation", "LowbitFallbackWarning", "attention_backward", "attention_forward",
    "choose", "describe", "explain", "quantize", "varlen_attention_backward", "varlen_attention_forward",
]
