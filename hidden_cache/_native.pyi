"""Arena, slot and result pools, transfer engine: the native layer under the store.

Memory is given as addresses and sizes in bytes, and nothing here keeps it alive: the caller holds
the tensor behind a view, and the pool that rows go to, until the ticket has ended. Every method is
thread-safe and releases the GIL while it copies or waits.
"""

import enum
from collections.abc import Sequence
from typing import SupportsIndex

# Layer (its place on the layer axis), first token, number of tokens, slot, first row in the slot.
Piece = tuple[int, int, int, int, int]

class Element(enum.Enum):
    """What rows are made of. ANY is moved bit for bit; FLOAT8 is e4m3fn with a scale a row.

    In a slot rows lie side by side, then, where they are FLOAT8, their float32 scales from the next
    multiple of 4 bytes on.
    """

    ANY = ...
    FLOAT32 = ...
    FLOAT16 = ...
    BFLOAT16 = ...
    FLOAT8 = ...

def why_no_cuda() -> str:
    """Why rows in GPU memory cannot be moved: no CUDA in the build, no driver, no device.

    Empty where they can.
    """

def machine_memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit."""

def pack_tokens(
    tokens: list[SupportsIndex] | tuple[SupportsIndex, ...], start: int, stop: int
) -> bytes:
    """Tokens `[start, stop)` as little-endian int64, side by side. Keeps the GIL.

    Raises:
        TypeError: `tokens` is no list or tuple, or one of them is no integer and has no
            `__index__`.
        OverflowError: a token does not fit 64 bits.
        IndexError: there are fewer tokens.
    """

class PagedView:
    """A strided view of paged memory in which rows of bytes lie; it does not own the memory."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, int, int],
        row_bytes: int,
        strides: tuple[int, int, int],
    ) -> None:
        """Describes memory that begins at `address`.

        Args:
            address: of the first row of block 0.
            shape: blocks, layers, tokens in a block.
            row_bytes: bytes of one token of one layer; they lie side by side.
            strides: from one block, layer and token to the next, in bytes; any.
        """

class Arena:
    """One host mapping, backed by the kernel page by page when it is first touched.

    After a fork the child, which shares the memory, gets RuntimeError from all but `bytes`.
    """

    def __init__(self, bytes: int, memory_limit: int = 0, huge_pages: str = "off") -> None:
        """Maps `bytes` of memory.

        Args:
            bytes: size.
            memory_limit: what the machine has; 0 asks it.
            huge_pages: "off", "advise" (the kernel makes them where it finds room) or "hugetlb"
                (of those set aside). What cannot be had is plain pages, and `stats` says why.

        Raises:
            ValueError: `bytes` is not positive or above the limit.
            OSError: the kernel refused the mapping.
        """

    @property
    def bytes(self) -> int: ...
    @property
    def fd(self) -> int:
        """The memory for another process to read, with `ArenaReader`; closed with the arena.

        Raises:
            RuntimeError: the kernel cannot keep others from writing (before Linux 5.1).
        """

    def prefer_numa_node(self, node: int) -> None:
        """Has pages not backed yet come from this node; `stats` says whether it was had."""

    def touch_in_background(self, huge_pages_timeout_s: float) -> None:
        """Has all pages backed by a few threads that end by themselves; returns at once.

        Less than 32 MiB are left to whoever writes. It ends early, and `stats` says so, before the
        machine's memory gets short. The second call does nothing.

        Args:
            huge_pages_timeout_s: with huge_pages "advise", what is not touched by then gets plain
                pages.
        """

    def stats(self) -> ArenaStats: ...

class ArenaStats:
    """A snapshot. A refusal says why something asked for was not had; empty where it was."""

    @property
    def bytes(self) -> int: ...
    @property
    def touched_bytes(self) -> int:
        """By the background threads."""

    @property
    def touching(self) -> bool:
        """Whether they are still at it."""

    @property
    def touch_refusal(self) -> str: ...
    @property
    def huge_pages(self) -> str:
        """What was had: "off", "advise" or "hugetlb"."""

    @property
    def huge_pages_refusal(self) -> str: ...
    @property
    def numa_node(self) -> int | None: ...
    @property
    def numa_refusal(self) -> str: ...

