"""Admission alone, and in a simulated server: nobody starves, nothing deadlocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorajax.engine import Waiting, admit


def fits(free_slots):
    """`can_admit` where the adapter "x3" takes 3 slots."""
    return lambda rows: sum(int(r[1:]) for r in rows if r is not None) <= free_slots


def queue(*adapters, overtaken=0):
    return [Waiting(a, overtaken) for a in adapters]


def decide(waiting, *, rows=8, slots=4, limit=2, window=32):
    return admit(waiting, rows, fits(slots), max_overtakes=limit, window=window)


def test_first_come_first_served_up_to_the_free_rows():
    assert decide(queue("x1", "x1", "x1"), rows=2).chosen == (0, 1)
    assert decide(queue("x1", None, "x1"), rows=2).chosen == (0, 1)
    assert decide(queue("x1"), rows=0).chosen == ()
    assert decide([]).chosen == ()


def test_a_request_that_does_not_fit_is_overtaken_and_that_is_counted():
    decision = decide(queue("x3", "x4", "x1"))
    assert decision.chosen == (0, 2)
    assert decision.overtaken == (0, 1, 0)


def test_after_the_limit_only_base_requests_join():
    waiting = [Waiting("x5", 2), Waiting("x1"), Waiting(None), Waiting("x1")]
    decision = decide(waiting)
    assert decision.chosen == (2,)
    assert decision.overtaken == (2, 0, 0, 0)


def test_the_limit_holds_within_one_decision():
    decision = decide(queue("x9", "x1", "x1", "x1", "x1"), limit=2)
    assert decision.chosen == (1, 2)
    assert decision.overtaken[0] == 2


def test_base_requests_neither_wait_nor_count_as_overtaking():
    decision = decide(queue("x9", None, None), slots=0)
    assert decision.chosen == (1, 2)
    assert decision.overtaken == (0, 0, 0)


def test_window_bounds_the_look_ahead_but_not_for_base():
    asked = []

    def can_admit(rows):
        asked.append(rows)
        return False

    waiting = queue(*["x1"] * 50, None)
    decision = admit(waiting, 4, can_admit, max_overtakes=5, window=3)
    assert len(asked) == 3
    assert decision.chosen == (50,)


@settings(deadline=None, max_examples=200)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([None, 1, 2, 4]), st.integers(1, 5)), min_size=1, max_size=30
    ),
    limit=st.integers(0, 3),
    rows=st.integers(1, 4),
)
def test_simulated_server_serves_everybody(requests, limit, rows):
    """4 slots; each request holds its slots for its time. Arrivals are endless small ones too."""
    slots = 4
    waiting = [
        (i, size, Waiting(None if size is None else f"x{size}"))
        for i, (size, _) in enumerate(requests)
    ]
    running: dict[int, list[int]] = {}
    served: list[int] = []
    for _ in range(500):
        if not waiting and not running:
            break
        used = sum(size for size, _ in running.values())
        decision = admit(
            [w for _, _, w in waiting],
            rows - len(running),
            fits(slots - used),
            max_overtakes=limit,
            window=8,
        )
        assert len(decision.chosen) <= rows - len(running)
        assert all(count <= limit for count in decision.overtaken)
        for i in decision.chosen:
            number, size, _ = waiting[i]
            running[number] = [size or 0, requests[number][1]]
        assert sum(size for size, _ in running.values()) <= slots
        waiting = [
            (n, size, Waiting(w.adapter, decision.overtaken[i]))
            for i, (n, size, w) in enumerate(waiting)
            if i not in decision.chosen
        ]
        assert running or not waiting, "deadlock"
        for number in list(running):
            running[number][1] -= 1
            if not running[number][1]:
                served.append(number)
                del running[number]
    assert sorted(served) == list(range(len(requests)))


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_a_stream_of_small_requests_cannot_starve_a_large_one(limit):
    """One x4 waits; x1 requests keep coming and take 3 steps each."""
    waiting, running, overtakes = [Waiting("x4")], [[1, 3], [1, 2]], 0
    for _ in range(50):
        waiting += queue("x1", "x1")
        used = sum(size for size, _ in running)
        decision = admit(waiting, 8 - len(running), fits(4 - used), max_overtakes=limit, window=8)
        if 0 in decision.chosen:
            break
        overtakes += len(decision.chosen)
        running += [[1, 3] for _ in decision.chosen]
        waiting = [
            Waiting(w.adapter, n)
            for i, (w, n) in enumerate(zip(waiting, decision.overtaken, strict=True))
            if i not in decision.chosen
        ]
        running = [[s, t - 1] for s, t in running if t > 1]
    else:
        pytest.fail("the large request was never served")
    assert overtakes <= limit
