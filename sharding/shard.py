"""What one device knows of the mesh inside `shard_map`, and every collective of a step."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


@dataclass(frozen=True)
class Shard:
    """One device's place on a mesh; without arguments, the only device of a step without a mesh.

    The collectives of a step are these methods and no others, so a model that calls them where its
    base needs them has the same ones with adapters and without.

    Attributes:
        tensor: Mesh axis that cuts features, None if it has one device.
        tensor_shards: Its size.
        fsdp: Mesh axis that base weights are gathered over, None if it has one device.
        rows: Mesh axes that cut the rows of a batch, without those of one device.
        row_sizes: Their sizes.
    """

    tensor: str | None = None
    tensor_shards: int = 1
    fsdp: str | None = None
    rows: tuple[str, ...] = ()
    row_sizes: tuple[int, ...] = ()

    @property
    def row_shards(self) -> int:
        """Devices that the rows of a batch are cut over."""
        return math.prod(self.row_sizes)

    def cuts_vocabulary(self, size: int) -> bool:
        """Whether a vocabulary is cut over the features' axis: whole on each device otherwise."""
        return self.tensor is not None and size % self.tensor_shards == 0

    def row_index(self) -> Int[Array, ""] | int:
        """Which share of the rows this device has."""
        return lax.axis_index(self.rows) if self.rows else 0

    def tensor_index(self) -> Int[Array, ""] | int:
        """Which share of the features this device has."""
        return 0 if self.tensor is None else lax.axis_index(self.tensor)

    def sum(self, x: Shaped[Array, "..."]) -> jax.Array:
        """The sum of the partial products of all shards of the features: an all-reduce."""
        return x if self.tensor is None else lax.psum(x, self.tensor)

    def gather_features(self, x: Shaped[Array, "..."]) -> jax.Array:
        """The last axis of all shards of the features: an all-gather."""
        if self.tensor is None:
            return x
        return lax.all_gather(x, self.tensor, axis=x.ndim - 1, tiled=True)

    def gather_ranks(self, h: Shaped[Array, "S G R T"]) -> jax.Array:
        """The ranks of all shards, in a fully sharded column target: an all-gather."""
        return h if self.tensor is None else lax.all_gather(h, self.tensor, axis=2, tiled=True)

    def placed(self, x: Shaped[Array, "T d"]) -> jax.Array:
        """This shard's columns at their place among those of all shards, and zeros elsewhere."""
        if self.tensor is None:
            return x
        whole = jnp.zeros((x.shape[0], x.shape[1] * self.tensor_shards), x.dtype)
        start = self.tensor_index() * x.shape[1]
        return lax.dynamic_update_slice_in_dim(whole, x, start, axis=1)

    def gather_rows(self, x: Shaped[Array, "..."]) -> jax.Array:
        """The first axis of all shards of the rows: an all-gather."""
        return lax.all_gather(x, self.rows, axis=0, tiled=True) if self.rows else x

    def whole(self, w: Shaped[Array, "..."], axis: int) -> jax.Array:
        """A base weight that fully sharded data parallelism cut along an axis: an all-gather."""
        return w if self.fsdp is None else lax.all_gather(w, self.fsdp, axis=axis, tiled=True)
