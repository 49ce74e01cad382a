"""The store: rows in, rows out, start, keys and index, beside floors and, with --peers, LMCache.

The work is 8192 x 4096 bfloat16 rows in chunks of 256 tokens. "Store" copies them into a warm
pool under a prefix that is not there (the pool is emptied between repetitions, untimed). The floor
is a plain copy of the same bytes into warm memory on all threads.

"Retrieve" brings them back as float32, beside a plain copy with that cast into warm memory, or as
they are, beside a plain copy. Results go to memory that an earlier one left (warm), to memory of
the result pool that nobody had yet (first), or past a result pool whose memory is all in use
(exhausted). Before each timed call there is a pause: torch's threads spin for a while after their
work, and would take a core from whoever comes next.

With --peers each is timed beside LMCache's HiddenStateStore, which then stands where a floor does:
"of floor" is how many times as fast ours is. The plain copies are there as well, since no store
that copies is faster than they are. "Start" is making a store of 4 GiB; ours also until its first
chunk is whole.

"Keys" are those of 8192 tokens and "index" is finding a chunk and marking it as used, each for one
chunk. Bytes and tokens are counted, not timed. Before anything is timed, results are compared bit
for bit.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.core.bench import Bench
from benchmarks.core.errors import BenchmarkError
from benchmarks.core.measure import Budget, Contender

CHUNK = 256
HIDDEN = 4096
TOKENS = 8192
DTYPE = torch.bfloat16
START_BYTES = 4 << 30
COUNTED_POOL_BYTES = 32 << 20
INDEX_CHUNKS = 100_000
LARGE_INDEX_CHUNKS = 1_000_000
PREFIX = 32
LOOKED_UP = 100
PAUSE = 0.01

STORE_TARGET, STORE_GOAL = 0.85, 2.5
RETRIEVE_TARGET, RETRIEVE_GOAL = 0.80, 3.5
START_GOAL = 20.0
TOKENS_GOAL = 2.0
INDEX_SECONDS = 2e-6
INDEX_BYTES = 400
# LMCache's takes seconds.
FEW = Budget(seconds=0.0, min_rounds=5, max_rounds=5)

OURS = "ours"
THEIRS = "LMCache"
COPY = "plain copy, warm"
CAST = "copy with cast, warm"

try:
    from hidden_cache import HiddenCacheConfig, HiddenStateStore, _native
    from hidden_cache.index import ChunkIndex
    from hidden_cache.keys import Chunk, TokenChunker
    from hidden_cache.row_format import format_for
except ImportError as error:
    raise BenchmarkError(f"hidden_cache cannot be imported ({error}): build it first") from error


def run(bench: Bench) -> None:
    tokens, start_bytes = (1024, START_BYTES >> 4) if bench.quick else (TOKENS, START_BYTES)
    row_bytes = tokens * HIDDEN * DTYPE.itemsize
    bench.touch(start_bytes + 24 * row_bytes)
    torch.set_num_threads(bench.threads)
    bench.parameters |= {"tokens": tokens, "hidden": HIDDEN, "chunk": CHUNK, "dtype": "bfloat16"}
    generator = torch.Generator().manual_seed(bench.seed)
    prefix = Prefix(
        torch.randint(0, 1 << 17, (tokens,), generator=generator).tolist(),
        torch.randn(tokens, HIDDEN, generator=generator).to(DTYPE),
    )
    left_out: list[str] = []
    peer = _peer(bench.peers, left_out)
    groups: dict[str, Callable[[], list[Contender]]] = {
        "store": lambda: _store(prefix, peer),
        "retrieve, float32": lambda: _retrieve(prefix),
        "retrieve, float32, fresh memory": lambda: _retrieve_fresh(prefix, peer),
        "retrieve, as stored": lambda: _retrieve_as_stored(prefix),
    }
    start = f"start, {start_bytes / 2**30:g} GiB"
    if peer is not None:
        bench.parameters["lmcache"] = peer.version
        groups["store, times LMCache's"] = lambda: _store_beside(prefix, peer)
        groups["retrieve, times LMCache's"] = lambda: _retrieve_beside(prefix, peer)
    groups[start] = lambda: _start(prefix, start_bytes, peer)
    groups["keys, of one chunk"] = lambda: _keys(prefix, peer)
    sizes = [INDEX_CHUNKS // 10 if bench.quick else INDEX_CHUNKS]
    if bench.quick:
        left_out.append(f"index of {LARGE_INDEX_CHUNKS} chunks: --quick")
    else:
        sizes.append(LARGE_INDEX_CHUNKS)
    counted = [_count_tokens(prefix, peer)]
    counted += [_count_bytes(sizes[-1], layers) for layers in (1, 4)]
    for size in sizes:
        groups[f"index of {size} chunks, one"] = lambda size=size: _index(  # type: ignore[misc]
            size, bench.seed, through_store=size == sizes[0]
        )
    bench.parameters["counted"] = list(counted)
    if left_out:
        bench.parameters["left_out"] = list(left_out)
    for name, contenders in bench.groups(groups):
        few = name == start and peer is not None
        bench.measure(name, contenders(), budget=FEW if few and not bench.quick else None)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is stored."""

    token_ids: list[int]
    rows: torch.Tensor

    @property
    def num_chunks(self) -> int:
        return len(self.token_ids) // CHUNK


