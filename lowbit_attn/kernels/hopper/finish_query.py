"""The one-pass kernel's float16 dQ to the gradient of query: undo its exponents, the softmax scale, the rotation.

    partial   [128 q_tiles, H * D] float16 in padded tiles;  exponent  [H, 128 q_tiles] float32, of each row
    out       [tokens, H, D] in the gradient's dtype

A program takes 128 rows of one head, a row per lane (see `quantize_tile`).
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit_attn.kernels.hopper.inline import pair, pair_bf16
from lowbit_attn.kernels.hopper.quantize import DTYPES
from lowbit_attn.kernels.hopper.quantize_tile import ROWS, along, load_channels, per_lane, store_codes
from lowbit_attn.kernels.tiling import Tiling


@gluon.jit
def _words(even, odd, DTYPE: gl.constexpr):
    """Channels [128, D / 2] as words of the output's dtype."""
    if DTYPE == "bf16":
        words = pair_bf16(even, odd)
    elif DTYPE == "fp16":
        words = pair(even, odd)
    else:
        words = gl.reshape(gl.join(even, odd), [ROWS, 2 * even.shape[1]]).to(gl.int32, bitcast=True)
    return words


@gluon.jit(do_not_specialize=["scale", "heads", "q_count"])
def finish_query(partial, exponent, out, documents, q_tiles, scale, heads, q_count, D: gl.constexpr, ROTATE: gl.constexpr,
                 DTYPE: gl.constexpr):
    """Programs: heads x query tiles."""
    head = gl.program_id(0) % heads
    tile = gl.program_id(0) // heads
    document = gl.load(q_tiles + tile)
    if document >= 0:
        entry = documents + document * 8
        first = (tile - gl.load(entry + 5)) * ROWS
        token = (gl.load(entry) + first).to(gl.int64)
        rows = gl.load(entry + 1) - first
        pitch = (heads * (D // 8)).to(gl.int64)
        strides = (pitch, pitch, gl.to_tensor(D // 8).to(gl.int64), pitch)
        even, odd = load_channels(partial, 0, tile.to(gl.int64) * ROWS, head, strides, rows, D, ROTATE, "vector", "fp16")
        lane = gl.arange(0, ROWS, gl.SliceLayout(1, per_lane(64, 1)))
        factor = gl.exp2(gl.load(exponent + head.to(gl.int64) * (q_count * ROWS) + tile * ROWS + lane)) * scale
        words = _words(even * along(factor, even), odd * along(factor, odd), DTYPE)
        # Words of the output where there are four codes: so many channels, as far as the addresses go.
        store_codes(out, words, token, head, heads, rows, 0, 4 * words.shape[1])


def finished_query(partial: Tensor, exponent: Tensor, out: Tensor, tiling: Tiling, *, scale: float, rotate: bool) -> None:
    """Fill `out` [B, S, H, D] or [T, H, D], contiguous, from `partial` and `exponent`; head_dim 64 or 128."""
    heads, head_dim = out.shape[-2:]
    q_count = tiling.q_tiles.numel()
    constants: dict[str, Any] = {"D": head_dim, "ROTATE": rotate, "DTYPE": DTYPES[out.dtype]}
    with torch.cuda.device(out.device):
        finish_query[(heads * q_count,)](partial, exponent, out, tiling.documents, tiling.q_tiles, scale, heads, q_count,
                                         **constants, num_warps=4)
