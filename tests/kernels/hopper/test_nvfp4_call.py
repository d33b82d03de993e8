"""Whole calls of the Hopper forward of nvfp4_fp8 on a CPU: host code, quantizer, loader and consumers, by their own source.

What is not theirs is stood in for: the tiling by its Python model, V's quantizer by the reference.
"""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from gluon_on_cpu import LANGUAGE, Pointer, Value, on_cpu
from row_bounds import assert_close
from tiling_model import model, packed_lengths

from lowbit_attn import formats
from lowbit_attn.kernels.tiling import Tiling
from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility, forward, varlen_forward
from lowbit_attn.reference.operands import code_per_token

pytest.importorskip("triton", reason="Triton runs on Linux only")

RECIPE = resolve("nvfp4_fp8")
KEY_ORDER = torch.arange(16).view(2, 4, 2).permute(1, 0, 2).reshape(16)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiling_of(query, keys, rows, *, is_causal=False, bottom_right=False, key_lengths=None, cu_seq=None):
    if cu_seq is not None:
        q, k = packed_lengths(cu_seq[0].tolist(), query.shape[0], False), packed_lengths(cu_seq[1].tolist(), keys, True)
        align = "bottom_right" if is_causal else "none"
    else:
        batch, queries = query.shape[:2]
        lengths = [keys] * batch if key_lengths is None else key_lengths.tolist()
        q, k = [(n * queries, queries) for n in range(batch)], [(n * keys, keys, lengths[n]) for n in range(batch)]
        align = ("bottom_right" if bottom_right else "top_left") if is_causal else "none"
    documents, q_tiles, k_tiles, work = (torch.tensor(x, dtype=torch.int32) for x in model(q, k, align, rows))
    return Tiling(documents, q_tiles, k_tiles, work, torch.tensor([len(work), 0], dtype=torch.int32), rows)


def load_channels(x, document, first, head, strides, valid, dim, rotate, mode, dtype):
    row, channel = torch.arange(128)[:, None], torch.arange(dim)
    token = x + document * strides[0] + head * strides[2] + (first * strides[1])
    values = (token + Value(row) * strides[1] + Value(channel) * strides[3]).load(Value(row) < valid, 0).data.float()
    values = formats.hadamard(values) if rotate else values
    return Value(values[:, ::2]), Value(values[:, 1::2])


