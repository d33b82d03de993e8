"""The backward's tables equal a plain Python model; run in Triton's interpreter, so no GPU is needed."""

import math

import pytest
import torch
from interpreted import only_interpreted, run_interpreted, starts_interpreter

HEADS, KV_HEADS, FACTOR = 4, 2, -0.37


@starts_interpreter
def test_records_equal_the_python_model():
    run_interpreted(__file__, "TestInterpreted")


def call(lengths, tail, align="bottom_right"):
    """Tiling, inputs and records of packed documents; dO's exponents vary, one block is zero and one holds NaN."""
    from lowbit_attn.kernels.hopper.gradient_records import gradient_records
    from lowbit_attn.kernels.tiling import packed_tiling
    tokens = sum(lengths) + tail
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    tiling = packed_tiling(torch.empty(tokens, HEADS, 8), tokens, cu, cu, align=align, block_rows=128)
    generator = torch.Generator().manual_seed(1)
    count = tiling.q_tiles.numel()
    do_group = torch.randint(-12, 3, (HEADS, 4 * count), generator=generator).float()
    do_group[0, 1], do_group[1, 2] = -127.0, math.nan
    q_scales = torch.randint(110, 130, (HEADS, tokens), generator=generator).to(torch.uint8)
    lse = torch.randn(HEADS, tokens, generator=generator)
    lse[1, 3] = -math.inf
    delta = torch.randn(HEADS * tokens, generator=generator)
    records = gradient_records(tiling, q_scales, do_group, lse, delta, kv_heads=KV_HEADS, factor=FACTOR, head_stride=tokens,
                               document_extra=0)
    return tiling, do_group, q_scales, lse, delta.view(HEADS, tokens), records


DOCUMENTS = [([300, 0, 1, 70, 128], 37), ([64, 65], 0), ([700] * 2, 1)]


@only_interpreted
@pytest.mark.parametrize(("lengths", "tail"), DOCUMENTS, ids=str)
class TestInterpreted:
    def test_a_reference_is_the_largest_exponent_from_its_tile_to_the_documents_end(self, lengths, tail):
        tiling, do_group, *_, records = call(lengths, tail)
        for document in tiling.documents.tolist():
            q_len, first = document[1], document[5]
            blocks = do_group.view(KV_HEADS, -1, do_group.shape[1])[..., 4 * first:4 * first + -(-q_len // 32)]
            top = blocks.nan_to_num(nan=-90).clamp_min(-90).amax(1)
            for tile in range(-(-q_len // 64)):
                assert torch.equal(records.reference[:, 2 * first + tile], top[:, 2 * tile:].amax(-1))
                later = top[:, 2 * tile + 2:]
                rise = later.amax(-1) - top[:, 2 * tile:].amax(-1) if later.shape[1] else torch.zeros(KV_HEADS)
                assert torch.equal(records.lifts[:, 2 * first + tile], torch.exp2(rise))

    def test_vectors_hold_what_queries_add_to_scores_and_gradients(self, lengths, tail):
        tiling, do_group, q_scales, lse, delta, records = call(lengths, tail)
        order = torch.arange(64).view(4, 2, 4, 2).transpose(1, 2).flatten()  # (j, c, e) -> (c, j, e) inside each 16
        for q_start, q_len, *_, first, _, _ in tiling.documents.tolist():
            for tile in range(-(-q_len // 64)):
                rows = slice(q_start + 64 * tile, q_start + min(q_len, 64 * tile + 64))
                number = rows.stop - rows.start
                place = order.argsort()[:number]
                base = records.reference[:, 2 * first + tile].repeat_interleave(HEADS // KV_HEADS)[:, None]
                exponent = do_group[:, 4 * first + 2 * tile:][:, torch.arange(number) // 32]
                exponent = torch.where(exponent.isnan(), base, exponent)
                fold = (exponent - base).clamp_min(-40)
                q_exponent = q_scales[:, rows].float() - 127
                record = records.vectors[:, 2 * first + tile]
                bias = torch.where(lse[:, rows].isneginf(), -math.inf, 8 + fold - lse[:, rows] * math.log2(math.e))
                torch.testing.assert_close(record[:, place], bias, rtol=1e-6, atol=1e-5)
                weight = delta[:, rows] * torch.exp2(q_exponent - base - fold)
                torch.testing.assert_close(record[:, 64 + place], weight, rtol=1e-6, atol=0)
                for block in range(-(-number // 32)):
                    torch.testing.assert_close(record[:, 128 + block], FACTOR * torch.exp2(q_exponent[:, 32 * block]))
                    undone = (q_exponent + exponent - base - fold)[:, 32 * block]
                    torch.testing.assert_close(record[:, 130 + block], torch.exp2(undone))
                    largest = weight[:, 32 * block:32 * block + 32].abs().amax(-1)
                    torch.testing.assert_close(record[:, 134 + block], largest.log2(), rtol=1e-5, atol=1e-5)

    def test_a_gradient_of_zeros_weighs_nothing_beside_large_queries(self, lengths, tail):
        from lowbit_attn.kernels.hopper.gradient_records import gradient_records
        tiling, do_group, q_scales, lse, delta, _ = call(lengths, tail)
        records = gradient_records(tiling, torch.full_like(q_scales, 140), torch.full_like(do_group, -127.0), lse,
                                   torch.zeros_like(delta).flatten(), kv_heads=KV_HEADS, factor=FACTOR,
                                   head_stride=lse.shape[1], document_extra=0)
        for _, q_len, *_, first, _, _ in tiling.documents.tolist():
            for tile in range(-(-q_len // 64)):
                assert (records.vectors[:, 2 * first + tile, 64:128] == 0).all()

    @pytest.mark.parametrize("align", ["none", "bottom_right"])
    def test_work_lists_every_key_block_once_longest_first(self, lengths, tail, align):
        tiling, *_, records = call(lengths, tail, align)
        expected = []
        for n, (q_start, q_len, k_start, k_len, k_valid, q_tile, k_tile, diagonal) in enumerate(tiling.documents.tolist()):
            for block in range(-(-k_len // 128)):
                shift = block * 128 - diagonal
                first = max(shift, 0) // 64
                number = max(-(-q_len // 64) - first, 0) if k_valid > block * 128 else 0
                entry = [k_start + block * 128, k_len - block * 128, k_valid - block * 128, q_start, 2 * q_tile, q_len, first,
                         number, shift, n, k_tile + block]
                expected.append((-number, len(expected), entry))
        count = records.count[0].item()
        assert count == len(expected)
        assert records.work[:count].tolist() == [entry for *_, entry in sorted(expected)]
