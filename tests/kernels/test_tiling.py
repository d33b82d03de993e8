"""The tiling tables equal a plain Python model, whatever the documents; run in Triton's interpreter, so no GPU is needed."""

import pytest
import torch
from interpreted import only_interpreted, run_interpreted, starts_interpreter
from tiling_model import model, packed_lengths

ROWS = 192


@starts_interpreter
def test_tables_equal_the_python_model():
    run_interpreted(__file__, "TestInterpreted")


def assert_equal(tiling, expected):
    documents, q_tiles, k_tiles, work = expected
    assert tiling.documents.tolist() == documents
    for table, values in ((tiling.q_tiles, q_tiles), (tiling.k_tiles, k_tiles)):
        assert table.tolist() == values + [-1] * (table.numel() - len(values))
    assert tiling.count[0].item() == len(work)
    assert tiling.work[:len(work)].tolist() == work


@only_interpreted
class TestInterpreted:
    @pytest.mark.parametrize("align", ["none", "top_left", "bottom_right"])
    @pytest.mark.parametrize(("queries", "keys", "lengths"), [(1, 1, None), (192, 128, None), (193, 129, None),
                                                              (500, 900, [900, 0, 333]), (900, 100, [1, 100, 50])])
    def test_dense(self, queries, keys, lengths, align):
        from lowbit_attn.kernels.tiling import dense_tiling
        query = torch.empty(3, queries, 2, 8)
        key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        tiling = dense_tiling(query, keys, align=align, key_lengths=key_lengths, block_rows=ROWS)
        q = [(n * queries, queries) for n in range(3)]
        k = [(n * keys, keys, keys if lengths is None else lengths[n]) for n in range(3)]
        assert_equal(tiling, model(q, k, align, ROWS))

    @pytest.mark.parametrize("align", ["none", "bottom_right"])
    @pytest.mark.parametrize("seed", range(4))
    def test_packed_with_empty_and_one_token_documents_and_a_tail(self, seed, align):
        from lowbit_attn.kernels.tiling import packed_tiling
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 700, (90 if seed == 3 else 7,), generator=generator)
        lengths[torch.rand(lengths.shape, generator=generator) < 0.3] = seed % 2
        cu = [0, *lengths.cumsum(0).tolist()]
        cu_k = [0, *(lengths * 2 // 3).cumsum(0).tolist()]
        tokens, keys = cu[-1] + 50, cu_k[-1] + 1
        tiling = packed_tiling(torch.empty(tokens, 2, 8), keys, torch.tensor(cu, dtype=torch.int32),
                               torch.tensor(cu_k, dtype=torch.int32), align=align, block_rows=ROWS)
        assert_equal(tiling, model(packed_lengths(cu, tokens, False), packed_lengths(cu_k, keys, True), align, ROWS))

    @pytest.mark.parametrize("cu", [[-5, 900, 3, 10_000, 0, 500], [0, 1000] * 50, [-(2**31), 2**31 - 1, -1]], ids=len)
    def test_boundaries_that_make_no_sense_are_clamped_to_the_largest_before(self, cu):
        from lowbit_attn.kernels.tiling import packed_tiling
        boundaries = torch.tensor(cu, dtype=torch.int32)
        tiling = packed_tiling(torch.empty(1000, 2, 8), 1000, boundaries, boundaries, align="bottom_right", block_rows=ROWS)
        assert_equal(tiling, model(packed_lengths(cu, 1000, False), packed_lengths(cu, 1000, True), "bottom_right", ROWS))
        # Other tables have a place for each padded tile of a document.
        for start, stored, tiles in ((5, 1, tiling.q_tiles), (6, 3, tiling.k_tiles)):
            assert (tiling.documents[:, start] + -(-tiling.documents[:, stored] // 128)).max() <= tiles.numel()
        assert tiling.documents[:, :4].min() >= 0
        assert (tiling.documents[:, 0] + tiling.documents[:, 1]).max() <= 1000
