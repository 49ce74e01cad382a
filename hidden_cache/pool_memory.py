"""`PoolMemory`: the pool's memory, and what moves rows into it and out of it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hidden_cache import _native, numa
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import PoolFullError, QueueFullError, TransferError
from hidden_cache.row_format import RowFormat

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Rows that somebody gives: a tensor `[num_blocks, layers, block_size, hidden]`.

    `block_ids` say where a request's tokens lie in it, from token `first_token` on. `stream` is the
    raw handle of the stream that writes it.
    """

    tensor: torch.Tensor
    block_ids: list[int]
    first_token: int = 0
    stream: int = 0

    @property
    def view(self) -> _native.PagedView:
        return view_of(self.tensor)


def view_of(paged: torch.Tensor) -> _native.PagedView:
    """A tensor `[num_blocks, layers, block_size, hidden]` as native code sees it."""
    item = paged.element_size()
    block, layer, token, _ = (stride * item for stride in paged.stride())
    return _native.PagedView(
        paged.data_ptr(),
        (paged.size(0), paged.size(1), paged.size(2)),
        paged.size(3) * item,
        (block, layer, token),
    )


def current_stream(tensor: torch.Tensor, stream: int | None = None) -> int:
    """Raw handle of the stream that a tensor is used on: the given one, or torch's current one; 0
    for host memory."""
    if stream is not None or tensor.device.type != "cuda":
        return stream or 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


