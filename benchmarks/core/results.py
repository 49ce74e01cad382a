"""Results of one run, and their form on disk.

A results file is one JSON object. Version 1 has these fields, all of them always present:

    schema_version  1
    scenario        name of the scenario
    utc             start of the run, ISO 8601, ending in Z
    command         the command line
    machine         cpu, cores, memory_bytes, gpu, kernel
    versions        python, torch, hidden_cache, commit
    parameters      what the scenario was run with: names to plain values or lists of them
    other_cores     mean number of cores that other processes kept busy during the run
    cases           group, name, bytes, seconds, floor, ratio_to_floor, target_seconds, target_ratio

`seconds` holds every repetition in the order of the rounds. `bytes` are payload bytes moved by one
repetition. `floor` names a case of the same group, and `ratio_to_floor` is this case's bandwidth
over the floor's (of medians; 1 is as fast as the floor; without bytes, the floor's time over this
case's). What is unknown or does not apply is null. Times are seconds, sizes are bytes.

Files are validated when written and when read: a field that is missing, unknown, of the wrong type
or at odds with another is an error that names it.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.core.errors import ResultsError

SCHEMA_VERSION = 1

Plain = str | int | float | bool | None
Parameter = Plain | list[Plain]


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    memory_bytes: int | None
    gpu: str | None
    kernel: str


@dataclass(frozen=True, slots=True)
class Versions:
    python: str
    torch: str | None
    hidden_cache: str | None
    commit: str | None


@dataclass(frozen=True, slots=True)
class Case:
    """All repetitions of one contender in one group."""

    group: str
    name: str
    bytes: int | None
    seconds: tuple[float, ...]
    floor: str | None = None
    ratio_to_floor: float | None = None
    target_seconds: float | None = None
    target_ratio: float | None = None

    @property
    def label(self) -> str:
        return f"{self.group}: {self.name}"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float | None:
        """Bandwidth of the median repetition in 1e9 bytes a second; None without bytes."""
        return None if self.bytes is None else self.bytes / self.median / 1e9

    @property
    def meets_target(self) -> bool | None:
        """Whether every target is met; None where there is none."""
        if self.target_seconds is None and self.target_ratio is None:
            return None
        if self.target_seconds is not None and self.median > self.target_seconds:
            return False
        return self.target_ratio is None or (self.ratio_to_floor or 0.0) >= self.target_ratio


@dataclass(frozen=True, slots=True)
class Results:
    scenario: str
    utc: str
    command: str
    machine: Machine
    versions: Versions
    parameters: dict[str, Parameter]
    other_cores: float | None
    cases: tuple[Case, ...]


def ratio_to_floor(case: Case, floor: Case) -> float:
    """Bandwidth of `case` over that of `floor`; without bytes, the floor's time over the case's.

    Raises ValueError where only one of the two has bytes.
    """
    if (case.bytes is None) != (floor.bytes is None):
        raise ValueError(
            f"only one of {case.label!r} and its floor {floor.name!r} states its bytes"
        )
    work = 1.0 if case.bytes is None or floor.bytes is None else case.bytes / floor.bytes
    return work * floor.median / case.median


def write(results: Results, path: Path) -> None:
    """Writes a results file whole or not at all.

    Raises ResultsError where the results would not be accepted by `read`, or the file cannot be
    written.
    """
    text = _serialize(results)
    _parse(text, path)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def check_writable(path: Path) -> None:
    """Raises ResultsError unless `write` can put a file there: asked before a long run."""
    if path.is_dir():
        raise ResultsError(path, None, "is a folder", "name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def read(path: Path) -> Results:
    """Reads and validates a results file. Raises ResultsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ResultsError(
            path, None, error.strerror or str(error), "name a file that --json has written"
        ) from error
    except UnicodeDecodeError as error:
        raise ResultsError(path, None, f"is not text ({error})", _RERUN) from error
    return _parse(text, path)


_RERUN = "run the scenario again with --json"


def _unwritable(path: Path, error: OSError) -> ResultsError:
    problem = f"cannot be written ({error.strerror or error})"
    return ResultsError(path, None, problem, "choose an existing folder that you may write to")


def _serialize(results: Results) -> str:
    """JSON with one case a line, so that a change of one case is a change of one line."""
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    for field in fields(Results):
        if field.name != "cases":
            document[field.name] = _plain(getattr(results, field.name))
    head = json.dumps(document, indent=1, ensure_ascii=False)
    cases = ",\n  ".join(json.dumps(_plain(case), ensure_ascii=False) for case in results.cases)
    return f'{head[:-2]},\n "cases": [\n  {cases}\n ]\n}}\n'


def _plain(value: Any) -> Any:
    if isinstance(value, Machine | Versions | Case):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value


def _parse(text: str, path: Path) -> Results:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number")

    try:
        document = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ResultsError(path, None, f"is not JSON ({error})", _RERUN) from error
    top = _Object(document, path, "")
    version = top.integer("schema_version")
    if version != SCHEMA_VERSION:
        problem = f"is {version}, this checkout reads {SCHEMA_VERSION}"
        remedy = "update the checkout" if version > SCHEMA_VERSION else _RERUN
        raise ResultsError(path, "schema_version", problem, remedy)
    machine, versions = top.object("machine"), top.object("versions")
    results = Results(
        scenario=top.text("scenario"),
        utc=_utc(top),
        command=top.text("command"),
        machine=Machine(
            cpu=machine.text("cpu"),
            cores=machine.integer("cores"),
            memory_bytes=machine.optional_integer("memory_bytes"),
            gpu=machine.optional_text("gpu"),
            kernel=machine.text("kernel"),
        ),
        versions=Versions(
            python=versions.text("python"),
            torch=versions.optional_text("torch"),
            hidden_cache=versions.optional_text("hidden_cache"),
            commit=versions.optional_text("commit"),
        ),
        parameters=_parameters(top),
        other_cores=top.optional_number("other_cores"),
        cases=tuple(_case(case) for case in top.objects("cases")),
    )
    for part in (top, machine, versions):
        part.refuse_unknown()
    _check_cases(results.cases, path)
    return results


