"""`HiddenStateStore`: what goes in comes out, in bounded memory, from any thread."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hidden_cache import _native
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import (
    ConfigError,
    HiddenCacheError,
    PoolFullError,
    QueueFullError,
    TransferError,
)
from hidden_cache.keys import Chunk, TokenChunker
from hidden_cache.lease import Lease
from hidden_cache.store import HiddenStateStore, open_store
from tests.threads import PATIENCE_S, none_but, threads_now
from tests.unit import LAYOUTS, Layout, make_paged, make_rows

CHUNK = 4
LAYERS = (5, 2, 9)
HIDDEN = 6
SLOT_BYTES = CHUNK * HIDDEN * 4


def make_store(slots: int = 64, **settings: Any) -> HiddenStateStore:
    return HiddenStateStore(
        HiddenCacheConfig(chunk_size=CHUNK, pool_bytes=slots * SLOT_BYTES, **settings)
    )


@pytest.fixture
def store() -> Iterator[HiddenStateStore]:
    store = make_store()
    yield store
    store.close()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Iterator[HiddenStateStore]:
    """A store whose transfers stay pending until `arrive(store)`."""
    make = _native.TransferEngine

    def make_still(**options: Any) -> _native.TransferEngine:
        # What stores has a limit; what reads goes on by itself.
        return make(**options, threaded="max_pending" not in options)

    monkeypatch.setattr(_native, "TransferEngine", make_still)
    store = make_store(max_pending=2)
    yield store
    store.close()


def arrive(store: HiddenStateStore) -> None:
    """Has all transfers of a still store run to their end."""
    for engine in store._memory.engines.values():
        engine.drain()


def rows_for(tokens: int, first: int = 0) -> torch.Tensor:
    return make_rows(tokens, len(LAYERS), HIDDEN, first=first)


def put(
    store: HiddenStateStore, tokens: list[int], rows: torch.Tensor | None = None, **more: Any
) -> torch.Tensor:
    """Stores rows for tokens and waits; returns them."""
    rows = rows_for(len(tokens)) if rows is None else rows
    paged, block_ids = make_paged(rows, 3)
    ticket = store.store_paged(tokens, paged, block_ids, **{"layer_idxs": LAYERS, **more})
    if ticket is not None:
        ticket.wait()
        assert ticket.done, ticket.error
    return rows


def lease(
    store: HiddenStateStore,
    chunks: list[Chunk],
    rows: torch.Tensor,
    layers: tuple[int, ...] = LAYERS,
) -> Lease:
    paged, block_ids = make_paged(rows, 3)
    return store.lease_paged(chunks, paged, block_ids, layer_idxs=layers)


def read(held: Lease) -> torch.Tensor:
    out = torch.empty((held.num_tokens, len(held.layer_idxs), held.hidden), dtype=held.dtype)
    held.wait()
    held.read(0, out)
    return out


def keys(tokens: list[int]) -> list[Hashable]:
    return [chunk.key for chunk in TokenChunker(CHUNK).chunks(tokens) if chunk.key is not None]


def with_tail(tokens: list[int]) -> list[Chunk]:
    """All tokens: whole chunks with keys, and the rest without."""
    chunks = TokenChunker(CHUNK).chunks(tokens)
    end = len(chunks) * CHUNK
    return chunks + ([Chunk(end, len(tokens), None)] if end < len(tokens) else [])


def check_equal(found: dict[int, torch.Tensor] | None, rows: torch.Tensor) -> None:
    assert found is not None
    assert set(found) == set(LAYERS)
    for place, layer in enumerate(LAYERS):
        assert torch.equal(found[layer], rows[:, place])


def arenas_of_this_process() -> int:
    with open("/proc/self/maps") as file:
        return file.read().count("memfd:hscache")


def contents(store: HiddenStateStore) -> tuple[int, ...]:
    """What a store that refuses something must not change."""
    stats = store.stats()
    return (
        stats.num_chunks,
        stats.used_bytes,
        stats.tokens_gathered,
        stats.evicted_chunks,
        stats.pending_transfers,
    )


def used_slots(store: HiddenStateStore) -> int:
    stats = store.stats()
    return stats.num_slots - stats.free_slots


# Round trips


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 3, 4, 7])
@pytest.mark.parametrize("tokens", [1, 4, 8, 11])
def test_rows_come_out_as_they_went_in(layout: Layout, block_size: int, tokens: int) -> None:
    store = make_store()
    rows = rows_for(tokens)
    paged, block_ids = make_paged(rows, block_size, layout, seed=tokens)
    held = store.lease_paged(with_tail(list(range(tokens))), paged, block_ids, layer_idxs=LAYERS)
    assert torch.equal(read(held), rows)
    held.release()
    whole = tokens // CHUNK * CHUNK
    found = store.retrieve_layers(list(range(tokens)), LAYERS)
    if whole == 0:
        assert found is None
    else:
        check_equal(found, rows[:whole])
    store.close()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]
)
def test_every_dtype_is_kept_bit_for_bit(dtype: torch.dtype) -> None:
    store = make_store()
    rows = torch.randn(8, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[0, 0, 0] = float("nan")
    put(store, list(range(8)), rows, layer_idxs=[0])
    found = store.retrieve_layers(list(range(8)), [0])
    assert found is not None
    assert found[0].dtype == dtype
    assert torch.equal(found[0].view(torch.uint8), rows[:, 0].view(torch.uint8))
    store.close()


def test_the_result_may_be_of_another_dtype(store: HiddenStateStore) -> None:
    rows = put(store, list(range(4)))
    found = store.retrieve_layers(list(range(4)), [2], dtype=torch.float64)
    assert found is not None
    assert found[2].dtype == torch.float64
    assert torch.equal(found[2], rows[:, 1].double())


def test_a_layer_that_is_asked_for_twice_is_copied_once(store: HiddenStateStore) -> None:
    rows = put(store, list(range(8)))
    found = store.retrieve_layers(list(range(8)), [2, 2])
    assert found is not None
    assert torch.equal(found[2], rows[:, 1])
    assert store.stats().bytes_retrieved == rows[:, 1].nbytes


def test_a_row_of_one_element_is_a_row(store: HiddenStateStore) -> None:
    rows = make_rows(4, 1, 1)
    put(store, [1, 2, 3, 4], rows, layer_idxs=[0])
    found = store.retrieve_layers([1, 2, 3, 4], [0])
    assert found is not None
    assert torch.equal(found[0], rows[:, 0])


def test_a_lease_is_read_from_any_row_on(store: HiddenStateStore) -> None:
    rows = rows_for(10)
    held = lease(store, with_tail(list(range(10))), rows)
    held.wait()
    for start in range(10):
        for end in range(start, 11):
            out = torch.empty((end - start, len(LAYERS), HIDDEN), dtype=torch.int32)
            held.read(start, out)
            assert torch.equal(out, rows[start:end])
    held.release()


def test_what_was_retrieved_stays_when_the_chunk_goes(store: HiddenStateStore) -> None:
    rows = put(store, list(range(4)))
    found = store.retrieve_layers(list(range(4)), LAYERS)
    assert store.drop_key(keys(list(range(4)))[0])
    put(store, list(range(50, 54)), rows_for(4, first=1000))
    check_equal(found, rows)


# Prefixes


def test_a_hole_ends_what_is_returned(store: HiddenStateStore) -> None:
    tokens = list(range(16))
    rows = put(store, tokens)
    assert store.coverage(tokens, LAYERS) == 16
    assert store.drop_key(keys(tokens)[2])
    assert store.coverage(tokens, LAYERS) == 8
    check_equal(store.retrieve_layers(tokens, LAYERS), rows[:8])
    assert store.has_chunk(keys(tokens)[3], LAYERS[0]), "behind the hole, still findable"
    assert store.drop_key(keys(tokens)[0])
    assert store.retrieve_layers(tokens, LAYERS) is None


def test_another_prefix_shares_nothing_behind_its_first_other_token(
    store: HiddenStateStore,
) -> None:
    put(store, [1, 2, 3, 4, 5, 6, 7, 8])
    assert store.coverage([1, 2, 3, 4, 0, 6, 7, 8], LAYERS) == 4
    assert store.coverage([0, 2, 3, 4, 5, 6, 7, 8], LAYERS) == 0


def test_a_layer_that_is_missing_ends_what_is_returned(store: HiddenStateStore) -> None:
    tokens = list(range(8))
    put(store, tokens, rows_for(8)[:, :1].contiguous(), layer_idxs=[5])
    put(store, tokens[:4], rows_for(4)[:, 1:2].contiguous(), layer_idxs=[2])
    assert store.coverage(tokens, [5]) == 8
    assert store.coverage(tokens, [5, 2]) == 4
    assert store.retrieve_layers(tokens, [9]) is None


def test_an_offset_leaves_out_the_chunks_before_it(store: HiddenStateStore) -> None:
    tokens = list(range(12))
    rows = put(store, tokens, token_offset=5)
    assert [store.has_chunk(key, 5) for key in keys(tokens)] == [False, False, True]
    assert store.coverage(tokens, LAYERS) == 0
    put(store, tokens[:8])
    check_equal(store.retrieve_layers(tokens, LAYERS), rows)


def test_nothing_to_store_gives_no_ticket(store: HiddenStateStore) -> None:
    paged, block_ids = make_paged(rows_for(3), 3)
    assert store.store_paged([1, 2, 3], paged, block_ids, layer_idxs=LAYERS) is None
    assert store.store_paged([], paged, [], layer_idxs=LAYERS) is None
    assert store.num_cached_chunks() == 0


# Deduplication


def test_a_chunk_that_is_there_keeps_its_first_rows(store: HiddenStateStore) -> None:
    shared, one, other = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]
    first = put(store, shared + one)
    second = put(store, shared + other, rows_for(8, first=10_000))
    check_equal(store.retrieve_layers(shared + one, LAYERS), first)
    check_equal(store.retrieve_layers(shared + other, LAYERS), torch.cat([first[:4], second[4:]]))
    stats = store.stats()
    assert (stats.tokens_gathered, stats.tokens_deduplicated) == (12, 4)
    assert stats.num_chunks == 3
    assert used_slots(store) == 3 * len(LAYERS)


def test_a_lease_says_what_came_from_the_pool(store: HiddenStateStore) -> None:
    tokens = list(range(10))
    first = rows_for(10)
    one = lease(store, with_tail(tokens), first)
    other = lease(store, with_tail(tokens), rows_for(10, first=10_000))
    assert (one.tokens_from_pool, other.tokens_from_pool) == (0, 8)
    assert torch.equal(read(one), first)
    # The tail has no key, so it is each lease's own.
    assert torch.equal(read(other), torch.cat([first[:8], rows_for(10, first=10_000)[8:]]))
    one.release()
    other.release()


def test_when_all_is_there_nothing_is_moved(store: HiddenStateStore) -> None:
    put(store, list(range(8)))
    held = lease(store, with_tail(list(range(8))), rows_for(8, first=10_000))
    assert held.tickets == []
    assert held.source_free
    assert held.tokens_from_pool == 8
    assert torch.equal(read(held), rows_for(8))
    held.release()


def test_a_new_layer_of_a_known_chunk_is_gathered_alone(store: HiddenStateStore) -> None:
    rows = rows_for(4)
    put(store, [1, 2, 3, 4], rows[:, :2].contiguous(), layer_idxs=LAYERS[:2])
    put(store, [1, 2, 3, 4], rows + 1000)
    expected = torch.cat([rows[:, :2], rows[:, 2:] + 1000], dim=1)
    check_equal(store.retrieve_layers([1, 2, 3, 4], LAYERS), expected)
    assert used_slots(store) == len(LAYERS)


# Pool pressure


def test_the_least_recently_used_leaf_makes_room() -> None:
    store = make_store(slots=4 * len(LAYERS))
    old, new = list(range(8)), list(range(100, 108))
    rows_old, rows_new = put(store, old), put(store, new, rows_for(8, first=1000))
    assert store.retrieve_layers(old, LAYERS) is not None  # the newer one is the older now
    put(store, [1, 1, 1, 1])
    check_equal(store.retrieve_layers(old, LAYERS), rows_old)
    check_equal(store.retrieve_layers(new, LAYERS), rows_new[:4])
    assert store.stats().evicted_chunks == 1
    store.close()


def test_a_store_never_evicts_what_it_is_itself_storing() -> None:
    store = make_store(slots=3 * len(LAYERS))
    tokens = list(range(16))  # four chunks for room for three
    rows = put(store, tokens[:8])
    with pytest.raises(PoolFullError, match=r"takes 12 slots .* the whole pool has 9") as caught:
        put(store, tokens, rows_for(16))
    assert not caught.value.can_wait, "the part that is there already is part of the request"
    check_equal(store.retrieve_layers(tokens, LAYERS), rows)
    assert used_slots(store) == 2 * len(LAYERS)
    store.close()


def test_a_request_larger_than_the_pool_need_not_be_tried_again() -> None:
    store = make_store(slots=3)
    needed = 6 * SLOT_BYTES
    with pytest.raises(PoolFullError, match=f"set hscache_pool_bytes to {needed}") as caught:
        put(store, list(range(8)))
    assert not caught.value.can_wait
    assert store.num_cached_chunks() == 0
    assert used_slots(store) == 0
    store.close()


def test_a_request_larger_than_the_pool_evicts_nobody() -> None:
    store = make_store(slots=2 * len(LAYERS))
    rows = put(store, list(range(8)))
    with pytest.raises(PoolFullError, match="takes 9 slots"):
        put(store, list(range(50, 62)))
    check_equal(store.retrieve_layers(list(range(8)), LAYERS), rows)
    store.close()


def test_a_pool_smaller_than_one_slot_is_full() -> None:
    store = HiddenStateStore(HiddenCacheConfig(chunk_size=CHUNK, pool_bytes=SLOT_BYTES - 1))
    with pytest.raises(PoolFullError, match=f"{SLOT_BYTES} bytes, the whole pool") as caught:
        put(store, [1, 2, 3, 4])
    assert not caught.value.can_wait
    store.close()


def test_a_pool_that_leases_fill_has_room_once_they_are_released() -> None:
    store = make_store(slots=2 * len(LAYERS))
    held = lease(store, with_tail(list(range(6))), rows_for(6))
    held.wait()
    other = with_tail(list(range(50, 54)))
    with pytest.raises(PoolFullError, match="the rest is in use: wait") as caught:
        lease(store, other, rows_for(4))
    assert caught.value.can_wait
    assert used_slots(store) == 2 * len(LAYERS)
    held.release()
    again = lease(store, other, rows_for(4))
    assert torch.equal(read(again), rows_for(4))
    again.release()
    store.close()


def test_pinned_chunks_survive_any_pressure() -> None:
    store = make_store(slots=4 * len(LAYERS))
    rows = rows_for(8)
    held = lease(store, with_tail(list(range(8))), rows)
    for i in range(20):
        put(store, [i] * 8, rows_for(8, first=10_000 * i))
    assert torch.equal(read(held), rows)
    held.release()
    store.close()


def test_as_many_transfers_as_may_be_pending_are_refused_or_waited_for(
    still: HiddenStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [lease(still, with_tail([i] * 6), rows_for(6)) for i in range(2)]
    before = still.stats()
    with pytest.raises(QueueFullError, match=r"2 transfers are pending, .* hscache_max_pending"):
        lease(still, with_tail([2] * 6), rows_for(6))
    assert still.stats() == before

    waits = threading.Event()
    wait_for_one = still._wait_for_one

    def announce() -> None:
        waits.set()
        wait_for_one()

    monkeypatch.setattr(still, "_wait_for_one", announce)
    storing = threading.Thread(target=put, args=(still, [2] * 4))
    storing.start()
    assert waits.wait(PATIENCE_S)
    while storing.is_alive():
        arrive(still)
    assert still.coverage([2] * 4, LAYERS) == 4
    for one in held:
        assert torch.equal(read(one), rows_for(6))
        one.release()


# Failures leave nothing behind


def as_bad_block_id(paged: torch.Tensor, ids: list[int]) -> tuple[Any, ...]:
    return paged, [*ids[:-1], paged.size(0)], LAYERS


def as_negative_block_id(paged: torch.Tensor, ids: list[int]) -> tuple[Any, ...]:
    return paged, [*ids[:-1], -1], LAYERS


def as_short_table(paged: torch.Tensor, ids: list[int]) -> tuple[Any, ...]:
    return paged, ids[:-1], LAYERS


def as_too_few_layers(paged: torch.Tensor, ids: list[int]) -> tuple[Any, ...]:
    return paged, ids, LAYERS[:-1]


def as_a_layer_twice(paged: torch.Tensor, ids: list[int]) -> tuple[Any, ...]:
    return paged, ids, (1, 2, 2)


def as_strided_hidden(paged: torch.Tensor, ids: list[int]) -> tuple[Any, ...]:
    return paged.repeat_interleave(2, dim=3)[..., ::2], ids, LAYERS


def as_three_dimensions(paged: torch.Tensor, ids: list[int]) -> tuple[Any, ...]:
    return paged[:, 0], ids, LAYERS


def as_another_device(paged: torch.Tensor, ids: list[int]) -> tuple[Any, ...]:
    return paged.to("meta"), ids, LAYERS


@pytest.mark.parametrize(
    ("make_bad", "error", "message"),
    [
        (as_bad_block_id, IndexError, r"block_ids\[2\] is 6, outside the paged cache's 6 blocks"),
        (as_negative_block_id, IndexError, r"block_ids\[2\] is -1"),
        (as_short_table, IndexError, "reach beyond the 6 tokens of a table of 2 blocks"),
        (as_too_few_layers, ValueError, r"layer_idxs \[5, 2\] must name paged's 3 layers"),
        (as_a_layer_twice, ValueError, r"layer_idxs \[1, 2, 2\] must name .* each once"),
        (as_strided_hidden, ValueError, r"strides .* hidden contiguous"),
        (as_three_dimensions, ValueError, r"must be \[num_blocks, layers, block_size, hidden\]"),
        (as_another_device, ValueError, "paged is on meta"),
    ],
)
@pytest.mark.parametrize("filled", [False, True])
def test_bad_arguments_leave_nothing_behind(
    make_bad: Callable[..., tuple[Any, ...]],
    error: type[Exception],
    message: str,
    filled: bool,
    store: HiddenStateStore,
) -> None:
    if filled:
        put(store, list(range(4)))
    before = contents(store)
    tokens = list(range(8))
    paged, block_ids, layers = make_bad(*make_paged(rows_for(8), 3))
    with pytest.raises(error, match=message):
        store.store_paged(tokens, paged, block_ids, layer_idxs=layers)
    with pytest.raises(error, match=message):
        store.lease_paged(with_tail(tokens), paged, block_ids, layer_idxs=layers)
    assert contents(store) == before
    rows = put(store, tokens)
    check_equal(store.retrieve_layers(tokens, LAYERS), rows)


@pytest.mark.parametrize(
    "rows",
    [make_rows(4, 3, HIDDEN, torch.int64), make_rows(4, 3, HIDDEN + 1)],
    ids=["another dtype", "another hidden size"],
)
def test_rows_of_another_format_share_the_pool(rows: torch.Tensor) -> None:
    store = make_store(slots=(16 << 20) // SLOT_BYTES)
    first = put(store, [1, 2, 3, 4])
    put(store, [5, 6, 7, 8], rows)
    check_equal(store.retrieve_layers([1, 2, 3, 4], LAYERS), first)
    check_equal(store.retrieve_layers([5, 6, 7, 8], LAYERS), rows)


@pytest.mark.parametrize(
    "rows",
    [make_rows(4, 3, HIDDEN, torch.int64), make_rows(4, 3, HIDDEN + 1)],
    ids=["another dtype", "another hidden size"],
)
def test_a_chunk_that_is_there_in_another_format_is_refused(
    rows: torch.Tensor, store: HiddenStateStore
) -> None:
    put(store, [1, 2, 3, 4])
    before = store.stats()
    with pytest.raises(ValueError, match=r"layer 5 of tokens 0 to 4 is there as 6 x torch.int32"):
        put(store, [1, 2, 3, 4], rows)
    assert store.stats() == before


def test_a_first_store_that_failed_does_not_bind_the_next(store: HiddenStateStore) -> None:
    paged, _ = make_paged(make_rows(4, 3, HIDDEN, torch.float64), 3)
    with pytest.raises(IndexError):
        store.store_paged([1, 2, 3, 4], paged, [99, 99], layer_idxs=LAYERS)
    assert store.num_cached_chunks() == 0
    assert store.stats().used_bytes == 0
    rows = put(store, [1, 2, 3, 4])
    check_equal(store.retrieve_layers([1, 2, 3, 4], LAYERS), rows)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk(4, 8, b"a")], "given, must be tokens 0 to 4"),
        ([Chunk(0, 4, b"a"), Chunk(8, 12, b"b")], "given, must be tokens 4 to 8"),
        ([Chunk(0, 3, b"a"), Chunk(3, 7, b"b")], "a short one must come last"),
        ([Chunk(0, 8, b"a")], "given, must be tokens 0 to 4"),
        ([Chunk(0, 0, b"a")], "given, must be tokens 0 to 4"),
        ([Chunk(0, 4, None), Chunk(4, 8, b"a")], "those without a key must come last"),
        ([Chunk(0, 4, b"a"), Chunk(4, 8, b"a")], "has a key twice"),
    ],
)
def test_chunks_that_do_not_make_up_a_prefix_are_refused(
    chunks: list[Chunk], message: str, store: HiddenStateStore
) -> None:
    paged, block_ids = make_paged(rows_for(12), 3)
    for bring in (store.store_paged, store.lease_paged):
        with pytest.raises(ValueError, match=message):
            bring(chunks, paged, block_ids, layer_idxs=LAYERS)
    assert contents(store) == contents(make_store())


# Leases


def test_a_tail_goes_when_its_lease_is_released(store: HiddenStateStore) -> None:
    held = lease(store, with_tail(list(range(6))), rows_for(6))
    assert used_slots(store) == 2 * len(LAYERS)
    held.wait()
    held.release()
    assert used_slots(store) == len(LAYERS)
    assert store.num_cached_chunks() == 1
    held.release()
    assert used_slots(store) == len(LAYERS)


def test_a_lease_released_by_many_threads_is_released_once(store: HiddenStateStore) -> None:
    for i in range(50):
        held = lease(store, with_tail([i] * 6), rows_for(6))
        threads = [threading.Thread(target=held.release) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.drop_key(keys([i] * 4)[0]), "neither pinned still nor twice released"
    assert used_slots(store) == 0


def test_a_dropped_chunk_stays_for_who_holds_it(store: HiddenStateStore) -> None:
    held = lease(store, with_tail(list(range(4))), rows_for(4))
    held.wait()
    (key,) = keys(list(range(4)))
    assert store.drop_key(key)
    assert not store.drop_key(key)
    assert not store.has_chunk(key, LAYERS[0])
    again = put(store, list(range(4)), rows_for(4, first=500))
    assert torch.equal(read(held), rows_for(4))
    assert used_slots(store) == 2 * len(LAYERS)
    held.release()
    assert used_slots(store) == len(LAYERS)
    check_equal(store.retrieve_layers(list(range(4)), LAYERS), again)


def test_rows_on_their_way_are_not_read(still: HiddenStateStore) -> None:
    held = lease(still, with_tail(list(range(6))), rows_for(6))
    assert not held.source_free
    with pytest.raises(TransferError, match=r"wait\(\) for them before reading"):
        held.read(0, torch.empty((1, len(LAYERS), HIDDEN), dtype=torch.int32))
    arrive(still)
    assert held.source_free
    assert torch.equal(read(held), rows_for(6))
    held.release()


def test_chunks_on_their_way_are_neither_returned_nor_evicted(
    still: HiddenStateStore,
) -> None:
    tokens = list(range(8))
    paged, block_ids = make_paged(rows_for(8), 3)
    still.store_paged(tokens, paged, block_ids, layer_idxs=LAYERS)
    assert still.retrieve_layers(tokens, LAYERS) is None
    assert still.coverage(tokens, LAYERS) == 0
    assert not still.has_chunk(keys(tokens)[0], LAYERS[0])
    with pytest.raises(PoolFullError) as caught:
        lease(still, with_tail([9] * 4 * 21), rows_for(4 * 21))
    assert caught.value.can_wait
    arrive(still)
    check_equal(still.retrieve_layers(tokens, LAYERS), rows_for(8))
    assert still.drop_key(keys(tokens)[1])


def test_rows_that_are_on_their_way_are_shared(still: HiddenStateStore) -> None:
    one = lease(still, with_tail(list(range(4))), rows_for(4))
    other = lease(still, with_tail(list(range(4))), rows_for(4, first=1000))
    assert other.tickets == []
    assert other.tokens_from_pool == 4
    with pytest.raises(TransferError, match="wait"):
        other.read(0, torch.empty((1, len(LAYERS), HIDDEN), dtype=torch.int32))
    arrive(still)
    assert torch.equal(read(other), rows_for(4))
    one.release()
    other.release()


def test_whoever_stores_gets_the_ticket_even_of_a_copy_that_is_done_by_then(
    store: HiddenStateStore,
) -> None:
    for prompt in range(300):
        paged, block_ids = make_paged(rows_for(4), 3)
        ticket = store.store_paged([prompt] * 4, paged, block_ids, layer_idxs=LAYERS)
        assert ticket is not None
        ticket.wait()


def test_the_source_lives_as_long_as_it_is_read(still: HiddenStateStore) -> None:
    paged, block_ids = make_paged(rows_for(4), 3)
    alive = weakref.ref(paged)
    still.store_paged(list(range(4)), paged, block_ids, layer_idxs=LAYERS)
    del paged
    assert alive() is not None
    arrive(still)
    check_equal(still.retrieve_layers(list(range(4)), LAYERS), rows_for(4))


def test_a_tail_on_its_way_is_freed_when_it_has_arrived(still: HiddenStateStore) -> None:
    held = lease(still, with_tail([1, 2]), rows_for(2))
    releasing = threading.Thread(target=held.release)
    releasing.start()
    assert used_slots(still) == len(LAYERS)
    arrive(still)
    releasing.join()
    assert used_slots(still) == 0


# Failed transfers


def fail(store: HiddenStateStore) -> None:
    """Has all pending transfers of a still store fail."""
    for engine in store._memory.engines.values():
        engine.close()


def test_a_failed_transfer_is_told_and_its_chunks_are_forgotten(still: HiddenStateStore) -> None:
    held = lease(still, with_tail(list(range(6))), rows_for(6))
    sharing = lease(still, with_tail(list(range(4))), rows_for(4))
    fail(still)
    for one in (held, sharing):
        assert one.source_free
        with pytest.raises(TransferError, match="closed before this transfer was complete"):
            one.wait()
        with pytest.raises(TransferError):
            one.read(0, torch.empty((1, len(LAYERS), HIDDEN), dtype=torch.int32))
    assert still.retrieve_layers(list(range(4)), LAYERS) is None
    assert not still.has_chunk(keys(list(range(4)))[0], LAYERS[0])
    assert still.num_cached_chunks() == 0
    held.release()
    assert used_slots(still) == len(LAYERS), "the other lease still holds it"
    sharing.release()
    assert used_slots(still) == 0


def test_a_chunk_goes_whole_when_a_layer_of_it_failed(still: HiddenStateStore) -> None:
    tokens = list(range(4))
    tickets = []
    for place, layer in enumerate(LAYERS[:2]):
        rows = rows_for(4)[:, place : place + 1].contiguous()
        paged, block_ids = make_paged(rows, 3)
        ticket = still.store_paged(tokens, paged, block_ids, layer_idxs=[layer])
        assert ticket is not None
        tickets.append(ticket)
    tickets[0].cancel()
    arrive(still)
    assert [ticket.done for ticket in tickets] == [False, True]
    assert still.coverage(tokens, LAYERS[1:2]) == 0
    assert used_slots(still) == 0


# More of leases


def test_a_released_lease_is_not_read(store: HiddenStateStore) -> None:
    held = lease(store, with_tail(list(range(4))), rows_for(4))
    out = read(held)
    held.release()
    with pytest.raises(HiddenCacheError, match="the lease was released"):
        held.read(0, out)
    with pytest.raises(HiddenCacheError, match="the lease was released"):
        held.wait()


@pytest.mark.parametrize(
    ("start", "out", "message"),
    [
        (0, torch.empty(7, 3, HIDDEN, dtype=torch.int32), "rows 0 to 7 .* the lease has 6"),
        (-1, torch.empty(2, 3, HIDDEN, dtype=torch.int32), "rows -1 to 1 .* the lease has 6"),
        (0, torch.empty(2, 3, HIDDEN), r"out is \[2, 3, 6\] of torch.float32, must be"),
        (0, torch.empty(2, 2, HIDDEN, dtype=torch.int32), r"must be \[n, 3, 6\] of torch.int32"),
        (0, torch.empty(3, 2, HIDDEN, dtype=torch.int32).transpose(0, 1), "contiguous"),
    ],
)
def test_a_lease_is_read_into_what_fits_only(
    start: int, out: torch.Tensor, message: str, store: HiddenStateStore
) -> None:
    held = lease(store, with_tail(list(range(6))), rows_for(6))
    held.wait()
    with pytest.raises(ValueError, match=message):
        held.read(start, out)
    held.release()


# Threads


def content(tokens: list[int]) -> torch.Tensor:
    """Rows that say which prefix, position and layer they are of."""
    rows = torch.empty(len(tokens), len(LAYERS), HIDDEN, dtype=torch.int32)
    code = 0
    for i, token in enumerate(tokens):
        code = (code * 31 + token + 1) % 1_000_003
        for place in range(len(LAYERS)):
            rows[i, place] = torch.arange(HIDDEN) + 7 * code + 100 * place
    return rows


# Operations of each thread: 3,200 in `make test`.
ROUNDS = 8 * int(os.environ.get("HSCACHE_EXAMPLES", "80"))


def test_eight_threads_always_find_right_rows() -> None:
    store = make_store(slots=14 * len(LAYERS), max_pending=4)
    prefixes = [[a] * CHUNK + [b] * CHUNK + [a, b] for a in range(4) for b in range(4)]
    rows = {tuple(prefix): content(prefix) for prefix in prefixes}
    paged = {prefix: make_paged(r, 3, seed=i) for i, (prefix, r) in enumerate(rows.items())}
    failures: list[BaseException] = []
    done = [0] * 3

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(ROUNDS):
            prefix = tuple(choose.choice(prefixes))
            expected = rows[prefix]
            operation = choose.random()
            if operation < 0.5:
                try:
                    held = store.lease_paged(
                        with_tail(list(prefix)), *paged[prefix], layer_idxs=LAYERS
                    )
                except (PoolFullError, QueueFullError):
                    continue
                assert torch.equal(read(held), expected)
                held.release()
                done[0] += 1
            elif operation < 0.9:
                found = store.retrieve_layers(prefix, LAYERS)
                if found is not None:
                    check_equal(found, expected[: len(found[LAYERS[0]])])
                    done[1] += 1
            else:
                done[2] += store.drop_key(choose.choice(keys(list(prefix))))

    def guarded(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert all(done), "each kind of operation had its turn"
    stats = store.stats()
    assert used_slots(store) == stats.num_chunks * len(LAYERS)
    for prefix in prefixes:
        for key in keys(prefix):
            store.drop_key(key)
    assert used_slots(store) == 0
    store.close()


# The end


def test_close_fails_what_was_not_begun_and_refuses_what_comes(still: HiddenStateStore) -> None:
    held = lease(still, with_tail(list(range(6))), rows_for(6))
    failures: list[str] = []

    def wait() -> None:
        try:
            held.wait()
        except TransferError as error:
            failures.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    still.close()
    waiting.join()
    assert failures == ["the transfer engine was closed before this transfer was complete"]
    held.release()
    for refused in (
        lambda: put(still, [1, 2, 3, 4]),
        lambda: lease(still, with_tail([1, 2]), rows_for(2)),
    ):
        with pytest.raises(HiddenCacheError, match="the store is closed"):
            refused()
    still.close()
    assert still.retrieve_layers(list(range(6)), LAYERS) is None
    assert still.num_cached_chunks() == 0


def test_close_while_many_threads_store(store: HiddenStateStore) -> None:
    begun = threading.Barrier(5, timeout=PATIENCE_S)
    failures: list[BaseException] = []

    def once(seed: int) -> None:
        held = lease(store, with_tail([seed] * 6), rows_for(6))
        try:
            assert torch.equal(read(held), rows_for(6))
        finally:
            held.release()

    def without_end(seed: int) -> None:
        while True:
            once(seed)

    def work(seed: int) -> None:
        try:
            once(seed)
            begun.wait()
            with pytest.raises(HiddenCacheError):  # the store is closed, or the transfer failed
                without_end(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    store.close()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.stats().pending_transfers == 0


def test_a_filled_lease_can_be_read_after_close(store: HiddenStateStore) -> None:
    held = lease(store, with_tail(list(range(6))), rows_for(6))
    held.wait()
    store.close()
    assert torch.equal(read(held), rows_for(6))
    held.release()


def test_a_store_that_is_forgotten_with_work_in_flight_ends_it() -> None:
    threads, arenas = threads_now(), arenas_of_this_process()
    rows = rows_for(400)
    for _ in range(5):
        store = make_store(slots=400, staging_bytes=1)
        paged, block_ids = make_paged(rows, 3)
        ticket = store.store_paged([1] * 400, paged, block_ids, layer_idxs=LAYERS)
        del store, paged
        assert ticket is not None
        assert ticket.ended
    assert none_but(threads)
    assert arenas_of_this_process() <= arenas


def test_a_lease_keeps_its_store(store: HiddenStateStore) -> None:
    other = make_store()
    held = lease(other, with_tail(list(range(6))), rows_for(6))
    del other
    assert torch.equal(read(held), rows_for(6))
    held.release()


FORK = """
import os, sys
from functools import partial
from hidden_cache import _native
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import HiddenCacheError
from hidden_cache.store import open_store
from tests.unit import make_paged
from tests.unit.test_store import LAYERS, lease, make_store, rows_for, with_tail

