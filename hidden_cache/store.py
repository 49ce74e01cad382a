"""`HiddenStateStore`: chunks of hidden states in a bounded host pool, found by key."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch

from hidden_cache import _native
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import (
    ConfigError,
    HiddenCacheError,
    PoolFullError,
    QueueFullError,
    TransferError,
)
from hidden_cache.formats import RowFormat, format_for
from hidden_cache.index import ChunkIndex, Entry
from hidden_cache.keys import DEFAULT_CHUNK_SIZE, Chunk, Chunker, TokenChunker, chunker_for
from hidden_cache.lease import Lease
from hidden_cache.results import Results
from hidden_cache.storage import LayerRows, Source, Storage

logger = logging.getLogger(__name__)


class StorageManager(Protocol):
    """What knows whether a chunk's KV is there, such as LMCache's `StorageManager`."""

    def contains(self, key: Any, /) -> Any:
        """Where the KV is; None where it is not."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a store. Slots hold one layer of one chunk each.

    `num_slots`, `free_slots`, `slot_bytes`, `largest_free_run` and `fragmentation` (the share of
    the free slots outside of the largest run of neighbours) are those of the slots that were used
    first; rows of another size have slots of their own in the same memory. `used_bytes` is what all
    slots in use take.

    A refusal says why something was not had that was asked for, or not all of it; it is empty
    where it was. `pinned_bytes` of the pool a GPU copies to without a detour, more while `pinning`.
    `touched_bytes` were backed in the background, which goes on while `touching`. `huge_pages` is
    what was had.

    Tokens are counted for each layer that they were stored or asked for in. `tokens_found` are
    those that retrieves gave; a retrieve that ends before its last chunk counts as
    `misses_kv_gone` or as `misses_not_stored`. `partial_stores` found no room for all,
    `dropped_stores` were of layers that are not wanted.
    """

    num_chunks: int
    num_slots: int
    free_slots: int
    slot_bytes: int
    pool_bytes: int
    used_bytes: int
    largest_free_run: int
    fragmentation: float
    tokens_gathered: int
    tokens_deduplicated: int
    tokens_found: int
    misses_kv_gone: int
    misses_not_stored: int
    partial_stores: int
    dropped_stores: int
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


@dataclass(slots=True)
class _Counts:
    tokens_gathered: int = 0
    tokens_deduplicated: int = 0
    tokens_found: int = 0
    misses_kv_gone: int = 0
    misses_not_stored: int = 0
    partial_stores: int = 0
    dropped_stores: int = 0
    evicted_chunks: int = 0


class HiddenStateStore:
    """Keeps hidden states by chunk key in a host pool of fixed size.

    Rows go in by `store_hidden_states`, `store_paged` or `lease_paged` and come out by
    `retrieve_hidden_states` and `retrieve_layers`, or through the lease. Chunks that are there
    already are not copied again. When the pool is full the least recently used leaves go.

    With a bound storage manager a chunk whose KV is gone is dropped as soon as somebody asks for
    it.

    Thread-safe; the GIL is released around copies and waits.
    """

    def __init__(self, config: Any, token_database: Any = None) -> None:
        """
        Args:
            config: an enabled `HiddenCacheConfig`, or an `LMCacheEngineConfig`, which counts as the
                YAML under environment variables.
            token_database: cuts token ids into keyed chunks: anything with `chunks`, such as
                `TokenChunker` (the default), or LMCache's `TokenDatabase`.

        Raises:
            ConfigError: disabled, or a chunk size that is not the token database's.
            ValueError: a pool larger than the machine's memory.
        """
        if not isinstance(config, HiddenCacheConfig):
            config = HiddenCacheConfig.from_lmcache(config)
        if not config.enabled:
            raise ConfigError(
                "the store is disabled (hscache_enabled is false): enable it, or use "
                "hidden_cache.open_store, which answers None"
            )
        self.config = config
        chunker = None if token_database is None else chunker_for(token_database)
        self.chunk_size = config.chunk_size or (
            chunker.chunk_size if chunker is not None else DEFAULT_CHUNK_SIZE
        )
        self._chunker: Chunker = chunker or TokenChunker(self.chunk_size)
        if self._chunker.chunk_size != self.chunk_size:
            raise ConfigError(
                f"hscache_chunk_size is {self.chunk_size}, but the token database cuts chunks of "
                f"{self._chunker.chunk_size} tokens: leave the setting out, or make them equal"
            )
        self._storage = Storage(config, self.chunk_size)
        self._storage_manager: StorageManager | None = None
        self._results = Results(config.result_bytes)
        self._lock = threading.Lock()
        self._index = ChunkIndex()
        # Not in the index any more, but their slots are still in use.
        self._doomed: list[Entry] = []
        # What views held that are gone.
        self._dead_views: deque[list[Entry]] = deque()
        self._counts = _Counts()
        self._told_of_partial_store = False
        self._closed = False
        self._owner_pid = os.getpid()

    def bind_storage_manager(self, storage_manager: StorageManager) -> None:
        """From now on KV counts as present only where `storage_manager.contains(key)` says so."""
        self._storage_manager = storage_manager

    def prepare(self, paged: torch.Tensor) -> None:
        """Makes ready for rows of this cache: pool, engine, pinning. The first store would
        otherwise, which takes longer then.

        Args:
            paged: `[num_blocks, layers, block_size, hidden]`, any strides before the last.

        Raises:
            ValueError: a cache that rows cannot be taken from.
            PoolFullError: not one chunk fits the pool.
        """
        self._check_paged(paged, range(paged.size(1)) if paged.dim() > 1 else ())
        with self._guard():
            self._check_open()
            self._storage.pool(self._format_of(paged))
            self._storage.engine(paged.device)

    # --- in -------------------------------------------------------------------------------

    def store_hidden_states(
        self,
        token_ids: Sequence[int] | torch.Tensor,
        hidden_states: torch.Tensor,
        *,
        layer_idx: int = 0,
        token_offset: int = 0,
    ) -> int:
        """Stores one layer's rows, chunk by chunk; returns when they are copied.

        Args:
            token_ids: the full prefix, a list or 1-D tensor.
            hidden_states: `[len(token_ids) - token_offset, hidden]` on the CPU or a CUDA device:
                the rows of `token_ids[token_offset:]`.
            layer_idx: what the layer is called.
            token_offset: leading tokens without rows. A chunk that begins before it is left out.

        Returns:
            How many chunks were stored now: 0 when all were there, or when the layer is not among
            `hscache_layers`. Less than the prefix has where the pool has no room for more: what
            fits is stored from the front.

        Raises:
            ValueError: rows of another shape, an offset outside of the prefix.
            TransferError: the copy failed; nothing is stored.
        """
        if self.config.layers is not None and layer_idx not in self.config.layers:
            with self._guard():
                self._counts.dropped_stores += 1
            return 0
        if hidden_states.dim() != 2:
            raise ValueError(
                f"hidden_states has shape {list(hidden_states.shape)}, must be [tokens, hidden]"
            )
        if hidden_states.size(1) < 1:
            raise ValueError("hidden_states has rows of 0 elements: hidden must be 1 or more")
        num_tokens = len(token_ids)
        if not 0 <= token_offset <= num_tokens:
            raise ValueError(
                f"token_offset is {token_offset}, must be from 0 to the {num_tokens} token ids"
            )
        if len(hidden_states) != num_tokens - token_offset:
            raise ValueError(
                f"hidden_states has {len(hidden_states)} rows, must have one for each of the "
                f"{num_tokens - token_offset} token ids from token_offset {token_offset} on"
            )
        chunks = self._to_chunks(token_ids)
        self._check_chunks(chunks)
        before = [chunk for chunk in chunks if chunk.start < token_offset]
        chunks = chunks[len(before) :]
        if not chunks:
            return 0
        rows = hidden_states.detach()
        if rows.stride(1) != 1 and rows.size(1) > 1:
            rows = rows.contiguous()
        source = Source(rows[None, None], [0], token_offset, _stream_of(rows))
        parent_key = before[-1].key if before else None
        lease = self._lease_waiting(chunks, source, (layer_idx,), parent_key, fit=True)
        try:
            # Only for what is new: others may still fill what was there.
            if lease.ticket is not None:
                lease.ticket.wait()
                if lease.ticket.error is not None:
                    raise TransferError(lease.ticket.error)
        finally:
            lease.release()
        if lease.num_tokens < chunks[-1].end - chunks[0].start:
            self._tell_of_partial_store(lease.num_tokens, chunks, rows)
        return lease.new_chunks

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
            stream: raw handle of the stream that writes the rows; None for torch's current one.

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
        layers = self._check_paged(paged, layer_idxs)
        source = _paged_source(paged, block_ids, stream)
        lease = self._lease_waiting(chunks[len(before) :], source, layers, parent_key)
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
        layers = self._check_paged(paged, layer_idxs)
        return self._lease(chunks, _paged_source(paged, block_ids, stream), layers, None)

    def _lease_waiting(
        self,
        chunks: Sequence[Chunk],
        source: Source,
        layers: tuple[int, ...],
        parent_key: Hashable | None,
        *,
        fit: bool = False,
    ) -> Lease:
        """As `_lease`, and waits where the queue is full."""
        while True:
            try:
                return self._lease(chunks, source, layers, parent_key, fit=fit)
            except QueueFullError:
                self._wait_for_one()

    def _wait_for_one(self) -> None:
        with self._guard():
            tickets = self._storage.pending()
        if tickets:
            tickets[0].wait()

    def _lease(
        self,
        chunks: Sequence[Chunk],
        source: Source,
        layers: tuple[int, ...],
        parent_key: Hashable | None,
        *,
        fit: bool = False,
    ) -> Lease:
        """Holds chunks, and brings what is missing of them; with `fit` as many from the front as
        there is room for."""
        rows = self._format_of(source.tensor)
        # What fails half-way is taken back step by step: nothing of it stays.
        with self._guard(), contextlib.ExitStack() as undo:
            self._check_open()
            self._forget_ended()
            # Where the first store of a kind fails the next one may bring other rows.
            undo.callback(self._storage.back_to, self._storage.kinds())
            pool = self._storage.pool(rows)
            self._storage.engine(source.tensor.device)
            found = [self._pin(self._settled(chunk.key), undo) for chunk in chunks]
            if not fit:
                _check_formats(chunks, found, layers, source.tensor)
            missing = [
                [layer for layer in layers if entry is None or layer not in entry.layers]
                for entry in found
            ]
            needed = sum(len(names) for names in missing)
            slots = self._allocate(needed, found, pool, fit=fit)
            undo.callback(pool.free, slots)

            unused = iter(slots)
            places = {layer: place for place, layer in enumerate(layers)}
            entries: list[Entry] = []
            private: list[list[int]] = []
            pieces: list[_native.Piece] = []
            added: list[LayerRows] = []
            gathered = new_chunks = num_tokens = 0
            for chunk, entry, names in zip(chunks, found, missing, strict=True):
                own = [slot for _, slot in zip(names, unused, strict=False)]
                if len(own) < len(names):
                    break  # no room for this one
                length = chunk.end - chunk.start
                start = chunk.start - source.first_token
                pieces += [
                    (places[layer], start, length, slot, 0)
                    for layer, slot in zip(names, own, strict=True)
                ]
                num_tokens += length
                gathered += length if names else 0
                new_chunks += bool(names)
                if chunk.key is None:
                    private.append(own)
                    continue
                if entry is None:
                    entry = self._index.add(chunk.key, parent_key)
                    undo.callback(self._index.remove, entry)
                    self._pin(entry, undo)
                parent_key = chunk.key
                entries.append(entry)
                for layer, slot in zip(names, own, strict=True):
                    added.append(LayerRows(slot, rows, None))
                    entry.layers[layer] = added[-1]
                    undo.callback(entry.layers.pop, layer)
            ticket = self._storage.put(source, rows, pieces) if pieces else None
            if ticket is not None:
                undo.callback(_abandon, ticket)
            for layer_rows in added:
                layer_rows.ticket = ticket
            undo.pop_all()
            # Pinned, but behind the place where the room ended; slots that no chunk was whole with.
            for entry in found[len(entries) + len(private) :]:
                if entry is not None:
                    entry.pins -= 1
            pool.free(slots[len(pieces) :])
            self._counts.tokens_gathered += gathered
            self._counts.tokens_deduplicated += num_tokens - gathered
            self._counts.partial_stores += len(entries) + len(private) < len(chunks)
        return Lease(
            self,
            num_tokens=num_tokens,
            layer_idxs=layers,
            entries=entries,
            private=private,
            ticket=ticket,
            tokens_from_pool=num_tokens - gathered,
            new_chunks=new_chunks,
            rows=rows,
            dtype=source.tensor.dtype,
        )

    def _pin(self, entry: Entry | None, undo: contextlib.ExitStack) -> Entry | None:
        """Marks an entry as just used, and holds it."""
        if entry is not None:
            self._index.touch(entry)
            entry.pins += 1
            undo.callback(_unpin, entry)
        return entry

    def _tell_of_partial_store(
        self, num_tokens: int, chunks: Sequence[Chunk], rows: torch.Tensor
    ) -> None:
        if self._told_of_partial_store:
            return
        self._told_of_partial_store = True
        wanted = chunks[-1].end - chunks[0].start
        layer_bytes = len(chunks) * self._format_of(rows[None, None]).slot_bytes(self.chunk_size)
        logger.warning(
            "the pool has room for %d of the %d tokens of a store and keeps those; one layer of "
            "this prefix takes %d of the pool's %d bytes: set hscache_pool_bytes higher (said "
            "once; stats().partial_stores counts)",
            num_tokens,
            wanted,
            layer_bytes,
            self._storage.arena.bytes,
        )

    # --- out ------------------------------------------------------------------------------

    def coverage(
        self,
        chunks_or_token_ids: Sequence[Chunk] | Sequence[int] | torch.Tensor,
        layer_idxs: Sequence[int] = (0,),
    ) -> int:
        """Tokens of the prefix that all asked layers can supply now."""
        entries, length = self._pin_prefix(self._to_chunks(chunks_or_token_ids), layer_idxs, None)
        self._release(entries)
        return length

    def retrieve_hidden_states(
        self,
        token_ids: Sequence[int] | torch.Tensor,
        *,
        layer_idx: int = 0,
        dtype: torch.dtype | None = torch.float32,
        device: torch.device | str = "cpu",
        copy: bool = True,
    ) -> torch.Tensor | None:
        """The longest stored prefix of one layer, `[n, hidden]`.

        Args:
            token_ids: the full prefix, a list or 1-D tensor.
            layer_idx: the layer, as named when stored.
            dtype: of the result; None for the rows' own (float32 for scaled float8).
            device: where the result goes.
            copy: False for the rows where the pool has them, as long as they lie side by side there
                and need no cast: a view that takes the same time at any length. It must not be
                written to, and its chunks stay in the pool until it and all views of it are gone.
                Otherwise a copy as ever.

        Returns:
            The rows, or None when not even the first chunk is there.
        """
        found = self.retrieve_layers(token_ids, (layer_idx,), dtype=dtype, device=device, copy=copy)
        return None if found is None else found[layer_idx]

    def retrieve_layers(
        self,
        chunks_or_token_ids: Sequence[Chunk] | Sequence[int] | torch.Tensor,
        layer_idxs: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        copy: bool = True,
    ) -> dict[int, torch.Tensor] | None:
        """The longest stored prefix that has all asked layers, as `{layer: [n, hidden]}`.

        Args:
            chunks_or_token_ids: the full prefix, as token ids or as ordered chunks.
            layer_idxs: layers, each as named when stored.
            dtype: of the result; None for the rows' own (float32 for scaled float8).
            device: where the results go.
            copy: False for views of the pool where they can be had: see `retrieve_hidden_states`.

        Returns:
            Tensors of `n` rows each, or None when not even the first chunk is there.

        Raises:
            TransferError: the copy failed.
        """
        with self._guard():
            if self._closed:
                return None
            target = _device(device)
            self._storage.reader(target)
        entries, length = self._pin_prefix(self._to_chunks(chunks_or_token_ids), layer_idxs, dtype)
        if not entries:
            return None
        tickets: list[_native.Ticket] = []
        try:
            found = {}
            for layer in layer_idxs:
                rows = [entry.layers[layer] for entry in entries]
                first = rows[0].format
                wanted = first.copied_as(dtype)
                if not copy and target.type == "cpu" and _side_by_side(rows, wanted):
                    found[layer] = self._view(entries, rows[0], length)
                    continue
                shape = (length, first.hidden)
                if target.type == "cpu":
                    out = self._results.empty(shape, wanted)
                else:
                    out = torch.empty(shape, dtype=wanted, device=target)
                tickets += self._read_rows(rows, out)
                found[layer] = out
            for ticket in tickets:
                ticket.wait()
            for ticket in tickets:
                if ticket.error is not None:
                    raise TransferError(ticket.error)
            return {layer: out.to(dtype or out.dtype) for layer, out in found.items()}
        finally:
            # Also where this ends early: a copy on its way needs the memory on both sides.
            for ticket in tickets:
                ticket.wait()
            self._release(entries)

    def _view(self, entries: Sequence[Entry], first: LayerRows, length: int) -> torch.Tensor:
        """Rows where they lie, whose entries are held until the tensor dies."""
        with self._guard():
            for entry in entries:
                entry.pins += 1
        held = list(entries)
        try:
            return self._results.view(
                self._storage.pool(first.format),
                first.slot,
                (length, first.format.hidden),
                first.format.dtype,
                # It may die anywhere, also under our lock: whoever holds that next sees to it.
                partial(self._dead_views.append, held),
            )
        except BaseException:
            self._release(held)
            raise

    def _read_rows(self, rows: Sequence[LayerRows], out: torch.Tensor) -> Iterator[_native.Ticket]:
        """Starts to copy whole chunks of one layer into `[n, hidden]`."""
        start = 0
        stream = _stream_of(out)
        for layout, group in groupby(rows, key=lambda chunk: chunk.format):
            pieces = []
            for chunk in group:
                length = min(self.chunk_size, len(out) - start)
                pieces.append((0, start, length, chunk.slot, 0))
                start += length
            yield self._storage.get(out, layout, pieces, stream=stream)

    def _pin_prefix(
        self, chunks: Sequence[Chunk], layer_idxs: Sequence[int], dtype: torch.dtype | None
    ) -> tuple[list[Entry], int]:
        """The committed prefix that has all layers, held, and its tokens.

        Whether KV is there is asked chunk by chunk, without the lock: it is somebody else's code.
        """
        entries: list[Entry] = []
        length = 0
        hidden: dict[int, RowFormat] = {}
        try:
            for chunk in chunks:
                manager = self._storage_manager
                present = manager is None or (
                    chunk.key is not None and manager.contains(chunk.key) is not None
                )
                with self._guard():
                    entry = self._settled(chunk.key)
                    if not present:
                        if entry is not None:
                            self._drop(entry)
                        self._counts.misses_kv_gone += 1
                        break
                    if entry is None or not all(
                        layer in entry.layers
                        and entry.layers[layer].committed
                        and _continues(hidden, layer, entry.layers[layer].format, dtype)
                        for layer in layer_idxs
                    ):
                        self._counts.misses_not_stored += 1
                        break
                    self._index.touch(entry)
                    entry.pins += 1
                    entries.append(entry)
                    length = chunk.end
        except BaseException:
            self._release(entries)
            raise
        with self._guard():
            self._counts.tokens_found += length * len(layer_idxs)
        return entries, length

    # --- one chunk, all chunks ------------------------------------------------------------

    def has_chunk(self, key: Hashable, layer_idx: int = 0) -> bool:
        """Whether a committed chunk of this layer is there, whatever became of its predecessors."""
        with self._guard():
            entry = self._settled(key)
            return (
                entry is not None
                and layer_idx in entry.layers
                and entry.layers[layer_idx].committed
            )

    def drop_key(self, key: Hashable) -> bool:
        """Drops a chunk with all its layers; returns whether it was there.

        Whoever reads it now reads on; its slots are free when nobody does.
        """
        with self._guard():
            entry = self._settled(key)
            if entry is None:
                return False
            self._drop(entry)
            return True

    def reset(self) -> None:
        """Drops all chunks: what is stored from now on shares nothing with what was before."""
        with self._guard():
            for entry in list(self._index):
                self._drop(entry)

    def num_cached_chunks(self) -> int:
        """Chunks in the pool, those being filled included."""
        with self._guard():
            return len(self._index)

    def stats(self) -> StoreStats:
        """A snapshot."""
        with self._guard():
            self._forget_ended()
            storage = self._storage
            arena = storage.arena.stats()
            pools = [(pool, pool.stats()) for pool in storage.pools.values()]
            first, slots = pools[0] if pools else (None, None)
            pinned = storage.pinned
            counts = self._counts
            return StoreStats(
                num_chunks=len(self._index),
                num_slots=slots.slots if slots else 0,
                free_slots=slots.free if slots else 0,
                slot_bytes=first.slot_bytes if first else 0,
                pool_bytes=arena.bytes,
                used_bytes=sum(found.used * pool.slot_bytes for pool, found in pools),
                largest_free_run=slots.largest_free_run if slots else 0,
                fragmentation=slots.fragmentation if slots else 0.0,
                tokens_gathered=counts.tokens_gathered,
                tokens_deduplicated=counts.tokens_deduplicated,
                tokens_found=counts.tokens_found,
                misses_kv_gone=counts.misses_kv_gone,
                misses_not_stored=counts.misses_not_stored,
                partial_stores=counts.partial_stores,
                dropped_stores=counts.dropped_stores,
                evicted_chunks=counts.evicted_chunks,
                pending_transfers=storage.num_pending,
                pinned_bytes=pinned.bytes if pinned else 0,
                pinning=pinned is not None and pinned.at_work,
                pin_refusal=pinned.refusal if pinned else "",
                touched_bytes=arena.touched_bytes,
                touching=arena.touching,
                touch_refusal=arena.touch_refusal,
                huge_pages=arena.huge_pages,
                huge_pages_refusal=arena.huge_pages_refusal,
                numa_node=arena.numa_node,
                numa_refusal=storage.numa_refusal,
            )

    def close(self) -> None:
        """Refuses what comes, ends what is in flight, stops the threads, and is empty. Idempotent.

        Transfers not started fail; leases already filled can still be read, and the pool's memory
        goes with the last of them and of the store's own references.
        """
        global _opened
        with _opened_lock:
            if _opened is self:
                _opened = None
        with self._guard():
            self._closed = True
        self._storage.close()
        with self._guard():
            for entry in list(self._index):
                self._drop(entry)
            self._forget_ended()

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

    def _to_chunks(
        self, chunks_or_token_ids: Sequence[Chunk] | Sequence[int] | torch.Tensor
    ) -> list[Chunk]:
        given: Any = chunks_or_token_ids
        if len(given) > 0 and isinstance(given[0], Chunk):
            return list(given)
        return self._chunker.chunks(given)

    def _check_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Refuses chunks that are not whole, in a row from token 0 on, those with keys first."""
        keys = [chunk.key for chunk in chunks if chunk.key is not None]
        for place, chunk in enumerate(chunks):
            start, last = place * self.chunk_size, place == len(chunks) - 1
            tail = last and start < chunk.end <= start + self.chunk_size
            whole = chunk.end == start + self.chunk_size
            if chunk.start != start or not (whole or tail):
                raise ValueError(
                    f"chunk {place} is {chunk}, must be tokens {start} to "
                    f"{start + self.chunk_size}: chunks are of {self.chunk_size} tokens from token "
                    "0 on, but for a last one"
                )
            if (chunk.key is not None) != (place < len(keys)):
                raise ValueError(f"chunk {place} is {chunk}: those without a key must come last")
        if len(set(keys)) != len(keys):
            raise ValueError(f"chunks {chunks} have a key twice: a key names one whole prefix")

    def _check_paged(self, paged: torch.Tensor, layer_idxs: Sequence[int]) -> tuple[int, ...]:
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
        return tuple(layer_idxs)

    def _format_of(self, paged: torch.Tensor) -> RowFormat:
        return format_for(paged.dtype, paged.size(3), self.config.storage_dtype)

    def _settled(self, key: Hashable | None) -> Entry | None:
        """The entry of a key, after what failed to arrive was taken out of it."""
        entry = None if key is None else self._index.get(key)
        if entry is None:
            return None
        failed = False
        for rows in entry.layers.values():
            if rows.ticket is not None and rows.ticket.done:
                rows.ticket = None
            failed |= rows.ticket is not None and rows.ticket.error is not None
        if failed and not entry.busy:
            self._drop(entry)
            return None
        return entry

    def _allocate(
        self, count: int, found: Sequence[Entry | None], pool: _native.SlotPool, *, fit: bool
    ) -> list[int]:
        """Slots for a store, evicting what is not busy; all or none, or with `fit` what there is.

        What was found of the same request is pinned and makes no room for it.
        """
        present = sum(len(entry.layers) for entry in found if entry is not None)
        if count + present > pool.num_slots and not fit:
            whole = count + present
            raise PoolFullError(
                f"the request takes {whole} slots of {pool.slot_bytes} bytes, the whole pool has "
                f"{pool.num_slots}: set hscache_pool_bytes to {whole * pool.slot_bytes} or more",
                can_wait=False,
            )
        while (slots := pool.allocate(count)) is None:
            victim = self._index.pop_victim()
            if victim is None:
                if fit:
                    return pool.allocate(min(count, pool.num_free)) or []
                raise PoolFullError(
                    f"{count} slots are needed, {pool.num_free} of {pool.num_slots} are free and "
                    "the rest is in use: wait, or set hscache_pool_bytes higher",
                    can_wait=True,
                )
            self._counts.evicted_chunks += 1
            self._free(victim)
        return slots

    def _drop(self, entry: Entry) -> None:
        """Takes an entry out of the index; its slots go now, or when nobody uses them."""
        self._index.remove(entry)
        if entry.busy:
            self._doomed.append(entry)
        else:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        for rows in entry.layers.values():
            self._storage.pool(rows.format).free([rows.slot])
        entry.layers.clear()

    def _release(self, entries: Sequence[Entry]) -> None:
        with self._guard():
            for entry in entries:
                _unpin(entry)
            if self._doomed:
                self._forget_ended()

    def _release_lease(self, entries: Sequence[Entry], rows: RowFormat, slots: list[int]) -> None:
        self._release(entries)
        if slots:
            with self._guard():
                self._storage.pool(rows).free(slots)

    def _free_doomed(self) -> None:
        for entry in self._doomed:
            if not entry.busy:
                self._free(entry)
        self._doomed = [entry for entry in self._doomed if entry.layers]

    def _forget_ended(self) -> None:
        self._storage.forget_ended()
        while self._dead_views:
            for entry in self._dead_views.popleft():
                _unpin(entry)
        self._free_doomed()


