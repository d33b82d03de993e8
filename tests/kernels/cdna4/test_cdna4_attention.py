"""The emulated attention kernels equal the reference: at every tile edge, under rollback, with GQA, key lengths and documents."""

import math

import pytest
import torch
from cdna4_calls import RECIPES, recorded, run

from lowbit_attn.cli.checks.cases import allowance, climbing, expected, late_peak, normal, ordinary_allowance, relative
from lowbit_attn.recipes import resolve
from lowbit_attn.reference import varlen_forward

every_recipe = pytest.mark.parametrize("name", RECIPES)
EDGES = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 385, 511, 512, 513]


def assert_equal(found, want, bound):
    (output, lse), (want_output, want_lse) = found, want
    assert relative(output, want_output) <= bound
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=max(bound, 2e-6))


def assert_equal_after_rollback(found, want, height):
    """Where one key holds a row, another code of its P, an eighth at most, is an eighth of the row's sum; the output keeps."""
    bound = allowance(height)
    (output, lse), (want_output, want_lse) = found, want
    assert relative(output, want_output) <= bound
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=math.log(1.125))
    assert float((lse - want_lse).square().mean().sqrt()) <= 4 * bound + 1e-6 * float(want_lse.abs().max())


@every_recipe
@pytest.mark.parametrize("keys", EDGES)
def test_keys_around_tile_edges(emulator, name, keys):
    inputs = normal(33, keys, seed=keys)
    assert_equal(run(emulator, name, *inputs), expected(*inputs, name), ordinary_allowance(name))


@every_recipe
@pytest.mark.parametrize("queries", [1, 32, 255, 256, 257, 513])
def test_queries_around_tile_edges(emulator, name, queries):
    inputs = normal(queries, 130, seed=queries)
    assert_equal(run(emulator, name, *inputs), expected(*inputs, name), ordinary_allowance(name))


@every_recipe
@pytest.mark.full
def test_every_length_to_513(emulator, name):
    for length in range(1, 514):
        inputs = normal(min(length, 70), length, seed=length)
        assert_equal(run(emulator, name, *inputs), expected(*inputs, name), ordinary_allowance(name))


@every_recipe
def test_2048_tokens(emulator, name):
    inputs = normal(2048, 2048)
    assert_equal(run(emulator, name, *inputs), expected(*inputs, name), ordinary_allowance(name))


@every_recipe
@pytest.mark.parametrize("channels", [1, 64, 96, 99, 100])
def test_smaller_head_dims(emulator, name, channels):
    inputs = normal(40, 140, channels=channels)
    assert_equal(run(emulator, name, *inputs), expected(*inputs, name), ordinary_allowance(name))


@every_recipe
def test_climbing_scores_roll_back_in_every_wave(emulator, name):
    inputs = climbing(256, 600)
    records, *found = recorded(emulator, name, *inputs)
    raised = records.slope_maximum.diff(dim=2) > 0
    assert bool(raised[:, :, :4].any(-1).all()), "a wave had a tile without a rollback"
    peak = float(records.scores.max())
    want = expected(*inputs, name)
    assert peak <= 0.25, "a score was left above its new maximum"
    # Sums on their way to a coordinate reach C m, and round there.
    assert_equal_after_rollback(found, want, float(records.slope_maximum.max()))


@every_recipe
@pytest.mark.parametrize("height", [5.0, 30.0, 200.0], ids=["below the gate", "one rollback", "thousands of doublings"])
def test_a_late_peak_takes_the_row(emulator, name, height):
    inputs = late_peak(64, 300, height=height)
    records, *found = recorded(emulator, name, *inputs)
    rise = float(records.slope_maximum.diff(dim=2).max())
    assert (rise > 0) == (height > 5)
    assert_equal_after_rollback(found, expected(*inputs, name), 0.25 + max(0.0625, rise))


@every_recipe
def test_grouped_queries_read_their_head(emulator, name):
    inputs = normal(20, 150, heads=6, kv_heads=2, batch=2)
    assert_equal(run(emulator, name, *inputs), expected(*inputs, name), ordinary_allowance(name))


@every_recipe
def test_key_lengths_hide_what_lies_past_them(emulator, name):
    query, key, value = normal(20, 300, batch=4)
    lengths = torch.tensor([300, 129, 1, 0], dtype=torch.int32)
    want = expected(query, key, value, name, key_lengths=lengths)
    for n, length in enumerate(lengths.tolist()):
        key[n, length:], value[n, length:] = torch.nan, torch.inf
    output, lse = run(emulator, name, query, key, value, key_lengths=lengths)
    assert_equal((output[:3], lse[:3]), (want[0][:3], want[1][:3]), ordinary_allowance(name))
    assert not output[3].any()
    assert bool((lse[3] == -torch.inf).all())


