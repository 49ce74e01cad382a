"""The benchmark core on synthetic timings: nothing here depends on how fast anything is."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as cli
from benchmarks import registry
from benchmarks.core import results as results_file
from benchmarks.core.bench import Bench, Options
from benchmarks.core.compare import compare
from benchmarks.core.errors import BenchmarkError, ResultsError
from benchmarks.core.measure import Budget, Contender, interleave
from benchmarks.core.memory import descendants, process_bytes, reset_peak, touch
from benchmarks.core.paired import PairedRatio, paired_ratio, t_quantile
from benchmarks.core.report import format_seconds
from benchmarks.core.results import Case, Machine, Results, Versions, ratio_to_floor
from benchmarks.core.stats import summarize, verdict

STEADY = (1.00, 1.01, 0.99, 1.00, 1.02, 0.98)


def case(name: str, seconds: tuple[float, ...] = STEADY, **more: Any) -> Case:
    return Case(group="g", name=name, bytes=more.pop("bytes", 1000), seconds=seconds, **more)


def results(*cases: Case, **more: Any) -> Results:
    whole = Results(
        scenario="ops",
        utc="2026-01-31T12:00:00Z",
        command="python -m benchmarks ops",
        machine=Machine("a cpu", 2, 1 << 30, None, "Linux 6"),
        versions=Versions("3.11", "2.13", "0.1", None),
        parameters={"quick": False, "layers": [1, 2]},
        other_cores=0.0,
        cases=cases,
    )
    return replace(whole, **more)


# Statistics


def test_summary_is_median_middle_half_and_minimum() -> None:
    summary = summarize([9.0, 1.0, 2.0, 4.0, 3.0])
    assert (summary.median, summary.low, summary.high) == (3.0, 2.0, 4.0)
    assert (summary.minimum, summary.repetitions) == (1.0, 5)
    assert summary.spread == pytest.approx(1 / 3)


def test_spread_of_few_repetitions_is_their_range() -> None:
    summary = summarize([1.0, 5.0, 2.0])
    assert (summary.low, summary.high) == (1.0, 5.0)


def test_one_outlier_moves_neither_median_nor_spread() -> None:
    steady, disturbed = summarize([1.0] * 9), summarize([1.0] * 8 + [100.0])
    assert (disturbed.median, disturbed.spread) == (steady.median, steady.spread)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((1.0,) * 6, (0.9,) * 6, "faster"),
        ((1.0,) * 6, (1.1,) * 6, "slower"),
        ((1.0,) * 6, (1.015,) * 6, "unresolved"),
        ((1.0, 1.4, 0.8, 1.5, 0.9, 1.2), (1.5, 1.2, 1.3, 1.6, 1.1, 1.2), "unresolved"),
        ((1.5, 1.2, 1.3, 1.6, 1.1, 1.2), (1.0, 1.4, 0.8, 1.5, 0.9, 1.2), "unresolved"),
        ((1.0, 1.2, 1.4), (1.3, 1.6, 1.7), "unresolved"),
    ],
)
def test_verdict_respects_spread(
    old: tuple[float, ...], new: tuple[float, ...], expected: str
) -> None:
    assert verdict(summarize(old), summarize(new)) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (0.5, "500 ms"), (0.000499, "499 µs"), (3e-9, "3 ns"), (1234.5, "1234 s")],
)
def test_seconds_are_shown_with_their_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# Paired ratios


@pytest.mark.parametrize(
    ("freedom", "tabled"),
    [(1, 12.706), (2, 4.303), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (1000, 1.962)],
)
def test_t_quantiles_are_those_of_the_tables(freedom: int, tabled: float) -> None:
    assert t_quantile(freedom) == pytest.approx(tabled, abs=2e-3)


def test_paired_ratio_has_the_interval_of_the_log_ratios() -> None:
    # Logarithms -0.1, 0 and 0.1: mean 0, deviation 0.1, and t of two degrees of freedom.
    others = [math.exp(-0.1), 1.0, math.exp(0.1)]
    ratio = paired_ratio([1.0] * 3, others)
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert ratio.mean == pytest.approx(1.0)
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((-half, half))
    assert ratio.pairs == 3
    assert ratio.deviation == pytest.approx(0.1)


def test_slow_rounds_that_meet_both_leave_the_paired_ratio_alone() -> None:
    others = [1.0, 5.0, 2.0, 9.0]
    ratio = paired_ratio([seconds / 0.98 for seconds in others], others)
    assert (ratio.low, ratio.mean, ratio.high) == pytest.approx((0.98, 0.98, 0.98))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.97, 0.99, "met"),
        (0.969, 0.99, "not resolved"),
        (0.95, 0.97, "not resolved"),
        (0.95, 0.969, "missed"),
    ],
)
def test_a_target_inside_the_interval_is_not_resolved(
    low: float, high: float, expected: str
) -> None:
    ratio = PairedRatio((low * high) ** 0.5, low, high, 10, 0.01)
    assert ratio.verdict(0.97) == expected


def test_pairs_needed_are_the_fewest_that_resolve_the_target() -> None:
    ratio = PairedRatio(0.98, 0.9, 1.07, 4, 0.02)
    needed = ratio.pairs_needed(0.97)
    assert needed is not None
    distance = math.log(0.98 / 0.97)
    assert t_quantile(needed - 1) * 0.02 / math.sqrt(needed) < distance
    assert t_quantile(needed - 2) * 0.02 / math.sqrt(needed - 1) >= distance


def test_what_is_not_resolved_says_what_it_would_take() -> None:
    described = PairedRatio(0.98, 0.9, 1.07, 4, 0.02).describe(0.97)
    assert described.startswith("0.980 [0.900, 1.070] (4 pairs), target ≥ 0.97: not resolved;")
    assert "±2.0% a pair it would take about 18 pairs" in described
    on_target = PairedRatio(0.97, 0.9, 1.05, 4, 0.02).describe(0.97)
    assert "more than 10,000 pairs" in on_target
    assert "take" not in PairedRatio(0.99, 0.98, 1.0, 4, 0.02).describe(0.97)


@pytest.mark.parametrize("others", [[1.0], [1.0, 2.0, 3.0]])
def test_what_is_no_pairs_of_rounds_is_refused(others: list[float]) -> None:
    with pytest.raises(ValueError, match="not pairs"):
        paired_ratio([1.0] if len(others) == 1 else [1.0, 2.0], others)


# Interleaving


class FakeClock:
    """Time that passes only where a contender says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.trace: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contender(self, name: str, seconds: float) -> Contender:
        def run() -> None:
            self.now += seconds
            self.trace.append(name)

        return Contender(name, run)

    def interleave(self, contenders: list[Contender], budget: Budget) -> dict[str, list[float]]:
        return interleave(contenders, budget, seed=1, clock=self)


