"""What test_hopper_forward does not say of nvfp4_fp8: its operands bit for bit, exact scores, long sums, ablations, gradients.

Expected numbers come from `formats` on the CPU, document by document; every output buffer is poisoned before a launch.
"""

import math
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from block_bounds import relative
from hopper_inputs import DOCUMENTS, adversarial, climbing, inputs, normal, packed
from test_hopper_forward import compare

import lowbit_attn
from lowbit_attn import formats
from lowbit_attn.ops import LowbitFallbackWarning
from lowbit_attn.recipes import resolve
from lowbit_attn.reference.operands import code_per_token, round_operand, working_qk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                                  reason="needs a Hopper GPU")]

KEY_ORDER = torch.arange(16).view(2, 4, 2).permute(1, 0, 2).reshape(16)
LAYOUTS = ("nvfp4_fp8", "nvfp4_fp8:qk=e2m1/nvfp16")


@contextmanager
def poisoned():
    """Every buffer that torch.empty returns holds 0xA5 bytes."""
    empty = torch.empty

    def filled(*args, **options):
        x = empty(*args, **options)
        x.view(torch.uint8).fill_(0xA5)
        return x

    with patch.object(torch, "empty", filled):
        yield


def assert_operands(q, k, v, recipe, lengths=None):
    """`quantize_nvfp4` of dense q, k, v [B, S, H, D] holds the reference's numbers; keys past `lengths` count as zero."""
    from lowbit_attn.kernels.hopper.nvfp4_attention import prepare

    parsed, (batch, keys, kv_heads, _) = resolve(recipe), k.shape
    limits = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    with poisoned():
        found = prepare(q, k, v, parsed, key_lengths=limits).quantized
    exists = torch.arange(keys) < torch.tensor(lengths or [keys] * batch)[:, None]
    hidden = ~exists[:, :, None, None]
    q, k, v = q.cpu(), k.cpu().masked_fill(hidden, 0), v.cpu().masked_fill(hidden, 0)
    for mine, working in zip((found.q, found.k), working_qk(q, k, parsed, 1.0), strict=True):
        wanted = round_operand(working, parsed.qk)
        assert torch.equal(mine.cpu().float().isnan(), wanted.isnan())
        assert torch.equal(mine.cpu().float().nan_to_num(), wanted.nan_to_num())
    coded, tiles = code_per_token(v.transpose(1, 2), parsed.v), -(-keys // 128)
    codes = torch.where(coded.scales[..., None] == 255, 0, coded.codes)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, 128 * tiles - keys)).permute(1, 3, 0, 2).flatten(2)
    assert torch.equal(found.v_t.cpu(), codes.unflatten(-1, (-1, 16))[..., KEY_ORDER].flatten(2))
    scales = formats.decode_e8m0(coded.scales)[..., ::32]
    mine = found.v_scale.cpu().view(kv_heads, batch, 4 * tiles).transpose(0, 1)[..., :scales.shape[-1]]
    torch.testing.assert_close(mine, scales, rtol=0, atol=0, equal_nan=True)


class TestOperands:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("recipe", LAYOUTS)
    def test_numbers_are_the_references(self, recipe, head_dim, dtype):
        q, k, v = (normal(2, tokens, heads, head_dim, seed=n, dtype=dtype)
                   for n, (tokens, heads) in enumerate([(300, 4), (333, 2), (333, 2)]))
        assert_operands(q, k, v, recipe)
        assert_operands(q, k, v, recipe, lengths=[333, 70])

    @pytest.mark.parametrize("recipe", LAYOUTS)
    def test_any_strides(self, recipe):
        q, k, v = (normal(2, 4, 128, 300, seed=n).permute(0, 3, 1, 2) for n in range(3))  # tokens fastest
        assert_operands(q, k, v, recipe)
        q, k, v = (normal(2, 300, 4, 260, seed=n)[..., 3:131] for n in range(3))  # not aligned to 16 bytes
        assert_operands(q, k, v, recipe)

    @pytest.mark.parametrize("recipe", LAYOUTS)
    def test_blocks_of_all_sizes(self, recipe):
        generator = torch.Generator("cuda").manual_seed(6)
        exponent = torch.randint(-40, 20, (2, 300, 2, 8, 1), generator=generator, device="cuda").float()
        q, k, v = ((normal(2, 300, 2, 8, 16, seed=n, dtype=torch.float32) * torch.exp2(exponent)).flatten(3) for n in range(3))
        q[:, 5], k[:, 40:80] = 0, 0
        q[:, 6] *= 1e-25
        q[:, 7] *= 1e25
        assert_operands(q, k, v, f"{recipe}{':' if ':' not in recipe else ','}rotation=none")

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("recipe", LAYOUTS)
    def test_broken_blocks(self, recipe, value):
        tensors = [normal(1, 300, 2, 64, seed=n) for n in range(3)]
        for x in tensors:
            x[0, 133, 1, 20] = value
        assert_operands(*tensors, recipe)

    def test_ties_round_to_even(self):
        grid = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 5.5, 6.0], device="cuda")
        x = (grid * (torch.arange(300, device="cuda")[:, None] % 8 + 8)).repeat(1, 4).bfloat16()[None, :, None]
        for recipe in LAYOUTS:
            assert_operands(x, -x, x, recipe)


