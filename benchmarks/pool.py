"""The pool's memory: until it is usable, until all of it is touched, slots, first writes.

"Usable" is from nothing to the first rows in the pool, at a size of 8 GiB, for the arena alone and
for the store (which starts its transfer engine too). Beside it: a buffer of a hundredth of the size
that is written before it counts as usable.

"Touch" is the background's way to the end, beside one thread that writes a byte to each page of
fresh memory. All 8 GiB are touched a single time, after one that is not counted.

"Slots" gives the time of one slot: allocated and freed one by one or a thousand at a time, in a
pool that is half full; one by one where each takes an extent of the arena and gives it back; and
runs of eight neighbours where every second slot is taken at random. The calls come from Python, as
the store's do; taking a number off a Python list is the floor.

"First writes" are the same rows stored into a pool that was touched and into one that was not. The
floor is a plain copy into warm memory. Memory is backed by the virtual machine's host beforehand:
what is timed is the guest's own work.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.core.bench import Bench
from benchmarks.core.errors import BenchmarkError
from benchmarks.core.measure import Budget, Contender
from benchmarks.core.memory import available_bytes

TARGET_SECONDS = 0.05
LARGE_BYTES = 8 << 30
TOUCHED_BYTES = 1 << 30
WRITTEN_BYTES = 256 << 20
SLOT_BYTES = 1 << 20
CHUNK = 256
HIDDEN = SLOT_BYTES // CHUNK // 2
SLOTS = 16_384
BATCH = 1_000
RUN = 8
# All at once: more than this would take longer than the rest together.
ONCE = Budget(seconds=0.0, min_rounds=1, max_rounds=1)

try:
    from hidden_cache import HiddenCacheConfig, HiddenStateStore, _native
except ImportError as error:
    raise BenchmarkError(f"hidden_cache cannot be imported ({error}): build it first") from error


def run(bench: Bench) -> None:
    scale = 16 if bench.quick else 1
    groups: dict[str, Callable[[], list[Contender]]] = {
        f"usable, {_gib(LARGE_BYTES)}": _usable,
        f"touch, {_gib(TOUCHED_BYTES // scale)}": lambda: _touch(TOUCHED_BYTES // scale),
        "slots, time of one": _slots,
        f"first writes, {WRITTEN_BYTES // scale >> 20} MiB": lambda: _first_writes(
            WRITTEN_BYTES // scale
        ),
    }
    bench.touch(max(TOUCHED_BYTES, 3 * WRITTEN_BYTES) // scale)
    large = f"touch, {_gib(LARGE_BYTES)}"
    if bench.quick:
        bench.parameters["left_out"] = f"{large}: --quick"
    elif (why := _too_small()) is not None:
        bench.parameters["left_out"] = f"{large}: {why}"
    else:
        groups[large] = lambda: [_background(LARGE_BYTES)]
    bench.parameters |= {"slot_bytes": SLOT_BYTES, "slots": SLOTS, "run": RUN}
    for name, contenders in bench.groups(groups):
        bench.measure(name, contenders(), budget=ONCE if name == large else None)


def _gib(size: int) -> str:
    return f"{size / 2**30:g} GiB"


def _too_small() -> str | None:
    """Why this machine does not touch the large pool; None where it does."""
    # The background stops where an eighth of the machine would be left, and so does this.
    need = LARGE_BYTES + LARGE_BYTES // 4 + _native.machine_memory_bytes() // 8
    available = available_bytes()
    if available is None or available >= need:
        return None
    return f"{available / 1e9:.1f} GB of memory are available, {need / 1e9:.1f} are needed"


def _arena(size: int, slot_bytes: int = SLOT_BYTES) -> tuple[_native.Arena, _native.SlotPool]:
    # Addresses only: where the machine is smaller, only what is touched counts.
    arena = _native.Arena(size, memory_limit=max(size, _native.machine_memory_bytes()))
    return arena, _native.SlotPool(arena, slot_bytes)


class _Writer:
    """Stores rows into the first slots of a pool, by the transfer engine."""

    def __init__(self, slots: int) -> None:
        self.rows = torch.randint(0, 256, (slots, SLOT_BYTES), dtype=torch.uint8)
        self._engine = _native.TransferEngine()
        strides = (SLOT_BYTES, SLOT_BYTES, SLOT_BYTES)
        self._view = _native.PagedView(self.rows.data_ptr(), (slots, 1, 1), SLOT_BYTES, strides)
        self._table = list(range(slots))
        self._pieces = [(0, slot, 1, slot, 0) for slot in range(slots)]

    def write(self, pool: _native.SlotPool) -> None:
        ticket = self._engine.gather(self._view, self._table, self._pieces, pool)
        assert ticket is not None
        ticket.wait()
        if not ticket.done:
            raise BenchmarkError(f"rows did not arrive: {ticket.error}")

    def check(self, pool: _native.SlotPool) -> None:
        arrived = torch.empty_like(self.rows)
        pool.read_rows(self._table, SLOT_BYTES, 0, len(self._table), arrived.data_ptr(), SLOT_BYTES)
        if not torch.equal(arrived, self.rows):
            raise BenchmarkError("rows in the pool are not those that were stored")


def _usable() -> list[Contender]:
    writer = _Writer(1)
    paged = torch.randn(1, 1, CHUNK, HIDDEN).to(torch.bfloat16)
    config = HiddenCacheConfig(
        pool_bytes=min(LARGE_BYTES, _native.machine_memory_bytes()), chunk_size=CHUNK
    )

    def arena() -> object:
        arena, pool = _arena(LARGE_BYTES)
        arena.touch_in_background(1.0)
        writer.write(pool)
        return arena, pool

    def store() -> float:
        start = time.perf_counter()
        store = HiddenStateStore(config)
        ticket = store.store_paged(range(CHUNK), paged, [0], layer_idxs=[0])
        assert ticket is not None
        ticket.wait()
        seconds = time.perf_counter() - start
        if not ticket.done or store.coverage(range(CHUNK)) != CHUNK:
            raise BenchmarkError(f"rows did not arrive: {ticket.error}")
        store.close()
        return seconds

    def written_first() -> object:
        return torch.zeros(LARGE_BYTES // 100, dtype=torch.uint8)

    return [
        Contender("arena, touched in the background", arena, target_seconds=TARGET_SECONDS),
        Contender("store, its rows whole", store, target_seconds=TARGET_SECONDS),
        Contender("a hundredth of it, zeroed first", written_first),
    ]


def _background(size: int) -> Contender:
    def touch() -> object:
        arena, pool = _arena(size)
        arena.touch_in_background(1.0)
        # A look each millisecond: the threads have the cores.
        while (stats := arena.stats()).touching:
            time.sleep(0.001)
        if stats.touched_bytes != size:
            raise BenchmarkError(stats.touch_refusal)
        return arena, pool

    return Contender("background", touch, bytes=size)


def _touch(size: int) -> list[Contender]:
    def one_thread() -> object:
        memory = mmap.mmap(-1, size)
        memory[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
        return memory

    return [_background(size), Contender("one thread, a byte a page", one_thread, bytes=size)]


def _slots() -> list[Contender]:
    _, half_full = _arena(SLOTS * SLOT_BYTES)
    half_full.allocate(SLOTS // 2 + 1)  # beyond the boundary of two extents
    _, at_boundary = _arena(SLOTS * SLOT_BYTES)
    at_boundary.allocate(SLOTS // 2)
    _, scattered = _arena(SLOTS * SLOT_BYTES)
    taken = list(range(SLOTS))
    random.Random(0).shuffle(taken)
    scattered.allocate(SLOTS)
    scattered.free(taken[: SLOTS // 2])
    numbers = list(range(SLOTS))

    def one_by_one(pool: _native.SlotPool) -> float:
        start = time.perf_counter()
        for _ in range(BATCH):
            pool.free(pool.allocate(1) or [])
        return (time.perf_counter() - start) / BATCH

    def together() -> float:
        start = time.perf_counter()
        slots = half_full.allocate(BATCH)
        half_full.free(slots or [])
        return (time.perf_counter() - start) / BATCH

    def runs() -> float:
        found: list[int] = []
        start = time.perf_counter()
        while len(found) < 10 and (first := scattered.allocate_run(RUN)) is not None:
            found.append(first)
        seconds = time.perf_counter() - start
        if not found:
            raise BenchmarkError(f"no {RUN} neighbours are free among {SLOTS} slots")
        scattered.free([first + i for first in found for i in range(RUN)])
        return seconds / len(found) / RUN

    def numbers_off_a_list() -> float:
        start = time.perf_counter()
        for _ in range(BATCH):
            numbers.append(numbers.pop())
        return (time.perf_counter() - start) / BATCH

    floor = "a number off a list and back"
    return [
        Contender("allocate and free, one by one", partial(one_by_one, half_full), floor=floor),
        Contender("the same, an extent each", partial(one_by_one, at_boundary), floor=floor),
        Contender(f"allocate and free, {BATCH} at a time", together, floor=floor),
        Contender(f"allocate, {RUN} neighbours, half the slots taken", runs, floor=floor),
        Contender(floor, numbers_off_a_list),
    ]


def _first_writes(size: int) -> list[Contender]:
    writer = _Writer(size // SLOT_BYTES)
    _, warm = _arena(size)
    writer.write(warm)
    writer.check(warm)
    target = torch.empty_like(writer.rows).fill_(1)

    def untouched() -> float:
        _, pool = _arena(size)
        start = time.perf_counter()
        writer.write(pool)
        return time.perf_counter() - start

    def copy() -> None:
        ctypes.memmove(target.data_ptr(), writer.rows.data_ptr(), size)

    floor = "memcpy, 1 thread, warm"
    return [
        Contender("stored, pool touched", lambda: writer.write(warm), bytes=size, floor=floor),
        Contender("stored, pool untouched", untouched, bytes=size, floor=floor),
        Contender(floor, copy, bytes=size),
    ]
