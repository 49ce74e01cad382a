"""What the person sees. All other output, of vLLM and its processes too, goes to a log file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

Advance = Callable[[], None]


class Terminal:
    """Lines and steps: moving bars where the output is a terminal, plain lines where it is not."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, line: str = "") -> None:
        """One line, never wrapped."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def excerpt(self, line: str) -> None:
        """As much of a line as fits."""
        self.console.print(
            line, markup=False, highlight=False, no_wrap=True, overflow="ellipsis", style="dim"
        )

    @contextlib.contextmanager
    def step(self, what: str, total: int | None = None) -> Iterator[Advance]:
        """A step that takes a while; yields what to call after each of its `total` parts.

        Says how long it took in the end, unless the block raises.
        """
        start = time.perf_counter()
        if self.console.is_terminal:
            count = [MofNCompleteColumn()] if total else []
            columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), *count]
            with Progress(
                *columns,
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
                # Python's own output goes to the log like all other.
                redirect_stdout=False,
                redirect_stderr=False,
            ) as progress:
                task = progress.add_task(escape(what), total=total)
                yield lambda: progress.advance(task)
        else:
            self.say(f"{what} ...")
            yield lambda: None
        seconds = time.perf_counter() - start
        mark = "[green]✓[/] " if self.console.is_terminal else "    done: "
        self.console.print(f"{mark}{escape(what)} [dim]{seconds:.1f} s[/]", highlight=False)


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send everything this process and its children write to the end of a file.

    The file descriptors themselves are turned, since engine processes inherit them and native code
    writes to them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, saved in enumerate(kept, start=1):
                os.dup2(saved, number)
                os.close(saved)


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[Terminal]:
    """Send everything this process and its children write to `log`, except the terminal's lines."""
    log.write_bytes(b"")
    sys.stdout.flush()
    with (
        os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace") as screen,
        output_to(log),
    ):
        # A table wants room; where nobody says how much there is, take what most windows have.
        width = None if screen.isatty() else 100
        yield Terminal(Console(file=screen, width=width))
