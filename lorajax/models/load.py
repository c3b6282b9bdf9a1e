"""Decoders from safetensors checkpoints, one merged product at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from lorajax.errors import ModelError
from lorajax.models.config import ModelConfig
from lorajax.models.decoder import Decoder, Leaf
from lorajax.models.placement import place
from lorajax.sharding import Partition

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))


def load_model(
    path: str | Path, *, dtype: DTypeLike | None = None, partition: Partition | None = None
) -> Decoder:
    """Loads a Hugging Face model folder.

    Args:
        path: Folder with `config.json` and `model.safetensors`, or its shards and their index.
        dtype: Element type of the parameters; by default the one the config names.
        partition: A mesh to place it on, or None for the default device.

    Raises:
        ModelError: A file is missing or broken, the config asks for maths that is not implemented,
            or a tensor is missing, unknown, or of another shape or type than the config implies.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"a model must be a folder with config.json and {_SINGLE}; got {str(path)!r}; "
            "download the model and pass its folder"
        )
    config = ModelConfig.from_hf(folder)
    return from_tensors(config, _Files(folder), dtype=dtype, partition=partition)


def from_tensors(
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: DTypeLike | None = None,
    partition: Partition | None = None,
) -> Decoder:
    """Builds a decoder from tensors under their Hugging Face names.

    Args:
        config: Sizes and layout.
        tensors: float32, float16 or bfloat16 arrays, linear weights `[d_out, d_in]`; each is asked
            for once, so the mapping may read lazily.
        dtype: Element type of the parameters; by default `config.dtype`.
        partition: A mesh to place the parameters on, or None for the default device.

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
    if partition is None:
        return Decoder(config, lambda leaf: jnp.asarray(_read(leaf, tensors, wanted)))
    return Decoder(
        config, lambda leaf: place(leaf, _read(leaf, tensors, wanted), partition), partition.shard
    )


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


class _Files(Mapping[str, np.ndarray]):
    """The tensors of a folder, read when asked for."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files = _index(folder)
        stored = {file: _names(folder / file) for file in set(self._files.values())}
        for name, file in self._files.items():
            if name not in stored[file]:
                raise ModelError(
                    f"a shard must hold the tensors its index names; got no {name} in {file}; "
                    "download the model again"
                )
        # A tensor that the index leaves out would otherwise be ignored in silence.
        self._files |= {name: file for file, names in stored.items() for name in names}

    def __getitem__(self, name: str) -> np.ndarray:
        with safe_open(self._folder / self._files[name], framework="numpy") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _index(folder: Path) -> dict[str, str]:
    """For each tensor, the file of the folder that holds it."""
    if (folder / _SINGLE).is_file():
        return dict.fromkeys(_names(folder / _SINGLE), _SINGLE)
    path = folder / _INDEX
    try:
        files = dict(json.loads(path.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"a model folder must hold {_SINGLE} or {_INDEX} with a weight_map; got "
            f"{type(error).__name__}: {error} for {folder}; convert the model to safetensors"
        ) from error
    outside = sorted({str(f) for f in files.values() if Path(str(f)).name != f})
    if outside:
        raise ModelError(
            f"shards must lie in the model's folder; got {outside} in {_INDEX}; name plain files"
        )
    return files


def _names(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"a weight file must be readable safetensors; got {error} for {path}; "
            "download the model again"
        ) from error
