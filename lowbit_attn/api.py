"""The public calls: attention, varlen_attention, explain. They validate, resolve recipe and backend, and call one operator."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from lowbit_attn import ops
from lowbit_attn.ops import Device, Explanation, sdpa, validation
from lowbit_attn.recipes import UNQUANTIZED, Recipe, canonical_text, resolve

Function = TypeVar("Function", bound=Callable)


def _constant_when_compiled(function: Function) -> Function:
    """What torch.compiler.assume_constant_result does, without importing torch._dynamo (and Triton) with this package."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_ALIGNMENTS = (None, "top_left", "bottom_right")


@_constant_when_compiled
def _canonical(recipe: str | Recipe) -> str:
    return canonical_text(recipe)


@_constant_when_compiled
def _backend(recipe: str, device: torch.device, requested: str | None, wide_heads: bool) -> str:
    return ops.choose(recipe, device, requested, wide_heads)


def _has_wide_heads(query: Tensor) -> bool:
    """A bool, which a compiled graph with dynamic shapes guards: a head_dim would not be a constant there."""
    return True if query.shape[-1] > ops.NARROW_HEAD_DIM else False  # noqa: SIM210


@_constant_when_compiled
def _check_grad(recipe: str) -> None:
    ops.dense.require_trainable(resolve(recipe))


