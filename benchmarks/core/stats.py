"""Medians, spread, when two measurements differ, and seconds as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["faster", "slower", "unresolved"]

# Below this many repetitions quartiles say little: the whole range is taken as the spread.
FEW_REPETITIONS = 5
# Two runs of the same code differ by about this much on a quiet machine.
RESOLUTION = 0.02


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds of one case: the median, the middle half `[low, high]`, the minimum, the count."""

    median: float
    low: float
    high: float
    minimum: float
    repetitions: int

    @property
    def spread(self) -> float:
        """Half the width of the middle half, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


def summarize(seconds: Sequence[float]) -> Summary:
    """Summary of at least one timing; with fewer than `FEW_REPETITIONS` the range is the spread."""
    low, high = min(seconds), max(seconds)
    if len(seconds) >= FEW_REPETITIONS:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Summary(statistics.median(seconds), low, high, min(seconds), len(seconds))


def verdict(old: Summary, new: Summary) -> Verdict:
    """Faster or slower only where the spreads do not overlap and the medians differ visibly.

    This is stricter than a test on the medians alone, on purpose: two runs of a benchmark differ
    by more than the repetitions within one run let one see.
    """
    if new.high < old.low and new.median < old.median * (1 - RESOLUTION):
        return "faster"
    if new.low > old.high and new.median > old.median * (1 + RESOLUTION):
        return "slower"
    return "unresolved"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: 12.3 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1e3 else f"{seconds:.0f} s"
    return f"{seconds / 1e-9:.3g} ns"
