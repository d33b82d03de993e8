"""The Hopper forward in blocks of 32 equals the reference, for every recipe, shape and kind of input; its operands do bit for bit.

Bounds as in test_hopper_forward: what a score is off by moves some codes of P to their neighbours.
"""

import math

import pytest
import torch
from block_bounds import RISES, allowed, assert_close, relative, rising, scores
from hopper_inputs import DOCUMENTS, SHAPES, adversarial, climbing, inputs, normal, packed, padded_keys

import lowbit_attn
from lowbit_attn.ops import LowbitFallbackWarning
from lowbit_attn.recipes import resolve
from lowbit_attn.reference.operands import round_operand, working_qk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                                  reason="needs a Hopper GPU")]

RECIPES = ("fused_mxfp8", "fused_mxfp6", "fused_mxfp4", "mxattention", "mxfp4_ocp")
ABLATIONS = ("fused_mxfp6:p=e2m1/mx32/oas", "fused_mxfp4:rotation=none", "mxattention:p=e2m3/mx32", "mxattention:row_sum=exact",
             "mxattention:q_prescale=true", "mxfp4_ocp:p=e2m1/mx32/ceil")


def compare(q, k, v, recipe, **options):
    run = [lowbit_attn.attention(q, k, v, recipe=recipe, enable_gqa=True, return_lse=True, backend=backend, **options)
           for backend in ("hopper", "reference")]
    assert_close(*run, scores(q, k, options.get("scale")), q.shape[-1], recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, recipe):
    compare(*inputs(*shape), recipe)