def _will_backward(recipe: str, *inputs: Tensor) -> bool:
    """Whether autograd will want a backward; raises for recipes that have none."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if wanted:
        _check_grad(recipe)
    return wanted


@_constant_when_compiled
def _is_stochastic(recipe: str) -> bool:
    return resolve(recipe).ds_stochastic


def _seed(recipe: str, device: torch.device, seed: Tensor | None, will_backward: bool) -> Tensor | None:
    """The seed that the backward of this recipe needs, if one will run. One that no backward could use is refused."""
    if seed is not None and not isinstance(seed, Tensor):
        raise TypeError(f"seed: got {seed!r}; accepted: an int64 scalar tensor on {device}")
    if seed is not None and (seed.dtype != torch.int64 or seed.ndim != 0 or seed.device != device):
        raise ValueError(f"seed: got {seed.dtype} of shape {tuple(seed.shape)} on {seed.device}; accepted: an int64 scalar "
                         f"tensor on {device}")
    stochastic = _is_stochastic(recipe)
    if seed is not None and not stochastic:
        raise ValueError(f"seed: got a tensor with recipe {recipe!r}, which rounds nothing stochastically; accepted: None")
    if not (stochastic and will_backward):
        return None
    return torch.randint(0, 2**31 - 1, (), dtype=torch.int64, device=device) if seed is None else seed


def _check_heads(query: Tensor, key: Tensor, value: Tensor, layout: str, enable_gqa: bool) -> None:
    validation.check_tensors(query, key, value, layout)
    axis = layout.index("H")
    if not enable_gqa and query.shape[axis] != key.shape[axis]:
        raise ValueError(f"enable_gqa: got False with {query.shape[axis]} query heads and {key.shape[axis]} key/value heads; "
                         "accepted: True")


def attention(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: None = None, dropout_p: float = 0,
              recipe: str | Recipe = "mxfp8", is_causal: bool = False, causal_align: str | None = None, scale: float | None = None,
              enable_gqa: bool = False, key_lengths: Tensor | None = None, return_lse: bool = False, deterministic: bool = False,
              backend: str | None = None, seed: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Low-bit scaled dot product attention.

    Args:
        query: [B, Hq, Sq, D], bfloat16, float16 or float32, any strides and storage offset.
        key, value: [B, Hkv, Sk, D]; Hq is a multiple of Hkv (`enable_gqa` if they differ).
        attn_mask, dropout_p: torch SDPA's, for calls that pass None and 0; anything else is refused.
        recipe: a name ("mxfp8"), a name with options ("mxfp8:max_threshold=2") or a Recipe; "bf16" goes to torch SDPA.
        is_causal: mask keys after the query. With Sq != Sk say how the diagonal lies:
        causal_align: "top_left" (torch SDPA) or "bottom_right" (flash-attention; aligned to `key_lengths` if given).
        scale: factor on q . k, D^-0.5 by default.
        key_lengths: int32 [B]; keys at or past it are masked, and count as zero in every scale statistic.
        return_lse: also return the natural-log sum of exponentials, float32 [B, Hq, Sq], through which gradients flow;
            -inf for a row that sees no key (its output is 0).
        deterministic: ask for a bitwise reproducible backward (implied by torch.use_deterministic_algorithms, which "bf16"
            needs for it away from the CPU).
        backend: None chooses; or one of "reference", "hopper", "triton", "cdna4".
        seed: int64 scalar tensor for recipes that round gradients stochastically (refused by others); drawn from torch's
            generator if None. The same seed gives the same gradients. Without gradients to come it is checked, and not needed.

    Returns:
        [B, Hq, Sq, D] in query's dtype: a transposed view of a contiguous [B, Sq, Hq, D] tensor; with the lse if asked.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is accepted.
    """
    validation.check_unserved(attn_mask, dropout_p)
    validation.check_options(scale, is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse,
                             deterministic=deterministic)
    _check_heads(query, key, value, "BHSD", enable_gqa)
    if causal_align not in _ALIGNMENTS:
        raise ValueError(f"causal_align: got {causal_align!r}; accepted: None, 'top_left', 'bottom_right'")
    if is_causal and causal_align is None and query.shape[2] != key.shape[2]:
        raise ValueError(f"causal_align: got None with is_causal, {query.shape[2]} queries and {key.shape[2]} keys; accepted: "
                         "'top_left' (torch SDPA) or 'bottom_right' (flash-attention); tensors are [B, H, S, D]")
    if key_lengths is not None:
        validation.check_index("key_lengths", key_lengths, query.shape[0], query.device)
    bottom_right = causal_align == "bottom_right"
    text = _canonical(recipe)
    if text == UNQUANTIZED:
        _refuse_unquantized_options(query.device, return_lse, deterministic, backend, seed)
        if key_lengths is not None:
            validation.check_key_lengths_values(key_lengths, key.shape[2])
        return sdpa.dense(query, key, value, is_causal=is_causal, bottom_right=bottom_right, key_lengths=key_lengths,
                          scale=scale, enable_gqa=enable_gqa)
    save = _will_backward(text, query, key, value)
    seed = _seed(text, query.device, seed, save)
    output, lse, *_ = torch.ops.lowbit_attn.attention_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), key_lengths, text, is_causal, bottom_right, scale,
        save, deterministic or torch.are_deterministic_algorithms_enabled(),
        _backend(text, query.device, backend, _has_wide_heads(query)), seed)
    output = output.transpose(1, 2)
    return (output, lse) if return_lse else output


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
                     recipe: str | Recipe = "mxfp8", is_causal: bool = False, scale: float | None = None,
                     enable_gqa: bool = False, window_size: tuple[int, int] = (-1, -1), return_lse: bool = False,
                     deterministic: bool = False, backend: str | None = None,
                     seed: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Low-bit attention inside each of several packed documents.

    Args:
        query: [Tq, Hq, D]; key, value: [Tk, Hkv, D]; dtypes and strides as in `attention`.
        cu_seq_q, cu_seq_k: int32 [documents + 1]; document n holds rows cu_seq[n]:cu_seq[n + 1]. Empty documents and rows past
            the last boundary are legal: such rows give zeros and zero gradients.
        max_q, max_k: upper bounds of the document lengths; they need not be tight.
        is_causal: causal inside each document, aligned bottom-right.
        window_size: torch varlen_attn's way to say the same: (-1, -1) full, (-1, 0) causal; others are refused.
        Other arguments as in `attention`; lse is [Hq, Tq].

    Returns:
        [Tq, Hq, D] in query's dtype; with the lse if asked.
    """
    validation.check_options(scale, is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse,
                             deterministic=deterministic)
    _check_heads(query, key, value, "THD", enable_gqa)
    validation.check_cu_seq(cu_seq_q, cu_seq_k, query.device)
    validation.check_bound("max_q", max_q)
    validation.check_bound("max_k", max_k)
    if not isinstance(window_size, (tuple, list)) or tuple(window_size) not in ((-1, -1), (-1, 0)):
        raise ValueError(f"window_size: got {window_size!r}; accepted: (-1, -1) full, (-1, 0) causal")
    is_causal = is_causal or tuple(window_size) == (-1, 0)
    text = _canonical(recipe)
    if text == UNQUANTIZED:
        _refuse_unquantized_options(query.device, return_lse, deterministic, backend, seed)
        validation.check_cu_seq_values("cu_seq_q", cu_seq_q, query.shape[0], max_q)
        validation.check_cu_seq_values("cu_seq_k", cu_seq_k, key.shape[0], max_k)
        return sdpa.packed(query, key, value, cu_seq_q, cu_seq_k, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    save = _will_backward(text, query, key, value)
    seed = _seed(text, query.device, seed, save)
    output, lse, *_ = torch.ops.lowbit_attn.varlen_attention_forward(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, text, is_causal, scale, save,
        deterministic or torch.are_deterministic_algorithms_enabled(),
        _backend(text, query.device, backend, _has_wide_heads(query)), seed)
    return (output, lse) if return_lse else output


def _refuse_unquantized_options(device: torch.device, return_lse: bool, deterministic: bool, backend: str | None,
                                seed: Tensor | None) -> None:
    if return_lse:
        raise ValueError("return_lse: got True with recipe 'bf16', which is torch SDPA and returns none; accepted: False")
    if backend is not None:
        raise ValueError(f"backend: got {backend!r} with recipe 'bf16', which is torch SDPA; accepted: None")
    if deterministic and device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(f"deterministic: got True with recipe 'bf16' on {device}, where torch SDPA has no such argument; "
                         "accepted: False, or True after torch.use_deterministic_algorithms(True)")
    if seed is not None:
        raise ValueError("seed: got a value with recipe 'bf16', which rounds nothing stochastically; accepted: None")


def explain(recipe: str | Recipe, device: torch.device | str | None = None) -> Explanation:
    """Which backend runs `recipe` on `device` (default: the accelerator, else the CPU), at which precision, why not faster."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    described = ops.describe(torch.device(device))
    if _canonical(recipe) == UNQUANTIZED:
        return Explanation(UNQUANTIZED, described, "torch", "the inputs' own dtype: torch scaled_dot_product_attention", ())
    return ops.explain(resolve(recipe), described)


__all__ = ["Device", "Explanation", "attention", "explain", "varlen_attention"]