class PoolMemory:
    """One arena, a pool of slots for each size of slot in it, an engine for each device.

    Pools and engines are made when rows of a new kind come. Not thread-safe, except for the pools
    and engines themselves: the store's lock guards it.
    """

    def __init__(self, config: HiddenCacheConfig, chunk_size: int) -> None:
        self._config = config
        self._chunk_size = chunk_size
        self.arena = _native.Arena(config.pool_bytes, huge_pages=config.huge_pages)
        if refusal := self.arena.stats().huge_pages_refusal:
            logger.warning("the pool has plain pages: %s", refusal)
        self.pools: dict[int, _native.SlotPool] = {}  # by bytes of a slot
        self.engines: dict[torch.device, _native.TransferEngine] = {}
        # Of their own, so that readers do not stand behind what is being stored.
        self._readers: dict[torch.device, _native.TransferEngine] = {}
        self._registrations: dict[torch.device, _native.Registration] = {}
        self._numa_refusal = ""
        # Source tensors by the transfer that reads them: their memory must outlive it.
        self._sources: list[tuple[_native.Ticket, torch.Tensor]] = []

    def pool(self, rows: RowFormat) -> _native.SlotPool:
        """The pool of slots for rows of this format.

        Raises:
            PoolFullError: not one slot fits the arena.
        """
        slot_bytes = rows.slot_bytes(self._chunk_size)
        if slot_bytes not in self.pools:
            if slot_bytes > self.arena.bytes:
                raise PoolFullError(
                    f"one layer of one chunk is {slot_bytes} bytes, the whole pool "
                    f"{self.arena.bytes}: set hscache_pool_bytes higher",
                    can_wait=False,
                )
            self.pools[slot_bytes] = _native.SlotPool(self.arena, slot_bytes)
        return self.pools[slot_bytes]

    def engine(self, device: torch.device) -> _native.TransferEngine:
        """The engine for tensors on this device.

        Raises:
            ValueError: a device that rows cannot be moved from or to.
        """
        if device not in self.engines:
            engine = self._make_engine(
                device,
                max_pending=self._config.max_pending,
                staging_bytes=self._config.staging_bytes,
            )
            if not self.engines:
                self._place_pages(device)
            self.engines[device] = engine
            if device.type == "cuda":
                self._registrations[device] = engine.register_arena(self.arena)
        return self.engines[device]

    def reader(self, device: torch.device) -> _native.TransferEngine:
        """The engine that brings rows to tensors on this device.

        Raises:
            ValueError: a device that rows cannot be moved to.
        """
        if device not in self._readers:
            self._readers[device] = self._make_engine(device)
        return self._readers[device]

    def _make_engine(self, device: torch.device, **options: Any) -> _native.TransferEngine:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"rows cannot be moved from or to {device}: move them to the CPU or a CUDA device"
            )
        on_gpu = device.type == "cuda"
        if on_gpu and (why := _native.why_no_cuda()):
            raise ValueError(f"rows cannot be moved from or to {device}: {why}")
        engine = _native.TransferEngine(cuda_device=device.index if on_gpu else None, **options)
        # Before what the transfers touch goes away, at the end of the store or of the process.
        weakref.finalize(self, engine.close)
        return engine

    def _place_pages(self, device: torch.device) -> None:
        """Has the arena's memory backed, near the device that the first rows come from."""
        node, self._numa_refusal = numa.node_for(self._config.numa, device)
        if node is not None:
            self.arena.prefer_numa_node(node)
            self._numa_refusal = self.arena.stats().numa_refusal
        if self._numa_refusal:
            logger.info("the pool is on no NUMA node of its own: %s", self._numa_refusal)
        if self._config.touch_pages == "background":
            self.arena.touch_in_background(self._config.huge_pages_timeout_s)

    def put(
        self, source: Source, rows: RowFormat, pieces: Sequence[_native.Piece]
    ) -> _native.Ticket:
        """Moves rows of a source into slots; only enqueues. Tokens count from the source's first.

        Raises:
            QueueFullError: too many transfers are pending.
            IndexError, ValueError: pieces that the source does not have.
        """
        engine = self.engine(source.tensor.device)
        given, stored = rows.elements(source.tensor.dtype)
        ticket = engine.gather(
            source.view,
            source.block_ids,
            pieces,
            self.pool(rows),
            source.stream,
            False,
            source_element=given,
            stored=stored,
        )
        if ticket is None:
            raise QueueFullError(
                f"{engine.pending} transfers are pending, the limit: wait for some, or set "
                "hscache_max_pending higher"
            )
        self._sources.append((ticket, source.tensor))
        return ticket

    def get(
        self,
        target: torch.Tensor,
        rows: RowFormat,
        pieces: Sequence[_native.Piece],
        *,
        stream: int = 0,
    ) -> _native.Ticket:
        """Moves rows out of slots into a tensor `[n, hidden]`, waiting for room in the queue.

        Thread-safe where `reader` was called for the tensor's device.

        Raises:
            TransferError: closed.
        """
        wanted, stored = rows.elements(target.dtype)
        try:
            ticket = self._readers[target.device].scatter(
                view_of(target[None, None]),
                [0],
                pieces,
                self.pools[rows.slot_bytes(self._chunk_size)],
                stream,
                True,
                target_element=wanted,
                stored=stored,
            )
        except RuntimeError as error:
            raise TransferError(str(error)) from error  # closed meanwhile
        assert ticket is not None, "it waits for room"
        return ticket

    def forget_ended(self) -> None:
        """Lets go of source tensors that are not read any more."""
        self._sources = [held for held in self._sources if not held[0].ended]

    def pending(self) -> list[_native.Ticket]:
        """The transfers that read from sources now."""
        return [ticket for ticket, _ in self._sources if not ticket.ended]

    def close(self) -> None:
        """Ends what is in flight, and every engine. Idempotent; any thread, without the lock."""
        for registration in list(self._registrations.values()):
            registration.stop()
        for engine in [*self.engines.values(), *self._readers.values()]:
            engine.close()

    @property
    def pinned(self) -> _native.Registration | None:
        """What a GPU copies to without a detour; None without a GPU."""
        return next(iter(self._registrations.values()), None)

    @property
    def numa_refusal(self) -> str:
        return self._numa_refusal

    @property
    def num_pending(self) -> int:
        return sum(engine.pending for engine in self.engines.values())
