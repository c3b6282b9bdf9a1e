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
# # lorajax in ten minutes
#
# One base model, many LoRA adapters, one compiled step. This notebook needs no accelerator and no
# download: it makes a small Llama and its adapters, in the files' true Hugging Face form.

# %%
# %pip install --quiet --editable "..[notebook]"

# %%
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import lorajax as lj
from lorajax.models import init_cache, load_model, prefill
from lorajax.models.synthetic import (
    RECIPES,
    AdapterRecipe,
    SyntheticBase,
    make_adapter,
    write_adapter,
    write_base,
)

folder = Path(tempfile.mkdtemp())
sizes = SyntheticBase(hidden_size=128, intermediate_size=320)
base = write_base(folder / "base", sizes)
adapters = {r.name: write_adapter(folder / r.name, make_adapter(sizes, r)) for r in RECIPES}
for recipe in RECIPES:
    print(f"{recipe.name:6} rank {recipe.rank:<3} {recipe.about}")

# %% [markdown]
# ## Load
#
# A *spec* says what can be adapted and how many slots there are. A slot has rank 16; an adapter of
# rank 64 takes four. The manager knows the adapters by name and reads a file when it is first
# needed.

# %%
spec = lj.LoraSpec.from_hf_config(base, num_slots=8, slot_rank=16)
manager = lj.AdapterManager(spec, sources=adapters)
print(spec)

# %% [markdown]
# The model is a flax NNX module; its steps are pure functions of pytrees. The slots are one of the
# arguments.

# %%
graphdef, params = nnx.split(load_model(base))
step = jax.jit(prefill, static_argnums=0)
rng = np.random.default_rng(0)


def scores(rows, tokens):
    """Logits after each prompt; `rows` says which adapters each prompt uses."""
    N, Q = tokens.shape
    cache = init_cache(sizes_of_model, N, Q, jnp.float32)
    lengths, places = jnp.full(N, Q, jnp.int32), jnp.arange(N, dtype=jnp.int32)
    with manager.lease(rows) as lease:
        logits, _ = step(
            graphdef, params, manager.state, cache, tokens, lengths, places, lease.row_weights
        )
        return np.asarray(logits)


sizes_of_model = nnx.merge(graphdef, params).config

# %% [markdown]
# ## Serve a mixed batch
#
# Four requests with the same prompt: an adapter, the base, another adapter, and a weighted mix.

# %%
prompt = rng.integers(3, sizes.vocab_size, 8)
tokens = jnp.asarray(np.tile(prompt, (4, 1)), jnp.int32)
rows = ["sql", None, "chat", {"sql": 0.7, "chat": 0.3}]
mixed = scores(rows, tokens)
for row, logits in zip(rows, mixed, strict=True):
    print(f"{row!s:28} next token {logits.argmax()}")

# %% [markdown]
# The base row is bit-equal to the plain model, whatever the other rows do.

# %%
places = jnp.arange(4, dtype=jnp.int32)
plain, _ = step(
    graphdef,
    params,
    None,
    init_cache(sizes_of_model, 4, 8, jnp.float32),
    tokens,
    jnp.full(4, 8, jnp.int32),
    places,
    None,
)
assert np.array_equal(mixed[1], np.asarray(plain)[1])
assert not np.array_equal(mixed[0], np.asarray(plain)[0])

# %% [markdown]
# ## Swap an adapter
#
# `reload` gives a name new weights. Leases that run keep the old ones; the next lease gets the new.
# Nothing is compiled again.

# %%
compiled = step._cache_size()
newer = make_adapter(sizes, RECIPES[0], seed=1)
manager.reload("chat", write_adapter(folder / "chat-2", newer))
swapped = scores(rows, tokens)
assert not np.array_equal(swapped[2], mixed[2])
assert np.array_equal(swapped[0], mixed[0])
assert step._cache_size() == compiled
print("chat changed, sql did not, nothing was compiled")
print(manager.stats)

# %% [markdown]
# ## What it costs
#
# The time of a step for 16 rows against the number of distinct adapters in the batch. The dashed
# line is the base alone.

# %%
many = {f"a{i}": AdapterRecipe(f"a{i}", 16) for i in range(16)}
paths = {name: write_adapter(folder / name, make_adapter(sizes, r)) for name, r in many.items()}
wide = lj.LoraSpec.from_hf_config(base, num_slots=16, slot_rank=16)
pool = lj.AdapterManager(wide, sources=paths)
tokens = jnp.asarray(rng.integers(3, sizes.vocab_size, (16, 8)), jnp.int32)
lengths, places = jnp.full(16, 8, jnp.int32), jnp.arange(16, dtype=jnp.int32)
empty = init_cache(sizes_of_model, 16, 8, jnp.float32)


def milliseconds(lora, row_weights):
    """Median time of a step."""
    times = []
    for _ in range(30):
        start = time.perf_counter()
        jax.block_until_ready(
            step(graphdef, params, lora, empty, tokens, lengths, places, row_weights)
        )
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times[5:]))


counts = [0, 1, 2, 4, 8, 16]
with_lora = []
for count in counts:
    with pool.lease([f"a{i % count}" if count else None for i in range(16)]) as lease:
        with_lora.append(milliseconds(pool.state, lease.row_weights))
alone = milliseconds(None, None)

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(counts, with_lora, marker="o", label="with 16 slots")
axes.axhline(alone, linestyle="--", color="grey", label="base alone")
axes.set(xlabel="distinct adapters in the batch", ylabel="ms a step", ylim=(0, None))
axes.legend(frameon=False)
plt.show()
