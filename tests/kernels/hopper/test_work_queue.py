"""Every work index goes to one program, and the counter is ready for the next launch."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton runs on Linux only")


def launch_three_times(total, programs, **options):
    import queued_kernel
    from gluon_warpgroups import Kernel

    from lowbit_attn.kernels.hopper import work_queue

    first, second = torch.zeros(20, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    count = torch.tensor([total, 0], dtype=torch.int32)
    launch = Kernel(queued_kernel.kernel, queued_kernel, work_queue)[(programs,)]
    for number in (1, 2, 3):
        launch(first, second, count, total, num_warps=4, **options)
        wanted = torch.where(torch.arange(20) < total, number, 0)
        assert torch.equal(first, wanted)
        assert torch.equal(second, wanted)
        assert count.tolist() == [total, 0]


@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("total", [0, 1, 2, 4, 5, 6, 17])
def test_every_index_once_at_every_launch(total, programs):
    launch_three_times(total, programs)


def test_a_consumer_that_lets_go_before_it_reads_is_found():
    with pytest.raises(AssertionError):
        launch_three_times(17, 2, HASTY=True)
