"""What can go wrong, by name. Every message says the value, the limit and the remedy."""

from __future__ import annotations


class HiddenCacheError(Exception):
    """Base of all errors of this package."""


class ConfigError(HiddenCacheError, ValueError):
    """A setting that cannot be."""


class PoolFullError(HiddenCacheError):
    """No room in the pool.

    `can_wait` says whether room will appear once what is pinned or in flight is done, or the
    request exceeds the pool as a whole.
    """

    def __init__(self, message: str, *, can_wait: bool) -> None:
        super().__init__(message)
        self.can_wait = can_wait


class QueueFullError(HiddenCacheError):
    """As many transfers are pending as may be; room appears as they end."""


class TransferError(HiddenCacheError):
    """A transfer failed; the text is the engine's own."""


class UnsupportedVersionError(HiddenCacheError):
    """A file or a peer of a version that this one does not read."""


class SampleRefusedError(HiddenCacheError):
    """There is a reason instead of a sample.

    Attributes:
        path: where the sample would have been.
        request_id: whose it is, empty where unknown.
        reason: one word for programs: `aborted`, `incomplete`, `pool_full`, `write_failed`,
            `transfer_failed`, `shutdown`, `writer_died`.
        detail: a sentence for people.
    """

    def __init__(self, path: str, request_id: str, reason: str, detail: str) -> None:
        super().__init__(f"no hidden states at {path}: {reason}: {detail}")
        self.path = path
        self.request_id = request_id
        self.reason = reason
        self.detail = detail
