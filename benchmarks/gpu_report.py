"""One command for a machine with a GPU: build, test, check memory, measure, and print one table.

    python -m benchmarks.gpu_report [--json FILE]

Builds the package in place for this machine's GPU, runs tests/gpu, runs a part of it again under
compute-sanitizer, measures the `gpu` scenario, and prints what came of each. Every stage has a time
limit, eight minutes in all, and none hides what the others found. It asks for torch with CUDA,
nvcc, cmake, ninja, pybind11 and pytest. Exit code: 1 where anything failed, 0 otherwise, also where
there is no GPU, which it then says.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

from benchmarks.core import results as results_file
from benchmarks.core.bench import Bench, Options
from benchmarks.core.errors import ResultsError
from benchmarks.core.machine import OtherWork, describe_machine, describe_versions
from benchmarks.core.results import Case, Results
from benchmarks.core.stats import format_seconds

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS_PER_GROUP = 1.0
# From here on a percentile says something.
MANY = 100
GRACE_S = 3.0

# With what ending a stage may take, under eight minutes.
CONFIGURE_LIMIT_S, BUILD_LIMIT_S = 25, 80
TESTS_LIMIT_S, MEMCHECK_LIMIT_S, MEASURE_LIMIT_S = 120, 90, 130
TESTS_SEEDS = 1000

# What runs under compute-sanitizer: no captures, which need torch's caching allocator, no large
# requests, no lost contexts; and few random cases, since each kernel is some ten times slower.
MEMCHECK_TESTS = ("tests/gpu/test_operators.py", "tests/gpu/test_transfers.py")
MEMCHECK_LEFT_OUT = "not long and not being_registered and not reused"
MEMCHECK_SEEDS = 15
MEMCHECK_FOUND = 77  # exit code for errors of memory

# The names of the `gpu` scenario's span groups and contenders, for the advice below the table.
KERNEL, COPY_ENGINE, ZERO_COPY = "kernel", "copy engine", "zero copy"


@dataclass(frozen=True, slots=True)
class Stage:
    """What came of a stage: "ok", "failed" or "skipped", and a few words."""

    name: str
    state: str
    words: str
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--measure-only", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_only is not None:
        return measure(arguments.measure_only)
    if why := why_no_gpu():
        print(f"no GPU to report on: {why}")
        return 0
    if arguments.json is not None:
        results_file.check_writable(arguments.json)
    stages, results = report()
    for line in table(stages, results):
        print(line)
    if results is not None and arguments.json is not None:
        results_file.write(results, arguments.json)
        print(f"figures written to {arguments.json}")
    return 1 if any(stage.state == "failed" for stage in stages) else 0


def why_no_gpu() -> str:
    """Why there is nothing to report on; empty where there is. The package need not be built."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    if torch.cuda.is_available():
        return ""
    reason = f"torch.cuda.is_available() is False (torch {torch.__version__})"
    try:
        from hidden_cache import _native
    except (ImportError, OSError):
        return reason
    return f"{reason}; hidden_cache: {_native.why_no_cuda() or 'finds one'}"


def report() -> tuple[list[Stage], Results | None]:
    """Runs all stages, one after the other."""
    folder = REPOSITORY / "build" / "gpu-report"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    built = run_build(REPOSITORY / "build" / "native")
    if built.state == "failed":
        names = ("tests/gpu", "memcheck", "measure")
        return [built, *(Stage(name, "skipped", "not built") for name in names)], None
    stages = [
        built,
        run_tests(folder / "tests.xml"),
        run_memcheck(folder / "memcheck.xml"),
    ]
    measured, results = run_measure(folder / "figures.json")
    return [*stages, measured], results