def test_exact_scores_give_exact_outputs():
    # One-hot Q of 1.5 and K of 0, -2, -4 or -6 are exact in NVFP4, and scores multiples of 3: weights are powers of two.
    generator = torch.Generator("cuda").manual_seed(5)
    q = 1.5 * torch.eye(128, device="cuda")[None, None].repeat(1, 1, 3, 1)
    k = -2.0 * torch.randint(0, 3, (1, 1, 500, 128), generator=generator, device="cuda").float()
    k[..., 15::16] = -6  # each block's maximum is one of its numbers times a power of two
    v = torch.randint(-2, 3, (1, 1, 500, 128), generator=generator, device="cuda").float()
    options = {"recipe": "nvfp4_fp8:rotation=none", "scale": math.log(2.0), "return_lse": True}
    output, lse = lowbit_attn.attention(q, k, v, backend="hopper", **options)
    reference, reference_lse = lowbit_attn.attention(q, k, v, backend="reference", **options)
    torch.testing.assert_close(output, reference, rtol=2.0**-20, atol=2.0**-22)  # division and logarithm differ in the last bits
    torch.testing.assert_close(lse, reference_lse, rtol=2.0**-20, atol=2.0**-22)


@pytest.mark.parametrize("keys", [32768, pytest.param(131072, marks=pytest.mark.full)])
def test_sums_over_many_keys_lose_nothing_beyond_a_block(keys):
    # FP8 products are cut at 2^-13 of a sum of 32; the rest is the output's own rounding and flipped codes.
    q, k, v = normal(1, 1, 256, 128, seed=1), normal(1, 1, keys, 128, seed=2), normal(1, 1, keys, 128, seed=3) + 0.5
    output, reference = (lowbit_attn.attention(q, k, v, recipe="nvfp4_fp8", backend=backend) for backend in ("hopper", "reference"))
    assert relative(output, reference) < 2.0**-8


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["sharp", "climbing", "staircase", "wild values"])
@pytest.mark.parametrize("recipe", ["nvfp4_fp8:qk=e2m1/nvfp16", "nvfp4_fp8:maximum=online,max_threshold=0",
                                    "nvfp4_fp8:max_threshold=40", "nvfp4_fp8:rotation=none"])
def test_ablations(recipe, name, causal):
    compare(*(adversarial() | climbing())[name], recipe, is_causal=causal)


class TestGradients:
    def test_they_come_from_the_inputs_that_the_forward_saved(self):
        tensors = [x.requires_grad_() for x in inputs(1, 400, 400, 4, 2, 128)]
        grads = {}
        for backend in ("hopper", "reference"):
            output = lowbit_attn.attention(*tensors, recipe="nvfp4_fp8", is_causal=True, enable_gqa=True, backend=backend)
            grads[backend] = torch.autograd.grad(output.float().square().sum(), tensors)
        for a, b in zip(grads["hopper"], grads["reference"], strict=True):
            assert torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0) > 0.9995

    def test_packed_documents_too(self):
        q, k, v, *bounds = packed(DOCUMENTS["mixed"], 4, 2, 128, tail=77)
        tensors, grads = [x.requires_grad_() for x in (q, k, v)], {}
        for backend in ("hopper", "reference"):
            output = lowbit_attn.varlen_attention(*tensors, *bounds, recipe="nvfp4_fp8", is_causal=True, enable_gqa=True,
                                                  backend=backend)
            grads[backend] = torch.autograd.grad(output.float().square().sum(), tensors)
        for a, b in zip(grads["hopper"], grads["reference"], strict=True):
            assert torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0) > 0.9995

    def test_their_backward_says_by_name_that_it_is_not_hoppers(self):
        from lowbit_attn.ops import dispatch

        dispatch._warn_once.cache_clear()
        tensors = [x.requires_grad_() for x in inputs(1, 64, 64, 1, 1, 64)]
        with pytest.warns(LowbitFallbackWarning, match="nvfp4_fp8 after backend 'hopper' runs Triton.*read saved codes"):
            lowbit_attn.attention(*tensors, recipe="nvfp4_fp8").float().sum().backward()
