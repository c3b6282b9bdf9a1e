"""The tensors of a base model's folder, in safetensors files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from lorajax.errors import ModelError

SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a folder by name, read when asked for.

    Args:
        folder: With `model.safetensors`, or its shards and their index.

    Raises:
        ModelError: A file is missing or broken.
    """

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
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_names(folder / SINGLE), SINGLE)
    path = folder / _INDEX
    try:
        files = dict(json.loads(path.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"a model folder must hold {SINGLE} or {_INDEX} with a weight_map; got "
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
