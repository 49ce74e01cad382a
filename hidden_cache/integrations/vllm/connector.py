"""`HiddenCacheConnector`: vLLM's face of hidden_cache. Each side's work is in its own file."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import ConfigError
from hidden_cache.integrations.vllm.messages import StepMetadata
from hidden_cache.integrations.vllm.options import (
    ConnectorOptions,
    EngineShape,
    check_vllm_version,
    warn_of_unknown_keys,
)
from hidden_cache.integrations.vllm.scheduler import SchedulerSide
from hidden_cache.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)


class HiddenCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Saves the hidden states that vLLM's `extract_hidden_states` puts into its paged cache.

    A drop-in for vLLM's `ExampleHiddenStatesConnector`: the same options, the same files, the same
    `kv_transfer_params["hidden_states_path"]`. Rows of chunks that are in the pool already are
    neither gathered nor kept twice.

    vLLM makes one in the scheduler's process and one in each worker. It calls them from one thread.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ConfigError for an engine or options that it cannot work with."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_as_vllm_does()
        extra = self._kv_transfer_config.kv_connector_extra_config
        config = HiddenCacheConfig.from_extra_config(extra)
        check_vllm_version(config.allow_untested)
        if not config.enabled:
            raise ConfigError(
                "hscache_enabled is false: leave the connector out of kv_transfer_config instead"
            )
        if config.layers is not None:
            raise ConfigError(
                f"hscache_layers is {list(config.layers)}, but here the engine's own setting says "
                "which layers: set eagle_aux_hidden_state_layer_ids instead"
            )
        shape = EngineShape.of(vllm_config, kv_cache_config)
        options = ConnectorOptions.from_extra_config(extra)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            warn_of_unknown_keys(extra)
            logger.info(
                "hidden states of layers %s go to %s, through a pool of %d MiB",
                ", ".join(map(str, shape.layer_ids)),
                options.shared_storage_path,
                config.pool_bytes >> 20,
            )
            if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
                logger.warning(
                    "VLLM_ENABLE_V1_MULTIPROCESSING is 0: the engine stops with its last output, "
                    "and samples of requests that end in its last step wait for the next one"
                )
            self._scheduler = SchedulerSide(shape, options, config)
        else:
            self._worker = WorkerSide(shape, options, config)

    # --- worker ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        if not get_pp_group().is_last_rank or get_tensor_model_parallel_rank() != 0:
            return  # every rank has the same rows: the first of the last stage writes
        layers = get_layers_from_vllm_config(
            self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)
        )
        if len(layers) != 1:
            raise ConfigError(
                f"this worker has {len(layers)} caches of extracted hidden states, expected 1: "
                "is the engine's speculative method 'extract_hidden_states'?"
            )
        self._worker.own(kv_caches[next(iter(layers))])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: this connector only saves."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: this connector only saves."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: the engine has put the rows into its cache, from where they are saved."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.take_in(kv_connector_metadata)
        self._worker.handle_preemptions(kv_connector_metadata)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._take_in()
        self._worker.rows_are_there()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        self._take_in()
        return self._worker.reported() or None, None

    def _take_in(self) -> None:
        # Where `handle_preemptions` was not called, the first of the others does it.
        assert self._worker is not None
        if self.has_connector_metadata():
            news = self._get_connector_metadata()
            assert isinstance(news, StepMetadata)
            self._worker.take_in(news)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        return self._worker.progress()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    # --- scheduler ------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self._scheduler is not None
        options = self._scheduler.options
        if kv_cache_manager.coordinator.enable_partial_hash_hits and not options.rows_come_with_kv:
            # Connectors are told of a hit in whole blocks only.
            self._scheduler.whole_hit = lambda request: kv_cache_manager.get_computed_blocks(
                request
            )[1]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        may_start = self._scheduler.local_hit(request, num_computed_tokens)
        return 0 if may_start else None, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Nothing: this connector loads no KV."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.build_connector_meta(scheduler_output)

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        self._scheduler.update_connector_output(connector_output)

    def has_pending_block_frees(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.has_pending_block_frees()

    def reset_cache(self) -> bool | None:
        assert self._scheduler is not None
        self._scheduler.reset_cache()
        return True

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.request_finished(request, block_ids)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout in which a token's layers lie together, as vLLM's own connector asks for.

        A request only: any strides are served.
        """
        return "LBNHC"


def _log_as_vllm_does() -> None:
    """vLLM sets up its own loggers only: what others say lacks time and place, or is lost."""
    ours, theirs = logging.getLogger("hidden_cache"), logging.getLogger("vllm")
    if ours.hasHandlers():  # the user has set up logging
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.propagate = theirs.propagate
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
