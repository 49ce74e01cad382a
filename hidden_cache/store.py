"""`HiddenStateStore`: chunks of hidden states in a bounded host pool, found by key."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hidden_cache import _native, numa
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import (
    ConfigError,
    HiddenCacheError,
    PoolFullError,
    QueueFullError,
)
from hidden_cache.index import ChunkIndex, Entry, LayerRows
from hidden_cache.keys import DEFAULT_CHUNK_SIZE, Chunk, TokenChunker
from hidden_cache.lease import Lease, RowFormat

logger = logging.getLogger(__name__)


class Chunker(Protocol):
    """What cuts token ids into keyed chunks, such as `TokenChunker`."""

    @property
    def chunk_size(self) -> int: ...

    def chunks(self, token_ids: Iterable[int], /) -> list[Chunk]: ...


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a store. Slots hold one layer of one chunk each.

    A refusal says why something was not had that was asked for, or not all of it; it is empty
    where it was. `fragmentation` is the share of the free slots outside of the largest run of
    neighbours. `pinned_bytes` of the pool a GPU copies to without a detour, more while `pinning`.
    `touched_bytes` were backed in the background, which goes on while `touching`. `huge_pages` is
    what was had.
    """

    num_chunks: int
    num_slots: int
    free_slots: int
    slot_bytes: int
    pool_bytes: int
    largest_free_run: int
    fragmentation: float
    tokens_gathered: int
    tokens_deduplicated: int
    evicted_chunks: int
    pending_transfers: int
    pinned_bytes: int
    pinning: bool
    pin_refusal: str
    touched_bytes: int
    touching: bool
    touch_refusal: str
    huge_pages: str
    huge_pages_refusal: str
    numa_node: int | None
    numa_refusal: str


