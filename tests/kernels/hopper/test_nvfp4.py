"""The Hopper forward of nvfp4_fp8 as far as a CPU can show: its device functions as plain Python (`gluon_on_cpu`) against the
reference, what its operands hold, what it serves and saves."""

import math
from types import SimpleNamespace

import pytest
import torch
from gluon_on_cpu import BARRIER, Pointer, Tiles, Value, on_cpu

from lowbit_attn import formats
from lowbit_attn.recipes import Operand, resolve
from lowbit_attn.reference import Visibility, forward
from lowbit_attn.reference.operands import code_per_token, round_operand, working_qk

pytest.importorskip("triton", reason="Triton runs on Linux only")

RECIPE = resolve("nvfp4_fp8")


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(queries, keys, heads=1, kv_heads=1, head_dim=64):
    return (normal(1, heads, queries, head_dim, seed=1), normal(1, kv_heads, keys, head_dim, seed=2),
            normal(1, kv_heads, keys, head_dim, seed=3))


NO_MORE = SimpleNamespace(load=lambda layout: Value(torch.tensor([1])))
"""The queue's slot after the only entry."""


def tiles_of(x, key_dim):
    """x padded with zeros to whole tiles of 128 keys, in a list."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 128) if key_dim == 0 else (0, -x.shape[1] % 128))
    return padded.split(128, key_dim)


def attend(q, k, v, *, causal=False, valid=None, recipe=RECIPE, scale=None):
    """Output and lse [1, H, S, ...] of `nvfp4.consume` for [1, H, S, D], both warpgroups, on the reference's operands."""
    from lowbit_attn.kernels.hopper import forward_tiles as family
    from lowbit_attn.kernels.hopper import nvfp4, work_queue

    (_, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    valid = keys if valid is None else valid
    scale = dim**-0.5 if scale is None else scale
    exists = (torch.arange(keys) < valid)[:, None]
    k, v = torch.where(exists, k, 0), torch.where(exists, v, 0)
    q_values, k_values = (round_operand(x, recipe.qk) for x in working_qk(q, k, recipe, scale))
    coded = code_per_token(v, recipe.v)
    broken = coded.scales == 255
    codes = torch.where(broken[..., None], 0, coded.unscaled(recipe.v))
    # Keys (j, c, e) of each 16 as (c, j, e).
    turned = [[t.unflatten(1, (-1, 2, 4, 2)).transpose(2, 3).flatten(1) for t in tiles_of(codes[0, head].T, 1)]
              for head in range(kv_heads)]
    tiles = -(-keys // 128)
    v_scale = torch.ones(kv_heads, tiles * 4)
    blocks = torch.where(broken, torch.nan, formats.decode_e8m0(coded.scales))[0, :, ::32]
    v_scale[:, :blocks.shape[1]] = blocks
    out, lse = torch.full((queries, heads, dim), 7.0), torch.full((heads, queries), 7.0)
    with on_cpu(nvfp4, family, work_queue):
        for block in range(0, queries, 128):
            rows = min(128, queries - block)
            diagonal = block if causal else 1 << 29
            count = max(1, -(-max(0, min(valid, rows + diagonal)) // 128))
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                # One work entry of one head: the pointers start at its own numbers.
                work = torch.tensor([[0, rows, 0, valid, 0, diagonal, count, 0]], dtype=torch.int32)
                for warpgroup in range(2):
                    first = block + 64 * warpgroup
                    part = torch.zeros(64, dim)
                    part[:max(0, queries - first)] = q_values[0, head, first:first + 64]
                    ring = [Tiles(list(x)[:count]) for x in (tiles_of(k_values[0, kv_head], 0), turned[kv_head])]
                    barriers = [BARRIER, BARRIER, ring[0].full, BARRIER, ring[1].full, BARRIER]
                    one_out, one_lse = torch.full((128, 1, dim), 7.0), torch.full((128,), 7.0)
                    nvfp4.consume(Pointer(one_out), Pointer(one_lse), Pointer(v_scale[kv_head].contiguous()), Pointer(work),
                                  Pointer(torch.tensor([1], dtype=torch.int32)), NO_MORE, BARRIER, Value(part), *ring, *barriers,
                                  1, 1, 0, 0, tiles, scale * math.log2(math.e), 1, warpgroup, 2, recipe.max_threshold, dim, 3)
                    mine = slice(64 * warpgroup, min(64 * (warpgroup + 1), rows))
                    out[block + mine.start:block + max(mine.start, mine.stop), head] = one_out[mine, 0]
                    lse[head, block + mine.start:block + max(mine.start, mine.stop)] = one_lse[mine]
    return out.transpose(0, 1)[None], lse[None]


def compare(q, k, v, *, causal=False, valid=None, recipe=RECIPE, scale=None):
    """Scores differ from the reference's in their last bits, which may flip a code of P in a row or two."""
    lengths = None if valid is None else torch.tensor([valid])
    visibility = Visibility.create(1, q.shape[2], k.shape[2], is_causal=causal, key_lengths=lengths)
    wanted = forward(q, k, v, recipe, visibility, scale=scale)
    output, lse = attend(q, k, v, causal=causal, valid=valid, recipe=recipe, scale=scale)
    assert torch.equal(output.isnan(), wanted.output.isnan())
    assert torch.equal(lse.isneginf(), wanted.lse.isneginf())
    assert torch.equal(lse.isnan(), wanted.lse.isnan())
    torch.testing.assert_close(lse, wanted.lse, rtol=2.0**-21, atol=2.0**-18, equal_nan=True)
    size = wanted.output.nan_to_num().norm(dim=-1)
    rows = (output - wanted.output).nan_to_num().norm(dim=-1) / torch.where(size == 0, 1.0, size)
    assert (rows > 2.0**-17).float().mean() < 0.02
    assert rows.max() < 2.0**-6


class TestKernel:
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads", "head_dim"), [
        (1, 1, 1, 1, 64), (128, 128, 1, 1, 64), (200, 333, 2, 1, 128), (300, 300, 1, 1, 256)])
    def test_equals_the_reference(self, queries, keys, heads, kv_heads, head_dim, causal):
        compare(*inputs(queries, keys, heads, kv_heads, head_dim), causal=causal)

    @pytest.mark.parametrize("valid", [0, 1, 128, 270])
    def test_keys_past_the_valid_ones_are_hidden(self, valid):
        compare(*inputs(130, 333), valid=valid)
        compare(*inputs(130, 333), valid=valid, causal=True)

    @pytest.mark.parametrize("recipe", ["nvfp4_fp8:qk=e2m1/nvfp16", "nvfp4_fp8:maximum=online,max_threshold=0",
                                        "nvfp4_fp8:max_threshold=100"])
    def test_other_scales_and_maxima(self, recipe):
        q, k, v = inputs(100, 400)
        compare(q, 4 * k * torch.linspace(0, 2, 400)[:, None], v, recipe=resolve(recipe))

    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize("name", ["sharp", "climbing", "falling", "late spike", "wild values", "zeros", "tiny"])
    def test_adversarial_inputs(self, name, causal):
        q, k, v = inputs(300, 300)
        ramp = torch.linspace(0, 40, 300)[:, None]
        if name == "sharp":
            q, k = 8 * q, 4 * k
        elif name in ("climbing", "falling"):
            k = k * (ramp if name == "climbing" else ramp.flip(0))
        elif name == "late spike":
            k[:, :, 290] = 40 * q[:, :, 295]
        elif name == "wild values":
            v = v * torch.exp2(torch.randint(-40, 40, (300, 1), generator=torch.Generator().manual_seed(4)).float())
        else:
            q, k, v = (x * factor for x, factor in zip((q, k, v), (0, 0, 0) if name == "zeros" else (1e-20, 1e-20, 1e-36),
                                                       strict=True))
        compare(q, k, v, causal=causal)

    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("operand", range(3), ids="qkv")
    def test_a_broken_input_breaks_the_rows_that_read_its_block_and_no_other(self, operand, value, causal):
        tensors = list(inputs(300, 300))
        tensors[operand][0, 0, 170, 7] = value  # rows 128 to 159 read the tile of this block and not the block
        compare(*tensors, causal=causal)

    def test_scores_that_are_minus_infinity_count_nothing_beside_others(self):
        q, k, v = inputs(70, 300)
        q[:], k[:, :, :128], k[:, :, 128:] = 1e20, -1e20, k[:, :, 128:] * 1e-20
        compare(q, k, v)

    @pytest.mark.parametrize("change", [64, 133, 160])
    def test_later_keys_move_no_earlier_block_by_a_bit(self, change):
        q, k, v = inputs(300, 300)
        before = attend(q, k, v, causal=True)
        k[:, :, change:] *= 64
        v[:, :, change:] *= 4096
        after = attend(q, k, v, causal=True)
        first = change // 32 * 32
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a[:, :, :first], b[:, :, :first])
            assert not torch.equal(a[:, :, change:], b[:, :, change:])


class TestQuantizer:
    def numbers(self, x, layout):
        """What `quantize_nvfp4` makes of tokens x [128, D], as bfloat16."""
        from lowbit_attn.kernels.hopper import quantize_blocks, quantize_nvfp4, quantize_tile
        from lowbit_attn.kernels.hopper.quantize import bound

        with on_cpu(quantize_nvfp4, quantize_blocks, quantize_tile):
            even, odd = Value(x[:, ::2].contiguous()), Value(x[:, 1::2].contiguous())
            token = layout == "nvfp16_token"
            scale = quantize_nvfp4.block_scales(quantize_nvfp4.block_maxima(even, odd, 16), token, bound(448.0))
            words = quantize_nvfp4.pair_bf16(*(quantize_nvfp4.numbers(x, scale, token) for x in (even, odd)))
        return words.data.contiguous().view(torch.bfloat16)

    def compare(self, x, layout):
        wanted = round_operand(x, Operand("e2m1", layout))
        assert torch.equal(wanted.bfloat16().float().nan_to_num(9e30), wanted.nan_to_num(9e30))
        found = self.numbers(x, layout).float()
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())

    @pytest.mark.parametrize("layout", ["nvfp16_token", "nvfp16"])
    @pytest.mark.parametrize("size", [1.0, 1e-5, 1e-20, 1e-32, 1e20, 1e37])
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_numbers_are_the_references_and_exact_in_bfloat16(self, head_dim, size, layout):
        self.compare(normal(128, head_dim, seed=1) * size, layout)

    @pytest.mark.parametrize("layout", ["nvfp16_token", "nvfp16"])
    def test_blocks_of_all_sizes_in_one_token(self, layout):
        exponent = torch.randint(-40, 20, (128, 8, 1), generator=torch.Generator().manual_seed(3)).float()
        x = (normal(128, 128, seed=2).unflatten(1, (8, 16)) * torch.exp2(exponent)).flatten(1)
        x[3] = 0
        x[4, :16] = 0
        x[5, 16:] = 0
        self.compare(x, layout)

    @pytest.mark.parametrize("layout", ["nvfp16_token", "nvfp16"])
    def test_ties_round_to_even(self, layout):
        grid = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 5.5, 6.0])
        scale = torch.arange(128)[:, None] % 8 + 8.0
        x = (grid * scale).repeat(1, 4)
        self.compare(torch.where(torch.arange(64) % 2 == 0, x, -x), layout)

    @pytest.mark.parametrize("layout", ["nvfp16_token", "nvfp16"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_broken_channel_breaks_its_block(self, value, layout):
        x = normal(128, 64, seed=1)
        x[7, 20] = value
        self.compare(x, layout)


def test_what_e4m3_would_lose():
    # The figures of the module's docstring: significant bits of E2M1 magnitudes times UE4M3 scales.
    codes = formats.decode(torch.arange(1, 8, dtype=torch.uint8), formats.E2M1, torch.float64)
    scales = formats.decode(torch.arange(1, 127, dtype=torch.uint8), formats.E4M3, torch.float64)
    products = codes[:, None] * scales
    sixteenths, _ = torch.frexp(products)
    assert products.numel() == 882
    assert int((sixteenths * 16 % 1 != 0).sum()) == 225
    assert torch.equal(products.bfloat16().double(), products)
    x = round_operand(normal(1024, 128, seed=0).bfloat16(), RECIPE.qk)
    sixteenths, _ = torch.frexp(x)
    assert 0.20 < (sixteenths * 16 % 1 != 0).float().mean() < 0.22


@pytest.mark.parametrize(("recipe", "named"), [
    ("nvfp4", "p, v: got"), ("nvfp4_fp8:qk=e2m1/mx32", "qk: got e2m1/mx32"), ("nvfp4_fp8:v=e4m3/mx32", "p, v: got"),
    ("nvfp4_fp8:causal_safety=exact", "p, v: got"), ("nvfp4_fp8:row_sum=quantized", "row_sum"),
    ("nvfp4_fp8:max_threshold=101", "max_threshold: got 101"), ("nvfp4_fp8:key_tile=64", "key_tile"),
    ("nvfp4_fp8:q_prescale=true", "q_prescale"), ("nvfp4_fp8:rotation=always", "rotation: got always")])
def test_what_is_not_served_is_named(recipe, named):
    from lowbit_attn.kernels.hopper.nvfp4_support import refusal
    assert named in (refusal(resolve(recipe).effective()) or "")


def test_prepare_refuses_it_too():
    from lowbit_attn.kernels.hopper.nvfp4_attention import prepare
    x = torch.zeros(1, 8, 1, 64)
    with pytest.raises(ValueError, match="p, v: got"):
        prepare(x, x, x, resolve("nvfp4_fp8:causal_safety=exact"))


def test_the_forward_saves_copies_of_the_inputs_as_the_reference_does():
    from lowbit_attn.ops.saved import flatten_saved, saved_inputs
    q, k, v = (x.transpose(1, 2).bfloat16() for x in inputs(40, 50, 2, 1))
    saved = forward(*(x.transpose(1, 2) for x in (q, k, v)), RECIPE, Visibility(40, 50), save=True).saved
    for mine, wanted in zip(saved_inputs(q, k, v, RECIPE), flatten_saved(saved, packed=False), strict=True):
        assert mine.dtype == wanted.dtype
        assert mine.is_contiguous()
        assert torch.equal(mine, wanted)
    assert saved_inputs(q, k, v, RECIPE)[0].data_ptr() != q.data_ptr()
