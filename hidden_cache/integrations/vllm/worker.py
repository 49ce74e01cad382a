"""The worker's side: brings rows of finished requests into the pool and writes the samples."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial

import torch

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import (
    ConfigError,
    HiddenCacheError,
    NonFiniteRowsError,
    PoolFullError,
    QueueFullError,
    TransferError,
)
from hidden_cache.files import SampleLock, cleanup_hidden_states, write_error, write_sample
from hidden_cache.integrations.vllm.messages import Refusal, SaveOrder, StepMetadata
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape
from hidden_cache.lease import Lease
from hidden_cache.store import HiddenStateStore, open_store

logger = logging.getLogger(__name__)

# One write at a time, copied together out of the pool: large enough that the call costs nothing,
# small enough that all writers' buffers together stay far below the pool.
_WINDOW_BYTES = 4 << 20
# vLLM kills workers that are late: what is not written by then is refused.
_SHUTDOWN_S = 4.0


class _TooLateError(Exception):
    """The sample's deadline has passed."""


@dataclass(slots=True)
class _Live:
    """A request that was begun and has no answer yet. Without locks it has none."""

    path: str
    lock: SampleLock | None


@dataclass(slots=True)
class _Due:
    """A sample to make, by when (`time.monotonic`)."""

    order: SaveOrder
    deadline: float


@dataclass(slots=True)
class _Owned:
    """What the one rank that writes has: nobody else opens any of it."""

    store: HiddenStateStore
    paged: torch.Tensor
    writers: ThreadPoolExecutor


