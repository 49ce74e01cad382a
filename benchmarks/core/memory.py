"""Host memory that has been touched before it is measured.

The memory of a virtual machine is backed by its host when a page is touched for the first time, at
about 1 GB/s or less: a benchmark that meets fresh guest memory measures the host.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

from benchmarks.core.errors import BenchmarkError

_STEP_BYTES = 256 << 20
_MEMINFO = Path("/proc/meminfo")
# mallopt's parameters, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def touch(need_bytes: int, progress: Callable[[float], object] = lambda _share: None) -> None:
    """Touches a quarter more than `need_bytes`, then frees it: the guest's pages are backed then.

    `progress` is called with the share that is done. Raises BenchmarkError where the machine has
    less memory available than that.
    """
    total = need_bytes + need_bytes // 4
    available = available_bytes()
    if available is not None and total > available:
        raise BenchmarkError(
            f"this scenario touches {total / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are "
            "available: free some, run --quick, or choose smaller groups with --only"
        )
    with mmap.mmap(-1, max(total, 1)) as memory:
        exported = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(exported)
        del exported  # the mapping cannot be closed while that lives; the address stays good
        for start in range(0, total, _STEP_BYTES):
            step = min(_STEP_BYTES, total - start)
            ctypes.memset(address + start, 1, step)
            progress((start + step) / total)


def available_bytes() -> int | None:
    """Memory that can be taken without swapping; None where the system does not say."""
    return _meminfo("MemAvailable")


def total_bytes() -> int | None:
    """Memory of the machine; None where the system does not say."""
    return _meminfo("MemTotal")


def recycle_freed_memory() -> bool:
    """Tells malloc to keep what is freed for the next allocation, from now on in this process.

    By default large allocations are mapped anew each time, and a contender that returns a new
    tensor then spends most of its time in page faults. Returns False where malloc has no such
    setting (not glibc).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


def _meminfo(field: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    return None


def process_bytes(pid: int, *fields: str) -> int:
    """Sizes out of a process' /proc/PID/status at one moment, added up: VmHWM (its peak), or
    RssAnon, RssFile and RssShmem, which make up VmRSS."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in fields:
            sizes[name] = int(value.split()[0]) << 10
    for field in fields:
        if field not in sizes:
            raise BenchmarkError(f"/proc/{pid}/status has no {field}: this needs Linux")
    return sum(sizes.values())


def reset_peak(pid: int) -> None:
    """Has VmHWM of a process of this user begin anew at its VmRSS."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that these did."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Behind the name, which may hold anything: state, then parent.
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    found: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level} - found
        found |= level
    return found
