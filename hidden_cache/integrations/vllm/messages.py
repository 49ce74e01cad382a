"""What the scheduler's side tells the worker's side in each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from hidden_cache.keys import Chunk


@dataclass(slots=True)
class SaveOrder:
    """A finished request whose rows are to be saved; its blocks are held until it is reported.

    Attributes:
        chunks: cover rows `[0, num_tokens)`, in order.
        token_ids: of these rows; empty for a prompt of embeddings.
    """

    request_id: str
    path: str
    block_ids: list[int]
    token_ids: list[int]
    num_tokens: int
    chunks: list[Chunk]


@dataclass(slots=True)
class Refusal:
    """A finished request without a sample; its blocks are not held."""

    request_id: str
    path: str
    reason: str
    detail: str


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's news. `step` tells steps apart: several hooks see the same one."""

    step: int = 0
    new_paths: dict[str, str] = field(default_factory=dict)
    saves: list[SaveOrder] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
