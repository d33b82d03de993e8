"""What every test shares: a fixed seed and one thread. The folder is importable: `from oracle import ...`."""

import pytest
import torch

pytest.register_assert_rewrite("block_bounds", "row_bounds")

# The tensors are small, and several files may run side by side: more threads only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
