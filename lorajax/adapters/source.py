"""The folder of an adapter: where files may lie, and what is in them. Never the network."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorajax.adapters.problems import some
from lorajax.adapters.safetensors_file import SafetensorsFile, open_safetensors
from lorajax.errors import AdapterError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ADDED_TOKENS = "added_tokens.json"
_MAX_CONFIG_BYTES = 16 * 2**20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def local_folder(source: str | Path, name: str, root: Path | None = None) -> Path:
    """The adapter's folder, with links resolved.

    Args:
        source: An existing local folder. Any path that the caller can name is good, unless `root`
            is given.
        name: Of the adapter, for messages.
        root: A folder that must hold `source` once links and ".." are resolved: for sources that
            come from a request rather than from the operator.

    Raises:
        AdapterError: `source` is a URL or a hub id, is no folder, or lies outside `root`.
    """
    text = str(source)
    if "://" in text or "\0" in text:
        raise AdapterError(
            f"adapter {name!r}: source must be a local folder; got {text!r}; download the adapter "
            "and pass its folder"
        )
    try:
        folder = Path(source).resolve()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:
        raise AdapterError(
            f"adapter {name!r}: source must be a readable folder; got {error}; pass the folder "
            f"that holds {CONFIG}"
        ) from error
    if root is not None and not folder.is_relative_to(root.resolve()):
        raise AdapterError(
            f"adapter {name!r}: source must lie inside {str(root)!r}; got {text!r}; move the "
            "adapter there, without links that lead out"
        )
    if not is_folder:
        hub = " (a hub id? nothing is downloaded here)" if _HUB_ID.fullmatch(text) else ""
        raise AdapterError(
            f"adapter {name!r}: source must be an existing local folder; got {text!r}{hub}; pass "
            f"the folder that holds {CONFIG} and {WEIGHTS}"
        )
    return folder


def read_config_file(folder: Path, name: str) -> Mapping[str, Any]:
    """The folder's `adapter_config.json` as a mapping.

    Raises:
        AdapterError: It is missing, leads out of the folder, is too large, or no JSON object.
    """
    return _read_json(folder, CONFIG, name)


def read_added_tokens(folder: Path, name: str) -> Mapping[str, Any]:
    """Tokens that the adapter's tokenizer has beyond its vocabulary file, and their ids.

    Raises:
        AdapterError: The file is there and cannot be read.
    """
    return _read_json(folder, ADDED_TOKENS, name) if (folder / ADDED_TOKENS).exists() else {}


def _read_json(folder: Path, file: str, name: str) -> Mapping[str, Any]:
    path = _file(folder, file, name)
    try:
        size = path.stat().st_size
        if size > _MAX_CONFIG_BYTES:
            raise ValueError(f"{size} bytes, more than {_MAX_CONFIG_BYTES}")
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"a {type(raw).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(
            f"adapter {name!r}: {path} must hold one JSON object; got "
            f"{type(error).__name__}: {error}; save the adapter again"
        ) from error
    return raw


def open_weights(folder: Path, name: str) -> SafetensorsFile:
    """The folder's checked `adapter_model.safetensors`.

    Raises:
        AdapterError: It is missing, leads out of the folder, or is damaged.
    """
    return open_safetensors(_file(folder, WEIGHTS, name), name)


def _file(folder: Path, file: str, name: str) -> Path:
    """The path of a file in the folder.

    A link may lead elsewhere in the folder, or to the `blobs` of the Hugging Face cache whose
    snapshot the folder is (`.../snapshots/REVISION` beside `.../blobs`). Any other link could pull
    in a file that is no part of the adapter.
    """
    path = folder / file
    try:
        present = sorted(p.name for p in folder.iterdir())
        real, is_file = path.resolve(), path.is_file()
    except (OSError, RuntimeError) as error:
        raise AdapterError(
            f"adapter {name!r}: {folder} must be a readable folder; got {error}; check its rights"
        ) from error
    if not is_file:
        if "adapter_model.bin" in present and file == WEIGHTS:
            got = "adapter_model.bin, a pickle, which can run code when it is read"
            do = "load it with peft where you trust it and save_pretrained(safe_serialization=True)"
        else:
            got = f"a folder with {some(present)}" if present else "an empty folder"
            do = "pass the folder that peft's save_pretrained wrote"
        raise AdapterError(f"adapter {name!r}: {folder} must hold {file}; got {got}; {do}")
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(a) for a in allowed):
        raise AdapterError(
            f"adapter {name!r}: {file} must lie in the adapter's folder (or be a link into the "
            f"blobs of its Hugging Face cache); got a link to {real}; copy the file into {folder}"
        )
    return path