def test_every_round_runs_every_contender_once() -> None:
    clock = FakeClock()
    clock.interleave([clock.contender(name, 1.0) for name in "ABC"], Budget(0.0, 20, 20))
    rounds = [clock.trace[start : start + 3] for start in range(0, len(clock.trace), 3)]
    assert len(rounds) == 1 + 20
    assert all(sorted(done) == ["A", "B", "C"] for done in rounds)


def test_order_changes_between_rounds_and_repeats_with_the_seed() -> None:
    traces = []
    for _ in range(2):
        clock = FakeClock()
        clock.interleave([clock.contender(name, 1.0) for name in "ABC"], Budget(0.0, 20, 20))
        traces.append(clock.trace)
    assert traces[0] == traces[1]
    assert {tuple(traces[0][start : start + 3]) for start in range(3, 63, 3)} > {("A", "B", "C")}


def test_the_first_round_is_not_counted() -> None:
    clock = FakeClock()
    cold = iter([100.0])

    def run() -> None:
        clock.now += next(cold, 2.0)

    timings = clock.interleave([Contender("A", run)], Budget(0.0, 4, 4))
    assert timings["A"] == pytest.approx([2.0] * 4)


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [
        pytest.param(0.0, 3, id="at least min_rounds"),
        pytest.param(5.5, 5, id="until the time is used"),
        pytest.param(1e9, 8, id="at most max_rounds"),
    ],
)
def test_budget_decides_how_many_rounds_are_run(seconds: float, rounds: int) -> None:
    clock = FakeClock()
    contenders = [clock.contender("A", 0.6), clock.contender("B", 0.6)]
    timings = clock.interleave(contenders, Budget(seconds, min_rounds=3, max_rounds=8))
    assert {name: len(values) for name, values in timings.items()} == {"A": rounds, "B": rounds}


