"""From a PEFT folder, or tensors in memory, to a packed adapter: parse, validate, pack."""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorajax.adapter import Adapter
from lorajax.adapters.config import read_config
from lorajax.adapters.copies import check_copies
from lorajax.adapters.digest import digest
from lorajax.adapters.fit import base_shapes, fit
from lorajax.adapters.names import check_name
from lorajax.adapters.pack import pack
from lorajax.adapters.peft_file import (
    PeftAdapter,
    describe,
    inspect_folder,
    report_others,
    unmatched_patterns,
)
from lorajax.adapters.problems import Problems
from lorajax.adapters.tensors import MemoryTensors
from lorajax.spec import LoraSpec


def load_adapter(source: str | Path, spec: LoraSpec, *, name: str | None = None) -> Adapter:
    """Loads a PEFT LoRA adapter from a local folder.

    Every tensor of the file is applied, or the load is refused; nothing is ever skipped. A module
    that the config targets but the file lacks stays zero, as in PEFT. Keys of rank_pattern and
    alpha_pattern that match no module have no effect, as in PEFT, and are warned of.

    Args:
        source: A folder with adapter_config.json and adapter_model.safetensors. A link to a file
            is followed within the folder, and to the blobs of a Hugging Face cache snapshot.
        spec: The slots to pack for.
        name: Letters, digits, ".", "_" and "-"; by default the folder's name.

    Returns:
        Host arrays in the spec's dtype.

    Raises:
        AdapterError: The adapter cannot be served exactly; the message tells every reason.
        SpecError: The spec's dtype cannot hold adapters.
    """
    adapter, problems = inspect_folder(source, name)
    return _build(adapter, spec, problems)


def adapter_from_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Any], spec: LoraSpec, *, name: str
) -> Adapter:
    """Builds an adapter from tensors in memory, with all checks of `load_adapter`.

    Args:
        config: The keys of an `adapter_config.json`.
        tensors: NumPy, ml_dtypes or JAX arrays by the names that a PEFT file gives them; they are
            copied.
        spec: The slots to pack for.
        name: Letters, digits, ".", "_" and "-".

    Raises:
        AdapterError: The adapter cannot be served exactly; the message tells every reason.
        SpecError: The spec's dtype cannot hold adapters.
    """
    adapter, problems = describe_tensors(config, tensors, check_name(name))
    return _build(adapter, spec, problems)


def describe_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Any], name: str
) -> tuple[PeftAdapter, Problems]:
    """An adapter in memory as `read_peft` describes a folder, and its problems so far.

    Raises:
        AdapterError: It is no PEFT LoRA, or a value is no array.
    """
    problems = Problems()
    raw = copy.deepcopy(dict(config))
    parsed = read_config(raw, problems)
    if raw.get("peft_type") != "LORA":
        problems.refuse(name)
    return describe(name, raw, parsed, MemoryTensors.of(tensors, name), problems), problems


def _build(adapter: PeftAdapter, spec: LoraSpec, problems: Problems) -> Adapter:
    placements = fit(adapter, spec, problems)
    report_others(adapter, problems, base_shapes(adapter, spec))
    problems.refuse(adapter.name)
    assert adapter.config is not None  # else it has been refused
    tensors = adapter.tensors.read()
    check_copies(adapter, tensors, spec, problems)
    arrays = pack(placements, tensors, spec, adapter.rank, problems)
    problems.refuse(adapter.name)
    factors = tensors.keys() - set(adapter.copies.values())
    for field, key in unmatched_patterns(adapter):
        warnings.warn(
            f"adapter {adapter.name!r}: {field} must match a module to have an effect; got "
            f"{key!r}, which matches none; drop it, or correct it if a module was meant",
            UserWarning,
            stacklevel=3,
        )
    return Adapter(
        name=adapter.name,
        digest=digest(adapter.config, {k: tensors[k] for k in factors}),
        rank=adapter.rank,
        num_slots=spec.slots_for_rank(adapter.rank),
        arrays=arrays,
        modules={m.path: (m.rank, m.scale) for m in adapter.modules.values()},
        config=adapter.raw,
    )
