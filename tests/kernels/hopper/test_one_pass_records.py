"""The one-pass backward's tables equal a plain Python model; run in Triton's interpreter, so no GPU is needed."""

import math

import pytest
import torch
from interpreted import only_interpreted, run_interpreted, starts_interpreter

HEADS, KV_HEADS, FACTOR = 4, 2, 0.37


@starts_interpreter
def test_records_equal_the_python_model():
    run_interpreted(__file__, "TestInterpreted")


def call(lengths, tail, align="bottom_right", change=None, has_lse=False):
    """Tiling, inputs by name and records of packed documents; `change` edits the inputs before."""
    from types import SimpleNamespace

    from lowbit_attn.kernels.hopper.one_pass_records import one_pass_records
    from lowbit_attn.kernels.tiling import packed_tiling
    tokens = sum(lengths) + tail
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    tiling = packed_tiling(torch.empty(tokens, HEADS, 8), tokens, cu, cu, align=align, block_rows=128)
    generator = torch.Generator().manual_seed(1)
    q_count, k_count = tiling.q_tiles.numel(), tiling.k_tiles.numel()

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    x = {"do_group": numbers(-12, 3, HEADS, 4 * q_count).float(), "v_size": numbers(-9, 9, KV_HEADS, 4 * k_count).float(),
         "k_top": numbers(-8, 4, KV_HEADS, k_count).float(), "do_size": torch.rand(HEADS * tokens, generator=generator),
         "delta": torch.randn(HEADS * tokens, generator=generator)}
    q_scales = numbers(110, 130, HEADS, tokens).to(torch.uint8)
    for q_start, q_len, *_ in tiling.documents.tolist():  # a scale for each 32 tokens of a document
        for first in range(q_start, q_start + q_len, 32):
            q_scales[:, first:min(first + 32, q_start + q_len)] = q_scales[:, first, None]
    q_scales[0, :32] = 0  # zeros
    row_top = numbers(110, 132, HEADS, tokens).to(torch.uint8)
    lse = torch.randn(HEADS, tokens, generator=generator)
    x["delta"][5], x["do_group"][1, 2] = math.nan, math.nan
    if change is not None:
        change(x)
    records = one_pass_records(tiling, q_scales, row_top, SimpleNamespace(**x), lse, kv_heads=KV_HEADS, factor=FACTOR,
                               has_lse=has_lse, head_stride=tokens, document_extra=0)
    return tiling, SimpleNamespace(**x, q_scales=q_scales, row_top=row_top, lse=lse, has_lse=has_lse), records


DOCUMENTS = [([300, 0, 1, 70, 128], 37), ([64, 65], 0), ([700] * 2, 1)]
ORDER = torch.arange(64).view(4, 2, 4, 2).transpose(1, 2).flatten().argsort()
"""Where a record holds query i."""


def rows_of(tiling):
    """Of every query of every document: its token, padded row, last key, and the document's first key tile and last query tile."""
    for q_start, q_len, _, _, k_valid, q_tile, k_tile, diagonal in tiling.documents.tolist():
        for i in range(q_len):
            yield q_start + i, q_tile * 128 + i, min(i + diagonal, k_valid - 1), k_tile, q_tile * 2 + (q_len + 63) // 64 - 1


