"""Settings: where they come from, which source wins, and what a wrong one says."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import ConfigError, PoolFullError, SampleRefusedError


@pytest.fixture(autouse=True)
def _no_settings_around_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("HSCACHE_")]:
        monkeypatch.delenv(name)


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


# Sources


def test_defaults() -> None:
    config = HiddenCacheConfig.from_env()
    assert config == HiddenCacheConfig()
    assert config.enabled
    assert config.pool_bytes == 4 << 30
    assert config.result_bytes == 1 << 30


def test_a_dictionary_gives_our_keys_and_leaves_others_alone() -> None:
    settings = {"hscache_chunk_size": 64, "shared_storage_path": "/x", "num_writer_threads": 3}
    assert HiddenCacheConfig.from_dict(settings) == HiddenCacheConfig(chunk_size=64)
    assert HiddenCacheConfig.from_extra_config(settings) == HiddenCacheConfig(chunk_size=64)


def test_the_environment_gives_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSCACHE_POOL_BYTES", "2MiB")
    monkeypatch.setenv("HSCACHE_ENABLED", "off")
    assert HiddenCacheConfig.from_env() == HiddenCacheConfig(enabled=False, pool_bytes=2 << 20)


def test_reserved_names_in_the_environment_are_not_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HSCACHE_BUILD_CUDA", "1")
    monkeypatch.setenv("HSCACHE_LMCACHE", "1")
    assert HiddenCacheConfig.from_env() == HiddenCacheConfig()


def test_yaml_is_weaker_than_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_yaml(tmp_path, "hscache_chunk_size: 32\nhscache_max_pending: 7\nother: 1\n")
    monkeypatch.setenv("HSCACHE_CHUNK_SIZE", "48")
    assert HiddenCacheConfig.from_yaml(path) == HiddenCacheConfig(chunk_size=48, max_pending=7)


def test_the_environment_is_weaker_than_a_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSCACHE_CHUNK_SIZE", "48")
    monkeypatch.setenv("HSCACHE_MAX_PENDING", "9")
    config = HiddenCacheConfig.from_dict({"hscache_chunk_size": 16})
    assert config == HiddenCacheConfig(chunk_size=16, max_pending=9)


# Values


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4k", 4000),
        ("4KiB", 4096),
        (" 3 MiB ", 3 << 20),
        ("2GB", 2 * 10**9),
        ("2Gi", 2 << 30),
    ],
)
def test_sizes_may_have_units(given: Any, expected: int) -> None:
    assert HiddenCacheConfig.from_dict({"hscache_pool_bytes": given}).pool_bytes == expected
    assert HiddenCacheConfig(pool_bytes=given).pool_bytes == expected


@pytest.mark.parametrize("given", ["", "x", "4.5GiB", "4 XiB", "1e9", 4.5, None, True, [4]])
def test_what_is_no_size_is_refused_by_name_and_value(given: Any) -> None:
    message = f"hscache_pool_bytes is {given!r}: set a whole number"
    with pytest.raises(ConfigError, match=re.escape(message)):
        HiddenCacheConfig.from_dict({"hscache_pool_bytes": given})


@pytest.mark.parametrize("given", [True, 1, "1", "true", "Yes", " ON "])
def test_true_is_spelled_in_many_ways(given: Any) -> None:
    assert HiddenCacheConfig.from_dict({"hscache_allow_untested": given}).allow_untested is True


@pytest.mark.parametrize("given", [False, 0, "0", "false", "No", "off"])
def test_false_is_spelled_in_many_ways(given: Any) -> None:
    assert HiddenCacheConfig.from_dict({"hscache_enabled": given}).enabled is False


@pytest.mark.parametrize("given", ["maybe", "", None, 2])
def test_what_is_neither_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=f"hscache_enabled is {given!r}: set true or false"):
        HiddenCacheConfig.from_dict({"hscache_enabled": given})


@pytest.mark.parametrize("name", ["pool_bytes", "staging_bytes", "max_pending"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_start_at_one(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"hscache_{name} is {value}, must be at least 1"):
        HiddenCacheConfig.from_dict({f"hscache_{name}": value})


def test_a_negative_chunk_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="hscache_chunk_size is -2: set a number of tokens"):
        HiddenCacheConfig(chunk_size=-2)


def test_results_may_have_no_memory_but_not_less() -> None:
    assert HiddenCacheConfig(result_bytes=0).result_bytes == 0
    with pytest.raises(ConfigError, match="hscache_result_bytes is -1: set a number of bytes, or"):
        HiddenCacheConfig(result_bytes=-1)


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("touch_pages", "background", "background"),
        ("touch_pages", " OFF ", "off"),
        ("touch_pages", False, "off"),  # as YAML reads a bare off
        ("huge_pages", "hugetlb", "hugetlb"),
        ("huge_pages", False, "off"),
        ("numa", "Auto", "auto"),
        ("numa", False, "off"),
        ("numa", 0, 0),
        ("numa", "12", 12),
        ("huge_pages_timeout_s", 3, 3.0),
        ("huge_pages_timeout_s", "0.5", 0.5),
        ("huge_pages_timeout_s", 0, 0.0),
    ],
)
def test_words_and_seconds(key: str, given: Any, expected: Any) -> None:
    value = getattr(HiddenCacheConfig.from_dict({f"hscache_{key}": given}), key)
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("key", "given", "remedy"),
    [
        ("touch_pages", "on", "set one of background, off"),
        ("touch_pages", True, "set one of background, off"),
        ("huge_pages", "always", "set one of off, advise, hugetlb"),
        ("huge_pages", 1, "set one of off, advise, hugetlb"),
        ("numa", "near", "set one of auto, off, or a node's number"),
        ("numa", -1, "set one of auto, off, or a node's number"),
        ("numa", True, "set one of auto, off, or a node's number"),
        ("huge_pages_timeout_s", -1, "set a number of seconds, 0 or more"),
        ("huge_pages_timeout_s", "soon", "set a number of seconds, 0 or more"),
        ("huge_pages_timeout_s", "nan", "set a number of seconds, 0 or more"),
        ("huge_pages_timeout_s", "inf", "set a number of seconds, 0 or more"),
        ("huge_pages_timeout_s", True, "set a number of seconds, 0 or more"),
        ("huge_pages_timeout_s", None, "set a number of seconds, 0 or more"),
    ],
)
def test_other_words_and_seconds_are_refused(key: str, given: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"hscache_{key} is {given!r}: {remedy}")):
        HiddenCacheConfig.from_dict({f"hscache_{key}": given})


# Keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("hscache_pool_byte", "hscache_pool_bytes"), ("hscache_chunksize", "hscache_chunk_size")],
)
def test_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key {key}; the nearest is {nearest} "):
        HiddenCacheConfig.from_dict({key: 1})


def test_a_key_that_is_only_the_prefix_is_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown key hscache_;"):
        HiddenCacheConfig.from_dict({"hscache_": 1})


def test_an_unknown_key_in_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSCACHE_POOL", "1GiB")
    with pytest.raises(ConfigError, match="environment: unknown key HSCACHE_POOL;"):
        HiddenCacheConfig.from_env()


def test_an_unknown_key_in_yaml_says_where(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "hscache_pool: 1GiB\n")
    with pytest.raises(ConfigError, match=r"settings.yaml: unknown key hscache_pool;"):
        HiddenCacheConfig.from_yaml(path)


def test_yaml_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"settings.yaml holds list, must hold a mapping"):
        HiddenCacheConfig.from_yaml(write_yaml(tmp_path, "- 1\n- 2\n"))


# Errors


def test_errors_survive_the_way_to_another_process() -> None:
    full = pickle.loads(pickle.dumps(PoolFullError("no room", can_wait=True)))
    assert (type(full), str(full), full.can_wait) == (PoolFullError, "no room", True)
    refused = SampleRefusedError("/p", "r", "aborted", "why")
    again = pickle.loads(pickle.dumps(refused))
    assert vars(again) == vars(refused)
    assert str(again) == str(refused)
