"""Which machine and which versions a result belongs to, and how quiet the machine was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

from benchmarks.core.memory import total_bytes
from benchmarks.core.results import Machine, Versions

_REPOSITORY = Path(__file__).resolve().parents[2]
_STAT = Path("/proc/stat")
# Above this share of the cores, other processes' work is worth a warning.
BUSY_SHARE = 0.1


def describe_machine() -> Machine:
    return Machine(
        cpu=_cpu_model(),
        cores=usable_cores(),
        memory_bytes=total_bytes(),
        gpu=_gpu(),
        kernel=f"{platform.system()} {platform.release()}",
    )


def describe_versions() -> Versions:
    return Versions(
        python=platform.python_version(),
        torch=_version("torch"),
        hidden_cache=_version("hidden_cache"),
        commit=_output("git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty"),
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class OtherWork:
    """How much of the machine other processes use while this one measures."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy = _busy_seconds()
        self._own = _own_seconds()

    def cores(self) -> float | None:
        """Mean number of cores that others kept busy since construction, time stolen by the
        hypervisor included; None where the system does not count."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        elapsed = max(time.monotonic() - self._start, 1e-3)
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return round(max(others, 0.0) / elapsed, 2)


def _busy_seconds() -> float | None:
    try:
        fields = _STAT.read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(x) for x in fields[1:9])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / float(os.sysconf("SC_CLK_TCK"))


def _own_seconds() -> float:
    """Processor seconds of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    """Names of the GPUs, without starting CUDA in this process; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if not names:
        return None
    counts = Counter(name.strip() for name in names.splitlines())
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, or None where it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
