"""The GPU benchmarks at tiny sizes on a CPU: what they time is right, and what they say is true."""

import argparse
import functools

import checks
import clocks
import cublas_graph
import decode
import gpu_forms
import gpu_layers
import jax
import jax.numpy as jnp
import jobs
import measure
import mesh
import numpy as np
import peers
import plot
import pytest
import shapes
import tune_gpu
from shapes import MODELS, Case, Shapes

from lorajax.kernels_pallas.gpu import tiles
from lorajax.kernels_pallas.gpu.plan import Device
from lorajax.kernels_pallas.gpu.tiles import Tile
from lorajax.sharding import Partition
from tests.benchmarks import clockwork
from tests.compiles import quick_compiles
from tests.sharding.support import mesh_of

TINY = Shapes(hidden=64, q=64, kv=32, ffn=128, head=8)
CASE = Case(tokens=6, adapters=2, ranks=(8, 24), slot_rank=8)
LOOP = jax.jit(functools.partial(gpu_layers.loop_step, TINY, "xla"))
UNROLLED = jax.jit(functools.partial(gpu_layers.unrolled_step, TINY, "xla"))


@pytest.fixture(scope="module", autouse=True)
def few_resident():
    """Two adapters in the slots, and quick compiles: only results are looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "RESIDENT", (2, 64))
        with quick_compiles():
            yield


@pytest.fixture(scope="module")
def arrays(few_resident):
    """Weights and adapters of two layers, large enough to be seen at this width."""
    weights = gpu_layers.make_weights(TINY, 2)
    adapters = gpu_layers.make_adapters(TINY, 2, CASE.slots, CASE.slot_rank)
    grow = lambda a: a * 6 if a.dtype == jnp.bfloat16 else a
    return jax.tree.map(grow, (weights, adapters))


def test_a_cell_by_name():
    assert Case.parse("64:8:16") == Case(64, 8, (16,), 16)
    assert Case.parse("64:8:8+64").slot_rank == 8
    assert Case.parse("64:8:64@64").slot_rank == 64
    assert Case.parse("64:8:8+64").rank == "8+64"


def test_an_adapter_has_slots_of_its_own_for_its_rank():
    of_adapter, of_token = CASE.groups(seed=3)
    assert of_adapter.sum(axis=1).tolist() == [1, 3]
    assert of_adapter.sum(axis=0).max() == 1
    assert np.bincount(of_token).tolist() == [3, 3]
    np.testing.assert_array_equal(CASE.rows(seed=3), of_adapter[of_token])


def test_ordered_tokens_stand_in_segments():
    _, of_token = Case.of(7, 2, 16, ordered=True).groups()
    assert of_token.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_the_floor_is_the_bytes_over_the_bandwidth():
    # 218.1e6 weights of a layer of 8B, 2 bytes each; one adapter of rank 16 has 1.31e6.
    floor = [Case.of(1, 1, rank).floor_us(MODELS["8B"]) for rank in (16, 32)]
    assert floor[0] == pytest.approx(103.3, abs=0.1)
    assert floor[1] - floor[0] == pytest.approx(1.31e6 * 2 / 4.25e12 * 1e6, rel=0.01)


def test_every_form_of_the_step_computes_the_same(arrays):
    weights, adapters = arrays
    x, rows = gpu_layers.make_inputs(TINY, CASE)
    flat, each = gpu_layers.unstack(weights), gpu_layers.unstack(adapters)
    xla, base = (functools.partial(f, TINY) for f in (gpu_layers.xla_step, gpu_layers.base_step))
    want = np.asarray(jax.jit(xla)(x, flat, each, rows), np.float32)
    plain = np.asarray(jax.jit(base)(x, flat), np.float32)
    for run in (LOOP, UNROLLED):
        got = np.asarray(run(x, weights, adapters, rows), np.float32)
        np.testing.assert_allclose(got, want, atol=0.06)
        none = np.asarray(run(x, weights, adapters, rows * 0), np.float32)
        np.testing.assert_allclose(none, plain, atol=0.06)
        assert np.abs(got - none).max() > 0.5


def test_adapters_take_turns_where_they_are_fewer_than_layers(arrays, monkeypatch):
    weights, adapters = arrays
    one = jax.tree.map(lambda a: a[:1], adapters)
    twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), one)
    x, rows = gpu_layers.make_inputs(TINY, CASE)
    got = [np.asarray(LOOP(x, weights, a, rows), np.float32) for a in (one, twice)]
    np.testing.assert_array_equal(*got)
    monkeypatch.setattr(gpu_layers, "POOL_BYTES", 0)
    made = jax.eval_shape(lambda: gpu_layers.make_adapters(TINY, 2, 4, 8))
    assert made["o"].A.shape == (1, 4, 1, 8, 64)


def test_the_check_passes_what_is_right_and_stops_what_is_not(arrays, monkeypatch):
    found = checks.check(TINY, CASE, *arrays, "xla")
    assert 0 < found["xla"] < 5e-3
    assert 0 < found["merged"] < 5e-3
    monkeypatch.setattr(checks, "product", lambda x, w, *_: jnp.dot(x, w[0]))
    with pytest.raises(ValueError, match="the error of qkv must be at most"):
        checks.check(TINY, CASE, *arrays, "xla")


def test_a_record_has_every_form_and_the_faster_base():
    bench = measure.Bench(TINY, 1, "xla", ("xla", "loop", "unrolled"))
    bench.prepare(CASE)
    prepared = dict(bench.programs)
    found = bench.measure(CASE)
    assert bench.programs == prepared  # nothing is compiled while it is timed
    assert found["device"] == jax.devices()[0].device_kind
    assert {"xla_us", "loop_none_us", "unrolled_none_us", "loop_compile_s"} <= found.keys()
    base = bench.measure(measure.Base(CASE.tokens))
    record = measure.compared(found, base | {"base_cublas_us": 1e-3})
    assert record["base_us"] == 1e-3 < record["base_xla_us"]
    mine = min(record["loop_us"], record["unrolled_us"])
    assert record["retention"] == 1e-3 / mine
    assert record["added_us"] == mine - 1e-3
    assert "retention" not in measure.compared(found, {})


def options(jobs_: int, patience: float = 60.0) -> argparse.Namespace:
    """As `jobs.add_options` has them."""
    return argparse.Namespace(jobs=jobs_, seconds=60.0, patience=patience)


def test_processes_prepare_side_by_side_and_measure_in_turn():
    cells = ["a1", "b1", "a2", "c1"]
    found = list(jobs.in_turn(clockwork.Bench, cells, options(2), key=lambda cell: cell[0]))
    assert [cell for cell, _ in found] == ["a1", "a2", "b1", "c1"]
    prepared, starts, ends = zip(*(record["times"] for _, record in found), strict=True)
    assert max(prepared) < min(starts)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_a_process_in_trouble_costs_its_own_cells_only(capsys):
    cells = ["dies", "hangs", "is wrong", "is fine", "dies late", "is lost"]
    pairs = {"is wrong": 2, "is fine": 2, "dies late": 3, "is lost": 3}
    key = lambda cell: pairs.get(cell, cell)
    measured = jobs.in_turn(clockwork.Trouble, cells, options(4, patience=5.0), key=key)
    assert next(measured)[0] == "is fine"
    with pytest.raises(SystemExit, match="5 of 6 not measured: dies, hangs, is wrong, dies late"):
        next(measured)
    printed = capsys.readouterr().out
    assert "not measured: dies: its process ended, at dies" in printed
    assert "not measured: hangs: its process was silent for 5 s, at hangs" in printed
    assert "not measured: is wrong: ValueError: wrong" in printed
    assert "not measured: is lost: its process ended, at dies late" in printed


def test_one_process_measures_without_preparing_all_and_stops_in_time():
    late = options(1)
    late.seconds = -1.0
    with pytest.raises(SystemExit, match="1 of 1 not measured: a"):
        list(jobs.in_turn(clockwork.Trouble, ["a"], late))
    wrong = list(jobs.in_turn(clockwork.Trouble, ["is wrong"], options(1)))
    assert [cell for cell, _ in wrong] == ["is wrong"]  # `measure` alone was called


def test_processes_have_about_equal_numbers_of_programs():
    cases = decode.cells(quick=True)
    cells, key = [measure.Base(8), *cases], functools.partial(measure.shared, cases[0])
    every = {key(cell) for cell in cells}
    assert len(every) < len(cases)  # cells that differ in active adapters share programs
    for count in (1, 4, 5, 100):
        dealt = jobs.shares(cells, count, key)
        assert len(dealt) == min(count, len(every))
        keys = [{key(cell) for cell in share} for share in dealt]
        assert sum(map(len, keys)) == len(every)  # none in two processes
        assert max(map(len, keys)) - min(map(len, keys)) <= 1
        assert sorted(str(c) for share in dealt for c in share) == sorted(map(str, cells))
    assert dealt[0][:2] == cells[:2]  # a base step prepares nothing, and takes no process


def test_a_profile_is_summed_by_kind_with_its_gaps():
    events = [("silu", 3000, 500), ("lora_linear_gpu", 1000, 1000), ("nvjet_gemm", 3600, 400)]
    found = clocks.summarize([*events, *((n, s + 9000, d) for n, s, d in events)], calls=2)
    assert (found.products, found.others, found.busy) == (1.4, 0.5, 1.9)
    assert found.gaps == (2 * (1000 + 100) + 6000) / 2e3  # between kernels, and between the calls
    assert found.names["silu"] == (0.5, 1.0)
    with pytest.raises(ValueError, match="must hold kernels of a GPU"):
        clocks.summarize([], calls=1)


def test_the_best_peer_of_a_cell():
    found = peers.best()
    assert found["decode", 64, 64, 16] == ("SGLang triton_v2", 94.8)
    assert found["decode", 8, 1, 64] == ("vLLM, specialize_active_lora", 59.1)
    assert all(us == min(us, *_allowed(cell)) for cell, (_, us) in found.items())


def _allowed(key):
    (cell,) = (
        c
        for c in peers.PEERS["cells"]
        if (c["phase"], c["tokens"], c["adapters"], c["rank"]) == key
    )
    return [us for n, us in cell["added_us"].items() if n not in peers.PEERS["best_excludes"]]


RECORD = {
    "tokens": 64,
    "adapters": 64,
    "rank": "16",
    "base_us": 100.0,
    "retention": 0.8,
    "added_us": 25.0,
    "loop_us": 125.0,
    "loop_none_us": 110.0,
}


def test_the_table_has_ours_beside_theirs_and_guesses_nothing():
    text = peers.table({("decode", 64, 64, 16): RECORD}, ["a card"])
    assert (
        "| decode | 64 | 64 | 16 | SGLang triton_v2 | 94.8 | 25.0 | 0.26 | 15.0 | 0.800 |" in text
    )
    assert "| decode | 8 | 8 | 16 | SGLang triton_v2 | 31.3 | - | - | - | - |" in text


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw([RECORD], tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_every_plain_form_is_right_to_bfloat16(arrays):
    weights, adapters = (jax.tree.map(lambda a: a[:1], tree) for tree in arrays)
    (w,), (a,) = gpu_layers.unstack(weights), gpu_layers.unstack(adapters)
    forms = gpu_forms.forms_of(CASE)
    found = {n: gpu_forms.error(TINY, CASE, form, w, a) for n, form in forms.items()}
    assert max(found.values()) <= 2 * found["now"] < 1e-2


def test_the_best_form_is_named_and_a_wrong_one_is_not_passed_over(capsys):
    base, now, other = gpu_forms.cells_of([CASE], ["now", "x A, slices"])
    assert (base.form, now.form, other.form) == ("base", "now", "x A, slices")
    bench = gpu_forms.Bench(TINY, 1, profiled=False)
    found = {base: bench.measure(base), now: bench.measure(now)}
    assert found[now]["us"] > 0 < found[base]["us"]
    error = found[now]["error"]
    found[other] = {"us": 0.1, "error": error}
    gpu_forms.show_best(found)
    assert capsys.readouterr().out == "6:2:8+24   best  by wall clock: x A, slices 0.1\n"
    found[other] = {"us": 0.1, "error": 3 * error}
    with pytest.raises(ValueError, match="no form may err twice as much"):
        gpu_forms.show_best(found)


def test_a_mesh_adds_no_collective_and_loads_while_it_steps():
    partition = Partition.of(mesh_of(tensor=4))
    model = mesh.Sharded(TINY, 1, partition, "xla")
    record = mesh.cell(model, CASE)
    assert record["collectives"] == {"all-reduce": 2}
    assert min(record["step_ms"], record["upload_ms"], record["loading_step_ms"]) > 0


def test_the_tuner_tries_only_what_can_run():
    device = Device(132, 227 * 1024, "NVIDIA H200")
    for d_in, slices in MODELS["8B"].modules.values():
        plan = tune_gpu.rule(device, Case.of(64, 8, 16), d_in, slices)
        found = list(tune_gpu.candidates(plan))
        assert found
        assert all(t.split == 1 or t.split * plan.tiles <= device.sms for t in found)


def test_the_tuner_checks_the_program_that_it_times(monkeypatch):
    bench = tune_gpu.Bench(TINY, 2, "xla")
    one = tune_gpu.Candidate("o", 6, None)
    assert bench.measure(one)["us"] > 0
    monkeypatch.setattr(tune_gpu, "stacked", lambda _, x, w, *rest: jnp.dot(x, w[0]))
    other = tune_gpu.Candidate("o", 6, Tile(1, 64, 4))
    with pytest.raises(ValueError, match="a tile must not change the result"):
        bench.prepare(other)


def test_a_tile_is_taken_where_it_gains_a_hundredth(tmp_path, monkeypatch, capsys):
    device = Device(132, 227 * 1024, "a card")
    plan = tune_gpu.rule(device, Case.of(64, 8, 16), 4096, (4096,))
    tile = Tile(2, 64, 6)
    assert tune_gpu.best("o", plan, {None: 100.0, tile: 99.5}) is None
    assert tune_gpu.best("o", plan, {None: 100.0, tile: 98.0, Tile(1, 64, 6): 99.0}) == tile
    assert "best   98.0 Tile(split=2, depth=64, stages=6) of 2" in capsys.readouterr().out
    monkeypatch.setattr(tiles, "__file__", str(tmp_path / "tiles.py"))
    monkeypatch.setattr(tiles, "table", lambda kind: {(8, 8, 8): tile, (8, 16, 8): tile})
    (tmp_path / "tiles").mkdir()
    tune_gpu.write(device, {(8, 8, 8): None, (4096, 4096, 64): tile})
    written = tiles.parse((tmp_path / "tiles" / "a-card.json").read_text(), "a-card.json")
    assert written == {(8, 16, 8): tile, (4096, 4096, 64): tile}


@pytest.mark.oracle
def test_the_cublas_base_computes_the_same_step(arrays):
    torch = pytest.importorskip("torch")
    weights, _ = arrays
    x, _ = gpu_layers.make_inputs(TINY, CASE)
    to_torch = lambda a: torch.from_numpy(np.array(a, np.float32)).to(torch.bfloat16)
    storage = [{n: to_torch(w[i]).flatten() for n, w in weights.items()} for i in range(2)]
    glue = cublas_graph.glue_functions(torch, "eager")
    steps = cublas_graph.steps(torch, TINY, storage, to_torch(x), glue)
    want = gpu_layers.base_step(TINY, x, gpu_layers.unstack(weights))
    got = steps["layer x @ w"]().float().numpy()
    np.testing.assert_allclose(got, np.asarray(want, np.float32), atol=0.05)
    assert len(steps["products x @ w.T"]()) == 8
