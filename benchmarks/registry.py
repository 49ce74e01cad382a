"""The scenarios, by the name that the command line takes. To add one: one file, one line here."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

from benchmarks.core.bench import Bench

SCENARIOS = {
    "ops": "benchmarks.ops",
    "pool": "benchmarks.pool",
    "store": "benchmarks.store",
    "files": "benchmarks.files",
    "vllm": "benchmarks.vllm",
    "import": "benchmarks.import_time",
    "gpu": "benchmarks.gpu",
}


def description(name: str) -> list[str]:
    """The docstring of a scenario's module by paragraphs, the first of which is its summary.

    It is read without importing the module, and so without what that needs.
    """
    spec = importlib.util.find_spec(SCENARIOS[name])
    if spec is None or spec.origin is None:
        raise LookupError(f"scenario {name!r}: there is no module {SCENARIOS[name]!r}")
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or name
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def load(name: str) -> Callable[[Bench], None]:
    """The scenario's `run(bench)`; imports its module."""
    return cast(Callable[[Bench], None], importlib.import_module(SCENARIOS[name]).run)
