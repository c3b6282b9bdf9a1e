"""What an adapter file repeats of the base's weights, compared with the base."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lorajax import families
from lorajax.adapters import names
from lorajax.adapters.peft_file import PeftAdapter
from lorajax.adapters.problems import Problems
from lorajax.checkpoint import Checkpoint
from lorajax.errors import ModelError
from lorajax.spec import LoraSpec

_DROP = "save the adapter with save_pretrained(..., save_embedding_layers=False)"


def check_copies(
    adapter: PeftAdapter, tensors: Mapping[str, np.ndarray], spec: LoraSpec, problems: Problems
) -> None:
    """Notes copies of base weights that are not the base's, or that nothing is known of.

    PEFT saves the weight below an adapted embedding or head, and loads it over the base's. If they
    are equal that changes nothing. Equal means in the copy's own element type, which is the one
    that training held the base in.
    """
    if not adapter.copies:
        return
    rule = "a copy of a base weight must equal the base's, which peft would replace by it"
    try:
        base = Checkpoint(Path(spec.base)) if spec.base is not None else {}
    except ModelError as error:
        problems.add(rule, f"a base that cannot be read: {error}", _DROP)
        return
    for path, tensor in adapter.copies.items():
        copy, weight = tensors[tensor], _weight(path, base, spec)
        if weight is None:
            problems.add(
                f"{rule}: it cannot be compared without the base",
                f"{tensor} {list(copy.shape)}",
                f"build the spec from the folder of the base model, or {_DROP}",
            )
        elif not _equal(weight, copy):
            problems.add(
                rule,
                f"{tensor} {copy.dtype.name}{list(copy.shape)} (base: {list(weight.shape)})",
                f"use an adapter of this base model; if the base is the same, {_DROP}",
            )


def _equal(weight: np.ndarray, copy: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(weight.astype(copy.dtype), copy)


def _weight(path: str, base: Mapping[str, np.ndarray], spec: LoraSpec) -> np.ndarray | None:
    """The base's weight of an embedding or head; that of a tied head is the embedding's."""
    at = names.locate(path, spec.layers, spec.outside)
    if at is None:
        return None
    own = f"{at.module}.weight"
    if own not in base and at.module == families.HEAD:
        own = f"{families.EMBEDDING}.weight"
    return base.get(own)
