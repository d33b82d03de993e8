"""Whole calls of the Hopper forward in blocks of 32 on a CPU: host code, tables, quantizers and kernel, all by their own source,
equal the reference. Tables and V's quantizer run in Triton's interpreter, Gluon as plain Python (`gluon_warpgroups`), packed
instructions as what they mean (`gluon_packed`)."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from block_bounds import PROMOTE, RISES, TILE, assert_close, rising, scores
from interpreted import only_interpreted, run_interpreted, starts_interpreter

from lowbit_attn.recipes import resolve
from lowbit_attn.reference import Visibility, forward, varlen_forward

pytest.importorskip("triton", reason="Triton runs on Linux only")

RECIPES = ("fused_mxfp8", "fused_mxfp6", "fused_mxfp4")
HEAD_DIMS = (64, 128, 256)
FEW = ("level", "at the promotion", "between two promotions")
ALL = [(recipe, dim, name) for recipe in RECIPES for dim in HEAD_DIMS for name in RISES]
CASES = [x for x in ALL if x[2] in FEW or (x[0] == "fused_mxfp6" and x[2] != "after the promotion")]  # packed documents have that
OTHERS = [x for x in ALL if x not in CASES]
VARIANTS = ("mxattention", "mxfp4_ocp", "mxattention:row_sum=exact", "fused_mxfp6:p=e2m1/mx32/oas")


def test_rises_are_where_the_kernel_promotes():
    from lowbit_attn.kernels.hopper.block_attention import FROZEN, ONLINE

    assert {config.promote for configs in (FROZEN, ONLINE) for config in configs.values()} == {PROMOTE}


@starts_interpreter
def test_calls_equal_the_reference():
    run_interpreted(__file__, "TestInterpreted")


@pytest.mark.full
@starts_interpreter
def test_more_calls_equal_the_reference():
    run_interpreted(__file__, "TestMoreInterpreted")


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def call():
    """`ops.hopper.forward` on CPU tensors, two programs to a kernel; what it reads before it was written is NaN."""
    import triton_interpreter  # noqa: F401
    from gluon_packed import packed_instructions
    from gluon_warpgroups import Kernel

    from lowbit_attn.kernels.hopper import block_attention, blocks, fused, inline, quantize_blocks, quantize_tile, work_queue
    from lowbit_attn.kernels.hopper import forward_tiles as family
    from lowbit_attn.ops import hopper

    attention = Kernel(fused.attention, fused, blocks, inline, family, work_queue)
    quantizer = Kernel(quantize_blocks._quantize_qk, quantize_blocks, quantize_tile)
    with (packed_instructions(), patch.object(fused, "attention", attention),
          patch.object(quantize_blocks, "_quantize_qk", quantizer), patch.object(block_attention, "processors", lambda device: 2),
          patch.object(torch.cuda, "device", lambda device: nullcontext())):
        torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
        yield hopper.forward
        torch.use_deterministic_algorithms(False)


def dense(call, q, k, v, recipe, key_lengths=None):
    """[B, H, S, D] by the kernels and by the reference."""
    recipe = resolve(recipe)
    by_token = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    output, lse, *_ = call(*by_token, recipe, scale=None, is_causal=False, save=False, key_lengths=key_lengths)
    wanted = forward(q, k, v, recipe, Visibility.create(q.shape[0], q.shape[2], k.shape[2], is_causal=False,
                                                        key_lengths=key_lengths))
    return (output.transpose(1, 2), lse), (wanted.output.to(output.dtype), wanted.lse)


def check(call, recipe, head_dim, name, queries=100):
    """One head of ordinary inputs whose scores rise as `RISES` says."""
    keys, heights = RISES[name]
    q, k, v = (normal(1, 1, tokens, head_dim, seed=n) for n, tokens in enumerate((queries, keys, keys)))
    q, k, v = rising(q, k, v, heights)
    assert_close(*dense(call, q, k, v, recipe), scores(q, k), head_dim, recipe)


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@only_interpreted
class TestInterpreted:
    @pytest.mark.parametrize(("recipe", "head_dim", "name"), CASES)
    def test_rises(self, call, recipe, head_dim, name):
        check(call, recipe, head_dim, name)

    @pytest.mark.parametrize("recipe", ["fused_mxfp6", "mxattention"])
    def test_a_rise_in_a_last_tile_that_promotes(self, call, recipe):
        first = 2 * PROMOTE * TILE
        q, k, v = (normal(1, 1, tokens, 64, seed=n) for n, tokens in enumerate((70, first + 71, first + 71)))
        q, k, v = rising(q, k, v, {key: 0.0 if key < first else 10.5 if key == first + 37 else -20.0 for key in range(first + 71)})
        assert_close(*dense(call, q, k, v, recipe), scores(q, k), 64, recipe)

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_packed_documents(self, call, recipe, head_dim):
        (long, heights), parsed = RISES["after the promotion"], resolve(recipe)
        queries, keys, tail = [40, 3, 0, 1, 70], [long, 0, 130, 33, 300], 20
        q, k, v = (normal(sum(lengths) + tail, 1, head_dim, seed=n) for n, lengths in enumerate((queries, keys, keys)))
        own, its = (slice(0, 40), 0), (slice(0, long), 0)
        q[own], k[its], v[its] = rising(q[own], k[its], v[its], heights)
        for x in (q, k, v):
            x[-tail:] = torch.nan
        cu_seq = (bounds(queries), bounds(keys))
        output, lse, *_ = call(q, k, v, parsed, scale=None, is_causal=False, save=False, cu_seq=cu_seq)
        wanted = varlen_forward(q, k, v, *cu_seq, parsed, is_causal=False)
        assert_close((output, lse), (wanted.output.to(output.dtype), wanted.lse), scores(q.transpose(0, 1), k.transpose(0, 1)),
                     head_dim, recipe)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_key_lengths_and_heads_that_share_keys(self, call, recipe):
        q, k, v = (normal(3, heads, 200, 64, seed=n) for n, heads in enumerate((4, 2, 2)))
        lengths = torch.tensor([200, 0, 129], dtype=torch.int32)
        k[2, :, 129:], v[2, :, 129:], v[1] = torch.nan, torch.inf, torch.nan
        assert_close(*dense(call, q, k, v, recipe, lengths), scores(q, k), 64, recipe)

    @pytest.mark.parametrize("keys", [33, 130])
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_keys_that_do_not_exist_have_no_weight(self, call, recipe, keys):
        # Past the end K is zero: such scores would be 20 doublings above all others.
        q, k, v = (normal(1, 1, tokens, 64, seed=n) for n, tokens in enumerate((70, keys, keys)))
        q, k, v = rising(q, k, v, dict.fromkeys(range(keys), -20.0))
        assert_close(*dense(call, q, k, v, recipe), scores(q, k), 64, recipe)


@only_interpreted
class TestMoreInterpreted:
    @pytest.mark.parametrize(("recipe", "head_dim", "name"), OTHERS)
    def test_rises(self, call, recipe, head_dim, name):
        check(call, recipe, head_dim, name)

    @pytest.mark.parametrize("name", RISES)
    @pytest.mark.parametrize("recipe", VARIANTS)
    def test_other_recipes_of_the_kernel(self, call, recipe, name):
        check(call, recipe, 64, name)
