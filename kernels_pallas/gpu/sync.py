"""How a launch keeps its order: counters that blocks wait for each other with, and a fence.

The counters are in global memory. Mosaic GPU's own semaphores are zeroed by a memset before each
launch; these live in an operand that every launch leaves as it found it, all zeros: XLA takes the
operand for a constant. The last warpgroup to `leave` resets them.

Every block must be resident, or a wait never ends: the grid never has more clusters than the GPU
surely holds. Two launches must not hold the counters at the same time: XLA runs the products of a
model one after the other on one stream, and `enter` stops a launch that finds them held.
"""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from lorajax.kernels_pallas.gpu.schedule import Ref, Scalar

MOST_TRIES = 1 << 23  #: Polls of a counter, each most of a microsecond.
_SCALAR = plgpu.Layout.WG_SPLAT(())


def leader() -> ir.Value:
    """True in one thread of the warpgroup."""
    return mgpu.utils.single_thread_predicate(scope=mgpu.utils.ThreadSubset.WARPGROUP)


def emit(ptx: str, operands: list[ir.Value], kinds: str) -> None:
    """Puts inline PTX into the kernel."""
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, ptx, kinds, has_side_effects=True)


def signal(counter: Ref) -> None:
    """Adds 1 to a counter, after everything that this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_, ref):
        mgpu.utils.warpgroup_barrier()
        one = leader()
        emit("@$0 fence.acq_rel.gpu;", [one], "b")
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref))
        semaphore.signal(1, predicate=one, relaxed=True, memory_scope="gpu")

    add(counter)  # pyright: ignore[reportCallIssue]


def wait(counter: Ref, value: Scalar) -> None:
    """Waits until the counter is at least `value`.

    A wait that could only end by a fault elsewhere stops the launch with an error after seconds.
    """
    ptx = """{
        .reg .pred ready, over;
        .reg .s32 seen;
        .reg .u32 tries;
        @!$2 bra DONE;
        mov.u32 tries, 0;
        AGAIN:
        ld.relaxed.gpu.global.s32 seen, [$0];
        setp.ge.s32 ready, seen, $1;
        @ready bra READY;
        add.u32 tries, tries, 1;
        setp.lt.u32 over, tries, LIMIT;
        @over bra AGAIN;
        trap;
        READY:
        fence.acq_rel.gpu;
        DONE:
    }"""
    ptx = ptx.replace("LIMIT", str(MOST_TRIES))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def spin(_, ref, value):
        operands = [mgpu.utils.memref_ptr(ref), value.registers.flat[0], leader()]
        emit(ptx, operands, "l,r,b")
        mgpu.utils.warpgroup_barrier()

    spin(counter, jnp.asarray(value, jnp.int32))  # pyright: ignore[reportCallIssue]


def look(counter: Ref) -> Scalar:
    """The counter's value as each thread sees it, which may differ between threads.

    The load is under way when this returns; what uses the value first waits for it.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
    )
    def load(_, ref):
        i32 = ir.IntegerType.get_signless(32)
        address = mgpu.utils.memref_ptr(ref)
        ptx = "ld.acquire.gpu.global.s32 $0, [$1];"
        seen = llvm.inline_asm(i32, [address], ptx, "=r,l", has_side_effects=True)
        assert isinstance(seen, ir.Value)
        return mgpu.FragmentedArray.splat(seen, (), is_signed=True)

    seen = load(counter)  # pyright: ignore[reportCallIssue]
    assert isinstance(seen, jax.Array)
    return seen


def wait_for_copies(counter: Ref, value: Scalar, seen: Scalar) -> None:
    """Holds back this warpgroup's next copies until the counter is at least `value`.

    Only the thread that starts the copies waits. `seen` is an earlier `look`: if it is enough,
    the counter is not read again.
    """
    ptx = """{
        .reg .pred ready, over;
        .reg .s32 now;
        .reg .u32 tries;
        @!$3 bra DONE;
        mov.u32 tries, 0;
        mov.s32 now, $2;
        AGAIN:
        setp.ge.s32 ready, now, $1;
        @ready bra READY;
        ld.acquire.gpu.global.s32 now, [$0];
        add.u32 tries, tries, 1;
        setp.lt.u32 over, tries, LIMIT;
        @over bra AGAIN;
        trap;
        READY:
        fence.proxy.async.global;
        DONE:
    }"""
    ptx = ptx.replace("LIMIT", str(MOST_TRIES))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR))
    def spin(_, ref, value, seen):
        scalars = [a.registers.flat[0] for a in (value, seen)]
        emit(ptx, [mgpu.utils.memref_ptr(ref), *scalars, leader()], "l,r,r,b")

    spin(counter, *(jnp.asarray(a, jnp.int32) for a in (value, seen)))  # pyright: ignore[reportCallIssue]


def enter(counter: Ref, blocks: int) -> None:
    """Counts a block in; stops the launch with an error if another launch holds the counters."""
    ptx = """{
        .reg .pred alone;
        .reg .u32 seen;
        @!$2 bra DONE;
        atom.add.relaxed.gpu.global.u32 seen, [$0], 1;
        setp.lt.u32 alone, seen, $1;
        @alone bra DONE;
        trap;
        DONE:
    }"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_, ref):
        most = mgpu.utils.c(blocks, ir.IntegerType.get_signless(32))
        emit(ptx, [mgpu.utils.memref_ptr(ref), most, leader()], "l,r,b")

    add(counter)  # pyright: ignore[reportCallIssue]


def leave(counters: Ref, everyone: int, shared: int) -> None:
    """Says that this warpgroup waits for nothing more; the last one zeroes the shared counters.

    Args:
        counters: i32; element 0 counts who has left, the next `shared` are the shared counters.
        everyone: Warpgroups of the launch.
        shared: Counters to zero.
    """
    # The label is local to the braces, so that the compiler may copy the block.
    ptx = """{
        .reg .pred more;
        .reg .u32 seen;
        .reg .u64 at, end;
        @!$2 bra DONE;
        atom.add.relaxed.gpu.global.u32 seen, [$0], 1;
        setp.ne.u32 more, seen, $1;
        @more bra DONE;
        mov.u64 at, $0;
        add.u64 end, at, $3;
        CLEAR:
        st.relaxed.gpu.global.u32 [at], 0;
        add.u64 at, at, 4;
        setp.lt.u64 more, at, end;
        @more bra CLEAR;
        DONE:
    }"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def ticket(_, ref):
        mgpu.utils.warpgroup_barrier()
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        size = mgpu.utils.c(4 * (shared + 1), i64)
        last = mgpu.utils.c(everyone - 1, i32)
        emit(ptx, [mgpu.utils.memref_ptr(ref), last, leader(), size], "l,r,b,l")

    ticket(counters)  # pyright: ignore[reportCallIssue]


def fence_registers() -> None:
    """Orders the accumulator before the next multiplication.

    In a loop the compiler would put this fence itself, on what it takes for a divergent path, and
    then waits for every single wgmma (ptxas C7520).
    """

    @plgpu.inline_mgpu()
    def fence(_):
        emit("wgmma.fence.sync.aligned;", [], "")

    fence()  # pyright: ignore[reportCallIssue]
