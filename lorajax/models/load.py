"""Decoders from safetensors checkpoints, one merged product at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from lorajax.checkpoint import SINGLE, Checkpoint
from lorajax.errors import ModelError
from lorajax.models.config import ModelConfig
from lorajax.models.decoder import Decoder, Leaf
from lorajax.models.placement import place
from lorajax.sharding import Partition

_FLOATS = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))


def load_model(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    partition: Partition | None = None,
    implementation: str | None = None,
) -> Decoder:
    """Loads a Hugging Face model folder.

    Args:
        path: Folder with `config.json` and `model.safetensors`, or its shards and their index.
        dtype: Element type of the parameters; by default the one the config names.
        partition: A mesh to place it on, or None for the default device.
        implementation: See `Decoder`.

    Raises:
        ModelError: A file is missing or broken, the config asks for maths that is not implemented,
            or a tensor is missing, unknown, or of another shape or type than the config implies.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"a model must be a folder with config.json and {SINGLE}; got {str(path)!r}; "
            "download the model and pass its folder"
        )
    config = ModelConfig.from_hf(folder)
    return from_tensors(
        config,
        Checkpoint(folder),
        dtype=dtype,
        partition=partition,
        implementation=implementation,
    )


def from_tensors(
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: DTypeLike | None = None,
    partition: Partition | None = None,
    implementation: str | None = None,
) -> Decoder:
    """Builds a decoder from tensors under their Hugging Face names.

    Args:
        config: Sizes and layout.
        tensors: float32, float16 or bfloat16 arrays, linear weights `[d_out, d_in]`; each is asked
            for once, so the mapping may read lazily.
        dtype: Element type of the parameters; by default `config.dtype`.
        partition: A mesh to place the parameters on, or None for the default device.
        implementation: See `Decoder`.

    Raises:
        ModelError: A tensor is missing, unknown, or of another shape or type than implied.
        LoraError: The model does not divide over the mesh.
    """
    wanted = np.dtype(config.dtype if dtype is None else dtype)
    if wanted not in _FLOATS:
        raise ModelError(
            f"dtype of a model must be one of {[t.name for t in _FLOATS]}; got {wanted.name!r}; "
            "choose one of these"
        )
    _check_names(leaves(config), tensors)
    if config.tied and "lm_head.weight" in tensors:
        _check_tied(tensors)

    def make(leaf: Leaf) -> jax.Array:
        array = _read(leaf, tensors, wanted)
        return jnp.asarray(array) if partition is None else place(leaf, array, partition)

    shard = None if partition is None else partition.shard
    return Decoder(config, make, shard, implementation=implementation)


def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
    """Every array of a decoder, in the order it is built."""
    found: list[Leaf] = []

    def note(leaf: Leaf) -> Any:
        found.append(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, np.dtype(config.dtype))

    Decoder(config, note)
    return tuple(found)


def _check_names(wanted: tuple[Leaf, ...], tensors: Mapping[str, np.ndarray]) -> None:
    needed = {name for leaf in wanted for name in leaf.names}
    missing = sorted(needed - set(tensors))
    if missing:
        raise ModelError(
            f"a checkpoint must have every tensor of its config; got none named {missing}; "
            "check that config.json and the weights belong together"
        )
    # The head of a tied model repeats the embedding; inv_freq follows from the config.
    extra = set(tensors) - needed - {"lm_head.weight"}
    unknown = sorted(name for name in extra if not name.endswith(".rotary_emb.inv_freq"))
    if unknown:
        raise ModelError(
            f"every tensor of a checkpoint must be used; got {unknown} besides those of the config;"
            " check that config.json and the weights belong together"
        )


def _check_tied(tensors: Mapping[str, np.ndarray]) -> None:
    head, embed = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    if head.shape != embed.shape or not np.array_equal(head, embed):
        raise ModelError(
            "lm_head.weight must equal model.embed_tokens.weight where tie_word_embeddings is true;"
            " got different tensors; set tie_word_embeddings to false in config.json"
        )


def _read(leaf: Leaf, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
    parts = []
    for name, width in zip(leaf.names, leaf.widths, strict=True):
        tensor, lead = tensors[name], () if leaf.rows is None else (leaf.rows,)
        want = (width, *lead) if leaf.transposed else (*lead, width)
        if tensor.shape != want or tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{name} must be {list(want)} of {[t.name for t in _FLOATS]}; got "
                f"{list(tensor.shape)} of {tensor.dtype}; check that config.json and the weights "
                "belong together, and that they are not quantised"
            )
        with np.errstate(over="ignore"):
            cast = tensor.astype(dtype)
        if dtype == np.float16 and not (np.isfinite(cast) | ~np.isfinite(tensor)).all():
            raise ModelError(
                f"{name} must fit float16; got values beyond 65504; load with dtype='bfloat16'"
            )
        parts.append(cast.T if leaf.transposed else cast)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
