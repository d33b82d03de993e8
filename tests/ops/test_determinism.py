"""The same inputs give the same bits, and torch's determinism switches are understood."""

import pytest
import torch
from oracle import boundaries

from lowbit_attn import attention, varlen_attention


def run(seed=None, **options):
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, h, 150, 32, generator=generator).requires_grad_() for h in (4, 2, 2))
    output, lse = attention(query, key, value, is_causal=True, enable_gqa=True, return_lse=True, backend="reference", seed=seed,
                            **options)
    (output.square().sum() + lse.sum()).backward()
    packed = varlen_attention(*(x[0].transpose(0, 1) for x in (query, key, value)), boundaries(0, 40, 150),
                              boundaries(0, 40, 150), 150, 150, enable_gqa=True, backend="reference", **options)
    return [output, lse, packed, query.grad, key.grad, value.grad]


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_repeated_calls_are_identical():
    assert_same(run(), run())


def test_the_flag_and_the_global_switch_give_the_same_bits():
    plain, flagged = run(), run(deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        switched = run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(plain, flagged)
    assert_same(plain, switched)


def test_no_output_is_left_uninitialized():
    # Under this switch torch fills new memory with NaN, so an element that nobody writes shows.
    torch.use_deterministic_algorithms(True)
    try:
        assert all(x.isfinite().all() for x in run())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_show(threads):
    before = torch.get_num_threads()
    expected = run()
    torch.set_num_threads(threads)
    try:
        assert_same(run(), expected)
    finally:
        torch.set_num_threads(before)


class TestStochasticRounding:
    def seed(self, value):
        return torch.tensor(value, dtype=torch.int64)

    def test_the_same_seed_gives_the_same_gradients(self):
        assert_same(run(self.seed(5), recipe="nvfp4"), run(self.seed(5), recipe="nvfp4"))

    def test_another_seed_moves_the_key_gradient_only(self):
        first, second = run(self.seed(5), recipe="nvfp4"), run(self.seed(6), recipe="nvfp4")
        assert not torch.equal(first[4], second[4])
        assert_same(first[:4] + first[5:], second[:4] + second[5:])

    def test_without_a_seed_the_global_generator_decides(self):
        results = []
        for value in (1, 1, 2):
            torch.manual_seed(value)
            results.append(run(recipe="nvfp4")[4])
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])
