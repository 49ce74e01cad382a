"""The drop-in for LMCache: its engines get our `HiddenStateStore` instead of theirs.

Call `install()` in the worker before an engine is built, or `install(engine)` on a live one. Under
vLLM HSCACHE_LMCACHE=1 does the former in every process that vLLM starts.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from typing import Any

from packaging.specifiers import SpecifierSet

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import ConfigError
from hidden_cache.integrations.versions import check_version
from hidden_cache.keys import TokenDatabaseAdapter

__all__ = ["SUPPORTED_LMCACHE", "TokenDatabaseAdapter", "install", "uninstall", "vllm_plugin"]

logger = logging.getLogger(__name__)

SUPPORTED_LMCACHE = SpecifierSet(">=0.5.6,<0.6")
# Where LMCache keeps the name of its class: its home, and the engine, which imported it from there.
_MODULES = ("lmcache.v1.hidden_state_store", "lmcache.v1.cache_engine")

_lock = threading.Lock()
# Modules of LMCache's with the class that they had.
_replaced: list[tuple[Any, type]] = []


def install(engine: Any = None) -> None:
    """Has LMCache use our store; calling it again changes nothing. Thread-safe.

    Args:
        engine: a live `LMCacheEngine`, whose store is replaced by one of ours with the same
            configuration, token database and storage manager. The old one is closed, and what it
            held is gone; nobody may be in the middle of a call to it. Without an engine: every
            engine built from now on in this process.

    Raises:
        ConfigError: LMCache is missing or of a version that was not tested
            (`hscache_allow_untested`), or the engine's settings turn the store off.
    """
    if engine is None:
        in_file = os.environ.get("LMCACHE_CONFIG_FILE")
        settings = HiddenCacheConfig.from_yaml() if in_file else HiddenCacheConfig.from_env()
    else:
        settings = HiddenCacheConfig.from_lmcache(engine.config)
    check_version(
        "LMCache", ("lmcache",), SUPPORTED_LMCACHE, allow_untested=settings.allow_untested
    )
    if engine is not None and not settings.enabled:
        raise ConfigError(
            "the engine's hidden state cache is off: set enable_hidden_state_cache to true in "
            "LMCache's settings, and hscache_enabled nowhere to false"
        )
    from hidden_cache.store import HiddenStateStore

    with _lock:
        if engine is not None:
            _swap(engine, HiddenStateStore)
            return
        for module in _modules():
            if module.HiddenStateStore is not HiddenStateStore:
                _replaced.append((module, module.HiddenStateStore))
                module.HiddenStateStore = HiddenStateStore
    logger.info("LMCache's engines of this process get hidden_cache's store")


def uninstall() -> None:
    """Gives LMCache its own class back, for engines built from now on. Thread-safe."""
    with _lock:
        for module, theirs in _replaced:
            module.HiddenStateStore = theirs
        _replaced.clear()


def vllm_plugin() -> None:
    """What vLLM calls in each of its processes: installs where HSCACHE_LMCACHE is 1."""
    if os.environ.get("HSCACHE_LMCACHE") == "1":
        install()


def _modules() -> list[Any]:
    try:
        return [importlib.import_module(name) for name in _MODULES]
    except ImportError as error:
        raise ConfigError(f"LMCache cannot be imported: {error}") from error


def _swap(engine: Any, ours: type) -> None:
    old = engine.hidden_state_store
    if isinstance(old, ours):
        return
    new = ours(engine.config, engine.token_database)
    # Not there yet on an engine whose post_init() is still to come, which binds it itself.
    if engine.storage_manager is not None:
        new.bind_storage_manager(engine.storage_manager)
    engine.hidden_state_store = new
    if old is not None:
        old.close()
    logger.info("the engine's hidden state store is now hidden_cache's")
