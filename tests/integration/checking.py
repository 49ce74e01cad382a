"""A connector that also writes down what plain torch indexing reads from the same live cache."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from hidden_cache.integrations.vllm import HiddenCacheConnector
from hidden_cache.integrations.vllm.messages import Rows, SaveOrder, StepMetadata
from hidden_cache.keys import Chunk


def index_rows(paged: torch.Tensor, block_ids: list[int], num_tokens: int) -> torch.Tensor:
    """Rows `[num_tokens, layers, hidden]`, the slow and obvious way."""
    positions = torch.arange(num_tokens)
    blocks = torch.tensor(block_ids)[positions // paged.size(2)]
    return paged[blocks, :, positions % paged.size(2)]


class CheckingConnector(HiddenCacheConnector):
    """Leaves `<sample>.expected` beside every sample: `{rows, first}`.

    `rows` are what plain indexing found in the live cache when they were told of, `first` the rows
    of the computation that first filled a chunk, by its first token: a chunk that is in the pool
    keeps those. (Pools are large enough here to evict nothing, unless a test says so.)
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._first_rows: dict[Hashable, torch.Tensor] = {}
        self._found: dict[str, torch.Tensor] = {}
        self._chunks: dict[str, list[Chunk]] = {}

    def wait_for_save(self) -> None:
        news = self._news()
        if news is not None:
            for request_id, rows in news.rows.items():
                self._read(request_id, rows)
        super().wait_for_save()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None
        if self._worker._owned is not None:
            assert isinstance(kv_connector_metadata, StepMetadata)
            # Before the sample is there for anybody to compare with.
            for ending in kv_connector_metadata.endings:
                if isinstance(ending, SaveOrder):
                    if ending.rows is not None:
                        self._read(ending.request_id, ending.rows)
                    self._write_down(ending)
                self._found.pop(ending.request_id, None)
                self._chunks.pop(ending.request_id, None)
        super().handle_preemptions(kv_connector_metadata)

    def _news(self) -> StepMetadata | None:
        """This step's, on the rank that saves."""
        assert self._worker is not None
        if self._worker._owned is None or not self.has_connector_metadata():
            return None
        news = self._get_connector_metadata()
        assert isinstance(news, StepMetadata)
        return news

    def _read(self, request_id: str, rows: Rows) -> None:
        assert self._worker is not None
        assert self._worker._owned is not None
        paged = self._worker._owned.paged
        there = self._found.get(request_id, paged.new_empty(0, paged.size(1), paged.size(3)))
        read = index_rows(paged, rows.block_ids, rows.num_tokens - rows.first_token)
        # What was told of before, and perhaps computed again since, has been taken already.
        there = torch.cat([there, read[max(0, len(there) - rows.first_token) :]])
        self._found[request_id] = there
        chunks = self._chunks.setdefault(request_id, [])
        chunks += rows.chunks
        for chunk in chunks:
            if chunk.end <= len(there) and chunk.key not in self._first_rows:
                self._first_rows[chunk.key] = there[chunk.start : chunk.end].clone()

    def _write_down(self, order: SaveOrder) -> None:
        # A test that takes the folder away expects no sample, and so nothing beside it.
        if os.path.isdir(os.path.dirname(order.path)):
            chunks = self._chunks[order.request_id]
            first = {c.start: self._first_rows[c.key] for c in chunks if c.key in self._first_rows}
            written = {"rows": self._found[order.request_id], "first": first}
            torch.save(written, f"{order.path}.expected")


def check_rows(path: str, rows: torch.Tensor) -> None:
    """Whether a sample holds what `CheckingConnector` wrote down for it, bit for bit."""
    written = torch.load(f"{path}.expected")
    expected = written["rows"]
    assert rows.shape == expected.shape
    for start, first in written["first"].items():
        part = slice(start, start + len(first))
        if not torch.equal(rows[part], expected[part]):
            expected[part] = first
    assert torch.equal(rows, expected)
