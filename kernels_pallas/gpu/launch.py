"""From an op's arguments to a run of the Hopper kernel, or to the reason why it cannot run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Float, Int

from lorajax.kernels_pallas.checks import Layer
from lorajax.kernels_pallas.gpu import kernel, refs
from lorajax.kernels_pallas.gpu.plan import HALF, Device, Plan, unsupported
from lorajax.kernels_pallas.gpu.schedule import Ref
from lorajax.kernels_pallas.gpu.tiles import find as find_tile
from lorajax.kernels_pallas.routing import MAX_BLOCK, Routing
from lorajax.kernels_pallas.weights import LoraWeights

HOPPER = ("H100", "H200", "H800", "H20", "GH200")  #: In the names of GPUs of capability 9.0.
MARK = 0x10AA10AA
HOPPER_SHARED_BYTES = 227 * 1024  #: Most shared memory of one block on compute capability 9.0.


def current_device() -> Device | str:
    """The GPU that is being traced for, or why the kernel cannot run on what is.

    Inside `jax.sharding.use_abstract_mesh` with an abstract device it is that device, so that a
    machine without a GPU can lower for one.
    """
    abstract = get_abstract_mesh().abstract_device
    if abstract is not None:
        kind = abstract.device_kind
        if any(name in kind for name in HOPPER):
            return Device(abstract.num_cores or 132, HOPPER_SHARED_BYTES, kind)
        return f"it needs an NVIDIA GPU of compute capability 9.0 (Hopper); got {kind}"
    device = jax.devices()[0]
    kind = device.device_kind
    if getattr(device, "compute_capability", None) == "9.0":
        return Device(device.core_count, HOPPER_SHARED_BYTES, kind)
    return f"it needs an NVIDIA GPU of compute capability 9.0 (Hopper); got {kind}"


def make_plan(
    x: Float[Array, "T d_in"],
    weights: LoraWeights,
    routing: Routing,
    device: Device,
    has_base: bool,
) -> Plan:
    """The plan of a launch on a device."""
    _, S, _, R, d_in = weights.A.shape
    T, d_out = x.shape[0], weights.B.shape[-1]
    measured = has_base and routing.block == min(T, MAX_BLOCK)
    return Plan(
        device=device,
        tokens=T,
        block=routing.block,
        d_in=d_in,
        d_out=d_out,
        slots=S,
        rank=R,
        slices=weights.slices,
        has_base=has_base,
        tile=find_tile(device.kind, d_in, d_out, T) if measured else None,
    )


def why_not(
    x: Float[Array, "T d_in"],
    weights: LoraWeights,
    routing: Routing,
    has_base: bool,
    device: Device | str,
) -> str | None:
    """Why the kernel cannot run these arguments on a device, or None if it can."""
    if isinstance(device, str):
        return device
    if any(a.dtype != jnp.bfloat16 for a in (x, weights.A, weights.B)):
        return f"x, A and B must be bfloat16; got {x.dtype}, {weights.A.dtype}, {weights.B.dtype}"
    return unsupported(make_plan(x, weights, routing, device, has_base))


def launch(
    x: Float[Array, "T d_in"],
    w: Float[Array, "L d_in d_out"] | None,
    weights: LoraWeights,
    routing: Routing,
    *,
    layer: Layer,
    base_layer: Layer = 0,
) -> Float[Array, "T d_out"]:
    """Runs the kernel: `x w` plus the delta in x's dtype, or without w the delta in float32."""
    device = current_device()
    assert isinstance(device, Device), device
    plan = make_plan(x, weights, routing, device, w is not None)
    T, d_out = x.shape[0], plan.d_out
    base = weights.B if w is None else w
    padded = -(-T // 8) * 8  # TMA takes whole rows of 8 tokens; a short block reads zeros past T
    width = (plan.blocks - 1) * plan.block + plan.columns
    arguments = (
        _scalar(layer),
        _scalar(base_layer),
        _zeros(sum(refs.counter_sizes(plan))),
        routing.count.max(keepdims=True),
        routing.count,
        routing.active,
        jnp.pad(routing.weights, ((0, 0), (0, width - T))),
        weights.scale.reshape(-1),
        jnp.pad(x, ((0, padded - T), (0, 0))),
        base.reshape(-1, d_out),
        weights.A.reshape(-1, plan.d_in),
        weights.B.reshape(-1, d_out),
    )
    out_dtype = jnp.dtype(jnp.float32) if w is None else x.dtype
    outputs = [
        jax.ShapeDtypeStruct((padded, d_out), out_dtype),
        jax.ShapeDtypeStruct(plan.h_shape, x.dtype),
        jax.ShapeDtypeStruct((plan.most_jobs, 2, HALF, plan.columns), jnp.float32),
    ]
    run = plgpu.kernel(
        _body(plan, f"lora_{'delta' if w is None else 'linear'}_gpu_{plan.d_in}x{d_out}"),
        out_type=outputs,
        scratch_types=scratch(plan, out_dtype, x.dtype),
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(plan.split,),
        cluster_names=("part",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # every barrier that is needed is in the kernel
        ),
    )
    return run(*arguments)[0][:T]


def _scalar(value: Layer) -> Int[Array, "1"]:
    return jnp.asarray(value, jnp.int32).reshape(1)


def _zeros(size: int) -> Int[Array, "n"]:
    """Counters that no XLA pass may turn into a fill before each launch: the last one is unused."""
    literal = np.zeros(size + 1, np.int32)
    literal[-1] = MARK
    return jnp.asarray(literal)


def _body(plan: Plan, name: str) -> Callable[..., None]:
    """The kernel body, with the name by which the HLO knows it."""

    def body(*arrays: Ref, **scratch: Ref) -> None:
        full = tuple(scratch.pop(f"full_{i}") for i in range(3))
        named = dict(zip(refs.ARRAYS, arrays, strict=True))
        kernel.body(plan, refs.Refs(**named, **scratch, full=full))

    body.__name__ = name
    return body


def scratch(plan: Plan, out_dtype: jnp.dtype, dtype: jnp.dtype) -> dict[str, Any]:
    """Shared memory and barriers."""

    def tiles(shape: tuple[int, ...], kind: jnp.dtype) -> Any:
        swizzle = plgpu.find_swizzle(shape[-1] * jnp.dtype(kind).itemsize * 8)
        wide = swizzle // jnp.dtype(kind).itemsize
        transforms = (plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, kind, transforms=transforms)

    barriers = {
        f"full_{i}": plgpu.Barrier(num_arrivals=n, num_barriers=plan.stages)
        for i, n in enumerate(refs.arrivals(plan))
    }
    return {
        "ring": plgpu.RefUnion(  # a stage is at the same place in both
            tiles((plan.stages, plan.depth, plan.width), dtype),
            tiles((plan.stages, plan.width, plan.depth), dtype),
        ),
        "tokens": plgpu.RefUnion(
            tiles((plan.stages, plan.columns, plan.depth), dtype),
            *([plgpu.SMEM(plan.inbox_shape, jnp.float32)] if plan.split > 1 else []),
        ),
        "inbox_full": plgpu.SMEM((2, 2), jnp.int32),
        "out": plgpu.RefUnion(
            tiles((2, plan.out_buffers, plan.staged, plan.half), out_dtype),
            tiles((2, plan.out_buffers, plan.staged, HALF), dtype),
        ),
        "empty": plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
        **barriers,
    }
