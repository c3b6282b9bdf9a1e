"""Command line arguments to values."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from lorajax import families
from lorajax.adapters import explain
from lorajax.errors import LoraError
from lorajax.spec import LoraSpec

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

#: Axes of `--mesh`.
MESH_AXES = ("data", "fsdp", "tensor")

#: Slots of a spec that only reads adapters: any rank fits, and no arrays are made.
UNBOUNDED_SLOTS = 1 << 16


class UsageError(LoraError):
    """Arguments that cannot be used: exit status 2."""


def adapter_folders(options: Sequence[str]) -> dict[str, Path]:
    """`NAME=DIR` options as a mapping.

    Raises:
        UsageError: One is not of this form, a name is given twice, or a folder is not there.
    """
    folders: dict[str, Path] = {}
    for option in options:
        name, equals, folder = option.partition("=")
        if not (name and equals and folder):
            raise UsageError(
                f"--adapter must be NAME=DIR; got {option!r}; write --adapter sql=adapters/sql"
            )
        if name in folders:
            raise UsageError(f"an adapter's name must be given once; got {name!r} twice; drop one")
        folders[name] = Path(folder)
        check_folder(folders[name], f"adapter {name!r}", "adapter_config.json")
    return folders


def spec_for(
    model: Path, adapters: Iterable[Path], *, slot_rank: int, dtype: DTypeLike | None = None
) -> LoraSpec:
    """A spec to read adapters with: all linear layers, and what else the adapters have."""
    named = [name for folder in adapters for name in explain(folder).module_names]
    return LoraSpec.from_hf_config(
        model,
        num_slots=UNBOUNDED_SLOTS,
        slot_rank=slot_rank,
        dtype=dtype,
        targets=families.targets_for(named),
    )


def mesh_axes(option: str | None) -> dict[str, int] | None:
    """`--mesh data=2,tensor=4` as axes and sizes.

    Raises:
        UsageError: It is not of this form, or an axis is unknown or given twice.
    """
    if option is None:
        return None
    axes: dict[str, int] = {}
    for part in option.split(","):
        name, equals, size = part.strip().partition("=")
        if name not in MESH_AXES or not equals or not size.isdecimal() or int(size) < 1:
            raise UsageError(
                f"--mesh must be AXIS=SIZE,... with axes of {list(MESH_AXES)}; got {part!r}; "
                "write --mesh data=2,tensor=4"
            )
        if name in axes:
            raise UsageError(f"an axis of --mesh must be given once; got {name!r} twice; drop one")
        axes[name] = int(size)
    return axes


def check_folder(path: Path, what: str, file: str) -> None:
    """Checks that a folder is there and has a file.

    Raises:
        UsageError: It is not.
    """
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise UsageError(f"{what} must be a folder; got {found} at {path}; correct the path")
    if not (path / file).is_file():
        raise UsageError(f"{what} must have a {file}; got none in {path}; correct the path")


def check_output(path: Path) -> None:
    """Checks, as far as can be seen without writing, that a file can be made.

    Raises:
        UsageError: The path is a folder, or its folder is not there.
    """
    if path.is_dir():
        raise UsageError(f"an output must be a file; got the folder {path}; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(
            f"the folder of an output must be there; got {path}; make {path.parent} first"
        )


def dtype(name: str | None, model_dtype: str) -> DTypeLike:
    """The element type to serve in: the one asked for, else the model's, else float32.

    Args:
        name: "float32", "bfloat16" or None.
        model_dtype: Of the model's config; float16 and others are served in float32.

    Raises:
        UsageError: `name` is another one.
    """
    if name is not None and name not in DTYPES:
        raise UsageError(f"--dtype must be one of {list(DTYPES)}; got {name!r}; use one of them")
    return DTYPES.get(model_dtype, jnp.float32) if name is None else DTYPES[name]
