"""The one mutable object: names, slots and leases of a running server."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from lorajax.adapter import Adapter
from lorajax.adapters import check_name
from lorajax.errors import SpecError
from lorajax.runtime import ledger as decide
from lorajax.runtime import pool as moves
from lorajax.runtime import registry
from lorajax.runtime import rows as _rows
from lorajax.runtime.lease import Lease
from lorajax.runtime.ledger import Ledger, Stats
from lorajax.runtime.planner import Plan, plan
from lorajax.runtime.policy import EvictionPolicy, get_policy
from lorajax.runtime.pool import Pool, Resident, Version
from lorajax.runtime.registry import Entry, Source, entry_version, version_of
from lorajax.runtime.rows import CacheKey, Row
from lorajax.runtime.slots import Slots, described, empty_slots, sync
from lorajax.spec import LoraSpec
from lorajax.state import LoraState


class AdapterManager:
    """Decides which adapters are in the slots, and lends them to batches.

    Every method may be called from any thread. Files are read and packed outside of the lock, so a
    slow or broken adapter holds up only who asked for it. Decisions change a table on the host; the
    device arrays follow when `state` is read, so only the thread that reads it dispatches writes,
    and an `unload` elsewhere cannot take the arrays away from under a step. One thread should own
    the steps: a state that was read before the last change is dead.

    An adapter that was read stays in host memory until it is unloaded.
    """

    def __init__(
        self,
        spec: LoraSpec,
        sources: Mapping[str, Source] | None = None,
        *,
        max_rank: int | None = None,
        policy: str | EvictionPolicy = "lru",
        shardings: Any = None,
        pinned: Iterable[str] = (),
        agree: Callable[[Sequence[str]], None] | None = None,
    ):
        """Makes the slots and compiles what writes them.

        Args:
            spec: The slots.
            sources: Registered at once; read when first needed.
            max_rank: Largest rank of a module that is accepted; by default all slots, S R.
            policy: "lru", "fifo", or a function (`EvictionPolicy`).
            shardings: A `LoraState` of shardings, or None for the default device.
            pinned: Names of `sources` to load and pin now.
            agree: Called before slots are written, with a line for each slot's adapter and the hash
                of its content. Where several processes serve together,
                `lorajax.sharding.agree`, which raises if theirs differ; then nothing is written.

        Raises:
            SpecError: `max_rank` or `policy` does not fit.
            AdapterError: A name is not allowed, or a pinned adapter cannot be loaded.
            PoolFullError: The pinned adapters leave too few slots.
        """
        most = spec.num_slots * spec.slot_rank
        if max_rank is not None and not 1 <= max_rank <= most:
            raise SpecError(
                f"max_rank must be in [1, num_slots * slot_rank = {most}]; got {max_rank}; build "
                "the spec with more num_slots, or leave it out"
            )
        self.spec = spec
        self.max_rank = most if max_rank is None else max_rank
        self._policy = get_policy(policy)
        self._shardings, self._agree = shardings, agree
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._ledger = Ledger(Pool(spec.num_slots))
        self._held: dict[Version, Adapter] = {}  # of the residents
        # A lease may end in the garbage collector, at any point of any thread, so ending one only
        # leaves a note (a put is reentrant); the next holder of the lock reads it.
        self._ended: queue.SimpleQueue[tuple[Version, ...]] = queue.SimpleQueue()
        self._slots: Slots | None = empty_slots(spec, shardings)
        for name, source in (sources or {}).items():
            self.register(name, source)
        for name in pinned:
            self.pin(name)

    # --- names ---------------------------------------------------------------------------------

    def register(self, name: str, source: Source) -> None:
        """Makes a name known. Nothing is read before it is needed; the number is not limited.

        Args:
            name: The adapter's.
            source: A folder, an `Adapter`, or a function from name to `Adapter`.

        Raises:
            AdapterError: The name is not allowed, or stands for another source.
        """
        check_name(name)
        source = registry.normalised(source)
        with self._locked():
            entry = self._entries.get(name)
            if entry is not None and entry.source != source:
                raise registry.duplicate(name)
            if entry is None:
                self._entries[name] = Entry(source)

    def load(
        self,
        name: str,
        source: Source | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        pinned: bool = False,
    ) -> None:
        """Reads and validates an adapter now, and registers it if it is new.

        It takes slots when a lease needs it, or at once if pinned. Loading the same again changes
        nothing. A failure changes nothing.

        Args:
            name: The adapter's.
            source: As for `register`; None for the one that was registered, or with `tensors`.
            config: The `adapter_config.json` of `tensors`.
            tensors: PEFT's tensors by name, in memory.
            pinned: Also pin it.

        Raises:
            UnknownAdapterError: Nothing was given and the name is not registered.
            AdapterError: It cannot be loaded, or the name stands for another adapter.
            PoolFullError: There is no room to pin it.
        """
        check_name(name)
        given = registry.given(name, source, config, tensors, spec=self.spec)
        with self._locked():
            entry = self._entries.get(name) if given is not None else self._entry(name)
            if entry is not None and given is not None and not registry.same(entry, given):
                raise registry.duplicate(name)
        if entry is None:
            assert given is not None
            entry = Entry(given)
        if entry.adapter is None:
            adapter = registry.read(name, entry.source, self.spec, self.max_rank)
            entry = replace(entry, adapter=adapter)
        with self._locked():  # another thread may have changed the name meanwhile
            now = self._entries.get(name) if given is not None else self._entry(name)
            if now is not None and not registry.same(now, entry.source):
                raise registry.duplicate(name)
            self._put(name, entry if now is None or now.adapter is None else now, pinned=pinned)

    def reload(
        self,
        name: str,
        source: Source | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
    ) -> None:
        """Replaces an adapter under its name. A failure changes nothing.

        New leases get the new content; running ones keep the old, whose slots are zeroed when the
        last of them ends. Equal content changes nothing. A pinned adapter stays pinned.

        Args:
            name: A registered one.
            source: As for `load`; None reads the known source again.
            config: As for `load`.
            tensors: As for `load`.

        Raises:
            UnknownAdapterError: The name is not registered.
            AdapterError: The new content cannot be loaded.
            PoolFullError: It is pinned and there is no room for the new content.
        """
        given = registry.given(name, source, config, tensors, spec=self.spec)
        with self._locked():
            entry = self._entry(name)
        source = entry.source if given is None else given
        adapter = registry.read(name, source, self.spec, self.max_rank)
        with self._locked():
            self._entry(name)
            self._put(name, Entry(source, adapter))

    def unload(self, name: str) -> None:
        """Forgets a name, pinned or not.

        New users see it gone at once; running leases finish. Its slots are zeroed when the last of
        them ends, at once if there is none.

        Raises:
            UnknownAdapterError: The name is not registered.
        """
        with self._locked():
            entry = self._entry(name)
            del self._entries[name]
            if entry.adapter is not None:
                self._set_pool(moves.retire(self._ledger.pool, version_of(name, entry.adapter)))

    def pin(self, name: str) -> None:
        """Loads an adapter into slots and keeps it there until `unpin` or `unload`.

        Raises:
            UnknownAdapterError: The name is not registered.
            AdapterError: It cannot be loaded.
            PoolFullError: There is no room, or too few slots would be left for the others.
        """
        with self._reading([name]):
            self._put(name, self._entries[name], pinned=True)

    def unpin(self, name: str) -> None:
        """Lets an adapter be evicted again; harmless if it is not pinned.

        Raises:
            UnknownAdapterError: The name is not registered.
        """
        with self._locked():
            version = entry_version(name, self._entry(name))
            if version is not None and version in self._ledger.pool.residents:
                self._set_pool(moves.set_pinned(self._ledger.pool, version, False))

    # --- batches -------------------------------------------------------------------------------

    def lease(self, rows: Iterable[Row]) -> Lease:
        """Takes the adapters of a batch into use: all of them, or it raises and changes nothing.

        Adapters that are not resident are read, and get slots; others are evicted for them if they
        must, never a pinned or leased one. Base rows take no slot.

        Args:
            rows: For each request None (the base model), a name, or {name: weight}. A weight of
                zero is the same as leaving the adapter out.

        Returns:
            The lease: use it in a `with`, and pass its `row_weights` to the step.

        Raises:
            UnknownAdapterError: A row names an adapter that is not registered.
            AdapterError: An adapter cannot be loaded.
            PoolFullError: The slots are held by pinned and leased adapters, which it names.
            LoraError: A row or weight is malformed.
        """
        parsed, used = self._parse(rows)
        with self._reading(used) as adapters:
            versions = {name: version_of(name, a) for name, a in adapters.items()}
            wanted = {versions[name]: a.num_slots for name, a in adapters.items()}
            ledger = decide.admit(self._ledger, wanted, self._policy)
            self._set(ledger, {versions[name]: a for name, a in adapters.items()})
            release = partial(self._ended.put, tuple(wanted))
            residents = ledger.pool.residents
            try:
                return Lease(
                    parsed,
                    versions,
                    slots={name: residents[v].slots for name, v in versions.items()},
                    num_slots=self.spec.num_slots,
                    release=release,
                )
            except BaseException:
                release()
                raise

    def can_admit(self, rows: Iterable[Row]) -> bool:
        """Whether `lease(rows)` would find slots now, next to the leases that run.

        Changes nothing. An adapter that was never read is read first, for its size.

        Raises:
            UnknownAdapterError: A row names an adapter that is not registered.
            AdapterError: An adapter cannot be loaded.
            LoraError: A row or weight is malformed.
        """
        _, used = self._parse(rows)
        with self._reading(used) as adapters:
            wanted = {version_of(n, a): a.num_slots for n, a in adapters.items()}
            return isinstance(plan(self._ledger.pool, wanted, self._policy), Plan)

    def cache_key(self, row: Row) -> CacheKey:
        """What the row's activations depend on besides its tokens, for prefix caches.

        It speaks of the content that the names stand for now; `Lease.cache_keys` of the content
        that a running lease holds.

        Raises:
            UnknownAdapterError: The row names an adapter that is not registered.
            AdapterError: An adapter cannot be loaded.
            LoraError: The row or a weight is malformed.
        """
        parsed, used = self._parse([row])
        with self._reading(used) as adapters:
            versions = {name: version_of(name, a) for name, a in adapters.items()}
        return _rows.cache_key(parsed[0], versions)

    # --- what is there -------------------------------------------------------------------------

    @property
    def state(self) -> LoraState:
        """The slot arrays, up to date with every lease, load and unload before.

        Read it anew each step: later changes donate it. If a write fails (the device is out of
        memory), the error is raised here, no decision is lost, and the next read writes all anew.
        """
        with self._locked():
            table = self._ledger.pool.table
            changed = self._slots is None or self._slots.table != table
            if self._agree is not None and changed:
                self._agree(described(table))
            slots, self._slots = self._slots, None
            if slots is None:  # the last write failed: its arrays were donated
                slots = empty_slots(self.spec, self._shardings)
            self._slots = sync(slots, self._ledger.pool, self._held)
            return self._slots.state

    @property
    def registered(self) -> tuple[str, ...]:
        """All names, sorted."""
        with self._locked():
            return tuple(sorted(self._entries))

    @property
    def resident(self) -> Mapping[Version, Resident]:
        """Who holds slots now, sorted by version; unloaded ones while a lease uses them."""
        with self._locked():
            return MappingProxyType(dict(self._ledger.pool.residents))

    @property
    def stats(self) -> Stats:
        """Counts since the start."""
        with self._locked():
            return self._ledger.stats

    # --- below: private; those that say so run under the lock ------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._set_pool(moves.release(self._ledger.pool, self._ended.get_nowait()))
            yield

    @contextlib.contextmanager
    def _reading(self, names: Iterable[str]) -> Iterator[dict[str, Adapter]]:
        """The lock, with the adapters of all the names: they are read before it is taken."""
        names = sorted(names)
        while True:
            for name in names:
                self._read(name)
            with self._locked():
                found = {name: self._entry(name).adapter for name in names}
                ready = {name: a for name, a in found.items() if a is not None}
                if len(ready) == len(names):  # else one was unloaded and registered again meanwhile
                    yield ready
                    return

    def _read(self, name: str) -> None:
        with self._locked():
            entry = self._entry(name)
        if entry.adapter is not None:
            return
        with entry.reading:
            with self._locked():
                if self._entries.get(name) is not entry:
                    return  # read by another thread, or replaced
            adapter = registry.read(name, entry.source, self.spec, self.max_rank)
            with self._locked():
                if self._entries.get(name) is entry:
                    self._entries[name] = replace(entry, adapter=adapter)

    def _parse(self, rows: Iterable[Row]) -> tuple[tuple[_rows.Pairs, ...], tuple[str, ...]]:
        parsed = _rows.parse_rows(rows)
        with self._locked():
            for name in _rows.names_of(parsed):
                self._entry(name)
        return parsed, _rows.names_of(parsed, used=True)

    def _entry(self, name: str) -> Entry:
        """Under the lock."""
        if name not in self._entries:
            raise registry.unknown_adapter(name, self._entries)
        return self._entries[name]

    def _put(self, name: str, entry: Entry, *, pinned: bool = False) -> None:
        """Under the lock: all or nothing, an entry that was read becomes what the name means."""
        adapter, old = entry.adapter, self._entries.get(name)
        assert adapter is not None
        version = version_of(name, adapter)
        others = (
            (version_of(other, e.adapter), e.adapter.num_slots)
            for other, e in self._entries.items()
            if e.adapter is not None and other != name
        )
        ledger = decide.adopt(
            self._ledger,
            version,
            adapter.num_slots,
            replaces=None if old is None else entry_version(name, old),
            pinned=pinned,
            others=others,
            policy=self._policy,
        )
        self._entries[name] = entry
        self._set(ledger, {version: adapter})

    def _set_pool(self, pool: Pool) -> None:
        """Under the lock."""
        self._set(replace(self._ledger, pool=pool))

    def _set(self, ledger: Ledger, new: Mapping[Version, Adapter] | None = None) -> None:
        """Under the lock."""
        known = {**self._held, **(new or {})}
        self._held = {version: known[version] for version in ledger.pool.residents}
        self._ledger = ledger
