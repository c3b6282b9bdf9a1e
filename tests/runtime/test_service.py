"""In service: no compiles, shardings kept, many threads."""

import threading
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lorajax as lj
from lorajax.runtime import AdapterManager
from lorajax.state import abstract_state
from tests.runtime.support import (
    D,
    R,
    assert_close,
    assert_state_is_table,
    base_weights,
    make_adapter,
    make_factors,
    make_spec,
    pack,
    reference,
    step,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

NAMES = [f"a{i}" for i in range(8)]
RANKS = (3, 8, 12, 20)


@pytest.mark.parametrize("stack_layers", [False, True])
def test_nothing_compiles_in_service(compiles, stack_layers):
    spec = make_spec(6, stack_layers=stack_layers)
    params, rng = base_weights(spec), np.random.default_rng(0)
    x, tokens = rng.normal(size=(4, D)).astype(np.float32), np.arange(4, dtype=np.int32)
    factors = {
        (n, c): make_factors(10 * i + c, RANKS[(i + c) % 4])
        for i, n in enumerate(NAMES)
        for c in (0, 1)
    }
    adapters = {key: pack(key[0], f, spec) for key, f in factors.items()}
    mgr = AdapterManager(spec)
    content = dict.fromkeys(NAMES, 0)
    for name in NAMES:
        mgr.register(name, adapters[name, 0])
    with mgr.lease([None] * 4) as lease:
        step(params, mgr.state, x, lease.row_weights, tokens)

    with compiles.none():
        for turn in range(200):
            name = NAMES[rng.integers(8)]
            if turn % 3 == 0:
                content[name] = 1 - content[name]
                mgr.reload(name, adapters[name, content[name]])
            if turn % 7 == 0:
                mgr.unload(name)
                mgr.load(name, adapters[name, content[name]])
            first, second = rng.choice(NAMES, 2, replace=False)
            rows = [str(first), None, {str(first): 0.5, str(second): -2.0}, {}]
            with mgr.lease(rows) as lease:
                got = step(params, mgr.state, x, lease.row_weights, tokens)
                if turn % 20 == 0:
                    mixes = [{first: 1.0}, {}, {first: 0.5, second: -2.0}, {}]
                    held = {n: factors[n, content[n]] for n in (first, second)}
                    assert_close(got, reference(spec, params, x, mixes, held))
    assert mgr.stats.evictions > 50


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_writes_keep_the_shardings(compiles, axis_type):
    spec = make_spec(4)
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(axis_type,))

    def sharding(path, leaf):
        whole = PartitionSpec(*[None] * leaf.ndim)
        columns = PartitionSpec(*[None] * (leaf.ndim - 1), "tensor")
        return NamedSharding(mesh, columns if path[-1].name == "B" else whole)

    shardings = jax.tree_util.tree_map_with_path(sharding, abstract_state(spec))
    adapters = {n: make_adapter(n, spec, rank=r) for n, r in zip("abc", (5, 16, 24), strict=True)}
    mgr = AdapterManager(spec, adapters, shardings=shardings)
    with compiles.none():
        for rows in (["a", "b"], ["c"], ["a"], ["b"]):
            with mgr.lease(rows):
                state = mgr.state
                jax.tree.map(lambda x, s: check_sharding(x, s), state, shardings)
        mgr.unload("b")
        jax.tree.map(lambda x, s: check_sharding(x, s), mgr.state, shardings)
    held = {v: adapters[v.name] for v in mgr.resident}
    assert held
    assert_state_is_table(mgr.state, mgr.resident, held)


def check_sharding(x: jax.Array, sharding: NamedSharding) -> None:
    assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)


def start(*targets) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def join(threads) -> None:
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def test_threads_end_with_the_counts_right():
    spec = make_spec(3)
    mgr = AdapterManager(spec)
    for name in NAMES[:5]:
        mgr.register(name, lambda n: make_adapter(n, spec, rank=R))
    stop, errors, served = threading.Event(), [], []

    def user(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                rows = [str(n) for n in rng.choice(NAMES[:5], 2)]
                try:
                    with mgr.lease(rows) as lease:
                        assert (lease.row_weights.sum(axis=1) == 1).all()
                        served.append(rows)
                except (lj.PoolFullError, lj.UnknownAdapterError):
                    continue
        except BaseException as error:
            errors.append(error)

    def operator() -> None:
        rng = np.random.default_rng(99)
        try:
            while not stop.is_set():
                name = str(rng.choice(NAMES[:5]))
                mgr.unload(name)
                mgr.load(name, make_adapter(name, spec, rank=R, seed=int(rng.integers(50))))
        except BaseException as error:
            errors.append(error)

    def stepper() -> None:
        try:
            while not stop.is_set():
                jax.block_until_ready(mgr.state)
        except BaseException as error:
            errors.append(error)

    others = start(operator, stepper)
    try:
        join(start(*(partial(user, i) for i in range(6))))
    finally:
        stop.set()
    join(others)
    assert errors == []
    assert served
    assert all(r.leases == 0 and not r.retired for r in mgr.resident.values())
    stats = mgr.stats
    assert stats.hits + stats.misses == sum(len(set(rows)) for rows in served)
    for name in mgr.registered:
        mgr.unload(name)
    assert_state_is_table(mgr.state, {}, {})


def test_a_crowd_reads_an_adapter_once_and_a_slow_one_holds_up_nobody():
    spec, reads, go = make_spec(3), [], threading.Event()

    def slow(name):
        reads.append(name)
        assert go.wait(timeout=30)
        return make_adapter(name, spec)

    mgr = AdapterManager(spec, {"slow": slow, "quick": make_adapter("quick", spec)})
    threads = start(*[lambda: mgr.lease(["slow"]).close()] * 4)
    try:
        with mgr.lease(["quick"]):
            assert "slow" not in [v.name for v in mgr.resident]
    finally:
        go.set()
    join(threads)
    assert reads == ["slow"]
    assert mgr.stats.hits == 3


def test_a_name_that_changes_while_it_is_read():
    spec, started, go = make_spec(3), threading.Event(), threading.Event()
    new = make_adapter("a", spec, seed=2)

    def slow(name):
        started.set()
        assert go.wait(timeout=30)
        return make_adapter(name, spec, seed=1)

    mgr, keys = AdapterManager(spec, {"a": slow}), []
    threads = start(lambda: keys.extend(mgr.lease(["a"]).cache_keys))
    try:
        assert started.wait(timeout=30)
        mgr.reload("a", new)
    finally:
        go.set()
    join(threads)
    assert [key.adapters for key in keys] == [((new.digest, 1.0),)]
