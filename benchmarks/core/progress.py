"""Progress on stderr: a bar on a terminal, one line a step elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich import progress
from rich.console import Console


class Progress:
    """Shows which step of a run is going on and how much of the run is done.

    Use as a context manager. It draws only when told to: a thread that redraws by itself, as rich
    would start, takes its time out of what is being measured.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""
        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0)

    def show(self, text: str, share: float) -> None:
        """Shows the step `text` and the share of the run, 0 to 1, that is done."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=text, completed=share)
            self._bar.refresh()
        elif text != self._last:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._last = text

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
