"""The serving loop: requests join freed rows, one decode step serves them all."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from lorajax.engine.admission import Waiting, admit
from lorajax.engine.buckets import PrefillBatch, bucket_counts, bucket_widths, prefill_batches
from lorajax.engine.request import AdapterChoice, Limits, Request, RequestError, Result
from lorajax.engine.steps import Choice, Steps
from lorajax.errors import LoraError, PoolFullError
from lorajax.runtime import AdapterManager
from lorajax.sharding import together


@dataclass
class EngineStats:
    """Counts since the engine was made."""

    prefill_steps: int = 0
    decode_steps: int = 0
    tokens: int = 0


@dataclass
class _Running:
    """A request in a row of the batch; it holds its own lease until `release`."""

    request: Request
    row: int
    lease: contextlib.ExitStack
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


class Engine:
    """Serves requests greedily in a fixed number of rows.

    Args:
        steps: The model's compiled steps.
        manager: Adapters; its state is read anew each step.
        num_rows: N, rows of the batch; on a mesh a multiple of `steps.row_shards`.
        max_length: Positions of a cache row: tokens of a prompt and its continuation.
        eos_ids: Ids that end a continuation; the id is part of it.
        max_overtakes: How often a request that waits for slots may be overtaken by later ones.
        max_prefill_tokens: Tokens of a prefill step, padding included, if it has several prompts;
            on a mesh, for each shard of the rows.

    Raises:
        RequestError: The rows do not divide over the mesh.
    """

    def __init__(
        self,
        steps: Steps,
        manager: AdapterManager,
        *,
        num_rows: int,
        max_length: int,
        eos_ids: frozenset[int] = frozenset(),
        max_overtakes: int = 16,
        max_prefill_tokens: int = 4096,
    ):
        self.steps, self.manager, self.stats = steps, manager, EngineStats()
        self.num_rows, self.eos_ids = num_rows, eos_ids
        self.max_overtakes, self.max_prefill_tokens = max_overtakes, max_prefill_tokens
        self.limits = Limits(steps.config.vocab_size, max_length)
        if num_rows % steps.row_shards:
            raise RequestError(
                f"rows must divide over the {steps.row_shards} devices that cut them; got "
                f"{num_rows}; use a multiple"
            )

    def warm_up(self, max_prompt: int) -> None:
        """Compiles every shape that prompts of up to `max_prompt` tokens can need, and decode.

        Without it a shape is compiled when it first occurs.
        """
        batch, shards = _Batch(self), self.steps.row_shards
        for width in bucket_widths(max_prompt, self.limits.max_length):
            for K in bucket_counts(width, self.num_rows // shards, self.max_prefill_tokens):
                prompts = PrefillBatch.empty(shards * K, width)
                _, batch.cache = self.steps.prefill(
                    self.manager.state, batch.cache, prompts, batch.row_weights
                )
        choice, _ = self.steps.decode(
            self.manager.state, batch.cache, batch.tokens, batch.positions, batch.row_weights
        )
        jax.block_until_ready(choice.tokens)

    def serve(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Serves requests in shared batches, and yields each as it ends.

        Each holds its own lease from admission to its end, whatever that is: end of sequence,
        max_tokens, an error, or this iterator being closed.

        Args:
            requests: Any number; a request that cannot be served gives a result with an error.
        """
        batch = _Batch(self)
        try:
            for request in requests:
                try:
                    self.limits.check(request)
                    # Raises if an adapter is unknown, a weight is bad, or all slots are too few.
                    self.manager.can_admit([request.adapter])
                except LoraError as error:
                    yield Result(request, error=str(error))
                else:
                    batch.queue.append((request, 0))
            while batch.queue or batch.running:
                yield from batch.join()
                yield from batch.decode()
        finally:
            batch.release_all()


