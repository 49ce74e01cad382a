"""The store beside a dictionary, under any sequence of operations and constant pool pressure.

`Model` is the specification: what is there, whose it is, and what may go. Transfers stay in flight
until a rule has them arrive or fail. HSCACHE_EXAMPLES says how many sequences are drawn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hidden_cache import _native
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import HiddenCacheError, PoolFullError, QueueFullError, TransferError
from hidden_cache.keys import Chunk, TokenChunker
from hidden_cache.lease import Lease
from hidden_cache.store import HiddenStateStore
from hidden_cache.writer import RequestWriter
from tests.unit import LAYOUTS, Layout, make_paged, make_rows

CHUNK = 2
HIDDEN = 3
SLOTS = 9  # two layers of four chunks fit, and one layer of a tail
MAX_PENDING = 4  # transfers
UNWRITTEN = -7.0

# Whole chunks are one of two, so that prefixes share; four of them go deep.
prefixes = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4).map(
    lambda letters: [token for letter in letters for token in (letter, letter + 10)]
)
tails = st.integers(0, CHUNK - 1)
layer_sets = st.sampled_from([(0,), (1,), (0, 1), (1, 0)])
layouts = st.sampled_from(LAYOUTS)
dtypes = st.sampled_from([None, torch.float32, torch.float16, torch.bfloat16, torch.float64])
picks = st.integers(0, 5)  # of what is alive, counted round


@dataclass(eq=False)
class Stored:
    """A chunk: its rows by layer, as they were first computed, and the transfers that bring them.

    A chunk that was dropped lives on as long as it is busy.
    """

    layers: dict[int, torch.Tensor] = field(default_factory=dict)
    fills: list[tuple[list[int], list[_native.Ticket]]] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    pins: int = 0

    @property
    def busy(self) -> bool:
        return self.pins > 0 or bool(self.fills)

    def whole(self, layer: int) -> bool:
        on_the_way = any(layer in layers for layers, _ in self.fills)
        return layer in self.layers and layer not in self.failed and not on_the_way


@dataclass(eq=False)
class Open:
    """One chunk of a request: layers that are its own yet, the others are `stored`'s."""

    key: Hashable | None
    stored: Stored | None
    own: dict[int, torch.Tensor]
    tickets: list[_native.Ticket] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """Whose rows come in: all of `rows` in the end, those behind `start` in steps."""

    layers: tuple[int, ...]
    rows: torch.Tensor
    keys: list[Hashable]  # of all its whole chunks
    start: int = 0
    taken: int = 0
    known: int = 0  # chunks whose key was told
    epoch: int = 0
    opened: list[Open] = field(default_factory=list)
    rewound: list[_native.Ticket] = field(default_factory=list)
    tickets: list[_native.Ticket] = field(default_factory=list)  # of its lease
    writer: RequestWriter | None = None
    lease: Lease | None = None

    @property
    def parent(self) -> Hashable | None:
        return self.keys[self.start // CHUNK - 1] if self.start else None

    def expected(self) -> torch.Tensor:
        """Rows that its lease gives."""
        parts = []
        for one in self.opened:
            theirs = {} if one.stored is None else one.stored.layers
            parts.append(torch.stack([{**theirs, **one.own}[la] for la in self.layers], 1))
        return torch.cat(parts)[: self.taken - self.start]


@dataclass(eq=False)
class View:
    rows: torch.Tensor
    holds: list[Stored]
    expected: torch.Tensor


def ended(tickets: Iterable[_native.Ticket]) -> bool:
    return all(ticket.ended for ticket in tickets)


class Model:
    """Which chunks there are, and who holds what."""

    def __init__(self) -> None:
        self.chunks: dict[Hashable, Stored] = {}
        self.parents: dict[Hashable, Hashable | None] = {}
        self.dropped: list[Stored] = []  # but busy
        self.requests: list[Request] = []  # that write, or hold a lease
        self.retired: list[tuple[int, list[_native.Ticket]]] = []  # slots that are still written to
        self.kv_gone: set[Hashable] = set()

    # What is there

    def settle(self) -> None:
        """Transfers that have ended make chunks whole, or drop them."""
        for stored in [*self.chunks.values(), *self.dropped]:
            for fill in [fill for fill in stored.fills if ended(fill[1])]:
                stored.fills.remove(fill)
                if not all(ticket.done for ticket in fill[1]):
                    stored.failed.update(fill[0])
        for key in [key for key, stored in self.chunks.items() if stored.failed]:
            self.drop(key)
        self.dropped = [stored for stored in self.dropped if stored.busy]
        self.retired = [(slots, tickets) for slots, tickets in self.retired if not ended(tickets)]

    def drop(self, key: Hashable) -> bool:
        stored = self.chunks.pop(key, None)
        if stored is not None and stored.busy:
            self.dropped.append(stored)
        return stored is not None

    def prefix(self, keys: list[Hashable], layers: tuple[int, ...]) -> list[Stored]:
        """What a look finds: it stops where KV is gone, which drops the chunk, or a layer lacks."""
        found = []
        for key in keys:
            if key in self.kv_gone:
                self.drop(key)
                break
            stored = self.chunks.get(key)
            if stored is None or not all(stored.whole(layer) for layer in layers):
                break
            found.append(stored)
        return found

    def used(self) -> int:
        stored = [*self.chunks.values(), *self.dropped]
        own = [one.own for request in self.requests for one in request.opened]
        return (
            sum(len(s.layers) for s in stored)
            + sum(map(len, own))
            + sum(s for s, _ in self.retired)
        )

    # What may go

    def reachable(self, key: Hashable) -> bool:
        if key not in self.chunks:
            return False
        parent = self.parents[key]
        return parent is None or self.reachable(parent)

    def stays(self, key: Hashable, kept: set[Hashable]) -> bool:
        """Whether a chunk is busy, or stands in front of one that is."""
        children = [child for child in self.chunks if self.parents[child] == key]
        return key in kept or self.chunks[key].busy or any(self.stays(c, kept) for c in children)

    def room(self, kept: set[Hashable]) -> int:
        """Slots that a request can have which holds `kept`."""
        going = [stored for key, stored in self.chunks.items() if not self.stays(key, kept)]
        return SLOTS - self.used() + sum(len(stored.layers) for stored in going)

    # Requests

    def opening(self, request: Request, stop: int) -> tuple[list[Open], set[Hashable]]:
        """Chunks that a request comes to, and the keys that it holds while it makes room."""
        opened = []
        for start in range(request.start + len(request.opened) * CHUNK, stop, CHUNK):
            place = start // CHUNK
            key = request.keys[place] if place < request.known else None
            stored = None if key is None else self.chunks.get(key)
            there = {} if stored is None else stored.layers
            own = {la: torch.zeros(CHUNK, HIDDEN) for la in request.layers if la not in there}
            opened.append(Open(key, stored, own))
        kept = {one.key for one in opened if one.stored is not None}
        return opened, kept | {request.parent}

    def take(self, request: Request, opened: list[Open]) -> None:
        for one in opened:
            if one.stored is not None:
                one.stored.pins += 1
        request.opened += opened

    def learn(self, request: Request) -> None:
        """Chunks that were opened before their key was known get it."""
        first = request.start // CHUNK
        for place, one in enumerate(request.opened, first):
            if place < min(request.known, len(request.keys)):
                one.key = request.keys[place]

    def fill(self, request: Request, stop: int, ticket: _native.Ticket | None) -> None:
        """Rows up to `stop` are on their way: chunks that are whole now are everybody's."""
        before = request.parent
        for place, one in enumerate(request.opened):
            start = request.start + place * CHUNK
            first, end = max(start, request.taken), min(start + CHUNK, stop)
            if first < end and one.own:
                for layer, rows in one.own.items():
                    given = request.rows[first:end, request.layers.index(layer)]
                    rows[first - start : end - start] = given
                assert ticket is not None
                one.tickets.append(ticket)
                if one.key is not None and end == start + CHUNK:
                    self.commit(one, before)
            before = one.key
        request.taken = stop

    def commit(self, one: Open, parent: Hashable | None) -> None:
        """Whoever was first with a layer has brought it; others' copies of it go."""
        assert one.key is not None
        there = self.chunks.get(one.key)
        if one.stored is not None and there is not one.stored:
            return  # dropped meanwhile: the rest would hang on nothing
        if there is not None and not all(there.whole(la) for la in one.own if la in there.layers):
            return  # what is not there yet may fail
        if there is None:
            there = self.chunks[one.key] = Stored()
            self.parents[one.key] = parent
        if one.stored is None:
            there.pins += 1
            one.stored = there
        new = [layer for layer in one.own if layer not in there.layers]
        if new:
            there.fills.append((new, one.tickets))
            there.layers.update({layer: one.own[layer].clone() for layer in new})
        if len(new) < len(one.own):
            self.retired.append((len(one.own) - len(new), one.tickets))
        one.own = {}

    def let_go(self, opened: list[Open], tickets: list[_native.Ticket] | None = None) -> None:
        for one in opened:
            if one.stored is not None:
                one.stored.pins -= 1
            if one.own:
                self.retired.append((len(one.own), one.tickets if tickets is None else tickets))


class StillStore(HiddenStateStore):
    """Rows that are stored stay in flight until `arrive`; `meanwhile` runs once they are."""

    meanwhile: Callable[[], None] | None = None

    def __init__(self, config: HiddenCacheConfig) -> None:
        super().__init__(config)
        make = self._memory._make_engine

        def make_still(device: torch.device, **options: Any) -> _native.TransferEngine:
            # What stores has a limit; what reads goes on by itself.
            return make(device, threaded="max_pending" not in options, **options)

        setattr(self._memory, "_make_engine", make_still)  # noqa: B010

    def _waiting(self, append: Callable[[], _native.Ticket | None]) -> _native.Ticket | None:
        ticket = super()._waiting(append)
        if self.meanwhile is not None:
            self.meanwhile()
        return ticket

    def arrive(self) -> None:
        for engine in self._memory.engines.values():
            engine.drain()


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = StillStore(
            HiddenCacheConfig(
                chunk_size=CHUNK,
                pool_bytes=SLOTS * CHUNK * HIDDEN * 4,
                max_pending=MAX_PENDING,
            )
        )
        self.store.bind_storage_manager(self)
        self.chunker = TokenChunker(CHUNK)
        self.model = Model()
        self.views: list[View] = []
        self.serial = 0
        self.evicted = 0

    def teardown(self) -> None:
        store, model = self.store, self.model
        self.views.clear()
        for request in model.requests:
            if request.lease is not None:
                request.lease.release()
            elif request.writer is not None:
                request.writer.abandon()
        store.arrive()
        store.reset()
        if sys.exc_info()[0] is None:  # or it would hide what went wrong
            assert store.stats().used_bytes == 0, "nothing is held any more"
        store.close()

    def contains(self, key: Hashable) -> str | None:
        """Whether KV is there, as the store asks."""
        return None if key in self.model.kv_gone else "here"

    # --- parts of rules -------------------------------------------------------------------

    def keys(self, tokens: list[int]) -> list[Hashable]:
        return [chunk.key for chunk in self.chunker.chunks(tokens) if chunk.key is not None]

    def request(self, tokens: list[int], layers: tuple[int, ...], tail: int, start: int) -> Request:
        return Request(
            layers,
            self.compute(len(tokens) + tail, len(layers)),
            self.keys(tokens),
            start=start,
            taken=start,
            epoch=self.store.weights_epoch,
        )

    def compute(self, tokens: int, layers: int) -> torch.Tensor:
        """Rows as no other computation has them."""
        self.serial += 1
        return make_rows(tokens, layers, HIDDEN, torch.float32, first=self.serial * 100)

    def pending(self) -> list[_native.Ticket]:
        return self.store._memory.pending()

    def refusal(self, request: Request, stop: int) -> PoolFullError | QueueFullError | None:
        """What rows up to `stop` must be refused with."""
        opened, kept = self.model.opening(request, stop)
        needed = sum(len(one.own) for one in opened)
        whole = (len(request.opened) + len(opened)) * len(request.layers)
        if not ended(request.rewound):
            return QueueFullError()
        if needed > min(SLOTS, self.model.room(kept)):
            return PoolFullError("", can_wait=max(needed, whole) <= SLOTS)
        touched = [*request.opened, *opened][(request.taken - request.start) // CHUNK :]
        if any(one.own for one in touched) and stop > request.taken:
            return QueueFullError() if len(self.pending()) >= MAX_PENDING else None
        return None

    def attempt(
        self, request: Request, stop: int, call: Callable[[], Any], known: int
    ) -> tuple[bool, Any]:
        """Has a request give rows up to `stop`; whether they were taken, and what `call` gave."""
        model = self.model
        told, request.known = request.known, max(request.known, known)
        opened, kept = model.opening(request, stop)
        expected = self.refusal(request, stop)
        free = SLOTS - model.used()
        before = len(self.pending())
        refused: PoolFullError | QueueFullError | None = None
        result = None
        try:
            result = call()
        except (PoolFullError, QueueFullError) as error:
            refused = error
        assert type(refused) is type(expected), (refused, expected)
        if isinstance(refused, PoolFullError) and isinstance(expected, PoolFullError):
            assert refused.can_wait is expected.can_wait
        self.forget_evicted(kept, sum(len(one.own) for one in opened) - free)
        if refused is not None:
            request.known = told
            return False, None
        model.take(request, opened)
        model.learn(request)
        pending = self.pending()
        model.fill(request, stop, pending[-1] if len(pending) > before else None)
        return True, result

    def forget_evicted(self, kept: set[Hashable], lacking: int) -> None:
        """Takes evicted chunks out of the model, after a look at which they are.

        Args:
            kept: what whoever made room holds.
            lacking: slots that were to be had by evicting.
        """
        model, store = self.model, self.store
        gone = {
            key
            for key, stored in model.chunks.items()
            if any(stored.whole(la) and not store.has_chunk(key, la) for la in stored.layers)
        }
        evicted = store.stats().evicted_chunks
        assert len(gone) == evicted - self.evicted
        self.evicted = evicted
        assert not gone or lacking > 0, "there was room"
        assert not any(key in kept or model.chunks[key].busy for key in gone), "it was needed"
        left = model.chunks.keys() - gone
        assert not gone & {model.parents[key] for key in left}, "leaves go first"
        if any(map(model.reachable, gone)):
            assert all(model.reachable(key) or model.stays(key, kept) for key in left), (
                "what cannot be reached goes before what can"
            )
        for key in gone:
            del model.chunks[key]

    # --- rows in --------------------------------------------------------------------------

    @rule(
        tokens=prefixes,
        layer=st.sampled_from([0, 1]),
        back=st.sampled_from([1, 2, 2, 4, 5, 8, 8, 8]),
        as_chunks=st.booleans(),
        fails=st.sampled_from([False, False, False, True]),
    )
    def store_rows(
        self, tokens: list[int], layer: int, back: int, as_chunks: bool, fails: bool
    ) -> None:
        """From the front as much as there is room for; waits."""
        model, store = self.model, self.store
        offset = max(0, len(tokens) - back)
        if len(self.pending()) >= MAX_PENDING:
            self.arrive([])  # or it would wait for room in the queue
        request = self.request(tokens, (layer,), 0, -(-offset // CHUNK) * CHUNK)
        request.known = len(request.keys)
        opened, kept = model.opening(request, len(tokens))
        room, new = model.room(kept), [one for one in opened if one.own]
        lacking = len(new) - (SLOTS - model.used())
        stop = len(tokens)
        if len(new) > room:
            opened = opened[: opened.index(new[room])]
            stop = request.start + len(opened) * CHUNK
        brought = [one for one in opened if one.own]
        tickets: list[_native.Ticket] = []
        before = len(self.pending())

        def meanwhile() -> None:
            pending = self.pending()
            tickets.extend(pending[before:])
            self.forget_evicted(kept, lacking)
            model.take(request, opened)
            model.fill(request, stop, tickets[0] if tickets else None)
            for ticket in pending if fails else []:
                ticket.cancel()
            store.arrive()

        store.meanwhile = meanwhile
        told = [*self.chunker.chunks(tokens), Chunk(len(tokens), len(tokens) + 1, None)]
        rows = request.rows[offset:, 0]
        try:
            count = store.store_hidden_states(
                told if as_chunks else tokens,
                torch.cat([rows, torch.zeros(1, HIDDEN)]) if as_chunks else rows,
                layer_idx=layer,
                token_offset=offset,
            )
            assert not (brought and fails)
            assert count == len(brought)
        except TransferError:
            assert fails
            assert brought
        store.meanwhile = None
        assert len(tickets) == (len(brought) > 0)
        model.let_go(request.opened)

    @rule(tokens=prefixes, layers=layer_sets, skipped=st.integers(0, 3), layout=layouts)
    def store_paged(
        self, tokens: list[int], layers: tuple[int, ...], skipped: int, layout: Layout
    ) -> None:
        """All or nothing; in the background."""
        start = min(skipped * CHUNK, len(tokens))
        request = self.request(tokens, layers, 0, start)
        paged, block_ids = make_paged(request.rows, 3, layout, seed=self.serial)
        if isinstance(self.with_known(request, len(tokens)), QueueFullError):
            return  # it would wait
        taken, _ = self.attempt(
            request,
            len(tokens),
            lambda: self.store.store_paged(
                tokens, paged, block_ids, layer_idxs=layers, token_offset=start
            ),
            len(request.keys),
        )
        if taken:
            self.model.let_go(request.opened)

    def with_known(self, request: Request, stop: int) -> HiddenCacheError | None:
        request.known = len(request.keys)
        return self.refusal(request, stop)

    @rule(tokens=prefixes, layers=layer_sets, tail=tails, layout=layouts)
    def lease_paged(
        self, tokens: list[int], layers: tuple[int, ...], tail: int, layout: Layout
    ) -> None:
        request = self.request(tokens, layers, tail, 0)
        paged, block_ids = make_paged(request.rows, 3, layout, seed=self.serial)
        chunks = self.chunker.chunks(tokens)
        if tail:
            chunks.append(Chunk(len(tokens), len(tokens) + tail, None))
        taken, lease = self.attempt(
            request,
            len(request.rows),
            lambda: self.store.lease_paged(chunks, paged, block_ids, layer_idxs=layers),
            len(request.keys),
        )
        if taken:
            self.holds(request, lease)
            self.model.requests.append(request)

    def holds(self, request: Request, lease: Lease) -> None:
        request.lease, request.writer = lease, None
        request.tickets = lease.tickets
        assert lease.num_tokens == request.taken - request.start

    # --- step by step ---------------------------------------------------------------------

    def pick(self, place: int, *, writing: bool) -> Request:
        alive = [r for r in self.model.requests if (r.writer is not None) == writing]
        return alive[place % len(alive)]

    def any_writes(self) -> bool:
        return any(request.writer is not None for request in self.model.requests)

    def any_is_held(self) -> bool:
        return any(request.lease is not None for request in self.model.requests)

    @rule(tokens=prefixes, layers=layer_sets, tail=tails, rivals=st.integers(0, 2))
    def begin(self, tokens: list[int], layers: tuple[int, ...], tail: int, rivals: int) -> None:
        """Rivals bring rows of the same tokens."""
        for _ in range(1 + rivals):
            request = self.request(tokens, layers, tail, 0)
            request.writer = self.store.writer(f"{self.serial}", layers)
            self.model.requests.append(request)

    @precondition(any_writes)
    @rule(
        place=picks,
        count=st.sampled_from([0, 1, 1, 1, 2, 3, 5]),
        late=st.integers(0, 2),
        paged=st.booleans(),
        times=st.integers(1, 3),
    )
    def step(self, place: int, count: int, late: int, paged: bool, times: int) -> None:
        for _ in range(times):
            self.step_once(place, count, late, paged)

    def step_once(self, place: int, count: int, late: int, paged: bool) -> None:
        """Some rows more; `late` says whether keys are known before, with or after the last row."""
        request = self.pick(place, writing=True)
        writer = request.writer
        assert writer is not None
        stop = min(request.taken + count, len(request.rows))
        known = [len(request.keys), stop // CHUNK, request.taken // CHUNK][late]
        chunks = [
            Chunk(i * CHUNK, (i + 1) * CHUNK, request.keys[i])
            for i in range(request.known, min(known, len(request.keys)))
        ]
        source = request.rows[:stop].clone()

        def call() -> None:
            if paged and stop:
                writer.append_paged(*make_paged(source, 3, seed=stop), stop, chunks)
            else:
                writer.append(source[request.taken :], chunks)

        if request.epoch < self.store.weights_epoch:
            with pytest.raises(HiddenCacheError, match="reset"):
                call()
            return
        self.attempt(request, stop, call, min(known, len(request.keys)))
        assert writer.num_tokens == request.taken

    @precondition(any_writes)
    @rule(place=picks, count=st.integers(1, 9))
    def reserve(self, place: int, count: int) -> None:
        """Makes room for rows that are to come, and holds what is there of them."""
        request = self.pick(place, writing=True)
        writer, model = request.writer, self.model
        assert writer is not None
        if request.epoch < self.store.weights_epoch:
            return
        stop = request.taken + count
        chunks = [Chunk(i * CHUNK, (i + 1) * CHUNK, key) for i, key in enumerate(request.keys)][
            request.known :
        ]
        told, request.known = request.known, len(request.keys)
        opened, kept = model.opening(request, stop)
        needed = sum(len(one.own) for one in opened)
        lacking = needed - (SLOTS - model.used())
        fits = needed <= min(SLOTS, model.room(kept))
        try:
            writer.reserve(request.rows, stop, chunks)
            assert fits
        except PoolFullError:
            assert not fits
        self.forget_evicted(kept, lacking)
        if fits:
            model.take(request, opened)
            model.learn(request)
        else:
            request.known = told

    @precondition(any_writes)
    @rule(place=picks, back=st.integers(1, 5))
    def rewind(self, place: int, back: int) -> None:
        """Rows come again, from another computation: what was everybody's stays as it was."""
        request = self.pick(place, writing=True)
        writer = request.writer
        assert writer is not None
        if request.epoch < self.store.weights_epoch:
            with pytest.raises(HiddenCacheError, match="reset"):
                writer.rewind(0)
            return
        count = max(0, request.taken - back)
        writer.rewind(count)
        for i, one in enumerate(request.opened):
            if one.own and (i + 1) * CHUNK > count:
                request.rewound += one.tickets
        request.rows = request.rows.clone()
        request.rows[count:] = self.compute(len(request.rows) - count, len(request.layers))
        request.taken = count

    @precondition(any_writes)
    @rule(place=picks)
    def finish(self, place: int) -> None:
        request = self.pick(place, writing=True)
        writer = request.writer
        assert writer is not None
        if request.epoch < self.store.weights_epoch:
            with pytest.raises(HiddenCacheError, match="reset"):
                writer.finish()
            self.end(request)
            return
        self.holds(request, writer.finish())
        taken = -(-request.taken // CHUNK)
        rest, request.opened = request.opened[taken:], request.opened[:taken]
        self.model.let_go(rest)

    @precondition(any_writes)
    @rule(place=picks)
    def abandon(self, place: int) -> None:
        request = self.pick(place, writing=True)
        assert request.writer is not None
        request.writer.abandon()
        self.end(request)

    def end(self, request: Request, tickets: list[_native.Ticket] | None = None) -> None:
        self.model.let_go(request.opened, tickets)
        self.model.requests.remove(request)

    @precondition(any_is_held)
    @rule(place=picks)
    def release(self, place: int) -> None:
        request = self.pick(place, writing=False)
        assert request.lease is not None
        request.lease.release()
        self.end(request, request.tickets)

    # --- rows out -------------------------------------------------------------------------

    @rule(
        tokens=prefixes,
        layers=layer_sets,
        dtype=dtypes,
        into=st.sampled_from([None, 0, 2]),
        looks=st.booleans(),
    )
    def retrieve(
        self,
        tokens: list[int],
        layers: tuple[int, ...],
        dtype: torch.dtype | None,
        into: int | None,
        looks: bool,
    ) -> None:
        """A prefix without a hole; with `into` in tensors of ours, which have rows to spare."""
        expected = self.model.prefix(self.keys(tokens), layers)
        if looks:
            assert self.store.coverage(tokens, layers) == len(expected) * CHUNK
            return
        room = len(expected) * CHUNK + (into or 0)
        out = None
        if into is not None:
            shape = (room, HIDDEN)
            out = {la: torch.full(shape, UNWRITTEN, dtype=dtype or torch.float32) for la in layers}
        found = self.store.retrieve_layers(tokens, layers, dtype=dtype, out=out)
        if not expected:
            assert found is None
            return
        assert found is not None
        assert set(found) == set(layers)
        for layer, rows in found.items():
            stored = torch.cat([there.layers[layer] for there in expected])
            assert rows.dtype == (dtype or torch.float32)
            assert torch.equal(rows, stored.to(rows.dtype))
            if out is not None:
                assert rows.data_ptr() == out[layer].data_ptr()
                assert (out[layer][len(rows) :] == UNWRITTEN).all()

    @rule(tokens=prefixes, layer=st.sampled_from([0, 1]))
    def view(self, tokens: list[int], layer: int) -> None:
        """Rows where they lie, held as long as the tensor lives."""
        expected = self.model.prefix(self.keys(tokens), (layer,))
        before = self.store.stats().bytes_retrieved
        rows = self.store.retrieve_hidden_states(tokens, layer_idx=layer, copy=False)
        if not expected:
            assert rows is None
            return
        assert rows is not None
        stored = torch.cat([there.layers[layer] for there in expected])
        assert torch.equal(rows, stored)
        if self.store.stats().bytes_retrieved == before:
            for there in expected:
                there.pins += 1
            self.views.append(View(rows[1:], expected, stored[1:]))

    @precondition(lambda self: self.views)
    @rule(place=picks)
    def let_a_view_die(self, place: int) -> None:
        view = self.views.pop(place % len(self.views))
        for there in view.holds:
            there.pins -= 1

    # --- what comes between ---------------------------------------------------------------

    @rule(tokens=prefixes, place=st.integers(0, 3))
    def drop(self, tokens: list[int], place: int) -> None:
        """Also in the middle of a prefix."""
        key = self.keys(tokens)[place % (len(tokens) // CHUNK)]
        assert self.store.drop_key(key) == self.model.drop(key)

    @rule(tokens=prefixes, place=st.integers(0, 3))
    def kv_goes(self, tokens: list[int], place: int) -> None:
        self.model.kv_gone.add(self.keys(tokens)[place % (len(tokens) // CHUNK)])

    @precondition(lambda self: self.model.kv_gone)
    @rule()
    def kv_comes_back(self) -> None:
        self.model.kv_gone.clear()

    @rule(fails=st.lists(st.booleans(), max_size=MAX_PENDING))
    def arrive(self, fails: list[bool]) -> None:
        """What is in flight arrives, or fails."""
        for ticket, fail in zip(self.pending(), fails, strict=False):
            if fail:
                ticket.cancel()
        self.store.arrive()
        self.model.settle()

    @precondition(lambda self: self.serial % 3 == 0)
    @rule()
    def reset(self) -> None:
        self.store.reset()
        for key in list(self.model.chunks):
            self.model.drop(key)

    # --- what always holds ----------------------------------------------------------------

    @invariant()
    def chunks_and_slots_are_accounted_for(self) -> None:
        model, store = self.model, self.store
        model.settle()
        stats = store.stats()
        assert stats.num_chunks == len(model.chunks)
        for key, stored in model.chunks.items():
            for layer in (0, 1):
                assert store.has_chunk(key, layer) == stored.whole(layer)
        if stats.num_slots:
            assert stats.num_slots == SLOTS
            assert stats.num_slots - stats.free_slots == model.used()

    @invariant()
    def held_rows_do_not_change(self) -> None:
        for request in self.model.requests:
            if request.lease is None or request.taken == 0:
                continue
            stored = [one.stored for one in request.opened if one.stored is not None]
            shared = [
                (set(request.layers) - one.own.keys(), one.stored)
                for one in request.opened
                if one.stored is not None
            ]
            own = request.tickets
            failed = any(t.error for t in own) or any(la & s.failed for la, s in shared)
            arrived = ended(own) and not any(s.fills for s in stored)
            out = torch.empty(request.taken, len(request.layers), HIDDEN)
            if failed and arrived:
                with pytest.raises(TransferError):
                    request.lease.wait()
            if failed:
                with pytest.raises(TransferError):
                    request.lease.read(0, out)
            elif arrived:
                request.lease.wait()
                request.lease.read(0, out)
                assert torch.equal(out, request.expected())
        for view in self.views:
            assert torch.equal(view.rows, view.expected)


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("HSCACHE_EXAMPLES", "80")),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
