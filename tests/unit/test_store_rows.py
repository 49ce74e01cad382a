"""Rows in and out of the store as tensors: dtypes, partial stores, KV gone, many threads."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import (
    ConfigError,
    HiddenCacheError,
    PoolFullError,
    QueueFullError,
    TransferError,
)
from hidden_cache.keys import Chunk, Placeholder, TokenChunker
from hidden_cache.lease import Lease
from hidden_cache.metrics import Durations
from hidden_cache.store import HiddenStateStore
from hidden_cache.writer import RequestWriter
from tests.threads import PATIENCE_S
from tests.unit import make_paged

CHUNK = 4
HIDDEN = 16
STRESS_S = float(os.environ.get("HSCACHE_STRESS_S", "3"))


def make_store(**settings: Any) -> HiddenStateStore:
    return HiddenStateStore(
        HiddenCacheConfig(**{"chunk_size": CHUNK, "pool_bytes": 64 << 20, **settings})
    )


def rows_for(tokens: list[int], layer: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that depend on the whole prefix, as hidden states do: none fits another prefix."""
    # Weighted, so that the order of the tokens shows too.
    weights = torch.arange(len(tokens)) ** 2 + 1
    sums = (torch.tensor(tokens, dtype=torch.int64) * weights).cumsum(0) * 7 + layer
    return (sums[:, None] % 251 + torch.arange(HIDDEN)[None] / 16).to(dtype)


class Kv:
    """A storage manager that knows what was taken away."""

    def __init__(self) -> None:
        self.gone: set[object] = set()
        self.asked: list[object] = []

    def contains(self, key: object) -> str | None:
        self.asked = [*self.asked[-9:], key]
        return None if key in self.gone else "here"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_kept_in_the_dtype_given(dtype: torch.dtype) -> None:
    store = make_store()
    tokens = list(range(12))
    rows = rows_for(tokens, dtype=dtype)
    assert store.store_hidden_states(tokens, rows) == 3
    assert store.stats().slot_bytes == CHUNK * HIDDEN * dtype.itemsize
    found = store.retrieve_hidden_states(tokens)
    assert found is not None
    assert found.dtype == torch.float32
    assert torch.equal(found, rows.float())
    own = store.retrieve_hidden_states(tokens, dtype=None)
    assert own is not None
    assert own.dtype == dtype
    assert torch.equal(own, rows)


@pytest.mark.parametrize(
    ("storage", "error"), [("float32", 0.0), ("float16", 2**-11), ("bfloat16", 2**-8)]
)
def test_rows_may_be_kept_as_something_else(storage: str, error: float) -> None:
    store = make_store(storage_dtype=storage)
    tokens = list(range(1, 9))
    rows = rows_for(tokens)
    store.store_hidden_states(tokens, rows)
    assert store.stats().slot_bytes == CHUNK * HIDDEN * (4 if storage == "float32" else 2)
    found = store.retrieve_hidden_states(tokens)
    assert found is not None
    assert torch.equal(found, rows.to(getattr(torch, storage)).float())
    assert ((found - rows).abs() <= rows.abs() * error).all()


def test_float8_takes_a_byte_an_element_and_a_scale_a_row() -> None:
    store = make_store(storage_dtype="float8")
    tokens = list(range(1, 9))
    rows = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    store.store_hidden_states(tokens, rows)
    assert store.stats().slot_bytes == CHUNK * (HIDDEN + 4)
    found = store.retrieve_hidden_states(tokens)
    assert found is not None
    # Half a step of three bits of fraction, of the row's largest element.
    largest = rows.float().abs().amax(-1, keepdim=True)
    assert ((found - rows.float()).abs() <= largest * 2**-4).all()
    assert ((found - rows.float()).abs().amax(-1) > 0).all()


def test_a_lease_gives_what_it_was_given_whatever_the_pool_keeps() -> None:
    store = make_store(storage_dtype="bfloat16")
    rows = rows_for(list(range(6)), dtype=torch.float32)[:, None]
    paged, block_ids = make_paged(rows, 3)
    chunks = [*TokenChunker(CHUNK).chunks(list(range(4))), Chunk(4, 6, None)]
    held = store.lease_paged(chunks, paged, block_ids, layer_idxs=[0])
    held.wait()
    out = torch.empty(6, 1, HIDDEN)
    held.read(0, out)
    assert torch.equal(out, rows.bfloat16().float())
    held.release()