def run_build(folder: Path) -> Stage:
    """Builds for this GPU alone and lays the products beside the Python files.

    By CMake itself, in a folder of its own: a build for all GPUs is not touched, and setuptools,
    whatever its version, has no part in it.
    """
    try:
        import pybind11
    except ImportError as error:
        return Stage("build", "failed", f"{error}: pip install pybind11")
    torch = importlib.util.find_spec("torch")
    assert torch is not None, "was imported before"
    assert torch.origin is not None, "a package with code"
    configure = [
        _tool("cmake"),
        *("-G", "Ninja", "-S", str(REPOSITORY), "-B", str(folder)),
        f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        "-DCMAKE_CUDA_ARCHITECTURES=native",
        "-DHSCACHE_BUILD_CUDA=1",
        f"-DHSCACHE_TORCH_ROOT={Path(torch.origin).parent}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]
    configured = run_stage("configure", configure, CONFIGURE_LIMIT_S)
    if configured.state == "failed":
        return Stage("build", "failed", f"cmake: {configured.words}", configured.seconds)
    built = run_stage("build", [_tool("cmake"), "--build", str(folder)], BUILD_LIMIT_S)
    if built.state == "ok":
        for product in _products(folder):
            target = REPOSITORY / "hidden_cache" / product.name
            # Replaced, not overwritten: a running process may have the old one mapped.
            target.unlink(missing_ok=True)
            shutil.copy2(product, target)
    return Stage("build", built.state, built.words, configured.seconds + built.seconds)


def _products(folder: Path) -> list[Path]:
    found = [path for name in ("libhscache*", "_native*", "_ops*") for path in folder.glob(name)]
    return [path for path in found if path.is_file()]


def _tool(name: str) -> str:
    """The program that this environment's package brought, or else the one on PATH."""
    ours = Path(sys.executable).parent / name
    return str(ours) if ours.exists() else name


def run_tests(report_file: Path) -> Stage:
    stage = run_stage(
        "tests/gpu",
        [*_pytest(report_file), "tests/gpu"],
        TESTS_LIMIT_S,
        {"HSCACHE_SEEDS": str(TESTS_SEEDS)},
    )
    return with_counts(stage, report_file)


def run_memcheck(report_file: Path) -> Stage:
    program = find_sanitizer()
    if program is None:
        reason = "compute-sanitizer is neither on PATH nor beside nvcc"
        print(f"== memcheck: skipped: {reason}", flush=True)
        return Stage("memcheck", "skipped", reason)
    stage = run_stage(
        "memcheck",
        [
            program,
            "--tool",
            "memcheck",
            # Calls that are refused on purpose are no errors of memory.
            "--report-api-errors",
            "no",
            "--error-exitcode",
            str(MEMCHECK_FOUND),
            *_pytest(report_file),
            *MEMCHECK_TESTS,
            "-k",
            MEMCHECK_LEFT_OUT,
        ],
        MEMCHECK_LIMIT_S,
        # A tensor's neighbours are not mapped then, as they are in a cached block.
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "HSCACHE_SEEDS": str(MEMCHECK_SEEDS)},
    )
    return with_counts(stage, report_file)


def run_measure(figures: Path) -> tuple[Stage, Results | None]:
    stage = run_stage(
        "measure",
        [sys.executable, "-m", "benchmarks.gpu_report", "--measure-only", str(figures)],
        MEASURE_LIMIT_S,
    )
    try:
        results = results_file.read(figures)
    except ResultsError as error:
        words = f"{stage.words or 'no figures'}; {error}"
        return Stage(stage.name, "failed", words, stage.seconds), None
    words = f"{len({case.group for case in results.cases})} groups"
    if stage.words:
        words = f"{stage.words}; {words}"
    return Stage(stage.name, stage.state, words, stage.seconds), results


def find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return found
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    beside = Path(nvcc).resolve().parent / "compute-sanitizer"
    return str(beside) if beside.exists() else None


def _pytest(report_file: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        *("-p", "no:cacheprovider"),
        "--durations=5",
        # Says where a test hangs before the stage is ended.
        *("-o", "faulthandler_timeout=60"),
        f"--junitxml={report_file}",
    ]


