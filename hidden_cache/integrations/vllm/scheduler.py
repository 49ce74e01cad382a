"""The scheduler's side: decides what is saved of which request, and holds blocks meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.integrations.vllm.messages import (
    Beginning,
    Progress,
    Refusal,
    Rows,
    SaveOrder,
    StepMetadata,
)
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape
from hidden_cache.keys import Chunk

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_UNFIT = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


@dataclass(slots=True)
class _Live:
    """A request that was scheduled at least once and has not finished.

    Attributes:
        with_outputs: rows of output tokens are wanted too.
        told: rows `[0, told)` were told to the workers, with their blocks.
        computed: tokens that were there when it was scheduled, at first or after a preemption.
        chunks_told: chunks, likewise; they outlive a preemption.
        foreign: see `Rows`.
        last_step: the last one whose news had rows of it; -1 before the first.
    """

    request: Request
    path: str
    with_outputs: bool
    told: int = 0
    computed: int = 0
    chunks_told: int = 0
    foreign: tuple[int, int] | None = None
    last_step: int = -1


class SchedulerSide:
    """Runs in the scheduler's process, on its thread."""

    def __init__(
        self, shape: EngineShape, options: ConnectorOptions, config: HiddenCacheConfig
    ) -> None:
        self._shape = shape
        self.options = options
        self._config = config
        self._epoch = 0
        self._chunker = shape.chunker(config)
        self._waiting: dict[str, Request] = {}  # not scheduled yet
        # Tokens, when last asked: in whole blocks of the scheduler's, and all.
        self._local_hits: dict[str, tuple[int, int]] = {}
        # Where the engine's prefix cache has parts of such blocks: all tokens of a request's hit.
        self.whole_hit: Callable[[Request], int] | None = None
        self._live: dict[str, _Live] = {}
        self._held: set[str] = set()  # finished, blocks not yet released
        # Of our group: blocks whose KV came from elsewhere without rows. They may serve others as
        # hits of the engine's own prefix cache.
        self._foreign_blocks: set[int] = set()
        self._paths: set[str] = set()  # that have no answer yet
        self._quiet_step = -1
        # The last step that told rows of a request that has ended after its blocks were taken.
        self._lost_step = -1
        self._next = StepMetadata()

    # --- before a step --------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def local_hit(self, request: Request, num_computed_tokens: int) -> bool:
        """Takes in what the engine's own prefix cache has of a request that is about to be
        scheduled; whether it may be now.

        A reset of the prefix cache takes all running requests' blocks without asking
        `has_pending_block_frees`, and a runner may write to them before any hook of the worker.
        Until nothing is read there any more no request gets blocks.
        """
        whole = num_computed_tokens if self.whole_hit is None else self.whole_hit(request)
        self._local_hits[request.request_id] = num_computed_tokens, whole
        lost = [
            live.last_step
            for live in self._live.values()
            if live.request.status == RequestStatus.PREEMPTED
        ]
        return max([*lost, self._lost_step]) <= self._quiet_step

    def build_connector_meta(self, scheduled: SchedulerOutput) -> StepMetadata:
        """This step's news for the workers."""
        news = self._next
        self._next = StepMetadata(step=news.step + 1)
        for request_id in scheduled.preempted_req_ids or ():
            news.preempted.append(request_id)  # one that was aborted since too
            if request_id in self._live:
                self._live[request_id].told = 0
        news.weights_epoch = self._epoch
        # V1 lists a request that is resumed after a preemption as cached, V2 as new once more.
        for data in scheduled.scheduled_new_reqs:
            self._begin(data.req_id, data.num_computed_tokens, scheduled, news)
        cached = scheduled.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, computed, scheduled, news)
        for request_id, count in scheduled.num_scheduled_tokens.items():
            live = self._live.get(request_id)
            if live is not None:
                self._tell_rows(live, count, scheduled, news)
        return news

    def _begin(
        self,
        request_id: str,
        num_computed_tokens: int,
        scheduled: SchedulerOutput,
        news: StepMetadata,
    ) -> None:
        live = self._live.get(request_id)
        if live is None:
            request = self._waiting.pop(request_id)
            outputs = self.options.wants_outputs(request_id, request.kv_transfer_params)
            live = _Live(request, self._choose_path(request), outputs)
            self._live[request_id] = live
            self._paths.add(live.path)
            news.beginnings[request_id] = Beginning(live.path, request.num_prompt_tokens)
        live.computed = num_computed_tokens
        hits = self._local_hits.pop(request_id, None)
        # Nobody is asked about further turns of a session, whose tokens are there already.
        if hits is not None and not self.options.rows_come_with_kv:
            # What comes from elsewhere is more than the whole hit, and begins at a whole block.
            in_blocks, whole = hits
            local = whole if num_computed_tokens <= whole else in_blocks
            table = self._table(request_id, scheduled)
            live.foreign = self._foreign(table, local, num_computed_tokens)

    def _foreign(self, table: list[int], local: int, computed: int) -> tuple[int, int] | None:
        """The tokens of a request that begins whose rows no step of this engine wrote.

        What is there beyond the engine's own hits came from elsewhere: that connector is not always
        the one that is asked, since the number given to the others is 0. And of the engine's own
        hits those on blocks that came from elsewhere before.
        """
        size = self._shape.block_size
        hits = table[: -(-local // size)]
        places = [place for place, block in enumerate(hits) if block in self._foreign_blocks]
        if local < computed:
            self._foreign_blocks.update(table[local // size : -(-computed // size)])
            return (places[0] * size if places else local), computed
        return (places[0] * size, min((places[-1] + 1) * size, local)) if places else None

    def _table(self, request_id: str, scheduled: SchedulerOutput) -> list[int]:
        """The block table of our group; empty for a request that is not scheduled."""
        state = scheduled.kv_connector_block_state
        block_ids = None if state is None else state.get_block_ids(request_id)
        return [] if block_ids is None else list(block_ids[self._shape.group_id])

    def _choose_path(self, request: Request) -> str:
        """A path that nobody who waits for another sample was told, or will be."""
        path = self.options.sample_path(request.request_id, request.kv_transfer_params)
        name, count = request.request_id, 1
        taken_paths = self._paths | {live.path for live in self._live.values()}
        while path in taken_paths:
            taken, count = path, count + 1
            path = self.options.sample_path(name, None)
            name = f"{request.request_id}-{count}"
            logger.warning(
                "request %s would have %s, which another one has: its sample goes elsewhere",
                request.request_id,
                taken,
            )
        return path

    def _tell_rows(
        self, live: _Live, num_scheduled: int, scheduled: SchedulerOutput, news: StepMetadata
    ) -> None:
        """Rows that this step completes: whole chunks, and the prompt's tail."""
        request = live.request
        known = request.num_prompt_tokens
        if live.with_outputs:
            # The engine also writes rows of tokens that it only guesses. Those below the last
            # token that was accepted are right, whatever of this step will be.
            known = max(known, request.num_tokens - 1)
        stop = min(request.num_computed_tokens + num_scheduled, known)
        if stop < request.num_prompt_tokens or live.with_outputs:
            stop -= stop % self._chunker.chunk_size
        if stop <= live.told:
            return
        table = self._table(request.request_id, scheduled)
        if table:
            news.rows[request.request_id] = self._rows(live, stop, table)
            live.last_step = news.step

    def _rows(self, live: _Live, stop: int, table: list[int]) -> Rows:
        size = self._shape.block_size
        first = live.told // size
        chunks: list[Chunk] = self._chunker.chunks(
            live.request.block_hashes,
            max(stop, live.request.num_prompt_tokens),
            first=live.chunks_told,
        )
        live.told = stop
        live.chunks_told += len(chunks)
        # What is computed now is no block that came from elsewhere any more.
        self._foreign_blocks.difference_update(table[-(-live.computed // size) :])
        return Rows(
            num_tokens=stop,
            first_token=first * size,
            block_ids=table[first : -(-stop // size)],
            chunks=chunks,
            foreign=live.foreign,
        )

    # --- the end of a request -------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must be held, and what the client is told."""
        self._waiting.pop(request.request_id, None)
        self._local_hits.pop(request.request_id, None)
        live = self._live.pop(request.request_id, None)
        if live is None:
            return False, None  # never scheduled: there are no rows and nobody has the path
        if not any(block_ids):
            self._lost_step = max(self._lost_step, live.last_step)
        ending = self._end(live, list(block_ids[self._shape.group_id]))
        self._next.endings.append(ending)
        if ending.reported:
            self._held.add(request.request_id)
        return ending.reported, {"hidden_states_path": live.path}

    def _end(self, live: _Live, table: list[int]) -> SaveOrder | Refusal:
        request = live.request
        computed_blocks = table[-(-live.computed // self._shape.block_size) :]
        self._foreign_blocks.difference_update(computed_blocks)

        def refuse(reason: str, detail: str) -> Refusal:
            # Rows that were told may be read still.
            reading = live.last_step > self._quiet_step
            return Refusal(request.request_id, live.path, reason, detail, reported=reading)

        if request.status in _UNFIT:
            return refuse("aborted", f"the request ended as {request.status.name}")
        if live.with_outputs:
            # The last token was sampled and never an input: it has no row.
            num_tokens = request.num_tokens - 1
            token_ids = list(request.all_token_ids)[:num_tokens]
        else:
            num_tokens = request.num_prompt_tokens
            token_ids = list(request.prompt_token_ids or ())
        if request.prompt_token_ids is None:
            token_ids = []  # a prompt of embeddings: what the engine has in their place is no ids
        if request.num_computed_tokens < num_tokens:
            return refuse(
                "incomplete",
                f"the request ended after {request.num_computed_tokens} of {num_tokens} tokens "
                "were computed",
            )
        return SaveOrder(
            request_id=request.request_id,
            path=live.path,
            token_ids=token_ids,
            num_tokens=num_tokens,
            rows=self._rows(live, num_tokens, table) if live.told < num_tokens else None,
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What the workers have to tell: reads that have ended, requests whose blocks the engine
        releases now."""
        progress = output.kv_connector_worker_meta
        if isinstance(progress, Progress):
            self._quiet_step = max(self._quiet_step, progress.quiet_step)
            self._paths.difference_update(progress.answered)
        if output.invalid_block_ids:
            # KV that could not be loaded: rows that were computed on it may be in the pool.
            self.reset_cache()
        self._held -= output.finished_sending or set()

    def has_pending_block_frees(self) -> bool:
        """Whether the engine should wait for blocks rather than take a running request's.

        Also while rows of running requests may be read: their blocks would be written to.
        """
        reading = any(live.last_step > self._quiet_step for live in self._live.values())
        return reading or bool(self._held)

    def reset_cache(self) -> None:
        """From the next step on rows share nothing with what was before: of other weights."""
        self._epoch += 1
        self._chunker = self._shape.chunker(self._config, self._epoch)
        for live in self._live.values():
            live.told = live.chunks_told = 0
            if live.request.status == RequestStatus.PREEMPTED:
                # It has no rows of before. The workers were told so, if it was not just now.
                self._next.preempted.append(live.request.request_id)
