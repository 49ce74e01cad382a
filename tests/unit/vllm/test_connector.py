"""The connector as vLLM makes it: what it refuses, what it says, what it learns of the engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hidden_cache.errors import ConfigError

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

from hidden_cache.integrations.vllm import HiddenCacheConnector
from hidden_cache.integrations.vllm.options import EngineShape
from tests.unit.vllm.test_scheduler import SHAPE

HASH_BLOCK, SCHEDULER_BLOCK = 16, 64


@pytest.fixture(autouse=True)
def _shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineShape, "of", lambda *_: SHAPE)


@contextmanager
def only_vllm_logs() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """Our logger and vLLM's, which alone has a handler, as in its server."""
    ours, theirs, root = (logging.getLogger(name) for name in ("hidden_cache", "vllm", ""))
    kept = [
        (logger, logger.handlers[:], logger.level, logger.propagate)
        for logger in (ours, theirs, root)
    ]
    for logger, *_ in kept:
        logger.handlers.clear()
    ours.propagate = True
    ours.setLevel(logging.NOTSET)
    theirs.addHandler(logging.NullHandler())
    theirs.setLevel(logging.INFO)
    try:
        yield ours, theirs
    finally:
        for logger, handlers, level, propagate in kept:
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate


def connector(role: KVConnectorRole = KVConnectorRole.SCHEDULER, **extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector_extra_config=extra, is_kv_producer=True)
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    kv_caches: Any = None
    return HiddenCacheConnector(config, role, kv_caches)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hscache_enabled", False, "hscache_enabled is false: leave the connector out"),
        ("hscache_layers", [2], r"hscache_layers is \[2\], .* set eagle_aux_hidden_state_layer"),
        ("hscache_pool_byte", 1, "unknown key hscache_pool_byte; .* hscache_pool_bytes"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connector(**{key: value})


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_it_says_once_where_hidden_states_go(
    role: KVConnectorRole, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        connector(role, shared_storage_path="/data/x", hscache_pool_bytes="1GiB", typo=1)
    expected = [
        "kv_connector_extra_config: unknown key typo is ignored",
        "hidden states of layers 1, 2 go to /data/x, through a pool of 1024 MiB",
    ]
    if role == KVConnectorRole.WORKER:
        expected = []
    assert [r.getMessage() for r in caplog.records if "kv_conn" in r.msg or "go to" in r.msg] == (
        expected
    )


def test_it_logs_as_vllm_does() -> None:
    with only_vllm_logs() as (ours, theirs):
        connector()
        connector()
        assert ours.handlers == theirs.handlers
        assert logging.getLogger("hidden_cache.integrations").getEffectiveLevel() == logging.INFO


def test_a_users_own_logging_stays() -> None:
    with only_vllm_logs() as (ours, _):
        logging.getLogger().addHandler(logging.NullHandler())
        connector()
        assert ours.handlers == []


# Hits of parts of blocks


def hybrid_manager() -> KVCacheManager:
    """Of an engine with state-space layers, whose prefix cache has parts of its large blocks."""
    attention = FullAttentionSpec(
        block_size=SCHEDULER_BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    mamba = MambaSpec(
        block_size=SCHEDULER_BLOCK,
        shapes=((4,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    rows = HiddenStateCacheSpec(
        block_size=HASH_BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32
    )
    groups = [
        KVCacheGroupSpec(["attention"], attention),
        KVCacheGroupSpec(["mamba"], mamba),
        KVCacheGroupSpec(["cache_only_layers.0"], rows),
    ]
    return KVCacheManager(
        KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=1000,
        scheduler_block_size=SCHEDULER_BLOCK,
        hash_block_size=HASH_BLOCK,
        enable_caching=True,
    )


def test_a_hit_of_a_part_of_a_block_is_the_engines_own() -> None:
    """Connectors are told of whole blocks only; what is behind them is no other connector's."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(HASH_BLOCK, sha256)

    def request(name: str, tokens: list[int]) -> Request:
        return Request(name, tokens, SamplingParams(max_tokens=4), None, block_hasher=hasher)

    manager = hybrid_manager()
    made = connector()
    made.bind_kv_cache_manager(manager)
    first = request("first", list(range(100)))
    for computed in (64, 96, 100):
        assert manager.allocate_slots(first, computed - first.num_computed_tokens) is not None
        first.num_computed_tokens = computed
        manager.new_step_starts()
    manager.free(first)
    second = request("second", [*range(100), *range(500, 530)])
    _, hit, _ = manager.get_computed_blocks(second)
    assert hit == 96, "a block of the scheduler's and two of four parts of the next"
    made.get_num_new_matched_tokens(second, hit - hit % SCHEDULER_BLOCK)
    assert made._scheduler._local_hits["second"] == (64, 96)


def test_where_hits_are_whole_blocks_nobody_looks_twice() -> None:
    made = connector()
    manager: Any = SimpleNamespace(
        coordinator=SimpleNamespace(enable_partial_hash_hits=False), block_pool=None
    )
    made.bind_kv_cache_manager(manager)
    assert made._scheduler.whole_hit is None