class HiddenStateStore:
    """Keeps hidden states by chunk key in a host pool of fixed size.

    A request's rows go in by `store_paged` or `lease_paged` and come out by `retrieve_layers`, or
    through the lease. Chunks that are there already are not copied again. When the pool is full
    the least recently used leaves go. Thread-safe; the GIL is released around copies and waits.
    """

    def __init__(self, config: HiddenCacheConfig, token_database: Chunker | None = None) -> None:
        """
        Args:
            config: an enabled configuration.
            token_database: cuts token ids into keyed chunks; `TokenChunker` by default.

        Raises:
            ConfigError: disabled, or a chunk size that is not the token database's.
            ValueError: a pool larger than the machine's memory.
        """
        if not config.enabled:
            raise ConfigError(
                "the store is disabled (hscache_enabled is false): enable it, or use "
                "hidden_cache.open_store, which answers None"
            )
        self.config = config
        self.chunk_size = config.chunk_size or (
            token_database.chunk_size if token_database is not None else DEFAULT_CHUNK_SIZE
        )
        self._chunker = token_database or TokenChunker(self.chunk_size)
        if self._chunker.chunk_size != self.chunk_size:
            raise ConfigError(
                f"hscache_chunk_size is {self.chunk_size}, but the token database cuts chunks of "
                f"{self._chunker.chunk_size} tokens: leave the setting out, or make them equal"
            )
        self._arena = _native.Arena(config.pool_bytes, huge_pages=config.huge_pages)
        if refusal := self._arena.stats().huge_pages_refusal:
            logger.warning("the pool has plain pages: %s", refusal)
        self._lock = threading.Lock()
        self._index = ChunkIndex()
        # Made by the first store, which says what rows are and where they come from.
        self._pool: _native.SlotPool | None = None
        self._rows: RowFormat | None = None
        self._engine: _native.TransferEngine | None = None
        self._end_engine: Callable[[], object] | None = None
        self._registration: _native.Registration | None = None
        self._numa_refusal = ""
        # Source tensors by the transfer that reads them: their memory must outlive it.
        self._sources: list[tuple[_native.Ticket, torch.Tensor]] = []
        self._tokens_gathered = 0
        self._tokens_deduplicated = 0
        self._evicted_chunks = 0
        self._closed = False
        self._owner_pid = os.getpid()

    def prepare(self, paged: torch.Tensor) -> None:
        """Makes ready for rows of this cache: pool, engine, pinning. The first store would
        otherwise, which takes longer then.

        Args:
            paged: `[num_blocks, layers, block_size, hidden]`, any strides before the last.

        Raises:
            ValueError: a cache that rows cannot be taken from, or not as those before.
            PoolFullError: not one chunk fits the pool.
        """
        _, rows, _ = self._check_paged(paged, range(paged.size(1)) if paged.dim() > 1 else ())
        with self._guard(), contextlib.ExitStack() as undo:
            self._check_open()
            self._pool_for(rows, undo)
            undo.pop_all()

    # --- in -------------------------------------------------------------------------------

    def store_paged(
        self,
        chunks_or_token_ids: Sequence[Chunk] | Sequence[int],
        paged: torch.Tensor,
        block_ids: Sequence[int],
        *,
        layer_idxs: Sequence[int],
        token_offset: int = 0,
        stream: int | None = None,
    ) -> _native.Ticket | None:
        """Stores a request's whole chunks out of a paged cache, in the background.

        Args:
            chunks_or_token_ids: the full prefix, as token ids or as ordered chunks.
            paged: `[num_blocks, layers, block_size, hidden]`, any strides before the last.
            block_ids: the request's block table, from its first token on.
            layer_idxs: what `paged`'s layers are called, one for each.
            token_offset: chunks that start before it are left out.
            stream: raw handle of the stream that writes the rows; None for host memory.

        Returns:
            The ticket of the transfer, or None when there was nothing to copy. The rows must stay
            untouched until it has ended.

        Raises:
            ValueError, IndexError: arguments that do not fit each other.
            PoolFullError: no room for all of it; nothing is stored.
        """
        chunks = self._to_chunks(chunks_or_token_ids)
        self._check_chunks(chunks)
        chunks = [chunk for chunk in chunks if chunk.key is not None]
        before = [chunk for chunk in chunks if chunk.start < token_offset]
        parent_key = before[-1].key if before else None
        while True:
            try:
                lease = self._lease(
                    chunks[len(before) :], paged, block_ids, layer_idxs, stream, parent_key
                )
            except QueueFullError:
                self._wait_for_one()
                continue
            lease.release()
            return lease.ticket

    def lease_paged(
        self,
        chunks: Sequence[Chunk],
        paged: torch.Tensor,
        block_ids: Sequence[int],
        *,
        layer_idxs: Sequence[int],
        stream: int | None = None,
    ) -> Lease:
        """Brings a request's rows into the pool and holds them there; only enqueues, never waits.

        Arguments and errors are `store_paged`'s, and QueueFullError where that one waits. `chunks`
        may end with some without a key, the last of them short: these live as long as the lease.
        """
        self._check_chunks(chunks)
        return self._lease(chunks, paged, block_ids, layer_idxs, stream, None)

    def _lease(
        self,
        chunks: Sequence[Chunk],
        paged: torch.Tensor,
        block_ids: Sequence[int],
        layer_idxs: Sequence[int],
        stream: int | None,
        parent_key: bytes | None,
    ) -> Lease:
        view, rows, layers = self._check_paged(paged, layer_idxs)
        # What fails half-way is taken back step by step: nothing of it stays.
        with self._guard(), contextlib.ExitStack() as undo:
            self._check_open()
            self._forget_ended()
            pool = self._pool_for(rows, undo)
            entries = self._pin(chunks, parent_key, undo)
            present = sum(len(entry.layers) for entry in entries)
            missing = sum(layer not in entry.layers for entry in entries for layer in layers)
            keyless = (len(chunks) - len(entries)) * len(layers)
            slots = self._allocate(missing + keyless, present, pool)
            undo.callback(pool.free, slots)

            unused, keyed = iter(slots), iter(entries)
            pieces: list[_native.Piece] = []
            added: list[LayerRows] = []
            private: list[list[int]] = []
            gathered = 0
            for chunk in chunks:
                entry = next(keyed) if chunk.key is not None else None
                length = chunk.end - chunk.start
                places = [
                    (place, next(unused))
                    for place, layer in enumerate(layers)
                    if entry is None or layer not in entry.layers
                ]
                pieces += [(place, chunk.start, length, slot, 0) for place, slot in places]
                gathered += length if places else 0
                if entry is None:
                    private.append([slot for _, slot in places])
                    continue
                for place, slot in places:
                    added.append(LayerRows(slot, None))
                    entry.layers[layers[place]] = added[-1]
                    undo.callback(entry.layers.pop, layers[place])
            ticket = self._submit(view, block_ids, pieces, pool, stream) if pieces else None
            if ticket is not None:
                self._sources.append((ticket, paged))
                for layer_rows in added:
                    layer_rows.ticket = ticket
            undo.pop_all()
            num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
            self._tokens_gathered += gathered
            self._tokens_deduplicated += num_tokens - gathered
        return Lease(
            self, num_tokens, layers, entries, private, ticket, num_tokens - gathered, rows
        )

    def _pin(
        self, chunks: Sequence[Chunk], parent_key: bytes | None, undo: contextlib.ExitStack
    ) -> list[Entry]:
        """The entries of the chunks that have keys, found or made, pinned and just used."""
        entries = []
        for chunk in chunks:
            if chunk.key is None:
                continue
            entry = self._settled(chunk.key)
            if entry is None:
                entry = self._index.add(chunk.key, parent_key)
                undo.callback(self._index.remove, entry)
            parent_key = chunk.key
            self._index.touch(entry)
            entry.pins += 1
            undo.callback(_unpin, entry)
            entries.append(entry)
        return entries

    def _submit(
        self,
        view: _native.PagedView,
        block_ids: Sequence[int],
        pieces: Sequence[_native.Piece],
        pool: _native.SlotPool,
        stream: int | None,
    ) -> _native.Ticket:
        assert self._engine is not None, "made with the pool"
        ticket = self._engine.gather(view, list(block_ids), pieces, pool, stream or 0, False)
        if ticket is None:
            raise QueueFullError(
                f"{self._engine.pending} transfers are pending, the limit: wait for some, or set "
                "hscache_max_pending higher"
            )
        return ticket

    # --- out ------------------------------------------------------------------------------

    def coverage(
        self, chunks_or_token_ids: Sequence[Chunk] | Sequence[int], layer_idxs: Sequence[int] = (0,)
    ) -> int:
        """Tokens of the prefix that all asked layers can supply now."""
        with self._guard():
            entries = self._committed_prefix(self._to_chunks(chunks_or_token_ids), layer_idxs)
        return len(entries) * self.chunk_size

    def retrieve_layers(
        self,
        chunks_or_token_ids: Sequence[Chunk] | Sequence[int],
        layer_idxs: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
    ) -> dict[int, torch.Tensor] | None:
        """The longest stored prefix that has all asked layers, as `{layer: [n, hidden]}`.

        Args:
            chunks_or_token_ids: the full prefix, as token ids or as ordered chunks.
            layer_idxs: layers, each as named when stored.
            dtype: of the result; as stored by default.

        Returns:
            CPU tensors of `n` rows each, or None when not even the first chunk is there.
        """
        chunks = self._to_chunks(chunks_or_token_ids)
        with self._guard():
            self._check_open()
            entries = self._committed_prefix(chunks, layer_idxs)
            if not entries:
                return None
            for entry in entries:
                entry.pins += 1
                self._index.touch(entry)
            pool, rows = self._pool, self._rows
            assert pool is not None
            assert rows is not None
        try:
            length = len(entries) * self.chunk_size
            found = {}
            for layer in layer_idxs:
                out = torch.empty((length, rows.hidden), dtype=rows.dtype)
                slots = [entry.layers[layer].slot for entry in entries]
                pool.read_rows(slots, rows.row_bytes, 0, length, out.data_ptr(), rows.row_bytes)
                found[layer] = out if dtype is None else out.to(dtype)
            return found
        finally:
            self._release(entries, [])

    # --- one chunk, all chunks ------------------------------------------------------------

    def has_chunk(self, key: bytes, layer_idx: int = 0) -> bool:
        """Whether a committed chunk of this layer is there, whatever became of its predecessors."""
        with self._guard():
            entry = self._settled(key)
            return entry is not None and _committed(entry, (layer_idx,))

    def drop_key(self, key: bytes) -> bool:
        """Drops a chunk with all its layers; returns whether it was there.

        A chunk that is in use or still being filled stays, and False is returned.
        """
        with self._guard():
            entry = self._settled(key)
            if entry is None or entry.busy:
                return False
            self._index.remove(entry)
            self._free(entry)
            return True

    def num_cached_chunks(self) -> int:
        """Chunks in the pool, those being filled included."""
        with self._guard():
            return len(self._index)

    def stats(self) -> StoreStats:
        """A snapshot."""
        with self._guard():
            pool, arena = self._pool, self._arena.stats()
            slots = pool.stats() if pool else None
            return StoreStats(
                num_chunks=len(self._index),
                num_slots=slots.slots if slots else 0,
                free_slots=slots.free if slots else 0,
                slot_bytes=pool.slot_bytes if pool else 0,
                pool_bytes=arena.bytes,
                largest_free_run=slots.largest_free_run if slots else 0,
                fragmentation=slots.fragmentation if slots else 0.0,
                tokens_gathered=self._tokens_gathered,
                tokens_deduplicated=self._tokens_deduplicated,
                evicted_chunks=self._evicted_chunks,
                pending_transfers=self._engine.pending if self._engine else 0,
                pinned_bytes=self._registration.bytes if self._registration else 0,
                pinning=self._registration is not None and self._registration.at_work,
                pin_refusal=self._registration.refusal if self._registration else "",
                touched_bytes=arena.touched_bytes,
                touching=arena.touching,
                touch_refusal=arena.touch_refusal,
                huge_pages=arena.huge_pages,
                huge_pages_refusal=arena.huge_pages_refusal,
                numa_node=arena.numa_node,
                numa_refusal=self._numa_refusal,
            )

    def close(self) -> None:
        """Refuses what comes, ends what is in flight and stops the thread. Idempotent.

        Transfers not started fail; leases already filled can still be read, and the pool's memory
        goes with the last of them and of the store's own references.
        """
        global _opened
        with _opened_lock:
            if _opened is self:
                _opened = None
        with self._guard():
            self._closed = True
        if self._engine is not None:
            self._engine.close()
        with self._guard():
            self._sources.clear()

    # --- inside ---------------------------------------------------------------------------

    def _guard(self) -> threading.Lock:
        """The lock, in the process that has the right to it: in a forked child it may be held by
        a thread that does not exist there."""
        if os.getpid() != self._owner_pid:
            raise HiddenCacheError(
                "the store belongs to the parent process: open a store after fork(), not before"
            )
        return self._lock

    def _check_open(self) -> None:
        if self._closed:
            raise HiddenCacheError("the store is closed: open a new one")

    def _to_chunks(self, chunks_or_token_ids: Sequence[Chunk] | Sequence[int]) -> list[Chunk]:
        given: Sequence[Any] = chunks_or_token_ids
        if len(given) > 0 and isinstance(given[0], Chunk):
            return list(given)
        return self._chunker.chunks(given)

    def _check_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Refuses chunks that are not whole, in a row from token 0 on, those with keys first."""
        keys = [chunk.key for chunk in chunks if chunk.key is not None]
        for place, chunk in enumerate(chunks):
            start, last = place * self.chunk_size, place == len(chunks) - 1
            tail = last and chunk.key is None and start < chunk.end <= start + self.chunk_size
            whole = chunk.end == start + self.chunk_size
            if chunk.start != start or not (whole or tail):
                raise ValueError(
                    f"chunk {place} is {chunk}, must be tokens {start} to "
                    f"{start + self.chunk_size}: chunks are of {self.chunk_size} tokens from token "
                    "0 on, but for a last one without a key"
                )
            if (chunk.key is not None) != (place < len(keys)):
                raise ValueError(f"chunk {place} is {chunk}: those without a key must come last")
        if len(set(keys)) != len(keys):
            raise ValueError(f"chunks {chunks} have a key twice: a key names one whole prefix")

    def _check_paged(
        self, paged: torch.Tensor, layer_idxs: Sequence[int]
    ) -> tuple[_native.PagedView, RowFormat, tuple[int, ...]]:
        if paged.device.type not in ("cpu", "cuda"):
            raise ValueError(f"paged is on {paged.device}, must be in host or CUDA memory")
        if paged.dim() != 4 or paged.size(3) < 1 or (paged.stride(3) != 1 and paged.size(3) > 1):
            raise ValueError(
                f"paged has shape {list(paged.shape)} and strides {list(paged.stride())}, must be "
                "[num_blocks, layers, block_size, hidden] with hidden contiguous (stride 1)"
            )
        if len(set(layer_idxs)) != paged.size(1) or len(layer_idxs) != paged.size(1):
            raise ValueError(
                f"layer_idxs {list(layer_idxs)} must name paged's {paged.size(1)} layers, each once"
            )
        rows = RowFormat(paged.dtype, paged.size(3), paged.device)
        item = paged.element_size()
        view = _native.PagedView(
            paged.data_ptr(),
            (paged.size(0), paged.size(1), paged.size(2)),
            rows.row_bytes,
            (paged.stride(0) * item, paged.stride(1) * item, paged.stride(2) * item),
        )
        return view, rows, tuple(layer_idxs)

    def _pool_for(self, rows: RowFormat, undo: contextlib.ExitStack) -> _native.SlotPool:
        if self._pool is None:
            slot_bytes = self.chunk_size * rows.row_bytes
            if slot_bytes > self._arena.bytes:
                raise PoolFullError(
                    f"one layer of one chunk is {slot_bytes} bytes, the whole pool "
                    f"{self._arena.bytes}: set hscache_pool_bytes higher",
                    can_wait=False,
                )
            # Where the first store fails the next one may bring other rows.
            undo.callback(self._forget_pool)
            engine = self._engine = self._make_engine(rows.device)
            # Before what the transfers touch goes away, at the end of the store or of the process.
            self._end_engine = weakref.finalize(self, engine.close)
            self._pool = _native.SlotPool(self._arena, slot_bytes)
            self._rows = rows
            self._place_pages(rows.device)
            if rows.device.type == "cuda":
                self._registration = engine.register_arena(self._arena)
        if self._rows != rows:
            raise ValueError(
                f"rows are {rows}, but this store holds rows of {self._rows}: open another store"
            )
        return self._pool

    def _place_pages(self, device: torch.device) -> None:
        """Has the pool's memory backed, near the device that rows come from."""
        node, self._numa_refusal = numa.node_for(self.config.numa, device)
        if node is not None:
            self._arena.prefer_numa_node(node)
            self._numa_refusal = self._arena.stats().numa_refusal
        if self._numa_refusal:
            logger.info("the pool is on no NUMA node of its own: %s", self._numa_refusal)
        if self.config.touch_pages == "background":
            self._arena.touch_in_background(self.config.huge_pages_timeout_s)

    def _make_engine(self, device: torch.device) -> _native.TransferEngine:
        why = _native.why_no_cuda() if device.type == "cuda" else ""
        if why:
            raise ValueError(f"paged is on {device}, where no rows can be taken from: {why}")
        return _native.TransferEngine(
            max_pending=self.config.max_pending,
            staging_bytes=self.config.staging_bytes,
            cuda_device=device.index if device.type == "cuda" else None,
        )

    def _forget_pool(self) -> None:
        if self._end_engine is not None:
            self._end_engine()
        self._pool = self._rows = self._engine = self._registration = self._end_engine = None
        self._numa_refusal = ""

    def _pool_in_use(self) -> _native.SlotPool:
        assert self._pool is not None
        return self._pool

    def _settled(self, key: bytes) -> Entry | None:
        """The entry of a key, after what failed to arrive was taken out of it."""
        entry = self._index.get(key)
        if entry is None:
            return None
        failed = False
        for rows in entry.layers.values():
            if rows.ticket is not None and rows.ticket.done:
                rows.ticket = None
            failed |= rows.ticket is not None and rows.ticket.error is not None
        if failed and not entry.busy:
            self._index.remove(entry)
            self._free(entry)
            return None
        return entry

    def _wait_for_one(self) -> None:
        with self._guard():
            tickets = [ticket for ticket, _ in self._sources if not ticket.ended]
        if tickets:
            tickets[0].wait()

    def _committed_prefix(self, chunks: Sequence[Chunk], layer_idxs: Sequence[int]) -> list[Entry]:
        found: list[Entry] = []
        for chunk in chunks:
            entry = None if chunk.key is None else self._settled(chunk.key)
            if entry is None or not _committed(entry, layer_idxs):
                break
            found.append(entry)
        return found

    def _allocate(self, count: int, present: int, pool: _native.SlotPool) -> list[int]:
        """Slots for a store, evicting what is not busy; all or none.

        `present` slots hold the rest of the same request, and none of them makes room for it.
        """
        whole = count + present
        if whole > pool.num_slots:
            raise PoolFullError(
                f"the request takes {whole} slots of {pool.slot_bytes} bytes, the whole pool has "
                f"{pool.num_slots}: set hscache_pool_bytes to {whole * pool.slot_bytes} or more",
                can_wait=False,
            )
        while (slots := pool.allocate(count)) is None:
            victim = self._index.pop_victim()
            if victim is None:
                raise PoolFullError(
                    f"{count} slots are needed, {pool.num_free} of {pool.num_slots} are free and "
                    "the rest is in use: wait, or set hscache_pool_bytes higher",
                    can_wait=True,
                )
            self._evicted_chunks += 1
            self._free(victim)
        return slots

    def _free(self, entry: Entry) -> None:
        self._pool_in_use().free([rows.slot for rows in entry.layers.values()])
        entry.layers.clear()

    def _release(self, entries: list[Entry], slots: list[int]) -> None:
        with self._guard():
            for entry in entries:
                _unpin(entry)
            if slots:
                self._pool_in_use().free(slots)

    def _forget_ended(self) -> None:
        self._sources = [(ticket, paged) for ticket, paged in self._sources if not ticket.ended]


def _unpin(entry: Entry) -> None:
    entry.pins -= 1


def _committed(entry: Entry, layer_idxs: Sequence[int]) -> bool:
    return all(layer in entry.layers and entry.layers[layer].committed for layer in layer_idxs)


_opened: HiddenStateStore | None = None
_opened_lock = threading.Lock()


def open_store(config: HiddenCacheConfig) -> HiddenStateStore | None:
    """The process's one store: opened by the first call, returned by the next ones.

    Returns None, and allocates nothing, when the config is disabled.

    Raises:
        ConfigError: a store is open with another config. Close it first.
    """
    global _opened
    if not config.enabled:
        return None
    with _opened_lock:
        if _opened is not None and _opened._owner_pid == os.getpid():
            if _opened.config != config:
                raise ConfigError(
                    f"this process has a store with {_opened.config}, asked for is {config}: use "
                    "the same settings everywhere in a process, or close that store first"
                )
            return _opened
        _opened = HiddenStateStore(config)
        return _opened