def test_seconds_measured_by_the_contender_itself_are_kept() -> None:
    clock = FakeClock()
    timings = clock.interleave([Contender("child", lambda: 0.25)], Budget(0.0, 2, 2))
    assert timings == {"child": [0.25, 0.25]}


def test_contenders_of_one_name_are_refused() -> None:
    clock = FakeClock()
    with pytest.raises(ValueError, match="share a name"):
        clock.interleave([clock.contender("A", 1.0)] * 2, Budget(0.0, 1, 1))


# Floors and memory


def test_host_copies_give_what_they_copy() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.core.floors import host_copies

    source = torch.arange(100_003)
    copies = host_copies(source)
    assert all(contender.bytes == source.nbytes for contender in copies)
    assert all(torch.equal(contender.run(), source) for contender in copies)


def test_touching_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.core.memory.available_bytes", lambda: 1 << 20)
    with pytest.raises(BenchmarkError, match="available"):
        touch(1 << 20)


def test_touching_reports_progress_to_the_end() -> None:
    shares: list[float] = []
    touch(1 << 20, shares.append)
    assert shares[-1] == 1.0


def test_a_process_that_was_started_is_found_with_its_memory() -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in descendants(os.getpid())
        assert child.pid not in descendants(child.pid)
        reset_peak(child.pid)
        resident = process_bytes(child.pid, "RssAnon", "RssFile", "RssShmem")
        assert 0 < resident <= process_bytes(child.pid, "VmHWM") < 1 << 30
        child.communicate()


def test_ratio_to_floor_compares_bandwidths() -> None:
    assert ratio_to_floor(case("a", (2.0,), bytes=100), case("f", (1.0,), bytes=100)) == 0.5
    assert ratio_to_floor(case("a", (2.0,), bytes=300), case("f", (1.0,), bytes=100)) == 1.5
    assert ratio_to_floor(case("a", (2.0,), bytes=None), case("f", (1.0,), bytes=None)) == 0.5
    with pytest.raises(ValueError, match="states its bytes"):
        ratio_to_floor(case("a", bytes=None), case("f"))


# What a scenario keeps


class NoProgress:
    def show(self, text: str, share: float) -> None:
        pass


def test_timings_taken_by_the_scenario_get_their_ratio_to_the_floor() -> None:
    bench = Bench(Options(), NoProgress())
    bench.keep(case("floor", (1.00004, 1.0, 1.0), bytes=None))
    bench.keep(case("ours", (2.0, 2.0), bytes=None, floor="floor"))
    assert bench.cases[0].seconds == (1.0, 1.0, 1.0)
    assert bench.cases[1].ratio_to_floor == 0.5


def test_hooks_are_added_up_by_step_and_steps_that_lack_one_left_out() -> None:
    pytest.importorskip("vllm")
    from benchmarks.vllm import read_steps

    times = """\
6 wait_for_save 1 5000 5000
7 build_connector_meta 1 1000 1000
7 get_finished 1 2000 1000
8 build_connector_meta 0 1000 1000
7 wait_for_save 1 4000 1000
8 get_finished 0 1000 1000
8 get_finished 0 500 500
8 wait_for_save 0 1000 1000
"""
    rows, none = read_steps(times)
    assert (rows.has_rows, none.has_rows) == (True, False)
    assert sum(rows.seconds.values()) == pytest.approx(7e-6)
    assert rows.own_seconds == pytest.approx(3e-6)
    assert none.seconds["get_finished"] == pytest.approx(1.5e-6)