@pytest.mark.parametrize("recipe", ABLATIONS)
def test_ablations(recipe):
    compare(*inputs(2, 300, 333, 4, 2, 128), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
class TestOptions:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_dtypes(self, recipe, dtype):
        compare(*inputs(1, 300, 300, 2, 2, 128, dtype), recipe)

    def test_key_lengths(self, recipe):
        q, k, v, lengths = padded_keys()
        compare(q, k, v, recipe, key_lengths=lengths)

    @pytest.mark.parametrize("scale", [-0.1, 0.0, 0.5])
    def test_scales(self, recipe, scale):
        compare(*inputs(1, 300, 300, 2, 2, 128), recipe, scale=scale)

    def test_strided_offset_and_expanded_views(self, recipe):
        q, k, v = inputs(2, 300, 300, 4, 2, 128)
        wide = torch.zeros(2, 4, 300, 260, device="cuda", dtype=q.dtype)
        wide[..., 4:132] = q
        by_token = k.transpose(1, 2).contiguous().transpose(1, 2)
        shared = v[:, :1].expand(-1, 2, -1, -1)
        viewed = lowbit_attn.attention(wide[..., 4:132], by_token, shared, recipe=recipe, enable_gqa=True)
        assert torch.equal(viewed, lowbit_attn.attention(q, k, shared.contiguous(), recipe=recipe, enable_gqa=True))

    @pytest.mark.parametrize("shape", [(0, 8, 8), (2, 0, 8), (2, 8, 0)], ids=str)
    def test_empty_tensors(self, recipe, shape):
        output, lse = lowbit_attn.attention(*inputs(*shape, 2, 2, 64), recipe=recipe, return_lse=True)
        assert output.shape == (shape[0], 2, shape[1], 64)
        assert (output == 0).all()
        assert lse.isneginf().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_outlier_of_v_shows_in_its_channel_only(recipe):
    # That channel is one weight of each row times the outlier, and a few rows with the largest weights make up its norm.
    q, k, v = adversarial()["outlier"]
    (output, lse), (reference, reference_lse) = (lowbit_attn.attention(q, k, v, recipe=recipe, return_lse=True, backend=backend)
                                                 for backend in ("hopper", "reference"))
    channels = torch.arange(128, device="cuda") != 3
    assert_close((output[..., channels], lse), (reference[..., channels], reference_lse), scores(q, k), 128, recipe)
    assert relative(output[..., 3], reference[..., 3]) < 3 * allowed(scores(q, k), 128, recipe)[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["sharp", "climbing", "falling", "late spike", "wild values", "quiet values", "zeros",
                                  "tiny", "mean", "first tile far above", "first tile far below", "staircase"])
def test_adversarial_inputs(name, recipe):
    compare(*(adversarial() | climbing())[name], recipe)


@pytest.mark.parametrize("name", RISES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("recipe", RECIPES)
def test_maxima_rise_around_promotions(recipe, head_dim, name):
    keys, heights = RISES[name]
    q, k, v = inputs(1, 200, keys, 2, 2, head_dim)
    compare(*rising(q, k, v, heights), recipe)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("recipe", RECIPES)
def test_maxima_rise_in_one_document_only(recipe, head_dim):
    keys, heights = RISES["between two promotions"]
    q, k, v, *bounds = packed([300, 200, 33], 2, 2, head_dim, 77, keys=[300, keys, 33])
    for head in range(2):
        own, its = (slice(300, 500), head), (slice(300, 300 + keys), head)
        q[own], k[its], v[its] = rising(q[own], k[its], v[its], heights)
    results = [lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe, return_lse=True, backend=backend)
               for backend in ("hopper", "reference")]
    assert_close(*results, scores(q.transpose(0, 1), k.transpose(0, 1)), head_dim, recipe)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operand", range(3), ids="qkv")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_broken_input_breaks_the_rows_that_read_its_block_and_no_other(recipe, operand, value):
    tensors = list(inputs(1, 700, 700, 2, 2, 128))
    tensors[operand][0, 1, 333, 7] = value
    (output, lse), (reference, reference_lse) = (lowbit_attn.attention(*tensors, recipe=recipe, return_lse=True, backend=backend)
                                                 for backend in ("hopper", "reference"))
    assert torch.equal(output.isnan(), reference.isnan())
    assert torch.equal(lse.isnan(), reference_lse.isnan())


@pytest.mark.parametrize("recipe", RECIPES)
class TestPacked:
    @pytest.mark.parametrize("documents", DOCUMENTS)
    def test_documents(self, recipe, documents):
        q, k, v, *bounds = packed(DOCUMENTS[documents], 4, 2, 128, tail=77)
        results = [lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe, enable_gqa=True, return_lse=True,
                                                backend=backend) for backend in ("hopper", "reference")]
        assert_close(*results, scores(q.transpose(0, 1), k.transpose(0, 1)), q.shape[-1], recipe)

    def test_keys_of_other_lengths(self, recipe):
        q, k, v, *bounds = packed([300, 0, 1, 700, 33], 4, 4, 64, 3, keys=[100, 5, 0, 900, 33])
        results = [lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe, return_lse=True, backend=backend)
                   for backend in ("hopper", "reference")]
        assert_close(*results, scores(q.transpose(0, 1), k.transpose(0, 1)), q.shape[-1], recipe)

    def test_a_document_moves_no_other_by_a_bit(self, recipe):
        q, k, v, *bounds = packed([300, 260, 500], 2, 2, 128, tail=10)
        before = lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe)
        for x in (q, k, v):
            x[300:560] = torch.nan
        after = lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe)
        assert torch.equal(before[:300], after[:300])
        assert torch.equal(before[560:], after[560:])
        assert after[300:560].isnan().all()

    def test_boundaries_that_make_no_sense_stay_in_bounds(self, recipe):
        q, k, v, *_ = packed([500], 2, 2, 64, tail=0)
        cu = torch.tensor([-5, 400, 3, 10_000, 0, 500], dtype=torch.int32, device="cuda")
        lowbit_attn.varlen_attention(q, k, v, cu, cu, 500, 500, recipe=recipe)
        torch.cuda.synchronize()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("keys", [32768, pytest.param(131072, marks=pytest.mark.full)])
def test_accumulation_error_stays_small_over_many_keys(recipe, keys):
    q, k, v = normal(1, 1, 256, 128, seed=1), normal(1, 1, keys, 128, seed=2), normal(1, 1, keys, 128, seed=3) + 0.5
    output, reference = (lowbit_attn.attention(q, k, v, recipe=recipe, backend=backend) for backend in ("hopper", "reference"))
    assert relative(output, reference) < 0.015


