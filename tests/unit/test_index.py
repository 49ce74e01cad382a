"""`ChunkIndex` beside a model so simple that it looks at everything each time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from hidden_cache import _native
from hidden_cache.index import NONE, ChunkIndex
from hidden_cache.row_format import RowFormat

ROWS = RowFormat(torch.float32, 2)
SLOT_BYTES = 16


class Index(ChunkIndex):
    """With a pool of slots, and one letter a key."""

    def __init__(self, slots: int = 64) -> None:
        super().__init__()
        self.pool = _native.SlotPool(_native.Arena(slots * SLOT_BYTES), SLOT_BYTES)
        self.form = self.format(ROWS, self.pool)

    def put(self, key: str, parent: str | None = None, layers: tuple[int, ...] = (0,)) -> int:
        """A chunk whose layers are whole."""
        slots = self.pool.allocate(len(layers))
        assert slots is not None
        number = self.add(key.encode(), None if parent is None else parent.encode())
        self.fill(number, self.form, list(zip(layers, slots, strict=True)), [])
        self.settle()
        return number

    def chain(self, keys: str) -> None:
        """A prefix, one letter a chunk."""
        for key, parent in zip(keys, [None, *keys], strict=False):
            self.put(key, parent)

    def number(self, key: str) -> int:
        (number,) = self.find([key.encode()])
        return number

    def has(self, key: str) -> bool:
        return self.number(key) != NONE and self.present(self.number(key))

    def touch(self, key: str) -> None:
        self.pin(self.number(key))
        self.unpin([self.number(key)])

    def drop(self, key: str) -> None:
        self.remove(self.number(key))

    def names(self) -> str:
        """All chunks in the order in which they go, as one word; empties the index."""
        gone = []
        while (key := self.evict()) is not None:
            assert isinstance(key, bytes)
            gone.append(key.decode())
        return "".join(gone)

    @property
    def used(self) -> int:
        return self.pool.stats().used


def test_leaves_go_before_what_they_hang_on() -> None:
    index = Index()
    index.chain("abc")
    assert index.names() == "cba"
    assert len(index) == 0
    assert index.used == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    index = Index()
    for key in "abc":
        index.chain(key)
    index.touch("a")
    assert index.names() == "bca"


def test_touching_a_leaf_saves_it_once_only() -> None:
    index = Index()
    index.chain("ab")
    index.chain("cd")
    index.touch("b")
    assert index.names() == "dcba"


def test_pinned_chunks_and_what_they_hang_on_stay() -> None:
    index = Index()
    index.chain("abc")
    pinned = index.number("b")
    index.pin(pinned)
    assert index.names() == "c"
    index.unpin([pinned])
    assert index.names() == "ba"


def test_a_pinned_chunk_is_as_old_as_its_pin() -> None:
    index = Index()
    for key in "abc":
        index.chain(key)
    pinned = index.number("a")
    index.pin(pinned)
    assert index.evict() == b"b"
    index.unpin([pinned])
    assert index.names() == "ca"


def test_what_lost_its_predecessor_goes_before_everything_else() -> None:
    index = Index()
    index.chain("x")  # the oldest
    index.chain("abcd")
    index.drop("a")
    # Not only the leaf d, but also what hangs behind it.
    assert index.names() == "dcbx"


def test_among_the_unreachable_the_least_recently_used_goes_first() -> None:
    index = Index()
    index.chain("a")
    for key in "bcd":
        index.put(key, "a")
    index.touch("b")
    index.drop("a")
    assert index.names() == "cdb"


def test_the_chain_is_reachable_again_once_its_key_is_back() -> None:
    index = Index()
    index.chain("x")
    index.chain("abc")
    index.drop("a")
    index.put("a")
    assert index.names() == "xcba"


def test_a_child_added_before_its_parent_is_unreachable_until_then() -> None:
    index = Index()
    index.chain("x")
    index.put("b", "a")
    index.put("c", "b")
    assert not index.has("a")
    index.put("a")
    assert index.names() == "xcba"


def test_a_chunk_that_is_dropped_while_pinned_is_read_on_and_does_not_stand_in_the_way() -> None:
    index = Index()
    index.chain("abc")
    held = index.number("b")
    before = index.runs([held], 0)
    index.pin(held)
    index.drop("b")
    assert not index.has("b")
    assert index.runs([held], 0) == before
    assert index.used == 3
    # The same key once more, with c behind it still.
    index.put("b", "a")
    assert index.number("b") != held
    assert index.used == 4
    index.unpin([held])
    assert index.used == 3
    assert index.names() == "cba"


def test_a_numbers_holder_outlives_all_of_its_chain() -> None:
    index = Index()
    index.chain("abc")
    held = [index.number(key) for key in "abc"]
    for number in held:
        index.pin(number)
    index.clear()
    assert len(index) == 0
    assert index.used == 3
    assert [index.number(key) for key in "abc"] == [NONE, NONE, NONE]
    index.unpin(held)
    assert index.used == 0


def test_numbers_and_keys_are_used_again() -> None:
    index = Index()
    index.chain("abcd")
    for _ in range(5000):
        index.put("e", "d")
        index.drop("e")
        index.drop("a")
        index.put("a")
    assert len(index._keys) < 10
    assert len(index._ids) == 4


def test_only_whole_layers_are_held_and_they_end_a_prefix() -> None:
    index = Index()
    index.chain("ab")
    slots = index.pool.allocate(1)
    assert slots is not None
    ticket, arrive = pending_ticket()
    index.fill(index.number("a"), index.form, [(7, slots[0])], [ticket])
    numbers = index.find([b"a", b"b"])
    assert index.missing(numbers[0], [0, 7, 8]) == [8]
    assert not index.holds(numbers[0], 7)
    assert index.pin_prefix(numbers, [0, 7]) == 0
    assert index.tickets(numbers, [0]) == []
    assert index.tickets(numbers, [0, 7])[0].done is False
    arrive()
    assert not index.holds(numbers[0], 7), "not before the next settle()"
    index.settle()
    assert index.holds(numbers[0], 7)
    assert index.pin_prefix(numbers, [0, 7]) == 1
    assert index.pin_prefix(numbers, [0]) == 2


def test_what_is_being_written_is_not_evicted() -> None:
    index = Index()
    index.chain("a")
    slots = index.pool.allocate(1)
    assert slots is not None
    ticket, arrive = pending_ticket()
    index.fill(index.number("a"), index.form, [(1, slots[0])], [ticket])
    assert index.names() == ""
    arrive()
    index.settle()
    assert index.names() == "a"
    assert index.used == 0


def test_a_chunk_of_which_a_transfer_failed_goes_and_its_holder_learns_why() -> None:
    index = Index()
    index.chain("a")
    number = index.add(b"b", b"a")
    slots = index.pool.allocate(2)
    assert slots is not None
    ticket, arrive = pending_ticket()
    ticket.cancel()
    index.fill(number, index.form, [(0, slots[0]), (1, slots[1])], [ticket])
    index.pin(number)
    arrive()
    index.settle()
    assert not index.has("b")
    assert index.used == 3
    assert [found.error is not None for found in index.tickets([number], [0])] == [True]
    index.unpin([number])
    assert index.used == 1
    assert index.names() == "a"


def test_retired_slots_are_free_once_nothing_is_written_to_them() -> None:
    index = Index()
    slots = index.pool.allocate(2)
    assert slots is not None
    ticket, arrive = pending_ticket()
    index.retire(index.form, slots[:1], [ticket])
    index.retire(index.form, slots[1:])
    assert index.used == 1
    arrive()
    index.settle()
    assert index.used == 0


def test_slots_come_as_neighbours_where_there_are_some() -> None:
    index = Index(slots=8)
    every = index.pool.allocate(8)
    assert every == list(range(8))
    index.pool.free([0, 2, 4, 5, 6])
    assert index.allocate(index.form, 3) == [4, 5, 6]
    assert index.allocate(index.form, 2) == [0, 2]


def test_nothing_goes_for_what_would_never_fit() -> None:
    index = Index(slots=3)
    index.chain("ab")
    assert index.allocate(index.form, 4) is None
    assert len(index) == 2


def test_evicted_keys_are_remembered_and_dropped_ones_are_not() -> None:
    index = Index(slots=2)
    index.chain("ab")
    assert index.allocate(index.form, 1) is not None
    assert [index.was_evicted(key) for key in (b"a", b"b")] == [False, True]
    assert index.num_evicted == 1
    index.drop("a")
    assert not index.was_evicted(b"a")


def test_what_is_cleared_counts_as_evicted_no_more() -> None:
    index = Index(slots=2)
    index.chain("ab")
    assert index.allocate(index.form, 1) is not None
    index.clear()
    assert not index.was_evicted(b"b")


def pending_ticket() -> tuple[_native.Ticket, Callable[[], None]]:
    """A transfer that stays pending until the function is called."""
    engine = _native.TransferEngine(threaded=False)
    rows = torch.zeros(1, 1, 1, 2)
    view = _native.PagedView(rows.data_ptr(), (1, 1, 1), 8, (8, 8, 8))
    pool = _native.SlotPool(_native.Arena(SLOT_BYTES), SLOT_BYTES)
    ticket = engine.gather(view, [0], [(0, 0, 1, 0, 0)], pool)
    assert ticket is not None

    def arrive(_keep: object = (rows, pool)) -> None:
        engine.drain()

    return ticket, arrive


class Naive:
    """Key to (parent, last used, pinned), and the rule as it is written down."""

    def __init__(self) -> None:
        self.parents: dict[str, str | None] = {}
        self.used: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.clock = 0

    def add(self, key: str, parent: str | None) -> None:
        self.parents[key] = parent
        self.touch(key)

    def touch(self, key: str) -> None:
        self.clock += 1
        self.used[key] = self.clock

    def remove(self, key: str) -> None:
        del self.parents[key], self.used[key]
        self.pinned.discard(key)

    def reachable(self, key: str) -> bool:
        parent = self.parents[key]
        return parent is None or (parent in self.parents and self.reachable(parent))

    def victim(self) -> str | None:
        hung_on = set(self.parents.values())
        free = [k for k in self.parents if k not in hung_on and k not in self.pinned]
        return min(free, key=lambda k: (self.reachable(k), self.used[k]), default=None)


@pytest.mark.parametrize("seed", range(60))
def test_any_sequence_of_operations_evicts_what_the_naive_model_does(seed: int) -> None:
    choose = random.Random(seed)
    index, naive = Index(), Naive()
    # A fixed forest of 24 possible keys: each hangs on an earlier one or on none.
    forest: dict[str, str | None] = {}
    for i in range(24):
        parent = choose.choice([None, *forest]) if i % 6 else None
        forest[str(i)] = parent
    held: dict[str, list[int]] = {}  # also of what was dropped since
    orphans = 0
    for _ in range(500):
        operation = choose.choice("aaattprrvuc" if seed % 4 == 0 else "aaattprvu")
        key = choose.choice(list(forest))
        present = index.has(key)
        assert present == (key in naive.parents)
        if operation == "a" and not present:
            index.put(key, forest[key])
            naive.add(key, forest[key])
        elif operation == "t" and present:
            index.touch(key)
            naive.touch(key)
        elif operation == "p" and present and key not in naive.pinned:
            held.setdefault(key, []).append(index.number(key))
            index.pin(index.number(key))
            naive.touch(key)
            naive.pinned.add(key)
        elif operation == "u":
            for numbers in held.values():
                index.unpin(numbers)
            held.clear()
            naive.pinned.clear()
            orphans = 0
        elif operation == "r" and present:
            orphans += key in naive.pinned
            index.drop(key)
            naive.remove(key)
        elif operation == "c" and choose.random() < 0.1:
            orphans += len(naive.pinned)
            index.clear()
            for name in list(naive.parents):
                naive.remove(name)
        elif operation == "v":
            expected = naive.victim()
            victim = index.evict()
            assert victim == (None if expected is None else expected.encode())
            if expected is not None:
                naive.remove(expected)
        assert len(index) == len(naive.parents)
        assert index.used == len(naive.parents) + orphans