# Results files

WHOLE = results(
    case("ours", floor="memcpy", ratio_to_floor=1.0, target_ratio=0.85),
    case("memcpy"),
    case("start", bytes=None, target_seconds=0.5),
)


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    results_file.write(WHOLE, tmp_path / "r.json")
    assert results_file.read(tmp_path / "r.json") == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("damage", "field", "problem"),
    [
        (lambda d: d.pop("utc"), "utc", "is missing"),
        (lambda d: d.update(utc="yesterday"), "utc", "not a UTC time"),
        (lambda d: d.update(extra=1), "extra", "not a field"),
        (lambda d: d.update(schema_version=2), "schema_version", "update the checkout"),
        (lambda d: d.update(schema_version=True), "schema_version", "is a truth value"),
        (lambda d: d["machine"].update(cores="2"), "machine.cores", "is text"),
        (lambda d: d["machine"].update(cores=0), "machine.cores", "not above zero"),
        (lambda d: d["machine"].pop("gpu"), "machine.gpu", "is missing"),
        (lambda d: d.update(versions=[]), "versions", "is a list"),
        (lambda d: d["parameters"].update(a={}), "parameters.a", "neither a plain value"),
        (lambda d: d.update(cases=[]), "cases", "holds no cases"),
        (lambda d: d["cases"].append(7), "cases[3].", "not an object"),
        (lambda d: d["cases"][1].update(name=""), "cases[1].name", "is empty"),
        (lambda d: d["cases"][1].update(seconds=[]), "cases[1].seconds", "holds no timings"),
        (lambda d: d["cases"][1]["seconds"].append(-1), "cases[1].seconds[6]", "above zero"),
        (lambda d: d["cases"][2].update(name="memcpy"), "cases[2].name", "there twice"),
        (lambda d: d["cases"][0].update(floor="disk"), "cases[0].floor", "no other case"),
        (lambda d: d["cases"][0].update(floor="ours"), "cases[0].floor", "no other case"),
        (lambda d: d["cases"][0].update(floor=None), "cases[0].ratio_to_floor", "without a floor"),
        (lambda d: d["cases"][0].update(ratio_to_floor=2.0), "cases[0].ratio_to_floor", "give 1"),
        (lambda d: d["cases"][0].update(bytes=None), "cases[0].bytes", "states its bytes"),
    ],
)
def test_damaged_results_are_refused_naming_file_field_and_remedy(
    tmp_path: Path, damage: Damage, field: str, problem: str
) -> None:
    path = tmp_path / "r.json"
    results_file.write(WHOLE, path)
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ResultsError) as refused:
        results_file.read(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: {field}:")
    assert problem in message
    assert "; run the scenario again" in message or "; update the checkout" in message


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema_version": NaN}', "[" * 100_000],
    ids=["empty", "list", "nan", "deep"],
)
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match="run the scenario again"):
        results_file.read(path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results_file.write(WHOLE, path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ResultsError, match="is not JSON"):
        results_file.read(path)


def test_absent_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"absent\.json: No such file"):
        results_file.read(tmp_path / "absent.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ResultsError, match="is not text"):
        results_file.read(tmp_path / "binary.json")


def test_results_that_could_not_be_read_back_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(ResultsError, match="above zero"):
        results_file.write(results(case("a", (0.0,))), path)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="is a folder"):
        results_file.check_writable(tmp_path)
    with pytest.raises(ResultsError, match="choose an existing folder"):
        results_file.check_writable(tmp_path / "no such folder" / "r.json")


# Targets


