"""The two ways in which a benchmark refuses to go on."""

from __future__ import annotations

from pathlib import Path


class BenchmarkError(Exception):
    """A scenario cannot be run here, or what it would time gives wrong answers."""


class ResultsError(Exception):
    """A results file is unreadable, damaged, or not to be compared.

    The message names the file, the field where there is one, what is wrong and what to do.
    """

    def __init__(self, path: Path, field: str | None, problem: str, remedy: str) -> None:
        where = f"{path}: {field}" if field else str(path)
        super().__init__(f"{where}: {problem}; {remedy}")
        self.path = path
        self.field = field
