"""The drop-in for LMCache, as far as it goes without LMCache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hidden_cache.errors import ConfigError
from hidden_cache.integrations import lmcache, versions
from hidden_cache.keys import Chunk, TokenDatabaseAdapter


@pytest.fixture(autouse=True)
def _no_settings_around_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith(("HSCACHE_", "LMCACHE_"))]:
        monkeypatch.delenv(name)


def installed(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(package: str) -> str:
        if found is None or package != "lmcache":
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr(versions, "version", version)


# Whether it starts


@pytest.mark.parametrize("found", ["0.5.5", "0.6.0", "1.0", None])
def test_a_version_that_was_not_tested_is_refused(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, found)
    with pytest.raises(ConfigError, match=r"LMCache .*tested.*set hscache_allow_untested to true"):
        lmcache.install()


def test_an_engine_whose_store_is_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.5.6")
    engine = SimpleNamespace(config=SimpleNamespace(enable_hidden_state_cache=False))
    with pytest.raises(ConfigError, match="set enable_hidden_state_cache to true"):
        lmcache.install(engine)


def test_an_engines_settings_may_allow_what_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "7.0")
    extra = {"hscache_allow_untested": True}
    engine = SimpleNamespace(config=SimpleNamespace(extra_config=extra))
    # It gets as far as the next check.
    with pytest.raises(ConfigError, match="set enable_hidden_state_cache to true"):
        lmcache.install(engine)


def test_a_file_of_lmcaches_may_allow_what_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 256\nhscache_allow_untested: true\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    installed(monkeypatch, "7.0")
    monkeypatch.setattr(lmcache, "_MODULES", ("none_of_this_name",))
    with pytest.raises(ConfigError, match="LMCache cannot be imported: No module named"):
        lmcache.install()


PLUGIN = """
import sys
from hidden_cache.integrations.lmcache import vllm_plugin
vllm_plugin()
heavy = ("torch", "vllm", "lmcache", "hidden_cache._native", "hidden_cache._ops")
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.parametrize("value", [None, "", "0"])
def test_the_plugin_does_and_loads_nothing_unless_told(value: str | None) -> None:
    variables = {k: v for k, v in os.environ.items() if k != "HSCACHE_LMCACHE"}
    if value is not None:
        variables["HSCACHE_LMCACHE"] = value
    done = subprocess.run(
        [sys.executable, "-c", PLUGIN], capture_output=True, text=True, env=variables
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_plugin_refuses_what_install_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.4.0")
    monkeypatch.setenv("HSCACHE_LMCACHE", "1")
    with pytest.raises(ConfigError, match=r"LMCache 0\.4\.0 "):
        lmcache.vllm_plugin()


def test_vllm_finds_the_plugin() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="hscache_lmcache")
    assert found.load() is lmcache.vllm_plugin


# Keys


def database(hash_func: Any = hash, **attributes: Any) -> Any:
    def process_tokens(tokens: Any) -> Any:
        yield 0, 4, ("key", *tokens[:4])
        yield 4, len(tokens), ("key", *tokens)

    attributes = {"chunk_size": 4, **attributes}
    return SimpleNamespace(process_tokens=process_tokens, hash_func=hash_func, **attributes)


def test_chunks_are_the_databases_own() -> None:
    chunks = TokenDatabaseAdapter(database()).chunks([1, 2, 3, 4, 5])
    keys: list[Any] = [("key", 1, 2, 3, 4), ("key", 1, 2, 3, 4, 5)]
    assert chunks == [Chunk(0, 4, keys[0]), Chunk(4, 5, keys[1])]


@pytest.mark.parametrize("chunk_size", [None, 0])
def test_a_database_that_cuts_at_separators_is_refused(chunk_size: int | None) -> None:
    message = "SimpleNamespace has no chunk size: "
    with pytest.raises(ConfigError, match=re.escape(message) + ".*set enable_blending to false"):
        TokenDatabaseAdapter(database(chunk_size=chunk_size))


def sha256_cbor(_: Any) -> bytes:
    return b""


def xxhash(_: Any) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("hash_func", "seed", "stable"),
    [
        (sha256_cbor, None, True),
        (hash, None, False),
        (hash, "random", False),
        (hash, "0", True),
        (xxhash, None, False),
        (xxhash, "7", True),
    ],
)
def test_keys_are_stable_where_their_hash_is(
    hash_func: Any, seed: str | None, stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert TokenDatabaseAdapter(database(hash_func)).stable is stable
