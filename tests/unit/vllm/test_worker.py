"""The worker's side driven by hand: each request gets a sample or a reason, and its blocks back."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hidden_cache import _native, store
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import ConfigError, SampleRefusedError
from hidden_cache.keys import TokenChunker
from hidden_cache.sample_file import (
    SampleLock,
    Written,
    error_path,
    load_hidden_states,
    lock_path,
    read_metadata,
    sample_name,
    write_error,
    write_sample,
)
from tests.threads import PATIENCE_S, none_but, threads_now
from tests.unit import make_paged, make_rows

pytest.importorskip("vllm")

from hidden_cache.integrations.vllm import path_claims, publisher, worker
from hidden_cache.integrations.vllm.messages import (
    Beginning,
    Refusal,
    Rows,
    SaveOrder,
    StepMetadata,
)
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape
from hidden_cache.integrations.vllm.worker import WorkerSide

LAYER_IDS = (7, 3)
HIDDEN = 4
CHUNK = 4
SLOT_BYTES = CHUNK * HIDDEN * 4
# The engine's cache: room for six requests of twelve tokens.
BLOCK = 3
LENGTH = 12
ROWS = make_rows(6 * LENGTH, len(LAYER_IDS), HIDDEN, torch.float32)
PAGED, BLOCK_IDS = make_paged(ROWS, BLOCK, "token-major")
SHAPE = EngineShape(
    model="the/model",
    layer_ids=LAYER_IDS,
    group_id=0,
    hash_block_size=CHUNK,
    block_size=BLOCK,
    identity=(),
)


class Driver:
    """A worker's side and the folder that it writes to; also plays the engine's steps."""

    def __init__(
        self,
        folder: Path,
        *,
        lock: bool = True,
        threads: int = 2,
        pool_bytes: int = 100 * SLOT_BYTES,
        max_pending: int = 100,
        paged: torch.Tensor = PAGED,
        **options: Any,
    ) -> None:
        self.folder = folder
        self._paged = paged
        connector = ConnectorOptions(str(folder), lock, threads, **options)
        config = HiddenCacheConfig(chunk_size=CHUNK, pool_bytes=pool_bytes, max_pending=max_pending)
        self.side = WorkerSide(SHAPE, connector, config)
        self._step = 0
        self._lengths: dict[str, int] = {}

    def own(self) -> Driver:
        self.side.own(self._paged)
        return self

    @property
    def samples(self) -> publisher.Publisher:
        assert self.side._owned is not None
        return self.side._owned.publisher

    def path(self, request_id: str) -> str:
        return str(self.folder / sample_name(request_id))

    def order(
        self, request_id: str, place: int = 0, length: int = LENGTH, *, keyed: bool = False
    ) -> SaveOrder:
        """Asks for the first `length` rows of the request at that place in the cache."""
        tokens = [1000 * place + i for i in range(length)]
        rows = self.rows(place, length, keyed=keyed)
        return SaveOrder(request_id, self.path(request_id), tokens, length, rows)

    def rows(self, place: int, length: int, *, begin: int = 0, keyed: bool = False) -> Rows:
        """Tells of rows `[0, length)`, of which those up to `begin` were told of before."""
        tokens = [1000 * place + i for i in range(LENGTH)]
        known = TokenChunker(CHUNK).chunks(tokens) if keyed else []
        chunks = [] if begin else known
        blocks = LENGTH // BLOCK
        table = BLOCK_IDS[place * blocks : (place + 1) * blocks]
        first = begin // BLOCK
        return Rows(length, first * BLOCK, table[first : -(-length // BLOCK)], chunks)

    def begin(self, *request_ids: str) -> None:
        """A step in which these are scheduled for the first time."""
        self.step(begin={name: self.path(name) for name in request_ids})

    def step(
        self,
        *,
        saves: Sequence[SaveOrder] = (),
        refusals: Sequence[Refusal] = (),
        **news: Any,
    ) -> StepMetadata:
        """One step of the engine, with all hooks."""
        metadata = self.tell(endings=[*refusals, *saves], **news)
        self.side.take_in(metadata)
        self.side.rows_are_there()
        return metadata

    def tell(self, *, begin: Mapping[str, str] = {}, **news: Any) -> StepMetadata:
        """The news of the next step, which nobody has seen yet; what begins has a path."""
        self._step += 1
        beginnings = {
            name: Beginning(path, self._lengths.get(name, LENGTH)) for name, path in begin.items()
        }
        return StepMetadata(step=self._step, beginnings=beginnings, **news)

    def save(self, *orders: SaveOrder) -> None:
        """These requests begin, and finish in the next step."""
        for order in orders:
            self._lengths[order.request_id] = order.num_tokens
        self.begin(*(order.request_id for order in orders))
        self.step(saves=list(orders))

    def arrive(self) -> None:
        """Has all transfers that were begun run to their end."""
        assert self.side._owned is not None
        for engine in self.side._owned.store._memory.engines.values():
            engine.drain()

    def settle(self) -> None:
        """Has all threads do what they have been given."""
        assert self.side._owned is not None
        answering = self.samples
        with answering._idle:
            assert answering._idle.wait_for(
                lambda: not answering._queue and not answering._num_writing, PATIENCE_S
            )
        self.settle_reasons()

    def settle_reasons(self) -> None:
        """Has all reasons be written that there are."""
        together = threading.Barrier(publisher._REASON_THREADS)
        wait([self.samples._reasons.submit(together.wait) for _ in range(together.parties)])

    def load(self, request_id: str) -> dict[str, torch.Tensor]:
        return load_hidden_states(self.path(request_id), timeout=PATIENCE_S)

    def told(self, request_id: str) -> dict[str, str]:
        """What the error file beside the sample says."""
        told: dict[str, str] = json.loads(Path(error_path(self.path(request_id))).read_text())
        return told

    def refusal(self, request_id: str) -> tuple[str, str]:
        """Why there is no sample; fails when there is one."""
        with pytest.raises(SampleRefusedError) as caught:
            self.load(request_id)
        assert caught.value.request_id in (request_id, "")
        assert not os.path.exists(self.path(request_id))
        return caught.value.reason, caught.value.detail


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Makes drivers, and shuts them down in the end."""
    drivers: list[Driver] = []

    def make(**settings: Any) -> Driver:
        drivers.append(Driver(tmp_path / "samples", **settings))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.side.shutdown()


