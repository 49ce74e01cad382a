"""The worker's side: brings rows of finished requests into the pool and writes the samples."""

from __future__ import annotations

import logging
import threading
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
    """

    def __init__(
        self, shape: EngineShape, options: ConnectorOptions, config: HiddenCacheConfig
    ) -> None:
        self._shape = shape
        self._options = options
        self._config = replace(config, chunk_size=shape.chunker(config).chunk_size)
        self._owned: _Owned | None = None
        self._seen_step = -1
        self._locks: dict[str, SampleLock] = {}
        self._waiting: deque[SaveOrder] = deque()  # no room yet; each holds its blocks
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
            # Before the client learns the path, so that it finds a lock to wait for and nothing
            # that an earlier request of that name left.
            try:
                if self._options.use_synchronization_lock:
                    self._locks[request_id] = SampleLock(path)
                else:
                    cleanup_hidden_states(path)
            except OSError as error:
                logger.error("no place for the sample of request %s: %s", request_id, error)
        for refusal in news.refusals:
            self._submit(refusal, partial(self._refuse, refusal))
        self._waiting.extend(news.saves)

    def _start_waiting(self) -> None:
        owned = self._owned
        while owned is not None and self._waiting and not self._writers_are_behind():
            order = self._waiting[0]
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
                self._submit(order, partial(self._write, order, lease))
            self._waiting.popleft()

    def _writers_are_behind(self) -> bool:
        """Whether as many samples are unwritten as transfers may be pending. More would pile up:
        requests whose rows are all in the pool pass every other limit."""
        with self._writes_lock:
            return len(self._writes) >= self._config.max_pending

    # --- on the writers' threads ----------------------------------------------------------

    def _submit(self, request: SaveOrder | Refusal, work: Callable[[], None]) -> None:
        """Has a writer do the work, and lets go of the request's lock whatever becomes of it."""
        assert self._owned is not None
        lock = self._locks.pop(request.request_id, None)

        def run() -> None:
            try:
                work()
            except Exception:
                logger.exception("the sample of request %s is lost", request.request_id)
            finally:
                if lock is not None:
                    lock.release()

        def ended(future: Future[None]) -> None:
            with self._writes_lock:
                self._writes.discard(future)
            if future.cancelled():  # by shutdown, and run() with it
                self._refuse(_shut_down(request) if isinstance(request, SaveOrder) else request)
                if lock is not None:
                    lock.release()

        future = self._owned.writers.submit(run)
        with self._writes_lock:
            self._writes.add(future)
        future.add_done_callback(ended)

    def _write(self, order: SaveOrder, lease: Lease) -> None:
        refusal = None
        try:
            lease.wait()
            write_sample(
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
            )
        except TransferError as error:
            refusal = Refusal(order.request_id, order.path, "transfer_failed", str(error))
        except Exception as error:  # whatever it is, who waits gets it as the answer
            refusal = Refusal(order.request_id, order.path, "write_failed", str(error))
        finally:
            lease.release()
        if refusal is not None:
            self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> None:
        # A client that went away is no fault of the engine.
        level = logging.INFO if refusal.reason == "aborted" else logging.ERROR
        logger.log(
            level,
            "no sample for request %s: %s: %s",
            refusal.request_id,
            refusal.reason,
            refusal.detail,
        )
        try:
            write_error(refusal.path, refusal.request_id, refusal.reason, refusal.detail)
        except OSError as error:
            # Who waits learns it from the lock let go without a sample.
            logger.error("the reason could not be written to %s.error: %s", refusal.path, error)

    # --- the end --------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Writes what can be written in a few seconds, refuses the rest. Idempotent."""
        owned, self._owned = self._owned, None
        if owned is None:
            return
        for order in self._waiting:
            self._refuse(_shut_down(order))
        self._waiting.clear()
        with self._writes_lock:
            futures = list(self._writes)
        wait(futures, timeout=_SHUTDOWN_S)
        owned.writers.shutdown(wait=False, cancel_futures=True)
        owned.store.close()
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()


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
