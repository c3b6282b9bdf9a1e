"""Reads from global memory by an index in each thread, which Pallas has no load for."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from lorajax.kernels_pallas.gpu.schedule import Ref

_ROWS = plgpu.Layout.WGMMA.reduce(1)


def gather(ref: Ref, index: jax.Array) -> jax.Array:
    """`ref[index]`, f32, for a number of each row of an accumulator.

    Args:
        ref: f32[n], in global memory.
        index: i32[64], in the layout of a column of an accumulator.
    """
    like = plgpu.ShapeDtypeStruct(index.shape, jnp.float32, layout=_ROWS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _ROWS), return_type=like)
    def load(_, ref, index):
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
        found = np.empty(index.registers.shape, object)
        for place, register in np.ndenumerate(index.registers):
            kind = ir.VectorType(register.type)
            values = []
            for i in range(kind.shape[0]):
                at = arith.extsi(i64, vector.extract(register, [], [i]))
                at = arith.addi(base, arith.muli(at, mgpu.utils.c(4, i64)))
                ptx = "ld.global.f32 $0, [$1];"
                values.append(llvm.inline_asm(f32, [at], ptx, "=f,l", has_side_effects=True))
            found[place] = vector.from_elements(ir.VectorType.get(kind.shape, f32), values)
        return mgpu.FragmentedArray(_registers=found, _layout=index.layout, _is_signed=None)

    return load(ref, index)  # pyright: ignore[reportCallIssue]
