"""What the scheduler's side decides, on vLLM's own requests without an engine."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.keys import make_namespace
from hidden_cache.sample_file import sample_name

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from hidden_cache.integrations.vllm.messages import (
    Beginning,
    Progress,
    Refusal,
    Rows,
    SaveOrder,
    StepMetadata,
)
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape
from hidden_cache.integrations.vllm.scheduler import SchedulerSide

HASH_BLOCK = 4
CHUNK = 8
BLOCK = 8
FOLDER = "/data/hidden-states"
SHAPE = EngineShape(
    model="m",
    layer_ids=(1, 2),
    group_id=1,
    hash_block_size=HASH_BLOCK,
    block_size=BLOCK,
    identity=(("model", "m"),),
)
BLOCKS = ([90, 91], [5, 6, 7])  # of two groups; the hidden states are in the second
NAMESPACES = [make_namespace(model="m", weights_epoch=epoch) for epoch in range(2)]


@pytest.fixture
def side() -> SchedulerSide:
    config = HiddenCacheConfig(chunk_size=CHUNK)
    return SchedulerSide(SHAPE, ConnectorOptions(shared_storage_path=FOLDER), config)


def block_hashes(request: Request) -> list[bytes]:
    """The hashes of the full blocks that have none yet, as vLLM's hasher gives them."""
    known, full = len(request.block_hashes), request.num_tokens // HASH_BLOCK
    return [f"hash {i}".encode() for i in range(known, full)]


def make_request(
    prompt: int | None = 20,
    generated: int = 1,
    *,
    request_id: str = "r",
    status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED,
    computed: int | None = None,
    hashed: bool = True,
    embeddings: int | None = None,
    **kv_transfer_params: Any,
) -> Request:
    """A finished request: a prompt of `prompt` tokens and `generated` after it."""
    extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
    request = Request(
        request_id,
        None if prompt is None else list(range(100, 100 + prompt)),
        SamplingParams(max_tokens=99, extra_args=extra),
        None,
        prompt_embeds=None if embeddings is None else torch.zeros(embeddings, 4),
        block_hasher=block_hashes if hashed else None,
    )
    request.append_output_token_ids(list(range(900, 900 + generated)))
    request.status = status
    # Each step computes the token that was sampled last, but for the very last one.
    request.num_computed_tokens = request.num_tokens - 1 if computed is None else computed
    return request


def schedule(
    side: SchedulerSide,
    *new: Request,
    tokens: dict[str, int] | None = None,
    blocks: Sequence[list[int]] = BLOCKS,
    preempted: Sequence[str] = (),
    resumed: Sequence[Request] = (),
) -> StepMetadata:
    """A step's news, in which so many tokens of each request are computed."""
    output = SchedulerOutput.make_empty()
    for request in new:
        if request.request_id not in side._live:
            side.on_new_request(request)
    output.scheduled_new_reqs = [NewRequestData.from_request(r, BLOCKS) for r in new]
    cached = output.scheduled_cached_reqs
    cached.req_ids = [request.request_id for request in resumed]
    cached.resumed_req_ids = set(cached.req_ids)
    cached.num_computed_tokens = [request.num_computed_tokens for request in resumed]
    output.preempted_req_ids = set(preempted)
    output.num_scheduled_tokens = tokens or {}
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=set(tokens or {}),
        resolve_block_ids=lambda _: tuple(blocks),
        boundary_state_offloads={},
    )
    return side.build_connector_meta(output)


def paths_of(news: StepMetadata) -> dict[str, str]:
    """Of the requests that begin."""
    return {name: beginning.path for name, beginning in news.beginnings.items()}


def read_up_to(
    side: SchedulerSide, step: int, released: Sequence[str] = (), answered: Sequence[str] = ()
) -> None:
    """The workers tell that nothing is read any more that was told up to that step."""
    progress = Progress(step, {f"{FOLDER}/{name}.safetensors" for name in answered})
    side.update_connector_output(
        KVConnectorOutput(finished_sending=set(released), kv_connector_worker_meta=progress)
    )


def finish(
    side: SchedulerSide, request: Request, blocks: Sequence[list[int]] = BLOCKS
) -> tuple[bool, dict[str, Any] | None]:
    return side.request_finished(request, tuple(blocks))


