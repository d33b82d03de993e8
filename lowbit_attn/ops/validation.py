"""Checks shared by the operators: shapes, dtypes and devices always; index values where reading them costs no sync.

Every message names the argument, what came and what is accepted.
"""

import os
import sys
from itertools import pairwise

import torch
from torch import Tensor

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256


def check_tensors(query: Tensor, key: Tensor, value: Tensor, layout: str) -> None:
    """Rank, dtype, device, head and head_dim agreement of query, key and value in `layout`, such as 'BHSD' or 'THD'."""
    head_axis = layout.index("H")
    shown = "[" + ", ".join(layout) + "]"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; accepted: a tensor {shown}")
        if x.is_nested:
            raise TypeError(f"{name}: got a nested tensor; accepted: a strided tensor {shown}, or packed documents in "
                            "varlen_attention")
        if x.ndim != len(layout):
            raise ValueError(f"{name}: got rank {x.ndim}, shape {tuple(x.shape)}; accepted: {shown}")
        if x.layout != torch.strided:
            raise TypeError(f"{name}: got layout {x.layout}; accepted: a strided tensor {shown}")
        if x.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name}: got dtype {x.dtype}; accepted: bfloat16, float16, float32")
        if x.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise TypeError(f"{name}: got dtype {x.dtype}, query has {query.dtype}; accepted: one dtype for all")
        if x.device != query.device:
            raise ValueError(f"{name}: got device {x.device}, query is on {query.device}; accepted: one device for all")
    if value.shape[-1] != query.shape[-1] or key.shape[-1] != query.shape[-1]:
        raise ValueError(f"head_dim: got query {query.shape[-1]}, key {key.shape[-1]}, value {value.shape[-1]}; "
                         "accepted: one head_dim for all three")
    if not 1 <= query.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim: got {query.shape[-1]}; accepted: 1 to {MAX_HEAD_DIM}")
    if key.shape != value.shape:
        raise ValueError(f"value: got shape {tuple(value.shape)}, key has {tuple(key.shape)}; accepted: equal shapes")
    if layout[0] == "B" and key.shape[0] != query.shape[0]:
        raise ValueError(f"key: got batch {key.shape[0]}, query has {query.shape[0]}; accepted: equal batch sizes")
    heads, kv_heads = query.shape[head_axis], key.shape[head_axis]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"heads: got {heads} query heads and {kv_heads} key/value heads; accepted: a multiple of the "
                         "key/value heads")


def _came(x: object) -> str:
    """What an error says of an argument that may be a mask."""
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def check_unserved(attn_mask: object, dropout_p: float) -> None:
    """torch SDPA's arguments that only say no."""
    if attn_mask is not None:
        raise TypeError(f"attn_mask: got {_came(attn_mask)}; accepted: None. Masks are is_causal and key_lengths; packed documents "
                        "go to varlen_attention")
    if dropout_p != 0:
        raise ValueError(f"dropout_p: got {dropout_p!r}; accepted: 0")


def check_options(scale: float | None, **flags: bool) -> None:
    """A finite scale, and flags that are bools: a mask passed in a flag's place is refused."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {_came(flag)}; accepted: True, False")
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        came = "a tensor" if isinstance(scale, Tensor) else repr(scale)
        raise TypeError(f"scale: got {came}; accepted: a float, or None for head_dim^-0.5")
    if not -sys.float_info.max <= scale <= sys.float_info.max:
        came = "an int beyond the range of floats" if isinstance(scale, int) else str(scale)
        raise ValueError(f"scale: got {came}; accepted: a finite float, or None for head_dim^-0.5")


def check_bound(name: str, bound: int) -> None:
    """An int, as max_q and max_k are."""
    if isinstance(bound, bool | float | str | Tensor) or bound is None:
        came = "a tensor" if isinstance(bound, Tensor) else repr(bound)
        raise TypeError(f"{name}: got {came}; accepted: an int (an upper bound of the document lengths)")


def check_index(name: str, index: Tensor, length: int | None, device: torch.device) -> None:
    """An int32 vector (of `length`, if given) on `device`."""
    if not isinstance(index, Tensor) or index.dtype != torch.int32 or index.ndim != 1:
        came = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"{name}: got {came}; accepted: a one-dimensional int32 tensor")
    if index.device != device:
        raise ValueError(f"{name}: got device {index.device}, query is on {device}; accepted: one device for all")
    if length is not None and index.shape[0] != length:
        raise ValueError(f"{name}: got {index.shape[0]} entries; accepted: {length}, one per batch item")


def check_cu_seq(cu_seq_q: Tensor, cu_seq_k: Tensor, device: torch.device) -> None:
    """Two int32 boundary vectors of equal, non-zero length."""
    check_index("cu_seq_q", cu_seq_q, None, device)
    check_index("cu_seq_k", cu_seq_k, None, device)
    if cu_seq_q.shape[0] != cu_seq_k.shape[0] or cu_seq_q.shape[0] == 0:
        raise ValueError(f"cu_seq_k: got {cu_seq_k.shape[0]} entries, cu_seq_q has {cu_seq_q.shape[0]}; accepted: equal "
                         "lengths, documents + 1")


def values_are_checked(index: Tensor) -> bool:
    """On the CPU always; elsewhere under LOWBIT_ATTN_VALIDATE=1 only, since reading them waits for the device.

    Never while tracing, nor for tensor subclasses such as fake tensors: there are no values yet.
    """
    if torch.compiler.is_compiling() or type(index) not in (Tensor, torch.nn.Parameter):
        return False
    return index.device.type == "cpu" or os.environ.get("LOWBIT_ATTN_VALIDATE") == "1"


def check_cu_seq_values(name: str, cu_seq: Tensor, tokens: int, longest: int) -> None:
    """Boundaries that start at 0 or later, never decrease, end inside the packed rows and respect the stated maximum."""
    if not values_are_checked(cu_seq):
        return
    values = cu_seq.tolist()
    lengths = [stop - start for start, stop in pairwise(values)]
    if values[0] < 0 or values[-1] > tokens:
        raise ValueError(f"{name}: got boundaries {values[0]} to {values[-1]}; accepted: 0 to {tokens}, the packed rows")
    for position, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name}: got {values[position + 1]} after {values[position]} at entry {position + 1}; accepted: "
                             "boundaries that never decrease")
    if lengths and max(lengths) > longest:
        raise ValueError(f"max_{name[-1]}: got {longest}, but {name} holds a document of {max(lengths)} tokens; accepted: an "
                         "upper bound")


def check_key_lengths_values(key_lengths: Tensor, keys: int) -> None:
    """Lengths in 0..keys."""
    if not values_are_checked(key_lengths):
        return
    for position, length in enumerate(key_lengths.tolist()):
        if not 0 <= length <= keys:
            raise ValueError(f"key_lengths: got {length} at entry {position}; accepted: 0 to {keys}, the number of keys")