def run_stage(
    name: str, command: Sequence[str], limit_s: float, variables: Mapping[str, str] | None = None
) -> Stage:
    """Runs a stage's command, its output going where ours goes; at the limit all of it is ended."""
    variables = variables or {}
    shown = " ".join([*(f"{key}={value}" for key, value in variables.items()), *command])
    print(f"== {name} (at most {limit_s:g} s): {shown}", flush=True)
    start = time.monotonic()
    try:
        # A session of its own: what the command starts is ended with it.
        child = subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, **variables}, start_new_session=True
        )
    except OSError as error:
        return Stage(name, "failed", str(error))
    try:
        code = child.wait(limit_s)
        state, words = ("ok", "") if code == 0 else ("failed", f"exit code {code}")
    except subprocess.TimeoutExpired:
        state, words = "failed", f"ended after {limit_s:g} s"
        _end(child)
    except BaseException:
        _end(child)
        raise
    seconds = time.monotonic() - start
    print(f"== {name}: {state} {words} ({seconds:.0f} s)", flush=True)
    return Stage(name, state, words, seconds)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a stage's session; what does not end by itself is killed. pytest, when interrupted,
    still counts what it has run."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def with_counts(stage: Stage, report_file: Path) -> Stage:
    """The stage with what pytest counted; failed where nothing passed."""
    words = [stage.words] if stage.words else []
    state = stage.state
    if stage.words == f"exit code {MEMCHECK_FOUND}":
        words = ["errors of memory, see above"]
    passed = 0
    try:
        cases = list(ET.parse(report_file).iter("testcase"))
    except (OSError, ET.ParseError):
        words.append("no count of tests")
    else:
        skipped = sum(case.find("skipped") is not None for case in cases)
        wrong = [
            case
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ]
        passed = len(cases) - skipped - len(wrong)
        words.append(f"{passed} passed, {len(wrong)} failed, {skipped} skipped")
        words += [f"failed: {case.get('name')}" for case in wrong]
    if passed == 0:
        state = "failed"
    return Stage(stage.name, state, "; ".join(words), stage.seconds)


class _Lines:
    """Progress as lines."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, text: str, share: float) -> None:
        if text != self._last:
            print(text, flush=True)
        self._last = text


def measure(path: Path) -> int:
    """Measures group by group; what was measured is in the file from then on."""
    import torch

    from benchmarks import gpu

    started = datetime.now(timezone.utc)
    others = OtherWork()
    bench = Bench(Options(seconds=SECONDS_PER_GROUP), _Lines())
    bench.parameters |= {
        "gpu_driver": driver_version(),
        "cuda_of_torch": torch.version.cuda,
        "registered_memory_at_host_addresses": registered_memory_at_host_addresses(),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
    }
    machine, versions = describe_machine(), describe_versions()
    failed = []
    for name, make in bench.groups(gpu.groups(torch.device("cuda:0"), gpu.Sizes())):
        try:
            contenders, budget = make()
            bench.measure(name, contenders, budget=budget)
        # Whatever it is, the other groups are measured, and the exit code tells.
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(f"failed: {failed[-1]}", flush=True)
        contenders = []  # their memory goes before the next group's is taken
        if not bench.cases:
            continue
        results = Results(
            scenario="gpu",
            utc=started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            command="python -m benchmarks.gpu_report",
            machine=machine,
            versions=versions,
            parameters=bench.parameters | {"failed": [*failed]},
            other_cores=others.cores(),
            cases=tuple(bench.cases),
        )
        results_file.write(results, path)
    return 1 if failed else 0


def driver_version() -> str | None:
    """The kernel driver's; None where nvidia-smi does not say."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n", 1)[0].strip() or None


def registered_memory_at_host_addresses() -> bool | None:
    """Whether the device reaches registered memory at the host's own addresses, as zero copy and
    batched copies assume; None where the driver does not say."""
    attribute = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, of cuda.h
    device, value = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    refused = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    )
    return None if refused else bool(value.value)