def _unpin(entry: Entry) -> None:
    entry.pins -= 1


def _abandon(ticket: _native.Ticket) -> None:
    ticket.cancel()
    ticket.wait()


def _paged_source(paged: torch.Tensor, block_ids: Sequence[int], stream: int | None) -> Source:
    return Source(paged, list(block_ids), 0, _stream_of(paged) if stream is None else stream)


def _device(device: torch.device | str) -> torch.device:
    """With its number, as tensors have it."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _stream_of(tensor: torch.Tensor) -> int:
    """Raw handle of the stream that a tensor is used on; 0 for host memory."""
    if tensor.device.type != "cuda":
        return 0
    return torch.cuda.current_stream(tensor.device).cuda_stream


def _side_by_side(rows: Sequence[LayerRows], wanted: torch.dtype) -> bool:
    """Whether rows are one piece of memory, in the dtype that is wanted."""
    first = rows[0]
    return (
        wanted == first.format.dtype
        and not first.format.scaled
        and all(
            chunk.slot == first.slot + place and chunk.format == first.format
            for place, chunk in enumerate(rows)
        )
    )


def _continues(
    first: dict[int, RowFormat], layer: int, rows: RowFormat, dtype: torch.dtype | None
) -> bool:
    """Whether rows can stand behind those of the first chunk of a result."""
    begun = first.setdefault(layer, rows)
    return rows.hidden == begun.hidden and rows.converts(begun.copied_as(dtype))


def _check_formats(
    chunks: Sequence[Chunk],
    found: Sequence[Entry | None],
    layers: Sequence[int],
    source: torch.Tensor,
) -> None:
    """Refuses rows that those which are there already could not stand for."""
    for chunk, entry in zip(chunks, found, strict=True):
        for layer in layers:
            rows = entry.layers.get(layer) if entry is not None else None
            if rows is not None and not (
                rows.format.hidden == source.size(3) and rows.format.converts(source.dtype)
            ):
                raise ValueError(
                    f"rows are {source.size(3)} x {source.dtype}, but layer {layer} of tokens "
                    f"{chunk.start} to {chunk.end} is there as {rows.format}: use another "
                    "namespace, or another layer number"
                )


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
