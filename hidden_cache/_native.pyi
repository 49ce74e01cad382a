"""Arena, slot pool and transfer engine: the native layer under the store.

Memory is given as addresses and sizes in bytes, and nothing here keeps it alive: the caller holds
the tensor behind a view, and the pool that rows go to, until the ticket has ended. Every method is
thread-safe and releases the GIL while it copies or waits.
"""

from collections.abc import Sequence

def why_no_cuda() -> str:
    """Why rows in GPU memory cannot be moved: no CUDA in the build, no driver, no device.

    Empty where they can.
    """

def machine_memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit."""

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
    """One host mapping, backed by the kernel page by page when it is first touched."""

    def __init__(self, bytes: int, memory_limit: int = 0) -> None:
        """Maps `bytes` of memory.

        Args:
            bytes: size.
            memory_limit: what the machine has; 0 asks it.

        Raises:
            ValueError: `bytes` is not positive or above the limit.
            OSError: the kernel refused the mapping.
        """

    @property
    def bytes(self) -> int: ...

class SlotPool:
    """An arena's division into slots of one size, numbered from 0 in address order."""

    def __init__(self, arena: Arena, slot_bytes: int) -> None:
        """Keeps `arena` alive.

        Raises:
            ValueError: `slot_bytes` is not positive or no slot fits the arena.
        """

    def allocate(self, count: int) -> list[int] | None:
        """All `count` slots, or None when fewer are free.

        Slots never used before come in address order.

        Raises:
            ValueError: `count` is negative.
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
    ) -> None:
        """Copies rows `[start, start + length)` of a run of slots, on the calling thread.

        Args:
            slots: in token order; each holds `slot_bytes // row_bytes` rows.
            row_bytes: bytes of a row.
            start: first row, counted from the first slot's first row.
            length: number of rows; may be 0.
            destination: address of the first row; the rows must not overlap the pool.
            token_stride: from one row to the next at the destination, in bytes.

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
    def num_free(self) -> int: ...

class Ticket:
    """A transfer in flight. Made by `TransferEngine.gather` only.

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

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the transfer has ended, at most `timeout_s` seconds; returns whether it has.

        Does not raise when the transfer failed: look at `error`.
        """

class Registration:
    """Pool memory that a device copies to without a detour; ends when it dies."""

    @property
    def bytes(self) -> int:
        """How much of the pool, from its beginning on."""

    @property
    def refusal(self) -> str:
        """Why not all of it, in the device's own words; empty where all was taken."""

class TransferEngine:
    """Copies rows out of paged memory in the background, in the order of acceptance.

    After a fork the child's copy is closed.
    """

    def __init__(
        self,
        lanes: int = 2,
        max_pending: int = 256,
        staging_bytes: int = 67108864,
        threaded: bool = True,
        cuda_device: int | None = None,
    ) -> None:
        """Starts the engine's threads.

        Args:
            lanes: side streams, each a thread.
            max_pending: transfers accepted and not yet ended.
            staging_bytes: of rows on their way at once; one piece at least is.
            threaded: False leaves it to the caller to drive `poll`.
            cuda_device: number of the device that the source is on; None for host memory.

        Raises:
            ValueError: a number is below 1, no such device.
            RuntimeError: no CUDA in the build, or the device refused.
        """

    def gather(
        self,
        source: PagedView,
        block_ids: Sequence[int],
        pieces: Sequence[tuple[int, int, int, int]],
        pool: SlotPool,
        producer_stream: int = 0,
        wait: bool = True,
    ) -> Ticket | None:
        """Accepts a transfer of one request's rows into slots; only enqueues.

        Args:
            source: the paged cache.
            block_ids: of the request, in token order.
            pieces: each is layer (its place on the source's layer axis), first token, number of
                tokens, slot.
            pool: whose slots are written; each piece begins at its slot's first byte.
            producer_stream: raw handle of the stream that writes the source; 0 for host memory,
                which has been written by the time of the call.
            wait: at `max_pending` waits for room where True, returns None where False.

        Raises:
            ValueError: a negative start or length, more rows than a slot holds, a producer stream
                that the device does not know.
            IndexError: a layer, a block or a slot that is not there, tokens beyond the block
                table. Nothing is accepted then.
            RuntimeError: the engine is closed, or belongs to the parent process.
        """

    def register_pool(self, pool: SlotPool) -> Registration:
        """Lets the device copy to the pool without a detour, as far as it takes it."""

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