def saved(side: SchedulerSide, request: Request) -> SaveOrder:
    """Runs a request through: the order that the worker gets."""
    schedule(side, request)
    held, told = finish(side, request)
    assert held
    assert told == {"hidden_states_path": f"{FOLDER}/r.safetensors"}
    news = schedule(side)
    assert news.beginnings == {}
    (order,) = news.endings
    assert isinstance(order, SaveOrder)
    return order


def keys_up_to(chunks: int, *, epoch: int = 0) -> list[bytes]:
    return [NAMESPACES[epoch] + b"hash %d" % (2 * place + 1) for place in range(chunks)]


def rows_of(order: SaveOrder) -> Rows:
    assert order.rows is not None
    assert order.rows.num_tokens == order.num_tokens
    return order.rows


def keys_of(rows: Rows) -> list[Hashable]:
    return [chunk.key for chunk in rows.chunks]


def refused(side: SchedulerSide, request: Request) -> tuple[str, str]:
    schedule(side, request)
    assert finish(side, request) == (False, {"hidden_states_path": f"{FOLDER}/r.safetensors"})
    assert not side.has_pending_block_frees()
    (refusal,) = schedule(side).endings
    assert isinstance(refusal, Refusal)
    assert (refusal.request_id, refusal.path) == ("r", f"{FOLDER}/r.safetensors")
    return refusal.reason, refusal.detail


# What is saved