def store_codes(codes, words, token, head, heads, stored, channel, dim):
    row, column = torch.arange(128)[:, None], torch.arange(words.shape[1])
    start = (token * heads + head) * (dim // 4) + channel // 4
    place = Pointer(codes.memory.view(torch.int32)) + start + Value(row) * (heads * (dim // 4)) + Value(column)
    place.store(words, Value(row) < stored)


class Kernel:
    """A kernel that `run` stands for; `kernel[grid](...)` as Triton has it."""

    def __init__(self, run, kernel):
        self.run, self.body = run, kernel.fn

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.run(self.body, grid, *arguments, **options)


def wrapped(arguments):
    return [Pointer(x) if isinstance(x, torch.Tensor) else Value(x) for x in arguments]


def quantize(body, grid, query, key, value, q, k, v_t, v_scale, documents, q_tiles, k_tiles, *sizes, num_warps, maxnreg,
             enable_fp_fusion, **constants):
    """The quantizer's programs of Q and K by its own source, V's by the reference."""
    from lowbit_attn.kernels.hopper import quantize_blocks, quantize_nvfp4, quantize_tile

    with on_cpu(quantize_nvfp4, quantize_blocks, quantize_tile), patch.multiple(
            quantize_nvfp4, load_channels=load_channels, store_codes=store_codes, store_values=lambda *_: None):
        for program in range(grid[0]):
            with patch.object(LANGUAGE, "program_id", lambda axis, program=program: Value(program)):
                body(*wrapped([query, key, value, q, k, v_t, v_scale, documents, q_tiles, k_tiles, *sizes]), **constants)
    flat = value.reshape(-1, *value.shape[-2:])
    for _, _, start, length, valid, _, tile, _ in documents.tolist():
        x = torch.where((torch.arange(length) < valid)[:, None, None], flat[start:start + length], 0).transpose(0, 1)
        coded, tiles = code_per_token(x[None], RECIPE.v), -(-length // 128)
        codes = torch.nn.functional.pad(torch.where(coded.scales[..., None] == 255, 0, coded.codes)[0],
                                        (0, 0, 0, 128 * tiles - length)).transpose(1, 2)
        v_t[:, :, 128 * tile:128 * (tile + tiles)] = codes.unflatten(-1, (-1, 16))[..., KEY_ORDER].flatten(2)
        scales = formats.decode_e8m0(coded.scales)[0, :, ::32]
        v_scale[:, 4 * tile:4 * tile + scales.shape[1]] = scales


@pytest.fixture
def call():
    """`ops.hopper.forward` on CPU tensors, two programs to a kernel."""
    import gluon_warpgroups

    from lowbit_attn.kernels.hopper import forward_tiles, inline, nvfp4, nvfp4_attention, quantize_nvfp4, work_queue
    from lowbit_attn.ops import hopper

    attention = gluon_warpgroups.Kernel(nvfp4.attention, nvfp4, forward_tiles, inline, work_queue)
    with (patch.object(nvfp4, "attention", attention),
          patch.object(quantize_nvfp4, "quantize_kernel", Kernel(quantize, quantize_nvfp4.quantize_kernel)),
          patch.object(quantize_nvfp4, "mode_of", lambda *_: "channels"), patch.object(nvfp4_attention, "tiling_of", tiling_of),
          patch.object(nvfp4_attention, "processors", lambda device: 2),
          patch.object(torch.cuda, "device", lambda device: nullcontext())):
        yield hopper.forward


class TestDense:
    @pytest.mark.parametrize("causal", [{}, {"is_causal": True}, {"is_causal": True, "bottom_right": True}],
                             ids=["full", "top left", "bottom right"])
    @pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads", "head_dim"), [
        (300, 333, 4, 2, 128), (150, 40, 2, 1, 64), (77, 300, 3, 3, 96), (130, 140, 2, 1, 256)])
    def test_equals_the_reference(self, call, queries, keys, heads, kv_heads, head_dim, causal):
        q, k, v = (normal(2, tokens, count, head_dim, seed=n) for n, (tokens, count) in enumerate(
            ((queries, heads), (keys, kv_heads), (keys, kv_heads))))
        visibility = Visibility.create(2, queries, keys, **{"is_causal": False, **causal})
        wanted = forward(*(x.transpose(1, 2) for x in (q, k, v)), RECIPE, visibility)
        options = {"is_causal": False, **causal}
        output, lse, *saved = call(q, k, v, RECIPE, scale=None, save=True, **options)
        assert_close(output, lse, wanted)
        for mine, x in zip(saved[:6:2], (q, k, v), strict=True):
            assert torch.equal(mine, x)

    @pytest.mark.parametrize("scale", [-0.1, 0.0, 0.5])
    def test_key_lengths_and_scales(self, call, scale):
        q, k, v = (normal(3, 200, heads, 64, seed=n) for n, heads in enumerate((4, 2, 2)))
        lengths = torch.tensor([200, 0, 129], dtype=torch.int32)
        k[2, 129:], v[2, 129:], v[1] = torch.nan, torch.inf, torch.nan
        visibility = Visibility.create(3, 200, 200, is_causal=True, bottom_right=True, key_lengths=lengths)
        wanted = forward(*(x.transpose(1, 2) for x in (q, k, v)), RECIPE, visibility, scale=scale)
        output, lse, *_ = call(q, k, v, RECIPE, scale=scale, is_causal=True, bottom_right=True, key_lengths=lengths, save=False)
        assert_close(output, lse, wanted)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_documents(call, causal):
    lengths = [150, 0, 1, 300, 33]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    q, k, v = (normal(sum(lengths) + 20, heads, 128, seed=n) for n, heads in enumerate((4, 2, 2)))
    q[-20:], k[-20:], v[-20:] = torch.nan, torch.nan, torch.nan
    wanted = varlen_forward(q, k, v, cu, cu, RECIPE, is_causal=causal)
    output, lse, *_ = call(q, k, v, RECIPE, scale=None, is_causal=causal, cu_seq=(cu, cu), save=False)
    assert_close(output, lse, wanted)


def test_rows_of_no_document_are_zero(call):
    from lowbit_attn.kernels.hopper.nvfp4_attention import prepare

    cu = torch.tensor([0, 140], dtype=torch.int32)
    q, k, v = (normal(150, 2, 64, seed=n) for n in range(3))
    quantized = prepare(q, k, v, RECIPE, cu_seq=(cu, cu)).quantized
    for x in (quantized.q, quantized.k):
        assert x[:140].count_nonzero() > 0
        assert x[140:].count_nonzero() == 0
