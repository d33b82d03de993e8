"""Q, K and V into E4M3 codes, one launch: rotation, scale per token block or token, codes, and V's codes transposed.

Equals `reference.operands.forward_operands` bit for bit: `formats.hadamard` of Q and K where `Recipe.rotates(head_dim)`, then
`code_per_token` with the recipe's layouts and tops; documents never share a block. Input: bf16, fp16 or fp32 in any strides.

    saved        codes [tokens, H, D] uint8, scale codes [B, H, S] or [H, T] uint8 (E8M0)
    v_t          [Hkv, D, 128 k_tiles] uint8: V's codes, keys (j, c, e) -> (c, j, e) inside each 16, so that P needs no shuffle
    k_group      [Hkv, 4 k_tiles] float32: 2^e of each 32 keys, NaN where the block holds NaN or Inf (so are its codes)
    v_group      [Hkv, 4 k_tiles] float32: e of each 32 keys, NaN where the block holds NaN or Inf (its codes are 0 in v_t)

A program takes 128 tokens of one head (`quantize_tile`). Blocks past the end of a document have k_group 1 and v_group -127.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit_attn.formats import E4M3
from lowbit_attn.kernels.hopper.quantize_tile import (
    GROUP,
    ROWS,
    along,
    halves_of,
    part,
    per_lane,
    power,
    quantize,
    store_group,
    store_saved,
    store_transposed,
)
from lowbit_attn.kernels.tiling import TILE, Tiling
from lowbit_attn.recipes import Operand, Recipe, resolve

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
BLOCK = GROUP.value


@gluon.jit
def store_values(v, v_codes, v_scales, v_t, v_group, documents, k_tiles, index, v_document, v_token, v_head, v_channel,
                 scale_document, scale_head, kv_heads, k_count, D: gl.constexpr, PER_TOKEN: gl.constexpr, POWERS: gl.constexpr,
                 SAVE: gl.constexpr, MODE: gl.constexpr, DTYPE: gl.constexpr, TOP: gl.constexpr):
    """Program `index` of V's: a tile's codes transposed, scales and, if saved, codes. POWERS: v_group gets 2^e instead of e."""
    V_GROUP: gl.constexpr = 1 if PER_TOKEN else GROUP
    SIZE: gl.constexpr = part(D)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, per_lane(64, halves_of(D))))
    head = index // k_count
    tile = index % k_count
    document = gl.load(k_tiles + tile)
    if document >= 0:
        entry = documents + document * 8
        start = gl.load(entry + 2)
        length = gl.load(entry + 3)
        first = (tile - gl.load(entry + 6)) * ROWS
        strides = (v_document.to(gl.int64), v_token.to(gl.int64), v_head.to(gl.int64), v_channel.to(gl.int64))
        words, words2, code = quantize(v, document, start + first, head, strides, gl.load(entry + 4) - first, TOP[0], TOP[1], D,
                                        False, PER_TOKEN, MODE, DTYPE)
        exponent = gl.where(code == 255, float("nan"), power(code) if POWERS else (code - 127).to(gl.float32))
        store_group(v_group, exponent, head, tile, k_count, lane, V_GROUP, True)
        finite = gl.where(code == 255, 0, -1)
        store_transposed(v_t, words & along(finite, words), head, tile, k_count, 0, D)
        if SIZE < D:
            store_transposed(v_t, words2 & along(finite, words2), head, tile, k_count, SIZE, D)
        if SAVE:
            store_saved(v_codes, v_scales, words, words2, code, lane, document, (start + first).to(gl.int64), head, kv_heads,
                         scale_document, scale_head, length - first, D)


@gluon.jit(do_not_specialize=["q_document", "q_token", "q_head", "q_channel", "k_document", "k_token", "k_head", "k_channel",
                              "v_document", "v_token", "v_head", "v_channel", "q_scale_document", "q_scale_head",
                              "k_scale_document", "k_scale_head", "q_heads", "kv_heads", "q_count", "k_count", "query_documents"])
def quantize_kernel(q, k, v, q_codes, q_scales, k_codes, k_scales, v_codes, v_scales, v_t, k_group, v_group, documents, q_tiles,
                    k_tiles, q_document, q_token, q_head, q_channel, k_document, k_token, k_head, k_channel, v_document, v_token,
                    v_head, v_channel, q_scale_document, q_scale_head, k_scale_document, k_scale_head, q_heads, kv_heads, q_count,
                    k_count, query_documents, D: gl.constexpr, ROTATE: gl.constexpr, SAVE: gl.constexpr,
                    QK_PER_TOKEN: gl.constexpr, V_PER_TOKEN: gl.constexpr, QK_MODE: gl.constexpr, V_MODE: gl.constexpr,
                    DTYPE: gl.constexpr, Q_TOP: gl.constexpr, K_TOP: gl.constexpr, V_TOP: gl.constexpr):
    """Programs: heads x tiles of Q, then of K (heads run fastest), then of V (tiles run fastest: v_t's rows run along tokens).

    x_document, x_token, x_head, x_channel: strides of an input, in units of 16 bytes (mode "vector") or elements.
    x_scale_document, x_scale_head: strides of the scale codes, beside 1 per token.
    q_heads, kv_heads, q_count, k_count: heads and padded tiles; query_documents: documents whose queries are not zero.
    X_TOP: exponent and fraction bits of the bound of scaled maxima (`bound`).
    """
    K_GROUP: gl.constexpr = 1 if QK_PER_TOKEN else GROUP
    program = gl.program_id(0)
    q_programs = q_heads * q_count
    k_programs = kv_heads * k_count
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, per_lane(64, halves_of(D))))
    if program < q_programs + k_programs:
        is_key = program >= q_programs
        index = program - q_programs if is_key else program
        heads = kv_heads if is_key else q_heads
        head = index % heads
        tile = index // heads
        document = gl.load((k_tiles if is_key else q_tiles) + tile)
        if document >= 0:
            entry = documents + document * 8
            start = gl.load(entry + (2 if is_key else 0))
            length = gl.load(entry + (3 if is_key else 1))
            valid = gl.load(entry + 4) if is_key else gl.where(document < query_documents, length, 0)
            first = (tile - gl.load(entry + (6 if is_key else 5))) * ROWS
            x = k if is_key else q
            strides = ((k_document if is_key else q_document).to(gl.int64), (k_token if is_key else q_token).to(gl.int64),
                       (k_head if is_key else q_head).to(gl.int64), (k_channel if is_key else q_channel).to(gl.int64))
            words, words2, code = quantize(x, document, start + first, head, strides, valid - first,
                                            gl.where(is_key, K_TOP[0], Q_TOP[0]), gl.where(is_key, K_TOP[1], Q_TOP[1]), D, ROTATE,
                                            QK_PER_TOKEN, QK_MODE, DTYPE)
            scale = gl.where(code < 255, power(code), float("nan"))
            scale = gl.where(lane // K_GROUP * K_GROUP < length - first, scale, 1.0)
            store_group(k_group, scale, head, tile, k_count, lane, K_GROUP, is_key)
            store_saved(k_codes if is_key else q_codes, k_scales if is_key else q_scales, words, words2, code, lane, document,
                         (start + first).to(gl.int64), head, heads, k_scale_document if is_key else q_scale_document,
                         k_scale_head if is_key else q_scale_head, length - first, D)
    else:
        store_values(v, v_codes, v_scales, v_t, v_group, documents, k_tiles, program - q_programs - k_programs, v_document, v_token,
                     v_head, v_channel, k_scale_document, k_scale_head, kv_heads, k_count, D, V_PER_TOKEN, False, SAVE, V_MODE,
                     DTYPE, V_TOP)

@dataclass(frozen=True)
class Quantized:
    """Outputs of `quantize_qkv`; v_codes and v_scales only if saved.

    q_codes, k_codes, v_codes: uint8 in the inputs' shapes, contiguous; q_scales, k_scales, v_scales: uint8 E8M0 codes [B, H, S] or
    [H, T]. v_t: uint8 [Hkv, D, 128 k_tiles]. k_group, v_group: float32 [Hkv, 4 k_tiles], one per 32 keys; [Hkv, 128 k_tiles],
    one per key, where the recipe's layout is per_row. Workspace columns of tiles past the last document are not written.
    """

    q_codes: Tensor
    q_scales: Tensor
    k_codes: Tensor
    k_scales: Tensor
    v_codes: Tensor | None
    v_scales: Tensor | None
    v_t: Tensor
    k_group: Tensor
    v_group: Tensor


def refusal(recipe: Recipe, head_dim: int) -> str | None:
    """Why this quantizer cannot serve an effective recipe at a head_dim, or None if it can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim: got {head_dim}; accepted: {', '.join(map(str, HEAD_DIMS))}"
    for name, operand in (("qk", recipe.qk), ("v", recipe.v)):
        if not (operand.has_token_scales and operand.element == E4M3.name and operand.rule == "ceil"):
            return f"{name}: got {operand}; accepted: e4m3/token_block/ceil, e4m3/per_row/ceil"
    return "q_prescale: got True; accepted: False" if recipe.q_prescale else None


def bound(top: float) -> tuple[int, int]:
    """Exponent of frexp(top), and its fraction as the 23 bits after the leading one; 2^23, above all, where it rounds up to 1."""
    fraction, exponent = math.frexp(top)
    return exponent, round((2 * fraction - 1) * 2**23)


def _tops(recipe: Recipe, head_dim: int) -> dict[str, tuple[int, int]]:
    """Bounds of the scaled maxima, as `reference.operands.operand_tops` and the element format give them."""
    tops = {"Q_TOP": recipe.q_top, "K_TOP": recipe.k_top * min(1.0, 128 / head_dim), "V_TOP": 0.0}
    return {name: bound(top or E4M3.max_value) for name, top in tops.items()}


def _is_vector(x: Tensor) -> bool:
    """Whether every token's channels are whole, aligned pieces of 16 bytes, and offsets in a tile fit 32 bits."""
    outer = [stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    near = x.stride(-3) * x.element_size() * TILE // 4 < 2**31
    return x.stride(-1) == 1 and near and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in outer)


def mode_of(*operands: Tensor) -> str:
    """How a program loads: 16 bytes a lane, or elements with lanes along tokens or along channels."""
    if all(map(_is_vector, operands)):
        return "vector"
    return "tokens" if operands[0].stride(-3) == 1 and operands[0].stride(-1) != 1 else "channels"


def strides_of(x: Tensor, mode: str, packed: bool) -> tuple[int, int, int, int]:
    """Strides of document (beside those of its tokens, which are counted through), token, head and channel."""
    unit = 16 // x.element_size() if mode == "vector" else 1
    *batch, token, head, channel = (stride // unit if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return (0 if packed else batch[0] - x.shape[1] * token), token, head, channel


def _check(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, packed: bool) -> None:
    rank = 3 if packed else 4
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != rank or x.dtype != query.dtype or x.dtype not in DTYPES or x.shape[-1] != query.shape[-1]:
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)} beside query {query.dtype} {tuple(query.shape)}; accepted: "
                             f"one dtype of {', '.join(map(str, DTYPES))}, {rank} dimensions and one head_dim")
    if problem := refusal(recipe, query.shape[-1]):
        raise ValueError(problem)


