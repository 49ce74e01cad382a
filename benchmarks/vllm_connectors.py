"""Connectors that `benchmarks/vllm.py` has its engines load."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)

from hidden_cache.integrations.vllm import HiddenCacheConnector
from hidden_cache.integrations.vllm.messages import StepMetadata

# In the folder of samples: one line for each call of a hook, "step hook rows wall own", in
# nanoseconds: what passed, and what the thread itself had of a processor meanwhile.
TIMES = "hook-times.txt"


class SavesNothing(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """What any connector costs the engine: it is called, does nothing and holds no blocks."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "LBNHC"  # as the others ask for, so that the engine is the same


class _Done:
    """Stands for a stream on which all work is done at once, and for an event of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, stream: Any = None) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _empty_like_unpinned(tensor: torch.Tensor, **keywords: Any) -> torch.Tensor:
    keywords.pop("pin_memory", None)
    return _empty_like(tensor, **keywords)


_empty_like = torch.empty_like


class ExampleOnCpu(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """vLLM's own connector. Without a GPU its memory is not pinned and its events, and the stream
    that they are of, have happened: the CPU build has neither. Nothing else is changed."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if torch.cuda.is_available():
            super()._submit_async_write(pending)
            return
        with (
            mock.patch.object(torch, "empty_like", _empty_like_unpinned),
            mock.patch.object(torch.cuda, "Event", _Done),
            mock.patch.object(torch.cuda, "Stream", _Done),
        ):
            super()._submit_async_write(pending)


class Timed(HiddenCacheConnector):
    """Ours, writing down how long the hooks take that the engine calls in each step."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        folder = self._kv_transfer_config.kv_connector_extra_config["shared_storage_path"]
        # Two processes append to it, each line in one write.
        self._times = os.open(Path(folder) / TIMES, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        clocks = _clocks()
        news = super().build_connector_meta(scheduler_output)
        self._write_down(news, "build_connector_meta", clocks, _clocks())
        return news

    def wait_for_save(self) -> None:
        clocks = _clocks()
        super().wait_for_save()
        self._write_down(self._news(), "wait_for_save", clocks, _clocks())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        clocks = _clocks()
        result = super().get_finished(finished_req_ids)
        self._write_down(self._news(), "get_finished", clocks, _clocks())
        return result

    def _news(self) -> KVConnectorMetadata | None:
        return self._get_connector_metadata() if self.has_connector_metadata() else None

    def _write_down(
        self,
        news: KVConnectorMetadata | None,
        hook: str,
        before: tuple[int, int],
        after: tuple[int, int],
    ) -> None:
        if news is None:
            return
        assert isinstance(news, StepMetadata)
        wall, own = after[0] - before[0], after[1] - before[1]
        line = f"{news.step} {hook} {int(bool(news.rows))} {wall} {own}\n"
        os.write(self._times, line.encode())


def _clocks() -> tuple[int, int]:
    return time.perf_counter_ns(), time.thread_time_ns()
