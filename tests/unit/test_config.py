"""Settings: where they come from, which source wins, and what a wrong one says."""

from __future__ import annotations

import logging
import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import ConfigError, PoolFullError, SampleRefusedError


@pytest.fixture(autouse=True)
def _no_settings_around_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("HSCACHE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)


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


def test_an_empty_yaml_file_says_nothing(tmp_path: Path) -> None:
    assert HiddenCacheConfig.from_yaml(write_yaml(tmp_path, "")) == HiddenCacheConfig()


def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"settings.yaml cannot be read as YAML: "):
        HiddenCacheConfig.from_yaml(write_yaml(tmp_path, "a: [1\n"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read as YAML: .*No such file"):
        HiddenCacheConfig.from_yaml(tmp_path / "none.yaml")


def test_an_unknown_bare_key_in_yaml_of_ours_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        HiddenCacheConfig.from_yaml(write_yaml(tmp_path, "hscache_numa: off\npool_bytes: 1\n"))
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}/settings.yaml: unknown key pool_bytes is ignored"
    ]


# LMCache's settings


def test_lmcaches_keys_in_yaml(tmp_path: Path) -> None:
    text = (
        "chunk_size: 128\nenable_hidden_state_cache: true\nmax_hidden_state_cpu_size: 0.5\n"
        "hidden_state_layers: [24, 0]\n"
    )
    assert HiddenCacheConfig.from_yaml(write_yaml(tmp_path, text)) == HiddenCacheConfig(
        chunk_size=128, enabled=True, pool_bytes=512 << 20, layers=(0, 24)
    )


@pytest.mark.parametrize("text", ["chunk_size: 64\n", "max_hidden_state_cpu_size: 1\n"])
def test_a_yaml_of_lmcaches_is_off_unless_told_otherwise(tmp_path: Path, text: str) -> None:
    assert HiddenCacheConfig.from_yaml(write_yaml(tmp_path, text)).enabled is False
    on = text + "hscache_enabled: true\n"
    assert HiddenCacheConfig.from_yaml(write_yaml(tmp_path, on)).enabled is True


def test_lmcaches_defaults_hold_in_its_file(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "enable_hidden_state_cache: true\n")
    assert HiddenCacheConfig.from_yaml(path) == HiddenCacheConfig(
        chunk_size=256, pool_bytes=2 << 30, layers=None
    )


def test_the_file_that_lmcache_reads_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_yaml(tmp_path, "local_cpu: true\nhscache_storage_dtype: bfloat16\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    config = HiddenCacheConfig.from_yaml()
    assert (config.enabled, config.storage_dtype) == (False, "bfloat16")


def test_no_path_and_no_file_of_lmcaches_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a path, or set LMCACHE_CONFIG_FILE"):
        HiddenCacheConfig.from_yaml()


def test_ours_are_stronger_than_lmcaches_and_the_environment_is_stronger_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "enable_hidden_state_cache: true\nchunk_size: 16\nmax_hidden_state_cpu_size: 1\n"
        "hscache_chunk_size: 32\nhscache_max_pending: 7\n"
        "extra_config: {hscache_max_pending: 8, hscache_numa: 1, theirs: 5}\n"
    )
    path = write_yaml(tmp_path, text)
    monkeypatch.setenv("HSCACHE_NUMA", "off")
    monkeypatch.setenv("HSCACHE_POOL_BYTES", "3MiB")
    assert HiddenCacheConfig.from_yaml(path) == HiddenCacheConfig(
        chunk_size=32, max_pending=8, numa="off", pool_bytes=3 << 20
    )


def test_an_unknown_key_of_ours_in_extra_config_says_where(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "chunk_size: 16\nextra_config: {hscache_pool: 1}\n")
    with pytest.raises(ConfigError, match=r"settings.yaml: extra_config: unknown key hscache_pool"):
        HiddenCacheConfig.from_yaml(path)


def test_only_a_misspelling_warns_in_a_file_of_lmcaches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "chunk_size: 16\nremote_url: null\nenable_hidden_states_cache: true\n"
    with caplog.at_level(logging.WARNING):
        HiddenCacheConfig.from_yaml(write_yaml(tmp_path, text))
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}/settings.yaml: unknown key enable_hidden_states_cache is ignored; did you "
        "mean enable_hidden_state_cache?"
    ]


@pytest.mark.parametrize("size", [0, -1, 1e-10])
def test_no_room_while_enabled_is_refused(tmp_path: Path, size: float) -> None:
    text = f"max_hidden_state_cpu_size: {size}\n"
    on = write_yaml(tmp_path, f"{text}enable_hidden_state_cache: true\n")
    with pytest.raises(ConfigError, match=r"must be at least 1.*max_hidden_state_cpu_size"):
        HiddenCacheConfig.from_yaml(on)
    off = write_yaml(tmp_path, f"{text}enable_hidden_state_cache: false\n")
    assert HiddenCacheConfig.from_yaml(off).enabled is False