class Peer:
    """LMCache's store over its own token database. Raises ImportError without LMCache."""

    def __init__(self) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        self.version = importlib.metadata.version("lmcache")
        self._store = importlib.import_module("lmcache.v1.hidden_state_store").HiddenStateStore
        self._config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
        metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=DTYPE,
            kv_shape=(2, 2, CHUNK, 1, 16),
        )
        databases = importlib.import_module("lmcache.v1.token_database")
        self.database = databases.ChunkedTokenDatabase(self._configured(1 << 20), metadata)

    def make(self, pool_bytes: int) -> Any:
        return self._store(self._configured(pool_bytes), self.database)

    def keys(self, token_ids: list[int]) -> list[Any]:
        return [key for _, _, key in self.database.process_tokens(tokens=token_ids)]

    def _configured(self, pool_bytes: int) -> Any:
        return self._config.from_defaults(
            chunk_size=CHUNK,
            enable_hidden_state_cache=True,
            max_hidden_state_cpu_size=pool_bytes / 2**30,
            save_unfull_chunk=False,
        )


def _peer(asked: bool, left_out: list[str]) -> Peer | None:
    if not asked:
        left_out.append("LMCache: ask for it with --peers")
        return None
    try:
        return Peer()
    except Exception as error:  # whatever another project's import runs into
        left_out.append(f"LMCache: it cannot be used here ({type(error).__name__}: {error})")
        return None


def _make(pool_bytes: int, database: Any = None, **settings: Any) -> HiddenStateStore:
    config = HiddenCacheConfig(
        pool_bytes=pool_bytes, chunk_size=CHUNK, **{"touch_pages": "off", **settings}
    )
    return HiddenStateStore(config, database)


def _timed(work: Callable[[], object], before: Callable[[], object] | None = None) -> Any:
    """A repetition: `before` and a pause come first, untimed, as is what becomes of the result."""

    def repetition() -> float:
        if before is not None:
            before()
        time.sleep(PAUSE)
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        del result
        return seconds

    return repetition


def _filled(prefix: Prefix, database: Any = None, **settings: Any) -> HiddenStateStore:
    """A store of ours with the prefix in it, whose results were found to be right."""
    store = _make(2 * prefix.rows.nbytes, database, **settings)
    _check(store, prefix, OURS)
    unchanged = store.retrieve_hidden_states(prefix.token_ids, dtype=None)
    if unchanged is None or not _same_bits(unchanged, prefix.rows):
        raise BenchmarkError("ours gives other rows than were stored")
    return store


def _check(store: Any, prefix: Prefix, name: str) -> None:
    """Stores the prefix, and refuses a result that is not the exact cast of it."""
    stored = store.store_hidden_states(prefix.token_ids, prefix.rows)
    found = store.retrieve_hidden_states(prefix.token_ids)
    if stored != prefix.num_chunks or found is None:
        raise BenchmarkError(f"{name} stored {stored} of {prefix.num_chunks} chunks")
    if not _same_bits(found, prefix.rows.float()):
        raise BenchmarkError(f"{name} gives other rows than were stored")


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


# Rows


