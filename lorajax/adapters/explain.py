"""What an adapter folder holds and whether it can be served, told without raising."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorajax.adapters.copies import check_copies
from lorajax.adapters.fit import absent, base_shapes, fit
from lorajax.adapters.pack import pack
from lorajax.adapters.peft_file import (
    LoraModule,
    default_name,
    inspect_folder,
    report_others,
    unmatched_patterns,
)
from lorajax.adapters.problems import some
from lorajax.errors import AdapterError
from lorajax.spec import LoraSpec


@dataclass(frozen=True)
class Explanation:
    """One adapter folder.

    Attributes:
        name: Of the adapter.
        problems: Every reason to refuse it; empty if it can be served.
        notes: What is worth knowing though it is no problem.
        raw: Its `adapter_config.json`; empty if unreadable.
        modules: Its modules by path: rank, scale, shapes.
        module_names: Modules that it adapts, below the layer.
        rank: Largest rank.
        nbytes: Bytes of its tensors as stored.
        num_slots: Slots it takes; None without a spec.
        device_bytes: Bytes it takes in the slots; None without a spec.
    """

    name: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, LoraModule] = field(default_factory=dict)
    module_names: tuple[str, ...] = ()
    rank: int = 0
    nbytes: int = 0
    num_slots: int | None = None
    device_bytes: int | None = None


def explain(
    source: str | Path, spec: LoraSpec | None = None, *, name: str | None = None
) -> Explanation:
    """Describes an adapter folder, with every reason for which `load_adapter` would refuse it.

    Args:
        source: See `load_adapter`.
        spec: The slots it would go to; without one, only what holds for every base is checked.
        name: See `load_adapter`.
    """
    try:
        adapter, problems = inspect_folder(source, name)
    except AdapterError as error:
        return Explanation(name or default_name(source), (str(error),))
    notes = [
        f"{pattern} key {key!r} matches no module, so it has no effect"
        for pattern, key in unmatched_patterns(adapter)
    ]
    if spec is None and adapter.copies:
        repeated = some(adapter.copies.values())
        notes.append(f"repeats weights of its base, which must equal the served one's: {repeated}")
    placements = [] if spec is None else fit(adapter, spec, problems)
    report_others(adapter, problems, None if spec is None else base_shapes(adapter, spec))
    if spec is not None and not problems:
        missing = absent(adapter, spec, placements)
        if missing:
            notes.append(f"targeted but not in the file, so left unchanged: {some(missing)}")
        try:
            tensors = adapter.tensors.read()
            check_copies(adapter, tensors, spec, problems)
            pack(placements, tensors, spec, adapter.rank, problems)
        except AdapterError as error:
            return Explanation(adapter.name, (str(error),), raw=adapter.raw)
    return Explanation(
        name=adapter.name,
        problems=problems.messages(),
        notes=tuple(notes),
        raw=adapter.raw,
        modules=adapter.modules,
        module_names=adapter.module_names,
        rank=adapter.rank,
        nbytes=adapter.nbytes,
        num_slots=None if spec is None else spec.slots_for_rank(adapter.rank),
        device_bytes=None if spec is None else spec.adapter_bytes(adapter.rank),
    )
