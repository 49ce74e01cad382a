"""`HiddenStateStore`: chunks of hidden states in a bounded host pool, found by key."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import torch

from hidden_cache import _native
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import (
    ConfigError,
    HiddenCacheError,
    QueueFullError,
    TransferError,
)
from hidden_cache.index import NONE, ChunkIndex
from hidden_cache.keys import DEFAULT_CHUNK_SIZE, Chunk, Chunker, TokenChunker, chunker_for
from hidden_cache.lease import Lease
from hidden_cache.metrics import Counts, StoreStats
from hidden_cache.pool_memory import PoolMemory, Source, current_stream
from hidden_cache.results import Results
from hidden_cache.row_format import RowFormat, format_for
from hidden_cache.writer import RequestWriter

logger = logging.getLogger(__name__)


class StorageManager(Protocol):
    """What knows whether a chunk's KV is there, such as LMCache's `StorageManager`."""

    def contains(self, key: Any, /) -> Any:
        """Where the KV is; None where it is not."""


class _Found(NamedTuple):
    """A prefix that is there, pinned.

    Attributes:
        numbers: of its chunks in the index.
        length: tokens.
        runs: by layer: the slots, a list for each change of format.
    """

    numbers: list[int]
    length: int
    runs: dict[int, list[tuple[RowFormat, list[int]]]]

    def is_view(self, layer: int, wanted: torch.dtype) -> bool:
        """Whether a layer's rows are one piece of memory, in the dtype that is wanted."""
        (rows, slots), *others = self.runs[layer]
        side_by_side = slots == list(range(slots[0], slots[0] + len(slots)))
        return not others and wanted == rows.dtype and not rows.scaled and side_by_side


