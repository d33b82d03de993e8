"""The rotation is the normalized Sylvester matrix, and every float32 rounding of it is the specified one."""

import numpy as np
import pytest
import torch

from lowbit_attn.formats import hadamard
from lowbit_attn.formats.hadamard import rotation_blocks

BLOCKS = {1: [1], 2: [2], 3: [2, 1], 8: [8], 60: [32, 16, 8, 4], 64: [64], 80: [64, 16], 96: [64, 32], 100: [64, 32, 4],
          127: [64, 32, 16, 8, 4, 2, 1], 128: [128], 192: [128, 64], 256: [256]}
every_size = pytest.mark.parametrize("channels", list(BLOCKS))


def rotation_matrix(channels):
    """Block diagonal, each block Sylvester's H_2n = [[H, H], [H, -H]] over sqrt(size)."""
    blocks = []
    for size in BLOCKS[channels]:
        sylvester = np.ones((1, 1))
        while len(sylvester) < size:
            sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
        blocks.append(torch.from_numpy(sylvester / np.sqrt(size)))
    return torch.block_diag(*blocks)


def butterflies_in_float32(x):
    """Stride 1, 2, 4, ...: pairs (a, b) become (a + b, a - b), each rounded to float32; then one product with size^-1/2."""
    size = x.shape[-1]
    values = [x[..., i].astype(np.float32) for i in range(size)]
    stride = 1
    while stride < size:
        for low in range(size):
            if low & stride == 0:
                a, b = values[low], values[low + stride]
                values[low], values[low + stride] = a + b, a - b
        stride *= 2
    return np.stack(values, -1) * np.float32(size**-0.5)


@every_size
def test_the_rotation_equals_the_sylvester_matrix_product_in_float64(channels):
    x = torch.randn(3, 5, channels, dtype=torch.float64)
    rotated = hadamard(x)
    assert rotated.dtype == torch.float64
    torch.testing.assert_close(rotated, x @ rotation_matrix(channels), rtol=0, atol=1e-12)


@every_size
def test_the_rotation_is_orthogonal(channels):
    matrix = hadamard(torch.eye(channels, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(channels, dtype=torch.float64), rtol=0, atol=1e-12)


@every_size
def test_the_rotation_is_its_own_inverse(channels):
    x = torch.randn(7, channels, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=1e-12)


@every_size
def test_blocks_are_the_binary_digits_of_the_channel_count_largest_first(channels):
    assert rotation_blocks(channels) == BLOCKS[channels]
    matrix = hadamard(torch.eye(channels, dtype=torch.float64))
    assert torch.equal(matrix != 0, rotation_matrix(channels) != 0)


@every_size
def test_float32_results_are_bitwise_the_butterflies_of_the_specification(channels):
    x = (torch.randn(41, channels) * torch.exp2(torch.randint(-12, 12, (41, channels)).float())).numpy()
    parts = np.split(x, np.cumsum(BLOCKS[channels])[:-1], axis=-1)
    expected = np.concatenate([butterflies_in_float32(part) for part in parts], -1)
    rotated = hadamard(torch.from_numpy(x))
    assert rotated.dtype == torch.float32
    np.testing.assert_array_equal(rotated.numpy().view(np.int32), expected.view(np.int32))


def test_the_order_of_the_butterflies_shows_in_the_bits():
    # The check above can only tell the orders apart if they differ on such inputs.
    x = torch.randn(41, 128).numpy()
    bit_reversed = np.array([int(f"{i:07b}"[::-1], 2) for i in range(128)])
    other_order = butterflies_in_float32(x[:, bit_reversed])[:, bit_reversed]
    torch.testing.assert_close(torch.from_numpy(other_order), hadamard(torch.from_numpy(x)), rtol=1e-4, atol=1e-5)
    assert (other_order != hadamard(torch.from_numpy(x)).numpy()).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_input_is_rotated_in_float32(dtype):
    x = torch.randn(9, 96).to(dtype)
    assert torch.equal(hadamard(x), hadamard(x.float()))


def test_views_rotate_like_their_contiguous_copies_and_stay_unchanged():
    base = torch.randn(96, 2, 11)
    copy = base.clone()
    view = base.permute(2, 1, 0)[1::2]
    assert torch.equal(hadamard(view), hadamard(view.contiguous()))
    assert torch.equal(base, copy)
    assert hadamard(torch.empty(0, 64)).shape == (0, 64)
