"""Emulated products multiply exactly what codes and scales stand for, also where Hopper's E4M3 operands hold other numbers: every
operand of every product is looked at, in Triton's interpreter."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from block_bounds import rising
from interpreted import INTERPRETED, only_interpreted, run_interpreted, starts_interpreter
from oracle import relative_error

from lowbit_attn import formats
from lowbit_attn.recipes import RECIPES
from lowbit_attn.reference import Visibility, forward, softmax
from lowbit_attn.reference.operands import round_operand, working_qk

pytest.importorskip("triton", reason="Triton runs on Linux only")

if INTERPRETED:
    import triton_interpreter
    from gluon_warpgroups import Kernel

from lowbit_attn.kernels.portable import attention
from lowbit_attn.kernels.portable.targets import TARGETS

D, TILE = 64, 128
NAMES = ("fused_mxfp6", "fused_mxfp4", "mxfp4_ocp")
recipes = pytest.mark.parametrize("recipe", NAMES)

E4M3_SPAN = 448.0 / 2.0**-9
"""Between the largest and the smallest number that E4M3 holds relative to one exponent."""


@starts_interpreter
def test_operands_are_the_codes_values():
    run_interpreted(__file__, "TestInterpreted")


def adversarial(recipe, queries=40, keys=170):
    """q, k, v [1, 1, S, D] with blocks of 32 far below others that share an exponent with them on Hopper: its query token's, its 32
    keys', its channel's. Q and K are so after the recipe's rotation, which undoes the one here. Some keys' scores are 14 doublings
    above others of their tile."""
    q, k, v = (torch.randn(1, 1, tokens, D) for tokens in (queries, keys, keys))
    q, k, v = rising(q, k, v, {key: 14.0 if key % 40 == 7 else 0.0 for key in range(keys)})
    q[..., 5, :32] *= 2.0**-16
    k[..., 40, 32:] *= 2.0**-16
    v[..., :32, 3] *= 2.0**-20
    return (*(formats.hadamard(x) if RECIPES[recipe].rotates(D) else x for x in (q, k)), v)


def hopper_inexact(q, k, v, recipe):
    """How many numbers of Q, K and V Hopper's operands do not hold."""
    from lowbit_attn.kernels.hopper import block_attention, quantize_blocks, quantize_tile

    quantizer = Kernel(quantize_blocks._quantize_qk, quantize_blocks, quantize_tile)
    with (patch.object(quantize_blocks, "_quantize_qk", quantizer), patch.object(block_attention, "processors", lambda device: 2),
          patch.object(torch.cuda, "device", lambda device: nullcontext())):
        by_token = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return block_attention.prepare(*by_token, RECIPES[recipe], count=True).quantized.inexact


def products(q, k, v, recipe, architecture):
    """Output, lse and (left, right, product) of every product that the forward's programs make, in order."""
    made, dot = [], triton_interpreter.interpreter.InterpreterBuilder.create_dot

    def recording(self, a, b, *rest):
        result = dot(self, a, b, *rest)
        assert a.dtype.name == b.dtype.name == "bf16"
        left, right = (torch.from_numpy(triton_interpreter._widened(x).data.copy()) for x in (a, b))
        made.append((left, right, torch.from_numpy(result.data.copy())))
        return result

    prepared = attention.prepare(*(x.transpose(1, 2) for x in (q, k, v)), RECIPES[recipe], target=TARGETS[architecture])
    with patch.object(triton_interpreter.interpreter.InterpreterBuilder, "create_dot", recording):
        output, lse = attention.run(prepared)
    return output.transpose(1, 2), lse, made


