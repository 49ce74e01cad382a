"""`HiddenCacheConfig`: every setting of ours, from YAML, the environment or an engine's config.

Keys are `hscache_<name>` in YAML, dictionaries and a connector's extra config, and
`HSCACHE_<NAME>` in the environment. Strength grows YAML < environment < dictionary. LMCache's own
names for settings of the store are read where LMCache's settings are: in its YAML and its config.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hidden_cache.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "hscache_"
# Environment names that are no settings: of the build, the drop-in and the tests.
_RESERVED = ("BUILD_", "LMCACHE", "SEED", "FUZZ_", "STRESS_", "REQUESTS", "REPLAYS", "EXAMPLES")
# The environment's name for LMCache's settings file.
_LMCACHE_FILE = "LMCACHE_CONFIG_FILE"
# What a setting that is a word may be.
_WORDS = {
    "touch_pages": ("background", "off"),
    "huge_pages": ("off", "advise", "hugetlb"),
    "numa": ("auto", "off"),
    "storage_dtype": ("", "float32", "float16", "bfloat16", "float8"),
    "non_finite": ("refuse", "mark", "allow"),
    "when_full": ("block", "drop"),
}
# Settings of the vLLM connector and their kinds: it reads them where it reads the store's, in an
# engine's extra config and in the environment.
_CONNECTOR_KINDS: dict[str, type] = {
    "custom_path_root": os.PathLike,
    "non_finite": str,
    "publish_deadline_s": float,
    "rows_come_with_kv": bool,
    "when_full": str,
}
# LMCache's names for settings of the store, and what holds where its file does not give them.
_LMCACHE_DEFAULTS = {
    "chunk_size": 256,
    "enable_hidden_state_cache": False,
    "max_hidden_state_cpu_size": 2.0,
    "hidden_state_layers": None,
}
# How like one of them another key must be to be taken for a misspelling, between 0 and 1: LMCache
# has a hundred keys more, and none of these comes near it.
_MISSPELLED = 0.75
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, slots=True)
class HiddenCacheConfig:
    """The settings of a store.

    Attributes:
        enabled: off means that nothing is allocated and no thread is started.
        chunk_size: tokens in a chunk, the unit of keys and eviction. 0 leaves the choice to the
            integration: 256, or the next multiple of the engine's hash block.
        pool_bytes: host memory of the pool. Also takes text such as "4GiB".
        staging_bytes: the most that is on its way from the engine to the pool at once.
        max_pending: the most transfers accepted and not yet ended.
        result_bytes: host memory for results, taken as they are asked for and recycled when they
            die; those beyond it get fresh memory. 0 recycles none.
        touch_pages: "background" has the pool's memory backed by threads that end when all of it
            is, from the first rows on; "off" leaves it to whoever writes a page first.
        huge_pages: "off", "advise" (the kernel makes huge pages where it finds room) or "hugetlb"
            (of those set aside on the machine). What cannot be had is plain pages.
        huge_pages_timeout_s: how long touching asks for huge pages with "advise"; what is not
            touched by then gets plain ones.
        numa: "auto" has the pool on the GPU's NUMA node, a number on that node, "off" wherever the
            kernel likes.
        layers: the only layers that `store_hidden_states` keeps; rows of others are dropped. None
            keeps all. Also takes text such as "0, 24", and "all" for None.
        storage_dtype: what rows are kept as: "float32", "float16", "bfloat16", "float8" (with a
            scale for each row), or "" for as they are given.
        allow_untested: start with versions of vLLM and LMCache that were not tested.
    """

    enabled: bool = True
    chunk_size: int = 0
    pool_bytes: int = 4 << 30
    staging_bytes: int = 64 << 20
    max_pending: int = 256
    result_bytes: int = 1 << 30
    touch_pages: str = "background"
    huge_pages: str = "off"
    huge_pages_timeout_s: float = 10.0
    numa: str | int = "auto"
    layers: tuple[int, ...] | None = None
    storage_dtype: str = ""
    allow_untested: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _parse(field.name, getattr(self, field.name), type(field.default))
            object.__setattr__(self, field.name, value)
        if self.chunk_size < 0:
            raise ConfigError(
                f"{PREFIX}chunk_size is {self.chunk_size}: set a number of tokens, or 0 for the "
                "default"
            )
        # LMCache's users turn the store off with any size.
        if self.enabled and self.pool_bytes < 1:
            raise ConfigError(
                f"{PREFIX}pool_bytes is {self.pool_bytes}, must be at least 1 while the store is "
                "enabled: set a size (max_hidden_state_cpu_size in LMCache's settings), or turn "
                f"the store off ({PREFIX}enabled, enable_hidden_state_cache)"
            )
        if self.result_bytes < 0:
            raise ConfigError(
                f"{PREFIX}result_bytes is {self.result_bytes}: set a number of bytes, or 0 to "
                "recycle none"
            )
        for name in ("staging_bytes", "max_pending"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{PREFIX}{name} is {value}, must be at least 1")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> HiddenCacheConfig:
        """From `hscache_*` keys over the environment; other keys are not ours and are left alone.

        Raises:
            ConfigError: an unknown key of ours (it names the nearest), a value of the wrong kind.
        """
        return cls(**(_from_environment() | _ours(settings, "setting")))

    # An engine's extra config is a dictionary of settings like any other.
    from_extra_config = from_dict

    @classmethod
    def from_env(cls) -> HiddenCacheConfig:
        """From `HSCACHE_*` alone. Raises as `from_dict` does."""
        return cls.from_dict({})

    @classmethod
    def from_yaml(cls, path: str | Path | None = None) -> HiddenCacheConfig:
        """From a YAML file under the environment: `hscache_*` keys, also in its `extra_config`.

        LMCache's own keys are read too (`chunk_size`, `enable_hidden_state_cache`,
        `max_hidden_state_cpu_size` in GiB, `hidden_state_layers`), and are weaker than ours. A file
        that has one of them is LMCache's: LMCache's defaults hold, so the store is off unless the
        file turns it on. Logs a warning for other keys: in a file of LMCache's for misspellings
        only, for the rest is LMCache's business.

        Args:
            path: by default what LMCACHE_CONFIG_FILE names, which is LMCache's whatever it holds.

        Raises:
            ConfigError: as `from_dict`; a file that cannot be read; no path and no such variable.
        """
        settings, where = _read_yaml(path)
        known = {key: settings[key] for key in _LMCACHE_DEFAULTS if key in settings}
        is_lmcache = bool(known) or path is None
        for key in map(str, settings):
            if key in known or key == "extra_config" or key.lower().startswith(PREFIX):
                continue
            nearest = difflib.get_close_matches(key, _LMCACHE_DEFAULTS, n=1, cutoff=_MISSPELLED)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            if nearest or not is_lmcache:
                logger.warning("%s: unknown key %s is ignored%s", where, key, hint)
        theirs = _from_lmcache(_LMCACHE_DEFAULTS | known) if is_lmcache else {}
        return cls(**(theirs | _ours_in_yaml(settings, where) | _from_environment()))

    @classmethod
    def from_lmcache(cls, config: Any) -> HiddenCacheConfig:
        """From an `LMCacheEngineConfig`, which counts as a YAML file, under the environment.

        Keys of ours are taken from its `extra_config`, and from the top level of the file that
        LMCACHE_CONFIG_FILE names: LMCache does not keep those. Raises as `from_yaml` does.
        """
        theirs = {key: getattr(config, key, default) for key, default in _LMCACHE_DEFAULTS.items()}
        ours = {}
        if os.environ.get(_LMCACHE_FILE):
            ours = _ours_in_yaml(*_read_yaml(None))
        ours |= _ours(getattr(config, "extra_config", None) or {}, "LMCache's extra_config")
        return cls(**(_from_lmcache(theirs) | ours | _from_environment()))


def _read_yaml(path: str | Path | None) -> tuple[dict[Any, Any], str]:
    """The mapping in a file, by default LMCache's, and how messages call the file."""
    import yaml

    path = path or os.environ.get(_LMCACHE_FILE)
    if not path:
        raise ConfigError(f"there is no file to read: give a path, or set {_LMCACHE_FILE}")
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if loaded is None:
        return {}, str(path)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds {type(loaded).__name__}, must hold a mapping of keys")
    return loaded, str(path)


