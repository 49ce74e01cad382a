"""What the two sides of the connector tell each other in each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hidden_cache.keys import Chunk


@dataclass(slots=True)
class Rows:
    """Rows of a request that are in the engine's cache once this step has run.

    Attributes:
        num_tokens: rows `[0, num_tokens)`.
        first_token, block_ids: the block table from that token on: what was not told before.
        chunks: that can be told by now and were not told before.
        foreign: tokens `[first, end)` whose KV came from elsewhere without their rows: those are
            in the pool, or nowhere.
    """

    num_tokens: int
    first_token: int
    block_ids: list[int]
    chunks: list[Chunk]
    foreign: tuple[int, int] | None = None


@dataclass(slots=True)
class SaveOrder:
    """A finished request whose rows are to be saved.

    Attributes:
        token_ids: of its rows; empty for a prompt of embeddings.
        rows: all of them; None where all were told before.
        reported: its blocks are held until it is reported.
    """

    request_id: str
    path: str
    token_ids: list[int]
    num_tokens: int
    rows: Rows | None
    reported: bool = True


@dataclass(slots=True)
class Refusal:
    """A finished request without a sample. Its blocks are held where it is to be `reported`."""

    request_id: str
    path: str
    reason: str
    detail: str
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Beginning:
    """A request that is scheduled for the first time: where its sample goes, and its prompt."""

    path: str
    prompt_tokens: int


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's news, for the workers.

    Attributes:
        step: tells steps apart: several hooks see the same one.
        beginnings: of requests that are scheduled for the first time.
        preempted: requests that have lost their blocks, and begin again.
        rows: by request.
        endings: of requests that have finished since the step before.
        weights_epoch: of what is computed from this step on.
    """

    step: int = 0
    beginnings: dict[str, Beginning] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    rows: dict[str, Rows] = field(default_factory=dict)
    endings: list[SaveOrder | Refusal] = field(default_factory=list)
    weights_epoch: int = 0


@dataclass(slots=True)
class Progress(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the worker that reads rows.

    Attributes:
        quiet_step: nothing is read, or will be while its request runs, that was told up to there.
        answered: paths at which there is a sample, or a reason, since the last time.
    """

    quiet_step: int
    answered: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Progress:
        assert isinstance(other, Progress)
        quiet_step = min(self.quiet_step, other.quiet_step)
        return Progress(quiet_step, self.answered | other.answered)
