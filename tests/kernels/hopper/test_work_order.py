"""How many heads the one pass of the Hopper backward works on side by side."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="Triton runs on Linux only")


def streamed(tokens, heads, kv_heads, head_dim=128, processors=132):
    from lowbit_attn.kernels.hopper import backward

    prepared = SimpleNamespace(
        tiling=SimpleNamespace(k_tiles=torch.empty(-(-tokens // 128))), heads=heads, kv_heads=kv_heads, lse=torch.empty(0),
        saved=SimpleNamespace(q_codes=torch.empty(tokens, heads, head_dim, dtype=torch.uint8, device="meta")))
    with patch.object(backward, "processors", lambda device: processors):
        return backward.Prepared._streamed(prepared)


class TestHeadsOfTheOnePass:
    @pytest.mark.parametrize("tokens", [1, 4096, 16384, 65536, 1 << 20])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (16, 16), (16, 4), (24, 24), (40, 8), (7, 7)])
    def test_they_divide_the_heads(self, tokens, heads, kv_heads):
        assert kv_heads % streamed(tokens, heads, kv_heads) == 0

    def test_as_many_as_l2_holds(self):
        assert streamed(16384, 16, 16) == 4
        assert streamed(65536, 16, 16) == 1

    def test_all_where_programs_get_few_entries(self):
        assert streamed(16384, 16, 4) == 4
        assert streamed(4096, 16, 16) == 16

