"""What a user of the manager sees: names, loading, pins, versions, refusals."""

import gc

import numpy as np
import pytest

import lorajax as lj
from lorajax.runtime import AdapterManager, CacheKey
from tests.runtime.support import D, L, R, assert_state_is_table, make_adapter, make_spec

pytestmark = pytest.mark.usefixtures("quick_compiles")

SPEC = make_spec(4)


@pytest.fixture
def mgr():
    manager = AdapterManager(SPEC)
    for name in ("sql", "chat", "code", "math", "law"):
        manager.register(name, make_adapter(name, SPEC))
    return manager


def names(manager) -> list[str]:
    return [v.name for v in manager.resident]


def slots(manager) -> dict:
    return {v.name: r.slots for v, r in manager.resident.items()}


def test_row_weights_stand_in_every_slot_of_the_adapter(mgr):
    mgr.load("big", make_adapter("big", SPEC, rank=2 * R))
    with mgr.lease(["sql", None, {"big": -0.5, "sql": 0.25}, {"chat": 0.0}]) as lease:
        assert sorted(lease.slots) == ["big", "sql"]
        big, (sql,) = lease.slots["big"], lease.slots["sql"]
        want = np.zeros((4, 4), np.float32)
        want[0, sql], want[2, sql] = 1, 0.25
        want[2, list(big)] = -0.5
        np.testing.assert_array_equal(lease.row_weights, want)
        assert lease.row_weights.dtype == np.float32
        with pytest.raises(ValueError, match="read-only"):
            lease.row_weights[0, 0] = 1


def test_base_rows_take_no_slot_and_read_nothing():
    manager = AdapterManager(SPEC, {"never": lambda name: pytest.fail("was read")})
    with manager.lease([None, {}, {"never": 0}]) as lease:
        assert lease.slots == {}
        assert not lease.row_weights.any()
        assert lease.row_weights.shape == (3, 4)
    assert manager.can_admit([None] * 100)
    with manager.lease([]) as lease:
        assert lease.row_weights.shape == (0, 4)


def test_adapters_are_read_once_and_stay_until_evicted(mgr):
    calls = []

    def source(name):
        calls.append(name)
        return make_adapter(name, SPEC)

    mgr.register("lazy", source)
    for _ in range(2):
        with mgr.lease(["lazy"]):
            pass
    for name in ("sql", "chat", "code", "math", "lazy"):
        with mgr.lease([name]):
            pass
    assert calls == ["lazy"]
    stats = mgr.stats
    assert (stats.hits, stats.misses, stats.loads, stats.evictions) == (1, 6, 6, 2)


def test_lru_and_fifo_differ():
    for policy, gone in (("lru", "b"), ("fifo", "a")):
        manager = AdapterManager(SPEC, policy=policy)
        for name in "abcde":
            manager.load(name, make_adapter(name, SPEC))
        for name in "abcda":
            manager.lease([name]).close()
        with manager.lease(["e"]):
            assert names(manager) == sorted(set("abcde") - {gone})


def test_a_full_pool_names_the_holders_and_changes_nothing(mgr):
    mgr.pin("sql")
    with mgr.lease(["chat", "code"]), mgr.lease(["chat", "math"]):
        before = mgr.resident
        assert not mgr.can_admit(["law"])
        assert mgr.can_admit(["chat", "sql", None])
        with pytest.raises(lj.PoolFullError) as error:
            mgr.lease(["law", "sql"])
        assert mgr.resident == before
        assert "'chat' (1, 2 leases)" in str(error.value)
        assert "'sql' (1, pinned, wanted)" in str(error.value)
    assert mgr.can_admit(["law"])
    with pytest.raises(lj.PoolFullError, match="5 more slots needed with 4 of 4"):
        AdapterManager(SPEC, {n: make_adapter(n, SPEC) for n in "abcde"}).lease(list("abcde"))


def test_unknown_names_are_told_with_near_ones(mgr):
    before = mgr.resident, mgr.stats
    with pytest.raises(lj.UnknownAdapterError, match=r"got 'sqi'.*\['sql'\]") as error:
        mgr.lease(["chat", {"sqi": 0.0}])
    assert isinstance(error.value, KeyError)
    for call in (mgr.unload, mgr.pin, mgr.unpin, mgr.reload, mgr.load, mgr.cache_key):
        with pytest.raises(lj.UnknownAdapterError, match="'nobody'"):
            call("nobody")
    with pytest.raises(lj.UnknownAdapterError):
        mgr.can_admit(["nobody"])
    assert (mgr.resident, mgr.stats) == before