@pytest.mark.parametrize("given", ["big", ".inf", ".nan", "[1]", "null", "true"])
def test_a_size_that_is_no_number_is_refused(tmp_path: Path, given: str) -> None:
    path = write_yaml(tmp_path, f"max_hidden_state_cpu_size: {given}\n")
    with pytest.raises(ConfigError, match=r"max_hidden_state_cpu_size is .*: set a number of GiB"):
        HiddenCacheConfig.from_yaml(path)


def test_layers_that_are_none_are_refused_by_lmcaches_name(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "hidden_state_layers: [a]\n")
    with pytest.raises(ConfigError, match=r"hidden_state_layers is \['a'\]: set a list of layer"):
        HiddenCacheConfig.from_yaml(path)


def lmcache_config(**settings: Any) -> Any:
    """As much of an `LMCacheEngineConfig` as is looked at."""
    defaults = {
        "chunk_size": 256,
        "enable_hidden_state_cache": False,
        "max_hidden_state_cpu_size": 2.0,
        "hidden_state_layers": None,
        "extra_config": None,
    }
    return SimpleNamespace(**{**defaults, **settings})


def test_a_config_of_lmcaches() -> None:
    given = lmcache_config(
        chunk_size=8,
        enable_hidden_state_cache=True,
        max_hidden_state_cpu_size=1.5,
        hidden_state_layers=[3],
        extra_config={"hscache_storage_dtype": "float8", "theirs": 1},
    )
    assert HiddenCacheConfig.from_lmcache(given) == HiddenCacheConfig(
        chunk_size=8, pool_bytes=3 << 29, layers=(3,), storage_dtype="float8"
    )


def test_a_config_of_lmcaches_is_off_by_default() -> None:
    assert HiddenCacheConfig.from_lmcache(lmcache_config()) == HiddenCacheConfig(
        enabled=False, chunk_size=256, pool_bytes=2 << 30
    )


def test_a_config_of_lmcaches_counts_as_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # LMCache keeps neither from the file: ours are read there, theirs only from the object.
    path = write_yaml(tmp_path, "chunk_size: 16\nhscache_numa: 1\nhscache_max_pending: 5\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    monkeypatch.setenv("HSCACHE_ENABLED", "1")
    given = lmcache_config(chunk_size=32, extra_config={"hscache_max_pending": 6})
    assert HiddenCacheConfig.from_lmcache(given) == HiddenCacheConfig(
        enabled=True, chunk_size=32, pool_bytes=2 << 30, numa=1, max_pending=6
    )


# Layers and storage


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("all", None),
        ([24, 0, 24], (0, 24)),
        ((), ()),
        ("0, 24", (0, 24)),
        ("3", (3,)),
        (3, (3,)),
    ],
)
def test_layers(given: Any, expected: Any) -> None:
    assert HiddenCacheConfig.from_dict({"hscache_layers": given}).layers == expected


@pytest.mark.parametrize("given", ["", "a", "1,,2", [1.0], [True], True, 1.5, [None], {"a": 1}])
def test_what_are_no_layers_is_refused(given: Any) -> None:
    message = f"hscache_layers is {given!r}: set a list of layer indices"
    with pytest.raises(ConfigError, match=re.escape(message)):
        HiddenCacheConfig.from_dict({"hscache_layers": given})


@pytest.mark.parametrize("given", ["", "float32", " BFloat16 ", "float16", "float8"])
def test_storage_dtypes(given: str) -> None:
    config = HiddenCacheConfig.from_dict({"hscache_storage_dtype": given})
    assert config.storage_dtype == given.strip().lower()


@pytest.mark.parametrize("given", ["fp8", "int8", None, 16])
def test_other_storage_dtypes_are_refused(given: Any) -> None:
    message = f'hscache_storage_dtype is {given!r}: set one of "", float32, float16, bfloat16'
    with pytest.raises(ConfigError, match=re.escape(message)):
        HiddenCacheConfig.from_dict({"hscache_storage_dtype": given})


# Errors


def test_errors_survive_the_way_to_another_process() -> None:
    full = pickle.loads(pickle.dumps(PoolFullError("no room", can_wait=True)))
    assert (type(full), str(full), full.can_wait) == (PoolFullError, "no room", True)
    refused = SampleRefusedError("/p", "r", "aborted", "why")
    again = pickle.loads(pickle.dumps(refused))
    assert vars(again) == vars(refused)
    assert str(again) == str(refused)
