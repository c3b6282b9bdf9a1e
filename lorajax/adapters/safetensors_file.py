"""A safetensors file: the header is checked before the library reads any data."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import safetensors

from lorajax.adapters.tensors import FLOATS, TensorInfo
from lorajax.errors import AdapterError

_LENGTH_BYTES = 8
#: Limit of the format's own library, checked before anything is allocated.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class SafetensorsFile:
    """A checked file.

    Attributes:
        path: The file.
        infos: Dtype and shape of each tensor.
        name: Of the adapter, for messages.
    """

    path: Path
    infos: Mapping[str, TensorInfo]
    name: str

    def read(self) -> dict[str, np.ndarray]:
        """All tensors, as host arrays; bfloat16 by ml_dtypes.

        Raises:
            AdapterError: The file changed or cannot be read any more.
        """
        try:
            with safetensors.safe_open(self.path, "np") as file:
                arrays = {key: file.get_tensor(key) for key in self.infos}
            for key, info in self.infos.items():
                if (arrays[key].dtype.name, arrays[key].shape) != (info.dtype, info.shape):
                    raise ValueError(f"another {key}: the file changed while it was read")
            return arrays
        except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
            raise AdapterError(
                f"adapter {self.name!r}: {self.path} must be a readable safetensors file; got "
                f"{error}; copy the file again"
            ) from error


def open_safetensors(path: Path, name: str) -> SafetensorsFile:
    """Reads and checks the header; the data stays on disk.

    Args:
        path: The file.
        name: Of the adapter, for messages.

    Raises:
        AdapterError: The file is missing, empty, cut off, or no safetensors file. The message has
            its path, its size and the size that its header asks for.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES:
                _refuse(path, name, f"at least {_LENGTH_BYTES} bytes", f"{size} bytes")
            if length > _MAX_HEADER:
                _refuse(path, name, f"a header of at most {_MAX_HEADER} bytes", f"{length}")
            if size < _LENGTH_BYTES + length:
                _refuse(
                    path,
                    name,
                    f"at least {_LENGTH_BYTES + length} bytes to hold its header",
                    f"{size} bytes",
                )
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, AdapterError):
            raise
        _refuse(path, name, "a readable safetensors file", f"{type(error).__name__}: {error}")
    infos, end = _parse(header, path, name)
    want = _LENGTH_BYTES + length + end
    if size != want:
        _refuse(path, name, f"{want} bytes, as its header says", f"{size} bytes")
    return SafetensorsFile(path, infos, name)


def _parse(header: Any, path: Path, name: str) -> tuple[dict[str, TensorInfo], int]:
    """Tensors of a header, and the bytes of data they need."""
    infos, end = {}, 0
    try:
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            start, stop = (int(n) for n in entry["data_offsets"])
            shape = tuple(int(n) for n in entry["shape"])
            if not 0 <= start <= stop or min(shape, default=0) < 0:
                raise ValueError(f"shape {list(shape)} at bytes {start} to {stop} of {key!r}")
            dtype = FLOATS.get(entry["dtype"])
            infos[key] = TensorInfo(
                dtype.name if dtype else str(entry["dtype"]), shape, stop - start
            )
            if dtype and stop - start != dtype.itemsize * math.prod(shape):
                raise ValueError(f"{stop - start} bytes for {infos[key]} {key!r}")
            end = max(end, stop)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        _refuse(path, name, "a header of tensors with dtype, shape, data_offsets", repr(error))
    return infos, end


def _refuse(path: Path, name: str, rule: str, got: str) -> NoReturn:
    raise AdapterError(
        f"adapter {name!r}: {path} must have {rule}; got {got}; copy or save the file again, it is "
        "incomplete or damaged"
    )