threaded = _native.TransferEngine
_native.TransferEngine = partial(threaded, threaded=False)
still = make_store()
config = HiddenCacheConfig(pool_bytes=1 << 20)
shared = open_store(config)
paged, block_ids = make_paged(rows_for(4), 3)
ticket = still.store_paged([1, 2, 3, 4], paged, block_ids, layer_idxs=LAYERS)
_native.TransferEngine = threaded
held = lease(still, with_tail(list(range(6))), rows_for(6))
child = os.fork()
if child == 0:
    refused = 0
    for call in (
        lambda: still.store_paged([1, 2, 3, 4], paged, block_ids, layer_idxs=LAYERS),
        lambda: still.retrieve_layers([1, 2, 3, 4], LAYERS),
        lambda: still.coverage([1, 2, 3, 4]),
        lambda: still.has_chunk(b""),
        lambda: still.drop_key(b""),
        lambda: still.num_cached_chunks(),
        lambda: still.stats(),
        lambda: still.close(),
        lambda: held.wait(),
        lambda: held.release(),
        lambda: shared.stats(),
    ):
        try:
            call()
        except HiddenCacheError as error:
            refused += "open a store after fork(), not before" in str(error)
    ticket.wait()
    own = open_store(config)
    assert own is not shared
    held = own.lease_paged([], paged, block_ids, layer_idxs=LAYERS)
    held.wait()
    own.close()
    print("child", refused, flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
for engine in still._memory.engines.values():
    engine.drain()
held.wait()
held.release()
still.close()
print("parent")
"""


def test_a_forked_child_is_refused_and_does_not_hang() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n") == ["child 11", "parent", ""], done.stderr


# open_store


@pytest.fixture
def _nothing_open() -> Iterator[None]:
    yield
    from hidden_cache import store

    if store._opened is not None:
        store._opened.close()
    store._opened = None


@pytest.mark.usefixtures("_nothing_open")
class TestOpenStore:
    config = HiddenCacheConfig(pool_bytes=1 << 20)

    def test_the_same_settings_give_the_same_store(self) -> None:
        store = open_store(self.config)
        assert store is not None
        assert open_store(HiddenCacheConfig(pool_bytes="1MiB")) is store  # type: ignore[arg-type]

    def test_other_settings_are_refused_until_it_is_closed(self) -> None:
        store = open_store(self.config)
        assert store is not None
        other = HiddenCacheConfig(pool_bytes=2 << 20)
        with pytest.raises(ConfigError, match="same settings everywhere in a process"):
            open_store(other)
        store.close()
        assert open_store(other) is not store

    def test_closing_it_gives_its_memory_back(self) -> None:
        arenas = arenas_of_this_process()
        store = open_store(self.config)
        assert store is not None
        store.close()
        del store
        assert arenas_of_this_process() <= arenas

    def test_many_threads_open_one(self) -> None:
        opened: list[HiddenStateStore | None] = []
        threads = [
            threading.Thread(target=lambda: opened.append(open_store(self.config)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(opened) == 8
        assert len({id(store) for store in opened}) == 1

    def test_disabled_is_none_and_costs_nothing(self) -> None:
        threads, arenas = threads_now(), arenas_of_this_process()
        assert open_store(HiddenCacheConfig(enabled=False, pool_bytes=1 << 20)) is None
        assert none_but(threads)
        assert arenas_of_this_process() <= arenas

    def test_enabled_maps_one_arena_and_starts_threads_for_the_first_rows(self) -> None:
        gc.collect()  # what other tests left
        threads, arenas = threads_now(), arenas_of_this_process()
        store = open_store(self.config)
        assert store is not None
        assert arenas_of_this_process() == arenas + 1
        assert none_but(threads)
        store.prepare(make_paged(rows_for(1), 3)[0])
        assert threads_now() > threads
        assert arenas_of_this_process() == arenas + 1


# The pool's memory

POOL = 64 << 20  # enough that touching it in the background pays


def prepared(**settings: Any) -> HiddenStateStore:
    store = HiddenStateStore(HiddenCacheConfig(chunk_size=CHUNK, pool_bytes=POOL, **settings))
    assert store.stats().touched_bytes == 0
    store.prepare(make_paged(rows_for(1), 3)[0])
    return store


def test_the_pool_is_touched_in_the_background_from_the_first_rows_on() -> None:
    store = prepared()
    while (stats := store.stats()).touching:
        time.sleep(0.001)
    assert stats.touched_bytes == POOL or stats.touch_refusal
    store.close()


def test_touching_can_be_switched_off() -> None:
    store = prepared(touch_pages="off")
    stats = store.stats()
    assert (stats.touching, stats.touched_bytes, stats.touch_refusal) == (False, 0, "")
    store.close()


def test_a_node_by_number_is_had_or_the_reason_is_said() -> None:
    store = prepared(touch_pages="off", numa=1023)
    stats = store.stats()
    assert stats.numa_node is None
    assert stats.numa_refusal.startswith("NUMA node 1023: the kernel refused")
    store.close()


def test_huge_pages_that_cannot_be_had_are_said(caplog: pytest.LogCaptureFixture) -> None:
    memory = _native.machine_memory_bytes()
    store = HiddenStateStore(HiddenCacheConfig(pool_bytes=memory, huge_pages="hugetlb"))
    stats = store.stats()
    assert stats.huge_pages == "off"
    assert "huge pages of 2 MiB are needed" in stats.huge_pages_refusal
    assert stats.huge_pages_refusal in caplog.text
    store.close()


def test_stats_say_what_a_gpu_refused_to_pin(store: HiddenStateStore) -> None:
    put(store, list(range(4)))
    stats = store.stats()
    assert (stats.pinned_bytes, stats.pinning, stats.pin_refusal) == (0, False, "")
    refusal = "cudaErrorMemoryAllocation (out of memory)"
    told = SimpleNamespace(bytes=96, at_work=True, refusal=refusal, stop=lambda: None)
    store._memory._registrations[torch.device("cuda", 0)] = told  # type: ignore[assignment]
    stats = store.stats()
    assert (stats.pinned_bytes, stats.pinning, stats.pin_refusal) == (96, True, refusal)


def test_stats_say_how_fragmented_the_pool_is(store: HiddenStateStore) -> None:
    put(store, list(range(8)))
    stats = store.stats()
    assert (stats.largest_free_run, stats.fragmentation) == (stats.free_slots, 0.0)


def test_a_disabled_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="hscache_enabled is false"):
        HiddenStateStore(HiddenCacheConfig(enabled=False))


def test_a_pool_larger_than_memory_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"more than this machine's .* set hscache_pool_bytes lower"
    ):
        HiddenStateStore(HiddenCacheConfig(pool_bytes=1 << 60))


def test_the_token_database_and_the_settings_must_cut_alike() -> None:
    with pytest.raises(ConfigError, match=r"chunk_size is 8, but the token database cuts .* 4"):
        HiddenStateStore(HiddenCacheConfig(chunk_size=8, pool_bytes=1), TokenChunker(4))
    store = HiddenStateStore(HiddenCacheConfig(pool_bytes=1 << 20), TokenChunker(4))
    assert store.chunk_size == 4
    store.close()