@pytest.fixture
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers stay pending until `arrive()`."""
    engine = partial(_native.TransferEngine, threaded=False)
    monkeypatch.setattr(_native, "TransferEngine", engine)


class Gate:
    """Stands before `write_sample`: writers queue there until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._arrivals = threading.Semaphore(0)
        self._write = write_sample
        monkeypatch.setattr(publisher, "write_sample", self._pass)

    def _pass(self, *arguments: Any, **keywords: Any) -> Written:
        self._arrivals.release()
        assert self._open.wait(PATIENCE_S)
        return self._write(*arguments, **keywords)

    def wait_for(self, writers: int) -> None:
        for _ in range(writers):
            assert self._arrivals.acquire(timeout=PATIENCE_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def rows_at(place: int, length: int = LENGTH) -> torch.Tensor:
    return ROWS[place * LENGTH : place * LENGTH + length]


def is_locked(path: str) -> bool:
    with open(lock_path(path)) as lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# Samples


@pytest.mark.parametrize("length", [1, 3, 4, 11, 12])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_sample_holds_the_rows_of_its_blocks(
    drive: Callable[..., Driver], length: int, keyed: bool
) -> None:
    driver = drive().own()
    order = driver.order("r", 2, length, keyed=keyed)
    driver.save(order)
    sample = driver.load("r")
    assert torch.equal(sample["hidden_states"], rows_at(2, length))
    assert sample["token_ids"].tolist() == order.token_ids
    assert sample["token_ids"].dtype == torch.int64


def test_a_sample_describes_itself(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.save(driver.order("a/b"))
    driver.load("a/b")
    assert read_metadata(driver.path("a/b")) == {
        "hscache_version": "1.0",
        "model": "the/model",
        "layer_ids": "7,3",
        "positions": "0:12",
        "weights_epoch": "0",
        "request_id": "a/b",
        "tokens_from_pool": "0",
        "non_finite_rows": "0",
    }


def test_many_requests_at_once(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.save(*(driver.order(f"r{place}", place, 12 - place) for place in range(6)))
    for place in range(6):
        sample = driver.load(f"r{place}")
        assert torch.equal(sample["hidden_states"], rows_at(place, 12 - place))


def test_a_request_is_written_through_a_small_window(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_WINDOW_BYTES", 5 * len(LAYER_IDS) * HIDDEN * 4)
    driver = drive().own()
    driver.save(driver.order("r", 1))
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(1))


def test_a_token_larger_than_the_window_is_written(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_WINDOW_BYTES", 1)
    driver = drive().own()
    driver.save(driver.order("r", 1))
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(1))


def test_chunks_that_are_in_the_pool_are_not_gathered_again(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    driver.save(driver.order("first", 1, 11, keyed=True))
    driver.load("first")
    # The same tokens at another place of the cache, where the computation gave other rows.
    again = driver.order("again", 1, 11, keyed=True)
    assert again.rows is not None
    elsewhere = driver.rows(4, 11).block_ids
    driver.save(replace(again, rows=replace(again.rows, block_ids=elsewhere)))
    expected = torch.cat([rows_at(1, 8), rows_at(4, 11)[8:]])
    assert torch.equal(driver.load("again")["hidden_states"], expected)
    assert read_metadata(driver.path("again"))["tokens_from_pool"] == "8"


def test_a_prompt_of_embeddings_has_no_ids(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.save(replace(driver.order("r"), token_ids=[]))
    sample = driver.load("r")
    assert sample["token_ids"].numel() == 0
    assert torch.equal(sample["hidden_states"], rows_at(0))


def test_a_request_without_tokens_has_an_empty_sample(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.save(driver.order("r", 0, 0))
    assert driver.load("r")["hidden_states"].shape == (0, len(LAYER_IDS), HIDDEN)


# Blocks


@pytest.mark.usefixtures("_still")
def test_blocks_are_reported_once_when_their_rows_are_copied(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    driver.save(driver.order("a", 0), driver.order("b", 1))
    assert driver.side.reported() == set()
    driver.arrive()
    assert driver.side.reported() == {"a", "b"}
    driver.step()
    assert driver.side.reported() == set()
    assert torch.equal(driver.load("a")["hidden_states"], rows_at(0))


def test_blocks_are_given_back_before_the_sample_is_written(
    drive: Callable[..., Driver], gate: Gate
) -> None:
    driver = drive().own()
    driver.save(driver.order("r"))
    driver.arrive()
    assert driver.side.reported() == {"r"}
    assert not os.path.exists(driver.path("r"))
    gate.open()
    driver.load("r")


def test_the_same_step_seen_by_several_hooks_counts_once(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.begin("r")
    news = driver.step(saves=[driver.order("r")])
    driver.side.take_in(news)
    driver.arrive()
    assert driver.side.reported() == {"r"}
    driver.side.take_in(news)
    driver.arrive()
    assert driver.side.reported() == set()


def test_a_rank_that_does_not_write_reports_each_request_once_and_opens_nothing(
    drive: Callable[..., Driver],
) -> None:
    threads = threads_now()
    driver = drive()
    driver.begin("a", "b")
    news = driver.step(
        saves=[driver.order("a"), driver.order("b")],
        refusals=[Refusal("c", driver.path("c"), "aborted", "why")],
    )
    driver.side.take_in(news)
    assert driver.side.reported() == {"a", "b"}
    driver.side.take_in(news)
    assert driver.side.reported() == set()
    assert not driver.folder.exists()
    assert store._opened is None
    assert none_but(threads)


# No room


def test_a_request_larger_than_the_pool_is_refused_and_its_blocks_given_back(
    drive: Callable[..., Driver],
) -> None:
    driver = drive(pool_bytes=4 * SLOT_BYTES).own()
    driver.save(driver.order("large"), driver.order("small", 1, 8))
    reason, detail = driver.refusal("large")
    assert reason == "pool_full"
    assert f"set hscache_pool_bytes to {6 * SLOT_BYTES}" in detail
    driver.arrive()
    assert driver.side.reported() == {"large", "small"}
    assert torch.equal(driver.load("small")["hidden_states"], rows_at(1, 8))


def test_a_request_that_grew_beyond_the_pool_is_refused(drive: Callable[..., Driver]) -> None:
    driver = drive(pool_bytes=4 * SLOT_BYTES).own()
    driver.save(driver.order("short", 0, 8, keyed=True))
    driver.load("short")
    # Two of its three chunks are in the pool, and fill it: waiting would not help.
    driver.save(driver.order("long", 0, 12, keyed=True))
    assert driver.refusal("long")[0] == "pool_full"


def test_a_pool_smaller_than_one_chunk_is_refused_at_the_start(
    drive: Callable[..., Driver],
) -> None:
    driver = drive(pool_bytes=SLOT_BYTES - 1)
    with pytest.raises(ConfigError, match="set hscache_pool_bytes higher"):
        driver.own()


def test_a_request_waits_for_room_in_the_pool(drive: Callable[..., Driver], gate: Gate) -> None:
    driver = drive(pool_bytes=6 * SLOT_BYTES).own()
    driver.save(driver.order("first", 0), driver.order("second", 1), driver.order("third", 2))
    driver.arrive()
    assert driver.side.reported() == {"first"}
    gate.wait_for(1)
    driver.step()
    assert driver.side.reported() == set()
    gate.open()
    for place, name in enumerate(["first", "second", "third"]):
        assert torch.equal(driver.load(name)["hidden_states"], rows_at(place))
        driver.step()  # finds the room that the one before has left
    driver.arrive()
    assert driver.side.reported() == {"second", "third"}


def test_unwritten_samples_do_not_pile_up(drive: Callable[..., Driver], gate: Gate) -> None:
    driver = drive(max_pending=2, threads=1).own()
    names = {"a", "b", "c", "d", "e"}
    driver.save(*(driver.order(name, keyed=True) for name in sorted(names)))
    driver.arrive()
    driver.step()
    assert driver.side.reported() == {"a", "b"}  # the others hold their blocks
    gate.open()
    seen = {"a", "b"}
    while seen != names:
        driver.step()
        driver.arrive()
        seen |= driver.side.reported()
    for name in names:
        assert torch.equal(driver.load(name)["hidden_states"], rows_at(0))


@pytest.mark.usefixtures("_still")
def test_a_request_waits_for_room_in_the_queue(drive: Callable[..., Driver]) -> None:
    driver = drive(max_pending=1).own()
    driver.save(driver.order("first", 0), driver.order("second", 1))
    for place, name in enumerate(["first", "second"]):
        driver.arrive()
        assert driver.side.reported() == {name}
        assert torch.equal(driver.load(name)["hidden_states"], rows_at(place))
        driver.step()


# What goes wrong


def test_a_refusal_reaches_who_waits(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.begin("r")
    assert is_locked(driver.path("r"))
    driver.step(refusals=[Refusal("r", driver.path("r"), "aborted", "the request ended")])
    assert driver.refusal("r") == ("aborted", "the request ended")
    assert driver.side.reported() == set(), "its blocks were not held"


def test_a_block_that_is_not_there_is_told(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    order = driver.order("r")
    assert order.rows is not None
    driver.save(replace(order, rows=replace(order.rows, block_ids=[10_000] * 4)))
    reason, detail = driver.refusal("r")
    assert reason == "transfer_failed"
    assert "block_ids[0] is 10000" in detail
    assert driver.side.reported() == {"r"}


@pytest.mark.usefixtures("_still")
def test_an_engine_that_takes_no_more_transfers_is_told(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    assert driver.side._owned is not None
    for engine in driver.side._owned.store._memory.engines.values():
        engine.close()
    driver.save(driver.order("r"))
    reason, detail = driver.refusal("r")
    assert reason == "transfer_failed"
    assert "closed" in detail
    assert driver.side.reported() == {"r"}


@pytest.mark.usefixtures("_still")
def test_a_failed_transfer_is_told_and_its_blocks_given_back(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    driver.save(driver.order("r"))
    assert driver.side._owned is not None
    for engine in driver.side._owned.store._memory.engines.values():
        engine.close()
    assert driver.refusal("r")[0] == "transfer_failed"
    assert driver.side.reported() == {"r"}


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("not enough memory")],
    ids=["full disk", "anything"],
)
def test_a_sample_that_cannot_be_written_is_told(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> Written:
        raise error

    driver = drive().own()
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "write_sample", refuse)
        driver.save(driver.order("r", 0, 11, keyed=True))
        assert driver.refusal("r") == ("write_failed", str(error))
    driver.arrive()
    assert driver.side.reported() == {"r"}
    driver.settle()
    assert driver.side._owned is not None
    stats = driver.side._owned.store.stats()
    assert stats.num_slots - stats.free_slots == 4, "whole chunks stay, the tail is gone"
    driver.save(driver.order("next", 1))
    assert torch.equal(driver.load("next")["hidden_states"], rows_at(1))


def test_a_folder_that_is_gone_does_not_stop_the_engine(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.begin("r")
    shutil.rmtree(driver.folder)
    driver.step(begin={"s": driver.path("s")}, saves=[driver.order("r")])
    driver.step(saves=[driver.order("s", 1)])
    driver.arrive()
    assert driver.side.reported() == {"r", "s"}
    # Both have been given up once the writers have time for something else.
    driver.folder.mkdir()
    driver.save(driver.order("t", 2))
    assert torch.equal(driver.load("t")["hidden_states"], rows_at(2))


@pytest.mark.parametrize("ends", ["saved", "refused", "running"])
def test_what_another_writer_has_is_left_to_it(drive: Callable[..., Driver], ends: str) -> None:
    driver = drive().own()
    foreign = SampleLock(driver.path("r"))
    write_error(driver.path("r"), "foreign", "pool_full", "why")
    driver.begin("r")
    if ends == "saved":
        driver.step(saves=[driver.order("r")])
        assert driver.side.reported() == {"r"}
    if ends == "refused":
        driver.step(refusals=[Refusal("r", driver.path("r"), "aborted", "why")])
        assert driver.side.reported() == set()
    driver.save(driver.order("other", 1))
    assert torch.equal(driver.load("other")["hidden_states"], rows_at(1))
    driver.side.shutdown()
    assert is_locked(driver.path("r"))
    foreign.release()
    assert json.loads(Path(error_path(driver.path("r"))).read_text())["request_id"] == "foreign"
    assert not os.path.exists(driver.path("r"))


def test_a_name_that_was_another_writers_can_be_had_again(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    foreign = SampleLock(driver.path("r"))
    driver.save(driver.order("r"))
    foreign.release()
    driver.save(driver.order("r"))
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(0))


@pytest.mark.parametrize("lock", [True, False])
def test_a_place_that_cannot_be_taken_is_told(drive: Callable[..., Driver], lock: bool) -> None:
    driver = drive(lock=lock).own()
    os.makedirs(lock_path(driver.path("r")))
    driver.begin("r", "other")
    assert "its place could not be taken" in driver.told("r")["detail"]
    driver.step(saves=[driver.order("r"), driver.order("other", 1)])
    assert torch.equal(driver.load("other")["hidden_states"], rows_at(1))
    driver.arrive()
    assert driver.side.reported() == {"r", "other"}
    assert driver.told("r")["reason"] == "write_failed"


class Hang:
    """A folder that answers nobody who wants a place, until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answers = threading.Event()
        self.asked = threading.Semaphore(0)
        monkeypatch.setattr(path_claims, "SampleLock", self._take)
        monkeypatch.setattr(path_claims, "_PLACE_S", 0.01)

    def _take(self, *arguments: Any) -> SampleLock:
        self.asked.release()
        assert self._answers.wait(PATIENCE_S)
        return SampleLock(*arguments)

    def begin(self, driver: Driver, name: str) -> None:
        """A request begins, for which a thread is asking by then."""
        news = driver.tell(begin={name: driver.path(name)})
        driver.side.take_in(news)
        assert self.asked.acquire(timeout=PATIENCE_S)
        driver.side.rows_are_there()

    def answer(self) -> None:
        self._answers.set()

    def hang(self) -> None:
        self._answers.clear()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang(monkeypatch)
    yield hang
    hang.answer()


def test_a_folder_that_does_not_answer_does_not_stop_the_engine(
    drive: Callable[..., Driver], hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_claims, "_MOST_LATE", 2)
    driver = drive().own()
    hanging = [f"r{number}" for number in range(path_claims._PLACE_THREADS)]
    for name in hanging:
        hang.begin(driver, name)
    driver.begin("later", "last", "too late")
    names = [*hanging, "later", "last", "too late"]
    driver.step(saves=[driver.order(name) for name in names])
    assert driver.side.reported() == set(names), "nothing of them is read"
    progress = driver.side.progress()
    assert progress is not None
    # Only so many wait for the folder to come back. The others get a line in the log.
    assert progress.answered == {driver.path("too late")}
    hang.answer()
    for name in names[:-1]:
        reason, detail = driver.refusal(name)
        assert reason == "write_failed"
        assert "did not answer in time" in detail
    assert not os.path.exists(lock_path(driver.path("too late")))
    assert driver.samples._claims._late.submit(lambda: True).result(PATIENCE_S)
    progress = driver.side.progress()
    assert progress is not None
    assert progress.answered == {driver.path(name) for name in names[:-1]}
    driver.save(driver.order("next", 4))
    assert torch.equal(driver.load("next")["hidden_states"], rows_at(4))


def test_a_slow_folder_is_waited_for_as_long_as_it_answers(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together they take longer than one may, as a burst on a network file system does."""

    def slow(*arguments: Any) -> SampleLock:
        time.sleep(0.02)
        return SampleLock(*arguments)

    monkeypatch.setattr(path_claims, "SampleLock", slow)
    monkeypatch.setattr(path_claims, "_PLACE_S", 0.5)
    driver = drive().own()
    names = [f"r{i}" for i in range(150)]
    driver.begin(*names)
    assert driver.side._live.keys() == set(names)
    assert all(is_locked(driver.path(name)) for name in names)


def test_a_folder_that_answers_again_is_waited_for_again(
    drive: Callable[..., Driver], hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = drive().own()
    for number in range(path_claims._PLACE_THREADS):
        hang.begin(driver, f"r{number}")
    hang.answer()
    driver.refusal("r0")
    monkeypatch.setattr(path_claims, "_PLACE_S", PATIENCE_S)
    driver.begin("b")
    assert is_locked(driver.path("b"))


def test_reasons_do_not_wait_for_places(drive: Callable[..., Driver], hang: Hang) -> None:
    driver = drive().own()
    hang.answer()
    driver.begin("ends")
    hang.hang()
    driver.begin("waits")
    driver.step(refusals=[Refusal("ends", driver.path("ends"), "aborted", "why")])
    assert driver.refusal("ends") == ("aborted", "why")


def test_a_reason_that_hangs_keeps_no_other_waiting(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = drive().own()
    driver.begin("hangs", "ends")
    hangs, refuse = threading.Event(), SampleLock.refuse

    def hang(lock: SampleLock, request_id: str, *why: str) -> None:
        if request_id == "hangs":
            assert hangs.wait(PATIENCE_S)
        refuse(lock, request_id, *why)

    monkeypatch.setattr(SampleLock, "refuse", hang)
    for name in ("hangs", "ends"):
        driver.step(refusals=[Refusal(name, driver.path(name), "aborted", "why")])
    assert driver.refusal("ends") == ("aborted", "why")
    hangs.set()
    assert driver.refusal("hangs") == ("aborted", "why")


def test_places_are_taken_while_a_step_is_made_ready(
    drive: Callable[..., Driver], hang: Hang
) -> None:
    driver = drive().own()
    news = driver.tell(begin={"r": driver.path("r")})
    driver.side.take_in(news)
    assert hang.asked.acquire(timeout=PATIENCE_S)
    hang.answer()
    driver.side.take_in(news)
    driver.side.rows_are_there()
    assert is_locked(driver.path("r"))
    assert not hang.asked.acquire(timeout=0.0), "it is asked once"


def test_an_id_that_comes_again_while_its_place_is_taken_has_both(
    drive: Callable[..., Driver],
) -> None:
    """The second is told of before the step of the first has ended."""
    driver = drive().own()
    driver.side.take_in(driver.tell(begin={"r": driver.path("r")}))
    gone = Refusal("r", driver.path("r"), "aborted", "why")
    news = driver.tell(begin={"r": driver.path("r-2")}, endings=[gone])
    driver.side.take_in(news)
    driver.side.rows_are_there()
    assert driver.refusal("r")[0] == "aborted"
    assert is_locked(driver.path("r-2"))


# Open files


def test_more_requests_than_files_may_be_open_are_refused(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    names = [f"r{number}" for number in range(100)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 70, hard))
        driver.begin(*names)
        refused = [name for name in names if os.path.exists(error_path(driver.path(name)))]
        assert 0 < len(refused) < 90
        assert not is_locked(driver.path(refused[0]))
        for place, name in enumerate(names):
            driver.step(saves=[driver.order(name, place % 6)])
            if name not in refused:
                assert torch.equal(driver.load(name)["hidden_states"], rows_at(place % 6))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    driver.arrive()
    assert driver.side.reported() == set(names)
    reason, detail = driver.refusal(refused[0])
    assert reason == "too_many_files"
    assert f"this process may have {probe + 70} files open" in detail
    driver.save(driver.order("next"))
    driver.load("next")


# Rows that are no numbers


@pytest.fixture
def poisoned() -> torch.Tensor:
    """The cache, with a NaN in the rows of one token and an infinity in those of a later one."""
    paged = PAGED.clone()
    for position, value in ((4, float("nan")), (7, float("inf"))):
        paged[BLOCK_IDS[position // BLOCK], 0, position % BLOCK, 1] = value
    return paged


def test_rows_that_are_no_numbers_are_refused_by_default(
    drive: Callable[..., Driver], poisoned: torch.Tensor
) -> None:
    driver = drive(paged=poisoned).own()
    driver.save(driver.order("good", 1), driver.order("r", 0))
    reason, detail = driver.refusal("r")
    assert reason == "non_finite"
    assert "2 of 24 rows hold an infinity or a NaN, the first at token 4" in detail
    driver.load("good")
    driver.settle()
    assert driver.samples.non_finite_rows == 2


def test_rows_that_are_no_numbers_are_marked_where_asked(
    drive: Callable[..., Driver], poisoned: torch.Tensor
) -> None:
    driver = drive(paged=poisoned, non_finite="mark").own()
    driver.save(driver.order("good", 1), driver.order("r", 0))
    assert not driver.load("r")["hidden_states"].isfinite().all()
    assert read_metadata(driver.path("r"))["non_finite_rows"] == "2"
    driver.load("good")
    assert read_metadata(driver.path("good"))["non_finite_rows"] == "0"
    driver.settle()
    assert driver.samples.non_finite_rows == 2


def test_rows_that_are_no_numbers_are_not_looked_for_where_allowed(
    drive: Callable[..., Driver], poisoned: torch.Tensor
) -> None:
    driver = drive(paged=poisoned, non_finite="allow").own()
    driver.save(driver.order("r", 0))
    driver.load("r")
    assert "non_finite_rows" not in read_metadata(driver.path("r"))
    driver.settle()
    assert driver.samples.non_finite_rows == 0


# Deadlines


class Clock:
    """Stands still until it is moved on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        stand_in = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(publisher, "time", stand_in)
        monkeypatch.setattr(worker, "time", stand_in)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_sample_that_is_late_when_its_turn_comes_is_refused(
    drive: Callable[..., Driver], gate: Gate, clock: Clock
) -> None:
    driver = drive(threads=1, publish_deadline_s=8.0).own()
    driver.save(driver.order("busy", 0))
    gate.wait_for(1)
    driver.save(driver.order("late", 1))
    clock.now += 8
    gate.open()
    reason, detail = driver.refusal("late")
    assert reason == "deadline"
    assert "not published within 8 s" in detail
    assert "set hscache_publish_deadline_s higher" in detail
    driver.save(driver.order("next", 2))
    assert torch.equal(driver.load("next")["hidden_states"], rows_at(2))


def test_a_sample_that_no_writer_has_time_for_is_refused_in_time(
    drive: Callable[..., Driver], gate: Gate
) -> None:
    """Whatever the writers wait for, and whether or not the engine goes on."""
    driver = drive(threads=1, pool_bytes=12 * SLOT_BYTES, publish_deadline_s=0.1).own()
    driver.save(driver.order("busy", 0))
    gate.wait_for(1)
    driver.save(driver.order("late", 1))
    assert driver.refusal("late")[0] == "deadline"
    driver.settle_reasons()
    driver.begin("next")
    driver.step(rows={"next": driver.rows(2, LENGTH)})  # finds the room that it had
    assert not driver.side._behind
    assert driver.side._live["next"].writer is not None


def test_a_sample_whose_rows_are_there_is_not_kept_waiting_by_the_next_step(
    drive: Callable[..., Driver],
) -> None:
    """Its forward pass may take seconds."""
    driver = drive().own()
    told_until(driver, "r", 2, [LENGTH])
    driver.side.take_in(driver.tell(endings=[ended(driver, "r", 2)]))
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(2))


def test_samples_are_refused_in_the_order_of_their_deadlines(
    drive: Callable[..., Driver], gate: Gate
) -> None:
    """Whatever the order in which they found room."""
    driver = drive(threads=1).own()
    driver.save(driver.order("busy", 0))
    gate.wait_for(1)
    answering = driver.samples
    told_until(driver, "late", 1, [LENGTH])
    told_until(driver, "sooner", 2, [LENGTH])
    now = time.monotonic()
    for name, place, deadline in [("late", 1, now + PATIENCE_S), ("sooner", 2, now + 0.05)]:
        writer = driver.side._live[name].writer
        assert writer is not None
        answering.publish(ended(driver, name, place), writer.finish(), 0, deadline)
    assert driver.refusal("sooner")[0] == "deadline"
    assert is_locked(driver.path("late"))


def test_what_is_refused_while_writers_hang_is_forgotten(
    drive: Callable[..., Driver], gate: Gate
) -> None:
    driver = drive(threads=1, publish_deadline_s=0.02).own()
    driver.save(driver.order("busy", 0))
    gate.wait_for(1)
    for number in range(5):
        driver.save(driver.order(f"r{number}", 1))
        assert driver.refusal(f"r{number}")[0] == "deadline"
    assert not driver.samples._queue
    assert driver.samples._writers._work_queue.qsize() <= 1


@pytest.mark.parametrize("pieces_before", [1, 2, 3])
def test_a_write_that_takes_too_long_is_given_up_between_pieces(
    drive: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    pieces_before: int,
) -> None:
    windows, given = publisher._windows, 0

    def slow(lease: Any) -> Iterator[torch.Tensor]:
        nonlocal given
        for rows in windows(lease):
            given += 1
            if given == pieces_before:
                clock.now += 8
            yield rows

    monkeypatch.setattr(publisher, "_WINDOW_BYTES", 4 * len(LAYER_IDS) * HIDDEN * 4)  # three pieces
    driver = drive(publish_deadline_s=8.0).own()
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "_windows", slow)
        driver.save(driver.order("r"))
        assert driver.refusal("r")[0] == "deadline"
    assert given == pieces_before
    assert sorted(os.listdir(driver.folder)) == [
        f"r.safetensors.{kind}" for kind in ("error", "lock")
    ]
    driver.save(driver.order("next", 1))
    assert torch.equal(driver.load("next")["hidden_states"], rows_at(1))


def test_a_request_that_finds_no_room_in_time_is_refused_and_its_blocks_given_back(
    drive: Callable[..., Driver], gate: Gate, clock: Clock
) -> None:
    driver = drive(pool_bytes=6 * SLOT_BYTES, publish_deadline_s=8.0).own()
    driver.save(driver.order("first", 0))
    gate.wait_for(1)
    driver.save(driver.order("second", 1))
    driver.arrive()
    assert driver.side.reported() == {"first"}
    clock.now += 8
    driver.step()
    assert driver.side.reported() == {"second"}
    assert driver.refusal("second")[0] == "deadline"


@pytest.mark.usefixtures("_still")
def test_a_transfer_that_does_not_end_keeps_nobody_waiting(drive: Callable[..., Driver]) -> None:
    driver = drive(publish_deadline_s=0.05).own()
    driver.save(driver.order("r"))
    assert driver.refusal("r")[0] == "deadline"
    assert driver.side.reported() == set(), "its blocks are still read"
    driver.arrive()
    assert driver.side.reported() == {"r"}


def test_without_locks_nobody_gives_up_and_there_is_no_deadline(
    drive: Callable[..., Driver], gate: Gate, clock: Clock
) -> None:
    driver = drive(lock=False, publish_deadline_s=8.0).own()
    driver.save(driver.order("r"))
    gate.wait_for(1)
    clock.now += 1e9
    gate.open()
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(0))


# Paths that clients choose


@pytest.mark.parametrize("lock", [True, False])
def test_a_sample_goes_to_the_path_that_its_client_chose(
    drive: Callable[..., Driver], lock: bool, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    driver = drive(lock=lock, allow_custom_save_path=True, custom_path_root=str(root)).own()
    path = str(root / "a" / "b" / "mine")
    driver.step(begin={"r": path})
    driver.step(saves=[replace(driver.order("r"), path=path)])
    assert torch.equal(load_hidden_states(path, PATIENCE_S)["hidden_states"], rows_at(0))


@pytest.mark.parametrize("lock", [True, False])
def test_a_folder_that_became_a_link_since_is_no_way_out(
    drive: Callable[..., Driver], lock: bool, tmp_path: Path
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    driver = drive(lock=lock, allow_custom_save_path=True, custom_path_root=str(root)).own()
    outside.mkdir()
    (outside / "mine").write_text("precious")
    path = str(root / "a" / "mine")
    driver.step(begin={"before": path})
    shutil.rmtree(root / "a", ignore_errors=True)
    (root / "a").symlink_to(outside)
    driver.step(saves=[replace(driver.order("before"), path=path)], begin={"after": path})
    driver.step(saves=[replace(driver.order("after"), path=path)])
    driver.save(driver.order("other", 1))
    driver.load("other")
    driver.side.shutdown()
    assert os.listdir(outside) == ["mine"]
    assert (outside / "mine").read_text() == "precious"


# Locks


def test_a_request_is_locked_from_its_first_step_until_it_is_answered(
    drive: Callable[..., Driver], gate: Gate
) -> None:
    driver = drive().own()
    driver.begin("r")
    assert is_locked(driver.path("r"))
    driver.step(saves=[driver.order("r")])
    gate.wait_for(1)
    assert is_locked(driver.path("r"))
    gate.open()
    driver.load("r")
    assert not is_locked(driver.path("r"))


@pytest.mark.parametrize("lock", [True, False])
def test_what_an_earlier_request_left_is_cleared_away(
    drive: Callable[..., Driver], lock: bool, gate: Gate
) -> None:
    driver = drive(lock=lock).own()
    path = driver.path("r")
    Path(path).write_text("an old sample")
    write_error(path, "r", "aborted", "an old reason")
    driver.begin("r")
    assert not os.path.exists(path)
    assert not os.path.exists(error_path(path))
    gate.open()
    driver.step(saves=[driver.order("r")])
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(0))


def test_without_locks_there_are_none(drive: Callable[..., Driver]) -> None:
    driver = drive(lock=False).own()
    driver.begin("r", "s")
    driver.step(
        saves=[driver.order("r")], refusals=[Refusal("s", driver.path("s"), "aborted", "why")]
    )
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(0))
    driver.side.shutdown()
    assert driver.refusal("s") == ("aborted", "why")
    assert not any(name.endswith(".lock") for name in os.listdir(driver.folder))


# Shutting down


def test_shutdown_finishes_what_it_can(drive: Callable[..., Driver]) -> None:
    driver = drive(threads=1).own()
    driver.save(*(driver.order(f"r{place}", place) for place in range(6)))
    driver.side.shutdown()
    for place in range(6):
        assert torch.equal(driver.load(f"r{place}")["hidden_states"], rows_at(place))
    driver.side.shutdown()


def test_shutdown_does_not_wait_for_ever_and_answers_all(
    drive: Callable[..., Driver], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_SHUTDOWN_S", 0.01)
    driver = drive(threads=1, pool_bytes=12 * SLOT_BYTES).own()
    driver.begin("written", "queued", "waiting", "running", "ended")
    driver.step(saves=[driver.order("written", 0)])
    gate.wait_for(1)  # the only writer is busy
    driver.step(
        saves=[driver.order("queued", 1), driver.order("waiting", 2)],
        refusals=[Refusal("ended", driver.path("ended"), "incomplete", "too early")],
    )
    driver.side.shutdown()
    assert driver.refusal("queued")[0] == "shutdown"
    assert driver.refusal("waiting")[0] == "shutdown"
    assert driver.refusal("running")[0] == "shutdown"
    assert driver.refusal("ended") == ("incomplete", "too early")
    assert is_locked(driver.path("written"))
    gate.open()
    assert torch.equal(driver.load("written")["hidden_states"], rows_at(0))


@pytest.mark.parametrize("lock", [True, False])
def test_shutdown_tells_who_waits_for_a_request_that_is_still_computed(
    drive: Callable[..., Driver], lock: bool
) -> None:
    driver = drive(lock=lock).own()
    driver.begin("r")
    driver.side.shutdown()
    assert driver.refusal("r") == ("shutdown", "the engine shut down before its rows were there")


@pytest.mark.usefixtures("_still")
def test_shutdown_fails_transfers_that_were_not_begun(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_SHUTDOWN_S", 0.01)
    driver = drive().own()
    driver.save(driver.order("r"))
    driver.side.shutdown()
    assert driver.refusal("r")[0] == "transfer_failed"


def test_shutdown_closes_the_store(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    assert store._opened is not None
    driver.side.shutdown()
    assert store._opened is None
    driver.step(saves=[driver.order("late")])
    assert driver.side.reported() == {"late"}


def test_a_rank_that_does_not_write_has_nothing_to_shut_down(drive: Callable[..., Driver]) -> None:
    drive().side.shutdown()


# Starting


@pytest.mark.parametrize(
    ("paged", "message"),
    [
        (PAGED[0], r"has shape \[2, 3, 4\], expected \[num_blocks, 2, 3, hidden\]"),
        (PAGED[:, :1], r"has shape \[27, 1, 3, 4\], expected \[num_blocks, 2, "),
        (PAGED.to("meta"), "paged is on meta, must be in host or CUDA memory"),
    ],
)
def test_a_cache_of_another_shape_or_device_is_refused(
    drive: Callable[..., Driver], paged: torch.Tensor, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        drive().side.own(paged)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        Driver(tmp_path / "file" / "below").own()


def test_a_pool_larger_than_memory_is_refused(drive: Callable[..., Driver]) -> None:
    with pytest.raises(ValueError, match="more than this machine's"):
        drive(pool_bytes=1 << 50).own()


def test_the_reason_is_json_that_others_can_read(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.begin("r")
    driver.step(refusals=[Refusal("r", driver.path("r"), "aborted", "why")])
    driver.side.shutdown()
    assert json.loads(Path(error_path(driver.path("r"))).read_text()) == {
        "version": 1,
        "request_id": "r",
        "reason": "aborted",
        "detail": "why",
    }


# Step by step


def told_until(driver: Driver, name: str, place: int, stops: Sequence[int], **more: Any) -> None:
    """A request of LENGTH tokens begins, and its rows are told up to these."""
    driver.begin(name)
    for begin, stop in zip([0, *stops], stops, strict=False):
        driver.step(rows={name: driver.rows(place, stop, begin=begin, **more)})


def ended(driver: Driver, name: str, place: int, begin: int = LENGTH, **more: Any) -> SaveOrder:
    """The order at the end of a request whose rows were told up to `begin`."""
    rows = driver.rows(place, LENGTH, begin=begin, **more) if begin < LENGTH else None
    return replace(driver.order(name, place, **more), rows=rows)


@pytest.mark.parametrize("stops", [[12], [4, 8, 12], [8, 12], [4, 12]])
@pytest.mark.parametrize("keyed", [False, True])
def test_rows_that_come_step_by_step(
    drive: Callable[..., Driver], stops: list[int], keyed: bool
) -> None:
    driver = drive().own()
    told_until(driver, "r", 2, stops, keyed=keyed)
    driver.step(saves=[ended(driver, "r", 2, keyed=keyed)])
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(2))


def test_rows_that_were_taken_may_be_overwritten_once_they_are_read(
    drive: Callable[..., Driver],
) -> None:
    paged = PAGED.clone()
    driver = drive(paged=paged).own()
    told_until(driver, "r", 2, [8])
    driver.arrive()
    for block in driver.rows(2, 6).block_ids:
        paged[block] = -1
    driver.step(saves=[ended(driver, "r", 2, begin=8)])
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(2))


def test_a_steps_own_rows_are_not_read_before_it_has_run(drive: Callable[..., Driver]) -> None:
    paged = PAGED.clone()
    written = paged.clone()
    driver = drive(paged=paged).own()
    driver.begin("r")
    paged[:] = -1
    news = driver.tell(rows={"r": driver.rows(2, LENGTH)})
    # As the V1 runner has it: `get_finished` in the midst of the step, `wait_for_save` at its end.
    driver.side.take_in(news)
    driver.arrive()
    paged[:] = written
    driver.side.rows_are_there()
    driver.step(saves=[ended(driver, "r", 2)])
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(2))


def test_rows_of_a_step_that_nobody_ended_are_taken_in_the_next(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    driver.begin("r")
    driver.side.take_in(driver.tell(rows={"r": driver.rows(2, LENGTH)}))
    driver.side.take_in(driver.tell(endings=[ended(driver, "r", 2)]))
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(2))


def quiet_step(driver: Driver) -> int:
    progress = driver.side.progress()
    assert progress is not None
    return progress.quiet_step


@pytest.mark.usefixtures("_still")
def test_rows_that_will_be_read_count_as_read(drive: Callable[..., Driver]) -> None:
    driver = drive(max_pending=1).own()
    driver.begin("r", "s")
    first = driver.step(rows={"r": driver.rows(2, 4)}).step
    second = driver.step(rows={"s": driver.rows(1, 4)}).step  # finds the queue full
    assert quiet_step(driver) == first - 1
    driver.arrive()
    assert quiet_step(driver) == second - 1
    driver.step()
    assert quiet_step(driver) == second - 1
    driver.arrive()
    assert quiet_step(driver) == second + 1


@pytest.mark.usefixtures("_still")
def test_rows_of_a_step_that_nobody_ended_are_read_as_of_that_step(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    driver.begin("r")
    told = driver.tell(rows={"r": driver.rows(2, 4)})
    driver.side.take_in(told)
    driver.side.take_in(driver.tell())
    assert quiet_step(driver) == told.step - 1
    driver.arrive()
    assert quiet_step(driver) == told.step + 1


@pytest.mark.usefixtures("_still")
def test_the_scheduler_learns_which_steps_are_read(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    assert drive().side.progress() is None, "a rank that reads nothing says nothing"
    driver.begin("r", "s")
    begun = driver.step().step
    assert quiet_step(driver) == begun
    first = driver.tell(rows={"r": driver.rows(2, 4)})
    driver.side.take_in(first)
    assert quiet_step(driver) == first.step - 1, "it will be read at the step's end"
    driver.side.rows_are_there()
    driver.step(rows={"s": driver.rows(1, 4)})
    assert quiet_step(driver) == first.step - 1
    driver.arrive()
    assert quiet_step(driver) == first.step + 1


@pytest.mark.usefixtures("_still")
def test_rows_that_wait_for_the_queue_are_still_to_be_read(drive: Callable[..., Driver]) -> None:
    driver = drive(max_pending=1).own()
    driver.begin("a", "b")
    told = driver.step(rows={"a": driver.rows(0, 8), "b": driver.rows(1, 8)}).step

    def quiet_step() -> int:
        progress = driver.side.progress()
        assert progress is not None
        return progress.quiet_step

    driver.arrive()
    assert quiet_step() == told - 1, "the queue had room for one"
    latest = driver.step().step
    assert quiet_step() == told - 1, "the other one is on its way"
    driver.arrive()
    assert quiet_step() == latest


def test_chunks_of_rows_that_a_preemption_took_are_known(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.begin("r")
    # A step that no `rows_are_there` ends.
    driver.side.take_in(driver.tell(rows={"r": driver.rows(1, 8, keyed=True)}))
    driver.step(preempted=["r"], rows={"r": driver.rows(4, LENGTH)})
    driver.step(saves=[ended(driver, "r", 4)])
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(4))
    driver.save(driver.order("again", 1, keyed=True))
    driver.load("again")
    assert read_metadata(driver.path("again"))["tokens_from_pool"] == "12"


@pytest.mark.usefixtures("_still")
def test_an_aborted_request_gives_its_blocks_back_when_they_are_read(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    told_until(driver, "r", 2, [8])
    driver.step(refusals=[Refusal("r", driver.path("r"), "aborted", "why", reported=True)])
    assert driver.refusal("r") == ("aborted", "why")
    assert driver.side.reported() == set()
    driver.arrive()
    assert driver.side.reported() == {"r"}


def test_a_preempted_request_goes_on_where_it_was(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    told_until(driver, "r", 2, [8])
    driver.arrive()
    # Its rows are computed again elsewhere; what was taken is not taken twice.
    driver.step(preempted=["r"])
    driver.step(rows={"r": driver.rows(4, 4)})
    driver.step(rows={"r": driver.rows(4, LENGTH, begin=4)})
    driver.step(saves=[ended(driver, "r", 4)])
    expected = torch.cat([rows_at(2, 8), rows_at(4)[8:]])
    assert torch.equal(driver.load("r")["hidden_states"], expected)


@pytest.mark.usefixtures("_still")
def test_rows_that_found_no_room_before_a_preemption_are_told_again(
    drive: Callable[..., Driver],
) -> None:
    driver = drive(max_pending=1).own()
    told_until(driver, "r", 2, [4, 8])  # the second finds the queue full
    driver.step(preempted=["r"])
    driver.arrive()
    driver.step(rows={"r": driver.rows(4, LENGTH)})
    driver.arrive()
    driver.step(saves=[ended(driver, "r", 4)])
    driver.arrive()
    expected = torch.cat([rows_at(2, 4), rows_at(4)[4:]])
    assert torch.equal(driver.load("r")["hidden_states"], expected)


@pytest.mark.usefixtures("_still")
def test_a_preemption_waits_for_what_is_read(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    told_until(driver, "r", 2, [8])
    told_until(driver, "s", 1, [8])
    news = driver.tell(preempted=["r"])
    waiting = threading.Thread(target=driver.side.handle_preemptions, args=(news,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    driver.arrive()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


# No room, step by step


def test_a_request_without_room_is_taken_whole_at_its_end(
    drive: Callable[..., Driver], gate: Gate
) -> None:
    driver = drive(pool_bytes=8 * SLOT_BYTES).own()
    driver.save(driver.order("writing", 0))
    gate.wait_for(1)
    told_until(driver, "r", 2, [4, 8])
    driver.step(saves=[ended(driver, "r", 2, begin=8)])
    driver.arrive()
    assert driver.side.reported() == {"writing"}
    gate.open()
    driver.load("writing")
    driver.settle()
    driver.step()
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(2))
    driver.arrive()
    assert driver.side.reported() == {"r"}


def test_where_it_is_asked_for_a_request_without_room_is_refused(
    drive: Callable[..., Driver], gate: Gate
) -> None:
    driver = drive(pool_bytes=8 * SLOT_BYTES, when_full="drop").own()
    driver.save(driver.order("writing", 0))
    gate.wait_for(1)
    told_until(driver, "r", 2, [4, 8])
    driver.step(saves=[ended(driver, "r", 2, begin=8)])
    driver.arrive()
    assert driver.side.reported() == {"writing", "r"}
    gate.open()
    assert driver.refusal("r")[0] == "pool_full"


def test_where_it_is_asked_for_nobody_waits_for_a_writer(
    drive: Callable[..., Driver], gate: Gate
) -> None:
    driver = drive(max_pending=1, threads=1, when_full="drop").own()
    driver.save(driver.order("writing", 0))
    gate.wait_for(1)
    driver.save(driver.order("r", 1))
    assert driver.side.reported() == {"writing", "r"}
    reason, detail = driver.refusal("r")  # while the only writer is busy
    assert reason == "queue_full"
    assert detail.startswith("1 finished requests wait for a writer")
    gate.open()
    assert torch.equal(driver.load("writing")["hidden_states"], rows_at(0))


def test_who_has_ended_gets_the_room_of_who_runs(drive: Callable[..., Driver]) -> None:
    driver = drive(pool_bytes=8 * SLOT_BYTES).own()
    told_until(driver, "runs", 0, [8])
    told_until(driver, "ends", 1, [8])  # finds no room
    driver.step(saves=[ended(driver, "ends", 1, begin=8)])
    driver.arrive()
    driver.step()
    assert torch.equal(driver.load("ends")["hidden_states"], rows_at(1))
    driver.settle()
    driver.step(saves=[ended(driver, "runs", 0, begin=8)])
    assert torch.equal(driver.load("runs")["hidden_states"], rows_at(0))
    driver.arrive()
    driver.step()
    assert driver.side.reported() == {"runs", "ends"}


def test_who_has_ended_gets_the_room_of_who_ends_later(drive: Callable[..., Driver]) -> None:
    driver = drive(pool_bytes=8 * SLOT_BYTES).own()
    told_until(driver, "later", 0, [8])
    told_until(driver, "first", 1, [8])  # finds no room
    driver.step(saves=[ended(driver, "first", 1, begin=8), ended(driver, "later", 0, begin=8)])
    driver.arrive()
    driver.step()
    assert torch.equal(driver.load("first")["hidden_states"], rows_at(1))
    driver.settle()
    driver.step()
    assert torch.equal(driver.load("later")["hidden_states"], rows_at(0))


# KV that comes from elsewhere


def test_foreign_rows_are_taken_from_the_pool(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.save(driver.order("before", 1, keyed=True))
    driver.load("before")
    driver.begin("r")
    rows = replace(driver.rows(1, LENGTH, keyed=True), foreign=(3, 8))
    elsewhere = driver.rows(4, LENGTH).block_ids
    driver.step(rows={"r": replace(rows, block_ids=elsewhere)})
    driver.step(saves=[ended(driver, "r", 1)])
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(1))


@pytest.mark.parametrize("foreign", [(0, 4), (3, 8), (9, 12)])
def test_foreign_rows_that_are_not_in_the_pool_are_refused(
    drive: Callable[..., Driver], foreign: tuple[int, int]
) -> None:
    driver = drive().own()
    driver.begin("r")
    driver.step(rows={"r": replace(driver.rows(1, LENGTH, keyed=True), foreign=foreign)})
    driver.step(saves=[ended(driver, "r", 1)])
    reason, detail = driver.refusal("r")
    assert reason == "foreign_kv"
    assert "set hscache_rows_come_with_kv to true" in detail
    driver.arrive()
    assert driver.side.reported() == {"r"}


def test_rows_that_were_taken_before_a_preemption_need_not_be_there_again(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    told_until(driver, "r", 2, [8])
    driver.step(preempted=["r"])
    driver.step(rows={"r": replace(driver.rows(4, LENGTH), foreign=(0, 8))})
    driver.step(saves=[ended(driver, "r", 4)])
    expected = torch.cat([rows_at(2, 8), rows_at(4)[8:]])
    assert torch.equal(driver.load("r")["hidden_states"], expected)


# New weights


def test_rows_of_old_weights_answer_no_more(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.save(driver.order("before", 1, keyed=True))
    driver.load("before")
    driver.begin("again", "mixed")
    driver.step(rows={"mixed": driver.rows(2, 8)})
    news: dict[str, Any] = {"weights_epoch": 1}
    driver.step(rows={"again": driver.rows(3, LENGTH, keyed=True)}, preempted=["again"], **news)
    driver.step(saves=[ended(driver, "again", 3), ended(driver, "mixed", 2, begin=8)], **news)
    assert driver.refusal("mixed")[0] == "reset"
    assert torch.equal(driver.load("again")["hidden_states"], rows_at(3))
    assert read_metadata(driver.path("again"))["weights_epoch"] == "1"


def test_an_ended_request_whose_rows_are_all_there_outlives_a_reset(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    told_until(driver, "r", 2, [LENGTH])
    driver.step(saves=[ended(driver, "r", 2)], weights_epoch=1)
    assert torch.equal(driver.load("r")["hidden_states"], rows_at(2))
    assert read_metadata(driver.path("r"))["weights_epoch"] == "0"


def test_a_reset_by_somebody_else_ends_no_engine(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.begin("r")
    assert driver.side._owned is not None
    for _ in range(3):
        driver.side._owned.store.reset()
    driver.step(rows={"r": driver.rows(2, 8)})
    driver.step(saves=[ended(driver, "r", 2, begin=8)])
    assert driver.refusal("r")[0] == "transfer_failed"
    driver.save(driver.order("next", 1))
    assert torch.equal(driver.load("next")["hidden_states"], rows_at(1))


def test_a_reset_by_somebody_else_when_all_rows_are_there_ends_no_engine(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    told_until(driver, "r", 2, [LENGTH])
    assert driver.side._owned is not None
    driver.side._owned.store.reset()
    driver.step(saves=[ended(driver, "r", 2)])
    assert driver.refusal("r")[0] == "reset"
    driver.arrive()
    assert driver.side.reported() == {"r"}


def test_a_store_that_somebody_else_has_closed_ends_no_engine(
    drive: Callable[..., Driver],
) -> None:
    driver = drive().own()
    driver.begin("r")
    assert driver.side._owned is not None
    driver.side._owned.store.close()
    driver.step(begin={"s": driver.path("s")}, rows={"r": driver.rows(2, 8)})
    driver.step(saves=[ended(driver, "r", 2, begin=8), driver.order("s", 1)])
    assert driver.side.reported() == {"r", "s"}
    for name in ("r", "s"):
        assert driver.refusal(name)[0] == "transfer_failed"


def test_an_id_may_end_and_begin_again_in_one_step(drive: Callable[..., Driver]) -> None:
    driver = drive().own()
    driver.begin("r")
    path = driver.path("r")
    gone = Refusal("r", path, "aborted", "why")
    driver.step(refusals=[gone], begin={"r": driver.path("r-2")})
    driver.step(rows={"r": driver.rows(2, LENGTH)})
    driver.step(saves=[replace(ended(driver, "r", 2), path=driver.path("r-2"))])
    assert torch.equal(driver.load("r-2")["hidden_states"], rows_at(2))
    assert driver.refusal("r")[0] == "aborted"


def test_who_needs_no_room_does_not_stand_behind_who_does(
    drive: Callable[..., Driver], gate: Gate
) -> None:
    driver = drive(pool_bytes=12 * SLOT_BYTES, lock=False).own()
    driver.begin("has all", "has nothing")
    driver.step(rows={"has all": driver.rows(0, LENGTH)})
    driver.save(driver.order("writing", 1))  # and the pool is full
    gate.wait_for(1)
    driver.step(rows={"has nothing": driver.rows(2, 8)})
    driver.step(
        saves=[ended(driver, "has nothing", 2, begin=8), ended(driver, "has all", 0)],
    )
    gate.open()
    for name, place in (("has all", 0), ("writing", 1), ("has nothing", 2)):
        for _ in range(2000):
            if os.path.exists(driver.path(name)):
                break
            driver.step()
            driver.settle()
        assert torch.equal(driver.load(name)["hidden_states"], rows_at(place))


@pytest.mark.usefixtures("_still")
def test_an_ended_request_of_old_weights_that_still_waits_for_room_is_refused(
    drive: Callable[..., Driver],
) -> None:
    driver = drive(max_pending=1).own()
    driver.save(driver.order("first", 0), driver.order("second", 1))
    driver.step(weights_epoch=1)
    driver.arrive()
    assert torch.equal(driver.load("first")["hidden_states"], rows_at(0))
    driver.settle()
    driver.step(weights_epoch=1)
    assert driver.refusal("second")[0] == "reset"
    assert driver.side.reported() == {"first", "second"}
