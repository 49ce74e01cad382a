"""`ChunkIndex` beside a model so simple that it looks at everything each time."""

from __future__ import annotations

import gc
import random

import pytest

from hidden_cache.index import ChunkIndex, Entry


def names(index: ChunkIndex) -> str:
    """All entries in the order in which they go, as one word; empties the index."""
    gone = []
    while (entry := index.pop_victim()) is not None:
        assert isinstance(entry.key, bytes)
        gone.append(entry.key.decode())
    return "".join(gone)


def chain(index: ChunkIndex, keys: str) -> list[Entry]:
    """A prefix, one letter a chunk."""
    entries, parent = [], None
    for letter in keys:
        entries.append(index.add(letter.encode(), parent))
        parent = letter.encode()
    return entries


def entry_of(index: ChunkIndex, key: str) -> Entry:
    entry = index.get(key.encode())
    assert entry is not None
    return entry


def test_leaves_go_before_what_they_hang_on() -> None:
    index = ChunkIndex()
    chain(index, "abc")
    assert names(index) == "cba"
    assert len(index) == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    index = ChunkIndex()
    for key in "abc":
        chain(index, key)
    index.touch(entry_of(index, "a"))
    assert names(index) == "bca"


def test_touching_a_leaf_saves_it_once_only() -> None:
    index = ChunkIndex()
    chain(index, "ab")
    chain(index, "cd")
    index.touch(entry_of(index, "b"))
    assert names(index) == "dcba"


def test_pinned_entries_and_what_they_hang_on_stay() -> None:
    index = ChunkIndex()
    chain(index, "abc")
    pinned = entry_of(index, "b")
    pinned.pins = 1
    assert names(index) == "c"
    pinned.pins = 0
    assert names(index) == "ba"


def test_a_pinned_entry_that_was_passed_over_keeps_its_turn() -> None:
    index = ChunkIndex()
    for key in "abc":
        chain(index, key)
    entry_of(index, "a").pins = 1
    victim = index.pop_victim()
    assert victim is not None
    assert victim.key == b"b"
    entry_of(index, "a").pins = 0
    assert names(index) == "ac"


def test_what_lost_its_predecessor_goes_before_everything_else() -> None:
    index = ChunkIndex()
    chain(index, "x")  # the oldest
    chain(index, "abcd")
    index.remove(entry_of(index, "a"))
    # Not only the leaf d, but also what hangs behind it.
    assert names(index) == "dcbx"


def test_among_the_unreachable_the_least_recently_used_goes_first() -> None:
    index = ChunkIndex()
    chain(index, "a")
    for key in "bcd":
        index.add(key.encode(), b"a")
    index.touch(entry_of(index, "b"))
    index.remove(entry_of(index, "a"))
    assert names(index) == "cdb"


def test_the_chain_is_reachable_again_once_its_key_is_back() -> None:
    index = ChunkIndex()
    chain(index, "x")
    chain(index, "abc")
    index.remove(entry_of(index, "a"))
    index.add(b"a", None)
    assert names(index) == "xcba"


def test_a_child_added_before_its_parent_is_unreachable_until_then() -> None:
    index = ChunkIndex()
    chain(index, "x")
    index.add(b"b", b"a")
    index.add(b"c", b"b")
    index.add(b"a", None)
    assert names(index) == "xcba"


def test_removed_entries_are_forgotten_also_when_none_is_ever_evicted() -> None:
    index = ChunkIndex()
    kept = chain(index, "abcd")
    for _ in range(5000):
        index.remove(index.add(b"e", b"d"))
        index.remove(entry_of(index, "a"))
        chain(index, "a")
    alive = sum(type(thing) is Entry for thing in gc.get_objects())
    assert alive < 200
    assert len(index) == len(kept)


class Naive:
    """Key to (parent, last used, pinned), and the rule as it is written down."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.used: dict[bytes, int] = {}
        self.pinned: set[bytes] = set()
        self.clock = 0

    def add(self, key: bytes, parent: bytes | None) -> None:
        self.parents[key] = parent
        self.touch(key)

    def touch(self, key: bytes) -> None:
        self.clock += 1
        self.used[key] = self.clock

    def remove(self, key: bytes) -> None:
        del self.parents[key], self.used[key]

    def reachable(self, key: bytes) -> bool:
        parent = self.parents[key]
        return parent is None or (parent in self.parents and self.reachable(parent))

    def victim(self) -> bytes | None:
        hung_on = set(self.parents.values())
        free = [k for k in self.parents if k not in hung_on and k not in self.pinned]
        return min(free, key=lambda k: (self.reachable(k), self.used[k]), default=None)


@pytest.mark.parametrize("seed", range(40))
def test_any_sequence_of_operations_evicts_what_the_naive_model_does(seed: int) -> None:
    choose = random.Random(seed)
    index, naive = ChunkIndex(), Naive()
    # A fixed forest of 24 possible keys: each hangs on an earlier one or on none.
    forest: dict[bytes, bytes | None] = {}
    for i in range(24):
        parent = choose.choice([None, *forest]) if i % 6 else None
        forest[b"%d" % i] = parent
    for _ in range(400):
        operation = choose.choice("aaattprvu")
        key = choose.choice(list(forest))
        entry = index.get(key)
        assert (entry is not None) == (key in naive.parents)
        if operation == "a" and entry is None:
            index.add(key, forest[key])
            naive.add(key, forest[key])
        elif operation == "t" and entry is not None:
            index.touch(entry)
            naive.touch(key)
        elif operation == "p" and entry is not None:
            entry.pins = 1
            naive.pinned.add(key)
        elif operation == "u":
            for pinned in naive.pinned:
                entry_of(index, pinned.decode()).pins = 0
            naive.pinned.clear()
        elif operation == "r" and entry is not None and entry.pins == 0:
            index.remove(entry)
            naive.remove(key)
        elif operation == "v":
            expected = naive.victim()
            victim = index.pop_victim()
            assert (victim.key if victim else None) == expected
            if expected is not None:
                naive.remove(expected)
        assert {e.key for e in index} == set(naive.parents)
