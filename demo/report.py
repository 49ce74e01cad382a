"""What the demo found, as figures and as a table. All of it was measured in this run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from demo.check import Checked
from demo.engine import LAYERS, Pass, Sample
from demo.terminal import Terminal


def figures(
    passes: list[Pass], checked: Checked, *, model: Path, output: Path, dtype: str
) -> dict[str, Any]:
    """Everything that is reported, ready for JSON. Sizes are in bytes, times in seconds."""
    medians = [c.transformers_median for c in checked.comparisons if c.transformers_median]
    return {
        "model": str(model),
        "dtype": dtype,
        "layers": list(LAYERS),
        "output": str(output),
        "passes": [
            {
                "pass": each.number,
                "seconds": each.seconds,
                **_sums(each.samples),
                "documents": [
                    {
                        "document": title,
                        **_sums(s for s in each.samples if s.prompt.document == title),
                    }
                    for title in dict.fromkeys(s.prompt.document for s in each.samples)
                ],
            }
            for each in passes
        ],
        "check": {
            "samples": len(checked.comparisons),
            "rows": checked.rows_compared,
            "worst_row_error": max((c.worst for c in checked.comparisons), default=None),
            "row_tolerance": checked.tolerance.row,
            "worst_median_error": max((c.median for c in checked.comparisons), default=None),
            "median_tolerance": checked.tolerance.median,
            "transformers_median_error": max(medians, default=None),
            "pooled_rows_unchanged": checked.pooled_rows_compared,
        },
        "problems": checked.problems,
    }


def _sums(samples: Iterable[Sample]) -> dict[str, int]:
    found = list(samples)
    rows = sum(sample.row_bytes for sample in found)
    pooled = sum(sample.bytes_from_pool for sample in found)
    return {
        "prompts": len(found),
        "tokens": sum(len(sample.token_ids) for sample in found),
        "file_bytes": sum(sample.file_bytes for sample in found),
        "row_bytes": rows,
        "row_bytes_from_pool": pooled,
        "row_bytes_gathered": rows - pooled,
    }


def show(terminal: Terminal, found: dict[str, Any], example: Path) -> None:
    """Print the figures as a table and a few lines; the last one is the verdict."""
    check, passes = found["check"], found["passes"]
    rows, pooled = (
        sum(each[key] for each in passes) for key in ("row_bytes", "row_bytes_from_pool")
    )
    files = sum(each["prompts"] for each in passes)
    terminal.say()
    terminal.console.print(_table(found))
    terminal.say()
    terminal.say(
        f"The pool saved gathering {_mb(pooled)} of {_mb(rows)} ({pooled / rows:.0%}): shared "
        "prefixes, and in later passes the same prompts."
    )
    terminal.say(
        f"  {check['pooled_rows_unchanged']:,} rows from the pool are, bit for bit, those of other "
        "requests with the same tokens."
    )
    if check["samples"]:
        terminal.say(
            f"Largest error against transformers: {check['worst_row_error']:.1e}, "
            f"tolerance {check['row_tolerance']:g}, in {check['rows']:,} rows of "
            f"{check['samples']} files."
        )
        for line in _why(found):
            terminal.say(f"  {line}")
    terminal.say(f"{files} files are in {found['output']}, and what the engine said in engine.log.")
    terminal.say("  To load one:")
    terminal.say("    import hidden_cache")
    terminal.say(f'    hidden_cache.load_hidden_states("{example}")["hidden_states"]')
    terminal.say()
    for problem in found["problems"]:
        terminal.say(f"  wrong: {problem}")
    terminal.say(verdict(found))


def verdict(found: dict[str, Any]) -> str:
    """The last line: what happened, in one sentence."""
    passes, check = found["passes"], found["check"]
    if found["problems"]:
        return f"demo: FAILED — {len(found['problems'])} mismatches, listed above"
    saved = passes[-1]["row_bytes_from_pool"] / passes[-1]["row_bytes"]
    seconds = " and ".join(f"{each['seconds']:.1f}" for each in passes)
    return (
        f"demo: ok — {passes[0]['prompts']} prompts, {len(passes)} passes in {seconds} s, "
        f"{sum(each['tokens'] for each in passes):,} tokens, {saved:.0%} of the last pass from the "
        f"pool, largest error {check['worst_row_error']:.1e} of {check['row_tolerance']:g}"
    )


def _why(found: dict[str, Any]) -> list[str]:
    """What the error is, and why the tolerance is what it is."""
    check, dtype = found["check"], found["dtype"]
    own = check["transformers_median_error"]
    yardstick = (
        "What is left is the rounding of sums that are taken in another order."
        if own is None
        else f"What is left is rounding: transformers in {dtype} is as far off, {own:.1e}."
    )
    return [
        "An error is |row - transformers' row| / |transformers' row|, transformers' in float32.",
        f"The median row of the worst layer: {check['worst_median_error']:.1e}, tolerance "
        f"{check['median_tolerance']:g}.",
        yardstick,
        "Rows of a neighbouring token or another layer would be off by 0.67 or more in the median.",
    ]


def _table(found: dict[str, Any]) -> Table:
    layers = ", ".join(map(str, found["layers"]))
    table = Table(
        title=f"Hidden states of layers {layers} in {found['dtype']}, sizes in MB",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("document")
    for name in ("pass", "prompts", "tokens", "on disk", "gathered", "from pool", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    first, *_ = found["passes"]
    for place, document in enumerate(first["documents"]):
        for each in found["passes"]:
            title = document["document"] if each is first else ""
            table.add_row(*_cells(title, each["pass"], each["documents"][place]))
        table.add_section()
    for each in found["passes"]:
        title = f"all, in {each['seconds']:.1f} s"
        table.add_row(*_cells(title, each["pass"], each), style="bold")
    return table


def _cells(title: str, number: int, sums: dict[str, Any]) -> list[str | Text]:
    saved = sums["row_bytes_from_pool"] / sums["row_bytes"]
    sizes = (sums[key] for key in ("file_bytes", "row_bytes_gathered", "row_bytes_from_pool"))
    return [
        # The one column that gives way in a narrow terminal: it is cut before a number is.
        Text(title, no_wrap=True, overflow="ellipsis"),
        str(number),
        str(sums["prompts"]),
        f"{sums['tokens']:,}",
        *(f"{size / 1e6:.1f}" for size in sizes),
        Text(f"{saved:.0%}", style="green" if saved else ""),
    ]


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
