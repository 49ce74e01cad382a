"""Tables for people: results of a run, and a comparison of two."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.core.compare import Comparison
from benchmarks.core.machine import BUSY_SHARE
from benchmarks.core.paired import TargetVerdict
from benchmarks.core.results import Case, Results
from benchmarks.core.stats import RESOLUTION, Verdict, summarize
from benchmarks.core.stats import format_seconds as format_seconds

_VERDICT_STYLE: dict[Verdict, str] = {
    "faster": "green",
    "slower": "red",
    "unresolved": "dim",
}
_FOUND_STYLE: dict[TargetVerdict, str] = {
    "met": "green",
    "missed": "red",
    "not resolved": "yellow",
}
# Wide enough that nothing wraps where the output goes to a file or a pipe.
_PLAIN_WIDTH = 200


def make_console(*, stderr: bool = False) -> Console:
    """A console that is coloured on a terminal, and wide and plain elsewhere."""
    console = Console(stderr=stderr, highlight=False)
    return (
        console
        if console.is_terminal
        else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH, color_system=None)
    )


def print_results(results: Results, console: Console) -> None:
    """Every case by group, then one line per contender over all groups, then what to mind."""
    machine, versions = results.machine, results.versions
    memory = "" if machine.memory_bytes is None else f", {machine.memory_bytes / 1e9:.0f} GB"
    console.print(
        f"[bold]{results.scenario}[/]  {escape(machine.cpu)}, {machine.cores} cores{memory}, "
        f"GPU: {escape(machine.gpu or 'none')}, {machine.kernel}"
    )
    console.print(
        f"python {versions.python}, torch {versions.torch or 'none'}, hidden_cache "
        f"{versions.hidden_cache or 'none'} ({versions.commit or 'no commit'}), {results.utc}"
    )
    width = _name_width(results.cases)
    for group, members in groupby(results.cases, key=lambda case: case.group):
        cases = list(members)
        table = _table(width, median=7, spread=6, min=7, **{"GB/s": 5, "of floor": 8})
        table.add_column("target", no_wrap=True)
        for case in cases:
            summary = summarize(case.seconds)
            table.add_row(
                escape(case.name),
                format_seconds(summary.median),
                f"±{summary.spread:.0%}",
                format_seconds(summary.minimum),
                "" if case.gb_per_s is None else f"{case.gb_per_s:.2f}",
                "" if case.ratio_to_floor is None else f"{case.ratio_to_floor:.2f}",
                _target(case),
            )
        _print_group(group, f"{len(cases[0].seconds)} rounds", table, console)
    _print_summary(results.cases, console)
    _print_found(results, console)
    console.print(
        "\n±: half the width of the middle half of the timings (under 5 rounds: of all), over the "
        "median.\nGB/s: 1e9 payload bytes a second.  of floor: bandwidth over the floor's.",
        style="dim",
    )
    _print_warnings(results, console)


def print_comparison(old: Results, new: Results, found: Comparison, console: Console) -> None:
    """Warnings first, then the cases by group."""
    console.print(f"[bold]{new.scenario}[/]  {old.utc} -> {new.utc}")
    for warning in found.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    for note in found.notes:
        console.print(f"note: {escape(note)}")
    width = _name_width(difference.new for difference in found.differences)
    for group, differences in groupby(found.differences, key=lambda d: d.new.group):
        table = _table(width, old=11, new=11, **{"new/old": 7, "of floor": 9})
        table.add_column("verdict", no_wrap=True)
        for difference in differences:
            before, after = difference.old, difference.new
            style = _VERDICT_STYLE[difference.verdict]
            table.add_row(
                escape(after.name),
                _seconds_with_spread(before),
                _seconds_with_spread(after),
                f"{difference.change:.2f}",
                _ratio_change(before, after),
                f"[{style}]{difference.verdict}[/]",
            )
        _print_group(group, "", table, console)
    for name, cases in (("OLD", found.only_old), ("NEW", found.only_new)):
        for case in cases:
            console.print(f"only in {name}: {escape(case.label)}")
    console.print(
        "\nunresolved: the middle halves of the timings overlap, or the medians differ by less "
        f"than {RESOLUTION:.0%}.",
        style="dim",
    )


def _print_group(group: str, remark: str, table: Table, console: Console) -> None:
    console.print(f"\n[bold]{escape(group)}[/]" + (f"  [dim]{remark}[/]" if remark else ""))
    console.print(table)


def _print_summary(cases: tuple[Case, ...], console: Console) -> None:
    """Over all groups, how near its floor each contender comes; nothing for a single group."""
    if len({case.group for case in cases}) < 2:
        return
    contenders: dict[str, list[tuple[float, str]]] = {}
    for case in cases:
        if case.ratio_to_floor is not None:
            contenders.setdefault(case.name, []).append((case.ratio_to_floor, case.group))
    table = _table(_name_width(cases), worst=6, median=6, best=6)
    table.add_column("worst in")
    for name, found in contenders.items():
        ratios = [ratio for ratio, _ in found]
        middle = statistics.median(ratios)
        figures = (f"{ratio:.2f}" for ratio in (min(ratios), middle, max(ratios)))
        table.add_row(escape(name), *figures, escape(min(found)[1]))
    _print_group("of floor, over all groups", "", table, console)


def _print_found(results: Results, console: Console) -> None:
    found = results.parameters.get("found")
    if not isinstance(found, list):
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in found:
        what, _, figure = str(line).partition(": ")
        text = escape(figure)
        for verdict, style in _FOUND_STYLE.items():
            text = text.replace(f": {verdict}", f": [{style}]{verdict}[/]")
        table.add_row(escape(what), text)
    _print_group("found", "", table, console)


def _print_warnings(results: Results, console: Console) -> None:
    for name in ("counted", "left_out"):
        value = results.parameters.get(name)
        for text in value if isinstance(value, list) else [value]:
            if text is not None:
                console.print(f"{name.replace('_', ' ')}: {escape(str(text))}", soft_wrap=True)
    if results.parameters.get("quick"):
        console.print("[yellow]warning:[/] a --quick run shows that it runs; it gives no figures")
    others, cores = results.other_cores, results.machine.cores
    if others is not None and others > BUSY_SHARE * cores:
        console.print(
            f"[yellow]warning:[/] other processes kept {others:.1f} of {cores} cores busy: repeat "
            "on a quiet machine before you quote these figures"
        )


def _name_width(cases: Iterable[Case]) -> int:
    return max((len(case.name) for case in cases), default=0)


def _table(name_width: int, **figures: int) -> Table:
    """A borderless table: names, then right-aligned columns of the given headings and widths.

    Widths are fixed, so that the tables of all groups line up.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", min_width=name_width, no_wrap=True)
    for heading, width in figures.items():
        table.add_column(heading, justify="right", min_width=width, no_wrap=True)
    return table


def _seconds_with_spread(case: Case) -> str:
    summary = summarize(case.seconds)
    return f"{format_seconds(summary.median)} ±{summary.spread:.0%}"


def _ratio_change(old: Case, new: Case) -> str:
    if old.ratio_to_floor is None or new.ratio_to_floor is None:
        return ""
    return f"{old.ratio_to_floor:.2f}→{new.ratio_to_floor:.2f}"


def _target(case: Case) -> str:
    targets = []
    if case.target_seconds is not None:
        targets.append(f"≤{format_seconds(case.target_seconds)}")
    if case.target_ratio is not None:
        targets.append(f"≥{case.target_ratio:.2f}")
    if not targets:
        return ""
    return f"{', '.join(targets)} {'[green]met[/]' if case.meets_target else '[red]missed[/]'}"
