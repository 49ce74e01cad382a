"""hidden_cache: takes hidden states out of an LLM inference engine, keeps them, hands them on.

The names below are all that a user needs; what they come from is loaded when first asked for, so
that a reader of files does not load the native code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hidden_cache.config import HiddenCacheConfig
    from hidden_cache.errors import HiddenCacheError, SampleRefusedError
    from hidden_cache.keys import Placeholder, TokenChunker
    from hidden_cache.sample_file import cleanup_hidden_states, load_hidden_states, read_metadata
    from hidden_cache.store import HiddenStateStore, open_store

__version__ = "0.1.0"

_HOME = {
    "HiddenCacheConfig": "config",
    "HiddenCacheError": "errors",
    "HiddenStateStore": "store",
    "Placeholder": "keys",
    "SampleRefusedError": "errors",
    "TokenChunker": "keys",
    "cleanup_hidden_states": "sample_file",
    "load_hidden_states": "sample_file",
    "open_store": "store",
    "read_metadata": "sample_file",
}

__all__ = [
    "HiddenCacheConfig",
    "HiddenCacheError",
    "HiddenStateStore",
    "Placeholder",
    "SampleRefusedError",
    "TokenChunker",
    "__version__",
    "cleanup_hidden_states",
    "load_hidden_states",
    "open_store",
    "read_metadata",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
