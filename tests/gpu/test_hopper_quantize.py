"""The Hopper quantizer equals the reference bit for bit, whatever the shapes, strides, dtypes, documents and values.

Expected codes come from `formats` on the CPU, document by document; every output buffer is poisoned before a launch.
"""

from itertools import pairwise

import pytest
import torch

from lowbit_attn import formats
from lowbit_attn.recipes import resolve
from lowbit_attn.reference.operands import code_per_token, operand_tops, working_qk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                                  reason="needs a Hopper GPU")]

KEY_ORDER = torch.arange(16).view(2, 4, 2).permute(1, 0, 2).reshape(16)


def document_lists(tiling):
    return [row[:7] for row in tiling.documents.tolist()]


def coded(x, operand, top=None):
    """[S, H, D] -> codes [S, H, D], scale codes [H, S]."""
    result = code_per_token(x.transpose(0, 1)[None], operand, top)
    return result.codes[0].transpose(0, 1), result.scales[0]


def expected(q, k, v, tiling, recipe, packed):
    """Every output of the quantizer, computed on the CPU from flattened q, k, v [tokens, H, D]."""
    recipe, head_dim = recipe.effective(), q.shape[-1]
    tops = operand_tops(recipe, head_dim)
    k_tiles, kv_heads = tiling.k_tiles.numel(), k.shape[1]
    out = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        out[f"{name}_codes"] = torch.zeros(x.shape, dtype=torch.uint8)
        out[f"{name}_scales"] = torch.zeros(x.shape[1], x.shape[0], dtype=torch.uint8)
    out["v_t"] = torch.zeros(kv_heads, head_dim, 128 * k_tiles, dtype=torch.uint8)
    out["k_group"], out["v_group"] = torch.ones(kv_heads, 128 * k_tiles), torch.full((kv_heads, 128 * k_tiles), -127.0)
    documents = document_lists(tiling)
    for n, (q_start, q_len, k_start, k_len, k_valid, _, k_tile) in enumerate(documents):
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        exists = (torch.arange(k_len) < k_valid)[:, None, None]
        working = working_qk(q[rows], torch.where(exists, k[keys], 0), recipe, 1.0)
        value = torch.where(exists, v[keys], 0)
        if q_len and not (packed and n == len(documents) - 1):
            out["q_codes"][rows], out["q_scales"][:, rows] = coded(working[0], recipe.qk, tops[0])
        if k_len:
            out["k_codes"][keys], out["k_scales"][:, keys] = coded(working[1], recipe.qk, tops[1])
            out["v_codes"][keys], out["v_scales"][:, keys] = coded(value, recipe.v)
            columns = slice(128 * k_tile, 128 * k_tile + k_len)
            k_scale, v_scale = out["k_scales"][:, keys], out["v_scales"][:, keys]
            out["k_group"][:, columns] = formats.decode_e8m0(k_scale)
            out["v_group"][:, columns] = torch.where(v_scale == 255, torch.nan, v_scale.float() - 127)
            finite = (v_scale != 255)[:, None]
            out["v_t"][:, :, columns] = torch.where(finite, out["v_codes"][keys].permute(1, 2, 0), 0)
    out["v_t"] = out["v_t"].view(kv_heads, head_dim, -1, 16)[..., KEY_ORDER].reshape(out["v_t"].shape)
    for name, operand in (("k", recipe.qk), ("v", recipe.v)):
        if operand.layout == "token_block":
            group = out[f"{name}_group"].view(kv_heads, -1, 32)  # a short last block: its tokens past the end show none
            out[f"{name}_group"] = group[:, :, 0]
    return out


def poisoned(monkeypatch):
    """Makes every buffer that torch.empty returns hold 0xA5 bytes."""
    empty = torch.empty

    def filled(*args, **options):
        x = empty(*args, **options)
        x.view(torch.uint8).fill_(0xA5)
        return x

    monkeypatch.setattr(torch, "empty", filled)


