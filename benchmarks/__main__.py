"""Command line of the benchmarks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from benchmarks import registry
from benchmarks.core import results as results_file
from benchmarks.core.bench import Bench, Options
from benchmarks.core.compare import compare
from benchmarks.core.errors import BenchmarkError, ResultsError
from benchmarks.core.machine import OtherWork, describe_machine, describe_versions
from benchmarks.core.progress import Progress
from benchmarks.core.report import make_console, print_comparison, print_results
from benchmarks.core.results import Results

_FAILED, _BAD_FILE = 1, 2

_HELP = """Times hidden_cache beside its alternatives and beside the floor that the machine sets.

Contenders of a group take turns, in a new order each round, and the floor (a plain copy of the \
same bytes, for instance) takes its turn with them: so a ratio to the floor means something even \
where seconds do not repeat.

A look: python -m benchmarks ops --quick

Figures to keep: python -m benchmarks ops --json new.json

What a change did: python -m benchmarks compare old.json new.json"""

Quick = Annotated[
    bool, typer.Option("--quick", help="Few groups and repetitions: does it run? Not to be quoted.")
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the results here.")
]
Only = Annotated[
    str | None,
    typer.Option("--only", metavar="TEXT", help="Only groups whose name contains TEXT."),
]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", min=0.0, metavar="S", help="Time to measure each group for."),
]
Peers = Annotated[
    bool,
    typer.Option("--peers", help="Beside other projects' code too, where a scenario has some."),
]


def make_app() -> typer.Typer:
    """The command line: one command for each registered scenario, and those for results."""
    app = typer.Typer(
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in registry.SCENARIOS:
        paragraphs = registry.description(name)
        app.command(
            name,
            help=escape("\n\n".join(paragraphs)),
            short_help=escape(paragraphs[0]),
            rich_help_panel="Scenarios",
        )(_scenario_command(name))
    app.command("list", rich_help_panel="Results and help")(list_scenarios)
    app.command("compare", rich_help_panel="Results and help")(compare_files)
    return app


def _scenario_command(name: str) -> Callable[..., None]:
    def command(
        quick: Quick = False,
        json: Json = None,
        only: Only = None,
        seconds: Seconds = None,
        peers: Peers = False,
    ) -> None:
        _run(name, Options(quick, seconds, only, peers), json)

    return command


def _run(name: str, options: Options, path: Path | None) -> None:
    if path is not None:
        results_file.check_writable(path)
    started = datetime.now(timezone.utc)
    others = OtherWork()
    with Progress(make_console(stderr=True)) as progress:
        bench = Bench(options, progress)
        registry.load(name)(bench)
    results = Results(
        scenario=name,
        utc=started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=f"python -m benchmarks {shlex.join(sys.argv[1:])}",
        machine=describe_machine(),
        versions=describe_versions(),
        parameters=bench.parameters,
        other_cores=others.cores(),
        cases=tuple(bench.cases),
    )
    if path is not None:
        results_file.write(results, path)
    console = make_console()
    print_results(results, console)
    if path is not None:
        console.print(f"results written to {path}", markup=False, soft_wrap=True)


def list_scenarios() -> None:
    """List the scenarios, one a line."""
    width = max(len(name) for name in registry.SCENARIOS)
    for name in registry.SCENARIOS:
        typer.echo(f"{name:<{width}}  {registry.description(name)[0]}")


def compare_files(
    old: Annotated[Path, typer.Argument(help="Results from before.")],
    new: Annotated[Path, typer.Argument(help="Results of the same scenario from after.")],
    fail_slower: Annotated[
        float | None,
        typer.Option(
            "--fail-slower",
            min=0.0,
            metavar="PERCENT",
            help="Exit 1 where a case that is not a floor is slower, beyond its spread, by more.",
        ),
    ] = None,
) -> None:
    """Compare two results files case by case.

    A case is called faster or slower only where the spreads of its timings do not overlap.
    Differing machines and parameters are named. Exit code: 0, or 2 for a file that cannot be
    used, or 1 with --fail-slower.
    """
    before, after = results_file.read(old), results_file.read(new)
    try:
        found = compare(before, after)
    except ValueError as error:
        raise ResultsError(
            new, "scenario", str(error), "compare two runs of one scenario"
        ) from error
    console = make_console()
    print_comparison(before, after, found, console)
    if fail_slower is None:
        return
    slower = found.slower_than(fail_slower)
    for difference in slower:
        console.print(
            f"slower by more than {fail_slower:g} %: {difference.new.label} "
            f"({difference.change - 1:+.0%})",
            markup=False,
        )
    if slower:
        raise typer.Exit(_FAILED)


def main() -> None:
    try:
        make_app()(prog_name="python -m benchmarks")
    except (BenchmarkError, ResultsError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_BAD_FILE if isinstance(error, ResultsError) else _FAILED)


if __name__ == "__main__":
    main()
