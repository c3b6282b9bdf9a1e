"""`lorajax demo`: a mixed batch of real PEFT files, checked against merged weights."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from lorajax import models
from lorajax.engine import Choice, CompileCounter, Engine, Request, Result, Steps
from lorajax.engine.request import AdapterChoice
from lorajax.models import synthetic
from lorajax.models.synthetic import SyntheticAdapter, SyntheticBase
from lorajax.runtime import AdapterManager
from lorajax.spec import LoraSpec

NUM_ROWS, NUM_SLOTS, SLOT_RANK = 8, 6, 16
#: Largest relative error of the logits that passes, in float32.
MAX_ERROR = 1e-5
_PROMPT, _TOKENS, _LENGTH = 16, 8, 32
_TIMED_STEPS = 100


@dataclass(frozen=True)
class DemoRow:
    """One served request.

    Attributes:
        adapter: As people read it: "base", a name, or "0.7 a + 0.3 b".
        about: What is special in it.
        rank: Largest rank of each adapter.
        slots: Slots it takes.
        token_ids: What was generated.
        error: `max |logits - merged| / max |merged|` over the generated tokens.
        same_tokens: Whether the merged model chooses the same tokens.
    """

    adapter: str
    about: str
    rank: str
    slots: int
    token_ids: tuple[int, ...]
    error: float
    same_tokens: bool


@dataclass(frozen=True)
class DemoReport:
    """What the demo found."""

    rows: tuple[DemoRow, ...]
    adapters: int
    slots_needed: int
    base_rows_bit_equal: bool
    evictions: int
    new_compiles: int
    step_ms_base: float
    step_ms_lora: float
    seconds: float

    @property
    def max_rel_err(self) -> float:
        """Largest error of a row."""
        return max(row.error for row in self.rows)

    @property
    def checks(self) -> dict[str, bool]:
        """What must hold, by what it says to people."""
        return {
            "every row equals its merged model": self.max_rel_err <= MAX_ERROR
            and all(row.same_tokens for row in self.rows),
            "base rows bit-equal to the plain model": self.base_rows_bit_equal,
            "adapters were evicted to make room": self.evictions > 0,
            "nothing was compiled after warm-up": self.new_compiles == 0,
        }

    def json(self) -> dict[str, Any]:
        """The report for machines; times in milliseconds."""
        return {
            "rows": len(self.rows),
            "adapters": self.adapters,
            "max_rel_err": self.max_rel_err,
            "base_rows_bit_equal": self.base_rows_bit_equal,
            "evictions": self.evictions,
            "new_compiles_after_warmup": self.new_compiles,
            "step_ms_base": self.step_ms_base,
            "step_ms_lora": self.step_ms_lora,
        }


class _PlainSteps(Steps):
    """The same steps compiled without LoRA, whatever slots they are given."""

    def prefill(self, lora: Any, cache: Any, batch: Any, row_weights: Any) -> tuple[Choice, Any]:
        return super().prefill(None, cache, batch, None)

    def decode(
        self, lora: Any, cache: Any, tokens: Any, positions: Any, row_weights: Any
    ) -> tuple[Choice, Any]:
        return super().decode(None, cache, tokens, positions, None)


def run_demo() -> Iterator[str | DemoReport]:
    """Runs the demo.

    Yields:
        What it does next, for a status line; at last the report.
    """
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="lorajax-demo-") as folder,
        jax.default_matmul_precision("highest"),
    ):
        yield "writing a base model and its adapters"
        base = SyntheticBase()
        adapters = [synthetic.make_adapter(base, recipe) for recipe in synthetic.RECIPES]
        model, manager, spare = _load(Path(folder), base, adapters)
        requests = _requests(base, adapters)
        yield "compiling the step"
        steps = Steps(model, keep_logits=True)
        engine = _engine(steps, manager)
        engine.warm_up(_PROMPT)
        with CompileCounter() as counter:
            yield "serving a mixed batch"
            results = {r.request.id: r for r in engine.serve(requests)}
            evictions = manager.stats.evictions
        yield "serving it again without LoRA"
        plain_steps = _PlainSteps(model, keep_logits=True)
        plain = {r.request.id: r for r in _engine(plain_steps, spare).serve(requests)}
        yield "checking every row against merged weights"
        truth = _Truth(base, adapters, model)
        rows = tuple(truth.row(results[r.id], manager.spec) for r in requests)
        yield "timing the step"
        with counter:
            step_ms = _time_steps(steps, plain_steps, manager)
        yield DemoReport(
            rows=rows,
            adapters=len(adapters),
            slots_needed=sum(manager.spec.slots_for_rank(a.max_rank) for a in adapters),
            base_rows_bit_equal=all(
                _bit_equal(results[r.id], plain[r.id]) for r in requests if r.adapter is None
            ),
            evictions=evictions,
            new_compiles=counter.count,
            step_ms_base=step_ms[0],
            step_ms_lora=step_ms[1],
            seconds=time.perf_counter() - start,
        )


def _load(
    folder: Path, base: SyntheticBase, adapters: list[SyntheticAdapter]
) -> tuple[models.Decoder, AdapterManager, AdapterManager]:
    """Writes and loads everything; a second manager serves the run without LoRA."""
    path = synthetic.write_base(folder / "base", base)
    sources = {a.recipe.name: synthetic.write_adapter(folder / a.recipe.name, a) for a in adapters}
    spec = LoraSpec.from_hf_config(path, num_slots=NUM_SLOTS, slot_rank=SLOT_RANK, dtype=np.float32)
    managers = [AdapterManager(spec, sources=sources) for _ in range(2)]
    for name in sources:
        for manager in managers:
            manager.load(name)
    return models.load_model(path), managers[0], managers[1]


def _requests(base: SyntheticBase, adapters: list[SyntheticAdapter]) -> list[Request]:
    names = [a.recipe.name for a in adapters]
    choices: list[AdapterChoice] = [None, *names[:5], {names[2]: 0.7, names[0]: 0.3}, *names[5:]]
    choices += [names[0], None]
    rng = np.random.default_rng(1)
    return [
        Request(
            id=str(i),
            prompt_ids=tuple(
                rng.integers(3, base.vocab_size, rng.integers(4, _PROMPT + 1)).tolist()
            ),
            max_tokens=_TOKENS,
            adapter=choice,
        )
        for i, choice in enumerate(choices)
    ]


def _engine(steps: Steps, manager: AdapterManager) -> Engine:
    # Few tokens a prefill step: few shapes to compile.
    return Engine(
        steps, manager, num_rows=NUM_ROWS, max_length=_LENGTH, max_prefill_tokens=4 * _PROMPT
    )


class _Truth:
    """Merged models, made from the raw A, B and alpha and not by the loader under test."""

    def __init__(
        self, base: SyntheticBase, adapters: list[SyntheticAdapter], model: models.Decoder
    ):
        self.base, self.tensors, self.config = base, base.tensors(), model.config
        self.adapters = {a.recipe.name: a for a in adapters}
        self.prefill = jax.jit(models.prefill, static_argnums=0)

    def row(self, result: Result, spec: LoraSpec) -> DemoRow:
        """A served request beside its merged model."""
        mix = _mix(result.request.adapter)
        parts = [(self.adapters[name], weight) for name, weight in mix.items()]
        want, got = self._logits(result, parts), result.logits
        assert got is not None
        ranks = [a.max_rank for a, _ in parts]
        return DemoRow(
            adapter=" + ".join(n if len(mix) == 1 else f"{w:g} {n}" for n, w in mix.items())
            or "base",
            about="" if not mix else "weighted mix" if len(mix) > 1 else parts[0][0].recipe.about,
            rank="+".join(map(str, ranks)) or "-",
            slots=sum(map(spec.slots_for_rank, ranks)),
            token_ids=result.token_ids,
            error=float(np.abs(got - want).max() / np.abs(want).max()),
            same_tokens=want.argmax(-1).tolist() == list(result.token_ids),
        )

    def _logits(self, result: Result, parts: list[tuple[SyntheticAdapter, float]]) -> np.ndarray:
        """`f32[n, V]` before each generated token: one plain prefill of all prefixes."""
        merged = synthetic.merged_tensors(self.base, parts, self.tensors)
        graphdef, params = nnx.split(models.from_tensors(self.config, merged))
        prompt, n = list(result.request.prompt_ids), len(result.token_ids)
        text = np.array([*prompt, *result.token_ids], np.int32)
        tokens = np.zeros((_TOKENS, _LENGTH), np.int32)
        tokens[:, : len(text)] = text
        lengths = len(prompt) + np.arange(_TOKENS, dtype=np.int32)
        cache = models.init_cache(self.config, _TOKENS, _LENGTH, np.float32)
        rows = np.arange(_TOKENS, dtype=np.int32)
        logits, _ = self.prefill(graphdef, params, None, cache, tokens, lengths, rows, None)
        return np.asarray(logits)[:n]


def _mix(choice: AdapterChoice) -> dict[str, float]:
    """Names with weights; none for the base."""
    return {choice: 1.0} if isinstance(choice, str) else dict(choice or {})


def _bit_equal(one: Result, two: Result) -> bool:
    assert one.logits is not None
    assert two.logits is not None
    same = np.array_equal(one.logits.view(np.uint32), two.logits.view(np.uint32))
    return same and one.token_ids == two.token_ids


def _time_steps(steps: Steps, plain: Steps, manager: AdapterManager) -> tuple[float, float]:
    """Median milliseconds of a decode step without and with LoRA, in turns, on distinct inputs."""
    rng = np.random.default_rng(2)
    caches = [s.init_cache(NUM_ROWS, _LENGTH) for s in (plain, steps)]
    times: tuple[list[float], list[float]] = ([], [])
    names = manager.registered
    fitting: list[AdapterChoice] = []
    for name in names:
        if len(fitting) < NUM_ROWS - 1 and manager.can_admit([*fitting, name]):
            fitting.append(name)
    rows = [*fitting, *[None] * (NUM_ROWS - len(fitting))]
    with manager.lease(rows) as lease:
        for step in range(_TIMED_STEPS):
            tokens = rng.integers(3, steps.config.vocab_size, NUM_ROWS).astype(np.int32)
            positions = np.full(NUM_ROWS, step % _LENGTH, np.int32)
            for which, s in enumerate((plain, steps)):
                state = manager.state
                start = time.perf_counter()
                choice, caches[which] = s.decode(
                    state, caches[which], tokens, positions, lease.row_weights
                )
                jax.block_until_ready(choice.tokens)
                times[which].append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])
