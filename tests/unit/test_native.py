"""`hidden_cache._native` through Python: errors, backpressure, the GIL, fork."""

from __future__ import annotations

import gc
import math
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from hidden_cache import _native

BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN = 8, 2, 4, 16
ROW_BYTES = HIDDEN * 4
CHUNK = 8  # rows that a slot holds
SOON_S = 30.0  # a wait that takes this long has failed


class Setup:
    """A paged cache, a pool, and an engine that only works when it is polled."""

    def __init__(self, max_pending: int = 256, staging_bytes: int = 1 << 20) -> None:
        self.paged = torch.randn(BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN)
        block, layer, token, _ = (4 * stride for stride in self.paged.stride())
        self.view = _native.PagedView(
            self.paged.data_ptr(),
            (BLOCKS, LAYERS, BLOCK_SIZE),
            ROW_BYTES,
            (block, layer, token),
        )
        self.pool = _native.SlotPool(_native.Arena(16 * CHUNK * ROW_BYTES), CHUNK * ROW_BYTES)
        self.engine = _native.TransferEngine(
            max_pending=max_pending, staging_bytes=staging_bytes, threaded=False
        )

    def submit(self, wait: bool = False) -> _native.Ticket | None:
        return self.engine.gather(self.view, [5, 2], [(1, 0, 8, 3, 0)], self.pool, wait=wait)

    def accept(self) -> _native.Ticket:
        ticket = self.submit()
        assert ticket is not None
        return ticket

    def read(self, slots: list[int], start: int, length: int) -> torch.Tensor:
        out = torch.full((length, HIDDEN), math.nan)
        self.pool.read_rows(slots, ROW_BYTES, start, length, out.data_ptr(), ROW_BYTES)
        return out


@pytest.fixture
def setup() -> Setup:
    return Setup()


