"""Which threads this process has, for tests of what must leave none behind; and one that asks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

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


class Asking(threading.Thread):
    """Calls a function in the background."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._call = (function, arguments)
        self._answer: Any = None
        self.start()

    def run(self) -> None:
        function, arguments = self._call
        try:
            self._answer = function(*arguments)
        except BaseException as error:
            self._answer = error

    def answer(self) -> Any:
        """What it returned, or raised."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it waits for ever"
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer
