"""Tensors of an adapter: shapes and dtypes first, data when asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from lorajax.errors import AdapterError

#: Element types that are loaded, by the names that files and NumPy give them.
FLOATS: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class TensorInfo:
    """Dtype ("float32", "bfloat16", ...) and shape of a stored tensor, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@runtime_checkable
class Tensors(Protocol):
    """Named tensors that are read on demand."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of each tensor."""
        ...

    def read(self) -> dict[str, np.ndarray]:
        """All tensors, as host arrays."""
        ...


@dataclass(frozen=True)
class MemoryTensors:
    """Tensors that are in memory already."""

    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, tensors: Mapping[str, Any], name: str) -> "MemoryTensors":
        """Takes NumPy, ml_dtypes and JAX arrays.

        Raises:
            AdapterError: A value is no array; the adapter `name` and the tensor are named.
        """
        arrays = {}
        for key, value in tensors.items():
            if not hasattr(value, "shape") or not hasattr(value, "dtype"):
                raise AdapterError(
                    f"adapter {name!r}: tensors must be NumPy or JAX arrays; got "
                    f"{type(value).__name__} for {key!r}; convert it with numpy.asarray"
                )
            try:
                array = np.asarray(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise AdapterError(
                    f"adapter {name!r}: tensors must be NumPy or JAX arrays on this host; got "
                    f"{error} for {key!r}; convert it to NumPy first (a torch tensor: "
                    ".detach().cpu().numpy())"
                ) from error
            if array.dtype.byteorder == ">":
                array = array.astype(array.dtype.newbyteorder("="))
            arrays[str(key)] = array
        return cls(arrays)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of each tensor."""
        return {k: TensorInfo(a.dtype.name, a.shape, a.nbytes) for k, a in self.arrays.items()}

    def read(self) -> dict[str, np.ndarray]:
        """The arrays themselves."""
        return dict(self.arrays)
