"""Decisions alone: no arrays, no threads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lorajax as lj
from lorajax.runtime import pool as moves
from lorajax.runtime.planner import Plan, Refusal, pin_refusal, plan
from lorajax.runtime.policy import fifo, get_policy, lru
from lorajax.runtime.pool import Pool, Resident, Version

NAMES = [Version(name, name * 2) for name in "abcdefgh"]
POLICIES = st.sampled_from([lru, fifo])


HOLDERS = st.fixed_dictionaries(
    {
        "size": st.integers(0, 3),
        "loaded": st.integers(0, 5),
        "used": st.integers(0, 5),
        "leases": st.sampled_from([0, 0, 0, 1, 2]),
        "pinned": st.sampled_from([False, False, False, True]),
        "retired": st.booleans(),
    }
)
# Plain data: the types are built in the tests, because beartype's checks draw random numbers.
REQUESTS = st.tuples(
    st.permutations(range(8)),
    st.integers(1, 8),
    st.lists(HOLDERS, min_size=len(NAMES), max_size=len(NAMES)),
    st.dictionaries(st.sampled_from(range(len(NAMES))), st.integers(1, 4), max_size=4),
)


def build(data) -> tuple[Pool, dict[Version, int]]:
    order, num_slots, holders, wanted = data
    slots, residents = [s for s in order if s < num_slots], {}
    for version, holder in zip(NAMES, holders, strict=True):
        size = holder["size"]
        if 0 < size <= len(slots):
            own, slots = tuple(slots[:size]), slots[size:]
            rest = {k: v for k, v in holder.items() if k != "size"}
            rest["retired"] = holder["retired"] and holder["leases"] > 0
            residents[version] = Resident(own, **rest)
    sizes = {v: len(r.slots) for v, r in residents.items()}
    pool = Pool(num_slots, residents, clock=6)
    return pool, {NAMES[i]: sizes.get(NAMES[i], n) for i, n in wanted.items()}


@given(REQUESTS, POLICIES)
@settings(max_examples=400, deadline=None)
def test_a_plan_places_all_and_touches_no_holder(data, policy):
    pool, wanted = build(data)
    found = plan(pool, wanted, policy)
    missing = {v: n for v, n in wanted.items() if v not in pool.residents}
    evictable = [v for v, r in pool.residents.items() if not (r.leases or r.pinned)]
    room = len(pool.free) + sum(len(pool.residents[v].slots) for v in set(evictable) - set(wanted))
    if isinstance(found, Refusal):
        assert sum(missing.values()) > room  # evicting everybody who may go would not do
        assert (found.missing, found.available) == (sum(missing.values()), room)
        named = {v for v, _, _ in found.holders}
        assert named == {
            v for v, r in pool.residents.items() if r.leases or r.pinned or v in wanted
        }
        return
    assert sum(missing.values()) <= room
    assert set(found.evict) <= set(evictable) - set(wanted)
    assert {v: len(s) for v, s in found.assign.items()} == missing
    after = moves.place(pool, found.evict, found.assign)
    held = [s for r in after.residents.values() for s in r.slots]
    assert len(held) == len(set(held))  # nobody shares a slot
    assert set(held) <= set(range(pool.num_slots))
    assert set(wanted) <= set(after.residents)
    kept = set(pool.residents) - set(found.evict)
    assert all(after.residents[v] == pool.residents[v] for v in kept)


@given(REQUESTS, POLICIES)
@settings(max_examples=300, deadline=None)
def test_victims_are_first_in_order_and_none_is_needless(data, policy):
    pool, wanted = build(data)
    found = plan(pool, wanted, policy)
    if not isinstance(found, Plan):
        return
    sizes = {v: len(r.slots) for v, r in pool.residents.items()}
    key = (lambda r: r.used) if policy is lru else (lambda r: r.loaded)
    order = sorted(
        (v for v, r in pool.residents.items() if r.evictable and v not in wanted),
        key=lambda v: (key(pool.residents[v]), v),
    )
    shortage = sum(map(len, found.assign.values())) - len(pool.free)
    room = sum(sizes[v] for v in found.evict)
    assert room >= max(0, shortage)
    assert all(room - sizes[v] < shortage for v in found.evict)
    # the shortest prefix of the order that makes room holds all victims
    prefix, total = [], 0
    while total < shortage:
        prefix.append(order[len(prefix)])
        total += sizes[prefix[-1]]
    assert set(found.evict) <= set(prefix)


@given(REQUESTS, POLICIES, st.permutations(range(8)))
@settings(max_examples=150, deadline=None)
def test_every_process_decides_alike(data, policy, order):
    pool, wanted = build(data)
    versions = [NAMES[i] for i in order]
    held = {v: pool.residents[v] for v in versions if v in pool.residents}
    again = {v: wanted[v] for v in versions if v in wanted}
    assert plan(pool, wanted, policy) == plan(Pool(pool.num_slots, held, clock=6), again, policy)


def _full(num_slots=3) -> Pool:
    pool = Pool(num_slots)
    for version, slot in zip(NAMES, range(num_slots), strict=False):
        pool = moves.place(pool, (), {version: (slot,)})
    return pool


def test_lru_evicts_the_longest_unused_and_fifo_the_longest_resident():
    a, b, c, d = NAMES[:4]
    pool = moves.release(moves.acquire(_full(), [a]), [a])
    assert plan(pool, {d: 1}, lru) == Plan((b,), {d: (1,)})
    assert plan(pool, {d: 1}, fifo) == Plan((a,), {d: (0,)})
    assert plan(pool, {d: 1, b: 1}, lru) == Plan((c,), {d: (2,)})  # b is wanted itself


def test_one_large_victim_spares_the_small_ones_before_it():
    a, b, c, d = NAMES[:4]
    pool = Pool(5)
    for version, slots in ((a, (0,)), (b, (1,)), (c, (2, 3, 4))):
        pool = moves.place(pool, (), {version: slots})
    assert plan(pool, {d: 3}, lru) == Plan((c,), {d: (2, 3, 4)})


def test_slots_need_not_be_contiguous():
    a, b, c, d = NAMES[:4]
    pool = moves.acquire(_full(), [b])
    assert plan(pool, {d: 2}, lru) == Plan((a, c), {d: (0, 2)})


def test_a_refusal_names_every_holder_and_why():
    a, b, c, d = NAMES[:4]
    pool = moves.set_pinned(moves.acquire(moves.acquire(_full(), [a, b]), [a]), c, True)
    pool = moves.retire(pool, b)
    text = str(plan(pool, {d: 1}, lru))
    assert "'a' (1, 2 leases), 'b' (1, 1 lease, unloaded), 'c' (1, pinned)" in text
    assert "1 more slots needed with 0 of 3" in text
    assert "'d' (1)" in text


def test_retired_versions_leave_with_their_last_lease_and_can_come_back():
    a = NAMES[0]
    pool = moves.acquire(moves.acquire(_full(), [a]), [a])
    pool = moves.release(moves.retire(moves.set_pinned(pool, a, True), a), [a])
    assert pool.residents[a].retired
    assert not pool.residents[a].pinned
    assert a not in moves.release(pool, [a]).residents
    assert a in moves.release(moves.revive(pool, a), [a]).residents
    again = moves.acquire(pool, [a])
    assert a in moves.release(moves.release(again, [a]), [a]).residents
    assert a not in moves.retire(_full(), a).residents
    assert moves.revive(_full(), NAMES[5]) == _full()


@pytest.mark.parametrize(
    ("size", "reserve", "refused"),
    [(1, 0, False), (2, 0, True), (1, 1, False), (1, 2, True)],
)
def test_pins_leave_room_for_the_largest_other(size, reserve, refused):
    a, d = NAMES[0], NAMES[3]
    pool = moves.set_pinned(_full(), a, True)
    text = pin_refusal(pool, d, size, reserve)
    assert (text is not None) == refused
    if text is not None:
        assert "'d'" in text
        assert "['a']" in text
    assert pin_refusal(pool, a, 1, 2) is None  # its own pin does not count twice


def test_a_policy_must_return_what_it_was_given():
    pool, wanted = _full(), {NAMES[4]: 1}
    for wrong in (lambda r: [], lambda r: [NAMES[7]], lambda r: [*r, *r]):
        with pytest.raises(lj.SpecError, match="return each evictable version once"):
            plan(pool, wanted, wrong)
    newest = plan(pool, wanted, lambda r: sorted(r, reverse=True))
    assert isinstance(newest, Plan)
    assert newest.evict == (NAMES[2],)
    with pytest.raises(lj.SpecError, match=r"\['fifo', 'lru'\].*got 'mru'"):
        get_policy("mru")
