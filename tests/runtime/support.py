"""A tiny model, adapters made from plain NumPy factors, and the float64 form of their sum."""

import hashlib
import zlib
from dataclasses import dataclass

import jax
import numpy as np

import lorajax as lj
from lorajax.adapter import PackedWeights

D, L, R = 16, 2, 8


def make_spec(num_slots: int, **options) -> lj.LoraSpec:
    targets = (
        lj.Target("qkv", D, (D, 8, 8), modules=("q", "k", "v")),
        lj.Target("o", D, D, parallel="row"),
    )
    return lj.LoraSpec(
        targets, num_layers=L, num_slots=num_slots, slot_rank=R, dtype="float32", **options
    )


@dataclass(frozen=True)
class Factors:
    """Unpacked factors of one adapter: (layer, module) -> (A [r, d_in], B [d_out, r], scale)."""

    modules: dict

    def delta(self, layer: int, target: lj.Target) -> np.ndarray:
        """f64[d_in, d_out]: scale (B A)^T of every slice, side by side."""
        parts = []
        for module, width in zip(target.modules, target.slices, strict=True):
            if (layer, module) in self.modules:
                a, b, scale = self.modules[layer, module]
                parts.append(scale * (b.astype(np.float64) @ a.astype(np.float64)).T)
            else:
                parts.append(np.zeros((target.d_in, width)))
        return np.concatenate(parts, axis=1)


def make_factors(seed: int, rank: int, modules=("q", "v", "o"), layers=range(L)) -> Factors:
    rng = np.random.default_rng(seed)
    widths = {"q": D, "k": 8, "v": 8, "o": D}
    return Factors(
        {
            (layer, m): (
                rng.normal(size=(rank, D)).astype(np.float32),
                rng.normal(size=(widths[m], rank)).astype(np.float32),
                float(np.float32(rng.uniform(0.1, 1))),
            )
            for layer in layers
            for m in modules
        }
    )


def pack(name: str, factors: Factors, spec: lj.LoraSpec) -> lj.Adapter:
    rank = max(a.shape[0] for a, _, _ in factors.modules.values())
    n = spec.slots_for_rank(rank)
    arrays, digest = {}, hashlib.sha256()
    for target in spec.targets:
        touched = [(k, f) for k, f in factors.modules.items() if k[1] in target.modules]
        if not touched:
            continue
        G, starts = len(target.slices), np.cumsum([0, *target.slices])
        A = np.zeros((n, L, G, R, D), np.float32)
        B = np.zeros((n, L, R, sum(target.slices)), np.float32)
        scale = np.zeros((n, L, G, R), np.float32)
        for (layer, module), (a, b, s) in touched:
            g = target.modules.index(module)
            for row in range(a.shape[0]):
                block, r = divmod(row, R)
                A[block, layer, g, r] = a[row]
                B[block, layer, r, starts[g] : starts[g + 1]] = b[:, row]
                scale[block, layer, g, r] = s
        for array in (A, B, scale):
            digest.update(array.tobytes())
        arrays[target.name] = PackedWeights(A, B, scale)
    return lj.Adapter(name, digest.hexdigest(), rank=rank, num_slots=n, arrays=arrays)


def make_adapter(name: str, spec: lj.LoraSpec, rank: int = R, seed: int | None = None, **options):
    seed = zlib.crc32(name.encode()) if seed is None else seed
    return pack(name, make_factors(seed, rank, **options), spec)


def base_weights(spec: lj.LoraSpec) -> dict:
    rng = np.random.default_rng(0)
    return {
        t.name: rng.normal(size=(L, t.d_in, sum(t.slices))).astype(np.float32) for t in spec.targets
    }


@jax.jit
def step(params, state, x, row_weights, token_row):
    """The outputs of every target and layer for x: {target: [L, T, d_out]} as lists."""
    route = lj.make_routing(row_weights, token_row)
    return {
        name: [lj.lora_linear(x, w[i], state[name], route, layer=i) for i in range(L)]
        for name, w in params.items()
    }


def reference(spec, params, x, rows, factors) -> dict:
    """float64: x (W + sum_i w_i delta_i), rows[t] = {name: weight} of each token."""
    out = {}
    for target in spec.targets:
        out[target.name] = [
            np.stack(
                [
                    x[t].astype(np.float64)
                    @ (
                        params[target.name][layer].astype(np.float64)
                        + sum(w * factors[n].delta(layer, target) for n, w in row.items())
                    )
                    for t, row in enumerate(rows)
                ]
            )
            for layer in range(L)
        ]
    return out


def assert_close(got: dict, want: dict) -> None:
    for name, layers in want.items():
        for a, b in zip(got[name], layers, strict=True):
            error = np.abs(np.asarray(a, np.float64) - b).max() / max(np.abs(b).max(), 1.0)
            assert error < 1e-5, (name, error)


def assert_state_is_table(state: lj.LoraState, resident, adapters) -> None:
    """Every slot is one packed block of its resident, bit for bit, or zeros."""
    holder = {s: (v, i) for v, r in resident.items() for i, s in enumerate(r.slots)}
    assert len(holder) == sum(len(r.slots) for r in resident.values())
    for name, target in state.targets.items():
        for leaf in ("A", "B", "scale"):
            # [L, S, ...], whether layers are stacked or not
            array = np.concatenate([np.asarray(getattr(p, leaf)) for p in target.parts])
            for slot in range(state.num_slots):
                want = np.zeros_like(array[:, slot])
                if slot in holder:
                    version, block = holder[slot]
                    packed = adapters[version].arrays.get(name)
                    want = want if packed is None else getattr(packed, leaf)[block]
                np.testing.assert_array_equal(array[:, slot], want, err_msg=f"{name} {leaf} {slot}")
