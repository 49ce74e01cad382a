"""Two runs of one scenario, case by case."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, fields

from benchmarks.core.results import Case, Machine, Results, Versions
from benchmarks.core.stats import Verdict, summarize, verdict

# A floor is the machine, not our code: when floors move by more than this, the machine was in
# another state.
_FLOOR_SHIFT = 0.1
# What a run found out, in words: no two runs say the same.
_FOUND = "found"


@dataclass(frozen=True, slots=True)
class Difference:
    """One case in both runs. `change` is the new median over the old one; below 1 is faster."""

    old: Case
    new: Case
    change: float
    verdict: Verdict
    is_floor: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`warnings` say what makes the two runs hard to compare; `notes` what was meant to change."""

    differences: tuple[Difference, ...]
    only_old: tuple[Case, ...]
    only_new: tuple[Case, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def slower_than(self, percent: float) -> tuple[Difference, ...]:
        """Cases, floors left out, that are slower beyond their spread and by over `percent`."""
        return tuple(
            difference
            for difference in self.differences
            if difference.verdict == "slower"
            and not difference.is_floor
            and difference.change > 1 + percent / 100
        )


def compare(old: Results, new: Results) -> Comparison:
    """Compares two runs. Raises ValueError where they are of different scenarios."""
    if old.scenario != new.scenario:
        raise ValueError(f"is of scenario {new.scenario!r}, the other file of {old.scenario!r}")
    olds = {(case.group, case.name): case for case in old.cases}
    news = {(case.group, case.name): case for case in new.cases}
    floors = {(case.group, case.floor) for case in (*old.cases, *new.cases)}
    differences = tuple(
        _difference(olds[key], case, key in floors) for key, case in news.items() if key in olds
    )
    return Comparison(
        differences=differences,
        only_old=tuple(case for key, case in olds.items() if key not in news),
        only_new=tuple(case for key, case in news.items() if key not in olds),
        warnings=tuple(_warnings(old, new, differences)),
        notes=tuple(_changed(old.versions, new.versions, "version of {}: {} -> {}")),
    )


def _difference(old: Case, new: Case, is_floor: bool) -> Difference:
    before, after = summarize(old.seconds), summarize(new.seconds)
    change = after.median / before.median
    return Difference(old, new, change, verdict(before, after), is_floor)


def _warnings(old: Results, new: Results, differences: tuple[Difference, ...]) -> Iterator[str]:
    yield from _changed(old.machine, new.machine, "the machines differ in {}: {} -> {}")
    for name in sorted({*old.parameters, *new.parameters} - {_FOUND}):
        before, after = old.parameters.get(name), new.parameters.get(name)
        if before != after:
            yield f"the runs differ in parameter {name}: {before} -> {after}"
    for difference in differences:
        if difference.old.bytes != difference.new.bytes:
            yield (
                f"{difference.new.label} moves {difference.new.bytes} bytes, "
                f"it was {difference.old.bytes}"
            )
    shifts = [difference.change for difference in differences if difference.is_floor]
    if shifts and abs(shift := statistics.median(shifts) - 1) > _FLOOR_SHIFT:
        yield (
            f"the floors themselves took {abs(shift):.0%} {'more' if shift > 0 else 'less'} time: "
            "the machine was in another state; trust the column 'of floor' more than the seconds"
        )


def _changed(old: Machine | Versions, new: Machine | Versions, sentence: str) -> Iterator[str]:
    for field in fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after:
            yield sentence.format(field.name, before, after)
