"""The portable quantizer equals `formats` bit for bit; run in Triton's interpreter, so no GPU is needed."""

import pytest
import torch
from interpreted import INTERPRETED, only_interpreted, run_interpreted, starts_interpreter

from lowbit_attn import formats
from lowbit_attn.recipes import Operand

pytest.importorskip("triton", reason="Triton runs on Linux only")

if INTERPRETED:
    import triton_interpreter  # noqa: F401

from lowbit_attn.kernels.portable.quantize import Work, quantize
from lowbit_attn.kernels.portable.targets import TARGETS, operand_kind
from lowbit_attn.kernels.tiling import TILE, dense_tiling, packed_tiling

E4M3_LAYOUTS = ("token_block", "per_row", "mx32")
ALONG_CHANNELS = [*(f"e4m3/{layout}" for layout in E4M3_LAYOUTS), "e4m3/token_block/floor", "e2m1/mx32/uos", "e2m1/mx32/floor",
                  "e2m1/per_row", "e2m1/nvfp16", "e2m1/nvfp16_token", "e2m3/mx32", "e2m3/token_block", "e2m3/nvfp16",
                  "e4m3/nvfp16_token"]
ALONG_TOKENS = [*(f"e4m3/{layout}" for layout in (*E4M3_LAYOUTS, "per_tensor")), "e2m1/mx32/uos", "e2m1/mx32", "e2m3/mx32"]
UNITS = set().union(*(target.native for target in TARGETS.values()))
"""Operands that some matrix unit takes."""


@starts_interpreter
def test_codes_and_scales_equal_formats():
    run_interpreted(__file__, "TestInterpreted")


def numbers(*shape, broken=False):
    """Tokens of very different sizes, with a zero block, a subnormal one, one of ties between codes and, if asked, one with Inf and
    one with NaN."""
    x = torch.randn(*shape) * torch.exp2(torch.randint(-12, 12, shape[:2]).float())[..., None, None]
    x[0, 32:64, 0] = 0
    x[0, 64:96, 0] *= 2.0**-130
    x[0, 96:128, 0] = 1 + torch.arange(shape[-1]) % 64 / 16
    if broken:
        x[0, 5, 1, 3], x[0, 40, 1, 0] = torch.nan, torch.inf
    return x


def rounded(x, operand, along_tokens):
    """Values of x [N, H, S, D] by `formats`, and whether a token is part of a broken block. Bfloat16 holds all but those of
    the scales next to 2^-127."""
    axis = -2 if along_tokens and operand.is_one_dimensional else -1
    values = formats.round_to_blocks(x, formats.element_format(operand.element), formats.block_layout(operand.layout), operand.rule,
                                     axis=axis)
    return values, values.isnan().any(-1)


def unpacked(result, operand, along_tokens, tokens):
    """What native codes and scales [heads, tiles * 128, ..] of one document stand for."""
    element, codes = formats.element_format(operand.element), result.values
    heads = codes.shape[0]
    if element.bits == 4:
        low, high = codes & 15, codes >> 4
        codes = torch.stack([low, high], 2 if along_tokens else -1)
        codes = codes.flatten(1, 2) if along_tokens else codes.flatten(-2)
    values = formats.decode(codes, element)
    if along_tokens:
        scales = formats.decode_e8m0(result.scales).permute(0, 1, 3, 2).reshape(heads, -1, codes.shape[-1])
        return (values * scales.repeat_interleave(32, 1))[:, :tokens]
    if operand.layout.startswith("nvfp16"):
        scales = formats.decode_ue4m3(result.scales).repeat_interleave(16, -1)
        return (values * scales * result.side[..., None])[:, :tokens]
    return (values * formats.decode_e8m0(result.scales).repeat_interleave(32, -1))[:, :tokens]