def test_rows_of_any_layout_are_taken() -> None:
    store = make_store()
    tokens = list(range(8))
    rows = rows_for(tokens)
    assert store.store_hidden_states(tokens, rows.t().contiguous().t()) == 2
    assert store.store_hidden_states(tokens, torch.stack([rows, rows], 1)[:, 0], layer_idx=1) == 2
    assert store.store_hidden_states(torch.tensor(tokens), rows[4:], token_offset=4) == 0
    for layer in (0, 1):
        found = store.retrieve_hidden_states(torch.tensor(tokens), layer_idx=layer)
        assert found is not None
        assert torch.equal(found, rows)


def test_devices_without_memory_of_theirs_are_refused() -> None:
    store = make_store()
    tokens = list(range(4))
    away = rows_for(tokens).to("meta")
    with pytest.raises(ValueError, match="cannot be moved from or to meta"):
        store.store_hidden_states(tokens, away)
    with pytest.raises(ValueError, match="cannot be moved from or to meta"):
        store.writer("x", (0,)).append(away[:, None])
    store.store_hidden_states(tokens, rows_for(tokens))
    for where in ({"device": "meta"}, {"out": away}):
        with pytest.raises(ValueError, match="cannot be moved from or to meta"):
            store.retrieve_hidden_states(tokens, **where)
    store.reset()
    assert store.stats().used_bytes == 0


def test_a_chunk_with_the_key_of_the_one_before_it_is_refused() -> None:
    store = make_store()
    chunks = [Chunk(0, 4, b"a"), Chunk(4, 8, b"a")]
    for offset in (0, 4):
        with pytest.raises(ValueError, match="has a key twice"):
            store.store_hidden_states(
                chunks, rows_for(list(range(8 - offset))), token_offset=offset
            )
    assert store.num_cached_chunks() == 0


