"""`HiddenCacheConfig`: every setting of ours, from YAML, the environment or an engine's config.

Keys are `hscache_<name>` in YAML, dictionaries and a connector's extra config, and
`HSCACHE_<NAME>` in the environment. Strength grows YAML < environment < dictionary.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hidden_cache.errors import ConfigError

PREFIX = "hscache_"
# Environment names that are not settings of this class.
_RESERVED = ("BUILD_", "LMCACHE")
# What a setting that is a word may be.
_WORDS = {
    "touch_pages": ("background", "off"),
    "huge_pages": ("off", "advise", "hugetlb"),
    "numa": ("auto", "off"),
}
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
        allow_untested: start with versions of vLLM that were not tested.
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
        if self.result_bytes < 0:
            raise ConfigError(
                f"{PREFIX}result_bytes is {self.result_bytes}: set a number of bytes, or 0 to "
                "recycle none"
            )
        for name in ("pool_bytes", "staging_bytes", "max_pending"):
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
    def from_yaml(cls, path: str | Path) -> HiddenCacheConfig:
        """From a YAML file's `hscache_*` keys under the environment. Raises as `from_dict` does."""
        import yaml

        loaded = yaml.safe_load(Path(path).read_text())
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path} holds {type(loaded).__name__}, must hold a mapping of keys")
        return cls(**(_ours(loaded, str(path)) | _from_environment()))


def _ours(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys with our prefix, without it; refuses unknown ones."""
    known = [field.name for field in dataclasses.fields(HiddenCacheConfig)]
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
        found[name] = value
    return found


def _from_environment() -> dict[str, Any]:
    reserved = tuple(PREFIX.upper() + name for name in _RESERVED)
    return _ours({k: v for k, v in os.environ.items() if not k.startswith(reserved)}, "environment")


def _parse(name: str, value: Any, kind: type) -> Any:
    """A value as YAML, JSON or the environment may give it, as the kind that the setting has."""
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


def _word(name: str, value: Any) -> str | int:
    # YAML reads a bare off as false.
    text = "off" if value is False else str(value).strip().lower()
    if text in _WORDS[name]:
        return text
    if name == "numa" and re.fullmatch(r"[0-9]+", text):
        return int(text)
    more = ", or a node's number" if name == "numa" else ""
    raise ConfigError(f"{PREFIX}{name} is {value!r}: set one of {', '.join(_WORDS[name])}{more}")