def _store(prefix: Prefix, peer: Peer | None) -> list[Contender]:
    found = [_storing(prefix, _filled(prefix), floor=COPY, target_ratio=STORE_TARGET)]
    if peer is not None:
        found.append(_peer_storing(prefix, peer, floor=COPY))
    return [*found, _copy(prefix, DTYPE)]


def _copy(prefix: Prefix, dtype: torch.dtype, **more: Any) -> Contender:
    """Into warm memory, on torch's threads."""
    target = torch.ones_like(prefix.rows, dtype=dtype)
    name = COPY if dtype == DTYPE else CAST
    work = _timed(lambda: target.copy_(prefix.rows))
    return Contender(name, work, bytes=prefix.rows.nbytes, **more)


def _store_beside(prefix: Prefix, peer: Peer) -> list[Contender]:
    same_keys = _filled(prefix, peer.database)
    return [
        _storing(prefix, _filled(prefix), floor=THEIRS, target_ratio=STORE_GOAL),
        _storing(prefix, same_keys, f"{OURS}, with LMCache's keys", floor=THEIRS),
        _copy(prefix, DTYPE, floor=THEIRS),
        _peer_storing(prefix, peer),
    ]


def _storing(prefix: Prefix, store: HiddenStateStore, name: str = OURS, **more: Any) -> Contender:
    def work() -> None:
        store.store_hidden_states(prefix.token_ids, prefix.rows)

    return Contender(name, _timed(work, store.reset), bytes=prefix.rows.nbytes, **more)


def _peer_storing(prefix: Prefix, peer: Peer, **more: Any) -> Contender:
    store = _peer_filled(prefix, peer)
    keys = peer.keys(prefix.token_ids)

    def work() -> None:
        store.store_hidden_states(prefix.token_ids, prefix.rows)

    def reset() -> None:
        for key in keys:
            store.drop_key(key)

    return Contender(THEIRS, _timed(work, reset), bytes=prefix.rows.nbytes, **more)


def _peer_filled(prefix: Prefix, peer: Peer) -> Any:
    store = peer.make(4 * prefix.rows.nbytes)
    _check(store, prefix, THEIRS)
    return store


def _retrieve(prefix: Prefix) -> list[Contender]:
    # Without those that meet fresh memory: they would take the rounds' time, and the caches.
    warm = _retrieving_warm(prefix, floor=CAST, target_ratio=RETRIEVE_TARGET)
    return [warm, _copy(prefix, torch.float32)]


def _retrieve_fresh(prefix: Prefix, peer: Peer | None) -> list[Contender]:
    found = _retrieving_fresh(prefix, floor=CAST)
    if peer is not None:
        found.append(_peer_retrieving(prefix, peer, floor=CAST))
    return [*found, _copy(prefix, torch.float32)]


def _retrieve_beside(prefix: Prefix, peer: Peer) -> list[Contender]:
    same_keys = _filled(prefix, peer.database)
    return [
        _retrieving_warm(prefix, floor=THEIRS, target_ratio=RETRIEVE_GOAL),
        *_retrieving_fresh(prefix, floor=THEIRS),
        Contender(
            f"{OURS}, warm, with LMCache's keys",
            _timed(lambda: same_keys.retrieve_hidden_states(prefix.token_ids)),
            bytes=prefix.rows.nbytes,
            floor=THEIRS,
        ),
        _copy(prefix, torch.float32, floor=THEIRS),
        _peer_retrieving(prefix, peer),
    ]


def _retrieving_warm(prefix: Prefix, *, floor: str, target_ratio: float) -> Contender:
    store = _filled(prefix)
    return Contender(
        f"{OURS}, warm",
        _timed(lambda: store.retrieve_hidden_states(prefix.token_ids)),
        bytes=prefix.rows.nbytes,
        floor=floor,
        target_ratio=target_ratio,
    )


def _retrieving_fresh(prefix: Prefix, *, floor: str) -> list[Contender]:
    """First, and exhausted."""
    token_ids, nbytes = prefix.token_ids, prefix.rows.nbytes
    exhausted = _make(2 * nbytes, result_bytes=2 * nbytes)
    exhausted.store_hidden_states(token_ids, prefix.rows)
    kept = exhausted.retrieve_hidden_states(token_ids)

    def first() -> float:
        store = _make(2 * nbytes)
        store.store_hidden_states(token_ids, prefix.rows)
        seconds: float = _timed(lambda: store.retrieve_hidden_states(token_ids))()
        store.close()
        return seconds

    def past_kept() -> torch.Tensor | None:
        assert kept is not None
        return exhausted.retrieve_hidden_states(token_ids)

    return [
        Contender(f"{OURS}, first", first, bytes=nbytes, floor=floor),
        Contender(f"{OURS}, exhausted", _timed(past_kept), bytes=nbytes, floor=floor),
    ]


