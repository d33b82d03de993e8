"""Every work index goes to one program, and the counter is ready for the next launch, with all programs of a GPU at once."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton runs on Linux only")

from queued_kernel import kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                                  reason="needs a Hopper GPU")]


@pytest.mark.parametrize("total", [0, 1, 131, 132, 133, 10000])
def test_every_index_once_at_every_launch(total):
    first, second = torch.zeros(2, 10000, dtype=torch.int32, device="cuda")
    count = torch.tensor([total, 0], dtype=torch.int32, device="cuda")
    for number in range(1, 6):
        kernel[(132,)](first, second, count, total, num_warps=4)
        wanted = torch.where(torch.arange(10000, device="cuda") < total, number, 0)
        assert torch.equal(first, wanted)
        assert torch.equal(second, wanted)
        assert count.tolist() == [total, 0]
