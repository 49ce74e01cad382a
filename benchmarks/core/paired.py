"""The ratio of two contenders' speeds out of rounds that both took part in, and how sure it is.

The two runs of a round are neighbours in time and did the same work, so that most of what disturbs
a machine falls on both: the ratio within a round varies far less than either time does. Ratios
are averaged as logarithms, for which twice as fast and half as fast are equally far from equal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TargetVerdict = Literal["met", "missed", "not resolved"]

_CONFIDENCE = 0.95
# More than anybody waits for.
_MOST_PAIRS = 10_000
# Two-sided 95 % quantiles of Student's t for few degrees of freedom, where the series is poor.
_FEW = (12.7062, 4.3027, 3.1824, 2.7764)


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Speed over speed: the mean of the rounds' ratios, and its 95 % confidence interval.

    `deviation` is the standard deviation of one round's log-ratio.
    """

    mean: float
    low: float
    high: float
    pairs: int
    deviation: float

    def verdict(self, target: float) -> TargetVerdict:
        """Whether the ratio is at least `target`: only where the whole interval says so."""
        if self.low >= target:
            return "met"
        return "missed" if self.high < target else "not resolved"

    def pairs_needed(self, target: float) -> int | None:
        """Rounds after which the interval would leave `target` out, if mean and deviation stay as
        they are; None where that is more than 10,000."""
        distance = abs(math.log(self.mean / target))
        for pairs in range(2, _MOST_PAIRS + 1):
            if t_quantile(pairs - 1) * self.deviation / math.sqrt(pairs) < distance:
                return pairs
        return None

    def describe(self, target: float | None = None) -> str:
        """In words: with a target, the verdict, and what it takes where there is none."""
        text = f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.pairs} pairs)"
        if target is None:
            return text
        verdict = self.verdict(target)
        text += f", target ≥ {target:.2f}: {verdict}"
        if verdict == "not resolved":
            needed = self.pairs_needed(target)
            count = f"more than {_MOST_PAIRS:,}" if needed is None else f"about {needed:,}"
            text += (
                f"; with a spread of ±{self.deviation:.1%} a pair it would take {count} pairs, or "
                "a quieter machine"
            )
        return text


def paired_ratio(ours: Sequence[float], others: Sequence[float]) -> PairedRatio:
    """The others' seconds over ours, so that 1.1 is ours being faster by a tenth.

    Both hold the seconds of the same rounds in the same order. Raises ValueError for fewer than
    two rounds, which have no spread.
    """
    if len(ours) != len(others) or len(ours) < 2:
        raise ValueError(f"{len(ours)} and {len(others)} timings are not pairs of two rounds")
    logs = [math.log(other / own) for own, other in zip(ours, others, strict=True)]
    mean, deviation = statistics.fmean(logs), statistics.stdev(logs)
    half = t_quantile(len(logs) - 1) * deviation / math.sqrt(len(logs))
    return PairedRatio(
        math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs), deviation
    )


def t_quantile(freedom: int) -> float:
    """Student's t that 95 % of draws stay within, on both sides; three digits are right.

    By the expansion around the normal distribution (Abramowitz and Stegun 26.7.5).
    """
    if freedom <= len(_FEW):
        return _FEW[freedom - 1]
    z = statistics.NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    more: float = sum(term / freedom ** (n + 1) for n, term in enumerate(terms))
    return z + more
