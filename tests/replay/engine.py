"""vLLM's engine replayed around the real connector, on a GPU that runs everything late.

What a CPU engine does not do (the V2 model runner, asynchronous scheduling, streams) is written
down here as the calls that vLLM 0.32 makes, in its order: `Scheduler` and `AsyncScheduler` with
their block pool, both model runners, and a model whose rows say whose they are. Device memory,
streams and kernels are the fake CUDA runtime's (csrc/tests/fake_cuda.h). One seed is one run.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import itertools
import logging
import pickle
import random
import struct
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from hidden_cache import index, pool_memory, results, row_format, store, writer
from hidden_cache import lease as leases
from hidden_cache.integrations.vllm import path_claims, publisher, worker
from hidden_cache.integrations.vllm.connector import HiddenCacheConnector
from hidden_cache.integrations.vllm.options import EngineShape
from hidden_cache.lease import Lease

LIBRARY = Path(__file__).parents[2] / "build/tests-plain/csrc/tests/_native_on_fake.so"
ORDERS = ("v1", "v2", "async-v1", "async-v2")
LAYER_IDS = (7, 3)
ROW = struct.Struct("<4i")  # digest of the prefix, position, layer, weights epoch
HIDDEN = 4
DEVICE = torch.device("cuda", 0)
LONGEST_PROMPT, MOST_OUTPUT = 24, 8
LONGEST = LONGEST_PROMPT + MOST_OUTPUT  # tokens of a request, guesses included
# Steps in which a run must have come to its end, and polls in which a transfer must have.
MOST_STEPS = 3_000
MOST_POLLS = 100_000


class FaultError(BaseException):
    """Something that must never be. Not to be caught by those who survive any Exception."""


def load(name: str) -> ModuleType:
    """A module out of the library: `_native`, its GPU the fake one, or `_fake_cuda`."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(LIBRARY))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class Paged:
    """What the connector looks at of a CUDA tensor `[blocks, layers, block_size, hidden]`."""

    address: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]  # elements
    device: torch.device = DEVICE
    dtype: torch.dtype = torch.int32

    def dim(self) -> int:
        return 4

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self.address

    def at(self, block: int, layer: int, token: int) -> int:
        place = block * self.strides[0] + layer * self.strides[1] + token * self.strides[2]
        return self.address + place * self.element_size()


class LateWriters:
    """In place of threads: what they are given runs when the driver says so.

    The engine's thread waits for places, so these are taken at once.
    """

    def __init__(self, _: int, name: str) -> None:
        self.at_once = name == "hscache-place"
        self.jobs: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((partial(job, *arguments), future))
        if self.at_once:
            self.run_all()
        return future

    def run_one(self, rng: random.Random) -> None:
        if self.jobs:
            job, future = self.jobs.pop(rng.randrange(len(self.jobs)))
            future.set_result(job())

    def run_all(self) -> None:
        while self.jobs:
            job, future = self.jobs.pop(0)
            future.set_result(job())

    def shutdown(self, **_: Any) -> None: ...


