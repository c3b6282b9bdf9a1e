"""Writes an adapter as PEFT writes it."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from lorajax.adapters.load import describe_tensors
from lorajax.adapters.names import canonical
from lorajax.adapters.peft_file import report_others
from lorajax.adapters.source import CONFIG, WEIGHTS
from lorajax.errors import AdapterError


def save_adapter(path: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Writes a PEFT folder that `peft` and `load_adapter` read; the digest is unchanged by it.

    The folder appears whole or not at all.

    Args:
        path: A folder that does not exist yet, or is empty.
        config: Keys of `adapter_config.json`; "peft_type" may be left out.
        tensors: NumPy, ml_dtypes or JAX arrays by "<module path>.lora_A.weight"; PEFT's own prefix
            "base_model.model." may be left out.

    Returns:
        The folder.

    Raises:
        AdapterError: The adapter is not one that can be loaded, or `path` is taken; nothing was
            written.
    """
    folder = Path(path)
    raw = {"peft_type": "LORA", **config}
    adapter, problems = describe_tensors(raw, tensors, folder.name)
    report_others(adapter, problems)
    problems.refuse(folder.name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AdapterError(
            f"adapter {folder.name!r}: path must be a new or empty folder; got {folder}, which is "
            "taken; choose another, or remove it first"
        )
    arrays = {canonical(k): np.ascontiguousarray(v) for k, v in adapter.tensors.read().items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        safetensors.numpy.save_file(arrays, work / WEIGHTS, metadata={"format": "pt"})
        # Keys of a pattern keep their order: the first that matches decides.
        text = json.dumps(dict(sorted(raw.items())), indent=2, default=_as_list)
        (work / CONFIG).write_text(text + "\n", encoding="utf-8")
        work.chmod(0o755)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _as_list(value: object) -> list[Any]:
    """Sets, as in a live `peft.LoraConfig`, become lists."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")