def test_a_prefix_larger_than_the_pool_is_kept_from_the_front(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = make_store(pool_bytes=5 * CHUNK * HIDDEN * 4)
    tokens = list(range(40))
    rows = rows_for(tokens)
    with caplog.at_level(logging.WARNING):
        assert store.store_hidden_states(tokens, rows) == 5
        found = store.retrieve_hidden_states(tokens)
        assert found is not None
        assert torch.equal(found, rows[:20])
        assert store.store_hidden_states(tokens, rows) == 0
    (said,) = caplog.messages
    assert "room for 20 of the 40 tokens" in said
    assert "set hscache_pool_bytes higher" in said
    assert store.stats().partial_stores == 2
    assert store.stats().evicted_chunks == 0


def test_what_does_not_fit_makes_room_by_evicting_others_only() -> None:
    store = make_store(pool_bytes=5 * CHUNK * HIDDEN * 4)
    old, new = list(range(8)), list(range(100, 116))
    store.store_hidden_states(old, rows_for(old))
    assert store.store_hidden_states(new, rows_for(new)) == 4
    assert store.stats().evicted_chunks == 1
    found = store.retrieve_hidden_states(old)
    assert found is not None
    assert torch.equal(found, rows_for(old)[:4])


def test_a_prefix_that_grows_keeps_what_it_grows_from() -> None:
    store = make_store(pool_bytes=4 * CHUNK * HIDDEN * 4)
    tokens, other = list(range(16)), list(range(100, 104))
    store.store_hidden_states(tokens[:12], rows_for(tokens)[:12])
    store.store_hidden_states(other, rows_for(other))
    # The chunk in front of the new one is the least recently used leaf.
    assert store.store_hidden_states(tokens, rows_for(tokens)[12:], token_offset=12) == 1
    found = store.retrieve_hidden_states(tokens)
    assert found is not None
    assert torch.equal(found, rows_for(tokens))
    assert store.retrieve_hidden_states(other) is None


def test_a_chunk_without_a_key_takes_no_room() -> None:
    store = make_store(pool_bytes=2 * CHUNK * HIDDEN * 4)
    old = list(range(4))
    store.store_hidden_states(old, rows_for(old))
    chunks = [Chunk(0, 4, b"a"), Chunk(4, 8, None), Chunk(8, 10, None)]
    assert store.store_hidden_states(chunks, rows_for(list(range(10)))) == 1
    found = store.retrieve_hidden_states(chunks)
    assert found is not None
    assert torch.equal(found, rows_for(list(range(10)))[:4])
    stats = store.stats()
    assert (stats.evicted_chunks, stats.tokens_gathered, stats.partial_stores) == (0, 8, 0)


def test_layers_that_are_not_wanted_are_dropped_and_counted() -> None:
    store = make_store(layers=(0, 24))
    tokens = list(range(4))
    assert store.store_hidden_states(tokens, torch.zeros(3), layer_idx=7) == 0
    assert store.store_hidden_states(tokens, rows_for(tokens), layer_idx=24) == 1
    assert store.stats().dropped_stores == 1


def test_a_chunk_whose_kv_is_gone_goes_and_whoever_holds_it_reads_on() -> None:
    store = make_store()
    kv = Kv()
    store.bind_storage_manager(kv)
    tokens = list(range(12))
    rows = rows_for(tokens)[:, None]
    chunks = TokenChunker(CHUNK).chunks(tokens)
    paged, block_ids = make_paged(rows, 3)
    held = store.lease_paged(chunks, paged, block_ids, layer_idxs=[0])
    held.wait()
    kv.gone.add(chunks[1].key)
    assert store.coverage(tokens) == 4
    assert kv.asked == [chunks[0].key, chunks[1].key]
    assert not store.has_chunk(chunks[1].key)
    assert store.has_chunk(chunks[2].key)
    kv.gone.clear()
    found = store.retrieve_hidden_states(tokens)
    assert found is not None
    assert len(found) == 4
    out = torch.empty(12, 1, HIDDEN)
    held.read(0, out)
    assert torch.equal(out, rows)
    held.release()
    stats = store.stats()
    assert (stats.misses_kv_gone, stats.misses_not_stored) == (1, 1)
    assert stats.used_bytes == 2 * stats.slot_bytes


def test_a_storage_manager_that_fails_leaves_no_chunk_held() -> None:
    store = make_store()
    tokens = list(range(8))
    store.store_hidden_states(tokens, rows_for(tokens))
    keys = [chunk.key for chunk in TokenChunker(CHUNK).chunks(tokens)]

    class Failing:
        def contains(self, key: object) -> str:
            if key == keys[1]:
                raise ConnectionError("the backend is away")
            return "here"

    store.bind_storage_manager(Failing())
    with pytest.raises(ConnectionError):
        store.retrieve_hidden_states(tokens)
    assert store.drop_key(keys[0])
    assert store.stats().used_bytes == store.stats().slot_bytes


def test_a_retrieve_that_a_close_overtakes_says_so_and_leaves_nothing_held() -> None:
    store = make_store()
    tokens = list(range(8))
    store.store_hidden_states(tokens, rows_for(tokens))

    class Closing:
        def contains(self, key: object) -> str:
            store.close()
            return "here"

    store.bind_storage_manager(Closing())
    with pytest.raises(TransferError, match="closed"):
        store.retrieve_hidden_states(tokens)
    assert store.stats().used_bytes == 0
    assert store.retrieve_hidden_states(tokens) is None


def test_reset_drops_all_chunks() -> None:
    store = make_store()
    tokens = list(range(8))
    store.store_hidden_states(tokens, rows_for(tokens))
    store.reset()
    assert store.num_cached_chunks() == 0
    assert store.retrieve_hidden_states(tokens) is None
    assert store.store_hidden_states(tokens, rows_for(tokens)) == 2


def test_results_come_out_of_recycled_memory() -> None:
    store = make_store()
    tokens = list(range(256))
    store.store_hidden_states(tokens, rows_for(tokens))
    found = store.retrieve_hidden_states(tokens)
    assert found is not None
    address = found.data_ptr()
    del found
    again = store.retrieve_hidden_states(tokens)
    assert again is not None
    assert again.data_ptr() == address


def test_a_view_costs_no_copy_and_keeps_its_chunks_until_it_dies() -> None:
    store = make_store(pool_bytes=5 * CHUNK * HIDDEN * 4)
    tokens = list(range(16))
    store.store_hidden_states(tokens, rows_for(tokens))
    view = store.retrieve_hidden_states(tokens, copy=False)
    same = store.retrieve_hidden_states(tokens, copy=False)
    assert view is not None
    assert same is not None
    assert view.data_ptr() == same.data_ptr()
    assert torch.equal(view, rows_for(tokens))
    del same
    part = view[4:6]
    del view
    other = list(range(100, 120))
    assert store.store_hidden_states(other, rows_for(other)) == 1
    store.drop_key(TokenChunker(CHUNK).chunks(tokens)[1].key)
    store.reset()
    assert torch.equal(part, rows_for(tokens)[4:6])
    assert store.stats().used_bytes == 4 * store.stats().slot_bytes
    del part
    assert store.stats().used_bytes == 0
    assert store.store_hidden_states(other, rows_for(other)) == 5


def test_what_cannot_be_viewed_is_copied() -> None:
    store = make_store()
    tokens = list(range(12))
    rows = rows_for(tokens, dtype=torch.bfloat16)
    store.store_hidden_states(tokens[:4], rows[:4])
    store.store_hidden_states(list(range(50, 54)), rows_for(list(range(50, 54))).bfloat16())
    store.store_hidden_states(tokens, rows)
    apart = store.retrieve_hidden_states(tokens, dtype=None, copy=False)
    cast = store.retrieve_hidden_states(tokens[:4], copy=False)
    assert apart is not None
    assert cast is not None
    assert torch.equal(apart, rows)
    assert torch.equal(cast, rows[:4].float())
    held = store.stats()
    store.reset()
    assert held.used_bytes == 4 * held.slot_bytes
    assert store.stats().used_bytes == 0


def test_what_cuts_no_chunks_is_refused() -> None:
    with pytest.raises((TypeError, ConfigError), match=r"token database|chunk size"):
        HiddenStateStore(HiddenCacheConfig(), object())


class Worker:
    """One of many threads that do everything with one store; each row that it gets it looks at."""

    def __init__(self, store: HiddenStateStore, kv: Kv, seed: int) -> None:
        self.store = store
        self.kv = kv
        self.choose = random.Random(seed)
        self.chunker = TokenChunker(CHUNK)
        self.done: Counter[str] = Counter()
        self.writer: RequestWriter | None = None
        self.writing: list[int] = []
        self.leases: list[tuple[Lease, list[int]]] = []
        self.views: list[tuple[torch.Tensor, torch.Tensor]] = []

    def work(self, stop: float) -> None:
        while time.monotonic() < stop:
            what = self.choose.choice(ACTIONS)
            # Prefixes that share their beginnings, some with a tail.
            letters = [self.choose.randint(0, 1) for _ in range(self.choose.randint(1, 9))]
            tokens = [token for token in letters for _ in range(CHUNK)]
            tokens += [2] * self.choose.randint(0, CHUNK - 1)
            try:
                getattr(self, what)(tokens, self.choose.randint(0, 1))
            except (PoolFullError, QueueFullError):
                self.done["refused"] += 1
        self.end()

    def end(self) -> None:
        if self.writer is not None:
            self.writer.abandon()
        while self.leases:
            self.read_lease([], 0)
        while self.views:
            self.let_a_view_die([], 0)

    def check(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        assert torch.equal(found, expected), f"{what}: a wrong row, {found} for {expected}"
        self.done[what] += len(found)

    def store_rows(self, tokens: list[int], layer: int) -> None:
        start = self.choose.choice([0, 0, self.choose.randint(0, len(tokens))])
        rows = rows_for(tokens, layer)[start:]
        stored = self.store.store_hidden_states(tokens, rows, layer_idx=layer, token_offset=start)
        self.done["stored"] += stored

    def step(self, tokens: list[int], _: int) -> None:
        if self.writer is None:
            self.writer, self.writing = self.store.writer("of a thread", (0, 1)), tokens
        writer, tokens = self.writer, self.writing
        stop = min(len(tokens), writer.num_tokens + self.choose.randint(1, 2 * CHUNK))
        chunks = self.chunker.chunks(tokens)
        if self.choose.random() < 0.5:
            chunks = [chunk for chunk in chunks if chunk.end <= stop]
        try:
            writer.append(both(tokens)[writer.num_tokens : stop], chunks[len(writer._known) :])
            self.done["steps"] += 1
        except PoolFullError:
            writer.abandon()
            self.writer = None
            raise
        if stop == len(tokens):
            self.leases.append((writer.finish(), tokens))
            self.writer = None

    def rewind(self, _: list[int], __: int) -> None:
        if self.writer is not None:
            self.writer.rewind(self.choose.randint(0, self.writer.num_tokens))
            self.done["rewinds"] += 1

    def lease(self, tokens: list[int], _: int) -> None:
        chunks = self.chunker.chunks(tokens)
        end = chunks[-1].end
        if end < len(tokens):
            chunks.append(Chunk(end, len(tokens), None))
        paged, block_ids = make_paged(both(tokens), 3, seed=len(tokens))
        taken = self.store.lease_paged(chunks, paged, block_ids, layer_idxs=(0, 1))
        self.leases.append((taken, tokens))

    def read_lease(self, _: list[int], __: int) -> None:
        if self.leases:
            lease, tokens = self.leases.pop(0)
            lease.wait()
            out = torch.empty(len(tokens), 2, HIDDEN)
            lease.read(0, out)
            lease.release()
            self.check(out, both(tokens), "leased")

    def retrieve(self, tokens: list[int], layer: int) -> None:
        dtype = self.choose.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64])
        found = self.store.retrieve_hidden_states(tokens, layer_idx=layer, dtype=dtype)
        if found is not None:
            self.check(found, rows_for(tokens, layer)[: len(found)].to(dtype), "retrieved")

    def retrieve_both(self, tokens: list[int], _: int) -> None:
        out = {layer: torch.full((len(tokens) + 1, HIDDEN), -1.0) for layer in (0, 1)}
        found = self.store.retrieve_layers(tokens, (1, 0), out=out)
        if found is not None:
            rows = torch.stack([found[0], found[1]], 1)
            self.check(rows, both(tokens)[: len(rows)], "retrieved both")
            assert all((given[len(rows) :] == -1).all() for given in out.values())

    def view(self, tokens: list[int], layer: int) -> None:
        found = self.store.retrieve_hidden_states(tokens, layer_idx=layer, copy=False)
        if found is not None:
            self.views.append((found, rows_for(tokens, layer)[: len(found)]))
        if len(self.views) > 2:
            self.let_a_view_die([], 0)

    def let_a_view_die(self, _: list[int], __: int) -> None:
        if self.views:
            self.check(*self.views.pop(0), "viewed")

    def drop(self, tokens: list[int], _: int) -> None:
        key = self.choose.choice(self.chunker.chunks(tokens)).key
        self.done["dropped"] += self.store.drop_key(key)

    def kv_goes(self, tokens: list[int], layer: int) -> None:
        chunks = self.chunker.chunks(tokens)
        gone = self.choose.choice(chunks)
        self.kv.gone.add(gone.key)
        assert self.store.coverage(tokens, (layer,)) <= len(chunks) * CHUNK
        self.kv.gone.discard(gone.key)
        self.done["kv gone"] += 1

    def look(self, tokens: list[int], layer: int) -> None:
        stats = self.store.stats()
        assert 0 <= stats.free_slots <= stats.num_slots
        self.done["looks"] += self.store.coverage(tokens, (layer,)) % CHUNK == 0


