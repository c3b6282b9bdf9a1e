# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sharding on eight devices
#
# The same model and adapters on one device and on a mesh of eight. The devices are virtual ones of
# this CPU: what is shown is where arrays lie, what moves between devices, and that the tokens are
# the same. It says nothing about speed.

# %%
# %pip install --quiet --editable "..[notebook]"

# %%
import functools
import re
import tempfile
from collections import Counter
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import lorajax as lj
from lorajax import models
from lorajax.engine import CompileCounter, Engine, Request, Steps
from lorajax.models.synthetic import (
    RECIPES,
    SyntheticBase,
    make_adapter,
    write_adapter,
    write_base,
)
from lorajax.sharding import Partition, abstract_slots, sharded, state_shardings

folder = Path(tempfile.mkdtemp())
sizes = SyntheticBase(num_attention_heads=8, num_key_value_heads=2)
base = write_base(folder / "base", sizes)
sources = {r.name: write_adapter(folder / r.name, make_adapter(sizes, r)) for r in RECIPES}
spec = lj.LoraSpec.from_hf_config(base, num_slots=8, slot_rank=16)

# %% [markdown]
# ## A mesh
#
# `data` cuts the rows of a batch, `tensor` the features of the model. The model has 8 query heads
# and only 2 key-value heads, fewer than the 4 devices of the tensor axis.

# %%
mesh = jax.make_mesh((2, 4), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
partition = Partition.of(mesh)


def engine_on(partition):
    """A model, its slots and its serving loop, on a mesh or on one device."""
    shardings = None if partition is None else state_shardings(spec, partition.mesh)
    manager = lj.AdapterManager(spec, sources=sources, shardings=shardings)
    steps = Steps(models.load_model(base, partition=partition), partition=partition)
    return Engine(steps, manager, num_rows=8, max_length=32)


one, eight = engine_on(None), engine_on(partition)

# %% [markdown]
# ## The same tokens

# %%
rng = np.random.default_rng(0)
rows = [None, *list(sources)[:4], {"sql": 0.7, "chat": 0.3}, *list(sources)[4:], None]
requests = [
    Request(str(i), tuple(rng.integers(3, sizes.vocab_size, 6).tolist()), 6, row)
    for i, row in enumerate(rows)
]


def tokens_of(engine):
    return {r.request.id: r.token_ids for r in engine.serve(requests)}


want, got = tokens_of(one), tokens_of(eight)
for request in requests:
    print(f"{request.adapter!s:28} {got[request.id]}")
assert got == want

# %% [markdown]
# ## Where the columns lie
#
# Each device needs the columns of q, k and v of its own heads. A plain cut of q|k|v would give the
# first devices only q. So the columns are laid out as q₀|k₀|v₀|q₁|k₁|v₁ and so on, in the base
# weight and in B, when they are written. A key-value head that two devices need is on both.

# %%
slots = eight.manager.state["self_attn.qkv_proj"]
columns, head = slots.columns, sizes.hidden_size // sizes.num_attention_heads
names = [f"q{i}" for i in range(8)] + ["k0", "k1", "v0", "v1"]
held = columns.order().reshape(4, -1) // head
figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
axes.imshow(held, aspect="auto", cmap="tab20", interpolation="nearest")
for device, heads in enumerate(held):
    for start in range(0, len(heads), head):
        axes.text(start + head / 2 - 0.5, device, names[heads[start]], ha="center", va="center")
axes.set(yticks=range(4), ylabel="device of `tensor`", xlabel="column on the device", title="q|k|v")
plt.show()

shard = slots.parts[0].B.addressable_shards[0]
print("B of all devices", slots.parts[0].B.shape, "on one", shard.data.shape)

# %% [markdown]
# ## Swap an adapter
#
# A new version is written into the shards that each device has; nothing is compiled.

# %%
with CompileCounter() as compiles:
    for engine in (one, eight):
        newer = write_adapter(folder / "newer", make_adapter(sizes, RECIPES[0], seed=1))
        engine.manager.reload(RECIPES[0].name, newer)
    swapped = tokens_of(eight)
    assert swapped == tokens_of(one) != want
print("new compiles:", compiles.count)
assert compiles.count == 0

# %% [markdown]
# ## What moves between devices
#
# Counted in the compiled decode step, without slots and with them: the same. The delta of a row
# product (`o_proj`, `down_proj`) is added to the base's partial sum before its all-reduce.


# %%
def collectives(lora):
    config = models.ModelConfig.from_hf(base)
    graphdef, params = nnx.split(models.abstract_model(config, partition))
    step = models.on_devices(functools.partial(models.decode, graphdef), params, partition)

    def rows(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=partition.sharding("rows"))

    program = jax.jit(step).lower(
        params,
        abstract_slots(spec, partition) if lora else None,
        models.abstract_cache(config, partition, 8, 32),
        rows((8,), np.int32),
        rows((8,), np.int32),
        rows((8, 8), np.float32) if lora else None,
    )
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", program.compile().as_text()))


print("base       ", dict(collectives(lora=False)))
print("with slots ", dict(collectives(lora=True)))
assert collectives(lora=False) == collectives(lora=True)

# %% [markdown]
# ## A loop of your own
#
# `sharded(mesh)` has the ops under their own names, for whole arrays on the mesh.

# %%
ops = sharded(mesh)
target = spec.target("mlp.down_proj")


@jax.jit
def step(w, lora, x, row_weights, token_row):
    route = ops.make_routing(row_weights, token_row)
    return ops.lora_linear(x, w, lora["mlp.down_proj"], route, layer=0)


x = rng.standard_normal((4, target.d_in), np.float32)
w = rng.standard_normal((target.d_in, sum(target.slices)), np.float32)
with eight.manager.lease(["sql", None, "chat", {"sql": 0.7, "chat": 0.3}]) as lease:
    y = step(
        partition.put(w, "tensor", None),
        eight.manager.state,
        partition.put(x, "rows", "tensor"),
        partition.put(lease.row_weights, None, None),
        partition.put(np.arange(4, dtype=np.int32), "rows"),
    )
print(y.shape, y.sharding.spec)
np.testing.assert_allclose(y[1], x[1] @ w, rtol=1e-4, atol=1e-4)  # the base row
assert float(jnp.abs(y[0] - x[0] @ w).max()) > 0.1
