"""Whose rows are in a sample: many random requests on one engine, each row known in advance."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("vllm")

from hidden_cache import SampleRefusedError, load_hidden_states
from hidden_cache.sample_file import error_path, lock_path, sample_name
from tests.integration import encoding, engine

pytestmark = pytest.mark.engine

BLOCK = 32
CHUNK = 2 * BLOCK
# Few enough that running requests take each other's blocks away.
NUM_BLOCKS = 26
# Four times the rows that these hold: none is refused for want of room, and most of what finished
# requests leave behind is evicted before the end.
POOL_BYTES = 4 * NUM_BLOCKS * BLOCK * len(encoding.LAYER_IDS) * encoding.HIDDEN * 4
# What a request that is to be aborted would generate: it never gets there by itself.
ENDLESS = 160
AT_ONCE = 24
# That many come at once in the beginning, all alike: they fill all blocks, then each wants one
# more, so that preemptions are no matter of luck.
RUSH = 8
# More requests, or others.
REQUESTS = int(os.environ.get("HSCACHE_REQUESTS", "100"))
SEED = int(os.environ.get("HSCACHE_SEED", "0"))


@dataclass(slots=True)
class Plan:
    """A request to come, which may be aborted: before the engine begins with it, in its prefill, or
    when so many tokens have been generated."""

    prompt: list[int]
    max_tokens: int
    include_output_tokens: bool
    cache_salt: str | None
    abort: Literal["at once", "when begun"] | int | None = None


@dataclass(slots=True)
class Sent:
    plan: Plan
    path: str
    tokens_seen: int = 0
    aborted: bool = False
    output: Any = None

    def is_begun(self) -> bool:
        """Whether a reader would find somebody to wait for."""
        return os.path.exists(lock_path(self.path))

    def is_to_be_aborted(self) -> bool:
        match self.plan.abort:
            case None:
                return False
            case "at once":
                return True
            case "when begun":
                return self.is_begun()
            case tokens:
                return self.tokens_seen >= tokens


def draw_plans(draw: random.Random, count: int) -> list[Plan]:
    """Prompts with common beginnings, and with common middles behind different beginnings, so that
    equal tokens at equal positions do not make equal rows."""

    def tokens(count: int) -> list[int]:
        return draw.choices(range(encoding.VOCABULARY), k=count)

    heads = [tokens(CHUNK) for _ in range(4)]
    middles = [tokens(400) for _ in range(3)]
    plans = []
    for _ in range(count - RUSH):
        tail = tokens(draw.choice([1, 7, 40, 136]))
        shared = draw.choice(heads) + draw.choice(middles)[: draw.randrange(400)]
        prompt = draw.choice([shared + tail] * 4 + [shared[:BLOCK] + tail, tail])
        generated = draw.randint(1, 20)
        if len(prompt) > BLOCK and draw.random() < 0.6:
            prompt, generated = prompt[: fits_with_room_to_grow(len(prompt))], 20
        plan = Plan(prompt, generated, draw.random() < 0.4, draw.choice([None, None, "a", "b"]))
        if draw.random() < 0.25:
            plan.max_tokens = ENDLESS
            plan.abort = draw.choice(["at once", "when begun", draw.randint(1, 60)])
        plans.append(plan)
    rush = [
        Plan(tokens(fits_with_room_to_grow(5 * BLOCK)), 20, draw.random() < 0.5, None)
        for _ in range(RUSH)
    ]
    return rush + plans


def fits_with_room_to_grow(length: int) -> int:
    """A length below that fills its last block but for a few tokens, fewer than are generated:
    requests that were admitted while there was room want another block when there is none."""
    return length // BLOCK * BLOCK - 14


class Client:
    """Sends requests and aborts some of them while the engine works."""

    def __init__(self, llm: Any, samples: Path) -> None:
        self.engine = llm.llm_engine
        self.samples = samples
        self.sent: dict[str, Sent] = {}

    def send(self, plan: Plan) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=plan.prompt)
        if plan.cache_salt is not None:
            prompt["cache_salt"] = plan.cache_salt
        wanted = {"include_output_tokens": plan.include_output_tokens}
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=plan.max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": wanted},
        )
        name = f"request-{len(self.sent)}"
        # The engine's own name of the request is another one, and the sample has that.
        own_name = self.engine.add_request(name, prompt, sampling)
        self.sent[name] = Sent(plan, str(self.samples / sample_name(own_name)))

    def step(self) -> None:
        for output in self.engine.step():
            sent = self.sent[output.request_id]
            sent.tokens_seen = len(output.outputs[0].token_ids)
            if output.finished:
                sent.output = output

    def abort_due(self) -> None:
        for name, sent in self.sent.items():
            if not sent.aborted and sent.is_to_be_aborted():
                sent.aborted = True
                self.engine.abort_request([name])

    def unfinished(self) -> list[Sent]:
        return [s for s in self.sent.values() if s.output is None and not s.aborted]


def preemptions(llm: Any) -> int:
    return int({m.name: m for m in llm.get_metrics()}["vllm:num_preemptions"].value)


def all_blocks_are_free(llm: Any) -> bool:
    """Whether every block comes back; the last ones do shortly after their samples appear."""
    deadline = time.monotonic() + 60
    while not llm.reset_prefix_cache():  # refused as long as somebody holds a block
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples")


@pytest.fixture(scope="module")
def llm(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    llm = start(samples, tmp_path_factory.mktemp("model"))
    yield llm
    engine.stop(llm)


def start(samples: Path, model: Path) -> Any:
    return encoding.start(
        model,
        encoding.hidden_cache_connector(
            samples, hscache_pool_bytes=POOL_BYTES, hscache_chunk_size=CHUNK
        ),
        block_size=BLOCK,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=768,
        max_num_batched_tokens=128,
    )


def check_finished(sent: Sent) -> int:
    """The sample is this request's, and nothing else is beside it; returns its rows from the pool.

    What was generated is foretold, too: the engine had the KV of this prompt and of no other.
    """
    plan = sent.plan
    generated = encoding.expected_output(plan.prompt, plan.max_tokens)
    assert list(sent.output.outputs[0].token_ids) == generated
    assert engine.path_of(sent.output) == sent.path
    tokens = plan.prompt + (generated[:-1] if plan.include_output_tokens else [])
    metadata = encoding.check_sample(sent.path, tokens)
    assert not os.path.exists(error_path(sent.path))
    return int(metadata["tokens_from_pool"])


def check_aborted(sent: Sent) -> bool:
    """There is no sample, but a reason; returns False for one that the engine never began with,
    which then has left nothing."""
    if sent.plan.abort == "at once" and not sent.is_begun():
        assert not os.path.exists(sent.path)
        assert not os.path.exists(error_path(sent.path))
        return False
    with pytest.raises(SampleRefusedError) as refused:
        load_hidden_states(sent.path, timeout=30)
    assert refused.value.reason == "aborted"
    assert refused.value.detail
    assert not os.path.exists(sent.path)
    return True


def test_every_sample_holds_the_rows_of_its_own_request(llm: Any, samples: Path) -> None:
    print(f"HSCACHE_SEED={SEED} HSCACHE_REQUESTS={REQUESTS}")  # shown when it fails
    draw = random.Random(SEED)
    plans = draw_plans(draw, REQUESTS)
    client = Client(llm, samples)
    for plan in plans[:RUSH]:
        client.send(plan)
    del plans[:RUSH]
    while plans or client.unfinished():
        while plans and len(client.unfinished()) < AT_ONCE and draw.random() < 0.7:
            client.send(plans.pop())
        client.abort_due()
        if client.unfinished():
            client.step()

    # Blocks free means that the engine has said its last word to the connector about all of them.
    assert all_blocks_are_free(llm)
    aborted = [sent for sent in client.sent.values() if sent.aborted]
    finished = [sent for sent in client.sent.values() if not sent.aborted]
    from_pool = sum([check_finished(sent) for sent in finished])
    begun = [sent for sent in aborted if check_aborted(sent)]
    # It happened, what this test is about.
    assert len(finished) > REQUESTS // 2
    assert begun
    assert from_pool > 0
    assert preemptions(llm) > 0

    left = {path.name for path in samples.iterdir()}
    for sent in finished:
        left -= {os.path.basename(sent.path), os.path.basename(lock_path(sent.path))}
    for sent in begun:
        name = os.path.basename(sent.path)
        left -= {os.path.basename(lock_path(name)), os.path.basename(error_path(name))}
    assert not left


def test_rows_are_shared_under_one_cache_salt_only(llm: Any) -> None:
    """The rows would be equal: only the count of those that came out of the pool tells."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = random.Random(1).choices(range(encoding.VOCABULARY), k=3 * CHUNK + 5)
    shared = []
    for salt in ("mine", "theirs", "mine", None, None):
        (output,) = llm.generate(
            TokensPrompt(prompt_token_ids=prompt, **({} if salt is None else {"cache_salt": salt})),
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            use_tqdm=False,
        )
        path = output.kv_transfer_params["hidden_states_path"]
        shared.append(int(encoding.check_sample(path, prompt)["tokens_from_pool"]))
    assert shared == [0, 0, 3 * CHUNK, 0, 3 * CHUNK]
