"""Result tensors: recycled when they die, bounded, and views of the pool that say when they do."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from hidden_cache import _native
from hidden_cache.results import Results

KIB = 1 << 10
HIDDEN = 256
ROW_BYTES = HIDDEN * 4
SLOT_BYTES = 4 * ROW_BYTES
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def rows(results: Results, count: int = 8) -> torch.Tensor:
    return results.empty((count, HIDDEN), torch.float32)


def make_pool(slots: int = 8) -> _native.SlotPool:
    """A pool whose bytes count the slots."""
    pool = _native.SlotPool(_native.Arena(slots * SLOT_BYTES), SLOT_BYTES)
    for slot in range(slots):
        torch.frombuffer(_native.PoolRows(pool, slot, SLOT_BYTES), dtype=torch.uint8).fill_(slot)
    return pool


# Recycled memory


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_is_a_plain_tensor_of_its_shape(dtype: torch.dtype) -> None:
    result = Results(64 * KIB).empty((3, 5, HIDDEN), dtype)
    assert (result.shape, result.dtype, result.device.type) == ((3, 5, HIDDEN), dtype, "cpu")
    assert result.is_contiguous()
    assert result.untyped_storage().nbytes() == 3 * 5 * HIDDEN * dtype.itemsize
    result.fill_(1)
    assert result.float().sum() == result.numel()


def test_memory_is_recycled_when_the_tensor_dies() -> None:
    results = Results(64 * KIB)
    first = rows(results)
    address = first.data_ptr()
    assert results.stats().in_use_bytes == 8 * KIB
    del first
    assert (results.stats().in_use_bytes, results.stats().idle_bytes) == (0, 8 * KIB)
    assert rows(results).data_ptr() == address
    assert (results.stats().hits, results.stats().misses) == (1, 1)


@pytest.mark.parametrize(
    "narrow",
    [
        lambda tensor: tensor[3],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.numpy()[2:, 1],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.detach().requires_grad_(),
        from_dlpack,
        lambda tensor: memoryview(tensor.numpy()),
    ],
    ids=["slice", "numpy", "slice of numpy", "storage", "leaf", "dlpack", "memoryview"],
)
def test_memory_is_not_recycled_while_a_view_is_left(
    narrow: Callable[[torch.Tensor], object],
) -> None:
    results = Results(64 * KIB)
    tensor = rows(results)
    view = narrow(tensor)
    del tensor
    gc.collect()
    assert results.stats().in_use_bytes == 8 * KIB
    del view
    assert results.stats().in_use_bytes == 0


def test_a_result_that_is_saved_for_a_gradient_is_kept_until_it_was_used() -> None:
    results = Results(64 * KIB)
    weight = torch.ones(HIDDEN, requires_grad=True)
    rows_in = rows(results).fill_(3)
    loss = (rows_in @ weight).sum()
    del rows_in
    assert results.stats().in_use_bytes == 8 * KIB
    torch.autograd.backward(loss)
    assert weight.grad is not None
    assert weight.grad.eq(24).all()
    del loss
    assert results.stats().in_use_bytes == 0


def test_at_the_limit_memory_is_fresh_and_counted() -> None:
    results = Results(16 * KIB)
    kept = [rows(results) for _ in range(3)]
    stats = results.stats()
    assert (stats.fallbacks, stats.misses) == (1, 2)
    assert stats.in_use_bytes == stats.max_bytes == 16 * KIB
    assert len({tensor.data_ptr() for tensor in kept}) == 3
    assert kept[2].shape == kept[0].shape
    kept.clear()
    assert (results.stats().in_use_bytes, results.stats().idle_bytes) == (0, 16 * KIB)


def test_without_a_limit_nothing_is_recycled() -> None:
    results = Results(0)
    assert rows(results).shape == (8, HIDDEN)
    assert (results.stats().fallbacks, results.stats().max_bytes) == (1, 0)


def test_an_empty_result_takes_no_memory() -> None:
    results = Results(64 * KIB)
    assert results.empty((0, HIDDEN), torch.float32).shape == (0, HIDDEN)
    stats = results.stats()
    assert (stats.in_use_bytes, stats.misses, stats.fallbacks) == (0, 0, 0)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit is -1 bytes: set hscache_result_bytes to 0 or"):
        Results(-1)


def test_tensors_outlive_what_made_them() -> None:
    results = Results(1024 * KIB)
    small, large = rows(results).fill_(1), rows(results, 512).fill_(2)
    del results
    gc.collect()
    assert small.eq(1).all()
    assert large.eq(2).all()


def test_threads_never_share_a_result() -> None:
    results = Results(40 * KIB)

    def use(mark: int) -> bool:
        fine = True
        for round_ in range(200):
            mine = rows(results, 1 + (mark + round_) % 16).fill_(mark)
            view = mine[-1]
            del mine
            fine &= bool(view.eq(mark).all())
            stats = results.stats()
            fine &= stats.in_use_bytes + stats.idle_bytes <= 40 * KIB
        return fine

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(use, range(6)))
    assert results.stats().in_use_bytes == 0


# Views of the pool


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_is_the_pools_own_memory(dtype: torch.dtype) -> None:
    pool = make_pool()
    hidden = SLOT_BYTES // 4 // dtype.itemsize
    view = Results(0).view(pool, 2, (12, hidden), dtype, list)
    assert (view.shape, view.dtype) == ((12, hidden), dtype)
    slots = view.view(torch.uint8).view(3, SLOT_BYTES)
    assert slots.eq(torch.tensor([[2], [3], [4]])).all()
    again = Results(0).view(pool, 2, (1, hidden), dtype, list)
    assert again.data_ptr() == view.data_ptr()


def test_a_view_keeps_the_pool_and_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view = Results(0).view(make_pool(), 7, (SLOT_BYTES,), torch.uint8, list)
    gc.collect()
    assert view.eq(7).all()


def test_a_view_says_once_when_the_last_of_it_is_gone() -> None:
    deaths: list[int] = []
    view = Results(0).view(make_pool(), 0, (4, HIDDEN), torch.float32, lambda: deaths.append(1))
    part = view[2].numpy()
    del view
    gc.collect()
    assert deaths == []
    del part
    assert deaths == [1]


def test_a_view_that_is_let_go_in_another_thread_says_so() -> None:
    deaths: list[int] = []
    views = [
        Results(0).view(make_pool(), 0, (4, HIDDEN), torch.float32, lambda: deaths.append(1))
        for _ in range(20)
    ]
    threads = [threading.Thread(target=views.pop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(deaths) == 20


@pytest.mark.parametrize(
    ("slot", "shape", "text"),
    [
        (-1, (1,), "slot -1 is not of this pool of 8 slots"),
        (8, (1,), "slot 8 is not of this pool of 8 slots"),
        (
            7,
            (SLOT_BYTES + 1,),
            f"cannot see {SLOT_BYTES + 1} bytes from slot 7 on: ask for 1 to {SLOT_BYTES}",
        ),
        (0, (0,), "cannot see 0 bytes from slot 0 on"),
    ],
)
def test_a_view_beyond_the_pool_is_refused_and_never_dies(
    slot: int, shape: tuple[int, ...], text: str
) -> None:
    deaths: list[int] = []
    with pytest.raises(IndexError, match=re.escape(text)):
        Results(0).view(make_pool(), slot, shape, torch.uint8, lambda: deaths.append(1))
    assert deaths == []


# Processes

END = """
import torch
from hidden_cache.results import Results
from tests.unit.test_results import HIDDEN, make_pool, rows

