"""A connector that also writes down what plain torch indexing reads from the same live cache."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch

from hidden_cache.integrations.vllm import HiddenCacheConnector
from hidden_cache.integrations.vllm.messages import SaveOrder, StepMetadata


def index_rows(paged: torch.Tensor, block_ids: list[int], num_tokens: int) -> torch.Tensor:
    """Rows `[num_tokens, layers, hidden]`, the slow and obvious way."""
    positions = torch.arange(num_tokens)
    blocks = torch.tensor(block_ids)[positions // paged.size(2)]
    return paged[blocks, :, positions % paged.size(2)]


class CheckingConnector(HiddenCacheConnector):
    """Leaves `<sample>.expected` beside every sample: `{rows, from_pool}`.

    A chunk met before keeps the rows of the computation that first filled it, as the pool does
    (which in these tests is large enough to evict nothing, unless a test says so).
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._first_rows: dict[Hashable, torch.Tensor] = {}
        self._checked_step = -1

    def _step(self) -> None:
        assert self._worker is not None
        owned = self._worker._owned
        if owned is not None and self.has_connector_metadata():
            news = self._get_connector_metadata()
            assert isinstance(news, StepMetadata)
            if news.step != self._checked_step:
                self._checked_step = news.step
                for order in news.saves:
                    self._write_down(order, owned.paged)
        super()._step()

    def _write_down(self, order: SaveOrder, paged: torch.Tensor) -> None:
        rows = index_rows(paged, order.block_ids, order.num_tokens)
        from_pool = 0
        for chunk in order.chunks:
            if chunk.key is None:
                continue
            if chunk.key in self._first_rows:
                rows[chunk.start : chunk.end] = self._first_rows[chunk.key]
                from_pool += chunk.end - chunk.start
            else:
                self._first_rows[chunk.key] = rows[chunk.start : chunk.end].clone()
        # A test that takes the folder away expects no sample, and so nothing beside it.
        if os.path.isdir(os.path.dirname(order.path)):
            torch.save({"rows": rows, "from_pool": from_pool}, f"{order.path}.expected")
