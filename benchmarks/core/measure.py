"""Interleaved timing of contenders.

Contenders are not run one after the other but in rounds, each round in a new order, so that a slow
second of the machine falls on all of them and none always runs in the cache that another one left.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of doing the work of a group.

    `run` performs one repetition. It returns None, and is timed from outside, or the seconds that
    it measured itself (a child process, device events). A result that it returns from within is
    dropped before the next repetition, outside the timed span.

    `bytes` are the payload bytes that one repetition moves, counted once; None where the
    work is not a transfer. `floor` names the contender of the same group that bounds this one.
    A target is shown beside the figure: `target_seconds` is met by a median at or below it,
    `target_ratio` by a ratio to the floor at or above it.
    """

    name: str
    run: Callable[[], object]
    bytes: int | None = None
    floor: str | None = None
    target_seconds: float | None = None
    target_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a group is measured: until `seconds` have passed, within the limits on rounds."""

    seconds: float
    min_rounds: int
    max_rounds: int


def interleave(
    contenders: Sequence[Contender],
    budget: Budget,
    *,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[int], object] = lambda _rounds: None,
) -> dict[str, list[float]]:
    """Times the contenders in rounds and returns the seconds of each, in the order of the rounds.

    One round that is not counted comes first: it meets cold caches and first-call work. The order
    within a round is shuffled anew with a generator started from `seed`. The garbage collector
    rests meanwhile. `on_round` is called before each counted round with the number of those done.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    if len(seconds) != len(contenders):
        raise ValueError(f"two contenders share a name: {[c.name for c in contenders]}")
    order = list(contenders)
    shuffle = random.Random(seed).shuffle
    collecting = gc.isenabled()
    gc.disable()
    try:
        for contender in order:
            contender.run()
        deadline = clock() + budget.seconds
        for done in range(budget.max_rounds):
            if done >= budget.min_rounds and clock() >= deadline:
                break
            on_round(done)
            shuffle(order)
            for contender in order:
                seconds[contender.name].append(_time(contender, clock))
    finally:
        if collecting:
            gc.enable()
    return seconds


def _time(contender: Contender, clock: Callable[[], float]) -> float:
    start = clock()
    result = contender.run()
    elapsed = clock() - start
    return result if isinstance(result, float) else elapsed