results = Results(1 << 20)
kept = rows(results)
view = results.view(make_pool(), 0, (4, HIDDEN), torch.float32, lambda: print("died"))
print("end", flush=True)
"""

FORK = """
import os, sys
import torch
from hidden_cache.results import Results
from tests.unit.test_results import HIDDEN, make_pool, rows

results = Results(1 << 20)
kept = rows(results).fill_(5)
idle = rows(results, 300)
del idle
view = results.view(make_pool(), 1, (4 * HIDDEN * 4,), torch.uint8, lambda: print("died"))
child = os.fork()
if child == 0:
    assert kept.eq(5).all() and view.eq(1).all()
    kept.fill_(6)
    for call in (lambda: rows(results), results.stats):
        try:
            call()
        except RuntimeError as error:
            print("child:", error, flush=True)
    del kept, view, results
    print("child: ends", flush=True)
    sys.exit(7)
print("exit code:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
assert kept.eq(5).all() and view.eq(1).all()
del kept
assert results.stats().in_use_bytes == 0
print("parent: goes on", flush=True)
"""


def run(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_what_is_kept_to_the_end_of_the_process_ends_with_it() -> None:
    assert run(END) == ["end"]


def test_a_forked_child_keeps_its_copies_and_takes_no_more() -> None:
    ours = "child: the result pool belongs to the parent process: open a store after fork(), not"
    assert run(FORK) == [
        f"{ours} before",
        f"{ours} before",
        "died",
        "child: ends",
        "exit code: 7",
        "parent: goes on",
    ]
