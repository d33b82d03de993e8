"""Q and K in NVFP4, as the bfloat16 numbers that codes and scales stand for, and V's codes as `quantize` makes them.

Equals `reference.operands` bit for bit: `working_qk`, then `formats.round_to_blocks` with layout nvfp16_token or nvfp16: an E2M1
number times a UE4M3 scale of 16 channels and, in the first, a power of two of the token. The first product has up to six
significant bits: for 225 of the 882 pairs of magnitude and scale, and for 21 % of the elements of normal inputs, E4M3's four do not
hold it, whatever the power of two beside it. bfloat16 has eight, and the exponents of float32: each number is exact from 2^-133 on,
so for tokens whose largest magnitude is 2^-111 or more.

    q, k        bfloat16 [tokens, heads, D]; the 16 channels of a block with NaN or Inf are NaN
    v_t         uint8 [Hkv, D, 128 k_tiles], E4M3 codes, keys in the order of `quantize`
    v_scale     float32 [Hkv, 4 k_tiles], 2^e of each 32 keys, NaN where one is broken
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit_attn.formats import E4M3
from lowbit_attn.kernels.hopper.inline import pair_bf16
from lowbit_attn.kernels.hopper.quantize import DTYPES, bound, mode_of, store_values, strides_of
from lowbit_attn.kernels.hopper.quantize_blocks import block_maxima, rounded
from lowbit_attn.kernels.hopper.quantize_tile import ROWS, load_channels, power, scale_code, store_codes
from lowbit_attn.kernels.tiling import TILE, Tiling
from lowbit_attn.recipes import Recipe

HEAD_DIMS = (64, 128, 256)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def block_scales(maxima, TOKEN: gl.constexpr, TOP: gl.constexpr):
    """Scales of blocks with these maxima [128, n], NaN for those that hold NaN or Inf. TOKEN: times the power of two that brings
    the largest one of the token into UE4M3's top binade; TOP: the bound of that, `bound`(448)."""
    broken = (maxima.to(gl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    sixth = gl.div_rn(gl.where(broken, 0.0, maxima), 6.0)
    if TOKEN:
        line = scale_code(gl.reduce(sixth, 1, _larger), TOP[0], TOP[1])[:, None]
        scale = rounded(sixth * power(254 - line), 3, -6, 448.0) * power(line)
    else:
        scale = rounded(gl.minimum(sixth, 448.0), 3, -6, 448.0)  # `rounded` itself takes numbers up to 2^104
    return gl.where(broken, float("nan"), scale)


@gluon.jit
def numbers(x, scale, TOKEN: gl.constexpr):
    """x [128, n] in E2M1 with its blocks' scales [128, n / 8]: the numbers that codes and scales stand for."""
    BLOCKS: gl.constexpr = scale.shape[1]
    y = x.reshape([ROWS, BLOCKS, 8])
    whole = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(2, y.type.layout)), 2)
    # A scale that is zero holds nothing, and a NaN one makes NaN of everything.
    quotient = gl.where(whole == 0, 0.0, gl.div_rn(y, gl.where(whole == 0, 1.0, whole)))
    if not TOKEN:  # without a power of two of the token a block may be far above what its scale reaches
        quotient = gl.minimum(gl.maximum(quotient, -8.0), 8.0)
    return (rounded(quotient, 1, 0, 6.0) * whole).reshape([ROWS, BLOCKS * 8])


@gluon.jit(do_not_specialize=["q_document", "q_token", "q_head", "q_channel", "k_document", "k_token", "k_head", "k_channel",
                              "v_document", "v_token", "v_head", "v_channel", "q_heads", "kv_heads", "q_count", "k_count",
                              "query_documents"])
def quantize_kernel(q, k, v, q_out, k_out, v_t, v_scale, documents, q_tiles, k_tiles, q_document, q_token, q_head, q_channel,
                    k_document, k_token, k_head, k_channel, v_document, v_token, v_head, v_channel, q_heads, kv_heads, q_count,
                    k_count, query_documents, D: gl.constexpr, ROTATE: gl.constexpr, TOKEN: gl.constexpr, QK_MODE: gl.constexpr,
                    V_MODE: gl.constexpr, DTYPE: gl.constexpr, TOP: gl.constexpr):
    """Programs: heads x tiles of Q, then of K, then of V, and strides, as in `quantize.quantize_kernel`. TOP: `bound`(448)."""
    program = gl.program_id(0)
    q_programs = q_heads * q_count
    k_programs = kv_heads * k_count
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
            even, odd = load_channels(x, document, start + first, head, strides, valid - first, D, ROTATE, QK_MODE, DTYPE)
            scale = block_scales(block_maxima(even, odd, 16), TOKEN, TOP)
            words = pair_bf16(numbers(even, scale, TOKEN), numbers(odd, scale, TOKEN))
            # Words of two numbers where there are four codes: twice as many channels, as far as the addresses go.
            store_codes(k_out if is_key else q_out, words, (start + first).to(gl.int64), head, heads, length - first, 0, 2 * D)
    else:
        store_values(v, v_t, v_t, v_t, v_scale, documents, k_tiles, program - q_programs - k_programs, v_document, v_token, v_head,
                     v_channel, k_count, k_count, kv_heads, k_count, D, False, True, False, V_MODE, DTYPE, TOP)


@dataclass(frozen=True)
class Quantized:
    """Outputs of `quantize_nvfp4`, as the module describes them."""

    q: Tensor
    k: Tensor
    v_t: Tensor
    v_scale: Tensor


def quantize_nvfp4(query: Tensor, key: Tensor, value: Tensor, tiling: Tiling, recipe: Recipe, *, rotate: bool,
                   packed: bool) -> Quantized:
    """Quantize query [B, Sq, Hq, D], key and value [B, Sk, Hkv, D], or packed [T, H, D], of `tiling`'s documents; D of HEAD_DIMS.

    bf16, fp16 or fp32 in any strides, all of one dtype. Keys at or past a document's valid ones count as zero, as do the rows of
    no document.
    """
    q_heads, kv_heads, head_dim = query.shape[-2], key.shape[-2], key.shape[-1]
    q_count, k_count = tiling.q_tiles.numel(), tiling.k_tiles.numel()

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    result = Quantized(empty(*query.shape), empty(*key.shape), empty(kv_heads, head_dim, TILE * k_count, dtype=torch.uint8),
                       empty(kv_heads, 4 * k_count, dtype=torch.float32))
    programs = q_heads * q_count + 2 * kv_heads * k_count
    if programs == 0:
        return result
    qk_mode, v_mode = mode_of(query, key), mode_of(value)
    constants: dict[str, Any] = {"D": head_dim, "ROTATE": rotate, "TOKEN": recipe.qk.layout == "nvfp16_token",
                                 "QK_MODE": qk_mode, "V_MODE": v_mode, "DTYPE": DTYPES[query.dtype], "TOP": bound(E4M3.max_value)}
    with torch.cuda.device(query.device):
        quantize_kernel[(programs,)](
            query, key, value, result.q, result.k, result.v_t, result.v_scale, tiling.documents, tiling.q_tiles, tiling.k_tiles,
            *strides_of(query, qk_mode, packed), *strides_of(key, qk_mode, packed), *strides_of(value, v_mode, packed), q_heads,
            kv_heads, q_count, k_count, tiling.documents.shape[0] - packed, **constants, num_warps=8 if head_dim == 256 else 4,
            maxnreg=255, enable_fp_fusion=False)  # no FMA, which would change the roundings of the rotation
    return result


__all__ = ["HEAD_DIMS", "Quantized", "quantize_nvfp4"]
