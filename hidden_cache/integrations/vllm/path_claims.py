"""The places of samples to come: taken before clients learn of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from hidden_cache.integrations.vllm.messages import Beginning, Refusal
from hidden_cache.integrations.vllm.options import ConnectorOptions
from hidden_cache.sample_file import SampleLock, cleanup_hidden_states

logger = logging.getLogger(__name__)

# A network file system takes its time for each place, and takes several at once.
_PLACE_THREADS = 4
# The engine's thread waits until requests that begin have their places; it goes on without them
# where none was taken for so long, or after so long for all that begin in one step.
_PLACE_S, _PLACES_S = 1.0, 4.0
_NO_ANSWER = "its folder did not answer in time: is a network file system gone?"
# Requests that may wait for a folder to come back, to be answered then.
_MOST_LATE = 10_000


@dataclass(frozen=True, slots=True)
class PathClaim:
    """Where a sample goes. Without locks it has none."""

    path: str
    lock: SampleLock | None


class PathClaims:
    """Takes samples' places, on threads of its own: a folder that hangs does not hang the engine.

    Called on the engine's thread.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        refuse: Callable[[Refusal, SampleLock | None], None],
        note_answered: Callable[[str], None],
    ) -> None:
        """`refuse` and `note_answered` are called on any thread: for a request that gets no place,
        and for its path once nothing is done there for it any more."""
        self._options = options
        self._refuse = refuse
        self._note_answered = note_answered
        self._claims: dict[str, Future[PathClaim | None]] = {}  # by path
        self._threads = ThreadPoolExecutor(_PLACE_THREADS, "hscache-place")
        self._late = ThreadPoolExecutor(1, "hscache-late")
        self._lock = threading.Lock()  # of what follows
        self._hanging: set[Future[PathClaim | None]] = set()  # each has one of the threads
        self._num_late = 0

    def claim(self, request_id: str, path: str) -> None:
        """Has a place taken, of a request that is about to begin. `begin` waits for it."""
        self._claims[path] = self._threads.submit(self._take, request_id, path)

    def begin(self, beginnings: Mapping[str, Beginning]) -> dict[str, PathClaim]:
        """Waits until requests have the places that were claimed, before their clients learn of
        them: so that they find a lock to wait for, and nothing that an earlier request of that name
        left.

        Returns:
            The places. The other requests have no sample, and their reason, now or when the folder
            lets it be.
        """
        claims = {name: self._claims.pop(begun.path) for name, begun in beginnings.items()}
        self._await(set(claims.values()))
        places = {}
        for request_id, claim in claims.items():
            path = beginnings[request_id].path
            if claim.cancel():  # nobody has begun with it
                self._answer_late(request_id, path, None)
            elif not claim.done():
                with self._lock:
                    self._hanging.add(claim)
                claim.add_done_callback(partial(self._answer_late, request_id, path))
            elif (place := claim.result()) is not None:
                places[request_id] = place
            else:
                self._note_answered(path)
        return places

    def _await(self, claims: set[Future[PathClaim | None]]) -> None:
        give_up = time.monotonic() + _PLACES_S
        pending = {claim for claim in claims if not claim.done()}
        while pending:
            with self._lock:
                if len(self._hanging) == _PLACE_THREADS:
                    return
            within_s = min(_PLACE_S, give_up - time.monotonic())
            ended, pending = wait(pending, max(0.0, within_s), FIRST_COMPLETED)
            if not ended:
                return

    def shutdown(self) -> None:
        """Nothing more is asked for, and what no thread has begun with is not."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._late.shutdown(wait=False, cancel_futures=True)

    # --- on any thread --------------------------------------------------------------------

    def _take(self, request_id: str, path: str) -> PathClaim | None:
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
        return PathClaim(path, lock)

    def _answer_late(
        self, request_id: str, path: str, claim: Future[PathClaim | None] | None
    ) -> None:
        """Has a request refused that went on without its place: `claim`, that has come at last, or
        None where nobody has begun with it."""
        with self._lock:
            if claim is not None:
                self._hanging.discard(claim)
            is_too_late = claim is None and self._num_late >= _MOST_LATE
            self._num_late += not is_too_late
        if is_too_late:
            logger.error("no sample for request %s: %s", request_id, _NO_ANSWER)
            self._note_answered(path)
            return
        try:
            # On a thread of its own: this one may be the engine's.
            self._late.submit(self._refuse_late, request_id, path, claim)
        except RuntimeError:  # it was shut down
            self._refuse_late(request_id, path, claim)

    def _refuse_late(
        self, request_id: str, path: str, claim: Future[PathClaim | None] | None
    ) -> None:
        place = self._take(request_id, path) if claim is None else claim.result()
        if place is not None:
            self._refuse(Refusal(request_id, path, "write_failed", _NO_ANSWER), place.lock)
        with self._lock:
            self._num_late -= 1
        self._note_answered(path)
