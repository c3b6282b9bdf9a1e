"""A decoder with adapters merged into its weights: what serving through slots must equal."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lorajax.adapter import Adapter
from lorajax.errors import SpecError
from lorajax.families import EMBEDDING, HEAD
from lorajax.merge import merge_adapter
from lorajax.models.decoder import TARGETS, Decoder
from lorajax.spec import LoraSpec


def merge_adapters(model: Decoder, spec: LoraSpec, mix: Sequence[tuple[Adapter, float]]) -> Decoder:
    """The plain decoder of a mix: every W becomes `W + Σ w_i s_i B_i A_i`.

    Args:
        model: Left as it is; the result shares the arrays that no adapter touches.
        spec: What the adapters were packed for.
        mix: Adapters and their weights.

    Returns:
        A decoder whose products are summed in float64 and rounded once, to the model's dtype.

    Raises:
        SpecError: The spec has a target that the model has not, or whose shape differs; or the
            model's features are cut over a mesh.
    """
    if model.shard.tensor is not None:
        raise SpecError(
            "adapters can be merged into a model on one device, whose columns are in the order of "
            f"the checkpoint; got one on {model.shard.tensor_shards} devices; merge before "
            "placing it"
        )
    unknown = {t.name for t in spec.targets} - set(TARGETS)
    if unknown:
        raise SpecError(
            f"targets of this model are {list(TARGETS)}; got {sorted(unknown)} in the spec; "
            "build it with LoraSpec.from_hf_config(..., merged=True)"
        )
    merged = nnx.clone(model)
    touched = {name for adapter, _ in mix for name in adapter.arrays}

    def summed(w: jax.Array, target: str, layer: int) -> nnx.Param:
        if target not in touched:
            return nnx.Param(w)
        wide = np.asarray(w).astype(np.float64)
        for adapter, weight in mix:
            wide = merge_adapter(wide, adapter, spec, target, layer, weight)
        return nnx.Param(jnp.asarray(wide.astype(w.dtype)))

    for layer in merged.layers:
        for product in layer.products:
            product.weight = summed(product.weight[...], product.target, product.layer)
    if touched & {EMBEDDING, HEAD}:  # a tied head parts from the embedding
        embed = model.embed[...]
        head = embed.T if model.head is None else model.head[...]
        merged.head = nnx.data(summed(head, HEAD, 0))
        merged.embed = summed(embed, EMBEDDING, 0)
    return merged
