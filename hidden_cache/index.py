"""`ChunkIndex`: which chunks the pool holds, how they hang together, and which goes next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from hidden_cache import _native


@dataclass(slots=True)
class LayerRows:
    """One layer of one chunk: its slot, and the transfer that fills it until it is committed."""

    slot: int
    ticket: _native.Ticket | None

    @property
    def committed(self) -> bool:
        return self.ticket is None or self.ticket.done


@dataclass(slots=True, eq=False)
class Entry:
    """A chunk in the pool. `parent_key` is its predecessor's key, None for the first of a prefix.

    Touched only under the store's lock.
    """

    key: bytes
    parent_key: bytes | None
    layers: dict[int, LayerRows] = field(default_factory=dict)
    pins: int = 0
    last_used: int = 0
    present: bool = True
    queued: bool = False


class ChunkIndex:
    """Keys to entries, and leaf-first eviction.

    A chunk without its predecessors cannot be returned, so leaves go before what they hang on,
    and a chunk whose predecessor is gone goes before everything else. Among equals the least
    recently used goes first. Pinned chunks stay. Not thread-safe: the store's lock guards it.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._children: dict[bytes, set[Entry]] = {}
        self._clock = 0
        # Candidates as (priority, tie, entry). Records go stale and are put right when they
        # come up: an entry has at most one, so that touching costs nothing here.
        self._heap: list[tuple[int, int, Entry]] = []
        self._tie = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def add(self, key: bytes, parent_key: bytes | None) -> Entry:
        """A new entry for a key that is not present."""
        entry = Entry(key, parent_key)
        self._entries[key] = entry
        if parent_key is not None:
            self._children.setdefault(parent_key, set()).add(entry)
        self.touch(entry)
        self._enqueue(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """Marks an entry as just used."""
        self._clock += 1
        entry.last_used = self._clock

    def remove(self, entry: Entry) -> None:
        """Forgets an entry. What hangs on it becomes unreachable, until its key is added again."""
        entry.present = False
        del self._entries[entry.key]
        if entry.parent_key is not None:
            siblings = self._children[entry.parent_key]
            siblings.discard(entry)
            if not siblings:
                del self._children[entry.parent_key]
                parent = self._entries.get(entry.parent_key)
                if parent is not None:
                    self._enqueue(parent)
        for orphan in self._descendants(entry.key):
            if orphan.key not in self._children:
                orphan.queued = False  # its record, if any, is filed too late: file another
                self._enqueue(orphan)

    def pop_victim(self) -> Entry | None:
        """Removes and returns the entry that goes next, or None when all are pinned."""
        held: list[Entry] = []
        victim = None
        while self._heap:
            priority, _, entry = heapq.heappop(self._heap)
            if not entry.present or not entry.queued:
                continue
            entry.queued = False
            if entry.key in self._children:
                continue  # not a leaf now: filed again when its last child goes
            if self._busy(entry):
                held.append(entry)
                continue
            if priority != self._priority(entry):
                self._enqueue(entry)
                continue
            victim = entry
            break
        for entry in held:
            self._enqueue(entry)
        if victim is not None:
            self.remove(victim)
        return victim

    def _busy(self, entry: Entry) -> bool:
        in_flight = any(
            rows.ticket is not None and not rows.ticket.ended for rows in entry.layers.values()
        )
        return entry.pins > 0 or in_flight

    def _priority(self, entry: Entry) -> int:
        return entry.last_used if self._reachable(entry) else -1

    def _reachable(self, entry: Entry) -> bool:
        parent_key = entry.parent_key
        while parent_key is not None:
            parent = self._entries.get(parent_key)
            if parent is None:
                return False
            parent_key = parent.parent_key
        return True

    def _enqueue(self, entry: Entry) -> None:
        if not entry.queued:
            entry.queued = True
            self._tie += 1
            heapq.heappush(self._heap, (self._priority(entry), self._tie, entry))

    def _descendants(self, key: bytes) -> Iterator[Entry]:
        pending = list(self._children.get(key, ()))
        while pending:
            entry = pending.pop()
            yield entry
            pending.extend(self._children.get(entry.key, ()))
