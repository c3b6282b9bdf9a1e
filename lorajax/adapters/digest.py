"""The content hash of an adapter: the same on every host and for every spec."""

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from lorajax.adapters import names
from lorajax.adapters.config import PeftConfig


def digest(config: PeftConfig, tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of the fields that decide the arithmetic, and of all factors in name order.

    Names are taken as PEFT writes them, so an adapter has one digest, whether or not its keys carry
    the adapter's name. Each part is preceded by its length.
    """
    sha = hashlib.sha256()

    def part(data: bytes | memoryview) -> None:
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)

    chosen = config.selection
    fields = {
        "r": config.r,
        "lora_alpha": float(config.alpha),
        "use_rslora": config.use_rslora,
        "rank_pattern": [[k, float(v)] for k, v in config.rank_pattern.items],
        "alpha_pattern": [[k, float(v)] for k, v in config.alpha_pattern.items],
        "target_modules": chosen.targets,
        "exclude_modules": chosen.exclude,
        "layers_to_transform": chosen.layers,
        "layers_pattern": chosen.layers_pattern,
    }
    part(json.dumps(fields, sort_keys=True).encode())
    canonical = {names.canonical(tensor): array for tensor, array in tensors.items()}
    for tensor in sorted(canonical):
        array = np.ascontiguousarray(canonical[tensor])
        part(f"{tensor} {array.dtype.name} {list(array.shape)}".encode("utf-8", "surrogatepass"))
        part(array.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()