def test_targets_are_met_at_their_value_and_missed_beyond() -> None:
    assert case("a", (0.5,), target_seconds=0.5).meets_target is True
    assert case("a", (0.6,), target_seconds=0.5).meets_target is False
    assert case("a", floor="f", ratio_to_floor=0.85, target_ratio=0.85).meets_target is True
    assert case("a", floor="f", ratio_to_floor=0.84, target_ratio=0.85).meets_target is False
    assert case("a").meets_target is None


# Comparison


def slower_by(share: float) -> tuple[float, ...]:
    return tuple(seconds * (1 + share) for seconds in STEADY)


def test_comparison_pairs_cases_and_names_those_of_one_side() -> None:
    found = compare(results(case("a"), case("gone")), results(case("a", slower_by(0.5)), case("b")))
    assert [(d.new.name, d.verdict) for d in found.differences] == [("a", "slower")]
    assert found.differences[0].change == pytest.approx(1.5)
    assert [c.name for c in found.only_old] == ["gone"]
    assert [c.name for c in found.only_new] == ["b"]


def test_equal_surroundings_give_no_warning() -> None:
    found = compare(WHOLE, WHOLE)
    assert (found.warnings, found.notes) == ((), ())


def test_other_machine_and_parameters_are_warned_of_and_versions_noted() -> None:
    changed = replace(
        WHOLE,
        machine=replace(WHOLE.machine, cores=4),
        versions=replace(WHOLE.versions, torch="2.14"),
        parameters={"quick": True, "layers": [1, 2]},
    )
    found = compare(WHOLE, changed)
    assert found.warnings == (
        "the machines differ in cores: 2 -> 4",
        "the runs differ in parameter quick: False -> True",
    )
    assert found.notes == ("version of torch: 2.13 -> 2.14",)


def test_what_was_found_out_is_no_difference_in_parameters() -> None:
    one = replace(WHOLE, parameters={**WHOLE.parameters, "found": ["ratio: 0.98"]})
    other = replace(WHOLE, parameters={**WHOLE.parameters, "found": ["ratio: 0.99"]})
    assert compare(one, other).warnings == ()


def test_other_bytes_in_a_case_are_warned_of() -> None:
    found = compare(results(case("a", bytes=10)), results(case("a", bytes=20)))
    assert found.warnings == ("g: a moves 20 bytes, it was 10",)


def test_a_machine_whose_floor_moved_is_warned_of() -> None:
    slow = results(
        case("ours", slower_by(0.5), floor="memcpy", ratio_to_floor=1.0),
        case("memcpy", slower_by(0.5)),
    )
    (warning,) = compare(WHOLE, slow).warnings
    assert "50% more time" in warning


def test_slower_than_leaves_out_floors_and_what_stays_below_the_limit() -> None:
    new = results(
        case("ours", slower_by(0.2), floor="memcpy", ratio_to_floor=1.25),
        case("memcpy", slower_by(0.5)),
    )
    found = compare(WHOLE, new)
    assert [d.new.name for d in found.slower_than(10)] == ["ours"]
    assert found.slower_than(30) == ()


def test_another_scenario_is_refused() -> None:
    with pytest.raises(ValueError, match="'pool', the other file of 'ops'"):
        compare(WHOLE, replace(WHOLE, scenario="pool"))


# Command line

SYNTHETIC = '''"""Nothing, quickly.

A second paragraph [with brackets].
"""
from benchmarks.core.measure import Contender


def run(bench):
    bench.parameters["answer"] = 42
    bench.found("ratio", "0.98: not resolved [at all]")
    bench.parameters["counted"] = ["7 [bytes]", "8 tokens"]
    bench.parameters["left_out"] = None if bench.peers else "theirs: no --peers"
    for name, seconds in bench.groups({"first": 1.0, "second": 2.0}):
        bench.measure(name, [
            Contender("ours", lambda: seconds, bytes=10, floor="floor", target_ratio=0.4),
            Contender("floor", lambda: seconds / 2, bytes=10),
        ])
'''

