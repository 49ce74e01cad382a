"""What becomes of finished requests: samples, or the reasons why there are none."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch

from hidden_cache.errors import NonFiniteRowsError, TransferError
from hidden_cache.files import SampleLock, cleanup_hidden_states, write_error, write_sample
from hidden_cache.integrations.vllm.messages import Beginning, Refusal, SaveOrder
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape
from hidden_cache.lease import Lease

logger = logging.getLogger(__name__)

# The engine's thread waits until requests that begin have their places; it goes on without them
# where none was taken for so long, or after so long for all that begin in one step.
_PLACE_S, _PLACES_S = 1.0, 4.0
_NO_ANSWER = "its folder did not answer in time: is a network file system gone?"
# Requests that may wait for a folder to come back, to be answered then.
_MOST_LATE = 10_000
# One write at a time, copied together out of the pool: large enough that the call costs nothing,
# small enough that all writers' buffers together stay far below the pool.
_WINDOW_BYTES = 4 << 20
# A network file system takes its time for each place, and takes several at once.
_PLACE_THREADS = 4


class _TooLateError(Exception):
    """The sample's deadline has passed."""


@dataclass(slots=True)
class _Begun:
    """A request without an answer yet. Without locks it has none."""

    path: str
    lock: SampleLock | None