def _peer_retrieving(prefix: Prefix, peer: Peer, **more: Any) -> Contender:
    store = _peer_filled(prefix, peer)
    work = _timed(lambda: store.retrieve_hidden_states(prefix.token_ids))
    return Contender(THEIRS, work, bytes=prefix.rows.nbytes, **more)


def _retrieve_as_stored(prefix: Prefix) -> list[Contender]:
    store = _filled(prefix)
    return [
        Contender(
            f"{OURS}, warm",
            _timed(lambda: store.retrieve_hidden_states(prefix.token_ids, dtype=None)),
            bytes=prefix.rows.nbytes,
            floor=COPY,
            target_ratio=RETRIEVE_TARGET,
        ),
        _copy(prefix, DTYPE),
    ]


# Start and size


def _start(prefix: Prefix, size: int, peer: Peer | None) -> list[Contender]:
    def making(make: Callable[[int], Any], *, with_rows: bool = False) -> Callable[[], float]:
        def repetition() -> float:
            start = time.perf_counter()
            store = make(size)
            if with_rows:
                store.store_hidden_states(prefix.token_ids[:CHUNK], prefix.rows[:CHUNK])
            seconds = time.perf_counter() - start
            if with_rows and store.num_cached_chunks() != 1:
                raise BenchmarkError("the first chunk did not arrive")
            store.close()
            return seconds

        return repetition

    def ours(size: int) -> HiddenStateStore:
        return _make(size, touch_pages="background")

    beside: dict[str, Any] = {} if peer is None else {"floor": THEIRS, "target_ratio": START_GOAL}
    found = [
        Contender(OURS, making(ours), **beside),
        Contender(f"{OURS}, and a chunk stored", making(ours, with_rows=True), **beside),
    ]
    if peer is not None:
        found.append(Contender(THEIRS, making(peer.make)))
    return found


def _count_tokens(prefix: Prefix, peer: Peer | None) -> str:
    """How many tokens fit a pool, by storing more than do."""
    size = min(COUNTED_POOL_BYTES, prefix.rows.nbytes // 2)
    slot_bytes = format_for(DTYPE, HIDDEN, "").slot_bytes(CHUNK)
    store = _make(size)
    store.store_hidden_states(prefix.token_ids, prefix.rows)
    ours = store.num_cached_chunks() * CHUNK
    store.close()
    text = f"tokens in {size >> 20} MiB: {ours} (by the slot's bytes {size // slot_bytes * CHUNK})"
    if peer is None:
        return text
    theirs = peer.make(size)
    theirs.store_hidden_states(prefix.token_ids, prefix.rows)
    fit = theirs.num_cached_chunks() * CHUNK
    theirs.close()
    return f"{text}, LMCache {fit}: {ours / fit:.2f} times as many, goal {TOKENS_GOAL:g}"


# Keys and index


def _keys(prefix: Prefix, peer: Peer | None) -> list[Contender]:
    chunker = TokenChunker(CHUNK)
    tensor = torch.tensor(prefix.token_ids)
    flat = array("q", prefix.token_ids)
    pieces = [flat[start : start + CHUNK].tobytes() for start in range(0, len(flat), CHUNK)]

    def per_chunk(work: Callable[[], object]) -> Callable[[], float]:
        def repetition() -> float:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) / prefix.num_chunks

        return repetition

    def hashing() -> None:
        key = bytes(32)
        for piece in pieces:
            key = hashlib.sha256(key + piece).digest()

    floor = "SHA-256 alone"
    found = [
        Contender("ours, a list", per_chunk(lambda: chunker.chunks(prefix.token_ids)), floor=floor),
        Contender("ours, a tensor", per_chunk(lambda: chunker.chunks(tensor)), floor=floor),
    ]
    if peer is not None:
        theirs = per_chunk(lambda: peer.keys(prefix.token_ids))
        found.append(Contender(f"{THEIRS}, a list", theirs, floor=floor))
    return [*found, Contender(floor, per_chunk(hashing))]


