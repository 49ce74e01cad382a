"""The connector in the engines that no CPU runs, replayed: see tests/replay/engine.py.

`HSCACHE_SEEDS` sets how many runs there are of each order of calls.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm")

from hidden_cache import writer
from hidden_cache.integrations.vllm.connector import HiddenCacheConnector
from hidden_cache.integrations.vllm.messages import Progress, Refusal, SaveOrder
from hidden_cache.integrations.vllm.scheduler import SchedulerSide
from hidden_cache.integrations.vllm.worker import WorkerSide
from tests.replay.engine import LIBRARY, ORDERS, Replay, load, on_fake, replay

SEEDS = int(os.environ.get("HSCACHE_SEEDS", "200"))
# Within so many runs every fault must show.
FAULT_SEEDS = 200


@pytest.fixture(scope="module")
def fake() -> Iterator[ModuleType]:
    """The fake GPU, with store and connector on it."""
    if not LIBRARY.exists():
        pytest.skip("the C++ tests are not built here: make test-cpp builds _native_on_fake")
    with on_fake(load("_native")):
        yield load("_fake_cuda")


def test_kernels_run_late_and_in_order(fake: ModuleType) -> None:
    for seed in range(20):
        fake.reset(seed)
        memory, stream = fake.allocate(8), fake.make_stream()
        fake.write(stream, [(memory + 1, b"bbb"), (memory + 4, b"b")], 1)
        fake.write(stream, [(memory, b"aa")], 1)
        fake.synchronize(stream)
        assert fake.read(memory, 5) == b"aabbb"
        fake.free(memory)


@pytest.mark.parametrize("order", ORDERS)
def test_every_request_gets_its_own_rows_or_a_reason_and_its_blocks_back(
    fake: ModuleType, tmp_path: Path, order: str
) -> None:
    wrong = {}
    met: Counter[str] = Counter()
    for seed in range(SEEDS):
        fault, counts = replay(fake, order, seed, tmp_path)
        met += counts
        if fault:
            wrong[seed] = fault
    assert not wrong
    if SEEDS >= 200:  # otherwise the replay would show little
        assert min(met[what] for what in ("sample", "aborted", "preempted", "reset", "hits")) > 20


# Each rule of order, taken out


def rows_before_the_step(patch: pytest.MonkeyPatch) -> None:
    def get_finished(self: Any, finished: set[str]) -> tuple[set[str] | None, None]:
        self._take_in()
        self._worker.rows_are_there()
        return self._worker.reported() or None, None

    patch.setattr(HiddenCacheConnector, "get_finished", get_finished)


def the_stream_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writer, "current_stream", lambda *_: Replay.now.fake.make_stream())


def reported_while_read(patch: pytest.MonkeyPatch) -> None:
    def look(self: Any) -> None:
        self._reading = [read for read in self._reading if not read[2].ended]
        self._reportable |= self._held
        self._held.clear()

    patch.setattr(WorkerSide, "_look_at_reads", look)


def preempted_while_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "has_pending_block_frees", lambda self: bool(self._held))


def started_while_lost_blocks_are_read(patch: pytest.MonkeyPatch) -> None:
    local_hit = SchedulerSide.local_hit
    patch.setattr(SchedulerSide, "local_hit", lambda *given: bool(local_hit(*given)) or True)


def preemptions_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    started_while_lost_blocks_are_read(patch)
    patch.setattr(WorkerSide, "handle_preemptions", lambda *_: None)


def refused_while_read(patch: pytest.MonkeyPatch) -> None:
    end = SchedulerSide._end

    def end_at_once(self: Any, live: Any, block_ids: Any) -> SaveOrder | Refusal:
        ending = end(self, live, block_ids)
        ending.reported = isinstance(ending, SaveOrder)
        return ending

    patch.setattr(SchedulerSide, "_end", end_at_once)


def quiet_before_rows_are_read(patch: pytest.MonkeyPatch) -> None:
    def progress(self: Any) -> Progress:
        self._look_at_reads()
        return Progress(min((read[0] for read in self._reading), default=self._seen_step + 1) - 1)

    patch.setattr(WorkerSide, "progress", progress)


def guesses_are_told(patch: pytest.MonkeyPatch) -> None:
    tell = SchedulerSide._tell_rows

    class Optimistic:
        def __init__(self, request: Any, count: int) -> None:
            self._request = request
            self.num_tokens = request.num_computed_tokens + count + 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self._request, name)

    def tell_more(self: Any, live: Any, count: int, *rest: Any) -> None:
        request, live.request = live.request, Optimistic(live.request, count)
        tell(self, live, count, *rest)
        live.request = request

    patch.setattr(SchedulerSide, "_tell_rows", tell_more)


def listed_as_new_is_new(patch: pytest.MonkeyPatch) -> None:
    begin = SchedulerSide._begin

    def begin_anew(self: Any, name: str, *rest: Any) -> None:
        if name in self._live:
            self._waiting[name] = self._live.pop(name).request
        begin(self, name, *rest)

    patch.setattr(SchedulerSide, "_begin", begin_anew)


def preempted_rows_are_told_no_more(patch: pytest.MonkeyPatch) -> None:
    build = SchedulerSide.build_connector_meta

    def build_without(self: Any, scheduled: Any) -> Any:
        preempted, scheduled.preempted_req_ids = scheduled.preempted_req_ids, set()
        news = build(self, scheduled)
        scheduled.preempted_req_ids = preempted
        return news

    patch.setattr(SchedulerSide, "build_connector_meta", build_without)


def the_ended_keep_their_room(patch: pytest.MonkeyPatch) -> None:
    def make_room(self: Any) -> None:
        for live in reversed(self._live.values()):
            if live.writer is not None and live.refusal is None:
                self._abandon(live)
                return

    patch.setattr(WorkerSide, "_make_room", make_room)


def new_weights_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "reset_cache", lambda _: None)


def news_is_taken_in_by_each_hook(patch: pytest.MonkeyPatch) -> None:
    take_in = WorkerSide.take_in

    def take_in_again(self: Any, news: Any) -> None:
        self._seen_step = -1
        take_in(self, news)

    patch.setattr(WorkerSide, "take_in", take_in_again)


FAULTS = [
    ("v1", rows_before_the_step),
    ("v2", the_stream_is_not_waited_for),
    ("v2", reported_while_read),
    ("v2", preempted_while_read),
    ("v2", started_while_lost_blocks_are_read),
    ("v1", preemptions_do_not_wait),
    ("v1", refused_while_read),
    ("v1", quiet_before_rows_are_read),
    ("v1", guesses_are_told),
    ("async-v2", guesses_are_told),
    ("v2", listed_as_new_is_new),
    ("v1", preempted_rows_are_told_no_more),
    ("v2", the_ended_keep_their_room),
    ("v1", new_weights_are_not_told),
    ("v1", news_is_taken_in_by_each_hook),
]


@pytest.mark.parametrize(("order", "fault"), FAULTS)
def test_every_rule_is_needed(
    fake: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    fault(monkeypatch)
    assert any(replay(fake, order, seed, tmp_path)[0] for seed in range(FAULT_SEEDS))
