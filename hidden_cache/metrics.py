"""What a store counts, and the snapshot of it that it gives."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Seconds: from a few rows in the cache to a long prompt in fresh memory.
_BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How long something took: `counts[i]` times at most `bounds_s[i]` seconds (and more than the
    bound before), the last one longer than all bounds; `total_s` together."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    total_s: float


@dataclass(slots=True)
class Durations:
    """Collects a `Histogram`. Not thread-safe: the store's lock guards it."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def snapshot(self) -> Histogram:
        return Histogram(_BOUNDS_S, tuple(self.counts), self.total_s)


@dataclass(slots=True)
class Counts:
    """What a store counts itself; see `StoreStats`."""

    tokens_gathered: int = 0
    tokens_deduplicated: int = 0
    bytes_stored: int = 0
    tokens_found: int = 0
    bytes_retrieved: int = 0
    misses_kv_gone: int = 0
    misses_evicted: int = 0
    misses_not_stored: int = 0
    partial_stores: int = 0
    dropped_stores: int = 0
    queue_waits: int = 0
    store_s: Durations = field(default_factory=Durations)
    retrieve_s: Durations = field(default_factory=Durations)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a store. Slots hold one layer of one chunk each.

    `num_slots`, `free_slots`, `slot_bytes`, `largest_free_run` and `fragmentation` (the share of
    the free slots outside of the largest run of neighbours) are those of the slots that were used
    first; rows of another size have slots of their own in the same memory. `used_bytes` is what all
    slots in use take.

    A refusal says why something was not had that was asked for, or not all of it; it is empty
    where it was. `pinned_bytes` of the pool a GPU copies to without a detour, more while `pinning`.
    `touched_bytes` were backed in the background, which goes on while `touching`. `huge_pages` is
    what was had.

    Tokens are counted for each layer that they were asked for in, and once where they were stored;
    bytes are those of rows as they are kept. `tokens_found` and `bytes_retrieved` are what
    retrieves gave. A retrieve, or a question for coverage, that ends before its last chunk is a
    miss: the KV was gone, the chunk had been evicted (as far as that is remembered), or it was
    never stored. `partial_stores` found no room for all, `dropped_stores` were of layers that are
    not wanted, `queue_waits` had to wait for transfers. `store_s` and `retrieve_s` are how long
    calls took that copied rows and waited for that. `result_fallbacks` are results that got memory
    of their own because those that are kept take all of `hscache_result_bytes`.
    """

    num_chunks: int
    num_slots: int
    free_slots: int
    slot_bytes: int
    pool_bytes: int
    used_bytes: int
    largest_free_run: int
    fragmentation: float
    tokens_gathered: int
    tokens_deduplicated: int
    bytes_stored: int
    tokens_found: int
    bytes_retrieved: int
    misses_kv_gone: int
    misses_evicted: int
    misses_not_stored: int
    partial_stores: int
    dropped_stores: int
    evicted_chunks: int
    queue_waits: int
    store_s: Histogram
    retrieve_s: Histogram
    result_hits: int
    result_fallbacks: int
    result_bytes: int
    pending_transfers: int
    weights_epoch: int
    pinned_bytes: int
    pinning: bool
    pin_refusal: str
    touched_bytes: int
    touching: bool
    touch_refusal: str
    huge_pages: str
    huge_pages_refusal: str
    numa_node: int | None
    numa_refusal: str