def specified_p(scores, recipe, keys):
    """P as the reference multiplies it, tile by tile, from the base-two scores of tiles [R, 128] of which `keys` keys exist."""
    rows, made = scores[0].shape[0], []
    state = softmax.RowState(RECIPES[recipe], (1, 1, 1, rows), D, scores[0])

    def product(p, value, visible):
        made.append(p[0, 0, 0])
        return torch.zeros(1, 1, 1, rows, D)

    with patch.object(softmax, "visible_product", product):
        for tile, x in enumerate(scores):
            seen = min(TILE, keys - tile * TILE)
            state.update(x[None, None, None, :, :seen].clone(), softmax.ValueTile(torch.zeros(1, 1, seen, D)), None, slice(0, rows))
    return made


def risen(queries, heights):
    """q, k, v [1, 1, S, D] whose scores with each key rise by its doublings."""
    return rising(*(torch.randn(1, 1, tokens, D) for tokens in (queries, len(heights), len(heights))), heights)


def specified(q, k, v):
    return forward(q, k, v, RECIPES["fused_mxfp6"], Visibility.create(1, q.shape[2], k.shape[2], is_causal=False), stats=True)


def assert_equal(q, k, v):
    """The kernel's `fused_mxfp6` equals the reference's, which is returned; bounds as in test_portable_forward.py."""
    output, lse, _ = products(q, k, v, "fused_mxfp6", "sm_80")
    wanted = specified(q, k, v)
    assert relative_error(output, wanted.output) < 2e-3
    torch.testing.assert_close(lse, wanted.lse, rtol=0, atol=2e-3)
    return wanted


@only_interpreted
class TestInterpreted:
    @pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
    @recipes
    def test_every_operand(self, recipe, architecture):
        if TARGETS[architecture].is_native(RECIPES[recipe]):
            pytest.skip("native")
        q, k, v = adversarial(recipe)
        parsed, queries, keys = RECIPES[recipe], q.shape[2], k.shape[2]
        _, _, made = products(q, k, v, recipe, architecture)
        work_q, work_k = working_qk(q, k, parsed, D**-0.5)
        wanted_q, wanted_k = (round_operand(x, parsed.qk)[0, 0] for x in (work_q, work_k))
        wanted_v = round_operand(v, parsed.v, axis=-2)[0, 0]
        factor = 1.0 if parsed.q_prescale else D**-0.5 * attention.LOG2E
        scores = [product[:queries] * factor for *_, product in made[::2]]
        wanted_p = specified_p(scores, recipe, keys)
        assert len(made) == 2 * -(-keys // TILE)
        for tile, ((left, right, _), (p, value, _)) in enumerate(zip(made[::2], made[1::2], strict=True)):
            part = slice(tile * TILE, min(keys, (tile + 1) * TILE))
            seen = part.stop - part.start
            assert torch.equal(left[:queries], wanted_q)
            assert torch.equal(right.mT[:seen], wanted_k[part])
            assert torch.equal(value[:seen], wanted_v[part])
            assert torch.equal(p[:queries, :seen], wanted_p[tile])
            assert not p[:queries, seen:].any()
        live = torch.cat(wanted_p, 1)
        assert (live.amax(1) / torch.where(live > 0, live, torch.inf).amin(1)).max() > E4M3_SPAN

    @recipes
    def test_hopper_does_not_hold_these_numbers(self, recipe):
        lost = hopper_inexact(*adversarial(recipe), recipe)
        assert (lost > 0).all()

    def test_many_keys_far_below_a_frozen_maximum_keep_their_weight(self):
        # One key of the first tile is 10 doublings above the others, which outweigh it (docs/numerics.md, Blocks of 32 on Hopper).
        q, k, v = risen(20, {key: 10.0 if key == 60 else 0.0 for key in range(5 * TILE)})
        wanted = assert_equal(q, k, v)
        assert (wanted.lse - specified(q, k[..., :TILE, :], v[..., :TILE, :]).lse).max() > 0.1

    def test_maxima_roll_back_as_the_references_do(self):
        # Past 128 doublings above the first maximum the affine exponential has no more patterns.
        wanted = assert_equal(*risen(20, {key: 45.0 * (key // TILE) for key in range(4 * TILE)}))
        assert wanted.stats.rollbacks > 30