def _constants(head_dim: int, dtype: torch.dtype, recipe: Recipe, save: bool, qk_mode: str, v_mode: str) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {"D": head_dim, "ROTATE": recipe.rotates(head_dim), "SAVE": save, "QK_PER_TOKEN": recipe.qk.layout == "per_row",
            "V_PER_TOKEN": recipe.v.layout == "per_row", "QK_MODE": qk_mode, "V_MODE": v_mode, "DTYPE": DTYPES[dtype],
            **_tops(recipe, head_dim)}


def _options(constants: dict[str, Any]) -> dict[str, Any]:
    """Registers for 3 programs of 4 warps or 2 of 8 on a multiprocessor; no FMA, which would change the rotation's roundings."""
    head_dim, vector = constants["D"], constants["QK_MODE"] == constants["V_MODE"] == "vector"
    registers = 128 if head_dim == 96 or (head_dim == 256 and not constants["ROTATE"]) else 168
    return {"num_warps": 8 if head_dim == 256 else 4, "maxnreg": registers if vector else 255, "enable_fp_fusion": False}


def quantize_qkv(query: Tensor, key: Tensor, value: Tensor, tiling: Tiling, recipe: Recipe, *, save: bool,
                 packed: bool) -> Quantized:
    """Quantize query [B, Sq, Hq, D], key and value [B, Sk, Hkv, D], or packed [T, H, D], of `tiling`'s documents.

    bf16, fp16 or fp32 in any strides. Keys at or past a document's valid ones count as zero, as do the rows of no document; their
    codes are 0. ValueError for shapes and recipes that this kernel does not serve (`refusal`).
    """
    recipe = recipe.effective()
    _check(query, key, value, recipe, packed)
    q_heads, kv_heads, head_dim = query.shape[-2], key.shape[-2], key.shape[-1]
    q_count, k_count = tiling.q_tiles.numel(), tiling.k_tiles.numel()

    def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    def codes(x: Tensor) -> tuple[Tensor, Tensor]:
        return empty(tuple(x.shape)), empty((*x.shape[:-3], x.shape[-2], x.shape[-3]))

    def group(operand: Operand) -> Tensor:
        return empty((kv_heads, k_count * (TILE if operand.layout == "per_row" else TILE // BLOCK)), torch.float32)

    (q_codes, q_scales), (k_codes, k_scales) = codes(query), codes(key)
    v_codes, v_scales = codes(value) if save else (None, None)
    result = Quantized(q_codes, q_scales, k_codes, k_scales, v_codes, v_scales, empty((kv_heads, head_dim, TILE * k_count)),
                       group(recipe.qk), group(recipe.v))
    programs = q_heads * q_count + 2 * kv_heads * k_count
    if programs == 0:
        return result
    qk_mode, v_mode = mode_of(query, key), mode_of(value)
    scale_strides = [stride for x in (query, key)
                     for stride in ((0, x.shape[0]) if packed else (x.shape[1] * (x.shape[2] - 1), x.shape[1]))]
    v_saved = (v_codes, v_scales) if save else (result.v_t, result.v_t)
    documents = tiling.documents.shape[0] - packed  # the last of packed documents holds the rows of none
    constants = _constants(head_dim, query.dtype, recipe, save, qk_mode, v_mode)
    with torch.cuda.device(query.device):
        quantize_kernel[(programs,)](
            query, key, value, q_codes, q_scales, k_codes, k_scales, *v_saved, result.v_t, result.k_group, result.v_group,
            tiling.documents, tiling.q_tiles, tiling.k_tiles, *strides_of(query, qk_mode, packed),
            *strides_of(key, qk_mode, packed), *strides_of(value, v_mode, packed), *scale_strides, q_heads,
            kv_heads, q_count, k_count, documents, **constants, **_options(constants))
    return result


def variants(everything: bool) -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict, dict[str, Any]]]:
    """What the static gate compiles: name, kernel, signature, constants, attributes, options."""
    cases = [("mxfp8", head_dim, torch.bfloat16, True, "vector") for head_dim in HEAD_DIMS]
    cases += [("mxfp8", 128, torch.float32, True, "channels")]
    if everything:
        cases += [("mxfp8", head_dim, torch.bfloat16, False, "vector") for head_dim in HEAD_DIMS]
        cases += [(recipe, 128, torch.bfloat16, False, "vector") for recipe in ("mxfp8_fast", "mxfp8:causal_safety=exact")]
        cases += [("mxfp8:rotation=always", head_dim, torch.bfloat16, True, "vector") for head_dim in (64, 96, 256)]
        cases += [("mxfp8", 128, dtype, True, "vector") for dtype in (torch.float16, torch.float32)]
        cases += [("mxfp8", 128, torch.bfloat16, True, "tokens"), ("mxfp8", 256, torch.float16, True, "channels")]
    names = quantize_kernel.arg_names
    pointers = names[:names.index("q_document")]
    for recipe, head_dim, dtype, save, mode in cases:
        constants = _constants(head_dim, dtype, resolve(recipe).effective(), save, mode, mode)
        elements = {"q": DTYPES[dtype], "k": DTYPES[dtype], "v": DTYPES[dtype], "k_group": "fp32", "v_group": "fp32",
                    "documents": "i32", "q_tiles": "i32", "k_tiles": "i32"}
        signature = {name: "*" + elements.get(name, "u8") if name in pointers else "constexpr" if name in constants else "i32"
                     for name in names}
        aligned = {(position,): [["tt.divisibility", 16]] for position in range(len(pointers))}
        title = f"{recipe.replace(':', '-').replace('=', '-')}-{head_dim}-{DTYPES[dtype]}-{mode}-{'save' if save else 'infer'}"
        yield f"quantize-{title}", quantize_kernel, signature, constants, aligned, _options(constants)
