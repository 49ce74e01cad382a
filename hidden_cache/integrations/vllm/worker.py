"""The worker's side: brings requests' rows into the pool, step by step, while they are computed."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import (
    ConfigError,
    HiddenCacheError,
    MissingRowsError,
    PoolFullError,
    QueueFullError,
)
from hidden_cache.integrations.vllm.messages import (
    Progress,
    Refusal,
    Rows,
    SaveOrder,
    StepMetadata,
)
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape
from hidden_cache.integrations.vllm.samples import Samples
from hidden_cache.keys import Chunk
from hidden_cache.store import HiddenStateStore, open_store
from hidden_cache.writer import RequestWriter

logger = logging.getLogger(__name__)

# vLLM kills workers that are late: what is not written by then is refused.
_SHUTDOWN_S = 4.0
# How long a preemption waits for reads of the blocks that it takes: it never comes to that where
# the engine asks `has_pending_block_frees` first.
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
        last_step: the last one whose news had rows of it.
        chunks, foreign: as told, see `Rows`.
        refusal: reason and detail, once it is known that there will be no sample.
    """

    request_id: str
    prompt: int
    writer: RequestWriter | None
    table: list[int] = field(default_factory=list)
    num_tokens: int = 0
    last_step: int = -1
    chunks: list[Chunk] = field(default_factory=list)
    foreign: tuple[int, int] | None = None
    refusal: tuple[str, str] | None = None

    @property
    def is_behind(self) -> bool:
        return self.writer is None or self.writer.num_tokens < self.num_tokens

    @property
    def will_be_read(self) -> bool:
        """Whether rows that are there will be read before it ends."""
        return self.writer is not None and self.refusal is None and self.is_behind


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
    samples: Samples


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
        self._rows: dict[str, Rows] = {}  # to be taken once the step that told them has run
        self._rows_step = -1
        self._live: dict[str, _Live] = {}
        self._lost: set[str] = set()  # live, and answered already: they could not be begun
        self._endings: deque[_Ending] = deque()
        # Whose rows may be on their way out of the engine's memory, and the step that told them.
        self._reading: list[tuple[int, str, RequestWriter]] = []
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
        samples = Samples(self._shape, self._options, self._config.max_pending)
        self._owned = _Owned(store, paged, samples)

    # --- each step ------------------------------------------------------------------------

    def take_in(self, news: StepMetadata) -> None:
        """Takes in a step's news: what is told of earlier steps is there, its own rows are not."""
        if news.step == self._seen_step:
            return
        self._seen_step = news.step
        if self._owned is None:
            self._reportable.update(e.request_id for e in news.endings if e.reported)
            return
        self._begin_again(news)
        self._take_rows()  # of a step that had no `rows_are_there`
        for request_id, path in news.new_paths.items():
            if self._owned.samples.begin(request_id, path):
                writer = self._owned.store.writer(request_id, self._shape.layer_ids)
                self._live[request_id] = _Live(request_id, news.prompt_lengths[request_id], writer)
            else:
                self._lost.add(request_id)
        for ending in news.endings:
            self._end(ending)
        self._rows, self._rows_step = news.rows, news.step
        self._work_off()

    def rows_are_there(self) -> None:
        """The step has run, as far as the stream has it: its rows may be read behind it."""
        if self._owned is not None:
            self._take_rows()
            self._work_off()

    def handle_preemptions(self, news: StepMetadata) -> None:
        """Blocks are about to be taken: sees that nothing of them is read any more."""
        give_up = time.monotonic() + _PREEMPTION_S
        for _, request_id, writer in self._reading:
            while request_id in news.preempted and not writer.source_free:
                if time.monotonic() > give_up:
                    logger.error("rows of request %s are read for too long", request_id)
                    return
                time.sleep(0.0002)

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
        unread = [live.last_step for live in self._live.values() if live.will_be_read]
        if self._rows:  # the step that runs is told of and not read yet
            unread.append(self._rows_step)
        reading = [step for step, _, _ in self._reading]
        return Progress(min([*unread, *reading], default=self._seen_step + 1) - 1)

    def _look_at_reads(self) -> None:
        self._reading = [read for read in self._reading if not read[2].source_free]
        free = self._held - {request_id for _, request_id, _ in self._reading}
        self._held -= free
        self._reportable |= free

    def _begin_again(self, news: StepMetadata) -> None:
        """Preempted requests have lost their blocks; new weights make old rows stale."""
        assert self._owned is not None
        store = self._owned.store
        is_reset = news.weights_epoch != store.weights_epoch
        if is_reset:
            store.reset(news.weights_epoch)
        for request_id in news.preempted:
            live = self._live.get(request_id)
            if live is None:
                continue
            # Rows that were taken are the same when they are computed again.
            live.table, live.num_tokens, live.foreign = [], 0, None
            if (untaken := self._rows.pop(request_id, None)) is not None:
                live.chunks += untaken.chunks  # nobody tells them again
            if is_reset:
                self._abandon(live)
                live.writer, live.chunks = store.writer(request_id, self._shape.layer_ids), []
        if is_reset:
            for live in self._live.values():
                if live.request_id not in news.preempted:
                    detail = "the weights changed while it was computed"
                    self._refuse_live(live, "weights_changed", detail)

    def _end(self, ending: SaveOrder | Refusal) -> None:
        assert self._owned is not None
        samples = self._owned.samples
        live = self._live.pop(ending.request_id, None)
        if live is None:  # answered already
            self._lost.discard(ending.request_id)
            if ending.reported:
                self._reportable.add(ending.request_id)
            return
        if isinstance(ending, Refusal) or live.refusal is not None:
            self._abandon(live)
            if not isinstance(ending, Refusal):
                assert live.refusal is not None
                ending = _refusal_of(ending, *live.refusal)
            samples.refuse(ending)
            if ending.reported:
                self._held.add(ending.request_id)
            return
        if ending.rows is not None:
            self._learn(live, ending.rows, self._seen_step)
        self._endings.append(_Ending(ending, live, samples.deadline()))

    def _learn(self, live: _Live, rows: Rows, step: int) -> None:
        first = rows.first_token // self._shape.block_size
        live.table[first:] = rows.block_ids
        live.num_tokens = rows.num_tokens
        live.last_step = step
        live.chunks += rows.chunks
        live.foreign = rows.foreign

    def _take_rows(self) -> None:
        """Rows that are in the engine's cache now, and those that there was no room for before."""
        rows, self._rows = self._rows, {}
        for request_id, told in rows.items():
            live = self._live.get(request_id)
            if live is not None:
                self._learn(live, told, self._rows_step)
        for live in self._live.values():
            if live.writer is None or not live.will_be_read:
                continue
            if self._endings:
                # Who has ended comes first: its blocks are held.
                self._abandon(live)
                continue
            try:
                self._take(live, live.writer)
            except QueueFullError:
                return
            except PoolFullError as error:
                if not error.can_wait or self._options.when_full == "drop":
                    self._refuse_live(live, "pool_full", str(error))
                else:
                    self._abandon(live)

    def _work_off(self) -> None:
        """Endings in their order, as far as there is room."""
        owned = self._owned
        assert owned is not None
        while self._endings:
            ending = self._endings[0]
            live, order = ending.live, ending.order
            if ending.deadline <= time.monotonic():
                self._abandon(live)
                owned.samples.refuse_late(order)
            elif owned.samples.are_behind or not self._publish(ending):
                return
            self._endings.popleft()
            if order.reported:
                self._held.add(order.request_id)

    def _publish(self, ending: _Ending) -> bool:
        """Takes what is missing and has the sample written, or refused; False where there is no
        room now."""
        assert self._owned is not None
        live, order, store = ending.live, ending.order, self._owned.store
        try:
            if live.writer is None:
                live.writer = store.writer(order.request_id, self._shape.layer_ids)
            # Also where there are none: so that it is known what they would be.
            if live.is_behind or order.num_tokens == 0:
                self._take(live, live.writer)
        except QueueFullError:
            return False
        except PoolFullError as error:
            if error.can_wait and self._options.when_full == "block":
                self._make_room()
                return False
            self._refuse_live(live, "pool_full", str(error))
        if live.writer is not None and live.writer.num_tokens != order.num_tokens:
            there = live.writer.num_tokens
            self._refuse_live(live, "incomplete", f"{there} of {order.num_tokens} rows were told")
        if live.writer is None:
            assert live.refusal is not None
            self._owned.samples.refuse(_refusal_of(order, *live.refusal))
        else:
            lease = live.writer.finish()
            self._owned.samples.publish(order, lease, store.weights_epoch, ending.deadline)
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
        writer.append_paged(
            self._owned.paged,
            live.table[first : -(-stop // size)],
            stop,
            live.chunks[writer.num_known :],
            first_token=first * size,
        )
        if not writer.source_free:
            self._reading.append((live.last_step, live.request_id, writer))

    def _make_room(self) -> None:
        """Has another request give up its room to the one that ended first: the one that began
        last, or where none is computed the one that ended last."""
        ended = [ending.live for ending in islice(self._endings, 1, None)]
        for live in (*reversed(self._live.values()), *reversed(ended)):
            if live.writer is not None and live.refusal is None:
                self._abandon(live)
                return

    def _refuse_live(self, live: _Live, reason: str, detail: str) -> None:
        live.refusal = (reason, detail)
        self._abandon(live)

    def _abandon(self, live: _Live) -> None:
        """Gives up a request's room. Its rows are taken at its end, if it is not refused."""
        if live.writer is not None:
            live.writer.abandon()
            live.writer = None

    # --- the end --------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Writes what can be written in a few seconds, refuses the rest. Idempotent."""
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.samples.shutdown(_SHUTDOWN_S)
            owned.store.close()


def _refusal_of(order: SaveOrder, reason: str, detail: str) -> Refusal:
    return Refusal(order.request_id, order.path, reason, detail, order.reported)
