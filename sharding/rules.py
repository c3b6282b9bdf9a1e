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
        data: Rows of a batch. Slots and weights are replicated over it.
        tensor: d_out of column targets, d_in of row targets.
        fsdp: Rows of a batch, and the axis of a base weight that `tensor` does not cut: weights are
            gathered over it when they are used. Slots are replicated over it.
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

    @classmethod
    def of(cls, mesh: Mesh) -> "AxisRules":
        """Each logical axis on the mesh axis of its own name, where the mesh has one.

        Raises:
            SpecError: An axis of the mesh has no logical axis of its name.
        """
        unknown = [a for a in mesh.axis_names if a not in cls.__dataclass_fields__]
        if unknown:
            raise SpecError(
                f"axes of a mesh must be named {list(cls.__dataclass_fields__)} if no rules are "
                f"given; got {unknown}; give AxisRules that say what each axis cuts"
            )
        return cls(**{a: a if a in mesh.axis_names else None for a in cls.__dataclass_fields__})

    @property
    def rows(self) -> tuple[str, ...]:
        """The mesh axes that cut the rows of a batch, the major one first."""
        return tuple(a for a in (self.data, self.fsdp) if a is not None)

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The `PartitionSpec` of an array with these logical axes, for example `(None, "tensor")`.

        Args:
            logical: For each axis None (whole), "rows" (see `rows`), or an attribute's name.

        Raises:
            SpecError: A name is no logical axis.
        """
        known = (*self.__dataclass_fields__, "rows")
        unknown = [a for a in logical if a is not None and a not in known]
        if unknown:
            raise SpecError(
                f"logical axes must be among {list(known)}; got {unknown}; use one of these names"
            )
        axes = vars(self) | {"rows": self.rows[0] if len(self.rows) == 1 else self.rows or None}
        return PartitionSpec(*(None if a is None else axes[a] for a in logical))

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
