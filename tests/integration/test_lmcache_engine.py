"""Our store inside LMCache's real engine, with its real storage manager and token database."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hidden_cache

pytest.importorskip("lmcache", reason="LMCache is not installed: tools/requirements-lmcache.txt")

from lmcache.v1 import cache_engine, hidden_state_store
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata

from hidden_cache.errors import ConfigError
from hidden_cache.integrations import lmcache

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not hasattr(hidden_cache.HiddenStateStore, "store_hidden_states"),
        reason="our store does not have LMCache's methods yet",
    ),
]

CHUNK = 128
LAYERS, HEADS, HEAD_SIZE = 2, 1, 16  # of the KV cache
HIDDEN = 64
PROMPT = list(range(3 * CHUNK))
THEIRS = hidden_state_store.HiddenStateStore

MakeEngine = Callable[..., Any]


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [n for n in os.environ if n.upper().startswith(("HSCACHE_", "LMCACHE_"))]:
        monkeypatch.delenv(name)
    # It would send what machine this is to its makers.
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    yield
    lmcache.uninstall()


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    names = (f"engine-{number}" for number in itertools.count())
    made = []

    def make(*, post_init: bool = True, **settings: Any) -> Any:
        defaults = {
            "chunk_size": CHUNK,
            "local_cpu": True,
            "max_local_cpu_size": 0.05,
            "enable_hidden_state_cache": True,
            "max_hidden_state_cpu_size": 0.05,
        }
        made.append(next(names))
        engine = LMCacheEngineBuilder.get_or_create(
            made[-1],
            LMCacheEngineConfig.from_defaults(**{**defaults, **settings}),
            LMCacheMetadata(
                model_name="m",
                world_size=1,
                local_world_size=1,
                worker_id=0,
                local_worker_id=0,
                kv_dtype=torch.bfloat16,
                kv_shape=(LAYERS, 2, CHUNK, HEADS, HEAD_SIZE),
            ),
            None,
            lambda tensor, source: None,
            lambda value, source: value,
        )
        if post_init:
            engine.post_init()
        return engine

    yield make
    for name in made:
        LMCacheEngineBuilder.destroy(name)


def put_kv(engine: Any) -> list[Any]:
    """KV of the whole prompt; returns the keys of its chunks."""
    keys = [key for _, _, key in engine.token_database.process_tokens(tokens=PROMPT)]
    shape = torch.Size([2, LAYERS, CHUNK, HEADS * HEAD_SIZE])
    manager = engine.storage_manager
    kv = [manager.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in keys]
    manager.batched_put(keys, kv)
    assert [manager.contains(key) for key in keys] == ["LocalCPUBackend"] * 3
    return keys


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(PROMPT), HIDDEN, generator=generator).to(torch.bfloat16)


def check_that_rows_go_with_their_kv(engine: Any) -> None:
    keys = put_kv(engine)
    store = engine.hidden_state_store
    token_ids = torch.tensor(PROMPT)
    assert store.store_hidden_states(token_ids, rows()) == 3
    assert torch.equal(store.retrieve_hidden_states(token_ids), rows().float())

    assert engine.storage_manager.remove(keys[1]) == 1
    assert torch.equal(store.retrieve_hidden_states(token_ids), rows()[:CHUNK].float())
    assert not store.has_chunk(keys[1])
    assert store.num_cached_chunks() == 2


# Installed before the engine


def test_an_engine_built_afterwards_has_our_store(make_engine: MakeEngine) -> None:
    lmcache.install()
    engine = make_engine()
    assert type(engine.hidden_state_store) is hidden_cache.HiddenStateStore
    check_that_rows_go_with_their_kv(engine)


def test_lmcaches_own_store_does_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert type(engine.hidden_state_store) is THEIRS
    check_that_rows_go_with_their_kv(engine)


def test_clearing_the_engines_kv_takes_the_rows(make_engine: MakeEngine) -> None:
    lmcache.install()
    engine = make_engine()
    put_kv(engine)
    engine.hidden_state_store.store_hidden_states(PROMPT, rows())
    engine.storage_manager.clear()
    assert engine.hidden_state_store.retrieve_hidden_states(PROMPT) is None


def test_an_engine_that_is_destroyed_closes_our_store(make_engine: MakeEngine) -> None:
    lmcache.install()
    engine = make_engine()
    put_kv(engine)
    store = engine.hidden_state_store
    store.store_hidden_states(PROMPT, rows())
    engine.close()
    assert store.num_cached_chunks() == 0


def test_an_engine_without_the_cache_gets_none(make_engine: MakeEngine) -> None:
    lmcache.install()
    assert make_engine(enable_hidden_state_cache=False).hidden_state_store is None


def test_both_of_lmcaches_names_are_ours_until_uninstalled() -> None:
    for _ in range(2):  # the second time changes nothing
        lmcache.install()
        assert cache_engine.HiddenStateStore is hidden_cache.HiddenStateStore
        assert hidden_state_store.HiddenStateStore is hidden_cache.HiddenStateStore
    for _ in range(2):
        lmcache.uninstall()
        assert cache_engine.HiddenStateStore is THEIRS
        assert hidden_state_store.HiddenStateStore is THEIRS


def test_vllms_plugin_installs_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lmcache.vllm_plugin()
    assert cache_engine.HiddenStateStore is THEIRS
    monkeypatch.setenv("HSCACHE_LMCACHE", "1")
    lmcache.vllm_plugin()
    assert cache_engine.HiddenStateStore is hidden_cache.HiddenStateStore


# On a live engine


def test_a_live_engines_store_is_swapped(make_engine: MakeEngine) -> None:
    engine = make_engine()
    old = engine.hidden_state_store
    old.store_hidden_states(PROMPT, rows())
    lmcache.install(engine)
    assert type(engine.hidden_state_store) is hidden_cache.HiddenStateStore
    assert old.num_cached_chunks() == 0  # closed
    check_that_rows_go_with_their_kv(engine)


def test_swapping_twice_keeps_the_store(make_engine: MakeEngine) -> None:
    engine = make_engine()
    lmcache.install(engine)
    store = engine.hidden_state_store
    store.store_hidden_states(PROMPT, rows())
    lmcache.install(engine)
    assert engine.hidden_state_store is store
    assert store.num_cached_chunks() == 3


def test_other_engines_keep_theirs(make_engine: MakeEngine) -> None:
    other, engine = make_engine(), make_engine()
    lmcache.install(engine)
    assert type(other.hidden_state_store) is THEIRS
    assert cache_engine.HiddenStateStore is THEIRS


def test_an_engine_may_be_swapped_before_it_has_a_storage_manager(make_engine: MakeEngine) -> None:
    engine = make_engine(post_init=False)
    lmcache.install(engine)
    engine.post_init()
    check_that_rows_go_with_their_kv(engine)


def test_an_engine_without_the_cache_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_hidden_state_cache=False)
    with pytest.raises(ConfigError, match="set enable_hidden_state_cache to true"):
        lmcache.install(engine)
    assert engine.hidden_state_store is None


def test_a_store_that_cannot_be_made_leaves_the_old_one(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    old = engine.hidden_state_store
    monkeypatch.setenv("HSCACHE_POOL_BYTES", str(1 << 60))
    with pytest.raises(ValueError, match=r".+"):
        lmcache.install(engine)
    assert engine.hidden_state_store is old
    assert old.store_hidden_states(PROMPT, rows()) == 3


# Settings


def test_our_settings_come_with_lmcaches(make_engine: MakeEngine) -> None:
    lmcache.install()
    extra = {"hscache_numa": "off", "hscache_touch_pages": "off"}
    store = make_engine(extra_config=extra, hidden_state_layers=[0]).hidden_state_store
    assert (store.config.numa, store.config.touch_pages) == ("off", "off")
    assert store.config.pool_bytes == int(0.05 * 2**30)
    assert store.chunk_size == CHUNK
    assert store.store_hidden_states(PROMPT, rows(), layer_idx=1) == 0