class Samples:
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
        self._begun: dict[str, _Begun] = {}
        # By path; None where the folder is not asked for more, because it does not answer.
        self._claims: dict[str, Future[_Begun | None] | None] = {}
        self._is_stuck = False  # no late claim has ended since `begin` gave up
        # Each kind of work has its own threads: none waits behind a longer one, or one that hangs.
        self._places = ThreadPoolExecutor(_PLACE_THREADS, "hscache-place")
        self._reasons = ThreadPoolExecutor(1, "hscache-reason")
        self._writers = ThreadPoolExecutor(options.num_writer_threads, "hscache-writer")
        self._deadlines = ThreadPoolExecutor(1, "hscache-deadline")
        self._lock = threading.Lock()  # of what follows
        # That nobody waits for any more, in their order.
        self._late_claims: dict[Future[_Begun | None], None] = {}
        self._writes: set[Future[None]] = set()
        self._answered: set[str] = set()
        self.non_finite_rows = 0

    def claim(self, request_id: str, path: str) -> None:
        """Has a sample's place taken, of a request that is about to begin. `begin` waits for it."""
        with self._lock:
            may_ask = len(self._late_claims) < _MOST_LATE
        self._claims[path] = (
            self._places.submit(self._take_place, request_id, path) if may_ask else None
        )

    def begin(self, beginnings: Mapping[str, Beginning]) -> list[str]:
        """Waits until requests have the places that were claimed, before their clients learn of
        them: so that they find a lock to wait for, and nothing that an earlier request of that name
        left.

        Returns:
            The requests that have no place: they are answered, now or when the folder lets it be,
            and there will be no sample.
        """
        claims = {name: self._claims.pop(begun.path) for name, begun in beginnings.items()}
        self._await({claim for claim in claims.values() if claim is not None})
        lost = []
        for request_id, claim in claims.items():
            begun = claim.result() if claim is not None and claim.done() else None
            if begun is not None:
                self._begun[request_id] = begun
                continue
            lost.append(request_id)
            path = beginnings[request_id].path
            if claim is None:
                logger.error("no sample for request %s: %s", request_id, _NO_ANSWER)
            elif not claim.done():
                with self._lock:
                    self._late_claims[claim] = None
                claim.add_done_callback(partial(self._answer_late, request_id, path))
                continue
            self._note_answered(path)
        return lost

    def _await(self, claims: set[Future[_Begun | None]]) -> None:
        """Waits until these have ended, or no claim ends any more."""
        give_up = time.monotonic() + _PLACES_S
        pending = {claim for claim in claims if not claim.done()}
        while pending and not self._is_stuck:
            with self._lock:
                late = (claim for claim in self._late_claims if not claim.done())
                # Those that are worked on show as well that the folder answers.
                ahead = set(islice(late, _PLACE_THREADS))
            within_s = min(_PLACE_S, give_up - time.monotonic())
            ended, _ = wait(pending | ahead, max(0.0, within_s), FIRST_COMPLETED)
            pending -= ended
            if not ended:
                self._is_stuck = True
            if not ended or time.monotonic() >= give_up:
                return

    def take_answered(self) -> set[str]:
        """Paths that have their sample or their reason, since the last call."""
        with self._lock:
            found, self._answered = self._answered, set()
        return found

    def deadline(self, ended: float) -> float:
        """By when (`time.monotonic`) the sample of a request that ended then is published or
        refused: only who waits for a lock gives up."""
        if not self._options.use_synchronization_lock:
            return math.inf
        return ended + self._options.publish_deadline_s

    @property
    def are_behind(self) -> bool:
        """Whether as many samples are unwritten as may be. More would pile up: requests whose rows
        are all in the pool pass every other limit."""
        with self._lock:
            return len(self._writes) >= self._most_unwritten

    def publish(self, order: SaveOrder, lease: Lease, weights_epoch: int, deadline: float) -> None:
        """Writes a sample once its rows are there, and releases the lease."""
        lock = self._lock_of(order.request_id)

        def ended(future: Future[None]) -> None:
            with self._lock:
                self._writes.discard(future)
            if future.cancelled():
                lease.release()
                refusal = self._too_late(order)
                if time.monotonic() < deadline:
                    detail = "the engine shut down before it was written"
                    refusal = Refusal(order.request_id, order.path, "shutdown", detail)
                self._reasons.submit(self._answer, refusal, lock)

        future = self._writers.submit(self._publish, order, lease, weights_epoch, deadline, lock)
        with self._lock:
            self._writes.add(future)
        future.add_done_callback(ended)
        if deadline != math.inf:
            self._deadlines.submit(self._cancel_late, future, deadline)

    def refuse(self, refusal: Refusal) -> None:
        """Gives the reason to whoever waits."""
        self._reasons.submit(self._answer, refusal, self._lock_of(refusal.request_id))

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
            writes = list(self._writes)
        wait(writes, timeout=max(0.0, give_up - time.monotonic()))
        self._writers.shutdown(wait=False, cancel_futures=True)
        self._deadlines.shutdown(wait=False, cancel_futures=True)
        # What is left of these is short, where the folder answers; where it does not, nothing
        # could be said there anyway, and the locks end with the process.
        self._places.shutdown(wait=False)
        self._reasons.shutdown(wait=False)

    def _note_answered(self, path: str) -> None:
        with self._lock:
            self._answered.add(path)

    # --- on threads for short work --------------------------------------------------------

    def _cancel_late(self, write: Future[None], deadline: float) -> None:
        """A sample that no writer has begun with by then is refused: they may all hang. Samples
        are given in the order of their deadlines."""
        wait([write], max(0.0, deadline - time.monotonic()))
        write.cancel()

    def _answer_late(self, request_id: str, path: str, claim: Future[_Begun | None]) -> None:
        self._is_stuck = False
        try:
            # The reason is written on another thread: this one may be the engine's.
            self._reasons.submit(self._refuse_late, request_id, path, claim)
        except RuntimeError:  # it was shut down
            self._refuse_late(request_id, path, claim)

    def _refuse_late(self, request_id: str, path: str, claim: Future[_Begun | None]) -> None:
        """The folder has answered at last; the request has gone on without a sample."""
        begun = claim.result()
        if begun is not None:
            self._refuse(Refusal(request_id, path, "write_failed", _NO_ANSWER), begun.lock)
        with self._lock:
            self._late_claims.pop(claim, None)
        self._note_answered(path)

    def _take_place(self, request_id: str, path: str) -> _Begun | None:
        lock = None
        root = self._options.root_of(path)
        try:
            if self._options.use_synchronization_lock:
                lock = SampleLock(path, root)
            else:
                cleanup_hidden_states(path, root=root)
        except BlockingIOError:
            # Another request has that path: whatever lies there, now or later, is its own.
            logger.error("no sample for request %s: another writer has %s", request_id, path)
            return None
        except Exception as error:  # whatever it is, who waits gets it as the answer
            detail = f"its place could not be taken: {error}"
            self._refuse(Refusal(request_id, path, "write_failed", detail), None)
            return None
        limit = None if lock is None else lock.open_files_limit
        if limit is not None:
            detail = (
                f"this process may have {limit} files open and each live request takes one: raise "
                "the limit (ulimit -n), or have fewer requests at once (max_num_seqs)"
            )
            self._refuse(Refusal(request_id, path, "too_many_files", detail), lock)
            return None
        return _Begun(path, lock)

    def _answer(self, refusal: Refusal, lock: SampleLock | None) -> None:
        self._refuse(refusal, lock)
        self._note_answered(refusal.path)

    def _refuse(self, refusal: Refusal, lock: SampleLock | None) -> None:
        """On any of the threads; the lock, where there is one, is released."""
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

    def _publish(
        self,
        order: SaveOrder,
        lease: Lease,
        weights_epoch: int,
        deadline: float,
        lock: SampleLock | None,
    ) -> None:
        try:
            refusal = self._write(order, lease, weights_epoch, deadline)
            if refusal is not None:
                self._refuse(refusal, lock)
        except Exception:
            logger.exception("the sample of request %s is lost", order.request_id)
        finally:
            if lock is not None:
                lock.release()
            self._note_answered(order.path)

    def _write(
        self, order: SaveOrder, lease: Lease, weights_epoch: int, deadline: float
    ) -> Refusal | None:
        """Publishes a sample; the reason, where there is none."""

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
                    "weights_epoch": str(weights_epoch),
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
