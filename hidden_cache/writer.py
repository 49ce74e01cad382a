"""`RequestWriter`: one request's rows on their way into the pool, as they arrive."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from hidden_cache import _native
from hidden_cache.errors import (
    HiddenCacheError,
    MissingRowsError,
    PoolFullError,
    QueueFullError,
)
from hidden_cache.index import NONE
from hidden_cache.keys import Chunk
from hidden_cache.lease import HeldChunk, Lease, let_go
from hidden_cache.pool_memory import Source, current_stream
from hidden_cache.row_format import RowFormat

if TYPE_CHECKING:
    from hidden_cache.store import HiddenStateStore


class _Kind(NamedTuple):
    """What a request's rows are: as they are kept, as they are given, as the index numbers it."""

    rows: RowFormat
    dtype: torch.dtype
    form: int


@dataclass(slots=True)
class _Chunk(HeldChunk):
    """One of the request's chunks; `slots` are this writer's own until all rows are on their way.

    Attributes:
        shared: nothing of it was missing when the request came to it.
    """

    start: int = 0
    end: int = 0
    key: Hashable | None = None
    shared: bool = False


class RequestWriter:
    """Takes one request's rows in order, in steps of any size, straight to their place in the pool.

    A chunk of which all rows are on their way is everybody's from when they have arrived. A chunk
    that is there already is not copied again. Chunks without a key live until the lease that
    `finish` gives is released.

    What it holds is not evicted, until it is finished and the lease released, or abandoned. One
    thread at a time may use a writer; other writers and readers of the store may be at work.

    Attributes:
        request_id: whose rows they are.
        layer_idxs: the layers, in the order in which rows have them.
        num_tokens: rows `0..num_tokens` have been taken.
        new_chunks: chunks that came to the pool through this writer, or some layer of them.
    """

    def __init__(
        self,
        store: HiddenStateStore,
        request_id: str,
        layer_idxs: Sequence[int],
        *,
        before: Chunk | None = None,
    ) -> None:
        """Use `HiddenStateStore.writer`. Rows begin behind the chunk `before`, or at token 0."""
        self._store = store
        self._chunks: list[_Chunk] = []  # opened, in order
        self._known: list[Chunk] = []  # that were given, from the first on
        # Of those, and of what they hang on: none may hang on itself.
        self._keys: set[Hashable] = set() if before is None else {before.key}
        self._start = 0 if before is None else before.end
        self._parent_key = None if before is None else before.key
        self._kind: _Kind | None = None
        self._paged: torch.Tensor | None = None  # that was checked
        self._in_flight: list[_native.Ticket] = []  # those that failed too
        # Of rows that were rewound: nothing of them may be in flight when others take their place.
        self._before: list[_native.Ticket] = []
        self._ended = False
        self._epoch = store.weights_epoch
        self.request_id = request_id
        self.layer_idxs = tuple(layer_idxs)
        self.num_tokens = self._start
        self.new_chunks = 0

    # --- rows in --------------------------------------------------------------------------

    def append(
        self, rows: torch.Tensor, chunks: Sequence[Chunk] = (), *, stream: int | None = None
    ) -> _native.Ticket | None:
        """Takes the next rows; only enqueues.

        Args:
            rows: `[n, layers, hidden]` on the CPU or a CUDA device. They must stay untouched until
                `source_free`.
            chunks: those that follow the chunks that were given before, as far as their keys are
                known. What is whole before its key is known stays this request's own.
            stream: raw handle of the stream that writes the rows; None for torch's current one.

        Returns:
            The transfer that reads these rows; None where there was nothing to copy.

        Raises:
            ValueError: rows of another shape or kind, chunks that do not follow.
            QueueFullError: too many transfers are pending. Nothing was taken; try again.
            PoolFullError: no room, and nothing was taken. Where `can_wait`, room may come up.
            HiddenCacheError: finished or abandoned, or the store is closed or was reset.
        """
        if rows.dim() != 3 or rows.size(1) != len(self.layer_idxs):
            raise ValueError(
                f"rows have shape {list(rows.shape)}, must be [n, {len(self.layer_idxs)}, hidden]"
            )
        if rows.size(2) < 1 or (rows.stride(2) != 1 and rows.size(2) > 1):
            raise ValueError(
                f"rows have shape {list(rows.shape)} and strides {list(rows.stride())}, must have "
                "elements that lie side by side: give rows.contiguous()"
            )
        source = Source(
            rows.transpose(0, 1)[None], [0], self.num_tokens, current_stream(rows, stream)
        )
        return self._append(source, self.num_tokens + len(rows), chunks)

    def append_paged(
        self,
        paged: torch.Tensor,
        block_ids: Sequence[int],
        num_tokens: int,
        chunks: Sequence[Chunk] = (),
        *,
        first_token: int = 0,
        stream: int | None = None,
    ) -> _native.Ticket | None:
        """Takes rows up to token `num_tokens` out of a paged cache; only enqueues.

        Args:
            paged: `[num_blocks, layers, block_size, hidden]`, any strides before the last. Blocks
                must stay untouched until `source_free`.
            block_ids: the request's block table, or the part of it that is still needed.
            num_tokens: how many rows the request has then; no fewer than now.
            first_token: the first of `block_ids[0]`.
            chunks, stream: as `append`, and so its result and errors; also IndexError for a block
                that is not there.
        """
        if paged is not self._paged:
            self._store._check_paged(paged, self.layer_idxs)
            self._paged = paged
        if self.num_tokens < first_token:
            raise ValueError(
                f"block_ids begin at token {first_token}, rows are there up to {self.num_tokens}: "
                "give the block table from there on"
            )
        stream = current_stream(paged, stream)
        return self._append(Source(paged, list(block_ids), first_token, stream), num_tokens, chunks)

    def reserve(
        self,
        like: torch.Tensor,
        num_tokens: int,
        chunks: Sequence[Chunk] = (),
        *,
        must_be_there: bool = False,
    ) -> None:
        """Makes sure of room for rows up to token `num_tokens`, and holds what is there of them.

        Rows that come step by step find their place then, and chunks of a layer lie side by side.

        Args:
            like: the paged cache, or rows `[n, layers, hidden]`, that they will come from.
            num_tokens, chunks, errors: as `append_paged`.
            must_be_there: nobody can bring these rows: from where the writer stands on they are
                in the pool, or it raises MissingRowsError.
        """
        with self._store._guard():
            kind = self._kind_of(like)
            for chunk in self._chunks if must_be_there else ():
                if chunk.slots and chunk.end > self.num_tokens and chunk.start < num_tokens:
                    raise MissingRowsError(
                        f"tokens {chunk.start} to {chunk.end} are not in the pool"
                    )
            opened = self._open(kind, num_tokens, chunks, must_be_there=must_be_there)
            self._kind = kind
            self._chunks += opened
            self._learn(chunks)

    def rewind(self, num_tokens: int) -> None:
        """Forgets rows from `num_tokens` on: they will come again, for the same tokens.

        For a request that was preempted. Chunks that are whole stay in the pool.

        Raises:
            ValueError: more than there are, or before the first.
        """
        if not self._start <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"cannot rewind to {num_tokens} tokens: there are {self.num_tokens}, from token "
                f"{self._start} on"
            )
        with self._store._guard():
            self._check_usable()
            # A chunk that is everybody's by now is not written again.
            own = [chunk for chunk in self._chunks if chunk.slots and chunk.end > num_tokens]
            self._before += [t for chunk in own for t in chunk.tickets if not t.ended]
            self.num_tokens = num_tokens

    # --- the end --------------------------------------------------------------------------

    def finish(self) -> Lease:
        """All rows that were taken, held. The writer takes no more.

        Raises:
            HiddenCacheError: ended already, or the store is closed or was reset; then it is
                abandoned.
        """
        with self._store._guard():
            try:
                self._check_usable()
            except HiddenCacheError:
                self._abandon()
                raise
            self._ended = True
            taken = [chunk for chunk in self._chunks if chunk.start < self.num_tokens]
            let_go(self._store._index, self._chunks[len(taken) :])
            return Lease(
                self._store,
                taken,
                num_tokens=self.num_tokens - self._start,
                layer_idxs=self.layer_idxs,
                tickets=[ticket for ticket in self._in_flight if not ticket.done],
                tokens_from_pool=self.tokens_from_pool,
                new_chunks=self.new_chunks,
                hidden=0 if self._kind is None else self._kind.rows.hidden,
                dtype=torch.float32 if self._kind is None else self._kind.dtype,
            )

    def abandon(self) -> None:
        """Gives up: chunks that are whole stay in the pool, the rest goes. Idempotent."""
        with self._store._guard():
            self._abandon()

    @property
    def source_free(self) -> bool:
        """Whether nothing that was taken is still read from where it was."""
        return all(ticket.ended for ticket in self._in_flight)

    @property
    def num_known(self) -> int:
        """Chunks that were given so far."""
        return len(self._known)

    @property
    def tokens_from_pool(self) -> int:
        """Rows that were not copied, because their chunk was there already."""
        return sum(
            min(chunk.end, self.num_tokens) - chunk.start
            for chunk in self._chunks
            if chunk.shared and chunk.start < self.num_tokens
        )

    # --- inside, under the store's lock ---------------------------------------------------

    def _append(
        self, source: Source, stop: int, chunks: Sequence[Chunk], *, fit: bool = False
    ) -> _native.Ticket | None:
        """Takes rows up to token `stop`; with `fit` whole chunks from the front as far as there is
        room."""
        with self._store._guard():
            kind = self._kind_of(source.tensor)
            if stop < self.num_tokens:
                raise ValueError(
                    f"rows up to token {stop} are given, {self.num_tokens} are there: rewind first"
                )
            self._before = [ticket for ticket in self._before if not ticket.ended]
            if self._before:
                raise QueueFullError(
                    "rows from before the rewind are still on their way: wait for `source_free`"
                )
            opened = self._open(kind, stop, chunks, fit=fit)
            try:
                every = self._chunks + opened
                if fit:
                    stop = min(stop, every[-1].end) if every else self.num_tokens
                first = bisect_right(every, self.num_tokens, key=lambda chunk: chunk.end)
                touched = every[first:]
                pieces = self._pieces(source, touched, stop)
                ticket = self._store._memory.put(source, kind.rows, pieces) if pieces else None
            except BaseException:
                let_go(self._store._index, opened)
                raise
            self._kind = kind
            self._chunks = every
            self._learn(chunks)
            self._note(first, stop, ticket)
            return ticket

    def _kind_of(self, like: torch.Tensor) -> _Kind:
        """What the rows are; refuses those that cannot be of this request."""
        store = self._store
        self._check_usable()
        store._tend()
        rows = store._format_of(like)
        if self._kind is not None and (rows, like.dtype) != (self._kind.rows, self._kind.dtype):
            raise ValueError(
                f"rows are {like.size(-1)} x {like.dtype}, those before were "
                f"{self._kind.rows.hidden} x {self._kind.dtype}: a request's rows are of one kind"
            )
        store._memory.engine(like.device)
        if self._kind is not None:
            return self._kind
        form = store._index.format(rows, store._memory.pool(rows))
        return _Kind(rows, like.dtype, form)

    def _check_usable(self) -> None:
        self._store._check_open()
        if self._ended:
            raise HiddenCacheError(
                f"the writer of request {self.request_id!r} has ended: take a new one"
            )
        if self._epoch != self._store.weights_epoch:
            raise HiddenCacheError(
                f"the store was reset since request {self.request_id!r} began: its rows may come "
                "of two sets of weights; abandon the writer"
            )

    def _open(
        self,
        kind: _Kind,
        stop: int,
        chunks: Sequence[Chunk],
        *,
        fit: bool = False,
        must_be_there: bool = False,
    ) -> list[_Chunk]:
        """Finds or makes a place for all chunks up to token `stop`; gives those that are new."""
        index = self._store._index
        self._check_follow(chunks, stop)
        position = self._chunks[-1].end if self._chunks else self._start
        if position >= stop:
            return []
        # Some may be opened already that were not known then.
        late = max(0, len(self._chunks) - len(self._known))
        known = [*self._known[len(self._chunks) :], *chunks[late:]]
        opened: list[_Chunk] = []
        while position < stop:
            given = known[len(opened)] if len(opened) < len(known) else None
            end = position + self._store.chunk_size if given is None else given.end
            key = None if given is None else given.key
            opened.append(_Chunk(form=kind.form, start=position, end=end, key=key))
            position = end
        # If its predecessor made room for it nobody could ever reach it.
        held = [number for number in index.find([self._parent_key]) if index.present(number)]
        for number in held:
            index.pin(number)
        try:
            for chunk, number in zip(opened, index.find(c.key for c in opened), strict=True):
                if number != NONE and index.present(number):
                    index.pin(number)
                    chunk.number = number
            lacking = [index.missing(chunk.number, self.layer_idxs) for chunk in opened]
            for chunk, names in zip(opened, lacking, strict=True):
                chunk.shared = not names
                if names and must_be_there:
                    raise MissingRowsError(
                        f"layers {names} of tokens {chunk.start} to {chunk.end} are not in the pool"
                    )
            if not fit:
                self._check_formats(kind, opened, lacking)
                # Before others make room for what cannot fit.
                self._check_fits(kind, sum(map(len, lacking)))
            for layer in self.layer_idxs:
                wanting = [
                    chunk for chunk, names in zip(opened, lacking, strict=True) if layer in names
                ]
                slots = self._allocate(kind, len(wanting), len(opened), fit=fit)
                for chunk, slot in zip(wanting, slots, strict=False):
                    chunk.slots[layer] = slot
        except BaseException:
            let_go(self._store._index, opened)
            raise
        finally:
            index.unpin(held)
        room = 0
        while room < len(opened) and len(opened[room].slots) == len(lacking[room]):
            room += 1
        let_go(self._store._index, opened[room:])
        return opened[:room]

    def _allocate(self, kind: _Kind, count: int, more: int, *, fit: bool) -> list[int]:
        """Slots for one layer; all, or with `fit` what there is."""
        index = self._store._index
        pool = self._store._memory.pool(kind.rows)
        slots = index.allocate(kind.form, min(count, pool.num_slots) if fit else count)
        if slots is not None:
            return slots
        if fit:
            return index.allocate(kind.form, min(count, pool.num_free)) or []
        self._check_fits(kind, (len(self._chunks) + more) * len(self.layer_idxs))
        raise PoolFullError(
            f"{count} slots are needed for a layer, {pool.num_free} of {pool.num_slots} are free "
            "and the rest is in use: wait, or set hscache_pool_bytes higher",
            can_wait=True,
        )

    def _check_fits(self, kind: _Kind, count: int) -> None:
        """Refuses what takes more slots than there are."""
        pool = self._store._memory.pool(kind.rows)
        if count > pool.num_slots:
            raise PoolFullError(
                f"the request takes {count} slots of {pool.slot_bytes} bytes, the whole pool has "
                f"{pool.num_slots}: set hscache_pool_bytes to {count * pool.slot_bytes} or more",
                can_wait=False,
            )

    def _check_follow(self, chunks: Sequence[Chunk], stop: int) -> None:
        """Refuses chunks that do not go on from those that were given before, and rows up to
        `stop` that no chunk can have."""
        size = self._store.chunk_size
        last = self._known[-1] if self._known else None
        keys: set[Hashable] = set()
        for chunk in chunks:
            start = self._start if last is None else last.end
            if chunk.start != start or not start < chunk.end <= start + size:
                raise ValueError(
                    f"{chunk} is given, must be tokens {start} to {start + size}: chunks are of "
                    f"{size} tokens, each behind the one before, but for a last one"
                )
            if last is not None and last.end - last.start < size:
                raise ValueError(f"{chunk} stands behind {last}: a short one must come last")
            if last is not None and last.key is None and chunk.key is not None:
                raise ValueError(
                    f"{chunk} stands behind {last}: those without a key must come last"
                )
            if chunk.key is not None:
                if chunk.key in keys or chunk.key in self._keys:
                    raise ValueError(f"{chunk} has a key twice: a key names one whole prefix")
                keys.add(chunk.key)
            last = chunk
        if last is not None and last.end - last.start < size and stop > last.end:
            raise ValueError(
                f"rows up to token {stop} are given, beyond {last}: a short one must come last; "
                "give it when all rows are there"
            )

    def _learn(self, chunks: Sequence[Chunk]) -> None:
        """Takes in chunks that were checked; those opened before their key was known get it."""
        for chunk in chunks:
            if len(self._known) < len(self._chunks):
                opened = self._chunks[len(self._known)]
                opened.end, opened.key = chunk.end, chunk.key
            self._known.append(chunk)
            if chunk.key is not None:
                self._keys.add(chunk.key)

    def _check_formats(
        self, kind: _Kind, opened: Sequence[_Chunk], lacking: Sequence[Sequence[int]]
    ) -> None:
        """Refuses rows that those which are there already could not stand for."""
        for chunk, names in zip(opened, lacking, strict=True):
            for layer in self.layer_idxs:
                if layer in names:
                    continue
                ((rows, _),) = self._store._index.runs([chunk.number], layer)
                if rows.hidden != kind.rows.hidden or not rows.converts(kind.dtype):
                    raise ValueError(
                        f"rows are {kind.rows.hidden} x {kind.dtype}, but layer {layer} of tokens "
                        f"{chunk.start} to {chunk.end} is there as {rows}: use another namespace, "
                        "or another layer number"
                    )

    def _pieces(self, source: Source, chunks: Sequence[_Chunk], stop: int) -> list[_native.Piece]:
        """The rows from `num_tokens` to `stop` that are not there yet, layer by layer."""
        pieces = []
        for place, layer in enumerate(self.layer_idxs):
            for chunk in chunks:
                start = max(chunk.start, self.num_tokens)
                length = min(chunk.end, stop) - start
                if layer in chunk.slots and length > 0:
                    in_slot = start - chunk.start
                    pieces.append(
                        (place, start - source.first_token, length, chunk.slots[layer], in_slot)
                    )
        return pieces

    def _note(self, first: int, stop: int, ticket: _native.Ticket | None) -> None:
        """Rows up to `stop` are taken: chunks that are whole now are everybody's."""
        counts = self._store._counts
        if ticket is not None:
            self._in_flight = [t for t in self._in_flight if not t.done] + [ticket]
        for place in range(first, len(self._chunks)):
            chunk = self._chunks[place]
            count = min(chunk.end, stop) - max(chunk.start, self.num_tokens)
            if count <= 0:
                break
            if not chunk.slots:
                counts.tokens_deduplicated += count
                continue
            assert ticket is not None
            assert self._kind is not None
            counts.tokens_gathered += count
            counts.bytes_stored += count * len(chunk.slots) * self._kind.rows.row_bytes
            chunk.tickets = [t for t in chunk.tickets if not t.done] + [ticket]
            if chunk.key is not None and chunk.end <= stop:
                self._commit(chunk, self._chunks[place - 1].key if place else self._parent_key)
        self.num_tokens = stop

    def _commit(self, chunk: _Chunk, parent_key: Hashable | None) -> None:
        """Makes a chunk everybody's whose rows are all on their way."""
        assert chunk.key is not None
        index = self._store._index
        (number,) = index.find([chunk.key])
        present = number != NONE and index.present(number)
        if chunk.number != NONE and not (present and number == chunk.number):
            return  # what it shares was dropped meanwhile: it stays this request's own
        lacking = index.missing(number, list(chunk.slots))
        # Others were faster with these.
        surplus = [layer for layer in chunk.slots if layer not in lacking]
        if not all(self._serves(number, layer) for layer in surplus):
            return  # but may fail yet, or brought rows of another kind
        if not present:
            number = index.add(chunk.key, parent_key)
        if chunk.number == NONE:
            index.pin(number)
            chunk.number = number
        if lacking:
            self.new_chunks += 1
            index.fill(
                number,
                chunk.form,
                [(layer, chunk.slots[layer]) for layer in lacking],
                chunk.tickets,
            )
        if surplus:
            index.retire(chunk.form, [chunk.slots[layer] for layer in surplus], chunk.tickets)
        chunk.slots = {}

    def _serves(self, number: int, layer: int) -> bool:
        """Whether a layer that somebody else brought is whole and can stand for this one."""
        assert self._kind is not None
        index = self._store._index
        if not index.holds(number, layer):
            return False
        ((rows, _),) = index.runs([number], layer)
        return rows.hidden == self._kind.rows.hidden and rows.converts(self._kind.dtype)

    def _abandon(self) -> None:
        if not self._ended:
            self._ended = True
            let_go(self._store._index, self._chunks)
