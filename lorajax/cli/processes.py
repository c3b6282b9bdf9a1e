"""Devices and processes that serve one command together."""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import jax
from jax.sharding import AxisType

from lorajax.cli.options import UsageError
from lorajax.sharding import Partition, connect

#: Seconds that process 0 stays after an error: it serves the others' connection, and they should
#: print their own errors first.
_LAST = 2.0


@dataclass(frozen=True)
class Processes:
    """Where to meet the others: all None asks the cluster (TPU pods, Slurm).

    Attributes:
        coordinator: `HOST:PORT` of process 0.
        num: How many there are.
        id: Which one this is.
    """

    coordinator: str | None
    num: int | None
    id: int | None


def join(processes: Processes | None) -> bool:
    """Meets the other processes, if there are any.

    Returns:
        Whether this is the process that writes.

    Raises:
        UsageError: Half of the arguments were given, or the others cannot be reached.
    """
    if processes is None:
        return True
    given = (processes.coordinator, processes.num, processes.id)
    if any(g is None for g in given) and any(g is not None for g in given):
        raise UsageError(
            "--coordinator, --num-processes and --process-id must be given together; got "
            f"{given}; give all three, or --distributed alone to ask the cluster"
        )
    try:
        connect(*given)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"processes must be able to meet; got {error}; start them all with the same "
            "--coordinator and --num-processes, each with its own --process-id"
        ) from error
    return jax.process_index() == 0


def leave(status: int) -> NoReturn:
    """Ends a process after an error, without the others: an ordinary exit would wait for them."""
    if jax.process_index() == 0:
        time.sleep(_LAST)
    os._exit(status)


def partition_of(mesh: Mapping[str, int] | None) -> Partition | None:
    """The devices of `--mesh`, or None for one device.

    Raises:
        UsageError: There are fewer devices, or several processes without a mesh over all of them.
    """
    devices, processes = jax.device_count(), jax.process_count()
    if mesh is None:
        if processes > 1:
            raise UsageError(
                f"{processes} processes must share a mesh of their {devices} devices; got none; "
                f"give --mesh, for example tensor={devices}"
            )
        return None
    size = math.prod(mesh.values())
    if size > devices or (processes > 1 and size != devices):
        rule = "be all of" if processes > 1 else "be at most"
        raise UsageError(
            f"the devices of --mesh must {rule} the {devices} that there are; got {size} in "
            f"{dict(mesh)}; give other sizes (on a CPU, set JAX_NUM_CPU_DEVICES={size} first)"
        )
    axes = (AxisType.Auto,) * len(mesh)
    return Partition.of(
        jax.make_mesh(tuple(mesh.values()), tuple(mesh), axes, devices=jax.devices()[:size])
    )