ACTIONS = (
    *("store_rows", "step", "retrieve") * 4,
    *("read_lease", "retrieve_both", "view") * 2,
    *("rewind", "lease", "let_a_view_die", "drop", "kv_goes", "look"),
)


def both(tokens: list[int]) -> torch.Tensor:
    """Rows of both layers, `[n, 2, HIDDEN]`."""
    return torch.stack([rows_for(tokens, 0), rows_for(tokens, 1)], 1)


def test_many_threads_never_see_a_wrong_row() -> None:
    """HSCACHE_STRESS_S seconds of everything at once."""
    store = make_store(pool_bytes=100 * CHUNK * HIDDEN * 4, max_pending=4)
    kv = Kv()
    store.bind_storage_manager(kv)
    stop = time.monotonic() + STRESS_S
    workers = [Worker(store, kv, seed) for seed in range(8)]
    failures: list[BaseException] = []

    def guarded(worker: Worker) -> None:
        try:
            worker.work(stop)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(STRESS_S + PATIENCE_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    done = sum((worker.done for worker in workers), Counter[str]())
    expected = [
        "stored",
        "steps",
        "rewinds",
        "leased",
        "retrieved",
        "viewed",
        "dropped",
        "refused",
        "looks",
    ]
    assert all(done[what] for what in [*expected, "retrieved both", "kv gone"]), done
    for engine in store._memory.engines.values():
        engine.drain()
    store.reset()
    assert store.stats().used_bytes == 0, "nobody holds anything any more"


# Rows into tensors of the caller's


STORED = list(range(12))


@pytest.fixture
def stored() -> HiddenStateStore:
    """Layer 0 of `STORED` as bfloat16, layer 1 as float32; of a prompt that goes on."""
    store = make_store()
    store.store_hidden_states(STORED, rows_for(STORED).bfloat16())
    store.store_hidden_states(STORED, rows_for(STORED, 1), layer_idx=1)
    return store


PROMPT = [*STORED, 50, 51, 52, 53]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spare", [0, 5])
def test_an_out_takes_the_rows_and_keeps_the_rest(
    stored: HiddenStateStore, dtype: torch.dtype, spare: int
) -> None:
    out = torch.full((len(STORED) + spare, HIDDEN), -1.0, dtype=dtype)
    # The dtype is the tensor's own, whatever is asked for; nobody gets a view who gave room.
    found = stored.retrieve_hidden_states(PROMPT, dtype=torch.float64, out=out, copy=False)
    assert found is not None
    assert found.data_ptr() == out.data_ptr()
    assert len(found) == len(STORED)
    assert torch.equal(found, rows_for(STORED).bfloat16().to(dtype))
    assert (out[len(STORED) :] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float8_e4m3fn], ids=str)