def test_names_are_from_a_small_alphabet(mgr):
    for name in ("", "../sql", "a/b", "a b", "http://x"):
        with pytest.raises(lj.AdapterError, match="name"):
            mgr.register(name, "adapters/sql")
        with pytest.raises(lj.AdapterError, match="name"):
            mgr.load(name, make_adapter("x", SPEC))
    assert len(mgr.registered) == 5


def test_a_name_stands_for_one_source(mgr):
    mgr.register("disk", "adapters/disk")
    mgr.register("disk", "adapters/disk/")  # the same folder
    with pytest.raises(lj.AdapterError, match=r"'disk' again.*reload"):
        mgr.register("disk", "adapters/other")
    with pytest.raises(lj.AdapterError, match=r"'disk' again.*reload"):
        mgr.load("disk", "adapters/other")  # refused before anything is read
    mgr.load("sql")
    mgr.load("sql", make_adapter("sql", SPEC))  # equal content
    with pytest.raises(lj.AdapterError, match=r"'sql' again.*reload"):
        mgr.load("sql", make_adapter("sql", SPEC, seed=7))


def test_equal_content_under_two_names_is_two_adapters(mgr):
    mgr.register("twin", make_adapter("sql", SPEC))
    with mgr.lease(["sql", "twin"]) as lease:
        assert lease.slots["sql"] != lease.slots["twin"]
        assert mgr.cache_key("sql") == mgr.cache_key("twin")
    mgr.unload("sql")
    assert names(mgr) == ["twin"]


def test_a_broken_source_fails_its_user_alone(mgr):
    def broken(name):
        raise lj.AdapterError(f"a file must be whole; got none for {name!r}; write it again")

    mgr.register("broken", broken)
    before = mgr.resident, mgr.stats
    for call in (mgr.lease, mgr.can_admit):
        with pytest.raises(lj.AdapterError, match="'broken'"):
            call(["sql", "broken"])
    with pytest.raises(lj.AdapterError, match="'bad'"):
        mgr.load("bad", broken)
    with pytest.raises(lj.AdapterError, match="'sql'"):
        mgr.reload("sql", broken)
    assert (mgr.resident, mgr.stats) == before
    assert "bad" not in mgr.registered
    with mgr.lease(["sql"]):
        pass


def test_rank_limits_state_both_ranks():
    small = AdapterManager(SPEC, max_rank=R)
    with pytest.raises(lj.AdapterError, match=r"max_rank=8; got 9 for 'wide'"):
        small.load("wide", make_adapter("wide", SPEC, rank=R + 1))
    manager = AdapterManager(SPEC)
    manager.load("all", make_adapter("all", SPEC, rank=4 * R))
    larger = make_adapter("larger", make_spec(8), rank=4 * R + 1)
    with pytest.raises(lj.AdapterError, match=r"max_rank=32; got 33 for 'larger'"):
        manager.load("larger", larger)
    assert manager.registered == ("all",)
    for rank in (0, 33):
        with pytest.raises(lj.SpecError, match=f"got {rank}"):
            AdapterManager(SPEC, max_rank=rank)


def test_adapters_of_another_spec_are_refused(mgr):
    other = lj.LoraSpec((lj.Target("new", D, D),), num_layers=L, num_slots=4, slot_rank=R)
    half = make_adapter("half", SPEC).arrays["o"]
    adapter = lj.Adapter("x", "0", rank=4, num_slots=1, arrays={other.targets[0].name: half})
    with pytest.raises(lj.AdapterError, match=r"\['new'\] for 'x'"):
        mgr.load("x", adapter)
    wrong = lj.Adapter("x", "0", rank=4, num_slots=2, arrays={"o": half})
    with pytest.raises(lj.AdapterError, match=r"got A float32\[1, .* for float32\[2, "):
        mgr.load("x", wrong)
    with pytest.raises(lj.AdapterError, match="1 to num_slots=4 slots; got 0"):
        mgr.load("x", lj.Adapter("x", "0", rank=0, num_slots=0, arrays={}))