def table(stages: Iterable[Stage], results: Results | None) -> list[str]:
    """Machine, stages, figures, advice: the lines of the report."""
    lines = ["", "=" * 100]
    if results is not None:
        machine, versions, parameters = results.machine, results.versions, results.parameters
        lines += [
            f"{machine.gpu or 'a GPU'}, driver {parameters.get('gpu_driver') or 'unknown'}, "
            f"compute capability {parameters.get('compute_capability')}; {machine.cpu}, "
            f"{machine.cores} cores, {machine.kernel}",
            f"torch {versions.torch}, CUDA {parameters.get('cuda_of_torch')}, python "
            f"{versions.python}, commit {versions.commit or 'unknown'}, {results.utc}, "
            f"{results.other_cores} cores busy with other work",
            "registered memory at the host's addresses: "
            f"{parameters.get('registered_memory_at_host_addresses')}",
        ]
    lines += ["", "stage"]
    lines += [
        f"  {stage.name:<12} {stage.state:<8} {stage.seconds:4.0f} s  {stage.words}"
        for stage in stages
    ]
    if results is None:
        return lines
    width = max(len(case.name) for case in results.cases)
    heading = f"  {'':<{width}} {'median':>9} {'99 %':>9} {'GB/s':>8} {'of floor':>9}  target"
    lines += ["", heading]
    for group, cases in groupby(results.cases, key=lambda case: case.group):
        lines.append(group)
        lines += [_row(case, width) for case in cases]
    failed = results.parameters.get("failed")
    if isinstance(failed, list):
        lines += [f"failed: {text}" for text in failed]
    return [*lines, "", *advice(results.cases)]


def _row(case: Case, width: int) -> str:
    last = ""
    if len(case.seconds) >= MANY:
        last = format_seconds(statistics.quantiles(case.seconds, n=100)[-1])
    bandwidth = "" if case.gb_per_s is None else f"{case.gb_per_s:.1f}"
    ratio = "" if case.ratio_to_floor is None else f"{case.ratio_to_floor:.3f}"
    target = ""
    if case.target_seconds is not None:
        target = f"<= {format_seconds(case.target_seconds)}"
    elif case.target_ratio is not None:
        target = f">= {case.target_ratio:.2f}"
    if case.meets_target is not None:
        target += " met" if case.meets_target else " MISSED"
    median = format_seconds(case.median)
    row = f"  {case.name:<{width}} {median:>9} {last:>9} {bandwidth:>8} {ratio:>9}  {target}"
    return row.rstrip()


def advice(cases: Iterable[Case]) -> list[str]:
    """What the span groups say of kDmaSpanBytes, and of zero copy."""
    spans: list[tuple[str, dict[str, float]]] = []
    for group, members in groupby(cases, key=lambda case: case.group):
        medians = {case.name: case.median for case in members}
        if {KERNEL, COPY_ENGINE, ZERO_COPY} <= medians.keys():
            spans.append((group.removeprefix("span "), medians))
    if not spans:
        return ["no spans were measured: nothing to say of kDmaSpanBytes and of zero copy"]
    # The smallest from which on the copy engine wins at every size.
    first = None
    for span, medians in reversed(spans):
        if medians[COPY_ENGINE] > medians[KERNEL]:
            break
        first = span
    setting = "kDmaSpanBytes in csrc/core/copy_path.h"
    if first is not None:
        dma = f"the copy engine beats the kernel from spans of {first} on: set {setting} to that"
    else:
        dma = f"the kernel wins up to spans of {spans[-1][0]}: set {setting} higher than that"
    wins = [
        span
        for span, medians in spans
        if medians[ZERO_COPY] < min(medians[KERNEL], medians[COPY_ENGINE])
    ]
    zero = (
        f"zero copy beats both at spans of {', '.join(wins)}" if wins else "zero copy wins nowhere"
    )
    return [dma, zero]


if __name__ == "__main__":
    sys.exit(main())