class HiddenStateStore:
    """Keeps hidden states by chunk key in a host pool of fixed size.

    Rows go in by `store_hidden_states`, `store_paged`, `lease_paged` or, step by step, a `writer`,
    and come out by `retrieve_hidden_states` and `retrieve_layers`, or through a lease. Chunks that
    are there already are not copied again. When the pool is full the least recently used leaves go.

    With a bound storage manager a chunk whose KV is gone is dropped as soon as somebody asks for
    it.

    Thread-safe; the GIL is released around copies and waits. Finalizers must not call it: they may
    run while their thread is inside of it.
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
        self._memory = PoolMemory(config, self.chunk_size)
        self._storage_manager: StorageManager | None = None
        self._results = Results(config.result_bytes)
        self._lock = threading.Lock()
        self._index = ChunkIndex()
        # What views pinned that are gone.
        self._dead_views: deque[list[int]] = deque()
        self._counts = Counts()
        self._told_of_partial_store = False
        self._closed = False
        self._owner_pid = os.getpid()
        self.weights_epoch = 0

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
            self._memory.pool(self._format_of(paged))
            self._memory.engine(paged.device)

    # --- in -------------------------------------------------------------------------------

    def store_hidden_states(
        self,
        token_ids: Sequence[Chunk] | Sequence[int] | torch.Tensor,
        hidden_states: torch.Tensor,
        *,
        layer_idx: int = 0,
        token_offset: int = 0,
    ) -> int:
        """Stores one layer's rows, chunk by chunk; returns when they are copied.

        Args:
            token_ids: the full prefix: a list or 1-D tensor, or ordered chunks.
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
        num_tokens = _num_tokens(token_ids)
        if not 0 <= token_offset <= num_tokens:
            raise ValueError(
                f"token_offset is {token_offset}, must be from 0 to the {num_tokens} token ids"
            )
        if len(hidden_states) != num_tokens - token_offset:
            raise ValueError(
                f"hidden_states has {len(hidden_states)} rows, must have one for each of the "
                f"{num_tokens - token_offset} token ids from token_offset {token_offset} on"
            )
        # Nobody could find what has no key.
        chunks = [chunk for chunk in self._to_chunks(token_ids) if chunk.key is not None]
        before, chunks = _from_offset(chunks, token_offset)
        if not chunks:
            return 0
        began = time.perf_counter()
        rows = hidden_states.detach()
        if rows.stride(1) != 1 and rows.size(1) > 1:
            rows = rows.contiguous()
        source = Source(rows[None, None], [0], token_offset, current_stream(rows))
        writer = RequestWriter(self, "of store_hidden_states", (layer_idx,), before=before)
        whole = chunks[-1].end
        self._waiting(partial(writer._append, source, whole, chunks, fit=True))
        lease = writer.finish()
        try:
            # Only for what is new: others may still fill what was there.
            lease.wait_own()
        finally:
            lease.release()
        with self._guard():
            self._counts.partial_stores += writer.num_tokens < whole
            self._counts.store_s.add(time.perf_counter() - began)
        if writer.num_tokens < whole:
            self._tell_of_partial_store(lease.num_tokens, chunks, rows)
        return writer.new_chunks

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
        while chunks and chunks[-1].key is None:
            chunks.pop()
        before, chunks = _from_offset(chunks, token_offset)
        if not chunks:
            return None
        writer = RequestWriter(self, "of store_paged", layer_idxs, before=before)
        end = chunks[-1].end
        ticket = self._waiting(
            partial(writer.append_paged, paged, block_ids, end, chunks, stream=stream)
        )
        writer.finish().release()
        return ticket

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
        writer = RequestWriter(self, "of lease_paged", layer_idxs)
        end = chunks[-1].end if chunks else 0
        writer.append_paged(paged, block_ids, end, chunks, stream=stream)
        return writer.finish()

    def writer(self, request_id: str, layer_idxs: Sequence[int]) -> RequestWriter:
        """Takes a request's rows step by step, from its first token on.

        Args:
            request_id: for messages.
            layer_idxs: what the rows' layers are called, in their order.

        Raises:
            ValueError: no layers, or one twice.
        """
        if not layer_idxs or len(set(layer_idxs)) != len(layer_idxs):
            raise ValueError(
                f"layer_idxs are {list(layer_idxs)}, must name one layer or more, each once"
            )
        with self._guard():
            self._check_open()
            return RequestWriter(self, request_id, layer_idxs)

    def _waiting(self, append: Callable[[], _native.Ticket | None]) -> _native.Ticket | None:
        """Waits where the queue is full."""
        while True:
            try:
                return append()
            except QueueFullError:
                self._wait_for_one()

    def _wait_for_one(self) -> None:
        with self._guard():
            tickets = self._memory.pending()
            self._counts.queue_waits += 1
        if tickets:
            tickets[0].wait()

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
            self._memory.arena.bytes,
        )

    # --- out ------------------------------------------------------------------------------

    def coverage(
        self,
        chunks_or_token_ids: Sequence[Chunk] | Sequence[int] | torch.Tensor,
        layer_idxs: Sequence[int] = (0,),
    ) -> int:
        """Tokens of the prefix that all asked layers can supply now."""
        found = self._pin_prefix(self._to_chunks(chunks_or_token_ids), layer_idxs, None)
        self._unpin(found.numbers)
        return found.length

    def retrieve_hidden_states(
        self,
        token_ids: Sequence[Chunk] | Sequence[int] | torch.Tensor,
        *,
        layer_idx: int = 0,
        dtype: torch.dtype | None = torch.float32,
        device: torch.device | str = "cpu",
        out: torch.Tensor | None = None,
        copy: bool = True,
    ) -> torch.Tensor | None:
        """The longest stored prefix of one layer, `[n, hidden]`.

        Args:
            token_ids: the full prefix: a list or 1-D tensor, or ordered chunks.
            layer_idx: the layer, as named when stored.
            dtype: of the result; None for the rows' own (float32 for scaled float8).
            device: where the result goes.
            out: `[m, hidden]`, hidden contiguous, of any dtype, on the CPU or a CUDA device: takes
                the rows instead of a new tensor. `dtype` and `device` are its own then.
            copy: False for the rows where the pool has them, as long as they lie side by side there
                and need no cast: a view that takes the same time at any length. It must not be
                written to, and its chunks stay in the pool until it and all views of it are gone.
                Otherwise a copy as ever.

        Returns:
            The rows (`out[:n]` of an `out`), or None when not even the first chunk is there.

        Raises:
            ValueError: an `out` that the rows do not fit.
            TransferError: the copy failed.
        """
        found = self.retrieve_layers(
            token_ids,
            (layer_idx,),
            dtype=dtype,
            device=device,
            out=None if out is None else {layer_idx: out},
            copy=copy,
        )
        return None if found is None else found[layer_idx]

    def retrieve_layers(
        self,
        chunks_or_token_ids: Sequence[Chunk] | Sequence[int] | torch.Tensor,
        layer_idxs: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        out: Mapping[int, torch.Tensor] | None = None,
        copy: bool = True,
    ) -> dict[int, torch.Tensor] | None:
        """The longest stored prefix that has all asked layers, as `{layer: [n, hidden]}`.

        Args:
            chunks_or_token_ids: the full prefix, as token ids or as ordered chunks.
            layer_idxs: layers, each as named when stored.
            dtype, device, copy: see `retrieve_hidden_states`.
            out: a tensor for each layer: see `retrieve_hidden_states`.

        Returns:
            Tensors of `n` rows each, or None when not even the first chunk is there.

        Raises:
            ValueError: an `out` that the rows do not fit, or a layer without one.
            TransferError: the copy failed.
        """
        began = time.perf_counter()
        # A second result would let go of the first one while it is written to.
        layer_idxs = tuple(dict.fromkeys(layer_idxs))
        target = _device(device)
        with self._guard():
            if self._closed:
                return None
            for place in [target] if out is None else [given.device for given in out.values()]:
                self._memory.reader(place)
        found = self._pin_prefix(self._to_chunks(chunks_or_token_ids), layer_idxs, dtype, out)
        if not found.numbers:
            return None
        results: dict[int, torch.Tensor] = {}
        tickets: list[_native.Ticket] = []
        copied = 0
        try:
            for layer in layer_idxs:
                rows, slots = found.runs[layer][0]
                given = None if out is None else _room_in(out, layer, found.length, rows.hidden)
                wanted = rows.copied_as(dtype if given is None else given.dtype)
                if (
                    given is None
                    and not copy
                    and target.type == "cpu"
                    and found.is_view(layer, wanted)
                ):
                    results[layer] = self._view(found, rows, slots[0])
                    continue
                shape = (found.length, rows.hidden)
                if given is not None and given.dtype == wanted:
                    result = given
                elif given is None and target.type != "cpu":
                    result = torch.empty(shape, dtype=wanted, device=target)
                else:
                    result = self._results.empty(shape, wanted)
                tickets += self._read_rows(found.runs[layer], result)
                results[layer] = result
                copied += found.length * rows.row_bytes
            for ticket in tickets:
                ticket.wait()
            for ticket in tickets:
                if ticket.error is not None:
                    raise TransferError(ticket.error)
        finally:
            # Also where this ends early: a copy on its way needs the memory on both sides.
            for ticket in tickets:
                ticket.wait()
            self._unpin(found.numbers)
        with self._guard():
            self._counts.tokens_found += found.length * len(layer_idxs)
            self._counts.bytes_retrieved += copied
            self._counts.retrieve_s.add(time.perf_counter() - began)
        if out is None:
            return {layer: result.to(dtype or result.dtype) for layer, result in results.items()}
        return {
            layer: out[layer][: found.length].copy_(result)
            if result.dtype != out[layer].dtype
            else result
            for layer, result in results.items()
        }

    def _view(self, found: _Found, rows: RowFormat, slot: int) -> torch.Tensor:
        """Rows where they lie, whose chunks are held until the tensor dies."""
        numbers = list(found.numbers)
        with self._guard():
            for number in numbers:
                self._index.pin(number)
        try:
            return self._results.view(
                self._memory.pool(rows),
                slot,
                (found.length, rows.hidden),
                rows.dtype,
                # It may die anywhere, also under our lock: whoever holds that next sees to it.
                partial(self._dead_views.append, numbers),
            )
        except BaseException:
            self._unpin(numbers)
            raise

    def _read_rows(
        self, runs: Sequence[tuple[RowFormat, list[int]]], into: torch.Tensor
    ) -> Iterator[_native.Ticket]:
        """Starts to copy whole chunks of one layer into `[n, hidden]`."""
        start = 0
        stream = current_stream(into)
        for rows, slots in runs:
            pieces = []
            for slot in slots:
                length = min(self.chunk_size, len(into) - start)
                pieces.append((0, start, length, slot, 0))
                start += length
            yield self._memory.get(into, rows, pieces, stream=stream)

    def _pin_prefix(
        self,
        chunks: Sequence[Chunk],
        layer_idxs: Sequence[int],
        dtype: torch.dtype | None,
        out: Mapping[int, torch.Tensor] | None = None,
    ) -> _Found:
        """The prefix that is there in all layers, pinned.

        Whether KV is there is asked chunk by chunk, without the lock: it is somebody else's code.
        """
        index = self._index
        # What follows has no key: nobody can have it.
        keys = [chunk.key for chunk in takewhile(lambda chunk: chunk.key is not None, chunks)]
        with self._guard():
            self._tend()
            numbers = index.find(keys)
            count = index.pin_prefix(numbers, layer_idxs)
        pinned = numbers[:count]
        try:
            with_kv = self._count_kv(keys[: count + 1])
            with self._guard():
                if with_kv is not None and with_kv < min(count + 1, len(keys)):
                    count = with_kv
                    self._drop(keys[count])
                    self._counts.misses_kv_gone += 1
                elif count < len(keys) and index.was_evicted(keys[count]):
                    self._counts.misses_evicted += 1
                elif count < len(keys):
                    self._counts.misses_not_stored += 1
                runs = {}
                for layer in layer_idxs:
                    wanted = dtype if out is None or layer not in out else out[layer].dtype
                    runs[layer] = index.runs(numbers[:count], layer)
                    count = min(count, _continuing(runs[layer], wanted))
                # The layers that were looked at before a shorter one.
                for layer, found in runs.items():
                    if sum(len(slots) for _, slots in found) > count:
                        runs[layer] = index.runs(numbers[:count], layer)
                index.unpin(pinned[count:])
                pinned = pinned[:count]
        except BaseException:
            self._unpin(pinned)
            raise
        return _Found(pinned, chunks[count - 1].end if count else 0, runs)

    def _count_kv(self, keys: Sequence[Hashable | None]) -> int | None:
        """Leading chunks whose KV is there; None where nobody is bound who knows."""
        manager = self._storage_manager
        if manager is None:
            return None
        count = 0
        while count < len(keys) and manager.contains(keys[count]) is not None:
            count += 1
        return count

    # --- one chunk, all chunks ------------------------------------------------------------

    def has_chunk(self, key: Hashable, layer_idx: int = 0) -> bool:
        """Whether a committed chunk of this layer is there, whatever became of its predecessors."""
        with self._guard():
            self._tend()
            (number,) = self._index.find([key])
            return number != NONE and self._index.holds(number, layer_idx)

    def drop_key(self, key: Hashable) -> bool:
        """Drops a chunk with all its layers; returns whether it was there.

        Whoever reads it now reads on; its slots are free when nobody does.
        """
        with self._guard():
            self._tend()
            return self._drop(key)

    def reset(self, weights_epoch: int | None = None) -> None:
        """Drops all chunks and forgets what was: rows of other weights never answer again.

        Writers that have begun are refused from now on, since the rest of their rows would come of
        other weights.

        Args:
            weights_epoch: the number of the weights that rows come of from now on; None for the
                next one.

        Raises:
            ValueError: a number that is not above the one before.
        """
        with self._guard():
            epoch = self.weights_epoch + 1 if weights_epoch is None else weights_epoch
            if epoch <= self.weights_epoch:
                raise ValueError(
                    f"weights_epoch is {epoch}, was {self.weights_epoch} already: each update of "
                    "the weights takes a higher number"
                )
            self.weights_epoch = epoch
            self._index.clear()
            self._tend()

    def num_cached_chunks(self) -> int:
        """Chunks in the pool, those being filled included."""
        with self._guard():
            return len(self._index)

    def stats(self) -> StoreStats:
        """A snapshot."""
        with self._guard():
            self._tend()
            storage = self._memory
            arena = storage.arena.stats()
            pools = [(pool, pool.stats()) for pool in storage.pools.values()]
            first, slots = pools[0] if pools else (None, None)
            pinned = storage.pinned
            counts = self._counts
            results = self._results.stats()
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
                bytes_stored=counts.bytes_stored,
                tokens_found=counts.tokens_found,
                bytes_retrieved=counts.bytes_retrieved,
                misses_kv_gone=counts.misses_kv_gone,
                misses_evicted=counts.misses_evicted,
                misses_not_stored=counts.misses_not_stored,
                partial_stores=counts.partial_stores,
                dropped_stores=counts.dropped_stores,
                evicted_chunks=self._index.num_evicted,
                queue_waits=counts.queue_waits,
                store_s=counts.store_s.snapshot(),
                retrieve_s=counts.retrieve_s.snapshot(),
                result_hits=results.hits,
                result_fallbacks=results.fallbacks,
                result_bytes=results.in_use_bytes + results.idle_bytes,
                pending_transfers=storage.num_pending,
                weights_epoch=self.weights_epoch,
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
        self._memory.close()
        with self._guard():
            self._index.clear()
            self._tend()

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

    def _format_of(self, rows: torch.Tensor) -> RowFormat:
        return format_for(rows.dtype, rows.size(-1), self.config.storage_dtype)

    def _drop(self, key: Hashable) -> bool:
        (number,) = self._index.find([key])
        if number == NONE or not self._index.present(number):
            return False
        self._index.remove(number)
        return True

    def _unpin(self, numbers: Sequence[int]) -> None:
        with self._guard():
            self._index.unpin(numbers)

    def _tend(self) -> None:
        """Takes note of what has ended meanwhile."""
        self._memory.forget_ended()
        while self._dead_views:
            self._index.unpin(self._dead_views.popleft())
        self._index.settle()