def run(q, k, v, tiling, recipe, save, packed, monkeypatch):
    from lowbit_attn.kernels.hopper.quantize import quantize_qkv
    with monkeypatch.context() as patch:
        poisoned(patch)
        return quantize_qkv(q, k, v, tiling, resolve(recipe), save=save, packed=packed)


def assert_same(result, wanted, tiling, packed, save):
    used = int((tiling.k_tiles >= 0).sum())
    for name, value in wanted.items():
        got = getattr(result, name)
        if name in ("v_codes", "v_scales") and not save:
            assert got is None
            continue
        got = got.cpu()
        if name.endswith("_codes"):
            got = got.flatten(0, -3)
        elif name.endswith("_scales"):
            got = got if packed else got.transpose(0, 1).flatten(1)
        else:
            assert got.shape == value.shape, name
            written = value.shape[-1] // tiling.k_tiles.numel() * used
            got = got[..., :written]
        torch.testing.assert_close(got, value[..., :got.shape[-1]], rtol=0, atol=0, equal_nan=True,
                                   msg=lambda text, name=name: f"{name}: {text}")


def values(*shape, seed=0, dtype=torch.bfloat16):
    """Normal numbers whose token blocks differ in scale by up to 2^24, with a channel that stands out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    low, high = (-8, 7) if dtype == torch.float16 else (-12, 13)
    span = torch.randint(low, high, (shape[-3] // 32 + 1, 1, 1), generator=generator).repeat_interleave(32, 0)
    x = torch.ldexp(x, span[:shape[-3]])
    x[..., 3] *= 16
    return x.to(dtype)


def check_dense(monkeypatch, shape_q, shape_k, recipe="mxfp8", dtype=torch.bfloat16, save=True, lengths=None, view=lambda x: x,
                fill=None):
    from lowbit_attn.kernels.tiling import dense_tiling
    q, k, v = (values(*shape, seed=n, dtype=dtype) for n, shape in enumerate((shape_q, shape_k, shape_k)))
    if fill is not None:
        q, k, v = (fill(x) for x in (q, k, v))
    on_gpu = [view(x.cuda()) for x in (q, k, v)]
    key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    tiling = dense_tiling(on_gpu[0], shape_k[1], align="none", key_lengths=key_lengths, block_rows=128)
    result = run(*on_gpu, tiling, recipe, save, False, monkeypatch)
    wanted = expected(*(x.flatten(0, 1) for x in (q, k, v)), tiling, resolve(recipe), False)
    assert_same(result, wanted, tiling, False, save)
    return result, on_gpu, tiling


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fast", "mxfp8:rotation=always", "mxfp8:causal_safety=exact"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_dims(monkeypatch, head_dim, recipe):
    save = recipe != "mxfp8_fast"
    check_dense(monkeypatch, (2, 300, 6, head_dim), (2, 300, 2, head_dim), recipe, save=save)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (31, 33), (64, 32), (127, 129), (128, 217), (239, 1), (799, 3),
                                               (255, 256), (1024, 1023)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lengths_and_dtypes(monkeypatch, queries, keys, dtype):
    check_dense(monkeypatch, (2, queries, 3, 128), (2, keys, 1, 128), dtype=dtype)


VIEWS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "tokens outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "fused": lambda x: torch.cat([x * 0, x, x * 0], -1)[..., x.shape[-1]:2 * x.shape[-1]],
    "odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "every other channel": lambda x: torch.stack([x, x * 0], -1).flatten(-2)[..., ::2],
    "odd pitch": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strides_and_offsets(monkeypatch, view, dtype):
    check_dense(monkeypatch, (2, 170, 3, 128), (2, 170, 3, 128), dtype=dtype, view=VIEWS[view])


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_gathered_head_dims(monkeypatch, head_dim):
    check_dense(monkeypatch, (2, 170, 2, head_dim), (2, 70, 2, head_dim), dtype=torch.float16, view=VIEWS["odd offset"])


def test_expanded_views(monkeypatch):
    def share_heads(x):
        return x[:, :, :1].expand(-1, -1, 4, -1)

    from lowbit_attn.kernels.tiling import dense_tiling
    x = values(2, 140, 1, 128)
    tiling = dense_tiling(x.cuda(), 140, align="none", key_lengths=None, block_rows=128)
    result = run(*[share_heads(x.cuda())] * 3, tiling, "mxfp8", True, False, monkeypatch)
    wanted = expected(*[share_heads(x).flatten(0, 1)] * 3, tiling, resolve("mxfp8"), False)
    assert_same(result, wanted, tiling, False, True)


def test_keys_past_their_length_count_as_zero_even_if_nan(monkeypatch):
    def fill(x):
        x[0, 100:] = torch.nan
        x[1, 37:] = torch.inf
        x[2] = torch.nan
        return x

    from lowbit_attn.kernels.tiling import dense_tiling
    q, k, v = values(3, 300, 2, 128), fill(values(3, 300, 2, 128, seed=1)), fill(values(3, 300, 2, 128, seed=2))
    lengths = torch.tensor([100, 37, 0], dtype=torch.int32, device="cuda")
    tiling = dense_tiling(q.cuda(), 300, align="none", key_lengths=lengths, block_rows=128)
    result = run(q.cuda(), k.cuda(), v.cuda(), tiling, "mxfp8", True, False, monkeypatch)
    assert_same(result, expected(*(x.flatten(0, 1) for x in (q, k, v)), tiling, resolve("mxfp8"), False), tiling, False, True)
    assert not torch.isnan(result.v_group[:, :12]).any()


DOCUMENTS = [[0, 15], [0, 256, 500, 1000], [0, 1, 1, 2, 300, 300, 301], [0, 0, 5], [0, 128, 256], [0, 32, 64, 96, 1000]]


@pytest.mark.parametrize("cu", DOCUMENTS)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fast", "mxfp8:causal_safety=exact"])
def test_packed_documents(monkeypatch, cu, recipe):
    from lowbit_attn.kernels.tiling import packed_tiling
    cu_k = [min(2 * x, cu[-1]) for x in cu]
    q, k, v = values(cu[-1] + 50, 4, 128), values(cu[-1] + 3, 2, 128, seed=1), values(cu[-1] + 3, 2, 128, seed=2)
    q[cu[-1]:], k[cu[-1]:], v[cu[-1]:] = torch.nan, torch.inf, torch.nan  # rows of no document
    bounds = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (cu, cu_k)]
    tiling = packed_tiling(q.cuda(), k.shape[0], *bounds, align="bottom_right", block_rows=128)
    assert all(a <= b for a, b in pairwise(cu_k))
    result = run(q.cuda(), k.cuda(), v.cuda(), tiling, recipe, True, True, monkeypatch)
    assert_same(result, expected(q, k, v, tiling, resolve(recipe), True), tiling, True, True)
    assert not result.q_codes[cu[-1]:].any()
    assert not result.q_scales[:, cu[-1]:].any()


def special(x):
    """Blocks of 32 tokens with one special value each, in batch item 0."""
    last = torch.finfo(x.dtype).max
    tiny = torch.finfo(x.dtype).smallest_normal
    subnormal = torch.finfo(x.dtype).smallest_normal * 2**-6
    for n, fill in enumerate((torch.nan, torch.inf, -torch.inf, last, tiny, subnormal, -subnormal)):
        x[0, 32 * n + 5, 0, 17] = fill
    x[0, 224:256] = 0
    x[0, 256:288] = -0.0
    x[0, 288:320] = x[0, 288:320].sign() * subnormal
    x[0, 320:352] = x[0, 320:352].sign() * last
    x[0, 352:384] = 0
    x[0, 360, 0, 40] = 448
    x[0, 384:416] = 0
    x[0, 390, 0, 41] = 449 if x.dtype == torch.float32 else 450
    x[0, 416:448] *= 2.0**-30 if x.dtype != torch.float16 else 2.0**-10
    x[0, 420, 0, 1] = 1.0
    return x


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fast", "mxfp8_fast:rotation=none", "mxfp8:causal_safety=exact",
                                    "mxfp8_fast:q_top=13.3,k_top=0.37,rotation=none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_special_values(monkeypatch, recipe, dtype):
    check_dense(monkeypatch, (2, 450, 2, 128), (2, 450, 2, 128), recipe, dtype, fill=special)
    check_dense(monkeypatch, (1, 450, 1, 64), (1, 450, 1, 64), recipe, dtype, fill=special)


def test_maxima_around_every_power_of_two(monkeypatch):
    def fill(x):
        exponent = torch.arange(x.shape[1] // 32) % 250 - 126
        edge = torch.ldexp(torch.tensor([1.0, 1.75, 1.7421875, 1.7578125]).repeat(64)[:len(exponent)], exponent)
        x[:] = 0
        x[0, 7::32, 0, 9] = edge
        return x

    for recipe in ("mxfp8:rotation=none", "mxfp8_fast:rotation=none", "mxfp8"):
        check_dense(monkeypatch, (1, 8000, 1, 128), (1, 8000, 1, 128), recipe, torch.float32, fill=fill)


def test_two_runs_are_bitwise_equal():
    from lowbit_attn.kernels.hopper.quantize import quantize_qkv
    from lowbit_attn.kernels.tiling import dense_tiling
    q, k, v = (values(2, 1000, 8, 128, seed=n).cuda() for n in range(3))
    tiling = dense_tiling(q, 1000, align="none", key_lengths=None, block_rows=128)
    first, second = (quantize_qkv(q, k, v, tiling, resolve("mxfp8"), save=True, packed=False) for _ in range(2))
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in first.__dataclass_fields__)


def test_more_than_two_to_the_31_elements():
    from lowbit_attn.kernels.hopper.quantize import quantize_qkv
    from lowbit_attn.kernels.tiling import dense_tiling
    tokens, heads = 600_000, 32
    x = torch.randn(1, tokens, heads, 128, dtype=torch.bfloat16, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    assert x.numel() > 2**31
    tiling = dense_tiling(x, tokens, align="none", key_lengths=None, block_rows=128)
    result = quantize_qkv(x, x, x, tiling, resolve("mxfp8"), save=True, packed=False)
    part = slice(tokens - 192, tokens)  # a whole number of token blocks from the start
    tail = x[:, part]
    small = quantize_qkv(tail, tail, tail, dense_tiling(tail, 192, align="none", key_lengths=None, block_rows=128),
                         resolve("mxfp8"), save=True, packed=False)
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(result, f"{name}_codes")[:, part], getattr(small, f"{name}_codes"))
        assert torch.equal(getattr(result, f"{name}_scales")[..., part], getattr(small, f"{name}_scales"))
    assert torch.equal(result.v_t[:, :, 128 * (tokens // 128):][:, :, :64], small.v_t[:, :, 128:192])


def test_a_graph_replay_equals_eager():
    from lowbit_attn.kernels.hopper.quantize import quantize_qkv
    from lowbit_attn.kernels.tiling import dense_tiling
    q, k, v = (values(1, 300, 4, 128, seed=n).cuda() for n in range(3))
    tiling = dense_tiling(q, 300, align="none", key_lengths=None, block_rows=128)
    eager = quantize_qkv(q, k, v, tiling, resolve("mxfp8"), save=True, packed=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_qkv(q, k, v, tiling, resolve("mxfp8"), save=True, packed=False)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(getattr(eager, name), getattr(captured, name)) for name in eager.__dataclass_fields__)
