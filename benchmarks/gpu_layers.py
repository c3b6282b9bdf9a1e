"""Shared by decode.py and prefill.py: the products of Llama-3.1-8B, their data, checks and clocks.

A layer is its four products (q|k|v, o, gate|up, down) with the cheap work between them; attention
itself is left out, since LoRA does not touch it. Every layer has its own random weights, so nothing
is found in L2 that a real step would not find there.
"""

import functools
import glob
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lorajax.kernels_pallas import LoraWeights, lora_linear, make_routing

HIDDEN, FFN = 4096, 14336
MODULES = {
    "qkv": (HIDDEN, (HIDDEN, 1024, 1024)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (FFN, FFN)),
    "down": (FFN, (HIDDEN,)),
}
BANDWIDTH = 4.25e12  #: Bytes/s that a device-to-device copy reaches on an H200.
BF16 = jnp.bfloat16


@functools.partial(jax.jit, static_argnums=1)
def random(key, shape, deviation=0.02):
    """bfloat16 normals, made on the device."""
    return (jax.random.normal(key, shape, BF16) * deviation).astype(BF16)


@dataclass(frozen=True)
class Case:
    """One cell: tokens, distinct adapters of one rank, and the rank of a slot."""

    tokens: int
    adapters: int
    rank: int

    @property
    def slot_rank(self) -> int:
        """R: 16, or less for a smaller rank."""
        return min(self.rank, 16)

    def weights(self, slots: int, seed: int) -> jax.Array:
        """`[T, S]`: the tokens' adapters spread evenly over random slots, in random order."""
        rng = np.random.default_rng(seed)
        each = self.rank // self.slot_rank
        held = rng.permutation(slots)[: self.adapters * each].reshape(self.adapters, each)
        rows = np.zeros((self.tokens, slots), np.float32)
        of = rng.permutation(np.arange(self.tokens) % self.adapters)
        rows[np.arange(self.tokens)[:, None], held[of]] = 1.0
        return jnp.asarray(rows)

    def floor_us(self) -> float:
        """Microseconds a layer to move weights, the active adapters, x and y once."""
        size = 0
        for d_in, slices in MODULES.values():
            d_out = sum(slices)
            size += d_in * d_out + self.tokens * (d_in + d_out)
            size += self.adapters * self.rank * (d_in * len(slices) + d_out)
        return 2 * size / BANDWIDTH * 1e6


def make_weights(layers: int, seed: int) -> dict[str, jax.Array]:
    """`[L, d_in, d_out]` for each module."""
    return {
        name: random(jax.random.key(seed + i), (layers, d_in, sum(slices)))
        for i, (name, (d_in, slices)) in enumerate(MODULES.items())
    }


def make_adapters(layers: int, slots: int, rank: int, seed: int) -> dict[str, LoraWeights]:
    """Every slot of every module filled."""
    out = {}
    for i, (name, (d_in, slices)) in enumerate(MODULES.items()):
        keys = jax.random.split(jax.random.key(seed + i), 3)
        shape = (layers, slots, len(slices), rank)
        out[name] = LoraWeights(
            A=random(keys[0], (*shape, d_in)),
            B=random(keys[1], (layers, slots, rank, sum(slices))),
            scale=jax.random.uniform(keys[2], shape, jnp.float32, 0.5, 2.0),
            slices=slices,
        )
    return out


def layer(x, linear: Callable[[str, jax.Array], jax.Array]):
    """One layer around its four products."""
    q = linear("qkv", x)
    x = x + linear("o", q[:, :HIDDEN])
    gate = linear("gate_up", x)
    x = x + linear("down", jax.nn.silu(gate[:, :FFN]) * gate[:, FFN:])
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + 1e-5).astype(BF16)


def base_step(x, weights: list[dict[str, jax.Array]]):
    """Plain XLA without LoRA, unrolled: its fastest form."""
    for w in weights:
        x = layer(x, lambda name, x, w=w: jnp.dot(x, w[name]))
    return x


def xla_step(x, weights, adapters, rows):
    """The `xla` implementation, unrolled over arrays of one layer each: its fastest form."""
    route = make_routing(rows, jnp.arange(x.shape[0]))
    for w, a in zip(weights, adapters, strict=True):

        def linear(name, x, w=w, a=a):
            return lora_linear(x, w[name], a[name], route, implementation="xla")

        x = layer(x, linear)
    return x


def fused_step(x, weights, adapters, rows):
    """The `mosaic_gpu` implementation: a loop that indexes stacked arrays."""
    route = make_routing(rows, jnp.arange(x.shape[0]))

    def step(i, x):
        def linear(name, x):
            return lora_linear(
                x, weights[name], adapters[name], route, layer=i, implementation="mosaic_gpu"
            )

        return layer(x, linear)

    return lax.fori_loop(0, weights["o"].shape[0], step, x)


def unstack(tree, layers: int) -> list:
    """One copy of each layer's arrays, with a leading axis of 1 in adapters."""

    @functools.partial(jax.jit, static_argnums=1)
    def take(tree, i):
        return jax.tree.map(lambda a: a[i : i + 1] if a.ndim > 3 or a.dtype != BF16 else a[i], tree)

    return [take(tree, i) for i in range(layers)]


def median_us(function, *args, runs: int = 3, repeats: int = 7) -> float:
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


def kernel_us(function, *args, calls: int = 3) -> float:
    """Microseconds that the device works on a call, from its profile: launch gaps do not count."""
    for _ in range(2):
        jax.block_until_ready(function(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([function(*args) for _ in range(calls)])
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
    busy = sum(
        event.duration_ns
        for plane in profile.planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    )
    return busy / calls / 1e3


def poison(shape: tuple[int, ...], dtype) -> None:
    """Leaves NaN in freed memory, where an output that is not written would find it."""
    for array in [jnp.full(shape, jnp.nan, dtype) for _ in range(4)]:
        array.block_until_ready()
        array.delete()


@functools.partial(jax.jit, static_argnames="implementation")
def one_module(x, w, adapters, rows, implementation):
    """One module of the first layer."""
    route = make_routing(rows, jnp.arange(x.shape[0]))
    return lora_linear(x, w, adapters, route, implementation=implementation)


def error(name: str, case: Case, w, adapters, rows, seed: int) -> tuple[float, float]:
    """(relative error of mosaic_gpu, of xla) against float32 on fresh inputs; NaN if unwritten."""
    d_in, slices = MODULES[name]
    x = random(jax.random.key(seed), (case.tokens, d_in), 1.0)
    w, adapters = w[:1], jax.tree.map(lambda a: a[:1], adapters)
    wide = [jax.tree.map(lambda a: a.astype(jnp.float32), t) for t in (x, w, adapters)]
    with jax.default_matmul_precision("highest"):
        exact = np.asarray(one_module(*wide, rows, "xla"), np.float64)
    found = []
    for implementation in ("mosaic_gpu", "xla"):
        poison((case.tokens, sum(slices)), BF16)
        y = np.asarray(one_module(x, w, adapters, rows, implementation), np.float64)
        found.append(float(np.linalg.norm(y - exact) / np.linalg.norm(exact)))
    return found[0], found[1]