@only_interpreted
class TestInterpreted:
    @pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])
    @pytest.mark.parametrize("text", ALONG_CHANNELS)
    def test_operands_along_channels(self, text, native):
        operand = Operand.parse(text)
        if native and operand_kind(operand) not in UNITS:
            pytest.skip("no matrix unit takes it")
        x = numbers(1, 150, 2, 64, broken=True)
        tiling = dense_tiling(x, 150, align="none", key_lengths=None, block_rows=64)
        result = quantize(x, tiling, Work(operand, 0, native=native), packed=False)
        values, _ = rounded(x.transpose(1, 2), operand, False)
        found, values = (unpacked(result, operand, False, 150), values) if native else (result.values[:, :150], values.bfloat16())
        torch.testing.assert_close(found, values[0], rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])
    @pytest.mark.parametrize("text", ALONG_TOKENS)
    def test_values_with_their_scales_and_broken_blocks_marked(self, text, native):
        operand = Operand.parse(text)
        if native and (operand.layout == "per_row" or operand_kind(operand) not in UNITS):
            pytest.skip("no matrix unit takes it")
        x = numbers(1, 150, 2, 64, broken=True)
        tiling = dense_tiling(x, 150, align="none", key_lengths=None, block_rows=64)
        result = quantize(x, tiling, Work(operand, 2, along_tokens=True, native=native), packed=False)
        values, broken = rounded(x.transpose(1, 2), operand, True)
        found, values = (unpacked(result, operand, True, 150), values) if native else (result.values[:, :150], values.bfloat16())
        if operand.layout == "mx32":  # a token is marked as a whole if one of its 32-token blocks is broken
            broken = torch.nn.functional.pad(broken, (0, 10)).unflatten(-1, (-1, 32)).any(-1).repeat_interleave(32, -1)[..., :150]
        assert torch.equal(found, torch.where(broken[0, ..., None], 0.0, values[0]))
        assert torch.equal(result.side[:, :150], torch.where(broken[0], 128.0, 0.0))

    @pytest.mark.parametrize("layout", ["token_block", "per_row"])
    def test_running_exponents_stay_outside(self, layout):
        operand = Operand("e4m3", layout)
        x = numbers(1, 150, 2, 64, broken=True)
        tiling = dense_tiling(x, 150, align="none", key_lengths=None, block_rows=64)
        result = quantize(x, tiling, Work(operand, 2, along_tokens=True, keep_scale=False), packed=False)
        wanted = formats.quantize(x.transpose(1, 2), formats.E4M3, formats.block_layout(layout))
        exponent = formats.scale_per_token(wanted)[0].float() - 127
        decoded = formats.decode(wanted.codes, formats.E4M3)[0]
        assert torch.equal(result.side[:, :150], exponent)
        assert torch.equal(result.values[:, :150].float(), torch.where(exponent[..., None] == 128, 0.0, decoded))

    @pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 256])
    def test_rotation_prescale_and_saved_codes(self, head_dim):
        operand = Operand("e4m3", "token_block")
        x = numbers(2, 70, 2, head_dim, broken=True).bfloat16()
        tiling = dense_tiling(x, 70, align="none", key_lengths=None, block_rows=64)
        work = Work(operand, 0, rotate=True, prescale=0.3, top=14.0, save=True)
        result = quantize(x, tiling, work, packed=False)
        wanted = formats.quantize(formats.hadamard(x.transpose(1, 2)) * 0.3, formats.E4M3, formats.block_layout("token_block"),
                                  top=14.0)
        assert torch.equal(result.codes, wanted.codes.transpose(1, 2))
        assert torch.equal(result.saved_scales, formats.scale_per_token(wanted))
        values = result.values.view(2, 2, TILE, -1)[:, :, :70, :head_dim].transpose(0, 1)
        torch.testing.assert_close(values, formats.dequantize(wanted).bfloat16(), rtol=0, atol=0, equal_nan=True)

    def test_keys_past_their_length_count_as_zero_before_any_scale(self):
        x = numbers(3, 150, 2, 64)
        lengths = torch.tensor([150, 0, 40], dtype=torch.int32)
        padded = x.clone()
        for n, length in enumerate(lengths.tolist()):
            padded[n, length:] = torch.nan
            x[n, length:] = 0
        work = Work(Operand("e4m3", "token_block"), 2, save=True)
        results = [quantize(y, dense_tiling(y, 150, align="none", key_lengths=given, block_rows=64), work, packed=False)
                   for y, given in ((x, None), (padded, lengths))]
        for name in ("values", "codes", "saved_scales"):
            full, cut = (getattr(result, name) for result in results)
            assert torch.equal(full, cut)

    def test_packed_documents_share_no_scale_and_rows_of_none_are_zero(self):
        x = numbers(1, 300, 2, 64)[0].transpose(0, 1).contiguous().transpose(0, 1)  # heads first in memory
        cu = torch.tensor([0, 10, 10, 200, 290], dtype=torch.int32)
        tiling = packed_tiling(x, 300, cu, cu, align="none", block_rows=64)
        result = quantize(x, tiling, Work(Operand("e4m3", "token_block"), 2, save=True), packed=True)
        for start, stop in ((0, 10), (10, 200), (200, 290)):
            wanted = formats.quantize(x[start:stop].transpose(0, 1), formats.E4M3, formats.block_layout("token_block"))
            assert torch.equal(result.codes[start:stop].transpose(0, 1), wanted.codes)
            assert torch.equal(result.saved_scales[:, start:stop], formats.scale_per_token(wanted))
        assert not result.codes[290:].any()