@contextmanager
def on_fake(native: ModuleType) -> Iterator[None]:
    """The store and the connector on the fake GPU, with a clock that stands still."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (index, leases, results, pool_memory, store, writer):
            patch.setattr(module, "_native", native)
        patch.setattr(row_format, "Element", native.Element)
        patch.setattr(EngineShape, "of", lambda *_: Replay.now.shape)
        patch.setattr(publisher, "ThreadPoolExecutor", LateWriters)
        patch.setattr(path_claims, "ThreadPoolExecutor", LateWriters)
        patch.setattr(publisher, "write_sample", lambda *a, **k: Replay.now.sample_written(*a, **k))
        patch.setattr(publisher, "write_error", lambda *a, **k: Replay.now.refused(*a, **k))
        patch.setattr(path_claims, "cleanup_hidden_states", lambda *_, **__: None)
        for module in (pool_memory, store, writer):
            patch.setattr(module, "current_stream", lambda *_: Replay.now.stream)
        clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: Replay.now.poll())
        patch.setattr(worker, "time", clock)
        patch.setattr(publisher, "time", clock)
        patch.setattr(path_claims, "time", clock)
        wait = Lease.wait

        def wait_by_polling(lease: Lease, timeout_s: float | None = None) -> bool:
            Replay.now.poll_until(lambda: all(ticket.ended for ticket in lease._pending()))
            return wait(lease, timeout_s)

        patch.setattr(Lease, "wait", wait_by_polling)
        engine = native.TransferEngine

        def unthreaded(**options: Any) -> Any:
            made = engine(threaded=False, **options)
            if options["cuda_device"] is not None:
                Replay.now.engines.append(made)
            return made

        register = pool_memory.PoolMemory.engine

        def registered(self: pool_memory.PoolMemory, device: torch.device) -> Any:
            made = register(self, device)
            # On a thread of its own, which the fake does not know.
            self._registrations[device].wait()
            return made

        patch.setattr(native, "TransferEngine", unthreaded)
        patch.setattr(pool_memory.PoolMemory, "engine", registered)
        logging.disable(logging.CRITICAL)
        gc.collect()
        gc.freeze()  # what is there already is not looked at again after each seed
        try:
            yield
        finally:
            gc.unfreeze()
            logging.disable(logging.NOTSET)


@dataclass(slots=True, eq=False)
class Job:
    """A request: as the scheduler has it, and as the model runner has it."""

    request: Request
    max_tokens: int
    with_outputs: bool
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # the runner's: with all that was sampled
    computed: int = 0  # the runner's: without guesses that were rejected
    was_scheduled: bool = False
    aborted: bool = False

    @property
    def name(self) -> str:
        return str(self.request.request_id)


@dataclass(slots=True)
class Step:
    """A step between its scheduling and the processing of its output."""

    output: SchedulerOutput
    metadata: Any
    epoch: int
    to_zero: list[int]
    sampled: dict[str, list[int]] = field(default_factory=dict)
    told: KVConnectorOutput | None = None


class Blocks:
    """vLLM's block pool: reference counts, prefix caching, blocks used again at once."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self._rng = rng
        self.free = list(range(count))
        self.users = [0] * count
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._latest_first = rng.random() < 0.5

    def hit(self, hashes: list[bytes]) -> list[int]:
        found = itertools.takewhile(lambda key: key in self._block_of, hashes)
        return [self._block_of[key] for key in found]

    def take(self, hits: list[int], count: int) -> list[int] | None:
        """Blocks of which the first are there already; None where there is no room."""
        idle = [block for block in hits if self.users[block] == 0]
        if len(self.free) - len(idle) < count:
            return None
        for block in hits:
            self.users[block] += 1
        for block in idle:
            self.free.remove(block)
        new = [self.free.pop(-1 if self._latest_first else 0) for _ in range(count)]
        for block in new:
            self.users[block] = 1
            self._block_of.pop(self._hash_of.pop(block, b""), None)
        return new

    def name(self, block: int, key: bytes) -> None:
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)

    def forget(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()


class Replay:
    """One run: requests come, are computed, and end; what must never be raises FaultError."""

    now: Replay  # the one that runs

    def __init__(self, fake: ModuleType, order: str, seed: int, folder: Path) -> None:
        Replay.now = self
        rng = self.rng = random.Random(f"{order} {seed}")
        self.fake = fake
        fake.reset(seed)
        self.engines: list[Any] = []
        self.is_v2 = order.endswith("v2")
        self.is_async = order.startswith("async")
        # How the engine is set up.
        hash_block = rng.choice([2, 4])
        self.block_size = hash_block * rng.choice([1, 2])
        self.chunk_size = hash_block * rng.choice([1, 2, 3])
        self.shape = EngineShape("m", LAYER_IDS, 0, hash_block, self.block_size, ())
        self.zeroes_blocks = rng.random() < 0.5
        self.lookahead = rng.choice([0, 1])
        self.most_running = rng.choice([2, 4, 8])
        self.token_budget = rng.choice([5, 9, 16, 40, 80])
        enough = -(-LONGEST // self.block_size) + 1
        # Often so few that running requests must be preempted.
        self.blocks = Blocks(rng.choice([enough, enough + 2, enough * 2, enough * 3]), rng)
        # How often what happens.
        self.rates = {
            "poll": rng.choice([0.0, 0.3, 0.7, 0.95]),
            "progress": rng.choice([0.0, 0.2, 0.8]),
            "write": rng.choice([0.0, 0.1, 0.5]),
            "arrive": rng.choice([0.1, 0.5, 1.0]),
            "abort": rng.choice([0.0, 0.0, 0.03, 0.1]),
            "reset": rng.choice([0.0, 0.05, 0.1]),
            "new weights": rng.choice([0.0, 0.5]),
            "abort after reset": rng.choice([0.0, 0.7]),
            "empty": rng.choice([0.0, 0.1, 0.4]),
            "no save": rng.choice([0.0, 0.0, 0.5]),
            "accept": rng.choice([0.0, 0.2]),
            # Where sampled tokens come to the host it waits for the kernels.
            "synchronize": 1.0 if rng.random() < 0.5 and not self.is_async else 0.0,
        }
        self.stream = fake.make_stream()
        self.paged = self._make_paged()
        # The connector's two sides, as vLLM makes them.
        # Often room for little more than the longest request, so that others must wait.
        slots = -(-LONGEST // self.chunk_size) * len(LAYER_IDS) * rng.choice([1, 2, 20])
        extra = {
            "shared_storage_path": str(folder),
            "use_synchronization_lock": False,
            "hscache_chunk_size": self.chunk_size,
            "hscache_pool_bytes": slots * self.chunk_size * ROW.size,
            "hscache_staging_bytes": rng.choice([256, 4096]),
            "hscache_max_pending": rng.choice([2, 100]),
            "hscache_result_bytes": 0,
            "hscache_touch_pages": "off",
            "hscache_numa": "off",
        }
        transfer = SimpleNamespace(kv_connector_extra_config=extra, is_kv_producer=True)
        config: Any = SimpleNamespace(kv_transfer_config=transfer)
        kv_cache: Any = None
        self.planner = HiddenCacheConnector(config, KVConnectorRole.SCHEDULER, kv_cache)
        self.saver = HiddenCacheConnector(config, KVConnectorRole.WORKER, kv_cache)
        assert self.saver._worker is not None
        self.saver._worker.own(self.paged)  # type: ignore[arg-type]
        # The scheduler.
        self.to_come = [self._draw_job(i) for i in range(rng.randint(3, 12))]
        self.jobs = {job.name: job for job in self.to_come}
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.requests: dict[str, Job] = {}  # as vLLM's: until the blocks are given back
        self.preempted: list[str] = []  # vLLM's is a set, whose order no seed replays
        self.finished: set[str] = set()
        self.held: set[str] = set()
        self.in_flight: list[Step] = []
        self.epoch = 0
        self.answers: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def _make_paged(self) -> Paged:
        count, size = len(self.blocks.users), self.block_size
        layers, padding = len(LAYER_IDS), self.rng.choice([0, HIDDEN])
        block = layers * size * HIDDEN + padding
        if self.rng.random() < 0.5:  # token-major
            strides = (block, HIDDEN, layers * HIDDEN, 1)
        else:
            strides = (block, size * HIDDEN, HIDDEN, 1)
        address = self.fake.allocate(count * block * 4)
        return Paged(address, (count, layers, size, HIDDEN), strides)

    def _draw_job(self, number: int) -> Job:
        rng = self.rng
        length, shared = rng.randint(1, LONGEST_PROMPT), rng.choice([0, 6, 12, 20])
        begin = rng.choice([100, 200])
        tokens = [begin + i if i < shared else rng.randrange(1000, 9000) for i in range(length)]
        with_outputs = rng.random() < 0.5
        params = {"kv_transfer_params": {"include_output_tokens": True}} if with_outputs else None
        request = Request(
            f"r{number}",
            tokens,
            SamplingParams(max_tokens=99, extra_args=params),
            None,
            block_hasher=self._hash_blocks if rng.random() < 0.9 else None,
        )
        return Job(request, rng.randint(1, MOST_OUTPUT), with_outputs)

    def _hash_blocks(self, request: Request) -> list[bytes]:
        """The hashes of the full blocks that have none yet, each of the whole prefix."""
        size, tokens = self.shape.hash_block_size, list(request.all_token_ids)
        known, full = len(request.block_hashes), len(tokens) // size
        return [repr(tokens[: (i + 1) * size]).encode() for i in range(known, full)]

    # --- time -----------------------------------------------------------------------------

    def chance(self, what: str) -> bool:
        return self.rng.random() < self.rates[what]

    def poll(self) -> None:
        for engine in self.engines:
            engine.poll()

    def poll_until(self, done: Callable[[], bool]) -> None:
        for _ in range(MOST_POLLS):
            if done():
                return
            self.poll()
        raise FaultError("a transfer does not end")

    def time_passes(self) -> None:
        while self.chance("poll"):
            self.poll()
        if self.chance("progress"):
            self.fake.progress()
        if self.chance("write"):
            self._write_one()

    def _write_one(self) -> None:
        self.rng.choice(self.threads).run_one(self.rng)

    @property
    def threads(self) -> list[Any]:
        assert self.saver._worker is not None
        assert self.saver._worker._owned is not None
        answering = self.saver._worker._owned.publisher
        return [answering._writers, answering._reasons]

    # --- the run --------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(MOST_STEPS):
            while self.to_come and self.chance("arrive"):
                self._arrive(self.to_come.pop())
            if not self._has_work():
                if not self.to_come:
                    break
                continue
            if self.chance("abort"):
                self._abort()
            if self.chance("reset"):
                self._reset()
            step = self._schedule(empty=self.chance("empty"))
            self._execute(step)
            self.in_flight.append(step)
            idle = not step.output.num_scheduled_tokens
            if idle:  # threads of their own go on, at the latest now
                self.poll()
                self._write_one()
            ahead = 1 if self.is_async and not (idle and self.rng.random() < 0.5) else 0
            while len(self.in_flight) > ahead:
                self._process(self.in_flight.pop(0))
        else:
            raise FaultError(f"no end: {self.held} held, {list(self.requests)} there")
        for threads in self.threads:
            threads.run_all()
        self._check_end()

    def _has_work(self) -> bool:
        return bool(self.requests or self.finished or self.in_flight)

    def _check_end(self) -> None:
        for job in self.jobs.values():
            if job.was_scheduled and job.name not in self.answers:
                raise FaultError(f"{job.name} has no answer")
        side, plan = self.saver._worker, self.planner._scheduler
        assert side is not None
        assert plan is not None
        left: list[Any] = [plan._held, plan._live, plan._waiting, plan._local_hits]
        left += [
            side._held,
            side._endings,
            side._live,
            side._reportable,
            side._behind,
            self.held,
        ]
        left += [name for _, name, ticket in side._reading if not ticket.ended]
        left += [plan.has_pending_block_frees()]
        if any(left):
            raise FaultError(f"something is held in the end: {left}")
        if len(self.blocks.free) != len(self.blocks.users):
            raise FaultError("blocks are held in the end")
        assert side._owned is not None
        kept = side._owned.store
        kept._index.settle()
        while kept._index.evict() is not None:
            pass
        if kept.stats().used_bytes:
            raise FaultError("slots of the pool are held in the end")
        counters = self.fake.counters()
        if counters.misuses:
            raise FaultError("device memory or a handle is used after its end")
        if counters.pageable_copies:
            raise FaultError("a copy makes a detour")

    def close(self) -> None:
        """Lets go of the fake's handles, before the next world begins."""
        assert self.saver._worker is not None
        owned = self.saver._worker._owned
        assert owned is not None
        owned.publisher._queue.clear()
        owned.publisher._begun.clear()
        self.saver.shutdown()
        gone = weakref.ref(owned.store._memory)
        del owned
        self.saver._worker = None
        self.engines.clear()
        if gone() is not None:
            gc.collect()
        assert gone() is None, "an engine outlives its world"

    # --- what is asked for from outside ---------------------------------------------------

    def _arrive(self, job: Job) -> None:
        self.requests[job.name] = job
        self.waiting.append(job)
        self.planner.on_new_request(job.request)

    def _abort(self) -> None:
        candidates = self.running + self.waiting
        if not candidates:
            return
        job = self.rng.choice(candidates)
        (self.running if job in self.running else self.waiting).remove(job)
        job.request.status = RequestStatus.FINISHED_ABORTED
        job.aborted = True
        self._free_request(job)

    def _reset(self) -> None:
        """`reset_prefix_cache(reset_running_requests=True)`, which vLLM refuses where blocks are
        held; of new weights when it resets the connector too."""
        if self.held:
            return
        while self.running:
            self._preempt(self.running.pop())
        self.blocks.forget()
        self.counts["reset"] += 1
        if self.chance("new weights"):
            self.planner.reset_cache()
            self.epoch += 1
        while self.chance("abort after reset"):
            self._abort()

    # --- the scheduler --------------------------------------------------------------------

    def _schedule(self, empty: bool) -> Step:
        output = SchedulerOutput.make_empty()
        to_zero: list[int] = []
        budget = 0 if empty else self.token_budget
        some_preempted = False
        place = 0
        while place < len(self.running) and budget > 0:
            job = self.running[place]
            request = job.request
            ahead = request.num_output_placeholders
            if ahead and request.num_computed_tokens + 2 - ahead >= (
                request.num_prompt_tokens + job.max_tokens
            ):
                place += 1
                continue
            wanted = request.num_tokens_with_spec + ahead - request.num_computed_tokens
            count = min(wanted, budget)
            if count <= 0:
                place += 1
                continue
            new = None
            while True:
                new = self.blocks.take([], self._lacking(job, count))
                if new is not None or self.planner.has_pending_block_frees():
                    break
                self.counts["preempted"] += 1
                some_preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is job:
                    break
            if new is None:
                break
            job.blocks += new
            to_zero += new
            budget -= count
            self._put(output, job, count)
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(job.name)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            place += 1
        while self.waiting and budget > 0 and not some_preempted:
            if len(self.running) >= self.most_running:
                break
            started = self._start(output, self.waiting[0], budget)
            if started is None:
                break
            budget -= started[0]
            to_zero += started[1]
        output.preempted_req_ids, self.preempted = self.preempted, []
        output.finished_req_ids, self.finished = self.finished, set()
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids=set(output.num_scheduled_tokens),
            resolve_block_ids=lambda name: (list(self.requests[name].blocks),),
            boundary_state_offloads={},
        )
        metadata = pickle.dumps(self.planner.build_connector_meta(output))
        output.kv_connector_block_state = None
        self._update_after_schedule(output)
        return Step(output, pickle.loads(metadata), self.epoch, to_zero)

    def _lacking(self, job: Job, count: int) -> int:
        tokens: int = job.request.num_computed_tokens + count + self.lookahead
        return max(0, -(-tokens // self.block_size) - len(job.blocks))

    def _start(
        self, output: SchedulerOutput, job: Job, budget: int
    ) -> tuple[int, list[int]] | None:
        """Schedules a request that waits: one that is new, or was preempted."""
        request = job.request
        size = self.block_size
        hits = self.blocks.hit(self._names(request, request.num_tokens - 1))
        local = len(hits) * size
        external, later = self.planner.get_num_new_matched_tokens(request, local)
        if external is None:
            return None
        assert (external, later) == (0, False)
        count = min(request.num_tokens - local, budget)
        job.blocks = list(hits)
        request.num_computed_tokens = local
        new = self.blocks.take(hits, self._lacking(job, count))
        if new is None:
            job.blocks, request.num_computed_tokens = [], 0
            return None
        job.blocks += new
        self.counts["hits"] += bool(hits)
        blocks: Any = None
        self.planner.update_state_after_alloc(request, blocks, 0)
        self.waiting.remove(job)
        self.running.append(job)
        resumed = request.status == RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        job.was_scheduled = True
        job.tokens, job.computed = list(request.all_token_ids), local
        if resumed and not self.is_v2:
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(job.name)
            cached.num_computed_tokens.append(local)
            cached.resumed_req_ids.add(job.name)
        else:
            known = list(request.all_token_ids)
            data = NewRequestData.from_request(request, (list(job.blocks),), known)
            output.scheduled_new_reqs.append(data)
        self._put(output, job, count)
        return count, new

    def _put(self, output: SchedulerOutput, job: Job, count: int) -> None:
        request = job.request
        output.num_scheduled_tokens[job.name] = count
        guesses = (
            count
            + request.num_computed_tokens
            - request.num_tokens
            - request.num_output_placeholders
        )
        if request.spec_token_ids and guesses > 0:
            output.scheduled_spec_decode_tokens[job.name] = request.spec_token_ids[:guesses]
        request.spec_token_ids = []
        # Blocks that are full of known tokens are everybody's from now on.
        known = min(request.num_computed_tokens + count, request.num_tokens)
        for block, key in zip(job.blocks, self._names(request, known), strict=False):
            self.blocks.name(block, key)

    def _names(self, request: Request, tokens: int) -> list[bytes]:
        """Of the blocks that lie wholly below so many tokens, as far as they have hashes."""
        step = self.block_size // self.shape.hash_block_size
        hashes: list[bytes] = request.block_hashes[: tokens // self.block_size * step]
        return hashes[step - 1 :: step]

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name].request
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            known = request.num_tokens + request.num_output_placeholders
            if not self.is_async or request.num_computed_tokens < known:
                continue
            guesses = len(output.scheduled_spec_decode_tokens.get(name, ()))
            request.num_output_placeholders += 1 + guesses
            request.spec_token_ids = [-1]

    def _preempt(self, job: Job) -> None:
        request = job.request
        self.blocks.release(job.blocks)
        job.blocks = []
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        assert self.planner.requires_kv_delivery  # so that output in flight is dropped
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        self.waiting.insert(0, job)
        self.preempted.append(job.name)

    def _process(self, step: Step) -> None:
        """`update_from_output`."""
        for name, count in step.output.num_scheduled_tokens.items():
            job = self.requests.get(name)
            if job is None:
                continue
            request = job.request
            request.num_in_flight_tokens -= count
            if request.num_stale_output_tokens > 0:
                request.num_stale_output_tokens -= count
                continue
            if request.is_finished():
                continue
            sampled = step.sampled[name]
            guesses = len(step.output.scheduled_spec_decode_tokens.get(name, ()))
            if guesses and sampled:
                rejected = guesses - (len(sampled) - 1)
                request.num_computed_tokens -= rejected
                if request.num_output_placeholders > 0:
                    request.num_output_placeholders -= rejected
            if not sampled:
                continue
            room = job.max_tokens - request.num_output_tokens
            request.append_output_token_ids(sampled[:room])
            if self.is_async:
                request.num_output_placeholders -= len(sampled[:room])
            else:
                request.spec_token_ids = [sampled[-1]]
            if request.num_output_tokens >= job.max_tokens:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                self.running.remove(job)
                self._free_request(job)
        told = step.told
        if told is None:
            return
        self.planner.update_connector_output(told)
        for name in sorted(told.finished_sending or ()):
            if name not in self.held:
                raise FaultError(f"{name} is reported and not held")
            self.held.remove(name)
            self.blocks.release(self.requests.pop(name).blocks)

    def _free_request(self, job: Job) -> None:
        computed = -(-job.request.num_computed_tokens // self.block_size)
        held, told = self.planner.request_finished_all_groups(job.request, (job.blocks[:computed],))
        if (told is not None) != job.was_scheduled:
            raise FaultError(f"{job.name}: the client is told {told}")
        self.finished.add(job.name)
        if held:
            self.held.add(job.name)
        else:
            self.blocks.release(job.blocks)
            del self.requests[job.name]

    # --- the model runners ----------------------------------------------------------------

    def _execute(self, step: Step) -> None:
        blocking = self.fake.counters().blocking_calls
        if self.is_v2:
            self._execute_v2(step)
        else:
            self._execute_v1(step)
        if self.fake.counters().blocking_calls != blocking:
            raise FaultError("the engine's thread waits for the device")
        if self.chance("synchronize"):
            self.fake.synchronize(self.stream)

    def _execute_v1(self, step: Step) -> None:
        saver, told = self.saver, KVConnectorOutput()
        saver.handle_preemptions(step.metadata)
        self._zero(step)
        saver.bind_connector_metadata(step.metadata)
        saver.start_load_kv(None)
        self.time_passes()
        computes = bool(step.output.num_scheduled_tokens)
        if not computes:  # `kv_connector_no_forward`
            saver.wait_for_save()
        self._report(step, told)
        if computes:
            self._compute(step)  # the layer of hidden states is the draft model's
            if not self.chance("no save"):
                saver.wait_for_save()
        saver.clear_connector_metadata()
        self.time_passes()

    def _execute_v2(self, step: Step) -> None:
        saver, told = self.saver, KVConnectorOutput()
        self._zero(step)
        self.time_passes()
        saver.handle_preemptions(step.metadata)
        saver.bind_connector_metadata(step.metadata)
        self._compute(step)
        saver.start_load_kv(None)
        self.time_passes()
        saver.wait_for_save()
        self._report(step, told)
        saver.clear_connector_metadata()
        self.time_passes()

    def _report(self, step: Step, told: KVConnectorOutput) -> None:
        found = self.saver.get_transfer_results(step.output.finished_req_ids)
        told.finished_sending = found.finished_sending or None
        told.kv_connector_worker_meta = self.saver.build_connector_worker_meta()
        step.told = told

    def _zero(self, step: Step) -> None:
        if not self.zeroes_blocks or not step.to_zero:
            return
        zeros = bytes(ROW.size)
        rows = itertools.product(step.to_zero, range(len(LAYER_IDS)), range(self.block_size))
        self._launch([(self.paged.at(*row), zeros) for row in rows])

    def _launch(self, writes: list[tuple[int, bytes]]) -> None:
        """A kernel, its blocks in any order."""
        self.rng.shuffle(writes)
        self.fake.write(self.stream, writes, self.rng.randint(1, 8))

    def _compute(self, step: Step) -> None:
        """Enqueues what writes this step's rows, and samples."""
        writes: list[tuple[int, bytes]] = []
        for name, count in step.output.num_scheduled_tokens.items():
            job = self.requests[name]
            start, known = job.computed, len(job.tokens)
            inputs = list(job.tokens)
            sampled: list[int] = []
            if start + count > known:  # the last token and a guess
                assert start + count == known + 1
                inputs.append(self.rng.randrange(1000, 9000))
            if start + count >= known:
                sampled = [self.rng.randrange(1000, 9000)]
                if start + count > known and self.chance("accept"):
                    sampled.insert(0, inputs[-1])
            for position, digest in enumerate(digests(inputs[: start + count])):
                if position < start:
                    continue
                block = job.blocks[position // self.block_size]
                for layer in range(len(LAYER_IDS)):
                    row = ROW.pack(digest, position, LAYER_IDS[layer], step.epoch)
                    writes.append((self.paged.at(block, layer, position % self.block_size), row))
            job.tokens += sampled
            job.computed = min(start + count, len(job.tokens) - bool(sampled))
            step.sampled[name] = sampled
        if writes:
            self._launch(writes)

    # --- answers --------------------------------------------------------------------------

    def sample_written(
        self,
        path: str,
        token_ids: torch.Tensor,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        windows: Iterator[torch.Tensor],
        metadata: dict[str, str],
        **_: Any,
    ) -> Any:
        """In place of `write_sample`: every row is looked at."""
        name = metadata["request_id"]
        job = self._answered(name, "sample")
        request = job.request
        if job.aborted:
            raise FaultError(f"{name} was aborted and has a sample")
        tokens = list(request.all_token_ids)[:-1] if job.with_outputs else request.prompt_token_ids
        if token_ids.tolist() != tokens or shape[0] != len(tokens):
            raise FaultError(f"{name}: the sample is of {token_ids.tolist()}, must be {tokens}")
        found = torch.cat([window.clone() for window in windows])
        epoch = int(metadata["weights_epoch"])
        expected = [
            [ROW.unpack(ROW.pack(digest, position, layer, epoch)) for layer in LAYER_IDS]
            for position, digest in enumerate(digests(tokens))
        ]
        if (rows := [[tuple(row) for row in token] for token in found.tolist()]) != expected:
            wrong = [i for i, row in enumerate(rows) if row != expected[i]]
            raise FaultError(f"{name}: rows {wrong} of {len(rows)} are wrong")
        return SimpleNamespace(non_finite_rows=0)

    def refused(self, path: str, name: str, reason: str, detail: str, **_: Any) -> None:
        job = self._answered(name, reason)
        expected = {
            "aborted": job.aborted,
            "reset": self.epoch > 0,
        }
        if not expected.get(reason, False):
            raise FaultError(f"{name} is refused: {reason}: {detail}")

    def _answered(self, name: str, answer: str) -> Job:
        if name in self.answers:
            raise FaultError(f"{name} is answered twice: {self.answers[name]}, {answer}")
        self.answers[name] = answer
        self.counts[answer] += 1
        return self.jobs[name]


def digests(tokens: list[int]) -> list[int]:
    """Of the prefix that ends with each token."""
    found, digest = [], 0
    for token in tokens:
        digest = zlib.crc32(token.to_bytes(4, "little"), digest)
        found.append(digest >> 1)
    return found


def replay(fake: ModuleType, order: str, seed: int, folder: Path) -> tuple[str, Counter[str]]:
    """What went wrong in one run, empty where nothing did; and what it had of each kind."""
    run = Replay(fake, order, seed, folder)
    fault = ""
    try:
        run.run()
    except (FaultError, Exception) as error:
        fault = f"{type(error).__name__}: {error}"
    run.close()
    return fault, run.counts
