"""What a scenario is handed: groups to go through, measuring, and a place for what it used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from benchmarks.core import memory
from benchmarks.core.errors import BenchmarkError
from benchmarks.core.machine import usable_cores
from benchmarks.core.measure import Budget, Contender, interleave
from benchmarks.core.results import Case, Parameter, ratio_to_floor

# Fixed, so that two runs shuffle alike; it is stored with the results.
SEED = 20260101

FULL = Budget(seconds=3.0, min_rounds=10, max_rounds=50)
QUICK = Budget(seconds=0.2, min_rounds=3, max_rounds=10)

Spec = TypeVar("Spec")


class Progress(Protocol):
    """Whatever shows the step `text` and the share of the run, 0 to 1, that is done."""

    def show(self, text: str, share: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks of every scenario.

    `quick` is a smoke run of a few seconds. `seconds` overrides the time a group is measured.
    `only` keeps the groups whose name contains it. `peers` asks for other projects' code, too.
    """

    quick: bool = False
    seconds: float | None = None
    only: str | None = None
    peers: bool = False


class Bench:
    """Collects the cases of one run. A scenario is a function `run(bench)`; not thread-safe."""

    def __init__(self, options: Options, progress: Progress) -> None:
        budget = QUICK if options.quick else FULL
        self.quick = options.quick
        self.peers = options.peers
        self.budget = (
            budget if options.seconds is None else replace(budget, seconds=options.seconds)
        )
        self.threads = usable_cores()
        self.seed = SEED
        self.cases: list[Case] = []
        self.parameters: dict[str, Parameter] = {
            "quick": options.quick,
            "only": options.only,
            "seconds_per_group": self.budget.seconds,
            "threads": self.threads,
            "seed": SEED,
        }
        self._only = options.only
        self._progress = progress
        self._groups = 0
        self._measured = 0

    def show(self, text: str) -> None:
        """Shows what goes on before or between groups."""
        self._progress.show(text, self._measured / max(self._groups, 1))

    def found(self, what: str, figure: str) -> None:
        """Keeps something that no table of times shows: it is printed below them, and `compare`
        leaves it out."""
        found = self.parameters.setdefault("found", [])
        assert isinstance(found, list)
        found.append(f"{what}: {figure}")

    def keep(self, case: Case) -> None:
        """Keeps timings that a scenario took itself. A floor is a case of its group kept before."""
        case = replace(case, seconds=_rounded(case.seconds))
        if case.floor is not None:
            (floor,) = (c for c in self.cases if (c.group, c.name) == (case.group, case.floor))
            case = replace(case, ratio_to_floor=_digits(ratio_to_floor(case, floor)))
        self.cases.append(case)

    def begin(self, group: str) -> None:
        """Counts a group as begun that is not for `measure`."""
        self.show(f"[{self._measured + 1}/{self._groups}] {group}")
        self._measured += 1

    def touch(self, need_bytes: int) -> None:
        """Has the machine back more memory than the scenario needs: call it before allocating."""
        text = f"touching {need_bytes / 1e6:.0f} MB of memory, and a quarter more"
        self._progress.show(text, 0.0)
        memory.touch(need_bytes, lambda share: self._progress.show(text, share))

    def groups(self, specs: Mapping[str, Spec]) -> list[tuple[str, Spec]]:
        """The groups, name and spec, that are asked for: measure each of them once, in order.

        Raises BenchmarkError where `--only` leaves none.
        """
        chosen = [(name, spec) for name, spec in specs.items() if (self._only or "") in name]
        if not chosen:
            names = "".join(f"\n  {name}" for name in specs)
            raise BenchmarkError(f"no group's name contains {self._only!r}; the groups are:{names}")
        self._groups = len(chosen)
        return chosen

    def measure(
        self, group: str, contenders: Sequence[Contender], *, budget: Budget | None = None
    ) -> None:
        """Times the contenders against each other and keeps the cases.

        `budget` is for what can be repeated only a few times; else the command line decides.
        """
        budget = budget or self.budget
        text = f"[{self._measured + 1}/{self._groups}] {group}"
        self._measured += 1

        def show(rounds: int) -> None:
            inside = rounds / budget.max_rounds
            self._progress.show(text, (self._measured - 1 + inside) / self._groups)

        show(0)
        timings = interleave(contenders, budget, seed=self.seed, on_round=show)
        cases = {
            contender.name: Case(
                group=group,
                name=contender.name,
                bytes=contender.bytes,
                seconds=_rounded(timings[contender.name]),
                floor=contender.floor,
                target_seconds=contender.target_seconds,
                target_ratio=contender.target_ratio,
            )
            for contender in contenders
        }
        for case in cases.values():
            if case.floor is not None:
                ratio = _digits(ratio_to_floor(case, cases[case.floor]))
                case = replace(case, ratio_to_floor=ratio)
            self.cases.append(case)


def _rounded(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(_digits(value) for value in seconds)


def _digits(value: float) -> float:
    """Four digits are more than the clock and the machine hold still for."""
    return float(f"{value:.4g}")
