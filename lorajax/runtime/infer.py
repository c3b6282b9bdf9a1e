"""A spec from the adapters that are to be served."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jax.typing import DTypeLike

from lorajax import families
from lorajax.adapters import PeftAdapter, read_peft
from lorajax.adapters.names import locate
from lorajax.errors import SpecError
from lorajax.spec import LoraSpec


def infer_spec(
    hf_config: object,
    adapters: Sequence[str | Path] = (),
    *,
    num_slots: int,
    slot_rank: int | None = None,
    targets: Sequence[str] | None = None,
    max_rank: int | None = None,
    dtype: DTypeLike | None = None,
    merged: bool = True,
    stack_layers: bool = False,
) -> LoraSpec:
    """The smallest spec that serves these adapters, or the asked one if it does.

    Args:
        hf_config: The base model's `config.json`, as for `LoraSpec.from_hf_config`.
        adapters: PEFT folders. Only their configs and tensor shapes are read.
        num_slots: S.
        slot_rank: R, by default 16. The manager's `max_rank` is at most S R.
        targets: Modules to make adaptable ("q_proj", "lm_head", ...), more than the adapters have
            if more are to come; by default the union of the adapters' modules.
        max_rank: Largest rank to accept, of these and later ones; by default the largest of these.
        dtype: As for `LoraSpec.from_hf_config`.
        merged: As there.
        stack_layers: As there.

    Raises:
        AdapterError: An adapter cannot be read or is of a kind that is not served.
        SpecError: There is neither an adapter nor `targets`; a module is none of the base's or not
            among `targets`; or a rank does not fit `max_rank` or the slots.
    """
    if not adapters and targets is None:
        raise SpecError(
            "a spec must be inferred from adapters or be given targets; got neither; name the "
            "folders of the adapters, or the modules to make adaptable"
        )
    read = [read_peft(path) for path in adapters]
    named = [name for adapter in read for name in adapter.module_names]
    base = LoraSpec.from_hf_config(
        hf_config,
        num_slots=num_slots,
        slot_rank=16 if slot_rank is None else slot_rank,
        dtype=dtype,
        targets=families.targets_for(named) if targets is None else tuple(targets),
        merged=merged,
        stack_layers=stack_layers,
    )
    modules = {m for adapter in read for m in _modules(adapter, base)}
    _check_ranks(read, base, max_rank)
    return base if targets is not None else _restricted(base, modules)


def _modules(adapter: PeftAdapter, base: LoraSpec) -> set[str]:
    """The spec's modules that an adapter touches; a fused module is all its parts."""
    fused = dict(base.fused)
    found = (_spelled(name, base) for name in adapter.module_names)
    modules = {part for name in found for part in fused.get(name, (name,))}
    unknown = sorted(modules - set(base.module_slices))
    if unknown:
        raise SpecError(
            f"an adapter's modules must be among the spec's {sorted(base.module_slices)}; got "
            f"{unknown} in {adapter.name!r}; add them to targets if they are modules of the base "
            "model, or drop the adapter"
        )
    return modules


def _spelled(name: str, base: LoraSpec) -> str:
    """The spec's spelling of a module outside of the layers; other names as they are."""
    at = locate(name, base.layers, base.outside)
    return name if at is None else at.module


def _check_ranks(read: Sequence[PeftAdapter], base: LoraSpec, max_rank: int | None) -> None:
    room = base.num_slots * base.slot_rank
    largest = max((a.rank for a in read), default=0) if max_rank is None else max_rank
    for adapter in read:
        if adapter.rank > largest:
            raise SpecError(
                f"ranks must be at most max_rank={largest}; got {adapter.rank} in "
                f"{adapter.name!r}; raise max_rank, or drop the adapter"
            )
    if largest > room:
        raise SpecError(
            f"the slots together must hold the largest rank; got {base.num_slots} slots of rank "
            f"{base.slot_rank} for rank {largest}; use at least {base.slots_for_rank(largest)} "
            "slots, or a larger slot_rank"
        )


def _restricted(base: LoraSpec, modules: set[str]) -> LoraSpec:
    """The spec with only the targets that hold these modules (a merged target stays whole)."""
    targets = tuple(t for t in base.targets if modules & set(t.modules))
    kept = {m for t in targets for m in t.modules}
    fused = tuple((name, parts) for name, parts in base.fused if set(parts) <= kept)
    return replace(base, targets=targets, fused=fused)
