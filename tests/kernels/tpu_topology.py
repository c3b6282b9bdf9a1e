"""The real TPU compiler on a machine without a TPU."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

#: Smallest slice of each generation.
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (jax[tpu])"
)


def tpu_devices(topology: str) -> list[Any]:
    """The devices of a slice, to compile for."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other test workers load it too
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def tpu_device(generation: str) -> Any:
    """A device of a generation, to compile for."""
    return tpu_devices(TOPOLOGIES[generation])[0]


def tpu_mesh(device: Any) -> AbstractMesh:
    """A mesh that tells the kernels which TPU they are traced for."""
    kind = AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
    )
    return AbstractMesh((), (), abstract_device=kind)


def tpu_compile(generation: str, function: Callable[..., Any], *shapes: Any) -> Any:
    """Compiles a function for one chip; shapes are trees of `jax.ShapeDtypeStruct`."""
    device = tpu_device(generation)
    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes
    )
    with use_abstract_mesh(tpu_mesh(device)):
        lowered = jax.jit(function).lower(*placed)
    return lowered.compile()