def refused_texts(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert type(caught.value) is error


# --- arena ---


def test_arena_of_all_memory_starts_without_touching_it() -> None:
    memory = _native.machine_memory_bytes()
    assert _native.Arena(memory).bytes == memory


def test_arena_larger_than_memory_is_refused() -> None:
    memory = _native.machine_memory_bytes()
    with pytest.raises(ValueError, match="set hscache_pool_bytes lower") as caught:
        _native.Arena(memory + 1)
    assert str(memory + 1) in str(caught.value)
    assert f"this machine's {memory} bytes" in str(caught.value)


@pytest.mark.parametrize("size", [0, -1])
def test_arena_size_must_be_positive(size: int) -> None:
    with pytest.raises(ValueError, match=f"pool size is {size} bytes, must be positive"):
        _native.Arena(size)


def test_what_the_kernel_refuses_is_an_os_error() -> None:
    with pytest.raises(OSError, match="the kernel refused a pool of") as caught:
        _native.Arena(2**62, memory_limit=2**63 - 1)
    assert caught.value.errno is not None


def test_an_arena_is_touched_in_the_background() -> None:
    arena = _native.Arena(64 << 20)
    assert (arena.stats().touched_bytes, arena.stats().touching) == (0, False)
    arena.touch_in_background(huge_pages_timeout_s=1.0)
    while (stats := arena.stats()).touching:
        time.sleep(0.001)
    assert stats.touched_bytes == 64 << 20 or stats.touch_refusal


@pytest.mark.parametrize("asked", ["off", "advise", "hugetlb"])
def test_huge_pages_are_had_or_refused_with_a_reason(asked: str) -> None:
    stats = _native.Arena(4 << 20, huge_pages=asked).stats()
    assert (stats.huge_pages == asked) == (stats.huge_pages_refusal == "")
    assert stats.huge_pages in (asked, "off")


def test_unknown_huge_pages_are_refused() -> None:
    refused_texts(
        lambda: _native.Arena(1 << 20, huge_pages="big"),
        ValueError,
        'huge_pages is "big": set off, advise or hugetlb',
    )


def test_a_numa_node_that_is_not_there_is_refused_with_a_reason() -> None:
    arena = _native.Arena(1 << 20)
    arena.prefer_numa_node(1023)
    assert arena.stats().numa_node is None
    assert arena.stats().numa_refusal.startswith("NUMA node 1023: the kernel refused (")


READER = """
    import mmap, socket, sys
    from hidden_cache import _native

    channel = socket.socket(fileno=int(sys.argv[1]))
    size, files, _, _ = socket.recv_fds(channel, 16, 1)
    reader = _native.ArenaReader(files[0], int(size))
    seen = memoryview(reader)
    assert seen.readonly and seen.nbytes == reader.bytes
    channel.send(bytes(seen[:5]))
    channel.recv(1)
    channel.send(bytes(seen[-5:]))
    try:
        mmap.mmap(files[0], int(size), prot=mmap.PROT_READ | mmap.PROT_WRITE)
        channel.send(b"written")
    except PermissionError:
        channel.send(b"refused")
"""


def test_another_process_reads_an_arena_and_cannot_write_to_it() -> None:
    arena = _native.Arena(128 * 3)
    pool = _native.SlotPool(arena, 128)
    rows = torch.tensor(list(b"first" + b"." * 118 + b"later"), dtype=torch.uint8)
    view = _native.PagedView(rows.data_ptr(), (1, 1, 1), 128, (128, 128, 128))
    engine = _native.TransferEngine()

    def write(slot: int) -> None:
        ticket = engine.gather(view, [0], [(0, 0, 1, slot, 0)], pool)
        assert ticket is not None
        ticket.wait()

    # Messages stay apart.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(SOON_S)
    with ours, theirs:
        write(0)
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(READER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        socket.send_fds(ours, [str(arena.bytes).encode()], [arena.fd])
        assert ours.recv(16) == b"first"
        write(2)
        ours.send(b".")
        assert ours.recv(16) == b"later"
        assert ours.recv(16) == b"refused"
        assert child.wait(SOON_S) == 0


def test_what_is_no_arena_is_not_mapped(tmp_path: Path) -> None:
    arena = _native.Arena(100)
    refused_texts(lambda: _native.ArenaReader(arena.fd, 101), ValueError, "the arena has 100 bytes")
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with path.open("rb") as file:
        refused_texts(
            lambda: _native.ArenaReader(file.fileno(), 100), ValueError, "is not an arena's"
        )


def test_a_readers_view_keeps_the_mapping() -> None:
    arena = _native.Arena(4096)
    seen = memoryview(_native.ArenaReader(arena.fd, 4096))
    del arena
    gc.collect()
    assert bytes(seen) == bytes(4096)
    with pytest.raises(TypeError):
        seen[0] = 1


# --- slot pool ---


def test_slots_all_or_none(setup: Setup) -> None:
    pool = setup.pool
    assert (pool.num_slots, pool.num_free, pool.slot_bytes) == (16, 16, CHUNK * ROW_BYTES)
    assert pool.allocate(15) == list(range(15))
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.free([3, 4])
    assert pool.num_free == 3


def test_runs_occupancy_and_fragmentation(setup: Setup) -> None:
    pool = setup.pool
    assert pool.allocate_run(12) == 0
    pool.free([1, 2, 3])
    assert pool.allocate_run(5) is None
    stats = pool.stats()
    assert (stats.slots, stats.used, stats.free) == (16, 9, 7)
    assert (stats.largest_free_run, stats.extents) == (4, 1)
    assert stats.fragmentation == pytest.approx(3 / 7)
    assert stats.extent_bytes == 2 << 20
    refused_texts(lambda: pool.allocate_run(0), ValueError, "a run of 0 slots")


def test_pools_of_one_arena_share_it() -> None:
    arena = _native.Arena(8 << 20)
    small, large = _native.SlotPool(arena, 1 << 20), _native.SlotPool(arena, 2 << 20)
    assert (small.num_free, large.num_free) == (8, 4)
    assert large.allocate(1) == [3]
    assert (small.num_free, small.num_slots) == (6, 8)
    del large
    assert small.num_free == 8


def test_slot_pool_refusals(setup: Setup) -> None:
    pool = setup.pool
    slots = pool.allocate(2)
    assert slots is not None
    pool.free([slots[0]])
    for call, text in {
        (lambda: pool.allocate(-1), "cannot allocate -1 slots"),
        (lambda: pool.free([slots[0]]), "slot 0 is not allocated"),
        (lambda: pool.free([16]), "slot 16 is not of this pool of 16 slots"),
        (lambda: _native.SlotPool(_native.Arena(8), 9), "does not fit a pool of 8 bytes"),
        (lambda: _native.SlotPool(_native.Arena(8), 0), "slot size is 0 bytes"),
    }:
        refused_texts(call, ValueError, text)


def test_slot_pool_needs_an_arena() -> None:
    with pytest.raises(TypeError):
        _native.SlotPool(None, 8)  # type: ignore[arg-type]


def test_slot_pool_keeps_its_arena_alive() -> None:
    pool = Setup().pool
    out = torch.empty(CHUNK, HIDDEN)
    pool.read_rows([15], ROW_BYTES, 0, CHUNK, out.data_ptr(), ROW_BYTES)
    assert not out.any()


def test_rows_come_back_across_slots(setup: Setup) -> None:
    ticket = setup.engine.gather(
        setup.view, [5, 2, 7, 0], [(1, 0, 8, 9, 0), (1, 8, 8, 4, 0)], setup.pool
    )
    assert ticket is not None
    setup.engine.drain()
    expected = torch.cat([setup.paged[block, 1] for block in (5, 2, 7, 0)])
    assert torch.equal(setup.read([9, 4], 0, 16), expected)
    assert torch.equal(setup.read([9, 4], 7, 2), expected[7:9])
    assert torch.equal(setup.read([4], 0, 8), expected[8:])


def test_rows_go_to_strided_memory(setup: Setup) -> None:
    setup.accept()
    setup.engine.drain()
    out = torch.zeros(8, 2, HIDDEN)
    setup.pool.read_rows([3], ROW_BYTES, 0, 8, out[:, 1].data_ptr(), 2 * ROW_BYTES)
    assert torch.equal(out[:, 1], setup.read([3], 0, 8))
    assert not out[:, 0].any()


def test_read_rows_refusals(setup: Setup) -> None:
    out = torch.zeros(16, HIDDEN)

    def read(slots: list[int], row_bytes: int, start: int, length: int) -> Callable[[], None]:
        return lambda: setup.pool.read_rows(
            slots, row_bytes, start, length, out.data_ptr(), ROW_BYTES
        )

    too_long = CHUNK * ROW_BYTES + 1
    refused_texts(read([0], ROW_BYTES, -1, 1), ValueError, "start is -1")
    refused_texts(read([0], ROW_BYTES, 0, -1), ValueError, "length is -1")
    refused_texts(read([0], too_long, 0, 1), ValueError, f"a row of {too_long} bytes")
    refused_texts(read([0], 0, 0, 1), ValueError, "a row of 0 bytes")
    refused_texts(read([0], ROW_BYTES, 0, 9), IndexError, "reach beyond the 8 tokens")
    refused_texts(read([0, 16], ROW_BYTES, 0, 16), IndexError, "is 16, outside")
    assert not out.any()


# --- transfers ---


def test_a_ticket_from_pending_to_done(setup: Setup) -> None:
    ticket = setup.accept()
    assert (ticket.done, ticket.ended, ticket.error) == (False, False, None)
    assert not ticket.wait(0)
    assert setup.engine.pending == 1
    setup.engine.drain()
    assert (ticket.done, ticket.ended, ticket.error) == (True, True, None)
    assert ticket.wait()
    assert setup.engine.pending == 0
    assert torch.equal(setup.read([3], 0, 8), torch.cat([setup.paged[5, 1], setup.paged[2, 1]]))


def test_polling_by_hand_ends_a_ticket(setup: Setup) -> None:
    ticket = setup.accept()
    assert setup.engine.poll()
    while not ticket.ended:
        setup.engine.poll()
    assert ticket.done
    assert not setup.engine.poll()


def test_refuses_when_full() -> None:
    setup = Setup(max_pending=2)
    setup.accept()
    setup.accept()
    assert setup.submit(wait=False) is None
    setup.engine.drain()
    assert setup.submit(wait=False) is not None
    setup.engine.drain()


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Starts a thread; the returned function gives what it returned or raised."""
    outcome: list[object] = []

    def body() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def result() -> object:
        thread.join(SOON_S)
        assert outcome, "the thread hangs"
        return outcome[0]

    return result


def test_waiting_for_a_ticket_releases_the_gil(setup: Setup) -> None:
    ticket = setup.accept()
    waited = in_thread(lambda: ticket.wait(SOON_S))
    setup.engine.drain()
    assert waited() is True


@pytest.mark.parametrize("call", ["drain", "close", "read_rows", "ticket.wait"])
def test_long_copies_leave_the_gil_to_others(call: str) -> None:
    # 256 MiB of rows, all of them those of one block.
    rows, row_bytes = 1 << 12, 1 << 16
    block = torch.zeros(row_bytes, dtype=torch.uint8)
    view = _native.PagedView(block.data_ptr(), (1, 1, rows), row_bytes, (0, 0, 0))
    pool = _native.SlotPool(_native.Arena(rows * row_bytes), rows * row_bytes)
    engine = _native.TransferEngine(lanes=1)
    ticket = engine.gather(view, [0], [(0, 0, rows, 0, 0)], pool)
    assert ticket is not None
    if call == "read_rows":
        ticket.wait()
    calls: dict[str, Callable[[], object]] = {
        "drain": engine.drain,
        "close": engine.close,
        "read_rows": lambda: pool.read_rows([0], row_bytes, 0, rows, block.data_ptr(), 0),
        "ticket.wait": ticket.wait,
    }
    turns = [0]
    over = threading.Event()

    def count() -> None:
        while not over.is_set():
            turns[0] += 1

    other = threading.Thread(target=count)
    other.start()
    while turns[0] == 0:
        time.sleep(0.001)
    before = turns[0]
    calls[call]()
    after = turns[0]
    over.set()
    other.join()
    assert after - before > 100
    engine.close()


def test_many_threads_may_make_objects_at_once() -> None:
    def make() -> None:
        for _ in range(300):
            _native.Arena(4096)
            _native.PagedView(0, (1, 1, 1), 1, (0, 0, 0))
            _native.TransferEngine(lanes=1, threaded=False)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_lone_caller_that_waits_for_room_drives_the_engine() -> None:
    setup = Setup(max_pending=1)
    setup.accept()
    ticket = setup.submit(wait=True)
    assert ticket is not None
    setup.engine.drain()
    assert ticket.done


@pytest.mark.parametrize(
    ("row_bytes", "stored", "wanted", "text"),
    [
        (ROW_BYTES, "FLOAT16", "ANY", "name both elements or none"),
        (ROW_BYTES, "ANY", "FLOAT32", "name both elements or none"),
        (ROW_BYTES, "FLOAT16", "FLOAT8", "into FLOAT32, FLOAT16 or BFLOAT16"),
        (ROW_BYTES, "FLOAT8", "FLOAT8", "into FLOAT32, FLOAT16 or BFLOAT16"),
        (6, "FLOAT32", "FLOAT16", "a row of 6 bytes is no whole number of elements of 4"),
    ],
)
def test_reads_that_make_no_sense_are_refused(
    setup: Setup, row_bytes: int, stored: str, wanted: str, text: str
) -> None:
    out = torch.zeros(CHUNK, HIDDEN)
    elements = [getattr(_native.Element, name) for name in (stored, wanted)]
    refused_texts(
        lambda: setup.pool.read_rows([0], row_bytes, 0, 1, out.data_ptr(), ROW_BYTES, *elements),
        ValueError,
        text,
    )


@pytest.mark.parametrize(
    ("elements", "counts", "text"),
    [
        (("FLOAT16", "ANY"), False, "elements of one side are not known"),
        (("ANY", "ANY"), True, "to count what is not finite"),
        (("FLOAT32", "FLOAT16"), False, "a row of 18 bytes is no whole number of elements of 4"),
    ],
)
def test_conversions_that_make_no_sense_are_refused(
    elements: tuple[str, str], counts: bool, text: str
) -> None:
    pool = _native.SlotPool(_native.Arena(1 << 16), 180)
    rows = torch.zeros(4, 9, dtype=torch.float16)
    view = _native.PagedView(rows.data_ptr(), (1, 1, 4), 18, (72, 72, 18))
    engine = _native.TransferEngine(lanes=1)
    source, stored = (getattr(_native.Element, name) for name in elements)
    refused_texts(
        lambda: engine.gather(
            view,
            [0],
            [(0, 0, 4, 0, 0)],
            pool,
            source_element=source,
            stored=stored,
            count_non_finite=counts,
        ),
        ValueError,
        text,
    )
    assert engine.pending == 0


def test_rows_in_token_order_are_one_block() -> None:
    pool = _native.SlotPool(_native.Arena(1 << 16), 64)
    view = _native.PagedView(0, (2, 1, 4), 16, (64, 64, 16))
    engine = _native.TransferEngine(lanes=1)
    refused_texts(
        lambda: engine.copy_rows(view, [(0, 0, 4, 0, 0)], pool),
        ValueError,
        "are a view of 1 block, not of 2",
    )


def test_scales_need_slots_that_align_them() -> None:
    pool = _native.SlotPool(_native.Arena(1 << 16), 27)
    rows = torch.zeros(1, 1, 3, 5)
    view = _native.PagedView(rows.data_ptr(), (1, 1, 3), 20, (60, 60, 20))
    engine = _native.TransferEngine(lanes=1)
    refused_texts(
        lambda: engine.gather(
            view,
            [0],
            [(0, 0, 3, 1, 0)],
            pool,
            source_element=_native.Element.FLOAT32,
            stored=_native.Element.FLOAT8,
        ),
        ValueError,
        "slots of 27 bytes cannot hold float32 scales",
    )


def test_waiting_for_room_releases_the_gil() -> None:
    setup = Setup(max_pending=1)
    setup.accept()
    second = in_thread(lambda: setup.submit(wait=True))
    setup.engine.drain()
    ticket = second()
    assert isinstance(ticket, _native.Ticket)
    setup.engine.drain()
    assert ticket.done


def test_drain_waits_for_all_that_was_accepted(setup: Setup) -> None:
    engine = _native.TransferEngine()
    tickets = [
        engine.gather(setup.view, [5, 2], [(1, 0, 8, slot, 0)], setup.pool) for slot in range(16)
    ]
    drained = in_thread(engine.drain)
    assert drained() is None
    assert all(ticket is not None and ticket.done for ticket in tickets)


def test_close_fails_what_has_not_started_and_refuses_the_rest(setup: Setup) -> None:
    ticket = setup.accept()
    setup.engine.close()
    setup.engine.close()
    assert ticket.ended
    assert not ticket.done
    assert ticket.error == "the transfer engine was closed before this transfer was complete"
    with pytest.raises(RuntimeError, match="the transfer engine is closed: open a new store"):
        setup.submit()


def test_close_wakes_who_waits_for_room() -> None:
    setup = Setup(max_pending=1)
    setup.accept()
    second = in_thread(lambda: setup.submit(wait=True))
    setup.engine.close()
    outcome = second()
    # Who waits for room drives the engine, and may have made some before the close.
    if isinstance(outcome, _native.Ticket):
        assert outcome.ended
        return
    assert isinstance(outcome, RuntimeError)
    assert "closed" in str(outcome)


@pytest.mark.parametrize("timeout_s", [1e10, math.inf])
def test_a_timeout_beyond_all_clocks_is_no_timeout(setup: Setup, timeout_s: float) -> None:
    ticket = setup.accept()
    waited = in_thread(lambda: ticket.wait(timeout_s))
    setup.engine.drain()
    assert waited() is True


def test_gather_refusals_accept_nothing(setup: Setup) -> None:
    def gather(block_ids: list[int], piece: _native.Piece, stream: int = 0) -> Callable[[], object]:
        return lambda: setup.engine.gather(
            setup.view, block_ids, [(0, 0, 1, 0, 0), piece], setup.pool, producer_stream=stream
        )

    refused_texts(
        gather([5], (2, 0, 1, 0, 0)), IndexError, "layer 2 is outside the paged memory's 2 layers"
    )
    refused_texts(
        gather([5], (0, 0, 1, 16, 0)), IndexError, "slot 16 is outside the pool's 16 slots"
    )
    refused_texts(gather([5], (0, 0, 1, -1, 0)), IndexError, "slot -1 is outside")
    refused_texts(gather([5, 8], (0, 0, 8, 0, 0)), IndexError, r"block_ids\[1\] is 8, outside")
    refused_texts(
        gather([5], (0, 0, 8, 0, 0)), IndexError, "reach beyond the 4 tokens of a table of 1"
    )
    refused_texts(gather([5], (0, -1, 1, 0, 0)), ValueError, "start is -1, must be 0 or more")
    refused_texts(gather([5], (0, 0, -1, 0, 0)), ValueError, "length is -1, must be 0 or more")
    refused_texts(
        gather([5, 5, 5], (0, 0, 9, 0, 0)),
        ValueError,
        "9 rows from row 0 on does not fit a slot of 8 rows",
    )
    refused_texts(gather([5], (0, 0, 1, 0, 0), stream=7), ValueError, "the stream is 7")
    assert setup.engine.pending == 0
    assert not setup.read([0], 0, 8).any()


@pytest.mark.parametrize("option", ["lanes", "max_pending", "staging_bytes"])
def test_engine_options_must_be_positive(option: str) -> None:
    with pytest.raises(ValueError, match=rf"{option} 0\b.*must each be at least 1"):
        _native.TransferEngine(**{option: 0})  # type: ignore[arg-type]


def test_threads_share_an_engine(setup: Setup) -> None:
    engine = _native.TransferEngine(max_pending=3, staging_bytes=1)

    def work(slot: int) -> bool:
        for round_ in range(50):
            block = (slot + round_) % BLOCKS
            ticket = engine.gather(setup.view, [block], [(0, 0, 4, slot, 0)], setup.pool)
            assert ticket is not None
            ticket.wait()
            if not torch.equal(setup.read([slot], 0, 4), setup.paged[block, 0]):
                return False
        return True

    results = [in_thread(partial(work, slot)) for slot in range(4)]
    assert [result() for result in results] == [True] * 4


FORK = """
    import os, sys, threading
    import torch
    from hidden_cache import _native

    rows = torch.arange(64, dtype=torch.float32)
    view = _native.PagedView(rows.data_ptr(), (2, 1, 4), 32, (128, 128, 32))
    pool = _native.SlotPool(_native.Arena(256), 128)
    engine = _native.TransferEngine()
    idle = _native.TransferEngine(threaded=False)
    pending = idle.gather(view, [0], [(0, 0, 4, 1, 0)], pool)

    def gather():
        ticket = engine.gather(view, [1], [(0, 0, 4, 0, 0)], pool)
        ticket.wait()
        assert ticket.done, ticket.error

    gather()
    child = os.fork()
    if child == 0:
        for call in (gather, engine.drain):
            try:
                call()
            except RuntimeError as error:
                print("child:", error, flush=True)
        assert pending.wait() and not pending.done
        print("ticket:", pending.error, flush=True)
        assert engine.pending == 0 and not engine.poll()
        engine.close()
        sys.exit(7)  # through the interpreter's own end, with the engine still referenced
    _, status = os.waitpid(child, 0)
    print("exit code:", os.waitstatus_to_exitcode(status), flush=True)
    gather()
    idle.drain()
    assert pending.done
    print("parent: goes on", flush=True)
"""


def test_a_forked_child_sees_a_closed_engine_and_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORK)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    ours = "belongs to the parent process: open a store after fork(), not before"
    assert done.stdout.splitlines() == [
        f"child: the slot pool {ours}",
        f"child: the transfer engine {ours}",
        f"ticket: the transfer engine {ours}",
        "exit code: 7",
        "parent: goes on",
    ], done.stderr
