"""`ChunkIndex`: which chunks the pool holds, how they hang together, and which goes next."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from hidden_cache.storage import LayerRows


@dataclass(slots=True, eq=False)
class Entry:
    """A chunk in the pool. `parent_key` is its predecessor's key, None for the first of a prefix.

    Touched only under the store's lock.
    """

    key: Hashable
    parent_key: Hashable | None
    layers: dict[int, LayerRows] = field(default_factory=dict)
    pins: int = 0
    last_used: int = 0
    reachable: bool = True  # no predecessor is missing
    record: int = 0  # number of its record in the eviction heap, 0 without one

    @property
    def busy(self) -> bool:
        """Whether its slots must stay: somebody holds it, or a transfer still writes into them."""
        return self.pins > 0 or any(
            rows.ticket is not None and not rows.ticket.ended for rows in self.layers.values()
        )


class ChunkIndex:
    """Keys to entries, and leaf-first eviction.

    A chunk without its predecessors cannot be returned, so leaves go before what they hang on,
    and a chunk whose predecessor is gone goes before everything else. Among equals the least
    recently used goes first. Busy chunks stay. Not thread-safe: the store's lock guards it.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, Entry] = {}
        self._children: dict[Hashable, set[Entry]] = {}
        self._clock = 0
        # Candidates as (reachable, last used, record number, entry). A record whose number is not
        # its entry's is void. The others may lag behind what was touched since, and are put right
        # when they come up, so that touching costs nothing here.
        self._heap: list[tuple[bool, int, int, Entry]] = []
        self._records = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: Hashable) -> Entry | None:
        return self._entries.get(key)

    def add(self, key: Hashable, parent_key: Hashable | None) -> Entry:
        """A new entry for a key that is not present."""
        entry = Entry(key, parent_key)
        self._entries[key] = entry
        if parent_key is not None:
            self._children.setdefault(parent_key, set()).add(entry)
            parent = self._entries.get(parent_key)
            entry.reachable = parent is not None and parent.reachable
        if entry.reachable:
            for found in self._descendants(key):
                found.reachable = True
        self.touch(entry)
        self._file(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """Marks an entry as just used."""
        self._clock += 1
        entry.last_used = self._clock

    def remove(self, entry: Entry) -> None:
        """Forgets an entry. What hangs on it becomes unreachable, until its key is added again."""
        del self._entries[entry.key]
        entry.record = 0
        if entry.parent_key is not None:
            siblings = self._children[entry.parent_key]
            siblings.discard(entry)
            if not siblings:
                del self._children[entry.parent_key]
                parent = self._entries.get(entry.parent_key)
                if parent is not None and parent.record == 0:
                    self._file(parent)
        if entry.reachable:
            for orphan in self._descendants(entry.key):
                orphan.reachable = False
                orphan.record = 0  # filed too late now
                if orphan.key not in self._children:
                    self._file(orphan)

    def pop_victim(self) -> Entry | None:
        """Removes and returns the entry that goes next, or None when all are busy."""
        held: list[Entry] = []
        victim = None
        while self._heap:
            reachable, last_used, record, entry = heapq.heappop(self._heap)
            if record != entry.record:
                continue
            entry.record = 0
            if entry.key in self._children:
                continue  # not a leaf now: filed again when its last child goes
            if entry.busy:
                held.append(entry)
            elif (reachable, last_used) != (entry.reachable, entry.last_used):
                self._file(entry)
            else:
                victim = entry
                break
        for entry in held:
            self._file(entry)
        if victim is not None:
            self.remove(victim)
        return victim

    def _file(self, entry: Entry) -> None:
        """Puts an entry among the candidates, and void records away when they are too many."""
        self._records += 1
        entry.record = self._records
        heapq.heappush(self._heap, (entry.reachable, entry.last_used, entry.record, entry))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [record for record in self._heap if record[2] == record[3].record]
            heapq.heapify(self._heap)

    def _descendants(self, key: Hashable) -> Iterator[Entry]:
        pending = list(self._children.get(key, ()))
        while pending:
            entry = pending.pop()
            yield entry
            pending.extend(self._children.get(entry.key, ()))
