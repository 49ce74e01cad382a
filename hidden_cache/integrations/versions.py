"""Whether what is installed of a peer is what the integration was tested with."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from hidden_cache.errors import ConfigError

logger = logging.getLogger(__name__)


def check_version(
    product: str, packages: tuple[str, ...], supported: SpecifierSet, *, allow_untested: bool
) -> None:
    """Raises ConfigError for a version outside the tested range, unless that is allowed.

    Args:
        product: what messages call it.
        packages: its names in the package index; the first that is installed counts.
        supported: the tested range.
        allow_untested: warn only.
    """
    found = next(filter(None, map(_installed, packages)), None)
    if found is not None and supported.contains(found, prereleases=True):
        return
    message = (
        f"{product} {found or 'of unknown version'} is not among the tested versions ({supported})"
    )
    if not allow_untested:
        raise ConfigError(f"{message}: install one of them, or set hscache_allow_untested to true")
    logger.warning("%s; going on, since hscache_allow_untested is set", message)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
