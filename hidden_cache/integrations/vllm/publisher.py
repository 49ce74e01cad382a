"""What becomes of finished requests: samples, or the reasons why there are none."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hidden_cache.errors import NonFiniteRowsError, TransferError
from hidden_cache.integrations.vllm.messages import Beginning, Refusal, SaveOrder
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape
from hidden_cache.integrations.vllm.path_claims import PathClaim, PathClaims
from hidden_cache.lease import Lease
from hidden_cache.sample_file import SampleLock, write_error, write_sample

logger = logging.getLogger(__name__)

# As many reasons at once: each is a small file, and a network file system takes its time.
_REASON_THREADS = 4
# One write at a time, copied together out of the pool: large enough that the call costs nothing,
# small enough that all writers' buffers together stay far below the pool.
_WINDOW_BYTES = 4 << 20


class _TooLateError(Exception):
    """The sample's deadline has passed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """A sample that waits for a writer; see `Publisher.publish`."""

    order: SaveOrder
    lease: Lease
    weights_epoch: int
    deadline: float
    lock: SampleLock | None


class Publisher:
    """Answers whoever waits for a request's sample: once, whatever happens.

    Called on the engine's thread; what touches files runs on threads of its own, so that a disk
    that hangs does not hang the engine.

    Attributes:
        non_finite_rows: rows with an infinity or a NaN that were met so far, where they are looked
            for.
    """

    def __init__(self, shape: EngineShape, options: ConnectorOptions, most_unwritten: int) -> None:
        """`most_unwritten`: finished requests that may wait for a writer."""
        self._shape = shape
        self._options = options
        self._most_unwritten = most_unwritten
        self._claims = PathClaims(options, self._refuse, self._note_answered)
        self._begun: dict[str, PathClaim] = {}  # requests without an answer yet
        # Short work does not wait behind the writers'.
        self._reasons = ThreadPoolExecutor(_REASON_THREADS, "hscache-reason")
        self._writers = ThreadPoolExecutor(options.num_writer_threads, "hscache-writer")
        self._lock = threading.Lock()  # of what follows
        self._idle = threading.Condition(self._lock)
        self._queue: deque[_Write] = deque()
        self._num_turns = 0  # how often a writer will look into the queue
        self._num_writing = 0
        # Refuses what is late in the queue: a thread that sleeps until then, or is woken before.
        self._watch: threading.Thread | None = None
        self._watch_wakes = threading.Condition(self._lock)
        self._watch_sleeps_until = math.inf
        self._is_shut_down = False
        self._answered: set[str] = set()
        self.non_finite_rows = 0

    def claim(self, request_id: str, path: str) -> None:
        """Has a sample's place taken, of a request that is about to begin. `begin` waits for it."""
        self._claims.claim(request_id, path)

    def begin(self, beginnings: Mapping[str, Beginning]) -> list[str]:
        """Waits for the places that were claimed for these requests, before their clients learn of
        them.

        Returns:
            Those that have none. There will be no sample, and this class answers for it.
        """
        places = self._claims.begin(beginnings)
        self._begun |= places
        return [request_id for request_id in beginnings if request_id not in places]

    def take_answered(self) -> set[str]:
        """Paths that have their sample or their reason, since the last call."""
        with self._lock:
            found, self._answered = self._answered, set()
        return found

    def deadline(self) -> float:
        """By when (`time.monotonic`) the sample of a request that ends now is published or refused:
        only who waits for a lock gives up."""
        if not self._options.use_synchronization_lock:
            return math.inf
        return time.monotonic() + self._options.publish_deadline_s

    @property
    def are_behind(self) -> bool:
        """Whether as many samples are unwritten as may be. More would pile up: requests whose rows
        are all in the pool pass every other limit."""
        with self._lock:
            return len(self._queue) + self._num_writing >= self._most_unwritten

    def publish(self, order: SaveOrder, lease: Lease, weights_epoch: int, deadline: float) -> None:
        """Writes a sample once its rows are there, and releases the lease."""
        write = _Write(order, lease, weights_epoch, deadline, self._lock_of(order.request_id))
        with self._lock:
            self._queue.append(write)
            takes_turn = self._num_turns < len(self._queue)
            self._num_turns += takes_turn
            if deadline < self._watch_sleeps_until:
                self._watch_wakes.notify()
        if takes_turn:
            self._writers.submit(self._take_turn)
        if self._watch is None and deadline < math.inf:
            self._watch = threading.Thread(
                target=self._refuse_late_ones, name="hscache-deadlines", daemon=True
            )
            self._watch.start()

    def refuse(self, refusal: Refusal) -> None:
        """Gives the reason to whoever waits."""
        self._say(refusal, self._lock_of(refusal.request_id))

    def refuse_late(self, order: SaveOrder) -> None:
        """Refuses a sample whose deadline has passed."""
        self.refuse(self._too_late(order))

    def _lock_of(self, request_id: str) -> SampleLock | None:
        """Of a request that is about to get its answer."""
        begun = self._begun.pop(request_id, None)
        return None if begun is None else begun.lock

    def shutdown(self, give_up: float) -> None:
        """Writes what can be written until then (`time.monotonic`), refuses the rest. Idempotent.

        Requests that are still computed are refused too: nothing of them will come any more.
        """
        detail = "the engine shut down before its rows were there"
        for request_id, begun in list(self._begun.items()):
            self.refuse(Refusal(request_id, begun.path, "shutdown", detail))
        with self._lock:
            self._idle.wait_for(
                lambda: not self._queue and not self._num_writing,
                max(0.0, give_up - time.monotonic()),
            )
            unwritten = list(self._queue)
            self._queue.clear()
            self._is_shut_down = True
            self._watch_wakes.notify()
        detail = "the engine shut down before it was written"
        for write in unwritten:
            order = write.order
            self._drop(write, Refusal(order.request_id, order.path, "shutdown", detail))
        # What is left of this is short, where the folder answers; where it does not, nothing could
        # be said there anyway, and the locks end with the process.
        self._writers.shutdown(wait=False)
        self._reasons.shutdown(wait=False)
        self._claims.shutdown()

    # --- on any thread --------------------------------------------------------------------

    def _note_answered(self, path: str) -> None:
        with self._lock:
            self._answered.add(path)

    def _say(self, refusal: Refusal, lock: SampleLock | None) -> None:
        try:
            self._reasons.submit(self._answer, refusal, lock)
        except RuntimeError:  # it was shut down
            self._answer(refusal, lock)

    def _drop(self, write: _Write, refusal: Refusal) -> None:
        """Refuses a sample that no writer has begun with."""
        self._say(refusal, write.lock)
        write.lease.release()

    def _refuse_late_ones(self) -> None:
        """Refuses samples that no writer has begun with in time: they may all hang."""
        while True:
            with self._lock:
                if self._is_shut_down:
                    return
                now = time.monotonic()
                late = [write for write in self._queue if write.deadline <= now]
                for write in late:
                    self._queue.remove(write)
                if not late:
                    until = min((write.deadline for write in self._queue), default=math.inf)
                    self._watch_sleeps_until = until
                    self._watch_wakes.wait(None if until == math.inf else until - now)
            for write in late:
                self._drop(write, self._too_late(write.order))

    def _answer(self, refusal: Refusal, lock: SampleLock | None) -> None:
        self._refuse(refusal, lock)
        self._note_answered(refusal.path)

    def _refuse(self, refusal: Refusal, lock: SampleLock | None) -> None:
        """Writes the reason down; the lock, where there is one, is released."""
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
        except Exception as error:
            # Who waits for the lock learns it from there.
            logger.error("the reason could not be written to %s.error: %s", refusal.path, error)

    # --- on the writers' threads ----------------------------------------------------------

    def _take_turn(self) -> None:
        with self._lock:
            self._num_turns -= 1
            if not self._queue:  # the one that it was for was late
                return
            write = self._queue.popleft()
            self._num_writing += 1
        try:
            refusal = self._write(write)
            if refusal is not None:
                self._refuse(refusal, write.lock)
        except Exception:
            logger.exception("the sample of request %s is lost", write.order.request_id)
        finally:
            if write.lock is not None:
                write.lock.release()
            with self._lock:
                self._num_writing -= 1
                self._answered.add(write.order.path)
                self._idle.notify()

    def _write(self, write: _Write) -> Refusal | None:
        """Publishes a sample; the reason, where there is none."""
        order, lease, deadline = write.order, write.lease, write.deadline

        def give_up() -> None:
            if time.monotonic() >= deadline:
                raise _TooLateError

        def refuse(reason: str, error: Exception) -> Refusal:
            return Refusal(order.request_id, order.path, reason, str(error))

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
                    "weights_epoch": str(write.weights_epoch),
                    "request_id": order.request_id,
                    "tokens_from_pool": str(lease.tokens_from_pool),
                },
                non_finite=self._options.non_finite,
                give_up=give_up,
                root=self._options.root_of(order.path),
            )
            with self._lock:
                self.non_finite_rows += written.non_finite_rows
            return None
        except _TooLateError:
            return self._too_late(order)
        except NonFiniteRowsError as error:
            with self._lock:
                self.non_finite_rows += error.rows
            return refuse("non_finite", error)
        except TransferError as error:
            return refuse("transfer_failed", error)
        except Exception as error:  # whatever it is, who waits gets it as the answer
            return refuse("write_failed", error)
        finally:
            lease.release()

    def _too_late(self, order: SaveOrder) -> Refusal:
        return Refusal(
            order.request_id,
            order.path,
            "deadline",
            f"it was not published within {self._options.publish_deadline_s:g} s after its request "
            "had finished: write to a faster disk, or set hscache_publish_deadline_s higher where "
            "readers wait longer",
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