def _ours_in_yaml(settings: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Ours at the top, and in the mapping that LMCache has for settings of others, which wins."""
    extra = settings.get("extra_config")
    nested = _ours(extra, f"{where}: extra_config") if isinstance(extra, Mapping) else {}
    return _ours(settings, where) | nested


def _from_lmcache(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """LMCache's settings of the store as ours."""
    size = theirs["max_hidden_state_cpu_size"]
    try:
        pool_bytes = int((math.nan if isinstance(size, bool) else float(size)) * 2**30)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"max_hidden_state_cpu_size is {size!r}: set a number of GiB, such as 2.0"
        ) from None
    return {
        "chunk_size": theirs["chunk_size"],
        "enabled": theirs["enable_hidden_state_cache"],
        "pool_bytes": pool_bytes,
        "layers": _layers("hidden_state_layers", theirs["hidden_state_layers"]),
    }


def connector_settings(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The vLLM connector's own `hscache_*` settings out of a `kv_connector_extra_config`, over
    those of the environment; only what is given, without the prefix.

    Raises:
        ConfigError: a value of the wrong kind.
    """
    given = _from_environment(_CONNECTOR_KINDS) | _ours(extra, "setting", _CONNECTOR_KINDS)
    return {name: _parse(name, value, _CONNECTOR_KINDS[name]) for name, value in given.items()}


def _ours(
    settings: Mapping[str, Any], where: str, wanted: Collection[str] | None = None
) -> dict[str, Any]:
    """The keys with our prefix, without it: the store's, or those wanted. Refuses unknown ones."""
    stores = [field.name for field in dataclasses.fields(HiddenCacheConfig)]
    wanted = stores if wanted is None else wanted
    known = [*stores, *_CONNECTOR_KINDS]
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = str(key).lower()
        if not name.startswith(PREFIX):
            continue
        name = name.removeprefix(PREFIX)
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{where}: unknown key {key}; the nearest is {PREFIX}{nearest} (all: "
                f"{', '.join(PREFIX + name for name in known)})"
            )
        if name in wanted:
            found[name] = value
    return found


def _from_environment(wanted: Collection[str] | None = None) -> dict[str, Any]:
    reserved = tuple(PREFIX.upper() + name for name in _RESERVED)
    settings = {k: v for k, v in os.environ.items() if not k.startswith(reserved)}
    return _ours(settings, "environment", wanted)


def _parse(name: str, value: Any, kind: type) -> Any:
    """A value as YAML, JSON or the environment may give it, as the kind that the setting has."""
    if name == "layers":
        return _layers(f"{PREFIX}{name}", value)
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in ("1", "true", "yes", "on"):
            return True
        if text in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{PREFIX}{name} is {value!r}: set true or false")
    if kind is float:
        return _seconds(name, value)
    if kind is str:
        return _word(name, value)
    if kind is os.PathLike:
        if isinstance(value, str | os.PathLike) and os.fspath(value):
            return os.fspath(value)
        raise ConfigError(f"{PREFIX}{name} is {value!r}: set a folder's path")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(-?\d+)\s*(|[kmg]i?)b?\s*", str(value).lower())
    if match is None or isinstance(value, bool):
        raise ConfigError(
            f'{PREFIX}{name} is {value!r}: set a whole number, or text such as "4GiB"'
        )
    return int(match[1]) * _UNITS[match[2]]


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{PREFIX}{name} is {value!r}: set a number of seconds, 0 or more")
    return seconds


def _layers(key: str, value: Any) -> tuple[int, ...] | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == "all"):
        return None
    given = value.split(",") if isinstance(value, str) else value
    if isinstance(given, int):
        given = [given]
    try:
        if any(isinstance(layer, bool | float) for layer in given):
            raise ValueError
        # In order and once each: settings that mean the same are equal.
        return tuple(sorted({int(layer) for layer in given}))
    except (TypeError, ValueError):
        raise ConfigError(
            f'{key} is {value!r}: set a list of layer indices such as [0, 24], or "all"'
        ) from None


def _word(name: str, value: Any) -> str | int:
    # YAML reads a bare off as false.
    text = "off" if value is False else str(value).strip().lower()
    if text in _WORDS[name]:
        return text
    if name == "numa" and re.fullmatch(r"[0-9]+", text):
        return int(text)
    more = ", or a node's number" if name == "numa" else ""
    words = ", ".join(word or '""' for word in _WORDS[name])
    raise ConfigError(f"{PREFIX}{name} is {value!r}: set one of {words}{more}")
