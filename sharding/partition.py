"""A mesh with the rules that say what its axes cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lorajax.errors import SpecError
from lorajax.sharding.rules import AxisRules
from lorajax.sharding.shard import Shard


@dataclass(frozen=True)
class Partition:
    """Places arrays on a mesh and runs functions on its devices.

    Attributes:
        mesh: The devices, with Auto or Explicit axes.
        rules: What each axis of the mesh cuts.

    Raises:
        SpecError: The rules name an axis that the mesh has not.
    """

    mesh: Mesh
    rules: AxisRules

    def __post_init__(self):
        self.rules.check(self.mesh)

    @classmethod
    def of(cls, mesh: Mesh, rules: AxisRules | None = None) -> "Partition":
        """A mesh with rules, by default those that its axes' names say (`AxisRules.of`)."""
        return cls(mesh, AxisRules.of(mesh) if rules is None else rules)

    @property
    def shard(self) -> Shard:
        """What each device knows inside `per_device`."""
        rules, sizes = self.rules, dict(self.mesh.shape)

        def used(axis: str | None) -> str | None:
            return axis if axis is not None and sizes[axis] > 1 else None

        rows = tuple(axis for axis in rules.rows if sizes[axis] > 1)
        return Shard(
            tensor=used(rules.tensor),
            tensor_shards=1 if rules.tensor is None else sizes[rules.tensor],
            fsdp=used(rules.fsdp),
            rows=rows,
            row_sizes=tuple(sizes[axis] for axis in rows),
        )

    def sharding(self, *logical: str | None) -> NamedSharding:
        """The sharding of an array with these logical axes; see `AxisRules.spec`."""
        return NamedSharding(self.mesh, self.rules.spec(*logical))

    def put(self, array: np.ndarray, *logical: str | None) -> jax.Array:
        """Places an array that every process has; each makes only the shards it owns.

        Raises:
            SpecError: An axis does not divide over its devices.
        """
        sharding = self.sharding(*logical)
        check_divides(array.shape, sharding)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    def per_device(
        self, f: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """`jax.shard_map` over all axes of the mesh."""
        # Whether an output is replicated is not inferred: kernels do not say it of theirs.
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def check_divides(shape: tuple[int, ...], sharding: NamedSharding) -> None:
    """Checks that every axis divides over the devices that cut it.

    Raises:
        SpecError: One does not.
    """
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise SpecError(
            f"axes must divide over the devices that cut them; got shape {list(shape)} on "
            f"{sharding.spec} of mesh {dict(sharding.mesh.shape)}; use other sizes, or a mesh "
            "whose axes divide them"
        ) from error
