"""The report for a GPU, without one: groups in host memory, the table, its advice, the stages."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_report
from benchmarks.core import results as results_file
from benchmarks.core.bench import Bench, Options
from benchmarks.core.results import Case, Machine, Results, Versions
from benchmarks.gpu_report import Stage

LITTLE = gpu.Sizes(
    tokens=600,
    layers=2,
    hidden=64,
    block_sizes=(16,),
    span_tokens=512,
    spans=(4096, 65536),
    gemm=(64, 64, 64),
    gemms=2,
    calls=5,
    pool_bytes=4 << 20,
)


class Silent:
    def show(self, text: str, share: float) -> None:
        pass


def results(cases: list[Case], **parameters: str | int | float | bool | None) -> Results:
    return Results(
        scenario="gpu",
        utc="2026-01-31T12:00:00Z",
        command="python -m benchmarks.gpu_report",
        machine=Machine("CPU", 16, 1 << 37, "GPU", "Linux 6"),
        versions=Versions("3.12", "2.11", None, None),
        parameters={**parameters},
        other_cores=0.0,
        cases=tuple(cases),
    )


def test_every_group_measures_right_answers_in_host_memory(tmp_path: Path) -> None:
    bench = Bench(Options(quick=True, seconds=0.0), Silent())
    groups = gpu.groups(torch.device("cpu"), LITTLE)
    for name, make in bench.groups(groups):
        contenders, budget = make()
        bench.measure(name, contenders, budget=budget)
    assert {case.group for case in bench.cases} == set(groups)
    found = results(bench.cases)
    results_file.write(found, tmp_path / "gpu.json")
    lines = gpu_report.table([Stage("measure", "ok", "")], found)
    assert all(any(case.name in line for line in lines) for case in bench.cases)
    assert not any("no spans were measured" in line for line in lines)


def span(kib: int, kernel: float, copy_engine: float, zero_copy: float) -> list[Case]:
    medians = {"kernel": kernel, "copy engine": copy_engine, "zero copy": zero_copy}
    group = gpu.span_group(kib << 10)
    return [Case(group, name, 100, (seconds,)) for name, seconds in medians.items()]


@pytest.mark.parametrize(
    ("cases", "dma", "zero"),
    [
        pytest.param(
            span(4, 1, 5, 2) + span(64, 2, 1, 3) + span(256, 2, 1, 3),
            "beats the kernel from spans of 64 KiB on",
            "zero copy wins nowhere",
            id="from the middle on",
        ),
        pytest.param(
            span(4, 2, 1, 3) + span(64, 1, 2, 3) + span(256, 2, 1, 0.5),
            "beats the kernel from spans of 256 KiB on",
            "zero copy beats both at spans of 256 KiB",
            id="a lucky short span does not count",
        ),
        pytest.param(
            span(4, 1, 2, 0.5) + span(64, 1, 2, 0.5),
            "the kernel wins up to spans of 64 KiB",
            "zero copy beats both at spans of 4 KiB, 64 KiB",
            id="never",
        ),
        pytest.param([], "no spans were measured", "no spans were measured", id="not measured"),
    ],
)
def test_advice(cases: list[Case], dma: str, zero: str) -> None:
    lines = gpu_report.advice(cases)
    assert dma in lines[0]
    assert zero in lines[-1]


def test_the_table_tells_what_was_missed_and_what_failed() -> None:
    cases = [
        Case("g", "ours", 1000, (2e-6,), "floor", 0.5, target_ratio=0.9),
        Case("g", "floor", 1000, (1e-6,)),
        Case("caller", "call", None, tuple([1e-5] * 150), target_seconds=30e-6),
    ]
    text = "\n".join(
        gpu_report.table([Stage("build", "ok", "", 7.0)], results(cases, gpu_driver="580.1"))
    )
    assert "driver 580.1" in text
    assert "0.500  >= 0.90 MISSED" in text
    assert "<= 30 µs met" in text
    assert "build        ok          7 s" in text


def test_without_figures_the_stages_are_told() -> None:
    lines = gpu_report.table([Stage("build", "failed", "exit code 1")], None)
    assert lines[-1].split() == ["build", "failed", "0", "s", "exit", "code", "1"]


HOLDS_A_LOCK = """
import fcntl, os, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
if os.fork() == 0:
    time.sleep(600)  # has the lock too
time.sleep(600)
"""


def test_a_stage_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    stage = gpu_report.run_stage("slow", [sys.executable, "-c", HOLDS_A_LOCK, str(lock)], 1.0)
    assert (stage.state, stage.words) == ("failed", "ended after 1 s")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_a_failing_stage_is_told_by_its_exit_code() -> None:
    stage = gpu_report.run_stage("fails", [sys.executable, "-c", "raise SystemExit(3)"], 60)
    assert (stage.state, stage.words) == ("failed", "exit code 3")
    assert gpu_report.run_stage("absent", ["no such program"], 60).state == "failed"


def test_tests_are_counted_and_none_is_a_failure(tmp_path: Path) -> None:
    counted = tmp_path / "some.xml"
    counted.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><skipped/></testcase>"
        "<testcase name='c'><failure/></testcase></testsuite></testsuites>"
    )
    stage = gpu_report.with_counts(Stage("tests/gpu", "failed", "exit code 1"), counted)
    assert stage.words == "exit code 1; 1 passed, 1 failed, 1 skipped; failed: c"
    assert gpu_report.with_counts(Stage("tests/gpu", "ok", ""), tmp_path / "no").state == "failed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_report_says_so_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_report"])
    assert gpu_report.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no GPU to report on: torch.cuda.is_available() is False")
