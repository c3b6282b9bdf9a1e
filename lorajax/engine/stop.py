"""End-of-sequence ids of a model folder."""

import json
from pathlib import Path

from lorajax.errors import ModelError


def eos_token_ids(model_dir: str | Path) -> frozenset[int]:
    """The ids that end a continuation: of `generation_config.json`, else of `config.json`.

    Args:
        model_dir: Folder of the model. A file that is not there, or has no `eos_token_id`, says
            nothing; with neither, only max_tokens ends a continuation.

    Raises:
        ModelError: A file is not readable JSON, or `eos_token_id` is neither an int nor ints.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        if not path.exists():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{name} must be a JSON object; got {error} for {path}; restore the file, or "
                "delete a broken generation_config.json"
            ) from error
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(i) is not int for i in ids):
            raise ModelError(
                f"eos_token_id must be an int or a list of ints; got {value!r} in {path}; "
                "correct the file"
            )
        return frozenset(ids)
    return frozenset()
