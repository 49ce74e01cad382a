"""The worker's side: brings requests' rows into the pool, step by step, while they are computed."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from hidden_cache._native import Ticket
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import (
    ConfigError,
    HiddenCacheError,
    MissingRowsError,
    PoolFullError,
    QueueFullError,
)
from hidden_cache.integrations.vllm.messages import (
    Beginning,
    Progress,
    Refusal,
    Rows,
    SaveOrder,
    StepMetadata,
)
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape
from hidden_cache.integrations.vllm.publisher import Publisher
from hidden_cache.keys import Chunk
from hidden_cache.store import HiddenStateStore, open_store
from hidden_cache.writer import RequestWriter

logger = logging.getLogger(__name__)

# vLLM kills workers that are late: what is not written by then is refused.
_SHUTDOWN_S = 4.0
# How long a preemption waits for reads of the blocks that it takes. The scheduler's side sees to it
# that there are none: this is a second line.
_PREEMPTION_S = 10.0


@dataclass(slots=True)
class _Live:
    """A request whose rows are wanted and which has not ended.

    Attributes:
        writer: takes its rows; None where it has no room in the pool now, and takes all of them at
            its end.
        prompt: tokens of the prompt, for which room is made at once.
        table: the block table as far as it was told.
        num_tokens: rows that are in the engine's cache.
        told_step: the step that told of the last of them.
        chunks, foreign: as told, see `Rows`.
        refusal: reason and detail, once it is known that there will be no sample.
    """

    request_id: str
    prompt: int
    writer: RequestWriter | None = None
    table: list[int] = field(default_factory=list)
    num_tokens: int = 0
    told_step: int = -1
    chunks: list[Chunk] = field(default_factory=list)
    foreign: tuple[int, int] | None = None
    refusal: tuple[str, str] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether there are rows that were not taken."""
        return self.writer is None or self.writer.num_tokens < self.num_tokens


@dataclass(slots=True)
class _Ending:
    """A finished request whose rows are not all taken; its blocks are held."""

    order: SaveOrder
    live: _Live
    deadline: float


@dataclass(slots=True)
class _Owned:
    """What the one rank that saves has: nobody else opens any of it."""

    store: HiddenStateStore
    paged: torch.Tensor
    publisher: Publisher