Main = Callable[..., int]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    """Runs the command line with one more scenario, added as the README says; the exit code."""
    (tmp_path / "synthetic_scenario.py").write_text(SYNTHETIC)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry.SCENARIOS, "synthetic", "synthetic_scenario")

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    return run


def test_a_scenario_is_listed_and_run_and_its_results_kept(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("list") == 0
    assert "synthetic  Nothing, quickly." in capsys.readouterr().out
    assert main("synthetic", "--quick", "--json", tmp_path / "r.json") == 0
    printed = capsys.readouterr()
    assert "0.50" in printed.out
    assert "ratio  0.98: not resolved [at all]" in printed.out
    assert "met" in printed.out
    assert "[2/2] second" in printed.err
    kept = results_file.read(tmp_path / "r.json")
    assert kept.scenario == "synthetic"
    assert kept.parameters["answer"] == 42
    assert [(c.group, c.name, c.ratio_to_floor) for c in kept.cases] == [
        ("first", "ours", 0.5),
        ("first", "floor", None),
        ("second", "ours", 0.5),
        ("second", "floor", None),
    ]


def test_peers_are_asked_for_and_what_is_counted_or_left_out_is_printed(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("synthetic", "--quick") == 0
    printed = capsys.readouterr().out
    assert "counted: 7 [bytes]\ncounted: 8 tokens\nleft out: theirs: no --peers\n" in printed
    assert main("synthetic", "--quick", "--peers") == 0
    assert "left out" not in capsys.readouterr().out


def test_a_peer_that_is_not_there_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("hidden_cache._native")
    from benchmarks import store

    monkeypatch.setitem(sys.modules, "lmcache.v1.hidden_state_store", None)
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0")
    left_out: list[str] = []
    assert store._peer(True, left_out) is None
    assert store._peer(False, left_out) is None
    missing, unasked = left_out
    assert "LMCache: it cannot be used here (ModuleNotFoundError" in missing
    assert "--peers" in unasked


def test_help_of_a_scenario_is_its_docstring(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("synthetic", "--help") == 0
    assert "A second paragraph [with brackets]." in capsys.readouterr().out


def test_only_keeps_matching_groups_and_refuses_none(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    assert main("synthetic", "--quick", "--only", "sec", "--json", path) == 0
    assert {c.group for c in results_file.read(path).cases} == {"second"}
    capsys.readouterr()
    assert main("synthetic", "--only", "third") == 1
    assert "the groups are:\n  first\n  second\n" in capsys.readouterr().err


def test_compare_exits_by_what_it_was_asked(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    results_file.write(results(case("a")), old)
    results_file.write(results(case("a", slower_by(0.5))), new)
    assert main("compare", old, new) == 0
    assert main("compare", old, new, "--fail-slower", 60) == 0
    assert main("compare", new, old, "--fail-slower", 10) == 0
    capsys.readouterr()
    assert main("compare", old, new, "--fail-slower", 10) == 1
    assert "slower by more than 10 %: g: a (+50%)" in capsys.readouterr().out


def test_compare_refuses_bad_files_and_other_scenarios(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    results_file.write(WHOLE, old)
    results_file.write(replace(WHOLE, scenario="pool"), new)
    assert main("compare", old, new) == 2
    assert f"{new}: scenario: is of scenario 'pool'" in capsys.readouterr().err
    new.write_text("{")
    assert main("compare", old, new) == 2
    assert f"error: {new}: is not JSON" in capsys.readouterr().err


def test_readme_shows_every_scenario() -> None:
    readme = (Path(registry.__file__).parent / "README.md").read_text(encoding="utf-8")
    assert [name for name in registry.SCENARIOS if f"| `{name}` |" not in readme] == []


def test_committed_results_are_valid() -> None:
    folder = Path(registry.__file__).parent / "results"
    for path in folder.glob("*.json"):
        assert results_file.read(path).scenario in registry.SCENARIOS
