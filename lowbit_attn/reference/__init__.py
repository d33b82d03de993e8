"""The specification: attention of every recipe in plain PyTorch, forward and backward."""

from lowbit_attn.reference.backward import Gradients, backward
from lowbit_attn.reference.forward import Forward, forward
from lowbit_attn.reference.masks import Visibility
from lowbit_attn.reference.operands import Coded, Saved
from lowbit_attn.reference.stats import Count, Stats
from lowbit_attn.reference.varlen import varlen_backward, varlen_forward

__all__ = [
    "Coded", "Count", "Forward", "Gradients", "Saved", "Stats", "Visibility", "backward", "forward", "varlen_backward",
    "varlen_forward",
]