def test_a_call_takes_a_source_or_tensors(mgr):
    for given in ({"config": {}}, {"tensors": {}}, {"source": "a", "config": {}, "tensors": {}}):
        with pytest.raises(lj.AdapterError, match="or from config and tensors together"):
            mgr.load("new", **given)


def test_weights_must_be_finite_float32(mgr):
    for weight in (float("nan"), float("inf"), 1e39, 10**400):
        with pytest.raises(lj.LoraError, match="'sql' in row 1"):
            mgr.lease([None, {"sql": weight}])
    with mgr.lease([{"sql": 1e-60}, {"chat": -0.0}]) as lease:  # zero on the device
        assert lease.slots == {}
    for rows in ("sql", {"sql": 1}):
        with pytest.raises(lj.LoraError, match="wrap it in a list"):
            mgr.lease(rows)


def test_unloaded_adapters_serve_their_leases_to_the_end(mgr):
    lease = mgr.lease(["sql"])
    (slot,) = lease.slots["sql"]
    mgr.unload("sql")
    with pytest.raises(lj.UnknownAdapterError):
        mgr.lease(["sql"])
    adapter = make_adapter("sql", SPEC)
    with lease:
        held = dict.fromkeys(mgr.resident, adapter)
        assert slots(mgr) == {"sql": (slot,)}
        assert_state_is_table(mgr.state, mgr.resident, held)
    assert not mgr.resident
    assert_state_is_table(mgr.state, {}, {})
    with mgr.lease(["chat"]):
        pass
    mgr.unload("chat")  # no lease: zeroed at once
    assert_state_is_table(mgr.state, {}, {})


def test_the_same_content_can_come_back_while_it_is_leased(mgr):
    with mgr.lease(["sql"]) as old:
        mgr.unload("sql")
        mgr.register("sql", make_adapter("sql", SPEC))
        with mgr.lease(["sql"]) as new:
            assert new.slots == old.slots
    assert names(mgr) == ["sql"]  # in use again, so it outlives the leases
    assert mgr.stats.loads == 1


def test_reload_is_a_new_version(mgr):
    new = make_adapter("sql", SPEC, rank=2 * R, seed=99)
    old_key = mgr.cache_key("sql")
    with mgr.lease(["sql"]) as old:
        mgr.reload("sql", new)
        assert mgr.cache_key("sql") != old_key
        assert old.cache_keys == (old_key,)
        with mgr.lease(["sql"]) as fresh:
            assert not set(fresh.slots["sql"]) & set(old.slots["sql"])
            assert fresh.cache_keys == (mgr.cache_key("sql"),)
            assert len({v.digest for v in mgr.resident}) == 2
    assert [v.digest for v in mgr.resident] == [new.digest]
    mgr.reload("sql", make_adapter("sql", SPEC, rank=2 * R, seed=99))
    assert mgr.stats.loads == 2
    mgr.lease(["sql"]).close()
    assert mgr.stats.hits == 1


def test_reload_reads_the_source_again():
    content = {"seed": 1}
    manager = AdapterManager(SPEC, {"a": lambda n: make_adapter(n, SPEC, seed=content["seed"])})
    first = manager.cache_key("a")
    content["seed"] = 2
    assert manager.cache_key("a") == first
    manager.reload("a")
    assert manager.cache_key("a") != first


def test_pins_hold_and_never_all(mgr):
    mgr.load("big", make_adapter("big", SPEC, rank=2 * R))
    mgr.pin("sql")
    mgr.pin("sql")
    mgr.pin("chat")
    with pytest.raises(lj.PoolFullError, match=r"1 of 4 slots left with 2 needed.*'code'"):
        mgr.pin("code")
    mgr.unload("big")
    mgr.pin("code")
    with pytest.raises(lj.PoolFullError, match=r"0 of 4 slots left with 1 needed"):
        mgr.pin("math")
    with pytest.raises(lj.PoolFullError, match="pinned adapters must leave room"):
        mgr.load("new", make_adapter("new", SPEC), pinned=True)
    assert "new" not in mgr.registered
    for name in ("math", "law"):
        mgr.lease([name]).close()
    assert set(names(mgr)) == {"sql", "chat", "code", "law"}
    mgr.reload("sql", make_adapter("sql", SPEC, seed=5))  # stays pinned
    mgr.lease(["math"]).close()
    assert "sql" in names(mgr)
    mgr.unpin("sql")
    with mgr.lease(["law", "math"]):
        assert "sql" not in names(mgr)