class WorkerSide:
    """Runs in a worker's process, on the engine's thread, except where it says otherwise.

    Every rank reports each held request exactly once; rank 0 when its rows are in the pool, the
    others at once.

    Attributes:
        non_finite_rows: rows with an infinity or a NaN that were met so far, where they are looked
            for.
    """

    def __init__(
        self, shape: EngineShape, options: ConnectorOptions, config: HiddenCacheConfig
    ) -> None:
        self._shape = shape
        self._options = options
        self._config = replace(config, chunk_size=shape.chunker(config).chunk_size)
        self._owned: _Owned | None = None
        self._seen_step = -1
        self.non_finite_rows = 0
        self._live: dict[str, _Live] = {}
        self._lost: set[str] = set()  # live, and answered already: they could not be begun
        self._waiting: deque[_Due] = deque()  # no room yet; each holds its blocks
        self._reading: dict[str, Lease] = {}  # rows on their way out of the engine's memory
        self._reportable: set[str] = set()
        self._writes: set[Future[None]] = set()
        self._writes_lock = threading.Lock()

    def own(self, paged: torch.Tensor) -> None:
        """Makes this the rank that writes.

        Args:
            paged: the engine's cache, `[num_blocks, layers, block_size, hidden]`, any strides.

        Raises:
            ConfigError: a cache or a folder that cannot be used. ValueError: a pool too large.
        """
        if paged.dim() != 4 or paged.size(1) != len(self._shape.layer_ids):
            raise ConfigError(
                f"the engine's hidden-states cache has shape {list(paged.shape)}, expected "
                f"[num_blocks, {len(self._shape.layer_ids)}, block_size, hidden]"
            )
        self._options.check_storage()
        store = open_store(self._config)
        assert store is not None, "the connector is not made when it is disabled"
        try:
            store.prepare(paged)
        except (HiddenCacheError, ValueError) as error:
            store.close()
            raise ConfigError(f"the engine's hidden states cannot be taken: {error}") from error
        writers = ThreadPoolExecutor(self._options.num_writer_threads, "hscache-writer")
        self._owned = _Owned(store, paged, writers)

    # --- each step ------------------------------------------------------------------------

    def step(self, news: StepMetadata) -> None:
        """Takes in a step's metadata; again with the same one it only looks for room."""
        if news.step != self._seen_step:
            self._seen_step = news.step
            if self._owned is None:
                self._reportable.update(order.request_id for order in news.saves)
            else:
                self._take_in(news)
        self._start_waiting()

    def reported(self) -> set[str]:
        """The held requests whose blocks may be released now; each once."""
        for request_id in [r for r, lease in self._reading.items() if lease.source_free]:
            del self._reading[request_id]
            self._reportable.add(request_id)
        found, self._reportable = self._reportable, set()
        return found

    def _take_in(self, news: StepMetadata) -> None:
        for request_id, path in news.new_paths.items():
            self._begin(request_id, path)
        for refusal in news.refusals:
            if refusal.request_id in self._lost:
                self._lost.remove(refusal.request_id)
            else:
                self._submit(refusal, partial(self._refuse, refusal))
        # Only who waits for a lock gives up.
        locks = self._options.use_synchronization_lock
        deadline = time.monotonic() + self._options.publish_deadline_s if locks else math.inf
        for order in news.saves:
            if order.request_id in self._lost:
                self._lost.remove(order.request_id)
                self._reportable.add(order.request_id)
            else:
                self._waiting.append(_Due(order, deadline))

    def _begin(self, request_id: str, path: str) -> None:
        # Before the client learns the path, so that it finds a lock to wait for and nothing that an
        # earlier request of that name left.
        lock = None
        try:
            if self._options.use_synchronization_lock:
                lock = SampleLock(path, self._options.root_of(path))
            else:
                cleanup_hidden_states(path, root=self._options.root_of(path))
        except BlockingIOError:
            # Another request has that path: whatever lies there, now or later, is its own.
            logger.error("no sample for request %s: another writer has %s", request_id, path)
            self._lost.add(request_id)
        except OSError as error:
            detail = f"its place could not be taken: {error}"
            self._refuse(Refusal(request_id, path, "write_failed", detail), None)
            self._lost.add(request_id)
        else:
            limit = None if lock is None else lock.open_files_limit
            if limit is None:
                self._live[request_id] = _Live(path, lock)
                return
            detail = (
                f"this process may have {limit} files open and each live request takes one: raise "
                "the limit (ulimit -n), or have fewer requests at once (max_num_seqs)"
            )
            self._refuse(Refusal(request_id, path, "too_many_files", detail), lock)
            self._lost.add(request_id)

    def _start_waiting(self) -> None:
        owned = self._owned
        while self._waiting and self._waiting[0].deadline <= time.monotonic():
            order = self._waiting.popleft().order
            refusal = self._too_late(order)
            self._reportable.add(order.request_id)
            self._submit(refusal, partial(self._refuse, refusal))
        while owned is not None and self._waiting and not self._writers_are_behind():
            order, deadline = self._waiting[0].order, self._waiting[0].deadline
            try:
                lease = owned.store.lease_paged(
                    order.chunks,
                    owned.paged,
                    order.block_ids,
                    layer_idxs=self._shape.layer_ids,
                    stream=_current_stream(owned.paged),
                )
            except QueueFullError:
                return
            except Exception as error:  # refused, whatever it is: the engine goes on
                if isinstance(error, PoolFullError) and error.can_wait:
                    return
                full = isinstance(error, PoolFullError)
                reason = "pool_full" if full else "transfer_failed"
                refusal = Refusal(order.request_id, order.path, reason, str(error))
                self._reportable.add(order.request_id)
                self._submit(refusal, partial(self._refuse, refusal))
            else:
                self._reading[order.request_id] = lease
                self._submit(order, partial(self._write, order, lease, deadline))
            self._waiting.popleft()

    def _writers_are_behind(self) -> bool:
        """Whether as many samples are unwritten as transfers may be pending. More would pile up:
        requests whose rows are all in the pool pass every other limit."""
        with self._writes_lock:
            return len(self._writes) >= self._config.max_pending

    # --- on the writers' threads ----------------------------------------------------------

    def _submit(
        self, request: SaveOrder | Refusal, work: Callable[[SampleLock | None], None]
    ) -> None:
        """Has a writer do the work, and lets go of the request's lock whatever becomes of it."""
        assert self._owned is not None
        live = self._live.pop(request.request_id, None)
        lock = None if live is None else live.lock

        def run() -> None:
            try:
                work(lock)
            except Exception:
                logger.exception("the sample of request %s is lost", request.request_id)
            finally:
                if lock is not None:
                    lock.release()

        def ended(future: Future[None]) -> None:
            with self._writes_lock:
                self._writes.discard(future)
            if future.cancelled():  # by shutdown, and run() with it
                self._refuse(request if isinstance(request, Refusal) else _shut_down(request), lock)
                if lock is not None:
                    lock.release()

        future = self._owned.writers.submit(run)
        with self._writes_lock:
            self._writes.add(future)
        future.add_done_callback(ended)

    def _write(
        self, order: SaveOrder, lease: Lease, deadline: float, lock: SampleLock | None
    ) -> None:
        def give_up() -> None:
            if time.monotonic() >= deadline:
                raise _TooLateError

        def refuse(reason: str, error: Exception) -> Refusal:
            return Refusal(order.request_id, order.path, reason, str(error))

        refusal = None
        try:
            if not lease.wait(None if deadline == math.inf else deadline - time.monotonic()):
                raise _TooLateError
            give_up()
            written = write_sample(
                order.path,
                torch.tensor(order.token_ids, dtype=torch.int64),
                (order.num_tokens, len(lease.layer_idxs), lease.hidden),
                lease.dtype,
                _windows(lease),
                {
                    "model": self._shape.model,
                    "layer_ids": ",".join(map(str, self._shape.layer_ids)),
                    "positions": f"0:{order.num_tokens}",
                    "weights_epoch": str(self._shape.weights_epoch),
                    "request_id": order.request_id,
                    "tokens_from_pool": str(lease.tokens_from_pool),
                },
                non_finite=self._options.non_finite,
                give_up=give_up,
                root=self._options.root_of(order.path),
            )
            self._count_non_finite(written.non_finite_rows)
        except _TooLateError:
            refusal = self._too_late(order)
        except NonFiniteRowsError as error:
            self._count_non_finite(error.rows)
            refusal = refuse("non_finite", error)
        except TransferError as error:
            refusal = refuse("transfer_failed", error)
        except Exception as error:  # whatever it is, who waits gets it as the answer
            refusal = refuse("write_failed", error)
        try:
            if refusal is not None:
                self._refuse(refusal, lock)
        finally:
            lease.release()  # may wait for the transfer: who is refused does not

    def _count_non_finite(self, rows: int) -> None:
        with self._writes_lock:
            self.non_finite_rows += rows

    def _too_late(self, order: SaveOrder) -> Refusal:
        return Refusal(
            order.request_id,
            order.path,
            "deadline",
            f"it was not published within {self._options.publish_deadline_s:g} s after its request "
            "had finished: write to a faster disk, or set hscache_publish_deadline_s higher where "
            "readers wait longer",
        )

    def _refuse(self, refusal: Refusal, lock: SampleLock | None) -> None:
        """On any thread; the lock, where there is one, is released."""
        # A client that went away is no fault of the engine.
        level = logging.INFO if refusal.reason == "aborted" else logging.ERROR
        logger.log(
            level,
            "no sample for request %s: %s: %s",
            refusal.request_id,
            refusal.reason,
            refusal.detail,
        )
        answer = refusal.request_id, refusal.reason, refusal.detail
        try:
            if lock is None:
                root = self._options.root_of(refusal.path)
                write_error(refusal.path, *answer, root=root)
            else:
                lock.refuse(*answer)
        except OSError as error:
            # Who waits for the lock learns it from there.
            logger.error("the reason could not be written to %s.error: %s", refusal.path, error)

    # --- the end --------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Writes what can be written in a few seconds, refuses the rest. Idempotent.

        Requests that are still computed are refused too: nothing of them will come any more.
        """
        owned, self._owned = self._owned, None
        if owned is None:
            return
        for due in self._waiting:
            live = self._live.pop(due.order.request_id, None)
            self._refuse(_shut_down(due.order), None if live is None else live.lock)
        self._waiting.clear()
        for request_id, live in self._live.items():
            detail = "the engine shut down before the request had ended"
            self._refuse(Refusal(request_id, live.path, "shutdown", detail), live.lock)
        self._live.clear()
        with self._writes_lock:
            futures = list(self._writes)
        wait(futures, timeout=_SHUTDOWN_S)
        owned.writers.shutdown(wait=False, cancel_futures=True)
        owned.store.close()


def _current_stream(paged: torch.Tensor) -> int | None:
    """The stream on which the engine has written the rows, where there are streams."""
    if paged.device.type != "cuda":
        return None
    return int(torch.cuda.current_stream(paged.device).cuda_stream)


def _shut_down(order: SaveOrder) -> Refusal:
    return Refusal(
        order.request_id, order.path, "shutdown", "the engine shut down before it was written"
    )


def _windows(lease: Lease) -> Iterator[torch.Tensor]:
    """All rows of a lease in order, through one buffer."""
    token_bytes = len(lease.layer_idxs) * lease.hidden * lease.dtype.itemsize
    window = max(1, min(lease.num_tokens, _WINDOW_BYTES // token_bytes))
    buffer = torch.empty((window, len(lease.layer_idxs), lease.hidden), dtype=lease.dtype)
    for start in range(0, lease.num_tokens, window):
        rows = buffer[: min(window, lease.num_tokens - start)]
        lease.read(start, rows)
        yield rows