def test_an_out_of_any_dtype_is_cast_to(stored: HiddenStateStore, dtype: torch.dtype) -> None:
    out = torch.full((len(STORED) + 1, HIDDEN), 9.0).to(dtype)
    found = stored.retrieve_hidden_states(PROMPT, out=out, layer_idx=1)
    assert found is not None
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(found.double(), rows_for(STORED, 1).to(dtype).double())
    assert (out[len(STORED) :].double() == 9).all()


def test_an_out_may_have_rows_apart_and_be_a_part_of_something(stored: HiddenStateStore) -> None:
    every = torch.full((2, 20, 3 * HIDDEN), -1.0)
    apart = every[0, 2:, HIDDEN : 2 * HIDDEN]
    backwards_layers = every.transpose(0, 1)[2:, 1, :HIDDEN]
    found = stored.retrieve_layers(PROMPT, [1, 0], out={0: apart, 1: backwards_layers})
    assert found is not None
    assert torch.equal(found[0], rows_for(STORED).bfloat16().float())
    assert torch.equal(found[1], rows_for(STORED, 1))
    assert torch.equal(apart[:12], found[0])
    assert torch.equal(every[1, 2:14, :HIDDEN], found[1])
    touched = torch.zeros_like(every, dtype=torch.bool)
    touched[0, 2:14, HIDDEN : 2 * HIDDEN] = True
    touched[1, 2:14, :HIDDEN] = True
    assert (every[~touched] == -1).all(), "nothing beside the rows is written"


