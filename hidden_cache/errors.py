"""What can go wrong, by name. Every message says the value, the limit and the remedy."""

from __future__ import annotations

from functools import partial
from typing import Any


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

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders, and are made again from their one argument otherwise.
        return partial(PoolFullError, can_wait=self.can_wait), self.args


class QueueFullError(HiddenCacheError):
    """As many transfers are pending as may be; room appears as they end."""


class MissingRowsError(HiddenCacheError):
    """Rows that were to be in the pool are not."""


class TransferError(HiddenCacheError):
    """A transfer failed; the text is the engine's own."""


class UnsupportedVersionError(HiddenCacheError):
    """A file or a peer of a version that this one does not read."""


class DamagedSampleError(HiddenCacheError):
    """A file that is no sample, or not a whole one."""


class NonFiniteRowsError(HiddenCacheError):
    """Rows that hold an infinity or a NaN, where that is refused.

    Attributes:
        rows: how many, each of one token and one layer.
        of: how many rows there are.
        first_token: the first token that has one.
    """

    def __init__(self, rows: int, of: int, first_token: int) -> None:
        super().__init__(
            f"{rows} of {of} rows hold an infinity or a NaN, the first at token {first_token}: set "
            "hscache_non_finite to mark or allow to have the sample all the same"
        )
        self.rows = rows
        self.of = of
        self.first_token = first_token

    def __reduce__(self) -> tuple[Any, ...]:
        return NonFiniteRowsError, (self.rows, self.of, self.first_token)


class SampleRefusedError(HiddenCacheError):
    """There is a reason instead of a sample.

    Attributes:
        path: where the sample would have been.
        request_id: whose it is, empty where unknown.
        reason: one word for programs: `aborted`, `incomplete`, `pool_full`, `write_failed`,
            `transfer_failed`, `non_finite`, `foreign_kv`, `reset`, `deadline`,
            `too_many_files`, `shutdown`, `writer_died`.
        detail: a sentence for people.
    """

    def __init__(self, path: str, request_id: str, reason: str, detail: str) -> None:
        super().__init__(f"no hidden states at {path}: {reason}: {detail}")
        self.path = path
        self.request_id = request_id
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleRefusedError, (self.path, self.request_id, self.reason, self.detail)