def bounds(x, limit, k_tile, token, head):
    """log2 of X = |dO| |V| + |D| and of the largest dS of a row."""
    largest = x.v_size[head // 2, 4 * k_tile:4 * k_tile + limit // 32 + 1].max()
    size = x.do_size.view(HEADS, -1)[head, token] * 2**largest + x.delta.view(HEADS, -1)[head, token].abs()
    size = math.log2(size) if size > 0 else -200.0  # NaN is not
    top = x.row_top[head, token].item() - 127
    if top <= 0 or x.has_lse:
        return size, size + min(top, 0)
    others = x.do_size.view(HEADS, -1)[head, token].item() * 2.0**largest.item()
    return size, min(size, math.log2(max(others, 2.0**-126)) + 1 - top)


def exponents(tiling, x):
    """dS's exponents [heads, blocks of 32]."""
    found = torch.full((HEADS, 4 * tiling.q_tiles.numel()), -200.0)
    for token, row, limit, k_tile, _ in rows_of(tiling):
        for head in range(HEADS if limit >= 0 else 0):
            need = math.ceil(bounds(x, limit, k_tile, token, head)[1] - 1e-5) - 8
            found[head, row // 32] = max(found[head, row // 32], need)
    return found.clamp(-100, 100)


@only_interpreted
@pytest.mark.parametrize(("lengths", "tail"), DOCUMENTS, ids=str)
class TestInterpreted:
    @pytest.mark.parametrize("has_lse", [False, True], ids=["", "lse has a gradient"])
    def test_gradients_of_scores_stay_below_the_largest_code(self, lengths, tail, has_lse):
        tiling, x, records = call(lengths, tail, has_lse=has_lse)
        own = exponents(tiling, x)
        for token, row, limit, k_tile, _ in rows_of(tiling):
            for head in range(HEADS if limit >= 0 else 0):
                record = records.vectors[head, row // 64]
                exponent = x.do_group[head, row // 32]
                base = records.reference_v[head // 2, row // 64]
                exponent = base if exponent.isnan() else exponent
                fold = (exponent - base).clamp_min(-40)
                assert record[130 + row // 32 % 2] == torch.exp2(exponent - own[head, row // 32] - fold - 8)
                d = x.delta.view(HEADS, -1)[head, token]
                expected = d * torch.exp2(-own[head, row // 32] - fold - 8)
                torch.testing.assert_close(record[64 + ORDER[row % 64]], expected, equal_nan=True)
                assert bounds(x, limit, k_tile, token, head)[1] - own[head, row // 32] <= 8 + 1e-4

    def test_queries_that_differ_are_told_apart_by_their_transposed_codes(self, lengths, tail):
        tiling, x, records = call(lengths, tail)
        own = exponents(tiling, x)
        for token, row, limit, _, last in rows_of(tiling):
            tile = row // 64
            for head in range(HEADS if limit >= 0 else 0):
                reference = records.reference_k[head // 2, tile]
                shift = records.q_shift[head, row // 32]
                assert shift <= 0
                code = x.q_scales[head, token].item()
                if code != 0:
                    assert shift == max(own[head, row // 32] + code - 127 - reference, -60)
                lifts = records.vectors[head, tile, 132:134]
                first_head = head % 2 == 0
                later = [a[head // 2, min(tile + 1, last)] for a in (records.reference_v, records.reference_k)]
                now = [a[head // 2, tile] for a in (records.reference_v, records.reference_k)]
                for lift, a, b in zip(lifts, later, now, strict=True):
                    assert lift == (torch.exp2(a - b) if first_head else 1.0)

    def test_references_fall_no_further_than_sums_stay_finite(self, lengths, tail):
        tiling, _, records = call(lengths, tail)
        for _, q_len, *_, first, _, _ in tiling.documents.tolist():
            reference = records.reference_k[:, 2 * first:2 * first + (q_len + 63) // 64]
            for tile in range(reference.shape[1]):
                assert (reference[:, tile] >= reference[:, tile:].amax(1) - 60).all()

    def test_float16_gradients_of_queries_neither_overflow_nor_vanish(self, lengths, tail):
        tiling, x, records = call(lengths, tail)
        own = exponents(tiling, x)
        for token, row, limit, k_tile, _ in rows_of(tiling):
            for head in range(HEADS if limit >= 0 else 0):
                relative = records.vectors[head, row // 64, 192 + row % 64]
                assert records.exponent[head, row] == relative + own[head, row // 32]
                seen = x.k_top[head // 2, k_tile:k_tile + limit // 128 + 1].max()
                size = bounds(x, limit, k_tile, token, head)[0] - own[head, row // 32] + seen - relative
                # Codes of K are up to 448, and those of a row of dS add up to 2^size.
                assert size + math.log2(448 * 17 / 16) < 16
                assert size + math.log2(448) > 7 or relative <= x.k_top.max() - 20

    def test_numbers_stay_finite_where_gradients_are_tiny_beside_those_of_other_tokens(self, lengths, tail):
        def change(x):  # 2^-40 of the others is as far as P is folded, 2^-100 as far as dS's exponents go
            x["do_group"][:, 0] = -118
            x["do_size"].view(HEADS, -1)[:, :32] = 2.0**-110
            x["delta"].view(HEADS, -1)[:, :32] = 2.0**-112

        _, x, records = call(lengths, tail, change=change)
        first = records.vectors[:, 0]
        assert first[:, 64:132].isfinite().all()
        # Their exponent is -100, and P is folded by -40 beside its factor 2^8.
        d = x.delta.view(HEADS, -1)[:, :32] * 2.0**100 * 2.0**(40 - 8)
        torch.testing.assert_close(first[:, 64:128][:, ORDER[:32]], d)

    def test_no_factor_is_infinite_where_values_are_zero_and_gradients_huge(self, lengths, tail):
        def change(x):
            x["do_group"][:] = 60
            x["v_size"][:] = -200
            x["delta"][:] = 0

        _, _, records = call(lengths, tail, change=change)
        assert records.vectors[:, 0, 130:132].isfinite().all()

    def test_work_says_which_padded_tile_a_block_of_keys_is(self, lengths, tail):
        tiling, _, records = call(lengths, tail)
        documents = tiling.documents.tolist()
        for entry in records.work[:records.count[0].item()].tolist():
            document = documents[entry[9]]
            assert entry[10] == document[6] + (entry[0] - document[2]) // 128
