"""Which program works on what: entries of a work list times heads, longest first, each to the first program that is free.

A program's first index is its own number; every further one comes from a counter in global memory, right behind the number of
entries (`tiling`, `gradient_records`), which its loader asks while the consumers are busy. With a fixed stride instead the same
programs get the longer ones of every round: in the backward 10 % of four documents of 4096 tokens, 15 % of uneven ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lowbit_attn.kernels.hopper.inline import uniform


@gluon.jit
def entry_of(index, count, GROUP):
    """Work entry and head of a work index: heads in groups, inside a group longest entries first, heads fastest."""
    inside = index % (count * GROUP)
    return inside // GROUP, (index // (count * GROUP)) * GROUP + inside % GROUP


@gluon.jit
def queue():
    """Where the loader announces the next work index, and the barrier that says that it stands there."""
    slot = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(announced, count=1)
    return slot, announced


@gluon.jit
def announce(count, slot, announced, total, WARPS: gl.constexpr):
    """The loader's next work index of `total`, for the consumers too. Once an entry, when all consumers have let go of the one
    before it: they have read this slot then. Every entry asks once, so the last answer is known, and leaves the counter at zero for
    the next launch."""
    taken = gl.atomic_add(count + 1, 1, sem="relaxed")  # acquiring would empty the L1 cache
    if taken == total - 1:
        gl.store(count + 1, 0)
    index = taken + gl.num_programs(0)
    slot.store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    mbarrier.arrive(announced, count=1)
    return index


@gluon.jit
def following(slot, announced, turn):
    """A consumer's next work index, beside its entry number `turn`, before it lets go of that."""
    mbarrier.wait(announced, turn & 1)
    return uniform(gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0))
