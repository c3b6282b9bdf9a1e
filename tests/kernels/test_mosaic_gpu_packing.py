"""The rows that the Hopper kernel multiplies, taken by its own index arithmetic, give the delta."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorajax.kernels_pallas import make_routing
from lorajax.kernels_pallas.gpu import packing, schedule
from lorajax.kernels_pallas.gpu.plan import TILE, Device, Plan

LAYER = 1


def plan_of(tokens, rank, slices, slots, block):
    device = Device(132, 227 * 1024)
    shapes = {"d_in": 128, "d_out": sum(slices), "slots": slots, "rank": rank, "slices": slices}
    return Plan(device=device, tokens=tokens, block=block, has_base=True, **shapes)


def pieces(plan, packed, active):
    """(slot, row in the slot, is there one) of all pieces of one group of slices."""
    count = int(packing.fill(plan, packed.joined, active.size, TILE)) * TILE // plan.piece
    for j in range(count):
        index, row = (int(n) for n in packing.piece(plan, packed, j * plan.piece))
        yield int(active[min(index, active.size - 1)]), row, index < active.size


def kernels_delta(plan, x, A, B, scale, routing):
    """The delta of layer 1 in float64, in the kernel's packing and order."""
    packed = packing.pack(plan, jnp.int32(routing.count.max()))
    groups, weights = 1 if packed.joined else plan.num_slices, np.asarray(routing.weights)
    delta = np.zeros((plan.tokens, plan.d_out))
    for block in range(plan.blocks):
        rows = slice(block * plan.block, min((block + 1) * plan.block, plan.tokens))
        active = np.asarray(routing.active)[block, : int(routing.count[block])]
        for column in range(plan.d_out // plan.width if active.size else 0):
            g = int(schedule.slice_of(plan, jnp.int32(column)))
            columns = slice(column * plan.width, (column + 1) * plan.width)
            group = 0 if groups == 1 else g
            for slot, row, there in pieces(plan, packed, active):
                a = int(packing.row_of_a(plan, LAYER, slot, group, row))
                b, mine = packing.row_of_b(plan, packed, LAYER, slot, g, row)
                if there and mine:
                    h = x[rows] @ A[a : a + plan.piece].T * scale[a : a + plan.piece]
                    h *= weights[slot, rows, None]
                    delta[rows, columns] += h @ B[int(b) : int(b) + plan.piece, columns]
    return delta


def exact_delta(x, A, B, scale, rows, slices):
    """Slot by slot in float64."""
    parts, start = [], 0
    for g, width in enumerate(slices):
        columns = slice(start, start + width)
        deltas = [
            rows[:, s, None]
            * ((x @ A[LAYER, s, g].T * scale[LAYER, s, g]) @ B[LAYER, s, :, columns])
            for s in range(rows.shape[1])
        ]
        parts.append(sum(deltas))
        start += width
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("slices", [(256,), (256, 128, 128)], ids=["one slice", "three"])
@pytest.mark.parametrize(("rank", "used"), [(8, 2), (16, 1), (16, 2), (16, 9), (64, 2), (128, 3)])
def test_the_packed_rows_give_the_delta(tokens, slices, rank, used):
    rng, slots = np.random.default_rng(rank * used), 12
    rows = np.zeros((tokens, slots), np.float32)
    chosen = rng.permutation(slots)[:used]
    rows[np.arange(tokens), chosen[np.arange(tokens) % used]] = rng.uniform(0.5, 1.5, tokens)
    rows[::4] = 0
    x = rng.standard_normal((tokens, 128))
    A = rng.standard_normal((2, slots, len(slices), rank, 128))
    B = rng.standard_normal((2, slots, rank, sum(slices)))
    scale = rng.uniform(0.5, 2.0, A.shape[:-1])
    block = 16 if tokens > 24 else tokens
    routing = jax.tree.map(
        np.asarray, make_routing(jnp.asarray(rows), jnp.arange(tokens), block=block)
    )
    plan = plan_of(tokens, rank, slices, slots, block)
    flat = A.reshape(-1, 128), B.reshape(-1, plan.d_out), scale.reshape(-1)
    found = kernels_delta(plan, x, *flat, routing)
    np.testing.assert_allclose(found, exact_delta(x, A, B, scale, rows, slices), rtol=1e-10)
