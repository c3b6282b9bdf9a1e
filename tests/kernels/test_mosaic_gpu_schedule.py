"""The Hopper kernel's division of work: every step exactly once, by the SMs that say so."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorajax.kernels_pallas.gpu import launch, packing, schedule
from lorajax.kernels_pallas.gpu.plan import GPCS, TILE, Device, Plan, unsupported

H200 = Device(132, 227 * 1024)
SMALL = Device(20, 227 * 1024)


def make(tokens, d_in, slices, *, block=256, slots=64, rank=16, device=H200, has_base=True):
    return Plan(
        device=device,
        tokens=tokens,
        block=min(block, tokens),
        d_in=d_in,
        d_out=sum(slices),
        slots=slots,
        rank=rank,
        slices=slices,
        has_base=has_base,
    )


PLANS = {
    "o, decode": make(8, 4096, (4096,)),
    "qkv, decode": make(64, 4096, (4096, 1024, 1024)),
    "gate_up, decode": make(256, 4096, (14336, 14336), rank=64),
    "down, decode": make(1, 14336, (4096,)),
    "gate_up, wide tiles": make(100, 4096, (14336, 14336)),
    "qkv, 128 tokens": make(128, 4096, (4096, 1024, 1024)),
    "less work than SMs": make(16, 256, (128,)),
    "one unit": make(16, 64, (128,)),
    "a small GPU": make(64, 4096, (4096,), device=SMALL),
    "two blocks": make(512, 4096, (4096,)),
    "prefill": make(2048, 4096, (4096, 1024, 1024)),
    "odd raster": make(2816, 4096, (4096,)),
    "no base": make(64, 4096, (4096, 1024, 1024), has_base=False),
}


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def plan(request):
    return request.param


def each_sm(plan, function):
    return jax.jit(jax.vmap(function))(jnp.arange(plan.sms, dtype=jnp.int32))


def pieces(plan):
    """[(sm, tile, part, low, high)] of a plan, from the traced functions."""
    counts = np.asarray(each_sm(plan, lambda sm: schedule.pieces(plan, sm)))
    index = jnp.arange(max(counts.max(), 1), dtype=jnp.int32)
    rows = each_sm(plan, lambda sm: jax.vmap(lambda i: schedule.piece(plan, sm, i))(index))
    columns = [np.asarray(a) for a in rows]
    return [
        (sm, *(int(c[sm, i]) for c in columns))
        for sm, count in enumerate(counts)
        for i in range(count)
    ]


def test_every_step_of_every_tile_is_done_once(plan):
    steps = plan.steps if plan.has_base else 1
    seen = np.zeros((plan.tiles, steps), int)
    for _, tile, _, low, high in pieces(plan):
        seen[tile, low : high if plan.has_base else 1] += 1
    assert (seen == 1).all()


def test_the_parts_of_a_tile_are_the_blocks_of_a_cluster_that_have_nothing_else(plan):
    if plan.split == 1:
        pytest.skip("tiles stay whole")
    assert plan.tiles <= plan.clusters
    for sm, tile, part, low, high in pieces(plan):
        cluster = plan.clusters - plan.tiles + tile
        assert sm == cluster * plan.split + part
        assert high > low


@functools.cache
def fewest_clusters(sms, size, gpcs=GPCS):
    """The fewest clusters that the SMs hold, over all ways to divide them into GPCs."""
    if gpcs == 1:
        return sms // size
    return min(n // size + fewest_clusters(sms - n, size, gpcs - 1) for n in range(0, sms + 1, 2))


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("sms", [20, 78, 114, 132])
def test_all_clusters_run_at_once(sms, size):
    assert Device(sms, 0).clusters(size) <= fewest_clusters(sms, size)


def test_clusters_of_an_h200():
    assert [H200.clusters(size) for size in (1, 2, 3, 4)] == [132, 66, 39, 29]


@pytest.mark.parametrize("tokens", [1, 8, 16, 24, 40, 64, 75, 128, 256])
@pytest.mark.parametrize("d_out", [3072, 4096, 6144])
def test_the_parts_share_out_the_tokens(tokens, d_out):
    plan = make(tokens, 4096, (d_out,))
    assert plan.split == {3072: 4, 4096: 3, 6144: 2}[d_out]
    assert 1 <= len(plan.shares) <= plan.split
    found = {t for first in plan.shares for t in range(first, first + plan.share)}
    assert found == set(range(plan.columns))
    assert unsupported(plan) is None


def test_sms_are_left_over_for_the_shrink_where_tiles_are_few(plan):
    used = min(plan.tiles * plan.split, plan.sms)
    assert plan.free_sms == -plan.tiles * plan.split % plan.sms
    working = {sm for sm, *_ in pieces(plan)}
    if plan.tiles * plan.split < plan.sms:
        assert working == set(range(plan.free_sms, plan.sms))  # jobs of the shrink start first
    if plan.split > 1:
        assert used <= plan.device.sms * 4 // 5


def test_places_are_a_permutation_of_blocks_and_columns(plan):
    tiles = jnp.arange(plan.tiles, dtype=jnp.int32)
    block, column = jax.jit(jax.vmap(lambda t: schedule.place(plan, t)))(tiles)
    found = np.asarray(block) * (plan.d_out // plan.width) + np.asarray(column)
    assert sorted(found) == list(range(plan.tiles))


def packed(plan, active):
    """The packing, as numbers."""
    found = packing.pack(plan, jnp.int32(active))
    return found._replace(tiles=int(found.tiles), parts=int(found.parts))


def rows_of(plan, found):
    """Packed rank rows of one slot, and groups of slices."""
    return (plan.slot_rows, 1) if found.joined else (plan.rank, plan.num_slices)


def jobs_of_sms(plan, found):
    """The shrink jobs of every SM."""
    numbers = np.asarray(each_sm(plan, lambda sm: packing.own_jobs(plan, found, sm)))
    index = jnp.arange(numbers.max(), dtype=jnp.int32)
    jobs = each_sm(plan, lambda sm: jax.vmap(lambda i: packing.job(plan, found, sm, i))(index))
    return [np.asarray(jobs)[sm, :number].tolist() for sm, number in enumerate(numbers)]


def test_sms_past_the_shrinkers_have_no_shrink_jobs(plan):
    assert not any(jobs_of_sms(plan, packed(plan, plan.slots))[plan.shrinkers :])


@pytest.mark.parametrize("active", [1, 5, 64])
def test_shrink_parts_cover_every_step_of_every_pack_once(plan, active):
    found = packed(plan, active)
    jobs = list(itertools.chain(*jobs_of_sms(plan, found)))
    assert sorted(jobs) == list(range(found.tiles * found.parts))
    if found.parts > 1:
        assert len(jobs) <= plan.most_jobs  # the sums of each have a place

    def describe(job):
        tile, part, block, group, pack = packing.place(plan, found, job)
        return tile, block, group, pack, *packing.part_steps(plan, found, part)

    rows = np.asarray(jax.jit(jax.vmap(describe))(jnp.asarray(jobs, jnp.int32))).T
    seen = {}
    for tile, block, group, pack, low, high in rows:
        at = seen.setdefault((block, group, pack), (tile, np.zeros(plan.steps, int)))
        assert at[0] == tile
        at[1][low:high] += 1
    rows, groups = rows_of(plan, found)
    packs = -(-active * rows // TILE)
    assert len(seen) == found.tiles == plan.blocks * groups * packs
    assert packs <= plan.max_packs
    assert all((steps == 1).all() for _, steps in seen.values())


@pytest.mark.parametrize("active", [1, 8, 64])
def test_sms_with_fewer_tiles_have_more_shrink_jobs(plan, active):
    numbers = [len(jobs) for jobs in jobs_of_sms(plan, packed(plan, active))]
    few, many = numbers[: plan.free_sms], numbers[plan.free_sms :]
    for group in filter(None, (few, many)):
        assert max(group) - min(group) <= 1
    if few and many and max(many):
        assert min(few) >= max(many)


@pytest.mark.parametrize("active", [0, 1, 5, 8, 9, 64])
def test_every_stage_of_the_expand_is_one_part_s(plan, active):
    found = packed(plan, active)
    stages = -(-active * rows_of(plan, found)[0] // plan.depth)
    numbers = [int(packing.expand_stages(plan, found, active, part)) for part in range(plan.split)]
    seen = [part + i * plan.split for part, number in enumerate(numbers) for i in range(number)]
    assert sorted(seen) == list(range(stages))


@pytest.mark.parametrize(
    ("active", "wanted"), [(1, (48, 1)), (2, (48, 1)), (3, (16, 3)), (64, (16, 3))]
)
def test_slices_are_joined_where_they_fit_into_one_tile(active, wanted):
    plan = PLANS["qkv, decode"]
    assert rows_of(plan, packed(plan, active)) == wanted


def pieces_of(plan, found):
    rows = range(0, TILE, plan.piece)
    return [tuple(int(n) for n in packing.piece(plan, found, row)) for row in rows]


def test_slots_lie_side_by_side():
    plan = PLANS["qkv, decode"]
    assert pieces_of(plan, packed(plan, 8)) == [(i, 0) for i in range(8)]
    joined = [(i, row) for i in range(3) for row in (0, 16, 32)]
    assert pieces_of(plan, packed(plan, 2)) == joined[:8]


def test_a_large_slot_comes_in_pieces_of_64_rows():
    plan = make(8, 256, (128,), slots=4, rank=128)
    assert pieces_of(plan, packed(plan, 4)) == [(0, 0), (0, 64)]


def test_the_slice_of_a_column_tile():
    plan = make(8, 4096, (4096, 1024, 1024))
    columns = jnp.arange(48, dtype=jnp.int32)
    found = jax.vmap(lambda c: schedule.slice_of(plan, c))(columns)
    assert found.tolist() == [0] * 32 + [1] * 8 + [2] * 8


def test_the_split_does_not_depend_on_the_slots(plan):
    changed = make(
        plan.tokens, plan.d_in, plan.slices, slots=8, device=plan.device, has_base=plan.has_base
    )
    assert changed.split == plan.split


@pytest.mark.parametrize("tokens", [1, 8, 64, 128, 256, 8192])
@pytest.mark.parametrize("slices", [(4096,), (14336, 14336)])
def test_the_pipeline_fits_in_shared_memory(tokens, slices):
    plan = make(tokens, 4096, slices)
    used = plan.stages * plan.stage_bytes + plan.out_bytes
    assert used <= H200.shared_bytes
    assert plan.stages >= 3


def test_a_stage_has_one_place_whatever_it_holds(plan):
    """An SM that shrinks before its tile must not write a stage over another one's A."""
    ring = launch.scratch(plan, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))["ring"]
    views = [ref.shape for ref in ring.refs]
    assert len(views) == 2
    assert {math.prod(shape[1:]) for shape in views} == {plan.width * plan.depth}


