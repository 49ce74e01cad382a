"""`Lease`: one request's rows in the pool, for as long as somebody reads them."""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from hidden_cache import _native
from hidden_cache.errors import HiddenCacheError, TransferError
from hidden_cache.formats import RowFormat
from hidden_cache.index import Entry

if TYPE_CHECKING:
    from hidden_cache.store import HiddenStateStore


class Lease:
    """A request's rows in the pool, held until released: `[num_tokens, layers, hidden]`.

    Some may have been there before, some may still be on their way. Thread-safe, except that
    `release` must not run beside a `read`.

    Attributes:
        num_tokens: rows `0..num_tokens` of the request.
        layer_idxs: the layers, in the order in which `read` gives them.
        tokens_from_pool: tokens that were not gathered, because their chunk was there already.
        new_chunks: chunks that were brought, or some layer of them.
        dtype, hidden: what a row is, as it was given; the pool may keep it as something else.
        ticket: the transfer of what was not there; None when all was.
    """

    def __init__(
        self,
        store: HiddenStateStore,
        *,
        num_tokens: int,
        layer_idxs: tuple[int, ...],
        entries: list[Entry],
        private: list[list[int]],
        ticket: _native.Ticket | None,
        tokens_from_pool: int,
        new_chunks: int,
        rows: RowFormat,
        dtype: torch.dtype,
    ) -> None:
        self._store = store
        self._entries = entries
        self._private = private  # slots by layer of each chunk without a key, behind the entries
        self._rows = rows  # of the chunks that were brought
        self._released = False
        self.ticket = ticket
        self.num_tokens = num_tokens
        self.layer_idxs = layer_idxs
        self.tokens_from_pool = tokens_from_pool
        self.new_chunks = new_chunks
        self.dtype = dtype
        self.hidden = rows.hidden

    @property
    def source_free(self) -> bool:
        """Whether the paged memory is not read any more: its blocks may be reused."""
        return self.ticket is None or self.ticket.ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all rows are in the pool; by default until they are or a transfer fails.

        Returns:
            Whether they are; False only where `timeout_s` seconds have passed first.

        Raises:
            TransferError: a transfer that brings some of them failed.
            HiddenCacheError: released, or called in a forked child, where none would end.
        """
        with self._store._guard():
            tickets = self._tickets()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for ticket in tickets:
            if not ticket.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return False
            if ticket.error is not None:
                raise TransferError(ticket.error)
        return True

    def _tickets(self) -> list[_native.Ticket]:
        if self._released:
            raise HiddenCacheError("the lease was released: read before release()")
        tickets = [] if self.ticket is None else [self.ticket]
        for entry in self._entries:
            for layer in self.layer_idxs:
                ticket = entry.layers[layer].ticket
                if ticket is not None and ticket not in tickets:
                    tickets.append(ticket)
        return tickets

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
            tickets = self._tickets()
        if not all(ticket.done for ticket in tickets):
            raise TransferError("the rows are not in the pool: wait() for them before reading")
        row_bytes = self.hidden * self.dtype.itemsize
        chunk_size = self._store.chunk_size
        for place, layer in enumerate(self.layer_idxs):
            chunks = [
                (entry.layers[layer].format, entry.layers[layer].slot) for entry in self._entries
            ]
            chunks += [(self._rows, slots[place]) for slots in self._private]
            first = 0
            # Chunks that are kept in the same way are read in one go.
            for rows, group in groupby(chunks, key=lambda chunk: chunk[0]):
                slots = [slot for _, slot in group]
                end = first + len(slots) * chunk_size
                begin, stop = max(start, first), min(start + len(out), end)
                if begin < stop:
                    wanted, stored = rows.elements(self.dtype)
                    self._store._storage.pool(rows).read_rows(
                        slots,
                        rows.row_bytes,
                        begin - first,
                        stop - begin,
                        out[begin - start].data_ptr() + place * row_bytes,
                        len(self.layer_idxs) * row_bytes,
                        stored,
                        wanted,
                    )
                first = end

    def release(self) -> None:
        """Gives up the hold; chunks with keys stay in the pool, the rest goes. Idempotent.

        Waits for transfers into chunks that go.
        """
        with self._store._guard():
            if self._released:
                return
            self._released = True
        if self._private and self.ticket is not None:
            self.ticket.wait()
        slots = [slot for chunk in self._private for slot in chunk]
        self._store._release_lease(self._entries, self._rows, slots)
