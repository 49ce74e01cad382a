"""`ChunkIndex`: which chunks the pool holds, by key."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence

from hidden_cache import _native
from hidden_cache.row_format import RowFormat

NONE = -1  # the number of no chunk
# Evicted keys that are remembered, as 8 bytes each: enough to tell most misses apart.
_REMEMBERED = 1 << 16


class ChunkIndex:
    """Keys over a `_native.ChunkTree`, which knows chunks by number: see there for what is evicted.

    A chunk's number is its own as long as somebody pins it; otherwise until the next change. Not
    thread-safe: the store's lock guards it.
    """

    def __init__(self) -> None:
        self._tree = _native.ChunkTree()
        # Also of keys that are absent, but others' predecessors.
        self._ids: dict[Hashable, int] = {}
        self._keys: list[Hashable | None] = []  # by number
        self._formats: dict[RowFormat, int] = {}
        self._rows: list[RowFormat] = []  # by format
        self._forget_evicted()

    def __len__(self) -> int:
        return len(self._tree)

    # --- keys -----------------------------------------------------------------------------

    def find(self, keys: Iterable[Hashable | None]) -> list[int]:
        """Numbers of keys that may be present, NONE for those that cannot be; None is no key."""
        get = self._ids.get
        return [get(key, NONE) for key in keys]

    def present(self, number: int) -> bool:
        return self._tree.present(number)

    def add(self, key: Hashable, parent_key: Hashable | None) -> int:
        """Makes a key present, which it was not; its predecessor need not be there."""
        parent = NONE
        if parent_key is not None:
            parent = self._ids.get(parent_key, NONE)
            if parent == NONE:
                parent = self._tree.add_absent()
                self._name(parent_key, parent)
        number = self._tree.add(self._ids.get(key, NONE), parent)
        self._name(key, number)
        return number

    def remove(self, number: int) -> None:
        """Drops a chunk; its slots are free when nobody pins it and nothing is written to them."""
        self._tree.remove(number)
        self._follow()

    def clear(self) -> None:
        """Drops all chunks, and forgets which were evicted."""
        self._tree.remove_all()
        self._follow()
        self._forget_evicted()

    def was_evicted(self, key: Hashable) -> bool:
        """Whether a key was there and had to make room; of the latest 65,536 at most."""
        return self._evicted[hash(key) % _REMEMBERED] == hash(key)

    # --- layers ---------------------------------------------------------------------------

    def format(self, rows: RowFormat, pool: _native.SlotPool) -> int:
        """The number of a format whose rows are kept in slots of `pool`."""
        if rows not in self._formats:
            self._formats[rows] = self._tree.add_format(pool)
            self._rows.append(rows)
        return self._formats[rows]

    def rows_of(self, form: int) -> RowFormat:
        return self._rows[form]

    def fill(
        self,
        number: int,
        form: int,
        slots: Sequence[tuple[int, int]],
        tickets: Sequence[_native.Ticket],
    ) -> None:
        """Gives a chunk layers that it lacks, as (layer, slot): whole once all tickets are done."""
        self._tree.fill(number, form, slots, tickets)

    def missing(self, number: int, layers: Sequence[int]) -> list[int]:
        """Of `layers` those that a chunk lacks; all where it is absent."""
        return self._tree.missing(number, layers)

    def holds(self, number: int, layer: int) -> bool:
        """Whether a layer is there, whole."""
        return self._tree.holds(number, layer)

    def runs(self, numbers: Sequence[int], layer: int) -> list[tuple[RowFormat, list[int]]]:
        """The slots of a layer, in order: a list for each change of format."""
        return [(self._rows[form], slots) for form, slots in self._tree.runs(numbers, layer)]

    def tickets(self, numbers: Sequence[int], layers: Sequence[int]) -> list[_native.Ticket]:
        """The transfers that still bring some of the layers, or failed to."""
        return self._tree.tickets(numbers, layers)

    def settle(self) -> None:
        """Takes note of transfers that have ended: their chunks are whole, or gone."""
        self._tree.settle()
        self._follow()

    # --- use ------------------------------------------------------------------------------

    def pin(self, number: int) -> None:
        """Marks a chunk as just used, and keeps it until `unpin`, also when it is dropped."""
        self._tree.pin(number)

    def pin_prefix(self, numbers: Sequence[int], layers: Sequence[int]) -> int:
        """Pins the chunks from the front that have all layers whole; returns how many."""
        return self._tree.pin_prefix(numbers, layers)

    def unpin(self, numbers: Sequence[int]) -> None:
        self._tree.unpin(numbers)

    # --- slots ----------------------------------------------------------------------------

    def allocate(self, form: int, count: int) -> list[int] | None:
        """Slots, all or none, evicting as many chunks as that takes."""
        slots = self._tree.allocate(form, count)
        self._follow(evicted=True)
        return slots

    def evict(self) -> Hashable | None:
        """Drops the chunk that goes next and returns its key; None where all are busy."""
        number = self._tree.evict()
        key = None if number == NONE else self._keys[number]
        self._follow(evicted=True)
        return key

    def retire(
        self, form: int, slots: Sequence[int], tickets: Sequence[_native.Ticket] = ()
    ) -> None:
        """Gives back slots that are no chunk's, once no transfer writes to them any more."""
        self._tree.retire(form, slots, tickets)
        self._follow()

    @property
    def num_evicted(self) -> int:
        return self._tree.num_evicted

    # --- inside ---------------------------------------------------------------------------

    def _forget_evicted(self) -> None:
        # By the last bits of their hash; the latest of those that share a place.
        self._evicted = array("q", bytes(8 * _REMEMBERED))

    def _name(self, key: Hashable, number: int) -> None:
        self._ids[key] = number
        if number == len(self._keys):
            self._keys.append(key)
        else:
            self._keys[number] = key

    def _follow(self, *, evicted: bool = False) -> None:
        """Keeps step with the tree, whose numbers have changed."""
        for old, new in self._tree.take_changes():
            key, self._keys[old] = self._keys[old], None
            if new != NONE:
                self._name(key, new)
                continue
            del self._ids[key]
            if evicted:
                self._evicted[hash(key) % _REMEMBERED] = hash(key)
