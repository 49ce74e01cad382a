"""Which threads this process has, for tests of what must start none or leave none behind."""

from __future__ import annotations

import os
import time

PATIENCE_S = 60.0  # how long a test waits for what must come


def threads_now() -> set[str]:
    """The threads of this process by number."""
    return set(os.listdir("/proc/self/task"))


def none_but(threads: set[str]) -> bool:
    """Whether no threads but these are left.

    One that was joined stays listed for a moment, until the kernel has taken it down: so this
    waits for it to go.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not threads_now() <= threads:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