def test_what_is_pinned_stays_when_larger_ones_come(mgr):
    for name in ("sql", "chat", "code"):
        mgr.pin(name)
    mgr.load("big", make_adapter("big", SPEC, rank=2 * R))  # fits only after an unpin
    mgr.pin("sql")
    mgr.load("sql", pinned=True)
    mgr.reload("sql", make_adapter("sql", SPEC, seed=5))
    with pytest.raises(lj.PoolFullError, match="0 of 4 slots left with 2 needed"):
        mgr.reload("sql", make_adapter("sql", SPEC, rank=2 * R))
    with pytest.raises(lj.PoolFullError, match=r"'big' \(2\); slots are held by: 'chat'"):
        mgr.lease(["big"])
    mgr.unpin("chat")
    with mgr.lease(["big", "sql"]):
        assert {v.name for v, r in mgr.resident.items() if r.pinned} == {"sql", "code"}


def test_pinned_at_start():
    sources = {n: make_adapter(n, SPEC) for n in "abcd"}
    manager = AdapterManager(SPEC, sources, pinned=("a", "b"))
    assert names(manager) == ["a", "b"]
    with pytest.raises(lj.PoolFullError):
        AdapterManager(SPEC, sources, pinned="abcd")
    with pytest.raises(lj.UnknownAdapterError):
        AdapterManager(SPEC, sources, pinned=("z",))


def test_cache_keys_are_structured(mgr):
    digest = mgr.cache_key("sql").adapters[0][0]
    assert mgr.cache_key("sql") == CacheKey(((digest, 1.0),)) == mgr.cache_key({"sql": 1})
    assert mgr.cache_key(None) == CacheKey(()) == mgr.cache_key({"sql": 0})
    assert mgr.cache_key({"sql": 0.5}) != mgr.cache_key("sql") != digest
    assert mgr.cache_key({"sql": 1, "chat": 2}) == mgr.cache_key({"chat": 2.0, "sql": 1.0})
    assert len({mgr.cache_key(r) for r in ("sql", None, {"sql": 1}, "chat")}) == 3


def test_leases_end_exactly_once(mgr):
    def leases() -> int:
        return sum(r.leases for r in mgr.resident.values())

    def boom():
        with mgr.lease(["sql"]):
            raise RuntimeError("boom")

    def generator():
        with mgr.lease(["sql"]) as lease:
            yield lease

    with pytest.raises(RuntimeError, match="boom"):
        boom()
    assert leases() == 0
    running = generator()
    next(running)
    assert leases() == 1
    running.close()
    assert leases() == 0

    lease, other = mgr.lease(["sql"]), mgr.lease(["sql", "chat"])
    lease.close()
    lease.close()
    with pytest.raises(lj.LoraError, match="a lease must be open"), lease:
        pass
    with pytest.raises(lj.LoraError, match="a lease must be open"):
        _ = lease.row_weights
    assert leases() == 2
    with other:
        other.close()
    assert other.closed
    assert leases() == 0

    mgr.lease(["sql"])  # never entered
    gc.collect()
    assert leases() == 0
    assert mgr.can_admit(["chat", "code", "math", "law"])


def test_a_failed_write_loses_nothing(mgr, monkeypatch):
    from lorajax.runtime import slots as module

    write, calls = module.write_slots, []

    def failing(state, where, adapter):
        calls.append(adapter.name)
        if len(calls) == 2:
            write(state, where, adapter)  # donates the state, then fails
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return write(state, where, adapter)

    adapters = {n: make_adapter(n, SPEC) for n in ("sql", "chat", "code")}
    mgr.lease(["sql"]).close()
    _ = mgr.state
    monkeypatch.setattr(module, "write_slots", failing)
    with mgr.lease(["chat", "code"]):
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            _ = mgr.state
        held = {v: adapters[v.name] for v in mgr.resident}
        assert len(held) == 3
        assert_state_is_table(mgr.state, mgr.resident, held)
    assert sum(r.leases for r in mgr.resident.values()) == 0
