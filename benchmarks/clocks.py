"""Clocks: wall time of calls that are queued together, and the device's own profile."""

import glob
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import jax

#: In the names of kernels that compute a product: this project's, cuBLAS's, Triton's and CUTLASS's.
PRODUCTS = ("lora_", "gemm", "nvjet", "cutlass", "cublas", "splitk", "matmul")


def compiled(function: Callable, *args) -> tuple[Callable, float]:
    """The compiled function, and the seconds that took; args may be shapes of arrays."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*args).compile()
    return program, time.perf_counter() - start


def median_us(function: Callable, *args, runs: int = 10, repeats: int = 5) -> float:
    """Median microseconds of a call, of several calls queued together, after warm-up."""
    for _ in range(2):
        jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(runs):
            out = function(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / runs)
    return statistics.median(times) * 1e6


@dataclass(frozen=True)
class Kernels:
    """What a device did in some calls, in microseconds a call.

    Attributes:
        products: Kernels that compute products.
        others: All other kernels and copies.
        gaps: Time between the first and the last kernel in which none ran. A profiler makes
            launches slower, so this is an upper bound.
        names: Microseconds and launches of each kernel.
    """

    products: float
    others: float
    gaps: float
    names: dict[str, tuple[float, float]] = field(repr=False)

    @property
    def busy(self) -> float:
        """Time in kernels."""
        return self.products + self.others


def summarize(events: Iterable[tuple[str, float, float]], calls: int) -> Kernels:
    """Sums of (name, start, duration) in nanoseconds, in any order.

    Raises:
        ValueError: There is no event.
    """
    events = sorted(events, key=lambda event: event[1])
    if not events:
        raise ValueError("a profile must hold kernels of a GPU; got none; run it on a GPU")
    spent, count, gaps, end = Counter(), Counter(), 0.0, events[0][1]
    for name, start, duration in events:
        spent[name] += duration
        count[name] += 1
        gaps += max(0.0, start - end)
        end = max(end, start + duration)
    unit = 1e3 * calls
    products = sum(t for n, t in spent.items() if any(p in n.lower() for p in PRODUCTS))
    return Kernels(
        products=products / unit,
        others=(spent.total() - products) / unit,
        gaps=gaps / unit,
        names={n: (t / unit, count[n] / calls) for n, t in spent.most_common()},
    )


def profile(function: Callable, *args, calls: int = 3) -> Kernels:
    """The kernels of a call, from the profile of several calls queued together."""
    for _ in range(2):
        jax.block_until_ready(function(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([function(*args) for _ in range(calls)])
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines]
    streams = [line for line in lines if "Stream" in line.name]
    return summarize(
        ((e.name, e.start_ns, e.duration_ns) for line in streams for e in line.events), calls
    )