def _num_tokens(token_ids: Sequence[Chunk] | Sequence[int] | torch.Tensor) -> int:
    """Of a prefix that is given as token ids or as chunks."""
    last: Any = token_ids[-1] if len(token_ids) > 0 else None
    return last.end if isinstance(last, Chunk) else len(token_ids)


def _from_offset(chunks: list[Chunk], token_offset: int) -> tuple[Chunk | None, list[Chunk]]:
    """The chunks that begin at a token or behind it, and the one before them."""
    first = sum(chunk.start < token_offset for chunk in chunks)
    return chunks[first - 1] if first else None, chunks[first:]


def _device(device: torch.device | str) -> torch.device:
    """With its number, as tensors have it."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _room_in(out: Mapping[int, torch.Tensor], layer: int, length: int, hidden: int) -> torch.Tensor:
    """The part of an `out` that a layer's rows go to."""
    if layer not in out:
        raise ValueError(f"out has layers {list(out)}, must have one for layer {layer} too")
    given = out[layer]
    fits = given.dim() == 2 and len(given) >= length and given.size(1) == hidden
    if not fits or (given.stride(1) != 1 and hidden > 1):
        raise ValueError(
            f"out has shape {list(given.shape)} and strides {list(given.stride())}, must be "
            f"[{length} or more, {hidden}] with hidden contiguous (stride 1)"
        )
    return given[:length]


def _continuing(runs: Sequence[tuple[RowFormat, list[int]]], dtype: torch.dtype | None) -> int:
    """Chunks from the front whose rows can stand in one result."""
    count = 0
    for rows, slots in runs:
        first = runs[0][0]
        if rows.hidden != first.hidden or not rows.converts(first.copied_as(dtype)):
            break
        count += len(slots)
    return count


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