class _Batch:
    """The rows of one `serve` call."""

    def __init__(self, engine: Engine):
        self.engine, N = engine, engine.num_rows
        self.queue: list[tuple[Request, int]] = []  # and how often each was overtaken
        self.running: dict[int, _Running] = {}
        self.cache = engine.steps.init_cache(N, engine.limits.max_length)
        self.row_weights = np.zeros((N, engine.manager.spec.num_slots), np.float32)
        self.tokens = np.zeros(N, np.int32)
        self.positions = np.full(N, -1, np.int32)
        self.changed = True  # rows or slots were freed since the last admission
        self._shard_rows = N // engine.steps.row_shards

    def join(self) -> Iterator[Result]:
        """Admits from the queue, and runs the prompts of who joined."""
        if not self.changed or not self.queue:
            return
        self.changed = False
        try:
            requests = self._admitted()
        except LoraError:  # an adapter of the queue was unloaded meanwhile
            yield from self._refuse_unusable()
            return
        joined, again = [], []
        for request, overtaken in requests:
            try:
                joined.append(self._enter(request))
            except PoolFullError as error:
                if self.running:  # another user of the pool was faster: it tries again
                    again.append((request, overtaken))
                    continue
                yield self._refused(request, error)
            except LoraError as error:
                yield self._refused(request, error)
        self.queue = again + self.queue
        if joined:
            yield from self._prefill(joined)

    def _refused(self, request: Request, error: LoraError) -> Result:
        self.changed = True  # its row is free
        return Result(request, error=str(error))

    def _refuse_unusable(self) -> Iterator[Result]:
        """Takes those out of the queue whose adapters cannot be used any more."""
        queue, self.queue, self.changed = self.queue, [], True
        for request, overtaken in queue:
            try:
                self.engine.manager.can_admit([request.adapter])
            except LoraError as error:
                yield self._refused(request, error)
            else:
                self.queue.append((request, overtaken))

    def _admitted(self) -> list[tuple[Request, int]]:
        """Who may join now, taken out of the queue."""
        engine = self.engine
        admission = admit(
            [Waiting(_choice(request), overtaken) for request, overtaken in self.queue],
            engine.num_rows - len(self.running),
            engine.manager.can_admit,
            max_overtakes=engine.max_overtakes,
            window=4 * engine.num_rows,
        )
        chosen = admission.chosen
        if not chosen and not self.running:
            chosen = (0,)  # nobody will free a slot for it: it fits now, or its lease says why not
        queue = [
            (request, count)
            for (request, _), count in zip(self.queue, admission.overtaken, strict=True)
        ]
        members = set(chosen)
        self.queue = [entry for i, entry in enumerate(queue) if i not in members]
        return [queue[i] for i in chosen]

    def _enter(self, request: Request) -> _Running:
        """Takes a lease and a row for a request.

        Raises:
            LoraError: There is no lease for it.
        """
        row = self._free_row()
        with contextlib.ExitStack() as stack:
            lease = stack.enter_context(self.engine.manager.lease([request.adapter]))
            self.row_weights[row] = np.asarray(lease.row_weights)[0]
            entry = _Running(request, row, stack.pop_all())
        self.running[row] = entry
        return entry

    def _free_row(self) -> int:
        """The first free row of the devices that serve fewest."""
        share = self._shard_rows
        busy = [0] * self.engine.steps.row_shards
        for row in self.running:
            busy[row // share] += 1
        free = (r for r in range(self.engine.num_rows) if r not in self.running)
        return min(free, key=lambda row: (busy[row // share], row))

    def _prefill(self, joined: list[_Running]) -> Iterator[Result]:
        engine = self.engine
        batches = prefill_batches(
            [entry.request.prompt_ids for entry in joined],
            [entry.row for entry in joined],
            max_length=engine.limits.max_length,
            max_tokens=engine.max_prefill_tokens,
            shards=engine.steps.row_shards,
            shard_rows=self._shard_rows,
        )
        for batch in batches:
            choice, self.cache = engine.steps.prefill(
                engine.manager.state, self.cache, batch, self.row_weights
            )
            engine.stats.prefill_steps += 1
            entries = [joined[i] for i in batch.members]
            for entry in entries:
                self.positions[entry.row] = len(entry.request.prompt_ids) - 1
            yield from self._advance(entries, list(batch.places), choice)

    def decode(self) -> Iterator[Result]:
        """One step of all running rows."""
        if not self.running:
            return
        engine = self.engine
        choice, self.cache = engine.steps.decode(
            engine.manager.state, self.cache, self.tokens, self.positions, self.row_weights
        )
        engine.stats.decode_steps += 1
        entries = list(self.running.values())
        yield from self._advance(entries, [entry.row for entry in entries], choice)

    def _advance(
        self, entries: list[_Running], index: list[int], choice: Choice
    ) -> Iterator[Result]:
        """Appends each entry's chosen token, `choice.tokens[index]`, and ends who is done."""
        with together():
            tokens, logprobs = np.asarray(choice.tokens), np.asarray(choice.logprobs)
            logits = None if choice.logits is None else np.asarray(choice.logits)
        for entry, i in zip(entries, index, strict=True):
            token, logprob = int(tokens[i]), float(logprobs[i])
            entry.tokens.append(token)
            entry.logprobs.append(logprob)
            if logits is not None:
                entry.logits.append(logits[i])
            self.tokens[entry.row] = token
            self.positions[entry.row] += 1
            self.engine.stats.tokens += 1
            done = len(entry.tokens) == entry.request.max_tokens or token in self.engine.eos_ids
            if done or not np.isfinite(logprob):
                self._leave(entry)
                yield _result(entry)

    def _leave(self, entry: _Running) -> None:
        del self.running[entry.row]
        self.row_weights[entry.row] = 0
        self.tokens[entry.row], self.positions[entry.row] = 0, -1
        self.changed = True
        entry.lease.close()

    def release_all(self) -> None:
        """Gives back every lease that is still held."""
        for entry in list(self.running.values()):
            self._leave(entry)


def _choice(request: Request) -> AdapterChoice:
    """What it asks for; None if no adapter has a weight other than zero."""
    choice = request.adapter
    return None if isinstance(choice, Mapping) and not any(choice.values()) else choice


def _result(entry: _Running) -> Result:
    if not np.isfinite(entry.logprobs[-1]):
        error = RequestError(
            f"logits must be finite; got NaN or infinity at token {len(entry.tokens)} with adapter "
            f"{entry.request.adapter!r}; check the adapter's weights, or use --dtype float32"
        )
        return Result(entry.request, error=str(error))
    logits = np.stack(entry.logits) if entry.logits else None
    return Result(entry.request, tuple(entry.tokens), tuple(entry.logprobs), None, logits)