@pytest.mark.parametrize("recipe", ["fused_mxfp6", "mxattention"])
class TestRuns:
    def test_every_element_is_written(self, recipe):
        q, k, v, *bounds = packed(DOCUMENTS["mixed"], 4, 2, 128, tail=77)
        torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
        try:
            output, lse = lowbit_attn.varlen_attention(q, k, v, *bounds, recipe=recipe, enable_gqa=True, return_lse=True)
        finally:
            torch.use_deterministic_algorithms(False)
        assert output.isfinite().all()
        assert not lse.isnan().any()

    def test_runs_and_graph_replays_are_bitwise_equal(self, recipe):
        q, k, v = inputs(2, 700, 700, 4, 2, 128)
        eager = lowbit_attn.attention(q, k, v, recipe=recipe, enable_gqa=True)
        assert torch.equal(eager, lowbit_attn.attention(q, k, v, recipe=recipe, enable_gqa=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = lowbit_attn.attention(q, k, v, recipe=recipe, enable_gqa=True)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(eager, captured)

    def test_hopper_is_chosen_without_a_word(self, recipe, recwarn):
        assert lowbit_attn.explain(recipe).backend == "hopper"
        lowbit_attn.attention(*inputs(1, 64, 64, 1, 1, 64), recipe=recipe)
        assert not [w for w in recwarn if issubclass(w.category, LowbitFallbackWarning)]


def operands(q, k, v, recipe, count=True):
    """What the operands of dense q, k, v [B, S, H, D] stand for, in token order, [B, H, S, D]; and the quantizer's counts."""
    from lowbit_attn.kernels.hopper.block_attention import prepare
    from lowbit_attn.kernels.hopper.quantize_blocks import SHIFTS
    recipe, (batch, tokens, kv_heads, dim) = resolve(recipe), k.shape
    result, tiles = prepare(q, k, v, recipe, count=count).quantized, -(-tokens // 128)
    q_shift, k_shift, _ = SHIFTS[recipe.qk.element]
    key = torch.arange(128, device="cuda")
    c, u, j, e = key >> 5, key >> 2 & 7, key >> 1 & 1, key & 1
    value_of = [x.view(torch.float8_e4m3fn).float() for x in (result.q, result.k, result.v_t)]
    query = value_of[0].transpose(1, 2) * torch.exp2(result.q_scales.float() - 127 - q_shift)[..., None]
    scale = result.k_group.view(kv_heads, batch, -1).permute(1, 0, 2).repeat_interleave(32, -1)[..., None]
    place = 16 * u + 8 * (1 - j) + 2 * c + e
    by_key = value_of[1].view(batch, tiles, 128, kv_heads, dim)[:, :, place].flatten(1, 2).transpose(1, 2)
    by_key = by_key * scale * 2.0 ** -(k_shift - (dim == 256))
    place = 16 * u + 4 * c + 2 * e + j
    value = value_of[2].view(kv_heads, dim, batch, tiles, 128)[..., place].flatten(-2).permute(2, 0, 3, 1)
    return query, by_key[:, :, :tokens], value[:, :, :tokens] * result.v_scale[:batch, :, None], result.inexact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_are_the_references_numbers(recipe, head_dim, dtype):
    q, k, v = (normal(2, tokens, heads, head_dim, seed=n, dtype=dtype) for n, (tokens, heads) in enumerate([(300, 4), (333, 2),
                                                                                                            (333, 2)]))
    parsed = resolve(recipe)
    working = working_qk(q.transpose(1, 2), k.transpose(1, 2), parsed, head_dim**-0.5)
    wanted = (*(round_operand(x, parsed.qk) for x in working), round_operand(v.transpose(1, 2), parsed.v, axis=-2))
    *found, inexact = operands(q, k, v, recipe)
    different = [int((a != b).sum()) for a, b in zip(found, wanted, strict=True)]
    assert different == inexact.tolist()
    if parsed.qk.element == "e4m3":  # E4M3's own smallest numbers, under the scale of a louder block
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() <= b.abs().amax() * 2.0**-12
    else:
        assert different == [0, 0, 0]


def test_what_e4m3_does_not_hold_is_counted():
    q, k, v = (normal(1, 64, 1, 64, seed=n) for n in range(3))
    q[:, 5, :, :32] *= 2.0**-14  # the first block's scale is 14 doublings below the second's; E2M3 has 7 to spare in Q
    query, _, _, inexact = operands(q, k, v, "fused_mxfp6:rotation=none")
    parsed = resolve("fused_mxfp6:rotation=none")
    wanted = round_operand(working_qk(q.transpose(1, 2), k.transpose(1, 2), parsed, 64**-0.5)[0], parsed.qk)
    assert inexact.tolist() == [int((query != wanted).sum()), 0, 0]
    assert 0 < inexact[0] <= 32
