"""`import hidden_cache` is light, and finds all that it names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hidden_cache

IMPORT = """
import sys
import hidden_cache
from hidden_cache import HiddenCacheConfig, HiddenCacheError, SampleRefusedError, TokenChunker
from hidden_cache import cleanup_hidden_states, load_hidden_states, read_metadata
heavy = ("vllm", "lmcache", "transformers", "hidden_cache._native", "hidden_cache._ops")
print([name for name in heavy if name in sys.modules])
"""


def test_what_reads_files_loads_neither_engines_nor_native_code() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_all_names_resolve() -> None:
    assert all(getattr(hidden_cache, name) is not None for name in hidden_cache.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hidden_cache' has no attribute 'nothing'"):
        _ = hidden_cache.nothing
