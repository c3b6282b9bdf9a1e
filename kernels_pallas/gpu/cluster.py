"""How the parts of an output tile meet: the blocks of a cluster write to each other's memory.

A part has an inbox for each consumer warpgroup: room for the sums of the other parts, and a barrier
that counts the bytes that have come. `st.async` brings both, so that no fence waits for writes. A
register goes to the same thread of the other block, so sums need no layout in between.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from lorajax.kernels_pallas.gpu.plan import GROUP, HALF
from lorajax.kernels_pallas.gpu.schedule import Ref
from lorajax.kernels_pallas.gpu.sync import emit, leader

GROUP_BYTES = 4 * GROUP * HALF  #: Of the float32 sums of a group of tokens and 64 columns.


def open_inbox(full: Ref, size: int) -> None:
    """Makes the barrier of an inbox, for `size` bytes. Before `meet`."""
    ptx = f"""{{
        @!$1 bra DONE;
        mbarrier.init.shared::cta.b64 [$0], 1;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};
        DONE:
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def init(_, full):
        emit(ptx, [mgpu.utils.memref_ptr(full), leader()], "r,b")

    init(full)  # pyright: ignore[reportCallIssue]


def meet() -> None:
    """Waits until every thread of the cluster is here, and has read what it reads of its ring.

    It orders no writes: only reads come before it, and barriers, which have a fence of their own.
    """

    @plgpu.inline_mgpu()
    def barrier(_):
        emit("barrier.cluster.arrive.relaxed; barrier.cluster.wait;", [], "")

    barrier()  # pyright: ignore[reportCallIssue]


def send(to: Ref, full: Ref, block: int, value: jax.Array) -> None:
    """Writes sums of [64, tokens] to a place in the inbox of another block of the cluster.

    Args:
        to: This block's f32[groups, 512]; the other's is meant.
        full: The barrier of the inbox, likewise.
        block: Rank of the other block in the cluster.
        value: f32, in the layout of an accumulator.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_, to, full, value):
        places = [_place(to), mgpu.utils.memref_ptr(full)]
        numbers = _scalars(value)
        for i in range(0, len(numbers), 4):
            ptx = f"""{{
                .reg .u32 to, full;
                mapa.shared::cluster.u32 to, $0, {block};
                mapa.shared::cluster.u32 full, $1, {block};
                st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32
                    [to + {i // 4 * GROUP_BYTES}], {{$2, $3, $4, $5}}, [full];
            }}"""
            emit(ptx, [*places, *numbers[i : i + 4]], "r,r,f,f,f,f")

    store(to, full, value)  # pyright: ignore[reportCallIssue]


def await_inbox(full: Ref) -> None:
    """Waits until the inbox has all its bytes."""
    ptx = """{
        .reg .pred ready;
        AGAIN:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ready, [$0], 0;
        @!ready bra AGAIN;
    }"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def spin(_, full):
        emit(ptx, [mgpu.utils.memref_ptr(full)], "r")

    spin(full)  # pyright: ignore[reportCallIssue]


def receive(place: Ref, width: int) -> jax.Array:
    """Reads sums of [64, width] from a place in this block's inbox, f32[width / 8, 512]."""
    like = plgpu.ShapeDtypeStruct((HALF, width), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=like)
    def load(_, place):
        f32 = ir.F32Type.get()
        four, pair = llvm.StructType.get_literal([f32] * 4), ir.VectorType.get((2,), f32)
        at, registers = _place(place), []
        for i in range(width // GROUP):
            ptx = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {i * GROUP_BYTES}];"
            got = llvm.inline_asm(four, [at], ptx, "=f,=f,=f,=f,r", has_side_effects=True)
            assert isinstance(got, ir.Value)
            numbers = [llvm.extractvalue(f32, got, [j]) for j in range(4)]
            registers += [vector.from_elements(pair, numbers[j : j + 2]) for j in (0, 2)]
        layout = plgpu.Layout.WGMMA.to_mgpu()
        shape = layout.registers_shape((HALF, width))
        return mgpu.FragmentedArray(
            _registers=np.array(registers, object).reshape(shape), _layout=layout, _is_signed=None
        )

    return load(place)  # pyright: ignore[reportCallIssue]


def _place(ref: ir.Value) -> ir.Value:
    """Address of this thread's 16 bytes of the first group of a place."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(mgpu.utils.WARPGROUP_SIZE, i32))
    base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
    return arith.addi(base, arith.muli(thread, mgpu.utils.c(16, i32)))


def _scalars(value: mgpu.FragmentedArray) -> list[ir.Value]:
    """The numbers that a thread holds, four for each group of tokens."""
    found = []
    for register in value.registers.flat:
        for i in range(math.prod(ir.VectorType(register.type).shape)):
            found.append(vector.extract(register, [], [i]))
    return found
