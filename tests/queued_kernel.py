"""A Gluon kernel that does nothing but pass work indices from its loader to two consumers, which count them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lowbit_attn.kernels.hopper.work_queue import announce, following, queue


@gluon.jit
def load(count, slot, announced, freed, total):
    index = gl.program_id(0)
    turn = 0
    while index < total:
        mbarrier.wait(freed, (turn & 1) ^ 1)
        index = announce(count, slot, announced, total, 1)
        turn += 1


@gluon.jit
def consume(taken, slot, announced, freed, total, HASTY: gl.constexpr):
    """HASTY, which is wrong: lets the loader fill the slot again before it has read it."""
    index = gl.program_id(0)
    turn = 0
    while index < total:
        gl.store(taken + index, gl.load(taken + index) + 1)
        if HASTY:
            mbarrier.arrive(freed, count=1)
        index = following(slot, announced, turn)
        if not HASTY:
            mbarrier.arrive(freed, count=1)
        turn += 1


@gluon.jit(do_not_specialize=["total"])
def kernel(first, second, count, total, HASTY: gl.constexpr = False):
    """Each consumer adds 1 to its own place of every index below `total` that its program gets."""
    slot, announced = queue()
    freed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(freed, count=2)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (first, slot, announced, freed, total, HASTY)),
        (consume, (second, slot, announced, freed, total, HASTY)),
        (load, (count, slot, announced, freed, total)),
    ], [4, 1], [64, 24])