@every_recipe
def test_tail_keys_contribute_exactly_zero(emulator, name):
    """Padding to a whole tile changes no bit: not through P, not through a maximum, not through a scale of P."""
    query, key, value = normal(32, 97)
    padded = [torch.cat([x, 50 * torch.randn(1, 128, 1, 128)], 1) for x in (key, value)]
    lengths = torch.tensor([97], dtype=torch.int32)
    found, want = run(emulator, name, query, *padded, key_lengths=lengths), run(emulator, name, query, key, value)
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out(emulator, name, dtype):
    inputs = [x.to(dtype) for x in normal(40, 200)]
    output, lse = run(emulator, name, *inputs)
    want, want_lse = expected(*inputs, name)
    assert output.dtype == dtype
    assert relative(output, want.to(dtype).float()) <= max(ordinary_allowance(name), torch.finfo(dtype).eps / 16)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-4)


@every_recipe
@pytest.mark.parametrize("scale", [0.02, 1.0, -0.1])
def test_scale_is_folded_into_the_queries(emulator, name, scale):
    inputs = normal(32, 140)
    assert_equal(run(emulator, name, *inputs, scale=scale), expected(*inputs, name, scale=scale), allowance(1.0))


@every_recipe
def test_packed_documents_do_not_see_each_other(emulator, name):
    lengths_q, lengths_k = [3, 0, 260, 40, 5], [130, 7, 20, 0, 256]
    cu_q, cu_k = (torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k))
    query, key, value = (x[0] for x in normal(sum(lengths_q) + 4, sum(lengths_k) + 9, heads=2))
    key[cu_k[-1]:] = torch.nan   # rows of no document
    output, lse = run(emulator, name, query, key, value, cu_seq=(cu_q, cu_k), longest=(260, 300))
    want = varlen_forward(query, key, value, cu_q, cu_k, resolve(name), is_causal=False)
    assert relative(output, want.output) <= ordinary_allowance(name)
    torch.testing.assert_close(lse, want.lse, rtol=1e-6, atol=max(ordinary_allowance(name), 2e-6))


@every_recipe
def test_keys_past_a_bound_that_does_not_hold_are_not_read(emulator, name):
    """Nothing is packed for them: tiles of the longest sequence are all that there is."""
    query, key, value = (x[0] for x in normal(8, 300))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (8, 300))
    found = run(emulator, name, query, key, value, cu_seq=(cu_q, cu_k), longest=(8, 100))
    want = run(emulator, name, query[None], key[None, :128], value[None, :128])
    assert torch.equal(found[0], want[0][0])
    assert torch.equal(found[1], want[1][0])


@every_recipe
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_and_inf_reach_the_rows_that_read_them(emulator, name, where, poison):
    inputs = dict(zip(("query", "key", "value"), normal(40, 140, batch=2), strict=True))
    inputs[where][1, 17, 0, 3] = poison
    found, want = run(emulator, name, **inputs), expected(**inputs, name=name)
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        torch.testing.assert_close(x.nan_to_num(), y.nan_to_num(), rtol=0, atol=1e-3)
    assert bool(found[0].isnan().any())


@every_recipe
def test_scores_beyond_float32_give_nan_and_no_plausible_number(emulator, name):
    query, key, value = normal(8, 300)
    query[0, 2] *= 1e30
    key[0, 200] *= 1e30
    output, lse = run(emulator, name, query, key, value)
    assert bool(output[0, 2].isnan().all())
    assert bool(lse[0, 0, 2].isnan())


@every_recipe
def test_no_queries_and_no_keys(emulator, name):
    query, key, value = normal(5, 3)
    output, lse = run(emulator, name, query, key[:, :0], value[:, :0])
    assert not output.any()
    assert bool((lse == -torch.inf).all())
    output, lse = run(emulator, name, query[:, :0], key, value)
    assert output.shape == (1, 0, 1, 128)
    assert lse.shape == (1, 1, 0)


def test_what_the_kernels_do_not_compute_is_refused(emulator):
    query, key, value = normal(4, 4, channels=160)
    with pytest.raises(ValueError, match="head_dim: got 160"):
        run(emulator, "fused_mxfp6", query, key, value)
    query, key, value = (torch.empty(1, 1, 1, 1).expand(1, 20_000_000, 1, 128) for _ in range(3))
    with pytest.raises(ValueError, match="keys: got 20000000; accepted by backend 'cdna4': up to 15790208"):
        run(emulator, "fused_mxfp6", query, key, value)
    with pytest.raises(ValueError, match="recipe: got 'mxfp8'"):
        run(emulator, "mxfp8", *normal(4, 4))
