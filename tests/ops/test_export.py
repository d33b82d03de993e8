"""torch.export keeps the operators as nodes, with dynamic batch and sequence."""

import pytest
import torch
from oracle import boundaries

from lowbit_attn import attention, varlen_attention


class Dense(torch.nn.Module):
    def forward(self, query, key, value):
        return attention(query, key, value, is_causal=True, backend="reference")


class Packed(torch.nn.Module):
    def forward(self, query, key, value, cu_seq):
        return varlen_attention(query, key, value, cu_seq, cu_seq, 64, 64, backend="reference")


def names(program):
    return [str(node.target) for node in program.graph.nodes if "lowbit_attn" in str(node.target)]


@pytest.mark.parametrize("strict", [False, True])
def test_dense(strict):
    sizes = {0: torch.export.Dim("batch"), 2: torch.export.Dim("tokens")}
    example = [torch.randn(3, 4, 20, 16) for _ in range(3)]
    program = torch.export.export(Dense(), tuple(example), dynamic_shapes=(sizes,) * 3, strict=strict)
    assert names(program) == ["lowbit_attn.attention_forward.default"]
    other = [torch.randn(5, 4, 71, 16) for _ in range(3)]
    assert torch.equal(program.module()(*other), Dense()(*other))


@pytest.mark.parametrize("strict", [False, True])
def test_packed(strict):
    sizes = {0: torch.export.Dim("tokens")}
    example = [torch.randn(30, 4, 16) for _ in range(3)]
    program = torch.export.export(Packed(), (*example, boundaries(0, 9, 30)), strict=strict,
                                  dynamic_shapes=(sizes, sizes, sizes, {0: torch.export.Dim("boundaries")}))
    assert names(program) == ["lowbit_attn.varlen_attention_forward.default"]
    other = [torch.randn(41, 4, 16) for _ in range(3)]
    cu_seq = boundaries(0, 1, 1, 40)
    assert torch.equal(program.module()(*other, cu_seq), Packed()(*other, cu_seq))
