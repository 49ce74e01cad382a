"""The store beside a dictionary, under any sequence of operations and constant pool pressure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import PoolFullError
from hidden_cache.keys import Chunk, TokenChunker
from hidden_cache.lease import Lease
from hidden_cache.store import HiddenStateStore
from tests.unit import LAYOUTS, Layout, make_paged, make_rows

CHUNK = 2
HIDDEN = 3
SLOTS = 9  # two layers of four chunks fit, and one layer of a tail

# Whole chunks are one of two, so that prefixes share; four of them go deep.
prefixes = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4).map(
    lambda letters: [token for letter in letters for token in (letter, letter + 10)]
)
tails = st.integers(0, CHUNK - 1)
layer_sets = st.sampled_from([(0,), (1,), (0, 1), (1, 0)])


@dataclass(eq=False)
class Held:
    """A lease, the chunks that it pins, and the rows that it must give."""

    lease: Lease
    chunks: list[dict[int, torch.Tensor]]
    tail_slots: int
    rows: torch.Tensor


class StoreMachine(RuleBasedStateMachine):
    """`rows` is the whole model: which rows each layer of each chunk was first given."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.store = HiddenStateStore(
            HiddenCacheConfig(chunk_size=CHUNK, pool_bytes=SLOTS * CHUNK * HIDDEN * 4)
        )
        self.chunker = TokenChunker(CHUNK)
        self.rows: dict[Hashable, dict[int, torch.Tensor]] = {}
        self.parents: dict[Hashable, Hashable | None] = {}
        self.held: list[Held] = []
        self.serial = 0
        self.evicted = 0

    def teardown(self) -> None:
        for held in self.held:
            held.lease.release()
        self.store.close()

    # --- what the model says --------------------------------------------------------------

    def keyed(self, tokens: list[int]) -> list[tuple[Hashable, Chunk]]:
        chunks = self.chunker.chunks(tokens)
        return [(chunk.key, chunk) for chunk in chunks if chunk.key is not None]

    def pinned(self) -> set[Hashable]:
        holds = {id(there) for held in self.held for there in held.chunks}
        return {key for key, there in self.rows.items() if id(there) in holds}

    def used(self) -> int:
        # A chunk that was dropped while somebody held it is not known any more, but there still.
        chunks = [*self.rows.values(), *(there for held in self.held for there in held.chunks)]
        slots = {id(there): len(there) for there in chunks}
        return sum(slots.values()) + sum(held.tail_slots for held in self.held)

    def refusal(self, tokens: list[int], layers: tuple[int, ...], tail: int) -> bool | None:
        """None where there must be room, else whether waiting for leases would make some."""
        own = dict(self.keyed(tokens))
        needed = len(layers) * (tail > 0)
        whole = needed
        for key in own:
            there = self.rows.get(key, {})
            needed += len(set(layers) - there.keys())
            whole += len(set(layers) | there.keys())
        if whole > SLOTS:
            return False
        evictable = sum(
            len(there) for key, there in self.rows.items() if key not in {*own, *self.pinned()}
        )
        return None if needed <= SLOTS - self.used() + evictable else True

    def forget_evicted(self) -> None:
        """Takes evicted chunks out of the model, after a look at which they are."""
        gone = {
            key
            for key, there in self.rows.items()
            if not any(self.store.has_chunk(key, layer) for layer in there)
        }
        evicted = self.store.stats().evicted_chunks
        assert len(gone) == evicted - self.evicted
        self.evicted = evicted
        assert not gone & self.pinned()
        for key in gone:
            del self.rows[key]
        assert not gone & {self.parents[key] for key in self.rows}, "leaves go first"

    # --- rules ----------------------------------------------------------------------------

    def bring(
        self, tokens: list[int], layers: tuple[int, ...], tail: int, layout: Layout, lease: bool
    ) -> Held | None:
        self.serial += 1
        every = tokens + [99] * tail
        rows = make_rows(len(every), len(layers), HIDDEN, first=self.serial * 1000)
        paged, block_ids = make_paged(rows, 3, layout, seed=self.serial)
        chunks = self.chunker.chunks(tokens)
        if tail:
            chunks.append(Chunk(len(tokens), len(every), None))
        expected = self.refusal(tokens, layers, tail)
        refused: bool | None = None
        held = None
        try:
            if lease:
                taken = self.store.lease_paged(chunks, paged, block_ids, layer_idxs=layers)
                taken.wait()
                held = Held(taken, [], 0, rows)
                held.tail_slots = len(layers) * (tail > 0)
            else:
                ticket = self.store.store_paged(tokens, paged, block_ids, layer_idxs=layers)
                if ticket is not None:
                    ticket.wait()
        except PoolFullError as error:
            refused = error.can_wait
        assert refused is expected
        self.forget_evicted()
        if refused is not None:
            return None
        parent = None
        for key, chunk in self.keyed(tokens):
            there = self.rows.setdefault(key, {})
            self.parents[key] = parent
            for place, layer in enumerate(layers):
                span = slice(chunk.start, chunk.end)
                rows[span, place] = there.setdefault(layer, rows[span, place].clone())
            if held is not None:
                held.chunks.append(there)
            parent = key
        return held

    @rule(tokens=prefixes, layers=layer_sets, layout=st.sampled_from(LAYOUTS))
    def put(self, tokens: list[int], layers: tuple[int, ...], layout: Layout) -> None:
        self.bring(tokens, layers, 0, layout, lease=False)

    @rule(
        target=leases,
        tokens=prefixes,
        layers=layer_sets,
        tail=tails,
        layout=st.sampled_from(LAYOUTS),
    )
    def hold(self, tokens: list[int], layers: tuple[int, ...], tail: int, layout: Layout):  # type: ignore[no-untyped-def]
        held = self.bring(tokens, layers, tail, layout, lease=True)
        if held is None:
            return multiple()
        self.held.append(held)
        return held

    @rule(held=consumes(leases))
    def release(self, held: Held) -> None:
        held.lease.release()
        self.held.remove(held)

    @rule(tokens=prefixes)
    def drop(self, tokens: list[int]) -> None:
        key, _ = self.keyed(tokens)[-1]
        assert self.store.drop_key(key) == (key in self.rows)
        self.rows.pop(key, None)

    @rule(tokens=prefixes, layers=layer_sets)
    def retrieve(self, tokens: list[int], layers: tuple[int, ...]) -> None:
        expected: list[dict[int, torch.Tensor]] = []
        for key, _ in self.keyed(tokens):
            there = self.rows.get(key, {})
            if not there.keys() >= set(layers):
                break
            expected.append(there)
        assert self.store.coverage(tokens, layers) == len(expected) * CHUNK
        found = self.store.retrieve_layers(tokens, layers)
        if not expected:
            assert found is None
            return
        assert found is not None
        assert set(found) == set(layers)
        for layer, rows in found.items():
            assert torch.equal(rows, torch.cat([there[layer] for there in expected]))

    # --- what always holds ----------------------------------------------------------------

    @invariant()
    def chunks_and_slots_are_accounted_for(self) -> None:
        stats = self.store.stats()
        assert stats.num_chunks == len(self.rows)
        for key, there in self.rows.items():
            assert [layer for layer in (0, 1) if self.store.has_chunk(key, layer)] == sorted(there)
        if stats.num_slots:
            assert stats.num_slots == SLOTS
            assert stats.free_slots + self.used() == SLOTS

    @invariant()
    def held_rows_do_not_change(self) -> None:
        for held in self.held:
            out = torch.empty_like(held.rows)
            held.lease.read(0, out)
            assert torch.equal(out, held.rows)


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(
    derandomize=True, deadline=None, database=None, max_examples=80, stateful_step_count=40
)