def test_an_out_has_no_part_in_what_comes_later(stored: HiddenStateStore) -> None:
    out = torch.empty(12, HIDDEN)
    found = stored.retrieve_hidden_states(PROMPT, out=out)
    stored.reset()
    stored.store_hidden_states(PROMPT, torch.zeros(16, HIDDEN))
    assert found is not None
    assert torch.equal(found, rows_for(STORED).bfloat16().float())


def test_an_out_stays_as_it_is_where_nothing_is_found(stored: HiddenStateStore) -> None:
    out = torch.full((12, HIDDEN), -1.0)
    assert stored.retrieve_hidden_states([99] * 12, out=out) is None
    assert stored.retrieve_layers(PROMPT, [0, 7], out={0: out, 7: out}) is None
    assert (out == -1).all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(11, HIDDEN), r"out has shape \[11, 16\] .* must be \[12 or more, 16\]"),
        (torch.empty(12, HIDDEN + 1), r"shape \[12, 17\]"),
        (torch.empty(12, 1, HIDDEN), r"shape \[12, 1, 16\]"),
        (torch.empty(12 * HIDDEN), r"shape \[192\]"),
        (torch.empty(12, 2 * HIDDEN)[:, ::2], r"strides \[32, 2\], must be .* hidden contiguous"),
        (torch.empty(HIDDEN, 12).t(), r"strides \[1, 12\]"),
    ],
    ids=["short", "wide", "3-D", "1-D", "elements apart", "transposed"],
)
def test_an_out_that_the_rows_do_not_fit_is_refused_and_nothing_stays_held(
    stored: HiddenStateStore, out: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stored.retrieve_hidden_states(PROMPT, out=out)
    good = torch.empty(12, HIDDEN)
    with pytest.raises(ValueError, match=message):
        stored.retrieve_layers(PROMPT, [1, 0], out={1: good, 0: out})
    stored.reset()
    assert stored.stats().used_bytes == 0


def test_a_layer_without_an_out_is_refused_and_nothing_stays_held(
    stored: HiddenStateStore,
) -> None:
    with pytest.raises(ValueError, match=r"out has layers \[0\], must have one for layer 1 too"):
        stored.retrieve_layers(PROMPT, [0, 1], out={0: torch.empty(12, HIDDEN)})
    stored.reset()
    assert stored.stats().used_bytes == 0


# What is counted


def test_a_miss_says_why() -> None:
    store = make_store(pool_bytes=3 * CHUNK * HIDDEN * 4)
    kv = Kv()
    store.bind_storage_manager(kv)
    tokens, other = list(range(8)), list(range(100, 108))
    keys = [chunk.key for chunk in TokenChunker(CHUNK).chunks(tokens)]

    def misses(ask: list[int]) -> tuple[int, int, int]:
        before = store.stats()
        store.retrieve_hidden_states(ask)
        after = store.stats()
        return (
            after.misses_kv_gone - before.misses_kv_gone,
            after.misses_evicted - before.misses_evicted,
            after.misses_not_stored - before.misses_not_stored,
        )

    assert misses(tokens) == (0, 0, 1)
    store.store_hidden_states(tokens, rows_for(tokens))
    assert misses(tokens) == (0, 0, 0)
    assert misses([*tokens, 7, 7, 7, 7]) == (0, 0, 1), "the prompt goes on"
    assert misses(tokens[:5]) == (0, 0, 0), "its tail is no chunk"
    store.store_hidden_states(other, rows_for(other))  # evicts the second chunk
    assert misses(tokens) == (0, 1, 0)
    kv.gone.add(keys[0])
    assert misses(tokens) == (1, 0, 0)
    kv.gone.clear()
    assert misses(tokens) == (0, 0, 1), "dropped, not evicted"
    store.store_hidden_states(tokens[:4], rows_for(tokens)[:4], layer_idx=1)
    assert misses(tokens[:4]) == (0, 0, 1), "another layer is there"
    store.reset()
    assert misses(tokens) == (0, 0, 1)
    kv.gone.add(keys[0])
    assert misses(tokens) == (1, 0, 0), "KV is asked first"


def test_coverage_counts_misses_and_finds_nothing_in_the_counts_of_retrieves() -> None:
    store = make_store()
    tokens = list(range(8))
    store.store_hidden_states(tokens[:4], rows_for(tokens)[:4])
    assert store.coverage(tokens) == 4
    stats = store.stats()
    assert (stats.misses_not_stored, stats.tokens_found, sum(stats.retrieve_s.counts)) == (1, 0, 0)


def test_what_took_how_long_is_counted_where_rows_were_copied() -> None:
    store = make_store()
    tokens = list(range(8))
    store.store_hidden_states(tokens[:3], rows_for(tokens)[:3])  # not one whole chunk
    assert store.retrieve_hidden_states(tokens) is None
    empty = store.stats()
    assert sum(empty.store_s.counts) == sum(empty.retrieve_s.counts) == 0
    assert len(empty.store_s.counts) == len(empty.store_s.bounds_s) + 1
    for count in range(1, 4):
        store.store_hidden_states(tokens, rows_for(tokens))
        store.retrieve_hidden_states(tokens)
        stats = store.stats()
        assert sum(stats.store_s.counts) == sum(stats.retrieve_s.counts) == count
        assert stats.store_s.total_s > empty.store_s.total_s
    assert sum(empty.store_s.counts) == 0, "a snapshot does not change"
    assert (stats.tokens_found, stats.bytes_retrieved) == (24, 3 * rows_for(tokens).nbytes)


def test_a_duration_is_counted_below_its_bound() -> None:
    durations = Durations()
    for seconds in (0.0, 0.0001, 0.0002, 3.0, 100.0):
        durations.add(seconds)
    snapshot = durations.snapshot()
    counted = dict(zip([*snapshot.bounds_s, None], snapshot.counts, strict=True))
    assert (counted[0.0001], counted[0.0003], counted[3.0], counted[None]) == (2, 1, 1, 1)
    assert snapshot.total_s == pytest.approx(103.0003)


# Chunks in place of token ids


@pytest.mark.parametrize("offset", [0, 3, 4, 12])
def test_chunks_may_stand_for_token_ids(offset: int) -> None:
    store = make_store()
    tokens = list(range(12))
    chunks = TokenChunker(CHUNK).chunks(tokens)
    rows = rows_for(tokens)[offset:]
    stored = store.store_hidden_states(chunks, rows, token_offset=offset)
    assert stored == len([chunk for chunk in chunks if chunk.start >= offset])
    store.store_hidden_states(tokens, rows_for(tokens))
    found = store.retrieve_hidden_states(chunks)
    assert found is not None
    assert torch.equal(found, rows_for(tokens))


def test_rows_must_be_as_many_as_the_chunks_tokens() -> None:
    store = make_store()
    chunks = TokenChunker(CHUNK).chunks(list(range(8)))
    with pytest.raises(ValueError, match="has 7 rows, must have one for each of the 8 token ids"):
        store.store_hidden_states(chunks, rows_for(list(range(7))))
    with pytest.raises(ValueError, match="token_offset is 9, must be from 0 to the 8"):
        store.store_hidden_states(chunks, rows_for([]), token_offset=9)
    assert store.store_hidden_states([], rows_for([])) == 0


def test_placeholders_keep_two_pictures_apart() -> None:
    store = make_store()
    chunker = TokenChunker(CHUNK)
    tokens = [1, 2, 3, 4, 7, 7, 7, 7, 5, 6, 7, 8]  # 7: a picture
    one, other = (chunker.chunks(tokens, [Placeholder(4, 4, name)]) for name in ("cat", "dog"))
    store.store_hidden_states(one, rows_for(tokens))
    assert store.coverage(other) == store.coverage(tokens) == 4
    assert store.store_hidden_states(other, -rows_for(tokens)) == 2, "what comes before is shared"
    for chunks, sign in ((one, 1), (other, -1)):
        found = store.retrieve_hidden_states(chunks)
        assert found is not None
        assert torch.equal(found[:4], rows_for(tokens)[:4])
        assert torch.equal(found[4:], sign * rows_for(tokens)[4:])


# Weights


def test_after_new_weights_only_their_rows_answer() -> None:
    store = make_store()
    tokens = list(range(8))
    store.store_hidden_states(tokens, rows_for(tokens))
    store.reset(weights_epoch=5)
    assert store.stats().weights_epoch == 5
    assert store.coverage(tokens) == 0
    store.store_hidden_states(tokens, -rows_for(tokens))
    found = store.retrieve_hidden_states(tokens)
    assert found is not None
    assert torch.equal(found, -rows_for(tokens))
    for epoch in (5, 4):
        with pytest.raises(ValueError, match=f"weights_epoch is {epoch}, was 5 already"):
            store.reset(weights_epoch=epoch)
    assert store.coverage(tokens) == 8, "a refused number drops nothing"
    store.reset()
    assert store.weights_epoch == 6


# The end, with everything alive


def test_close_leaves_what_lives_readable_and_lets_go_of_it_later() -> None:
    store = make_store()
    tokens = list(range(8))
    store.store_hidden_states(tokens, rows_for(tokens))
    view = store.retrieve_hidden_states(tokens, copy=False)
    writer = store.writer("x", (0,))
    writer.append(rows_for(tokens)[:6, None], TokenChunker(CHUNK).chunks(tokens))
    ending = store.writer("y", (0,))
    store.close()
    assert view is not None
    assert torch.equal(view, rows_for(tokens))
    with pytest.raises(HiddenCacheError, match="the store is closed"):
        writer.append(rows_for(tokens)[6:, None])
    with pytest.raises(HiddenCacheError, match="the store is closed"):
        ending.finish()
    writer.abandon()
    assert store.stats().used_bytes == 2 * store.stats().slot_bytes, "the view's"
    del view
    assert store.stats().used_bytes == 0


def test_a_storage_manager_may_call_the_store() -> None:
    store = make_store()
    tokens = list(range(8))

    class Asking:
        def contains(self, key: object) -> str:
            store.drop_key(key)
            return f"one of {store.stats().num_chunks}"

    store.store_hidden_states(tokens, rows_for(tokens))
    store.bind_storage_manager(Asking())
    found = store.retrieve_hidden_states(tokens)
    assert found is not None
    assert torch.equal(found, rows_for(tokens)), "who reads reads on"
    assert store.stats().used_bytes == 0
