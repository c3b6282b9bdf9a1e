"""Logical axes to mesh axes: the one table that says how arrays are cut."""

from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from lorajax.errors import SpecError

#: A logical axis that is never cut.
WHOLE = None


@dataclass(frozen=True)
class AxisRules:
    """The mesh axis of each logical axis; None leaves it whole.

    Attributes:
        data: Rows of a batch. Slots are replicated over it.
        tensor: d_out of column targets, d_in of row targets.
        fsdp: Base weights only: the axis of a weight that `tensor` does not cut.
        expert: Experts.
    """

    data: str | None = "data"
    tensor: str | None = "tensor"
    fsdp: str | None = None
    expert: str | None = None

    def __post_init__(self):
        used = [a for a in (self.data, self.tensor, self.fsdp, self.expert) if a is not None]
        twice = sorted({a for a in used if used.count(a) > 1})
        if twice:
            raise SpecError(
                f"a mesh axis must serve one logical axis; got {twice} twice in {self}; "
                "give each logical axis a mesh axis of its own, or None"
            )

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The `PartitionSpec` of an array with these logical axes, for example `(None, "tensor")`.

        Raises:
            SpecError: A name is no logical axis.
        """
        unknown = [a for a in logical if a is not None and a not in self.__dataclass_fields__]
        if unknown:
            raise SpecError(
                f"logical axes must be among {list(self.__dataclass_fields__)}; got {unknown}; "
                "use one of these names"
            )
        return PartitionSpec(*(None if a is None else getattr(self, a) for a in logical))

    def check(self, mesh: Mesh) -> None:
        """Checks that the mesh has every axis that the rules name.

        Raises:
            SpecError: One is missing.
        """
        missing = [a for a in vars(self).values() if a is not None and a not in mesh.axis_names]
        if missing:
            raise SpecError(
                f"mesh axes of the rules must exist; got {missing}, mesh has {mesh.axis_names}; "
                "map the logical axis to None, or add the axis to the mesh"
            )