class WorkerSide:
    """Runs in a worker's process, on the engine's thread.

    Every rank reports each held request exactly once; the one that saves when nothing of it is read
    any more, the others at once.
    """

    def __init__(
        self, shape: EngineShape, options: ConnectorOptions, config: HiddenCacheConfig
    ) -> None:
        self._shape = shape
        self._options = options
        self._config = replace(config, chunk_size=shape.chunker(config).chunk_size)
        self._owned: _Owned | None = None
        self._seen_step = -1
        self._epoch = 0
        self._beginnings: dict[str, Beginning] = {}  # of the step that runs
        self._rows: dict[str, Rows] = {}  # of the step that runs: to be taken once it has
        self._rows_step = -1
        self._live: dict[str, _Live] = {}
        # Of these, those with a writer that has not taken all rows.
        self._behind: dict[str, _Live] = {}
        self._endings: deque[_Ending] = deque()
        self._lacks_room = False  # in the pool, for the first of them
        # What reads the engine's memory: the step that told of the rows, and whose they are.
        self._reading: list[tuple[int, str, Ticket]] = []
        self._held: set[str] = set()  # ended, to be reported once nothing is read
        self._reportable: set[str] = set()

    def own(self, paged: torch.Tensor) -> None:
        """Makes this the rank that saves.

        Args:
            paged: the engine's cache, `[num_blocks, layers, block_size, hidden]`, any strides.

        Raises:
            ConfigError: a cache or a folder that cannot be used. ValueError: a pool too large.
        """
        expected = (len(self._shape.layer_ids), self._shape.block_size)
        if paged.dim() != 4 or tuple(paged.shape[1:3]) != expected:
            raise ConfigError(
                f"the engine's hidden-states cache has shape {list(paged.shape)}, expected "
                f"[num_blocks, {expected[0]}, {expected[1]}, hidden]"
            )
        self._options.check_storage()
        store = open_store(self._config)
        assert store is not None, "the connector is not made when it is disabled"
        try:
            store.prepare(paged)
        except (HiddenCacheError, ValueError) as error:
            store.close()
            raise ConfigError(f"the engine's hidden states cannot be taken: {error}") from error
        samples = Publisher(self._shape, self._options, self._config.max_pending)
        self._owned = _Owned(store, paged, samples)

    # --- each step ------------------------------------------------------------------------

    def take_in(self, news: StepMetadata) -> None:
        """Takes in a step's news: what is told of earlier steps is there, its own rows are not.

        The first hook of a step does, before the step is computed: samples of requests that have
        ended are written meanwhile, and places of those that begin are taken.
        """
        if news.step == self._seen_step:
            return
        self._seen_step = news.step
        if self._owned is None:
            self._reportable.update(e.request_id for e in news.endings if e.reported)
            return
        for request_id, beginning in news.beginnings.items():
            self._owned.publisher.claim(request_id, beginning.path)
        for request_id in news.preempted:
            self._lose_blocks(request_id)
        # Of a step that had no `rows_are_there`.
        self._begin()
        self._take_rows()
        for ending in news.endings:
            self._end(ending)
        self._work_off()
        if news.weights_epoch != self._epoch:
            self._reset(news.preempted)
            self._epoch = news.weights_epoch
        for request_id, beginning in news.beginnings.items():
            self._live[request_id] = live = _Live(request_id, beginning.prompt_tokens)
            self._open_writer(live)
        self._beginnings = news.beginnings
        self._rows, self._rows_step = news.rows, news.step

    def rows_are_there(self) -> None:
        """The step has run, as far as the stream has it: its rows may be read behind it."""
        if self._owned is not None:
            self._begin()
            self._take_rows()
            self._work_off()

    def handle_preemptions(self, news: StepMetadata) -> None:
        """Blocks are about to be taken: sees that nothing of them is read any more."""
        give_up = time.monotonic() + _PREEMPTION_S
        for _, request_id, ticket in self._reading:
            while request_id in news.preempted and not ticket.ended:
                if time.monotonic() > give_up:
                    logger.error("rows of request %s are read for too long", request_id)
                    return
                time.sleep(0.0002)

    def _begin(self) -> None:
        """Before any of them can finish, and its client learn of its path."""
        assert self._owned is not None
        beginnings, self._beginnings = self._beginnings, {}
        for request_id in self._owned.publisher.begin(beginnings) if beginnings else ():
            self._abandon(self._live.pop(request_id))

    def _open_writer(self, live: _Live) -> None:
        """For a request that is not refused; refuses it where others have closed the store."""
        assert self._owned is not None
        try:
            live.writer = self._owned.store.writer(live.request_id, self._shape.layer_ids)
        except HiddenCacheError as error:
            self._refuse_live(live, "transfer_failed", str(error))

    def reported(self) -> set[str]:
        """The held requests whose blocks may be released now; each once."""
        self._look_at_reads()
        found, self._reportable = self._reportable, set()
        return found

    def progress(self) -> Progress | None:
        """What the scheduler's side is told; None from ranks that read nothing."""
        if self._owned is None:
            return None
        self._look_at_reads()
        steps = [step for step, _, _ in self._reading]
        # What was told of and will be read counts too.
        steps += [live.told_step for live in self._behind.values()]
        if self._rows:
            steps.append(self._rows_step)
        quiet_step = min(steps, default=self._seen_step + 1) - 1
        return Progress(quiet_step, self._owned.publisher.take_answered())

    def _look_at_reads(self) -> None:
        self._reading = [read for read in self._reading if not read[2].ended]
        free = self._held - {request_id for _, request_id, _ in self._reading}
        self._held -= free
        self._reportable |= free

    def _lose_blocks(self, request_id: str) -> None:
        """A request was preempted. Rows that were taken are the same when they come again."""
        untaken = self._rows.pop(request_id, None)
        self._behind.pop(request_id, None)
        live = self._live.get(request_id)
        if live is not None:
            live.table, live.num_tokens, live.foreign = [], 0, None
            live.chunks += [] if untaken is None else untaken.chunks  # nobody tells them again

    def _reset(self, preempted: Collection[str]) -> None:
        """Rows of before answer nobody any more, but for those who have them all already."""
        assert self._owned is not None
        complete = [e for e in self._endings if e.live.refusal is None and not e.live.is_behind]
        for ending in complete:
            self._publish(ending)
            self._done(ending)
        self._owned.store.reset()
        for live in [*self._live.values(), *(ending.live for ending in self._endings)]:
            if live.request_id in preempted and live.request_id in self._live:
                self._abandon(live)
                live.chunks = []
                if live.refusal is None:
                    self._open_writer(live)
            else:
                detail = (
                    "the cache was reset, for new weights or for KV that could not be loaded, "
                    "before all of its rows were taken"
                )
                self._refuse_live(live, "reset", detail)

    def _end(self, ending: SaveOrder | Refusal) -> None:
        assert self._owned is not None
        publisher = self._owned.publisher
        live = self._live.pop(ending.request_id, None)
        self._behind.pop(ending.request_id, None)
        if live is None:  # it got no place, and is answered
            if ending.reported:
                self._reportable.add(ending.request_id)
            return
        if isinstance(ending, Refusal) or live.refusal is not None:
            self._abandon(live)
            if not isinstance(ending, Refusal):
                assert live.refusal is not None
                ending = _refusal_of(ending, *live.refusal)
            publisher.refuse(ending)
            if ending.reported:
                self._held.add(ending.request_id)
            return
        if ending.rows is not None:
            self._learn(live, ending.rows, self._seen_step)
        self._endings.append(_Ending(ending, live, publisher.deadline()))

    def _learn(self, live: _Live, rows: Rows, step: int) -> None:
        first = rows.first_token // self._shape.block_size
        live.table[first:] = rows.block_ids
        live.num_tokens, live.told_step = rows.num_tokens, step
        live.chunks += rows.chunks
        live.foreign = rows.foreign

    def _take_rows(self) -> None:
        """Rows that are in the engine's cache now, and those that there was no room for before."""
        rows, self._rows = self._rows, {}
        for request_id, told in rows.items():
            live = self._live.get(request_id)
            if live is None:
                continue
            self._learn(live, told, self._rows_step)
            if live.writer is not None and live.is_behind:
                self._behind[request_id] = live
        for request_id, live in list(self._behind.items()):
            assert live.writer is not None
            try:
                if self._lacks_room:
                    # Who has ended comes first: its blocks are held.
                    self._abandon(live)
                else:
                    self._take(live, live.writer)
            except QueueFullError:
                return
            except PoolFullError as error:
                if not error.can_wait or self._options.when_full == "drop":
                    self._refuse_live(live, "pool_full", str(error))
                else:
                    self._abandon(live)
            self._behind.pop(request_id, None)

    def _work_off(self) -> None:
        """Endings, as far as there is room: in their order, but for those that need none."""
        owned = self._owned
        assert owned is not None
        self._lacks_room = is_blocked = False
        for ending in list(self._endings):
            live = ending.live
            if ending.deadline <= time.monotonic():
                self._abandon(live)
                owned.publisher.refuse_late(ending.order)
                self._done(ending)
                continue
            if live.refusal is None and owned.publisher.are_behind:
                if self._options.when_full == "block":
                    continue
                self._refuse_live(live, "queue_full", self._behind_detail())
            if is_blocked and live.is_behind and live.refusal is None:
                continue
            if self._publish(ending):
                self._done(ending)
            else:
                is_blocked = True

    def _behind_detail(self) -> str:
        return (
            f"{self._config.max_pending} finished requests wait for a writer, as many as may: "
            "write to a faster disk, or set hscache_max_pending higher, or hscache_when_full to "
            "block"
        )

    def _done(self, ending: _Ending) -> None:
        """It has its answer: its blocks are reported once nothing of them is read."""
        self._endings.remove(ending)
        if ending.order.reported:
            self._held.add(ending.order.request_id)

    def _publish(self, ending: _Ending) -> bool:
        """Takes what is missing and has the sample written, or refused; False where there is no
        room now."""
        assert self._owned is not None
        live, order = ending.live, ending.order
        if live.writer is None and live.refusal is None:
            self._open_writer(live)
        try:
            # Also where there are none: so that it is known what they would be.
            if live.writer is not None and (live.is_behind or order.num_tokens == 0):
                self._take(live, live.writer)
        except QueueFullError:
            return False
        except PoolFullError as error:
            if error.can_wait and self._options.when_full == "block":
                self._lacks_room = True
                self._make_room()
                return False
            self._refuse_live(live, "pool_full", str(error))
        if live.writer is not None and live.writer.num_tokens != order.num_tokens:
            there = live.writer.num_tokens
            self._refuse_live(live, "incomplete", f"{there} of {order.num_tokens} rows were told")
        if live.writer is not None:
            try:
                lease = live.writer.finish()
            except HiddenCacheError as error:  # others have reset or closed the store
                self._refuse_live(live, "reset", str(error))
            else:
                self._owned.publisher.publish(order, lease, self._epoch, ending.deadline)
                return True
        assert live.refusal is not None
        self._owned.publisher.refuse(_refusal_of(order, *live.refusal))
        return True

    def _take(self, live: _Live, writer: RequestWriter) -> None:
        """Has the writer take all rows that are there, or refuses the request.

        Raises:
            QueueFullError, PoolFullError: there is no room now.
        """
        assert self._owned is not None
        paged = self._owned.paged
        try:
            if live.foreign is not None and writer.num_tokens < live.foreign[1]:
                self._take_foreign(live, writer, live.foreign)
            elif writer.num_known == 0:
                # Room for all of the prompt: chunks of a layer lie side by side then.
                writer.reserve(paged, live.prompt, live.chunks)
            self._append(live, writer, live.num_tokens)
        except (QueueFullError, PoolFullError):
            raise
        except MissingRowsError as error:
            detail = (
                f"{error}, and their KV came from another connector: if that one carries the "
                "layer of hidden states too, set hscache_rows_come_with_kv to true"
            )
            self._refuse_live(live, "foreign_kv", detail)
        except Exception as error:  # refused, whatever it is: the engine goes on
            self._refuse_live(live, "transfer_failed", str(error))

    def _take_foreign(self, live: _Live, writer: RequestWriter, foreign: tuple[int, int]) -> None:
        """Takes rows up to the end of a range that the engine's cache does not have."""
        assert self._owned is not None
        size = self._config.chunk_size
        first, end = foreign[0] // size * size, -(-foreign[1] // size) * size
        if writer.num_tokens < first:
            self._append(live, writer, min(first, live.num_tokens))
        if live.num_tokens > first:
            chunks = live.chunks[writer.num_known :]
            writer.reserve(self._owned.paged, end, chunks, must_be_there=True)

    def _append(self, live: _Live, writer: RequestWriter, stop: int) -> None:
        assert self._owned is not None
        size = self._shape.block_size
        first = writer.num_tokens // size
        ticket = writer.append_paged(
            self._owned.paged,
            live.table[first : -(-stop // size)],
            stop,
            live.chunks[writer.num_known :],
            first_token=first * size,
        )
        if ticket is not None:
            self._reading.append((live.told_step, live.request_id, ticket))

    def _make_room(self) -> None:
        """Has a request give up its room to the first that has ended: the one that began last, or
        ended last."""
        for live in [*reversed(self._live.values()), *(e.live for e in reversed(self._endings))]:
            if live.writer is not None and live is not self._endings[0].live:
                self._abandon(live)
                return

    def _refuse_live(self, live: _Live, reason: str, detail: str) -> None:
        live.refusal = (reason, detail)
        self._abandon(live)

    def _abandon(self, live: _Live) -> None:
        """Gives up a request's room. Its rows are taken at its end, if it is not refused."""
        if self._behind.get(live.request_id) is live:
            del self._behind[live.request_id]
        if live.writer is not None:
            live.writer.abandon()
            live.writer = None

    # --- the end --------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Writes what can be written in a few seconds, refuses the rest. Idempotent."""
        give_up = time.monotonic() + _SHUTDOWN_S
        if self._owned is not None:
            self._begin()
            owned, self._owned = self._owned, None
            owned.publisher.shutdown(give_up)
            owned.store.close()


def _refusal_of(order: SaveOrder, reason: str, detail: str) -> Refusal:
    return Refusal(order.request_id, order.path, reason, detail, order.reported)
