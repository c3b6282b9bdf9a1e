"""A model's layers around their products, their random data, and the forms of a step.

A layer is its four products (q|k|v, o, gate|up, down) with the cheap work between them; attention
itself is left out, since LoRA does not touch it. Every layer has its own random weights, so nothing
is found in L2 that a real step would not find there. Adapters take turns if all layers' would fill
the memory: layer i uses those of layer i modulo their number.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from shapes import Case, Shapes

from lorajax.kernels_pallas import LoraWeights, lora_linear, make_routing

BF16 = jnp.bfloat16
POOL_BYTES = 8e9  #: Adapters of all layers together; many times L2.


@functools.partial(jax.jit, static_argnums=1)
def random(key, shape, deviation=0.02):
    """bfloat16 normals, made on the device."""
    return (jax.random.normal(key, shape, BF16) * deviation).astype(BF16)


def make_weights(shapes: Shapes, layers: int) -> dict[str, jax.Array]:
    """`[L, d_in, d_out]` for each module."""
    return {name: module_weights(shapes, layers, name) for name in shapes.modules}


def module_weights(shapes: Shapes, layers: int, name: str) -> jax.Array:
    """`[L, d_in, d_out]` of one module."""
    d_in, slices = shapes.modules[name]
    seed = 1 + list(shapes.modules).index(name)
    return random(jax.random.key(seed), (layers, d_in, sum(slices)))


def make_adapters(shapes: Shapes, layers: int, slots: int, rank: int) -> dict[str, LoraWeights]:
    """Every slot of every module filled, for as many layers as `POOL_BYTES` hold."""
    return {n: module_adapters(shapes, layers, n, slots=slots, rank=rank) for n in shapes.modules}


def module_adapters(
    shapes: Shapes, layers: int, name: str, *, slots: int, rank: int
) -> LoraWeights:
    """Every slot of one module filled, for as many layers as `make_adapters` has."""
    layers = max(1, min(layers, int(POOL_BYTES // (slots * rank * shapes.rank_bytes))))
    d_in, slices = shapes.modules[name]
    seed = 10 + list(shapes.modules).index(name)
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (layers, slots, len(slices), rank)
    return LoraWeights(
        A=random(keys[0], (*shape, d_in)),
        B=random(keys[1], (layers, slots, rank, sum(slices))),
        scale=jax.random.uniform(keys[2], shape, jnp.float32, 0.5, 2.0),
        slices=slices,
    )


def make_inputs(shapes: Shapes, case: Case) -> tuple[jax.Array, jax.Array]:
    """`[T, hidden]` and the row weights `[T, S]`."""
    x = random(jax.random.key(case.tokens), (case.tokens, shapes.hidden), 1.0)
    return x, jnp.asarray(case.rows(seed=case.tokens))


def unstack(tree) -> list:
    """One copy of each layer's arrays; those of adapters keep a leading axis of 1."""
    keep = isinstance(next(iter(tree.values())), LoraWeights)
    count = jax.tree.leaves(tree)[0].shape[0]
    return [take_layer(tree, jnp.int32(i), keep) for i in range(count)]


@functools.partial(jax.jit, static_argnames="keep")
def take_layer(tree, i, keep):
    """Layer i of stacked arrays, which may be traced."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=keep), tree)


def layer(shapes: Shapes, x, linear: Callable[[str, jax.Array], jax.Array]):
    """One layer around its four products."""
    q = linear("qkv", x)
    x = x + linear("o", q[:, : shapes.q])
    gate, up = jnp.split(linear("gate_up", x), 2, axis=1)
    x = x + linear("down", jax.nn.silu(gate) * up)
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + 1e-5).astype(BF16)


def base_step(shapes: Shapes, x, weights: list[dict[str, jax.Array]]):
    """Plain XLA without LoRA, unrolled over arrays of one layer each: its fastest form."""
    for w in weights:
        x = layer(shapes, x, lambda name, x, w=w: jnp.dot(x, w[name]))
    return x


def xla_step(shapes: Shapes, x, weights, adapters, rows):
    """The `xla` implementation, unrolled over arrays of one layer each: its fastest form."""
    route = make_routing(rows, jnp.arange(x.shape[0]))
    for i, w in enumerate(weights):
        a = adapters[i % len(adapters)]

        def linear(name, x, w=w, a=a):
            return lora_linear(x, w[name], a[name], route, implementation="xla")

        x = layer(shapes, x, linear)
    return x


def stacked_layer(shapes: Shapes, implementation: str, x, weights, adapters, route, i):
    """Layer i of stacked arrays; i may be traced."""
    pool = adapters["o"].A.shape[0]

    def linear(name, x):
        return lora_linear(
            x,
            weights[name],
            adapters[name],
            route,
            layer=lax.rem(i, jnp.int32(pool)),
            base_layer=i,
            implementation=implementation,
        )

    return layer(shapes, x, linear)


def loop_step(shapes: Shapes, implementation: str, x, weights, adapters, rows):
    """A loop that indexes stacked arrays: one layer is traced, lowered and compiled."""
    route = make_routing(rows, jnp.arange(x.shape[0]))

    def step(i, x):
        return stacked_layer(shapes, implementation, x, weights, adapters, route, i)

    return lax.fori_loop(0, weights["o"].shape[0], step, x)


def unrolled_step(shapes: Shapes, implementation: str, x, weights, adapters, rows):
    """The same layers without a loop, each a call of one inner function.

    The function is traced and lowered once; how often XLA compiles it is what `first_s` shows.
    """
    route = make_routing(rows, jnp.arange(x.shape[0]))
    one = jax.jit(functools.partial(stacked_layer, shapes, implementation))
    for i in range(weights["o"].shape[0]):
        x = one(x, weights, adapters, route, jnp.int32(i))
    return x