def _utc(top: _Object) -> str:
    value = top.text("utc")
    try:
        datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        top.fail("utc", f"is {value!r}, not a UTC time like 2026-01-31T12:00:00Z")
    return value


def _parameters(top: _Object) -> dict[str, Parameter]:
    parameters = top.object("parameters")
    for name, value in parameters.values.items():
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float | bool | None) for item in items):
            parameters.fail(name, "is neither a plain value nor a list of them")
    return parameters.values


def _case(case: _Object) -> Case:
    parsed = Case(
        group=case.text("group"),
        name=case.text("name"),
        bytes=case.optional_integer("bytes"),
        seconds=case.positive_numbers("seconds"),
        floor=case.optional_text("floor"),
        ratio_to_floor=case.optional_number("ratio_to_floor"),
        target_seconds=case.optional_number("target_seconds"),
        target_ratio=case.optional_number("target_ratio"),
    )
    case.refuse_unknown()
    return parsed


def _check_cases(cases: tuple[Case, ...], path: Path) -> None:
    """What no single field shows: names are unique, and floors exist and give the stored ratio."""
    known: dict[tuple[str, str], Case] = {}
    for index, case in enumerate(cases):
        if known.setdefault((case.group, case.name), case) is not case:
            raise ResultsError(
                path, f"cases[{index}].name", f"{case.label!r} is there twice", _RERUN
            )
    for index, case in enumerate(cases):
        if case.floor is None:
            for field in ("ratio_to_floor", "target_ratio"):
                if getattr(case, field) is not None:
                    problem = "is given without a floor"
                    raise ResultsError(path, f"cases[{index}].{field}", problem, _RERUN)
            continue
        floor = known.get((case.group, case.floor))
        if floor is None or floor is case:
            problem = f"is {case.floor!r}, which is no other case of group {case.group!r}"
            raise ResultsError(path, f"cases[{index}].floor", problem, _RERUN)
        try:
            ratio = ratio_to_floor(case, floor)
        except ValueError as error:
            raise ResultsError(path, f"cases[{index}].bytes", str(error), _RERUN) from error
        if case.ratio_to_floor is None or not math.isclose(
            case.ratio_to_floor, ratio, rel_tol=1e-2
        ):
            problem = f"is {case.ratio_to_floor}, the timings give {ratio:.4g}"
            raise ResultsError(path, f"cases[{index}].ratio_to_floor", problem, _RERUN)


class _Object:
    """One JSON object under validation: every getter names the file and the field it fails on."""

    def __init__(self, value: object, path: Path, where: str) -> None:
        self._path = path
        self._where = where
        if not isinstance(value, dict):
            problem = f"is {_kind(value)}, not an object"
            raise ResultsError(path, where or None, problem, _RERUN)
        self.values: dict[str, Any] = value
        self._asked: set[str] = set()

    def fail(self, name: str, problem: str) -> NoReturn:
        raise ResultsError(self._path, f"{self._where}{name}", problem, _RERUN)

    def refuse_unknown(self) -> None:
        for name in self.values:
            if name not in self._asked:
                self.fail(name, f"is not a field of schema version {SCHEMA_VERSION}")

    def text(self, name: str) -> str:
        value = self._get(name, "text", str)
        if not value:
            self.fail(name, "is empty")
        return str(value)

    def optional_text(self, name: str) -> str | None:
        return None if self._is_null(name) else self.text(name)

    def integer(self, name: str) -> int:
        value = self._get(name, "a whole number", int)
        if value <= 0:
            self.fail(name, f"is {value}, not above zero")
        return int(value)

    def optional_integer(self, name: str) -> int | None:
        return None if self._is_null(name) else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        if self._is_null(name):
            return None
        value = self._get(name, "a number", int, float)
        if not 0 <= value < math.inf:
            self.fail(name, f"is {value}, not a finite number of at least zero")
        return float(value)

    def positive_numbers(self, name: str) -> tuple[float, ...]:
        values = self._list(name, "timings")
        for index, value in enumerate(values):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                self.fail(f"{name}[{index}]", f"is {value!r}, not a number of seconds above zero")
        return tuple(float(value) for value in values)

    def object(self, name: str) -> _Object:
        value = self._get(name, "an object", dict)
        return _Object(value, self._path, f"{self._where}{name}.")

    def objects(self, name: str) -> list[_Object]:
        values = self._list(name, "cases")
        where = f"{self._where}{name}"
        return [
            _Object(value, self._path, f"{where}[{index}].") for index, value in enumerate(values)
        ]

    def _list(self, name: str, what: str) -> list[Any]:
        values = self._get(name, f"a list of {what}", list)
        if not values:
            self.fail(name, f"holds no {what}")
        return list(values)

    def _is_null(self, name: str) -> bool:
        self._asked.add(name)
        return name in self.values and self.values[name] is None

    def _get(self, name: str, what: str, *types: type) -> Any:
        self._asked.add(name)
        if name not in self.values:
            self.fail(name, "is missing")
        value = self.values[name]
        if not isinstance(value, types) or isinstance(value, bool):
            self.fail(name, f"is {_kind(value)}, not {what}")
        return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return names.get(type(value), f"the number {value}")
