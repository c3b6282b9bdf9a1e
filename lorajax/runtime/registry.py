"""Names and where their adapters come from."""

import difflib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lorajax import adapters
from lorajax.adapter import Adapter
from lorajax.errors import AdapterError, UnknownAdapterError
from lorajax.runtime.pool import Version
from lorajax.spec import LoraSpec
from lorajax.target import Target

#: A folder, an adapter in memory, or a function from name to adapter.
Source = str | Path | Adapter | Callable[[str], Adapter]


@dataclass(frozen=True, eq=False)
class Entry:
    """What a name stands for.

    Attributes:
        source: Where the adapter comes from.
        adapter: It, once it was read. It stays in host memory while it is registered.
        reading: Held while it is read, so that a crowd of users reads it once.
    """

    source: Source
    adapter: Adapter | None = None
    reading: threading.Lock = field(default_factory=threading.Lock)


def version_of(name: str, adapter: Adapter) -> Version:
    """The identity under which an adapter holds slots."""
    return Version(name, adapter.digest)


def entry_version(name: str, entry: Entry) -> Version | None:
    """The version that a name stands for, if it was read."""
    return None if entry.adapter is None else version_of(name, entry.adapter)


def same(entry: Entry, source: Source) -> bool:
    """Whether a source is what the name already stands for."""
    if entry.source == source:
        return True
    known = entry.adapter
    return known is not None and isinstance(source, Adapter) and source.digest == known.digest


def given(
    name: str,
    source: Source | None,
    config: Mapping[str, Any] | None,
    tensors: Mapping[str, Any] | None,
    *,
    spec: LoraSpec,
) -> Source | None:
    """The source of a call that takes one, or tensors in memory, or neither.

    Raises:
        AdapterError: Both were given, or half of the second; or the tensors cannot be served.
    """
    if (config is None) != (tensors is None) or (source is not None and tensors is not None):
        raise AdapterError(
            "an adapter must come from a source, or from config and tensors together; got "
            f"source={source!r}, config {'without' if tensors is None else 'with'} tensors for "
            f"{name!r}; pass one of the two"
        )
    if config is None or tensors is None:
        return None if source is None else normalised(source)
    return adapters.adapter_from_tensors(config, tensors, spec, name=name)


def normalised(source: Source) -> Source:
    """The source with paths as `Path`, so that equal ones compare equal."""
    return Path(source) if isinstance(source, str) else source


def unknown_adapter(name: str, registered: Iterable[str]) -> UnknownAdapterError:
    """The error for a name that is not registered, with the names that look like it."""
    known = sorted(registered)
    near = difflib.get_close_matches(name, known, n=3) or known[:8]
    return UnknownAdapterError(
        f"an adapter must be registered; got {name!r} with {len(known)} registered, such as "
        f"{near}; register or load it, or use None for the base model"
    )


def duplicate(name: str) -> AdapterError:
    """The error for a name that already stands for another adapter."""
    return AdapterError(
        f"a name must stand for one adapter; got {name!r} again with another source or content; "
        "reload it to replace the weights, or choose another name"
    )


def read(name: str, source: Source, spec: LoraSpec, max_rank: int) -> Adapter:
    """Reads, validates and packs an adapter: host work that changes nothing.

    Raises:
        AdapterError: It cannot be loaded, is not packed for the spec, or its largest rank is over
            the limit.
    """
    if isinstance(source, Adapter):
        adapter = source
    elif callable(source):
        adapter = source(name)
    else:
        adapter = adapters.load_adapter(source, spec, name=name)
    check_adapter(name, adapter, spec, max_rank)
    return adapter


def check_adapter(name: str, adapter: Adapter, spec: LoraSpec, max_rank: int) -> None:
    """Checks what a slot write needs, so that a write can only fail on the device.

    Raises:
        AdapterError: Rank, slots, targets, shapes or dtypes do not fit the spec.
    """
    if adapter.rank > max_rank:
        raise AdapterError(
            f"an adapter's largest module rank must be at most max_rank={max_rank}; got "
            f"{adapter.rank} for {name!r}; serve it with more num_slots or a larger max_rank, or "
            "train it with a smaller rank"
        )
    if not 1 <= adapter.num_slots <= spec.num_slots:
        raise AdapterError(
            f"an adapter must take 1 to num_slots={spec.num_slots} slots; got {adapter.num_slots} "
            f"for {name!r} of rank {adapter.rank}; build the spec with more num_slots"
        )
    targets = {t.name: t for t in spec.targets}
    missing = sorted(set(adapter.arrays) - set(targets))
    if missing:
        raise AdapterError(
            f"an adapter's targets must be among the spec's {sorted(targets)}; got {missing} for "
            f"{name!r}; build the spec with them"
        )
    for target, packed in adapter.arrays.items():
        for leaf, (shape, dtype) in _expected(targets[target], adapter.num_slots, spec).items():
            array = getattr(packed, leaf)
            if array.shape != shape or array.dtype != dtype:
                raise AdapterError(
                    f"an adapter must be packed for the manager's spec; got {leaf} {array.dtype}"
                    f"{list(array.shape)} for {dtype}{list(shape)} of {target!r} in {name!r}; "
                    "load it with this spec"
                )


def _expected(
    target: Target, blocks: int, spec: LoraSpec
) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
    L, R, G = spec.depth(target), spec.slot_rank, len(target.slices)
    dtype = np.dtype(spec.dtype)
    return {
        "A": ((blocks, L, G, R, target.d_in), dtype),
        "B": ((blocks, L, R, sum(target.slices)), dtype),
        "scale": ((blocks, L, G, R), np.dtype(np.float32)),
    }
