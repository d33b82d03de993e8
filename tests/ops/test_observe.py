"""lowbit_attn::observe is the identity, and keeps what passes forward and backward."""

import pytest
import torch

from lowbit_attn.ops import observe


@pytest.fixture
def number():
    number = observe.new_record()
    yield number
    observe.drop_record(number)


def test_opcheck(number):
    for x in (torch.randn(5, 2, 8, requires_grad=True), torch.randn(2, 2, 5, 8).transpose(1, 2)):
        torch.library.opcheck(torch.ops.lowbit_attn.observe, (x, None, number, "output"))


@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_pass_and_are_kept(number, compiled):
    def run(x):
        return (observe.observe(x, torch.tensor([0, 2, 6]), number, "output") * 3).sum()

    x = torch.randn(6, 2, 8, requires_grad=True)
    (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(x).backward()
    kept = observe.record(number)
    assert torch.equal(kept.tensors["output"], x)
    assert torch.equal(kept.tensors["grad_output"], torch.full_like(x, 3))
    assert torch.equal(x.grad, torch.full_like(x, 3))
    assert kept.cu_seq.tolist() == [0, 2, 6]


def test_only_the_first_tokens_of_the_first_row_are_kept(number):
    dense = torch.randn(2, 3, observe.OBSERVED_TOKENS + 5, 4)
    assert torch.equal(observe.observe(dense, None, number, "query"), dense)
    assert torch.equal(observe.record(number).tensors["query"], dense[0].transpose(0, 1)[:observe.OBSERVED_TOKENS])


def test_a_dropped_record_keeps_nothing():
    number = observe.new_record()
    observe.drop_record(number)
    x = torch.randn(3, 1, 4)
    assert torch.equal(observe.observe(x, None, number, "query"), x)
    with pytest.raises(KeyError):
        observe.record(number)
