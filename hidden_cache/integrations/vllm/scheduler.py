"""The scheduler's side: decides what is saved of which request, and holds blocks meanwhile."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.integrations.vllm.messages import Refusal, SaveOrder, StepMetadata
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_UNFIT = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


class SchedulerSide:
    """Runs in the scheduler's process, on its thread."""

    def __init__(
        self, shape: EngineShape, options: ConnectorOptions, config: HiddenCacheConfig
    ) -> None:
        self._shape = shape
        self._options = options
        self._chunker = shape.chunker(config)
        self._paths: dict[str, str] = {}  # scheduled at least once, not finished
        self._held: set[str] = set()  # finished, blocks not yet released
        self._next = StepMetadata()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """This step's news for the workers."""
        # A request resumed after preemption may be listed as new again: its path stays.
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id not in self._paths:
                path = self._choose_path(request)
                self._paths[request.req_id] = self._next.new_paths[request.req_id] = path
        news = self._next
        self._next = StepMetadata(step=news.step + 1)
        return news

    def _choose_path(self, request: NewRequestData) -> str:
        sampling = request.sampling_params
        extra = (sampling and sampling.extra_args) or {}
        path = self._options.sample_path(request.req_id, extra.get("kv_transfer_params"))
        if path not in self._paths.values():
            return path
        default = self._options.sample_path(request.req_id, None)
        logger.warning(
            "request %s asks for %s, which another one has: its sample goes to %s",
            request.req_id,
            path,
            default,
        )
        return default

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must be held, and what the client is told."""
        path = self._paths.pop(request.request_id, None)
        if path is None:
            return False, None  # never scheduled: there are no rows and nobody has the path
        told = {"hidden_states_path": path}
        order = self._plan(request, path, block_ids)
        if isinstance(order, Refusal):
            self._next.refusals.append(order)
            return False, told
        self._next.saves.append(order)
        self._held.add(request.request_id)
        return True, told

    def _plan(
        self, request: Request, path: str, block_ids: tuple[list[int], ...]
    ) -> SaveOrder | Refusal:
        def refuse(reason: str, detail: str) -> Refusal:
            return Refusal(request.request_id, path, reason, detail)

        if request.status in _UNFIT:
            return refuse("aborted", f"the request ended as {request.status.name}")
        params = request.kv_transfer_params or {}
        if params.get("include_output_tokens", False):
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
            path=path,
            block_ids=list(block_ids[self._shape.group_id]),
            token_ids=token_ids,
            num_tokens=num_tokens,
            chunks=self._chunker.chunks(request.block_hashes, num_tokens),
        )

    def blocks_released(self, request_ids: set[str] | None) -> None:
        """The workers have reported these requests: the engine releases their blocks."""
        self._held -= request_ids or set()

    def has_held_blocks(self) -> bool:
        """Whether blocks of finished requests are about to be released."""
        return bool(self._held)