@pytest.mark.parametrize("prompt", [1, 3, 4, 8, 9, 20])
@pytest.mark.parametrize("generated", [1, 5])
def test_the_prompts_rows_are_saved(side: SchedulerSide, prompt: int, generated: int) -> None:
    order = saved(side, make_request(prompt, generated))
    assert order.num_tokens == prompt
    assert order.token_ids == list(range(100, 100 + prompt))
    rows = rows_of(order)
    assert (rows.first_token, rows.block_ids) == (0, [5, 6, 7][: -(-prompt // BLOCK)])
    assert keys_of(rows) == keys_up_to(prompt // CHUNK)


def test_output_tokens_are_included_but_for_the_last(side: SchedulerSide) -> None:
    order = saved(side, make_request(20, 5, include_output_tokens=True))
    assert order.token_ids == [*range(100, 120), *range(900, 904)]
    assert order.num_tokens == 24
    assert keys_of(rows_of(order)) == keys_up_to(3)


def test_output_tokens_are_left_out_when_asked_so(side: SchedulerSide) -> None:
    assert saved(side, make_request(20, 5, include_output_tokens=False)).num_tokens == 20


def test_a_request_without_hashes_is_saved_without_keys(side: SchedulerSide) -> None:
    assert rows_of(saved(side, make_request(hashed=False))).chunks == []


def test_a_prompt_of_embeddings_has_rows_and_no_ids(side: SchedulerSide) -> None:
    order = saved(side, make_request(None, 3, embeddings=12))
    assert (order.num_tokens, order.token_ids) == (12, [])
    assert rows_of(order).block_ids == [5, 6]


def test_a_prompt_of_embeddings_has_no_ids_with_output_either(side: SchedulerSide) -> None:
    request = make_request(None, 3, embeddings=12, include_output_tokens=True)
    order = saved(side, request)
    assert (order.num_tokens, order.token_ids) == (14, [])


@pytest.mark.parametrize(
    "status",
    [
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_REPETITION,
    ],
)
def test_a_request_that_ended_well_is_saved(side: SchedulerSide, status: RequestStatus) -> None:
    assert saved(side, make_request(status=status)).num_tokens == 20


def test_the_order_does_not_change_with_the_request(side: SchedulerSide) -> None:
    request = make_request()
    blocks = [[90], [5, 6, 7]]
    schedule(side, request)
    finish(side, request, blocks)
    (order,) = schedule(side).endings
    assert isinstance(order, SaveOrder)
    blocks[1].clear()
    request.append_output_token_ids(7)
    assert rows_of(order).block_ids == [5, 6, 7]
    assert order.token_ids == list(range(100, 120))


# What is refused


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_an_aborted_request_is_refused(side: SchedulerSide, status: RequestStatus) -> None:
    reason, detail = refused(side, make_request(status=status))
    assert reason == "aborted"
    assert status.name in detail


def test_a_prompt_that_was_not_wholly_computed_is_refused(side: SchedulerSide) -> None:
    reason, detail = refused(side, make_request(computed=19))
    assert (reason, detail) == (
        "incomplete",
        "the request ended after 19 of 20 tokens were computed",
    )


def test_output_that_was_not_wholly_computed_is_refused(side: SchedulerSide) -> None:
    request = make_request(20, 5, computed=23, include_output_tokens=True)
    assert refused(side, request)[0] == "incomplete"


def test_a_request_that_was_never_scheduled_is_nobodys(side: SchedulerSide) -> None:
    request = make_request(status=RequestStatus.FINISHED_ABORTED, computed=0)
    assert finish(side, request, ([], [])) == (False, None)
    news = schedule(side)
    assert (news.beginnings, news.endings) == ({}, [])


# Paths


def test_a_path_is_announced_when_its_request_is_first_scheduled(side: SchedulerSide) -> None:
    requests = [make_request(request_id=name) for name in ("a", "b")]
    news = schedule(side, *requests)
    assert news.beginnings == {
        name: Beginning(f"{FOLDER}/{name}.safetensors", 20) for name in ("a", "b")
    }
    assert paths_of(schedule(side)) == {}


@pytest.mark.parametrize("request_id", ["../../etc/passwd", "a/b", "..", "x" * 300, "", "é\n"])
def test_a_path_is_inside_the_folder_whatever_the_id_says(
    side: SchedulerSide, request_id: str
) -> None:
    request = make_request(request_id=request_id)
    (path,) = paths_of(schedule(side, request)).values()
    assert os.path.dirname(os.path.realpath(path)) == FOLDER
    assert os.path.basename(path) == sample_name(request_id)
    assert finish(side, request) == (True, {"hidden_states_path": path})


def test_a_resumed_request_that_is_listed_as_new_again_keeps_its_path(side: SchedulerSide) -> None:
    request = make_request()
    schedule(side, request)
    assert paths_of(schedule(side, request)) == {}
    held, told = finish(side, request)
    assert held
    assert told == {"hidden_states_path": f"{FOLDER}/r.safetensors"}


# Paths that clients choose


@pytest.fixture
def choosing(tmp_path: Path) -> SchedulerSide:
    """A side that lets clients choose paths inside `tmp_path`."""
    options = ConnectorOptions(FOLDER, allow_custom_save_path=True, custom_path_root=str(tmp_path))
    return SchedulerSide(SHAPE, options, HiddenCacheConfig(chunk_size=CHUNK))


def test_a_path_that_a_client_chose_is_announced_told_and_ordered(
    choosing: SchedulerSide, tmp_path: Path
) -> None:
    request = make_request(hidden_states_path=str(tmp_path / "a" / "mine"))
    expected = str(tmp_path / "a" / "mine")
    assert paths_of(schedule(choosing, request)) == {"r": expected}
    assert finish(choosing, request) == (True, {"hidden_states_path": expected})
    assert schedule(choosing).endings[0].path == expected


def test_a_path_that_a_client_chose_is_ignored_where_that_is_off(
    side: SchedulerSide, tmp_path: Path
) -> None:
    request = make_request(hidden_states_path=str(tmp_path / "mine"))
    assert paths_of(schedule(side, request)) == {"r": f"{FOLDER}/r.safetensors"}


def test_two_live_requests_never_share_a_path(
    choosing: SchedulerSide, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (make_request(request_id=n, hidden_states_path="mine") for n in ("one", "other"))
    assert paths_of(schedule(choosing, one, other)) == {
        "one": str(tmp_path / "mine"),
        "other": f"{FOLDER}/other.safetensors",
    }
    assert "which another one has" in caplog.text
    # Who waits for a sample must not find another's in its place.
    finish(choosing, one)
    early = make_request(request_id="early", hidden_states_path="mine")
    assert paths_of(schedule(choosing, early)) == {"early": f"{FOLDER}/early.safetensors"}
    progress = Progress(0, {str(tmp_path / "mine")})
    choosing.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=progress))
    again = make_request(request_id="again", hidden_states_path="mine")
    assert paths_of(schedule(choosing, again)) == {"again": str(tmp_path / "mine")}


def test_an_id_that_comes_again_before_its_sample_is_there_gets_another_path(
    side: SchedulerSide,
) -> None:
    paths: list[str] = []
    for _ in range(3):
        request = make_request()
        paths += paths_of(schedule(side, request)).values()
        finish(side, request)
    assert paths == [f"{FOLDER}/{name}.safetensors" for name in ("r", "r-2", "r-3")]


def test_a_finished_requests_id_may_come_again(side: SchedulerSide) -> None:
    for _ in range(2):
        request = make_request()
        assert paths_of(schedule(side, request)) == {"r": f"{FOLDER}/r.safetensors"}
        assert finish(side, request)[0]
        read_up_to(side, -1, ["r"], answered=["r"])


# Steps and blocks


def test_every_step_has_its_own_number_and_news(side: SchedulerSide) -> None:
    steps = [schedule(side).step for _ in range(4)]
    assert steps == sorted(set(steps))
    first, second = make_request(request_id="a"), make_request(request_id="b")
    schedule(side, first, second)
    finish(side, first)
    assert [ending.request_id for ending in schedule(side).endings] == ["a"]
    finish(side, second)
    assert [ending.request_id for ending in schedule(side).endings] == ["b"]


def test_blocks_are_held_until_they_are_released(side: SchedulerSide) -> None:
    assert not side.has_pending_block_frees()
    for name in ("a", "b"):
        request = make_request(request_id=name)
        schedule(side, request)
        finish(side, request)
    assert side.has_pending_block_frees()
    read_up_to(side, 0)
    read_up_to(side, 0, ["a"])
    assert side.has_pending_block_frees()
    read_up_to(side, 0, ["b", "unknown"])
    assert not side.has_pending_block_frees()


# Rows, step by step


def begun(prompt: int, **more: Any) -> Request:
    """A request of which nothing is computed."""
    return make_request(prompt, 0, status=RequestStatus.RUNNING, computed=0, **more)


def step(side: SchedulerSide, request: Request, count: int, *, new: bool = False) -> Rows | None:
    """Computes so many tokens; what is told of the request."""
    tokens = {"r": count}
    news = schedule(side, request, tokens=tokens) if new else schedule(side, tokens=tokens)
    request.num_computed_tokens += count
    return news.rows.get("r")


def test_whole_chunks_are_told_as_they_are_computed_and_the_prompts_tail_at_its_end(
    side: SchedulerSide,
) -> None:
    request = begun(20)
    assert step(side, request, 7, new=True) is None, "no whole chunk yet"
    first = step(side, request, 5)
    assert first is not None
    assert (first.num_tokens, first.first_token, first.block_ids) == (8, 0, [5])
    assert keys_of(first) == keys_up_to(2), "all that the prompt has"
    last = step(side, request, 8)
    assert last is not None
    assert (last.num_tokens, last.first_token, last.block_ids) == (20, 8, [6, 7])
    assert last.chunks == []
    request.append_output_token_ids(1)
    assert step(side, request, 2) is None, "the prompt's rows are all that is wanted"
    request.status = RequestStatus.FINISHED_STOPPED
    assert finish(side, request)[0], "they may be read still"
    (order,) = schedule(side).endings
    assert isinstance(order, SaveOrder)
    assert (order.num_tokens, order.rows) == (20, None)


def test_rows_of_output_are_told_once_their_tokens_are_accepted(side: SchedulerSide) -> None:
    request = begun(6, include_output_tokens=True)
    assert step(side, request, 6, new=True) is None
    told = None
    for token in range(4):
        request.append_output_token_ids(900 + token)
        # The engine also computes a token that it guesses, and takes that back.
        told = step(side, request, 2)
        request.num_computed_tokens -= 1
        if token < 2:
            assert told is None, f"{request.num_tokens} tokens are known, the last has no row"
        if told is not None:
            break
    assert told is not None
    assert (told.num_tokens, told.block_ids) == (8, [5])
    assert keys_of(told) == keys_up_to(1)


def test_after_a_preemption_rows_are_told_from_the_first_on_with_their_new_blocks(
    side: SchedulerSide,
) -> None:
    for again_as_new in (False, True):
        request = begun(20)
        step(side, request, 16, new=True)
        read_up_to(side, 99)
        request.num_computed_tokens = 0
        news = schedule(side, preempted=["r"])
        assert (news.preempted, news.weights_epoch) == (["r"], 0)
        blocks: tuple[list[int], ...] = ([], [30, 31, 32])
        if again_as_new:
            news = schedule(side, request, tokens={"r": 16}, blocks=blocks)
        else:
            news = schedule(side, resumed=[request], tokens={"r": 16}, blocks=blocks)
        assert news.beginnings == {}
        rows = news.rows["r"]
        assert (rows.num_tokens, rows.first_token, rows.block_ids) == (16, 0, [30, 31])
        assert rows.chunks == [], "its keys are those that were told"
        request.status = RequestStatus.FINISHED_ABORTED
        finish(side, request)
        read_up_to(side, 99, answered=["r"])


def test_a_preempted_request_that_was_aborted_since_is_told_too(side: SchedulerSide) -> None:
    request = begun(20)
    step(side, request, 16, new=True)
    request.status = RequestStatus.FINISHED_ABORTED
    finish(side, request, ([], []))
    assert schedule(side, preempted=["r"]).preempted == ["r"]


def test_kv_that_could_not_be_loaded_resets_the_pool(side: SchedulerSide) -> None:
    assert schedule(side).weights_epoch == 0
    side.update_connector_output(KVConnectorOutput(invalid_block_ids={3}))
    assert schedule(side).weights_epoch == 1


def test_running_requests_are_not_preempted_while_their_rows_are_read(side: SchedulerSide) -> None:
    request = begun(20)
    assert not side.has_pending_block_frees()
    news = schedule(side, request, tokens={"r": 16})
    assert side.has_pending_block_frees()
    read_up_to(side, news.step - 1)
    assert side.has_pending_block_frees()
    read_up_to(side, news.step)
    assert not side.has_pending_block_frees()


def test_an_aborted_requests_blocks_are_held_while_its_rows_are_read(side: SchedulerSide) -> None:
    for is_read in (True, False):
        request = begun(20)
        news = schedule(side, request, tokens={"r": 16})
        if not is_read:
            read_up_to(side, news.step)
        request.status = RequestStatus.FINISHED_ABORTED
        assert finish(side, request)[0] is is_read
        (refusal,) = schedule(side).endings
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.reported) == ("aborted", is_read)
        read_up_to(side, news.step, ["r"] if is_read else [])


@pytest.mark.parametrize("aborted", [False, True])
def test_no_request_gets_blocks_while_lost_ones_are_read(
    side: SchedulerSide, aborted: bool
) -> None:
    request = begun(20)
    news = schedule(side, request, tokens={"r": 16})
    other = make_request(request_id="other")
    assert side.local_hit(other, 0), "who runs has its blocks"
    request.status = RequestStatus.PREEMPTED  # by a reset of the prefix cache, which asks nobody
    if aborted:
        request.status = RequestStatus.FINISHED_ABORTED
        finish(side, request, ([], []))
    assert not side.local_hit(other, 0)
    read_up_to(side, news.step)
    assert side.local_hit(other, 0)


# KV that comes from elsewhere


@pytest.mark.parametrize("trusted", [False, True])
def test_tokens_beyond_the_engines_own_hits_are_told_to_be_foreign(trusted: bool) -> None:
    options = ConnectorOptions(shared_storage_path=FOLDER, rows_come_with_kv=trusted)
    side = SchedulerSide(SHAPE, options, HiddenCacheConfig(chunk_size=CHUNK))
    request = begun(20)
    side.local_hit(request, 4)
    request.num_computed_tokens = 12
    rows = schedule(side, request, tokens={"r": 8}).rows["r"]
    assert rows.foreign == (None if trusted else (4, 12))


def test_hits_on_blocks_that_came_from_elsewhere_before_are_foreign(side: SchedulerSide) -> None:
    first = begun(20)
    side.local_hit(first, 0)
    first.num_computed_tokens = 16
    assert schedule(side, first, tokens={"r": 4}).rows["r"].foreign == (0, 16)
    first.status = RequestStatus.FINISHED_STOPPED
    first.num_computed_tokens = 20
    finish(side, first)
    # The engine keeps the blocks in its prefix cache: now they are hits of its own.
    second = begun(20)
    side.local_hit(second, 16)
    second.num_computed_tokens = 16
    rows = schedule(side, second, tokens={"r": 4}, blocks=([], [5, 6, 9])).rows["r"]
    assert rows.foreign == (0, 16)
    second.num_computed_tokens = 20
    finish(side, second)
    # One of them is computed anew for somebody else, and is foreign no more.
    third = begun(20)
    side.local_hit(third, 0)
    schedule(side, third, tokens={"r": 20}, blocks=([], [6, 7, 8]))
    third.num_computed_tokens = 20
    finish(side, third, ([], [6, 7, 8]))
    for hits, foreign in ((16, (0, 8)), (8, (0, 8)), (0, None)):
        fourth = begun(20)
        side.local_hit(fourth, hits)
        fourth.num_computed_tokens = hits
        blocks: tuple[list[int], ...] = ([], [5, 6, 9])
        rows = schedule(side, fourth, tokens={"r": 20 - hits}, blocks=blocks).rows["r"]
        assert rows.foreign == foreign
        fourth.num_computed_tokens = 20
        finish(side, fourth)


def test_further_turns_of_a_session_leave_foreign_rows_foreign(side: SchedulerSide) -> None:
    request = begun(20)
    side.local_hit(request, 0)
    request.num_computed_tokens = 8
    assert schedule(side, request, tokens={"r": 4}).rows["r"].foreign == (0, 8)
    request.num_computed_tokens = 12
    assert schedule(side, request, tokens={"r": 8}).rows["r"].foreign == (0, 8)


def test_the_engines_own_hits_are_not_foreign(side: SchedulerSide) -> None:
    request = begun(20)
    side.local_hit(request, 12)
    request.num_computed_tokens = 12
    assert schedule(side, request, tokens={"r": 8}).rows["r"].foreign is None


# New weights


def test_after_a_reset_keys_are_others_and_rows_are_told_from_the_first_on(
    side: SchedulerSide,
) -> None:
    request = begun(20)
    assert schedule(side, request, tokens={"r": 8}).weights_epoch == 0
    request.num_computed_tokens = 8
    side.reset_cache()
    news = schedule(side, tokens={"r": 8})
    assert news.weights_epoch == 1
    assert news.rows["r"].first_token == 0
    assert keys_of(news.rows["r"]) == keys_up_to(2, epoch=1)


def test_a_hit_of_a_part_of_a_block_is_not_foreign(side: SchedulerSide) -> None:
    request = make_request(20, computed=12)
    side.whole_hit = lambda _: 12
    side.local_hit(request, 8)
    assert schedule(side, request, tokens={"r": 8}).rows["r"].foreign is None


def test_what_is_more_than_the_whole_hit_is_foreign_from_a_whole_block_on(
    side: SchedulerSide,
) -> None:
    """A longer hit elsewhere takes the place of the part of a block."""
    request = make_request(20, computed=16)
    side.whole_hit = lambda _: 12
    side.local_hit(request, 8)
    assert schedule(side, request, tokens={"r": 4}).rows["r"].foreign == (8, 16)


def test_a_path_is_nobody_elses_while_its_request_lives(
    choosing: SchedulerSide, tmp_path: Path
) -> None:
    one, other = (make_request(request_id=n, hidden_states_path="mine") for n in ("one", "other"))
    schedule(choosing, one)
    # It was refused at its beginning, and will be told its path when it ends.
    progress = Progress(0, {str(tmp_path / "mine")})
    choosing.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=progress))
    assert paths_of(schedule(choosing, other)) == {"other": f"{FOLDER}/other.safetensors"}


def test_who_waits_without_blocks_when_all_is_reset_begins_anew(side: SchedulerSide) -> None:
    request = begun(20)
    schedule(side, request, tokens={"r": 16})
    request.status = RequestStatus.PREEMPTED
    schedule(side, preempted=["r"])
    side.reset_cache()
    assert schedule(side).preempted == ["r"]