def _prefixes(count: int) -> list[list[Chunk]]:
    """`count` chunks of one token each, in prefixes."""
    return [
        [
            Chunk(place, place + 1, hashlib.sha256(b"%d,%d" % (number, place)).digest())
            for place in range(PREFIX)
        ]
        for number in range(count // PREFIX)
    ]


def _store_of(prefixes: list[list[Chunk]]) -> HiddenStateStore:
    """A store that has these prefixes, whose rows are as small as can be."""
    config = HiddenCacheConfig(
        pool_bytes=512 << 20, chunk_size=1, touch_pages="off", result_bytes=0
    )
    store = HiddenStateStore(config)
    paged = torch.zeros(PREFIX, 1, 1, 32, dtype=DTYPE)
    table = range(PREFIX)
    for chunks in prefixes:
        ticket = store.store_paged(chunks, paged, table, layer_idxs=[0])
        assert ticket is not None
        ticket.wait()
    if store.coverage(prefixes[0]) != PREFIX or store.num_cached_chunks() != PREFIX * len(prefixes):
        raise BenchmarkError("the store does not have all chunks that were stored")
    return store


def _count_bytes(count: int, layers: int) -> str:
    """What an index has on the heap for a chunk, its key aside: Python's heap and the native one.

    In a process of its own, whose heap has no holes that it would fit into unseen.
    """
    code = f"import benchmarks.store as store; print(store.heap_of_index({count}, {layers}))"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=600
    )
    return (
        f"bytes of bookkeeping a chunk of {layers} layers at {count} chunks: "
        f"{float(ran.stdout):.0f}, target at most {INDEX_BYTES}"
    )


def heap_of_index(count: int, layers: int) -> float:
    """Bytes a chunk, as the system counts what this process has in memory."""
    prefixes = _prefixes(count)
    before = _heap()
    index = _index_of(prefixes, layers)
    after = _heap()
    return (after - before) / len(index)


def _heap() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _index_of(prefixes: list[list[Chunk]], layers: int) -> ChunkIndex:
    index = ChunkIndex()
    slots = len(prefixes) * PREFIX * layers
    pool = _native.SlotPool(_native.Arena(slots * 64), 64)
    form = index.format(format_for(DTYPE, 32, ""), pool)
    for chunks in prefixes:
        parent = None
        for chunk in chunks:
            number = index.add(chunk.key, parent)
            given = index.allocate(form, layers)
            assert given is not None
            index.fill(number, form, list(enumerate(given)), [])
            parent = chunk.key
        index.settle()
    if len(index) != len(prefixes) * PREFIX:
        raise BenchmarkError("the index does not have all chunks that were added")
    return index


def _index(count: int, seed: int, *, through_store: bool) -> list[Contender]:
    prefixes = _prefixes(count)
    index = _index_of(prefixes, 1)
    plain = {chunk.key: chunk for chunks in prefixes for chunk in chunks}
    shuffled = random.Random(seed)

    def per_chunk(look_up: Callable[[list[Chunk]], object]) -> Callable[[], float]:
        def repetition() -> float:
            looked_up = shuffled.sample(prefixes, LOOKED_UP)
            start = time.perf_counter()
            for chunks in looked_up:
                look_up(chunks)
            return (time.perf_counter() - start) / LOOKED_UP / PREFIX

        return repetition

    def touch(chunks: list[Chunk]) -> None:
        numbers = index.find([chunk.key for chunk in chunks])
        if index.pin_prefix(numbers, [0]) != PREFIX:
            raise BenchmarkError("the index does not have a prefix that was added")
        index.unpin(numbers)

    def look_up(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            plain[chunk.key]

    floor = "a dict's lookup"
    found = [
        Contender(
            "lookup, touch, pin, unpin", per_chunk(touch), floor=floor, target_seconds=INDEX_SECONDS
        ),
        Contender(floor, per_chunk(look_up)),
    ]
    if through_store:
        # All of it: lookup, touch, pin, release.
        store = _store_of(prefixes)
        found.insert(1, Contender("a store's coverage", per_chunk(store.coverage), floor=floor))
    return found
