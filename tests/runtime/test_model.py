"""The manager against a model, over random histories."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import lorajax as lj
from lorajax.runtime import AdapterManager, Version
from tests.runtime.support import (
    D,
    assert_close,
    assert_state_is_table,
    base_weights,
    make_factors,
    make_spec,
    pack,
    reference,
    step,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

SPEC = make_spec(5)
PARAMS = base_weights(SPEC)
X = np.random.default_rng(1).normal(size=(3, D)).astype(np.float32)
TOKENS = np.arange(3, dtype=np.int32)
FORMS = (
    {"rank": 3, "modules": ("q", "k", "v", "o")},
    {"rank": 8, "modules": ("v",)},
    {"rank": 12, "modules": ("q", "o"), "layers": (1,)},
    {"rank": 20},
)
FACTORS = {
    (n, c): make_factors(10 * i + c, **FORMS[c]) for i, n in enumerate("abcd") for c in range(4)
}
ADAPTERS = {key: pack(key[0], factors, SPEC) for key, factors in FACTORS.items()}
VERSIONS = {key: Version(key[0], a.digest) for key, a in ADAPTERS.items()}
SIZES = {key: a.num_slots for key, a in ADAPTERS.items()}
BY_VERSION = {VERSIONS[key]: a for key, a in ADAPTERS.items()}

NAME, CONTENT = st.sampled_from("abcd"), st.integers(0, 3)
WEIGHT = st.sampled_from([0.0, 0.7, -1.25, 2.0])
ROW = st.none() | NAME | st.dictionaries(NAME, WEIGHT, max_size=3)
ROWS = st.lists(ROW, min_size=3, max_size=3)


def mix(row) -> dict[str, float]:
    return (
        {}
        if row is None
        else {row: 1.0}
        if isinstance(row, str)
        else {n: w for n, w in row.items() if w}
    )


class Machine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self):
        super().__init__()
        self.mgr = AdapterManager(SPEC, policy=self.policy)
        self.content: dict[str, tuple] = {}  # what each name stands for
        self.read: set[str] = set()
        self.pins: set[str] = set()
        self.leases: list = []  # (lease, mixes, contents)
        self.retired: set[tuple] = set()  # unloaded or replaced while leased, and not back in use

    def leased(self) -> set:
        return {key for _, _, contents in self.leases for key in contents.values()}

    def fits(self, wanted: set) -> bool:
        held = self.leased() | {self.content[n] for n in self.pins}  # these cannot be evicted
        return sum(SIZES[key] for key in held | wanted) <= SPEC.num_slots

    def replaced(self, name: str) -> None:
        """What the name stood for goes with its leases."""
        self.retired |= {self.content[name]} if name in self.read else set()
        self.read.discard(name)
        self.pins.discard(name)

    def may_pin(self, name: str, key: tuple) -> bool:
        """Whether the name may be pinned with that content in place of what it has."""
        others = self.pins - {name}
        held = {self.content[n] for n in others} | self.leased() | {key}
        if sum(SIZES[k] for k in held) > SPEC.num_slots:
            return False
        if name in self.pins and SIZES[key] <= SIZES[self.content[name]]:
            return True  # no more is pinned than before
        reserve = max([1, *(SIZES[self.content[n]] for n in self.read - others - {name})])
        pinned = sum(SIZES[self.content[n]] for n in others)
        return pinned + SIZES[key] + reserve <= SPEC.num_slots

    @rule(name=NAME, c=CONTENT)
    def register(self, name, c):
        if self.content.get(name, (name, c)) != (name, c):
            with pytest.raises(lj.AdapterError, match="one adapter"):
                self.mgr.register(name, ADAPTERS[name, c])
        else:
            self.mgr.register(name, ADAPTERS[name, c])
            self.content[name] = (name, c)

    @rule(name=NAME, c=CONTENT, pinned=st.booleans())
    def load(self, name, c, pinned):
        key = (name, c)
        if self.content.get(name, key) != key:
            with pytest.raises(lj.AdapterError, match="one adapter"):
                self.mgr.load(name, ADAPTERS[key], pinned=pinned)
        elif pinned and not self.may_pin(name, key):
            with pytest.raises(lj.PoolFullError):
                self.mgr.load(name, ADAPTERS[key], pinned=True)
        else:
            self.mgr.load(name, ADAPTERS[key], pinned=pinned)
            self.content[name] = key
            self.read.add(name)
            self.pins |= {name} if pinned else set()
            self.retired.discard(key)

    @rule(name=NAME, c=CONTENT)
    def reload(self, name, c):
        key = (name, c)
        if name not in self.content:
            with pytest.raises(lj.UnknownAdapterError):
                self.mgr.reload(name, ADAPTERS[key])
            return
        if name in self.pins and not self.may_pin(name, key):
            with pytest.raises(lj.PoolFullError):
                self.mgr.reload(name, ADAPTERS[key])
            return
        self.mgr.reload(name, ADAPTERS[key])
        pinned = {name} & self.pins
        self.replaced(name)
        self.content[name] = key
        self.read.add(name)
        self.pins |= pinned
        self.retired.discard(key)

    @rule(name=NAME)
    def unload(self, name):
        if name not in self.content:
            with pytest.raises(lj.UnknownAdapterError):
                self.mgr.unload(name)
            return
        self.mgr.unload(name)
        self.replaced(name)
        del self.content[name]

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def unload_and_register_again(self, data):
        name = data.draw(st.sampled_from(sorted(self.content)))
        key = self.content[name]
        self.unload(name)
        self.register(*key)

    @rule(name=NAME)
    def pin(self, name):
        if name not in self.content:
            with pytest.raises(lj.UnknownAdapterError):
                self.mgr.pin(name)
            return
        self.read.add(name)
        if self.may_pin(name, self.content[name]):
            self.mgr.pin(name)
            self.pins.add(name)
            self.retired.discard(self.content[name])
        else:
            with pytest.raises(lj.PoolFullError):
                self.mgr.pin(name)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        name = data.draw(st.sampled_from(sorted(self.pins)))
        self.mgr.unpin(name)
        self.pins.remove(name)

    @rule(rows=ROWS)
    def lease(self, rows):
        named = {n for r in rows for n in ({r} if isinstance(r, str) else r or ())}
        before = dict(self.mgr.resident), self.mgr.stats
        if not named <= set(self.content):
            with pytest.raises(lj.UnknownAdapterError):
                self.mgr.lease(rows)
            assert (dict(self.mgr.resident), self.mgr.stats) == before
            return
        mixes = [mix(r) for r in rows]
        contents = {n: self.content[n] for m in mixes for n in m}
        fits = self.fits(set(contents.values()))
        assert self.mgr.can_admit(rows) == fits
        assert (dict(self.mgr.resident), self.mgr.stats) == before
        self.read |= set(contents)
        if fits:
            self.leases.append((self.mgr.lease(rows), mixes, contents))
            self.retired -= set(contents.values())
        else:
            with pytest.raises(lj.PoolFullError):
                self.mgr.lease(rows)
            assert (dict(self.mgr.resident), self.mgr.stats) == before

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), twice=st.booleans())
    def end(self, data, twice):
        lease, *_ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.close()
        if twice:
            lease.close()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def drop(self, data):
        self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))  # to the collector

    @invariant()
    def slots_match(self):
        resident = self.mgr.resident
        counts = {v: r.leases for v, r in resident.items() if r.leases}
        expected: dict[Version, int] = {}
        for _, _, contents in self.leases:
            for key in contents.values():
                expected[VERSIONS[key]] = expected.get(VERSIONS[key], 0) + 1
        assert counts == expected
        assert {v for v, r in resident.items() if r.pinned} == {
            VERSIONS[self.content[n]] for n in self.pins
        }
        self.retired &= self.leased()
        assert {v for v, r in resident.items() if r.retired} == {VERSIONS[k] for k in self.retired}
        assert self.mgr.registered == tuple(sorted(self.content))
        assert_state_is_table(self.mgr.state, resident, BY_VERSION)

    @invariant()
    def outputs_match(self):
        for lease, mixes, contents in self.leases:
            got = step(PARAMS, self.mgr.state, X, lease.row_weights, TOKENS)
            factors = {n: FACTORS[key] for n, key in contents.items()}
            assert_close(got, reference(SPEC, PARAMS, X, mixes, factors))

    def teardown(self):
        for lease, *_ in self.leases:
            lease.close()
        for name in self.mgr.registered:
            self.mgr.unload(name)
        assert not self.mgr.resident
        assert_state_is_table(self.mgr.state, {}, {})


class FifoMachine(Machine):
    policy = "fifo"


_SETTINGS = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLru = Machine.TestCase
TestLru.settings = _SETTINGS
TestFifo = FifoMachine.TestCase
TestFifo.settings = settings(_SETTINGS, max_examples=10)
