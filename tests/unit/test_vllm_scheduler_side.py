"""What the scheduler's side decides, on vLLM's own requests without an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hidden_cache.config import HiddenCacheConfig
from hidden_cache.files import sample_name

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from hidden_cache.integrations.vllm.messages import SaveOrder, StepMetadata
from hidden_cache.integrations.vllm.options import ConnectorOptions, EngineShape
from hidden_cache.integrations.vllm.scheduler import SchedulerSide

HASH_BLOCK = 4
CHUNK = 8
FOLDER = "/data/hidden-states"
SHAPE = EngineShape(
    model="m", layer_ids=(1, 2), group_id=1, hash_block_size=HASH_BLOCK, namespace=b"n:"
)
BLOCKS = ([90, 91], [5, 6, 7])  # of two groups; the hidden states are in the second


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


def schedule(side: SchedulerSide, *new: Request) -> StepMetadata:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(r, BLOCKS) for r in new]
    return side.build_connector_meta(output)


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
    assert (news.new_paths, news.refusals) == ({}, [])
    (order,) = news.saves
    return order


def refused(side: SchedulerSide, request: Request) -> tuple[str, str]:
    schedule(side, request)
    assert finish(side, request) == (False, {"hidden_states_path": f"{FOLDER}/r.safetensors"})
    assert not side.has_held_blocks()
    news = schedule(side)
    assert news.saves == []
    (refusal,) = news.refusals
    assert (refusal.request_id, refusal.path) == ("r", f"{FOLDER}/r.safetensors")
    return refusal.reason, refusal.detail


# What is saved


@pytest.mark.parametrize("prompt", [1, 3, 4, 8, 9, 20])
@pytest.mark.parametrize("generated", [1, 5])
def test_the_prompts_rows_are_saved(side: SchedulerSide, prompt: int, generated: int) -> None:
    order = saved(side, make_request(prompt, generated))
    assert order.num_tokens == prompt
    assert order.token_ids == list(range(100, 100 + prompt))
    assert order.block_ids == [5, 6, 7]
    assert order.chunks[-1].end == prompt
    keys = [chunk.key for chunk in order.chunks]
    assert keys[: prompt // CHUNK] == [b"n:hash 1", b"n:hash 3"][: prompt // CHUNK]
    assert keys[prompt // CHUNK :] == [None] * (prompt % CHUNK > 0)


def test_output_tokens_are_included_but_for_the_last(side: SchedulerSide) -> None:
    order = saved(side, make_request(20, 5, include_output_tokens=True))
    assert order.token_ids == [*range(100, 120), *range(900, 904)]
    assert order.num_tokens == 24
    assert [chunk.key for chunk in order.chunks] == [b"n:hash 1", b"n:hash 3", b"n:hash 5"]


def test_output_tokens_are_left_out_when_asked_so(side: SchedulerSide) -> None:
    assert saved(side, make_request(20, 5, include_output_tokens=False)).num_tokens == 20


def test_a_request_without_hashes_is_saved_without_keys(side: SchedulerSide) -> None:
    order = saved(side, make_request(hashed=False))
    assert [(chunk.end, chunk.key) for chunk in order.chunks] == [(8, None), (16, None), (20, None)]


def test_a_prompt_of_embeddings_has_rows_and_no_ids(side: SchedulerSide) -> None:
    order = saved(side, make_request(None, 3, embeddings=12))
    assert (order.num_tokens, order.token_ids) == (12, [])
    assert order.chunks[-1].end == 12


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
    (order,) = schedule(side).saves
    blocks[1].clear()
    request.append_output_token_ids(7)
    assert order.block_ids == [5, 6, 7]
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
    assert (news.new_paths, news.saves, news.refusals) == ({}, [], [])


# Paths


def test_a_path_is_announced_when_its_request_is_first_scheduled(side: SchedulerSide) -> None:
    requests = [make_request(request_id=name) for name in ("a", "b")]
    news = schedule(side, *requests)
    assert news.new_paths == {name: f"{FOLDER}/{name}.safetensors" for name in ("a", "b")}
    assert schedule(side).new_paths == {}


@pytest.mark.parametrize("request_id", ["../../etc/passwd", "a/b", "..", "x" * 300, "", "é\n"])
def test_a_path_is_inside_the_folder_whatever_the_id_says(
    side: SchedulerSide, request_id: str
) -> None:
    request = make_request(request_id=request_id)
    (path,) = schedule(side, request).new_paths.values()
    assert os.path.dirname(os.path.realpath(path)) == FOLDER
    assert os.path.basename(path) == sample_name(request_id)
    assert finish(side, request) == (True, {"hidden_states_path": path})


def test_a_resumed_request_that_is_listed_as_new_again_keeps_its_path(side: SchedulerSide) -> None:
    request = make_request()
    schedule(side, request)
    assert schedule(side, request).new_paths == {}
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
    assert schedule(choosing, request).new_paths == {"r": expected}
    assert finish(choosing, request) == (True, {"hidden_states_path": expected})
    assert schedule(choosing).saves[0].path == expected


def test_a_path_that_a_client_chose_is_ignored_where_that_is_off(
    side: SchedulerSide, tmp_path: Path
) -> None:
    request = make_request(hidden_states_path=str(tmp_path / "mine"))
    assert schedule(side, request).new_paths == {"r": f"{FOLDER}/r.safetensors"}


def test_two_live_requests_never_share_a_path(
    choosing: SchedulerSide, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (make_request(request_id=n, hidden_states_path="mine") for n in ("one", "other"))
    assert schedule(choosing, one, other).new_paths == {
        "one": str(tmp_path / "mine"),
        "other": f"{FOLDER}/other.safetensors",
    }
    assert "which another one has" in caplog.text
    finish(choosing, one)
    again = make_request(request_id="again", hidden_states_path="mine")
    assert schedule(choosing, again).new_paths == {"again": str(tmp_path / "mine")}


def test_a_finished_requests_id_may_come_again(side: SchedulerSide) -> None:
    for _ in range(2):
        request = make_request()
        assert schedule(side, request).new_paths == {"r": f"{FOLDER}/r.safetensors"}
        assert finish(side, request)[0]
        side.blocks_released({"r"})


# Steps and blocks


def test_every_step_has_its_own_number_and_news(side: SchedulerSide) -> None:
    steps = [schedule(side).step for _ in range(4)]
    assert steps == sorted(set(steps))
    first, second = make_request(request_id="a"), make_request(request_id="b")
    schedule(side, first, second)
    finish(side, first)
    assert [order.request_id for order in schedule(side).saves] == ["a"]
    finish(side, second)
    assert [order.request_id for order in schedule(side).saves] == ["b"]


def test_blocks_are_held_until_they_are_released(side: SchedulerSide) -> None:
    assert not side.has_held_blocks()
    for name in ("a", "b"):
        request = make_request(request_id=name)
        schedule(side, request)
        finish(side, request)
    assert side.has_held_blocks()
    side.blocks_released(None)
    side.blocks_released({"a"})
    assert side.has_held_blocks()
    side.blocks_released({"b", "unknown"})
    assert not side.has_held_blocks()