@pytest.mark.parametrize("device", [H200, SMALL], ids=["132 SMs", "20 SMs"])
@pytest.mark.parametrize("tokens", [1, 8, 24, 32, 40, 64, 65, 100, 128, 136, 200, 256])
def test_no_width_is_refused(device, tokens):
    for d_in, d_out in itertools.product((128, 512, 2048, 4096, 14336), range(128, 8192, 128)):
        assert unsupported(make(tokens, d_in, (d_out,), device=device)) is None, (d_in, d_out)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"d_in": 4160}, "d_in must be a multiple of 128; got 4160"),
        ({"slices": (4096, 64)}, "every slice must be a multiple of 128 columns"),
        ({"rank": 24}, "the slot rank must be 8, 16, 32, 64 or a multiple of 64; got 24"),
        ({"tokens": 1024, "block": 512}, "a block must have at most 256 tokens; got 512"),
        ({"tokens": 100, "block": 12}, "a block must be a multiple of 8 tokens"),
        ({"slots": 256, "rank": 1024, "tokens": 8192}, "at most 2^28 entries"),
        ({"device": Device(132, 48 * 1024)}, "a block needs 2 stages in 49152 bytes"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(change, said):
    arguments = {"tokens": 64, "d_in": 4096, "slices": (4096,)} | change
    plan = make(
        arguments.pop("tokens"), arguments.pop("d_in"), arguments.pop("slices"), **arguments
    )
    assert said in unsupported(plan)


def test_what_the_kernel_can_take_has_no_reason():
    assert unsupported(make(64, 4096, (4096, 1024, 1024))) is None


@pytest.mark.parametrize("split", [2, 3, 4])
def test_every_other_part_has_a_seat_of_its_own_in_an_inbox(split):
    for receiver in range(split):
        others = [part for part in range(split) if part != receiver]
        assert [int(schedule.seat(part, receiver)) for part in others] == list(range(split - 1))
