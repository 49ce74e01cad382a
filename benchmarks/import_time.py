"""Time of `import hidden_cache` beyond `import torch`, in fresh interpreters.

Each repetition starts an interpreter, which times its own import statement: the interpreter's
start is not counted. What counts is the import after torch, since whoever uses this package has
imported torch; it should stay under half a second. `import hidden_cache` loads its parts when they
are first asked for, so a third case asks for every public name and for the operators, native code
included. Compiled bytecode and file caches are warm.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.core.bench import Bench
from benchmarks.core.errors import BenchmarkError
from benchmarks.core.measure import Contender

TARGET_SECONDS = 0.5

_REPOSITORY = Path(__file__).resolve().parents[1]
_TOUCH_BYTES = 1 << 30
_CHILD = """
import time
{before}
start = time.perf_counter()
{timed}
print(time.perf_counter() - start)
"""


def run(bench: Bench) -> None:
    groups = {
        "fresh interpreters": [
            Contender("import torch", _import("import torch")),
            Contender(
                "import hidden_cache, after torch",
                _import("import hidden_cache", "import torch"),
                target_seconds=TARGET_SECONDS,
            ),
            Contender(
                "all of it, after torch",
                _import("from hidden_cache import *; import hidden_cache.ops", "import torch"),
                target_seconds=TARGET_SECONDS,
            ),
        ]
    }
    bench.touch(_TOUCH_BYTES)
    for name, contenders in bench.groups(groups):
        bench.measure(name, contenders)


def _import(timed: str, before: str = "") -> Callable[[], float]:
    """A repetition: a new interpreter that runs `before`, then times the statement `timed`."""
    code = _CHILD.format(before=before, timed=timed)

    def run_child() -> float:
        child = subprocess.run(
            [sys.executable, "-c", code], cwd=_REPOSITORY, capture_output=True, text=True
        )
        if child.returncode != 0:
            lines = child.stderr.strip().splitlines() or ["no message"]
            raise BenchmarkError(f"{timed!r} fails: {lines[-1]}; build the package first")
        return float(child.stdout.split()[-1])

    return run_child