class ArenaReader:
    """Another process's arena, mapped for reading: `memoryview(reader)`.

    Bytes may be written while they are read: which are whole, the owner has to say.
    """

    def __init__(self, fd: int, bytes: int) -> None:
        """Maps the first `bytes` of the arena behind a descriptor, which may be closed then.

        Raises:
            ValueError: `bytes` is not positive, or this is no arena of as many.
            OSError: the kernel refused.
        """

    @property
    def bytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class SlotPoolStats:
    """A snapshot of a pool."""

    @property
    def slots(self) -> int:
        """As many as the whole arena has room for."""

    @property
    def used(self) -> int: ...
    @property
    def free(self) -> int:
        """Slots that can be allocated now."""

    @property
    def largest_free_run(self) -> int:
        """Of neighbours."""

    @property
    def fragmentation(self) -> float:
        """The share of the free slots outside of the largest run; 0 where none is free."""

    @property
    def extents(self) -> int:
        """Parts of the arena that are this pool's."""

    @property
    def extent_bytes(self) -> int: ...

class SlotPool:
    """Slots of one size in an arena that pools with other sizes may share.

    Slot i lies `i * slot_bytes` behind the arena's beginning. A pool takes an extent of the arena
    when it needs room and gives it back when all slots in it are free. After a fork all but
    `slot_bytes` and `num_slots` raise RuntimeError in the child, which shares the memory.
    """

    def __init__(self, arena: Arena, slot_bytes: int) -> None:
        """Keeps `arena` alive.

        Raises:
            ValueError: `slot_bytes` is not positive or no slot fits the arena.
        """

    def allocate(self, count: int) -> list[int] | None:
        """All `count` slots, or None when fewer are free.

        Those of a fresh pool come in address order.

        Raises:
            ValueError: `count` is negative.
        """

    def allocate_run(self, count: int) -> int | None:
        """The first of `count` neighbours, or None where no run is as long.

        Raises:
            ValueError: `count` is below 1.
        """

    def free(self, slots: Sequence[int]) -> None:
        """Gives slots back, all or none.

        Raises:
            ValueError: a slot is not of this pool, or was given back already.
        """

    def read_rows(
        self,
        slots: Sequence[int],
        row_bytes: int,
        start: int,
        length: int,
        destination: int,
        token_stride: int,
        stored: Element = Element.ANY,
        wanted: Element = Element.ANY,
    ) -> None:
        """Copies rows `[start, start + length)` of a run of slots, on the calling thread.

        Args:
            slots: in token order; each holds as many rows as fit.
            row_bytes: bytes of a stored row.
            start: first row, counted from the first slot's first row.
            length: number of rows; may be 0.
            destination: address of the first row; the rows must not overlap the pool.
            token_stride: from one row to the next at the destination, in bytes.
            stored: what the rows' elements are; ANY moves them bit for bit.
            wanted: what they become.

        Raises:
            ValueError: `row_bytes` is not positive or above `slot_bytes`, or `start` or `length`
                is negative.
            IndexError: rows beyond the last slot, or a slot outside the pool. Nothing is copied.
        """

    @property
    def slot_bytes(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_free(self) -> int:
        """Slots that can be allocated now: in extents that are this pool's or nobody's."""

    def stats(self) -> SlotPoolStats: ...

class ChunkTree:
    """Chunks by number, as a forest of prefixes: what is there, and what goes next.

    Leaves go first, before them chunks whose predecessor is gone, among equals the least recently
    used one; not those that are pinned or written to. -1 is no chunk. A number may also stand for
    a key whose chunk is absent while others hang on it. Not thread-safe.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int:
        """Chunks that are present."""

    def add_format(self, pool: SlotPool) -> int:
        """The number of a new format, whose rows are in slots of `pool`."""

    def add_absent(self) -> int:
        """A number for a key whose chunk is absent."""

    def add(self, id: int, parent: int) -> int:
        """Makes an absent chunk present, or a new one for -1; `parent` may be absent, or -1.

        Raises:
            ValueError: it is present. IndexError: no such number.
        """

    def present(self, id: int) -> bool: ...
    def remove(self, id: int) -> None:
        """Drops a present chunk; its slots go once it is neither pinned nor written to."""

    def remove_all(self) -> None: ...
    def take_changes(self) -> list[tuple[int, int]]:
        """Since the last call: what was the first's key is the second's now, -1: nobody's."""

    def fill(
        self,
        id: int,
        format: int,
        layers: Sequence[tuple[int, int]],
        tickets: Sequence[Ticket],
    ) -> None:
        """Gives a present chunk layers as (layer, slot), whole once all of `tickets` are done."""

    def missing(self, id: int, layers: Sequence[int]) -> list[int]:
        """Of `layers` those that are neither there nor on their way; all where it is absent."""

    def holds(self, id: int, layer: int) -> bool:
        """Whether a layer is there, whole."""

    def pin_prefix(self, ids: Sequence[int], layers: Sequence[int]) -> int:
        """Pins the chunks from the front that have all layers, whole: how many."""

    def pin(self, id: int) -> None:
        """Marks a chunk as just used, and holds it, also when it is dropped."""

    def unpin(self, ids: Sequence[int]) -> None:
        """Takes back one pin of each. Raises ValueError where there is none."""

    def runs(self, ids: Sequence[int], layer: int) -> list[tuple[int, list[int]]]:
        """Slots of a layer in order, as (format, slots): an item for each change of format.

        Raises:
            IndexError: a chunk that lacks the layer.
        """

    def tickets(self, ids: Sequence[int], layers: Sequence[int]) -> list[Ticket]:
        """The transfers that still bring some of the layers, or failed to; each once."""

    def settle(self) -> None:
        """Takes note of transfers that have ended; all else sees what was true then."""

    def allocate(self, format: int, count: int) -> list[int] | None:
        """Slots, all or none, evicting as many chunks as that takes; neighbours where there are."""

    def evict(self) -> int:
        """Drops the chunk that goes next; -1 where all are busy."""

    def retire(self, format: int, slots: Sequence[int], tickets: Sequence[Ticket]) -> None:
        """Gives back slots that are no chunk's, once none of `tickets` writes to them."""

    @property
    def num_evicted(self) -> int: ...

class ResultBuffer:
    """Memory for one result: `torch.frombuffer(buffer, dtype=...)`.

    Writable. Goes back to its `ResultPool`, or to the system where it has none, when it and all
    tensors made of it are gone.
    """

    @property
    def bytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def fresh_result(bytes: int) -> ResultBuffer:
    """Memory that goes back to the system, in huge pages where it is large and they can be had.

    Raises:
        ValueError: `bytes` is below 1.
        MemoryError: the kernel refused.
    """

class ResultPoolStats:
    """A snapshot of a pool. Bytes are those of whole buffers."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def in_use_bytes(self) -> int: ...
    @property
    def idle_bytes(self) -> int:
        """Of buffers that wait for the next request."""

    @property
    def hits(self) -> int:
        """Requests that were met with a buffer that was there."""

    @property
    def misses(self) -> int:
        """Requests that were met with fresh memory, below the limit."""

    @property
    def fallbacks(self) -> int:
        """Requests that were refused."""

class ResultPool:
    """Recycles the memory of results, in buffers of sizes that add at most a quarter above 4 KiB.

    In use and idle together never pass the limit. The pool may die before its buffers. After a fork
    all methods raise RuntimeError in the child, whose copies of the buffers stay usable.
    """

    def __init__(self, max_bytes: int) -> None:
        """With a limit of 0 it refuses all.

        Raises:
            ValueError: `max_bytes` is negative.
        """

    def take(self, bytes: int) -> ResultBuffer | None:
        """Memory with whatever the result before left in it; None when those in use leave no room.

        Raises:
            ValueError: `bytes` is below 1.
            MemoryError: the kernel refused fresh memory.
        """

    def stats(self) -> ResultPoolStats: ...

class PoolRows:
    """Bytes of slots that lie side by side, as a buffer that keeps the pool alive.

    Whoever makes one keeps the slots allocated until it dies, which a weak reference tells. It
    exports as writable, because torch warns of others, and must not be written to.
    """

    def __init__(self, pool: SlotPool, slot: int, bytes: int) -> None:
        """`bytes` from the beginning of a slot on.

        Raises:
            IndexError: no such slot, or `bytes` is below 1 or ends outside of the pool.
            RuntimeError: the pool belongs to the parent process.
        """

    @property
    def bytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Ticket:
    """A transfer in flight. Made by a `TransferEngine` only.

    After a fork, one that was pending counts as failed in the child.
    """

    @property
    def done(self) -> bool:
        """Whether all rows have arrived."""

    @property
    def ended(self) -> bool:
        """Whether it is done or failed: source and slots are not touched any more."""

    @property
    def error(self) -> str | None:
        """Why it failed; None while it is pending and when it is done."""

    @property
    def non_finite_rows(self) -> int:
        """Rows with an infinity or a NaN among those moved; 0 where nobody asked to count."""

    def cancel(self) -> None:
        """Asks that what is not on its way yet be left out; returns at once.

        Unless all of it is on its way, the transfer fails once that has run: `wait` tells when.
        """

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the transfer has ended, at most `timeout_s` seconds; returns whether it has.

        Does not raise when the transfer failed: look at `error`.
        """

class Registration:
    """Memory that a device copies to without a detour, more of it piece by piece.

    A thread of its own does that and ends when all is taken or the device refuses. The memory may
    be used meanwhile. The registration ends when it dies.
    """

    @property
    def bytes(self) -> int:
        """How much of the memory, from its beginning on."""

    @property
    def at_work(self) -> bool:
        """Whether there may be more."""

    @property
    def refusal(self) -> str:
        """Why not all of it, in the device's own words; empty where nothing was refused."""

    def wait(self) -> None:
        """Waits until there is no more to come."""

    def stop(self) -> None:
        """Takes no more than the piece in hand, and waits for that; what was taken stays."""

class TransferEngine:
    """Moves rows between paged memory and slots in the background, in the order of acceptance.

    After a fork the child's copy is closed.
    """

    def __init__(
        self,
        lanes: int = 2,
        max_pending: int = 256,
        staging_bytes: int = 67108864,
        threaded: bool = True,
        cuda_device: int | None = None,
        *,
        dma_span_bytes: int = 262144,
        zero_copy: bool = False,
    ) -> None:
        """Starts the engine's threads.

        Args:
            lanes: side streams, each a thread.
            max_pending: transfers accepted and not yet ended.
            staging_bytes: of rows on their way at once; one piece at least is.
            threaded: False leaves it to the caller to drive `poll`.
            cuda_device: number of the device that paged memory is on; None for host memory.
            dma_span_bytes: rows that lie in pieces this long on average go by the copy engine
                alone, without a kernel.
            zero_copy: kernels write to slots, and read them, themselves, where these are
                registered. To be measured against the others.

        Raises:
            ValueError: a number is below 1, no such device.
            RuntimeError: no CUDA in the build, or the device refused.
        """

    def gather(
        self,
        source: PagedView,
        block_ids: Sequence[int],
        pieces: Sequence[Piece],
        pool: SlotPool,
        producer_stream: int = 0,
        wait: bool = True,
        *,
        source_element: Element = Element.ANY,
        stored: Element = Element.ANY,
        count_non_finite: bool = False,
    ) -> Ticket | None:
        """Accepts a transfer of one request's rows into slots; only enqueues.

        Args:
            source: the paged cache.
            block_ids: of the request, in token order.
            pieces: what goes where.
            pool: whose slots are written.
            producer_stream: raw handle of the stream that writes the source; 0 is the device's
                default stream, and for host memory, which has been written by the time of the call.
            wait: at `max_pending` waits for room where True (driving `poll` where nobody does),
                returns None where False.
            source_element: what the source's elements are; ANY moves them bit for bit.
            stored: what they become in the slots.
            count_non_finite: counts rows with an infinity or a NaN: see `Ticket.non_finite_rows`.
                Needs to know the elements.

        Raises:
            ValueError: a negative start or length, more rows than a slot holds, elements that rows
                are not converted between, a producer stream that the device does not know.
            IndexError: a layer, a block or a slot that is not there, tokens beyond the block
                table. Nothing is accepted then.
            RuntimeError: the engine is closed, or belongs to the parent process.
        """

    def scatter(
        self,
        target: PagedView,
        block_ids: Sequence[int],
        pieces: Sequence[Piece],
        pool: SlotPool,
        reader_stream: int = 0,
        wait: bool = True,
        *,
        target_element: Element = Element.ANY,
        stored: Element = Element.ANY,
        count_non_finite: bool = False,
    ) -> Ticket | None:
        """Accepts a transfer of rows from slots into paged memory: `gather` backwards.

        `reader_stream` is the one that last used what is overwritten. No block that is written may
        repeat.
        """

    def copy_rows(
        self,
        rows: PagedView,
        pieces: Sequence[Piece],
        pool: SlotPool,
        producer_stream: int = 0,
        wait: bool = True,
        *,
        rows_element: Element = Element.ANY,
        stored: Element = Element.ANY,
        count_non_finite: bool = False,
    ) -> Ticket | None:
        """Accepts a transfer of rows that are in token order already into slots.

        As `gather` of a view of one block, of shape (1, layers, tokens).
        """

    def register_arena(self, arena: Arena) -> Registration:
        """Has the device copy to the arena without a detour, as far as it takes it.

        Returns at once, while a thread sees to it.
        """

    def poll(self) -> bool:
        """One turn of the state machine; returns whether anything changed."""

    def drain(self) -> None:
        """Waits until everything accepted before the call has ended.

        Raises:
            RuntimeError: the engine belongs to the parent process.
        """

    def close(self) -> None:
        """Refuses new transfers, fails those not wholly enqueued, waits for the rest.

        Idempotent.
        """

    @property
    def pending(self) -> int:
        """Transfers accepted and not yet ended."""
