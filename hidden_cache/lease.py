"""`Lease`: one request's rows in the pool, for as long as somebody reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from hidden_cache import _native
from hidden_cache.errors import HiddenCacheError, TransferError
from hidden_cache.index import NONE, ChunkIndex
from hidden_cache.row_format import RowFormat

if TYPE_CHECKING:
    from hidden_cache.store import HiddenStateStore


@dataclass(slots=True)
class HeldChunk:
    """A chunk of a request as its holder has it.

    Attributes:
        number: of the chunk in the index, pinned; NONE where it has none.
        slots: by layer, those that are no chunk's in the index; the other layers are.
        form: what is in `slots`.
        tickets: the transfers that bring it and were not done when last looked at.
    """

    number: int = NONE
    form: int = NONE
    slots: dict[int, int] = field(default_factory=dict)
    tickets: list[_native.Ticket] = field(default_factory=list)


def let_go(index: ChunkIndex, chunks: Sequence[HeldChunk]) -> None:
    """Gives up holds: chunks of the index stay in the pool, slots of nobody else's go once nothing
    writes to them. Under the store's lock."""
    index.unpin([chunk.number for chunk in chunks if chunk.number != NONE])
    for chunk in chunks:
        if chunk.slots:
            index.retire(chunk.form, list(chunk.slots.values()), chunk.tickets)


class Lease:
    """A request's rows in the pool, held until released: `[num_tokens, layers, hidden]`.

    Some may have been there before, some may still be on their way. Thread-safe, except that
    `release` must not run beside a `read`.

    Attributes:
        num_tokens: how many rows.
        layer_idxs: the layers, in the order in which `read` gives them.
        tokens_from_pool: tokens that were not copied, because their chunk was there already.
        tickets: the transfers that were not done when the lease was made, of what was brought.
        new_chunks: chunks that were brought, or some layer of them.
        dtype, hidden: what a row is, as it was given; the pool may keep it as something else.
    """

    def __init__(
        self,
        store: HiddenStateStore,
        chunks: Sequence[HeldChunk],
        *,
        num_tokens: int,
        layer_idxs: tuple[int, ...],
        tickets: list[_native.Ticket],
        tokens_from_pool: int,
        new_chunks: int,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self._store = store
        self._chunks = chunks
        self.tickets = tickets
        self._released = False
        # By layer, once all rows are in the pool: slots in order, a list for each change of format.
        self._places: list[list[tuple[RowFormat, list[int]]]] | None = None
        self.num_tokens = num_tokens
        self.layer_idxs = layer_idxs
        self.tokens_from_pool = tokens_from_pool
        self.new_chunks = new_chunks
        self.dtype = dtype
        self.hidden = hidden

    @property
    def source_free(self) -> bool:
        """Whether the memory that the rows came from is not read any more, and may be reused."""
        return all(ticket.ended for ticket in self.tickets)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all rows are in the pool; by default until they are or a transfer fails.

        Returns:
            Whether they are; False only where `timeout_s` seconds have passed first.

        Raises:
            TransferError: a transfer that brings some of them failed.
            HiddenCacheError: released, or called in a forked child, where none would end.
        """
        with self._store._guard():
            tickets = self._pending()
        return _wait(tickets, timeout_s)

    def wait_own(self) -> None:
        """As `wait`, for those rows only that were brought for this request."""
        _wait(self.tickets, None)

    def _check_held(self) -> None:
        if self._released:
            raise HiddenCacheError("the lease was released: read before release()")

    def _pending(self) -> list[_native.Ticket]:
        """The transfers that are to be waited for, others' included."""
        self._check_held()
        index = self._store._index
        index.settle()
        shared = [chunk for chunk in self._chunks if chunk.number != NONE]
        numbers = [chunk.number for chunk in shared if not chunk.slots]
        found = [*self.tickets, *index.tickets(numbers, self.layer_idxs)]
        for chunk in shared:
            if chunk.slots:
                # What others bring of its own layers is none of its rows.
                theirs = [layer for layer in self.layer_idxs if layer not in chunk.slots]
                found += index.tickets([chunk.number], theirs)
        return found

    def read(self, start: int, out: torch.Tensor) -> None:
        """Copies rows `[start, start + len(out))`, all layers, into a CPU tensor.

        Args:
            start: first token.
            out: `[n, layers, hidden]`, contiguous, of the lease's dtype.

        Raises:
            ValueError: another shape, dtype or layout, rows that the lease does not have.
            TransferError: not all rows are in the pool; `wait` first.
            HiddenCacheError: released.
        """
        expected = (len(self.layer_idxs), self.hidden)
        if out.dim() != 3 or tuple(out.shape[1:]) != expected or out.dtype != self.dtype:
            raise ValueError(
                f"out is {list(out.shape)} of {out.dtype}, must be [n, {expected[0]}, "
                f"{expected[1]}] of {self.dtype}"
            )
        if not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError("out must be contiguous and on the CPU")
        if start < 0 or start + len(out) > self.num_tokens:
            raise ValueError(
                f"rows {start} to {start + len(out)} are asked for, the lease has {self.num_tokens}"
            )
        with self._store._guard():
            self._check_held()
            if self._places is None:
                if not all(ticket.done for ticket in self._pending()):
                    raise TransferError(
                        "the rows are not in the pool: wait() for them before reading"
                    )
                # They stay where they are: long requests are read in many parts.
                self._places = [list(self._runs(layer)) for layer in self.layer_idxs]
            places = self._places
        row_bytes = self.hidden * self.dtype.itemsize
        chunk_size = self._store.chunk_size
        for place, in_order in enumerate(places):
            first = 0
            # Chunks that are kept in the same way are read in one go.
            for rows, slots in in_order:
                end = first + len(slots) * chunk_size
                begin, stop = max(start, first), min(start + len(out), end)
                if begin < stop:
                    wanted, stored = rows.elements(self.dtype)
                    skipped = (begin - first) // chunk_size
                    self._store._memory.pool(rows).read_rows(
                        slots[skipped : -(-(stop - first) // chunk_size)],
                        rows.row_bytes,
                        begin - first - skipped * chunk_size,
                        stop - begin,
                        out[begin - start].data_ptr() + place * row_bytes,
                        len(self.layer_idxs) * row_bytes,
                        stored,
                        wanted,
                    )
                first = end

    def _runs(self, layer: int) -> Iterator[tuple[RowFormat, list[int]]]:
        """The slots of a layer, in order."""
        index = self._store._index
        for own, group in groupby(self._chunks, key=lambda chunk: layer in chunk.slots):
            chunks = list(group)
            if own:
                yield index.rows_of(chunks[0].form), [chunk.slots[layer] for chunk in chunks]
            else:
                yield from index.runs([chunk.number for chunk in chunks], layer)

    def release(self) -> None:
        """Gives up the hold; chunks with keys stay in the pool, the rest goes. Idempotent."""
        with self._store._guard():
            if self._released:
                return
            self._released = True
            let_go(self._store._index, self._chunks)


def _wait(tickets: Sequence[_native.Ticket], timeout_s: float | None) -> bool:
    """Whether all are done within that time; raises TransferError for the first that failed."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for ticket in tickets:
        if not ticket.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            return False
        if ticket.error is not None:
            raise TransferError(ticket.error)
    return True
