"""What LMCache's `HiddenStateStore` promises, asked of LMCache's own class and of ours alike.

LMCache's class shows that a test states the contract; the same test then holds ours to it. What the
two do differently on purpose, who is evicted under pool pressure, is not asked here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hidden_cache

pytest.importorskip("lmcache", reason="LMCache is not installed: tools/requirements-lmcache.txt")

from lmcache.v1 import hidden_state_store
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

from hidden_cache.keys import TokenDatabaseAdapter

CHUNK = 4  # tokens
HIDDEN = 8
PROMPT = list(range(100, 116))  # four chunks

OURS = pytest.param(
    hidden_cache.HiddenStateStore,
    id="ours",
    marks=pytest.mark.skipif(
        not hasattr(hidden_cache.HiddenStateStore, "store_hidden_states"),
        reason="our store does not have LMCache's methods yet",
    ),
)
THEIRS = pytest.param(hidden_state_store.HiddenStateStore, id="lmcache")

MakeStore = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_settings_around_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith(("HSCACHE_", "LMCACHE_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(params=[THEIRS, OURS])
def make_store(request: pytest.FixtureRequest) -> Any:
    """Makes stores out of LMCache's settings, over LMCache's token database."""
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        config = engine_config(**settings)
        made.append(request.param(config, ChunkedTokenDatabase(config, METADATA)))
        return made[-1]

    yield make
    for store in made:
        store.close()


METADATA = LMCacheMetadata(
    model_name="m",
    world_size=1,
    local_world_size=1,
    worker_id=0,
    local_worker_id=0,
    kv_dtype=torch.bfloat16,
    kv_shape=(2, 2, CHUNK, 1, 16),
)


def engine_config(**settings: Any) -> Any:
    defaults = {
        "chunk_size": CHUNK,
        "enable_hidden_state_cache": True,
        "max_hidden_state_cpu_size": 0.01,
        "save_unfull_chunk": False,
    }
    return LMCacheEngineConfig.from_defaults(**{**defaults, **settings})


@pytest.fixture
def store(make_store: MakeStore) -> Any:
    return make_store()


def rows(count: int, hidden: int = HIDDEN, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))


def keys_of(token_ids: list[int], **settings: Any) -> list[Any]:
    """The keys that the KV side uses."""
    database = ChunkedTokenDatabase(engine_config(**settings), METADATA)
    return [key for _, _, key in database.process_tokens(tokens=token_ids)]


KEYS = keys_of(PROMPT)


class KvSide:
    """A storage manager that has the KV of some keys, and writes down what it is asked."""

    def __init__(self, present: list[Any]) -> None:
        self.present = present
        self.asked: list[Any] = []

    def contains(self, key: Any) -> str | None:
        self.asked.append(key)
        return "LocalCPUBackend" if key in self.present else None


def holds(store: Any, layer_idx: int = 0) -> list[bool]:
    return [store.has_chunk(key, layer_idx) for key in KEYS]


# Token ids


@pytest.mark.parametrize("make_ids", [list, torch.tensor])
@pytest.mark.parametrize("ask_ids", [list, torch.tensor])
def test_token_ids_are_a_list_or_a_tensor(
    store: Any, make_ids: Callable[..., Any], ask_ids: Callable[..., Any]
) -> None:
    given = rows(16)
    assert store.store_hidden_states(make_ids(PROMPT), given) == 4
    found = store.retrieve_hidden_states(ask_ids(PROMPT))
    assert torch.equal(found, given)


def test_a_tensor_of_int32_is_the_same_prompt(store: Any) -> None:
    store.store_hidden_states(torch.tensor(PROMPT, dtype=torch.int32), rows(16))
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(16))


@pytest.mark.parametrize("empty", [[], torch.tensor([], dtype=torch.int64)])
def test_no_tokens_are_no_chunks(store: Any, empty: Any) -> None:
    assert store.store_hidden_states(empty, rows(0)) == 0
    assert store.retrieve_hidden_states(empty) is None
    assert store.num_cached_chunks() == 0


def test_a_prompt_shorter_than_a_chunk_is_not_kept(store: Any) -> None:
    assert store.store_hidden_states(PROMPT[:3], rows(3)) == 0
    assert store.retrieve_hidden_states(PROMPT[:3]) is None


# What a store call says


def test_only_chunks_that_are_new_are_counted(store: Any) -> None:
    assert store.store_hidden_states(PROMPT[:8], rows(8)) == 2
    assert store.store_hidden_states(PROMPT[:8], rows(8)) == 0
    assert store.store_hidden_states(PROMPT, rows(16)) == 2
    assert store.num_cached_chunks() == 4


def test_a_chunk_that_is_there_keeps_its_rows(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16, seed=1))
    assert store.store_hidden_states(PROMPT, rows(16, seed=2)) == 0
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(16, seed=1))


def test_another_layer_of_the_same_chunk_is_new(store: Any) -> None:
    assert store.store_hidden_states(PROMPT, rows(16)) == 4
    assert store.store_hidden_states(PROMPT, rows(16), layer_idx=1) == 4
    assert store.store_hidden_states(PROMPT, rows(16), layer_idx=1) == 0
    assert store.num_cached_chunks() == 4


def test_two_prompts_share_their_common_prefix(store: Any) -> None:
    other = PROMPT[:8] + [7] * 8
    mine, others = rows(16, seed=1), rows(16, seed=2)
    others[:8] = mine[:8]
    assert store.store_hidden_states(PROMPT, mine) == 4
    assert store.store_hidden_states(other, others) == 2
    assert store.num_cached_chunks() == 6
    assert torch.equal(store.retrieve_hidden_states(PROMPT), mine)
    assert torch.equal(store.retrieve_hidden_states(other), others)


def test_the_same_tokens_behind_another_prefix_are_another_chunk(store: Any) -> None:
    assert store.store_hidden_states([1] * 4 + [9] * 4, rows(8, seed=1)) == 2
    assert store.store_hidden_states([2] * 4 + [9] * 4, rows(8, seed=2)) == 2
    found = store.retrieve_hidden_states([1] * 4 + [9] * 4)
    assert torch.equal(found, rows(8, seed=1))


# token_offset


def test_rows_may_start_behind_a_prefix_that_is_there(store: Any) -> None:
    given = rows(16)
    assert store.store_hidden_states(PROMPT[:8], given[:8]) == 2
    assert store.store_hidden_states(PROMPT, given[8:], token_offset=8) == 2
    assert torch.equal(store.retrieve_hidden_states(PROMPT), given)


@pytest.mark.parametrize(("offset", "first"), [(1, 1), (3, 1), (4, 1), (5, 2), (11, 3), (13, 4)])
def test_a_chunk_that_is_partly_covered_is_left_out(store: Any, offset: int, first: int) -> None:
    given = rows(16)
    assert store.store_hidden_states(PROMPT, given[offset:], token_offset=offset) == 4 - first
    assert holds(store) == [chunk >= first for chunk in range(4)]
    # What was left out comes later, and the rows of all chunks stand where they belong.
    assert store.store_hidden_states(PROMPT, given) == first
    assert torch.equal(store.retrieve_hidden_states(PROMPT), given)


def test_an_offset_of_the_whole_prompt_stores_nothing(store: Any) -> None:
    assert store.store_hidden_states(PROMPT, rows(0), token_offset=16) == 0
    assert store.num_cached_chunks() == 0


def test_rows_behind_a_prefix_that_is_not_there_wait_for_it(store: Any) -> None:
    given = rows(16)
    assert store.store_hidden_states(PROMPT, given[8:], token_offset=8) == 2
    assert store.num_cached_chunks() == 2
    assert store.retrieve_hidden_states(PROMPT) is None
    assert store.store_hidden_states(PROMPT[:8], given[:8]) == 2
    assert torch.equal(store.retrieve_hidden_states(PROMPT), given)


# What is refused


@pytest.mark.parametrize("shape", [(16,), (1, 16, HIDDEN), ()])
def test_rows_that_are_not_two_dimensional_are_refused(store: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        store.store_hidden_states(PROMPT, torch.zeros(shape))


@pytest.mark.parametrize(("offset", "count"), [(-1, 17), (-1, 16), (17, 0), (17, 16)])
def test_an_offset_outside_of_the_prompt_is_refused(store: Any, offset: int, count: int) -> None:
    with pytest.raises(ValueError, match=r".+"):
        store.store_hidden_states(PROMPT, rows(count), token_offset=offset)


@pytest.mark.parametrize(("offset", "count"), [(0, 15), (0, 17), (4, 16), (4, 11), (16, 1)])
def test_rows_that_do_not_fit_the_tokens_are_refused(store: Any, offset: int, count: int) -> None:
    with pytest.raises(ValueError, match=r".+"):
        store.store_hidden_states(PROMPT, rows(count), token_offset=offset)


def test_rows_of_no_width_are_refused(store: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        store.store_hidden_states(PROMPT, rows(16, 0))


def test_rows_are_counted_also_where_all_chunks_are_there(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    with pytest.raises(ValueError, match=r".+"):
        store.store_hidden_states(PROMPT, rows(12))


def test_a_refused_call_stores_nothing(store: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        store.store_hidden_states(PROMPT, rows(12))
    assert store.num_cached_chunks() == 0


@pytest.mark.parametrize("size", [0, -1.0, 1e-10])
def test_a_pool_of_no_bytes_is_refused(make_store: MakeStore, size: float) -> None:
    with pytest.raises(ValueError, match="max_hidden_state_cpu_size"):
        make_store(max_hidden_state_cpu_size=size)


# The allowlist


def test_layers_that_are_not_on_the_allowlist_are_dropped(make_store: MakeStore) -> None:
    store = make_store(hidden_state_layers=[0, 24])
    assert store.store_hidden_states(PROMPT, rows(16), layer_idx=1) == 0
    assert store.num_cached_chunks() == 0
    assert store.retrieve_hidden_states(PROMPT, layer_idx=1) is None
    assert store.store_hidden_states(PROMPT, rows(16), layer_idx=24) == 4


def test_an_empty_allowlist_drops_all(make_store: MakeStore) -> None:
    assert make_store(hidden_state_layers=[]).store_hidden_states(PROMPT, rows(16)) == 0


def test_the_allowlist_is_looked_at_before_shapes(make_store: MakeStore) -> None:
    store = make_store(hidden_state_layers=[0])
    assert store.store_hidden_states(PROMPT, torch.zeros(3), layer_idx=1, token_offset=99) == 0


# What comes out


def test_a_result_is_contiguous_float32_on_the_cpu(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16).to(torch.bfloat16))
    found = store.retrieve_hidden_states(PROMPT)
    assert (found.dtype, found.device.type, found.shape) == (torch.float32, "cpu", (16, HIDDEN))
    assert found.is_contiguous()
    assert not found.requires_grad


def test_float32_comes_back_bit_for_bit(store: Any) -> None:
    given = rows(16)
    given[0] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38, -1e-38])
    store.store_hidden_states(PROMPT, given)
    found = store.retrieve_hidden_states(PROMPT)
    assert torch.equal(found.view(torch.int32), given.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_come_back_as_the_exact_cast(store: Any, dtype: torch.dtype) -> None:
    given = (rows(16).double() * 1000).to(dtype)
    given[0] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 6e-8, 65504.0, 1e-30, -1.0])
    assert store.store_hidden_states(PROMPT, given) == 4
    found = store.retrieve_hidden_states(PROMPT)
    assert torch.equal(found.view(torch.int32), given.float().view(torch.int32))


@pytest.mark.parametrize(
    "make_view",
    [
        lambda full: full.t().contiguous().t(),  # columns first
        lambda full: full.repeat(1, 3)[:, HIDDEN : 2 * HIDDEN],  # rows apart
        lambda full: full.repeat_interleave(2, dim=1)[:, ::2],  # elements apart
        lambda full: full[:1].expand(16, HIDDEN),  # one row many times
    ],
    ids=["columns-first", "rows-apart", "elements-apart", "one-row"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_have_any_strides(
    store: Any, make_view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    given = make_view(rows(16).to(dtype))
    assert store.store_hidden_states(PROMPT, given) == 4
    assert torch.equal(store.retrieve_hidden_states(PROMPT), given.float())


def test_rows_may_require_a_gradient(store: Any) -> None:
    given = rows(16).requires_grad_()
    assert store.store_hidden_states(PROMPT, given) == 4
    assert not store.retrieve_hidden_states(PROMPT).requires_grad


def test_the_store_has_its_own_copy(store: Any) -> None:
    given = rows(16)
    store.store_hidden_states(PROMPT, given)
    given.zero_()
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(16))


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_result_is_the_callers_own(store: Any, chunks: int) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    prompt = PROMPT[: chunks * CHUNK]
    store.retrieve_hidden_states(prompt).zero_()
    found = store.retrieve_hidden_states(prompt)
    assert torch.equal(found, rows(16)[: len(prompt)])
    store.drop_key(KEYS[0])
    store.close()
    assert torch.equal(found, rows(16)[: len(prompt)])


def test_a_longer_prompt_gets_the_prefix_that_is_there(store: Any) -> None:
    store.store_hidden_states(PROMPT[:8], rows(8))
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(8))


def test_a_shorter_prompt_gets_its_whole_chunks(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    assert torch.equal(store.retrieve_hidden_states(PROMPT[:11]), rows(16)[:8])


def test_what_was_never_stored_is_none(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    assert store.retrieve_hidden_states([1] * 16) is None
    assert store.retrieve_hidden_states(PROMPT, layer_idx=1) is None


# Layers


def test_layers_are_apart(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16, seed=1))
    store.store_hidden_states(PROMPT[:8], rows(8, seed=2), layer_idx=7)
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(16, seed=1))
    assert torch.equal(store.retrieve_hidden_states(PROMPT, layer_idx=7), rows(8, seed=2))
    assert holds(store, 7) == [True, True, False, False]


def test_a_layer_may_have_chunks_that_another_lacks(store: Any) -> None:
    store.store_hidden_states(PROMPT[:4], rows(4))
    given = rows(16, seed=2)
    assert store.store_hidden_states(PROMPT, given, layer_idx=1) == 4
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(4))
    assert torch.equal(store.retrieve_hidden_states(PROMPT, layer_idx=1), given)
    assert store.num_cached_chunks() == 4


def test_layers_may_differ_in_width_and_dtype(store: Any) -> None:
    kinds = [(5, torch.float32), (64, torch.bfloat16), (1, torch.float16), (64, torch.float32)]
    given = [rows(16, hidden, seed=hidden).to(dtype) for hidden, dtype in kinds]
    for layer, layer_rows in enumerate(given):
        assert store.store_hidden_states(PROMPT, layer_rows, layer_idx=layer) == 4
    for layer, layer_rows in enumerate(given):
        found = store.retrieve_hidden_states(PROMPT, layer_idx=layer)
        assert torch.equal(found, layer_rows.float())


def test_chunks_of_one_layer_may_differ_in_dtype(store: Any) -> None:
    first, rest = rows(8).to(torch.bfloat16), rows(8, seed=1)
    store.store_hidden_states(PROMPT[:8], first)
    store.store_hidden_states(PROMPT, rest, token_offset=8)
    found = store.retrieve_hidden_states(PROMPT)
    assert torch.equal(found, torch.cat([first.float(), rest]))


@pytest.mark.parametrize("layer_idx", [-1, 10**6])
def test_a_layers_index_may_be_any_number(store: Any, layer_idx: int) -> None:
    assert store.store_hidden_states(PROMPT, rows(16), layer_idx=layer_idx) == 4
    assert torch.equal(store.retrieve_hidden_states(PROMPT, layer_idx=layer_idx), rows(16))


# Holes


@pytest.mark.parametrize("hole", range(4))
def test_a_result_ends_before_a_hole(store: Any, hole: int) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    assert store.drop_key(KEYS[hole]) is True
    found = store.retrieve_hidden_states(PROMPT)
    if hole == 0:
        assert found is None
    else:
        assert torch.equal(found, rows(16)[: hole * CHUNK])


def test_what_stands_behind_a_hole_is_there_again_when_it_is_filled(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    store.drop_key(KEYS[1])
    assert holds(store) == [True, False, True, True]
    assert store.num_cached_chunks() == 3
    assert store.store_hidden_states(PROMPT, rows(16)) == 1
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(16))


# KV


def test_kv_counts_as_present_without_a_storage_manager(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    assert len(store.retrieve_hidden_states(PROMPT)) == 16


def test_kv_is_asked_for_chunk_by_chunk_in_order(store: Any) -> None:
    kv = KvSide(KEYS)
    store.bind_storage_manager(kv)
    store.store_hidden_states(PROMPT, rows(16))
    assert kv.asked == []
    assert len(store.retrieve_hidden_states(PROMPT)) == 16
    assert kv.asked == KEYS


@pytest.mark.parametrize("gone", range(4))
def test_a_chunk_whose_kv_is_gone_is_dropped_and_ends_the_result(store: Any, gone: int) -> None:
    kv = KvSide([key for key in KEYS if key != KEYS[gone]])
    store.bind_storage_manager(kv)
    store.store_hidden_states(PROMPT, rows(16))
    found = store.retrieve_hidden_states(PROMPT)
    assert (0 if found is None else len(found)) == gone * CHUNK
    assert holds(store) == [chunk != gone for chunk in range(4)]
    assert store.num_cached_chunks() == 3
    assert kv.asked == KEYS[: gone + 1]


def test_kv_that_is_gone_takes_all_layers_of_the_chunk(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    store.store_hidden_states(PROMPT, rows(16), layer_idx=1)
    store.bind_storage_manager(KvSide(KEYS[:2]))
    store.retrieve_hidden_states(PROMPT)
    assert holds(store, 1) == [True, True, False, True]


def test_kv_that_is_gone_is_noticed_whatever_layer_is_asked_for(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    store.bind_storage_manager(KvSide([]))
    assert store.retrieve_hidden_states(PROMPT, layer_idx=5) is None
    assert holds(store) == [False, True, True, True]


def test_kv_is_not_asked_for_behind_a_chunk_that_has_no_rows(store: Any) -> None:
    kv = KvSide(KEYS)
    store.bind_storage_manager(kv)
    store.store_hidden_states(PROMPT[:8], rows(8))
    store.retrieve_hidden_states(PROMPT)
    assert kv.asked == KEYS[:3]


def test_kv_that_is_back_needs_the_rows_again(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    kv = KvSide(KEYS[:1])
    store.bind_storage_manager(kv)
    assert len(store.retrieve_hidden_states(PROMPT)) == 4
    kv.present = KEYS
    assert len(store.retrieve_hidden_states(PROMPT)) == 4
    assert store.store_hidden_states(PROMPT, rows(16)) == 1
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(16))


def test_another_storage_manager_may_take_over(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    store.bind_storage_manager(KvSide([]))
    store.bind_storage_manager(KvSide(KEYS))
    assert len(store.retrieve_hidden_states(PROMPT)) == 16


def test_the_other_calls_do_not_ask_for_kv(store: Any) -> None:
    kv = KvSide([])
    store.bind_storage_manager(kv)
    store.store_hidden_states(PROMPT, rows(16))
    assert holds(store) == [True] * 4
    assert store.num_cached_chunks() == 4
    assert store.drop_key(KEYS[3])
    assert kv.asked == []


# Single chunks


def test_has_chunk_is_about_one_layer(store: Any) -> None:
    store.store_hidden_states(PROMPT[:4], rows(4), layer_idx=2)
    assert store.has_chunk(KEYS[0], 2)
    assert store.has_chunk(KEYS[0], layer_idx=2)
    assert not store.has_chunk(KEYS[0])
    assert not store.has_chunk(KEYS[1], 2)


def test_drop_key_says_whether_it_was_there(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    store.store_hidden_states(PROMPT, rows(16), layer_idx=1)
    assert store.drop_key(KEYS[3]) is True
    assert store.drop_key(KEYS[3]) is False
    assert not store.has_chunk(KEYS[3], 0)
    assert not store.has_chunk(KEYS[3], 1)
    assert store.num_cached_chunks() == 3


def test_an_equal_key_is_the_same_key(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    equal = keys_of(PROMPT)
    assert equal[0] is not KEYS[0]
    assert store.has_chunk(equal[0])
    assert store.drop_key(equal[0])


# Tails


def test_a_tail_is_kept_where_lmcache_saves_unfull_chunks(make_store: MakeStore) -> None:
    store = make_store(save_unfull_chunk=True)
    given = rows(10)
    assert store.store_hidden_states(PROMPT[:10], given) == 3
    assert torch.equal(store.retrieve_hidden_states(PROMPT[:10]), given)
    tail = keys_of(PROMPT[:10], save_unfull_chunk=True)[2]
    assert store.has_chunk(tail)
    assert store.drop_key(tail)
    assert torch.equal(store.retrieve_hidden_states(PROMPT[:10]), given[:8])


def test_a_tail_is_left_out_where_it_does_not(store: Any) -> None:
    assert store.store_hidden_states(PROMPT[:10], rows(10)) == 2
    assert torch.equal(store.retrieve_hidden_states(PROMPT[:10]), rows(10)[:8])


def test_a_tail_is_not_part_of_the_longer_prompt(make_store: MakeStore) -> None:
    store = make_store(save_unfull_chunk=True)
    store.store_hidden_states(PROMPT[:10], rows(10))
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(10)[:8])
    assert store.store_hidden_states(PROMPT, rows(16)) == 2
    assert store.num_cached_chunks() == 5
    assert torch.equal(store.retrieve_hidden_states(PROMPT), rows(16))
    assert torch.equal(store.retrieve_hidden_states(PROMPT[:10]), rows(10))


def test_a_prompt_may_be_nothing_but_a_tail(make_store: MakeStore) -> None:
    store = make_store(save_unfull_chunk=True)
    assert store.store_hidden_states(PROMPT[:1], rows(1)) == 1
    assert torch.equal(store.retrieve_hidden_states(PROMPT[:1]), rows(1))


def test_a_tail_that_is_partly_covered_is_left_out(make_store: MakeStore) -> None:
    store = make_store(save_unfull_chunk=True)
    given = rows(10)
    assert store.store_hidden_states(PROMPT[:10], given[9:], token_offset=9) == 0
    assert store.store_hidden_states(PROMPT[:10], given[8:], token_offset=8) == 1
    assert store.store_hidden_states(PROMPT[:8], given[:8]) == 2
    assert torch.equal(store.retrieve_hidden_states(PROMPT[:10]), given)


# The end


def test_a_closed_store_is_empty(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    store.close()
    assert store.num_cached_chunks() == 0
    assert holds(store) == [False] * 4
    assert store.drop_key(KEYS[0]) is False


def test_a_closed_store_has_nothing_to_retrieve(store: Any) -> None:
    store.store_hidden_states(PROMPT, rows(16))
    store.close()
    assert store.retrieve_hidden_states(PROMPT) is None


def test_a_store_may_be_closed_twice(store: Any) -> None:
    store.close()
    store.close()


# Keys


@pytest.mark.parametrize("save_unfull_chunk", [True, False])
def test_the_adapter_gives_the_keys_of_the_kv_side(save_unfull_chunk: bool) -> None:
    config = engine_config(save_unfull_chunk=save_unfull_chunk)
    adapter = TokenDatabaseAdapter(ChunkedTokenDatabase(config, METADATA))
    assert adapter.chunk_size == CHUNK
    for token_ids in (PROMPT[:10], torch.tensor(PROMPT[:10])):
        chunks = adapter.chunks(token_ids)
        assert [chunk.key for chunk in chunks] == keys_of(
            PROMPT[:10], save_unfull_chunk=save_unfull_chunk
        )
        expected = [(0, 4), (4, 8), (8, 10)][: 3 if save_unfull_chunk else 2]
        assert [(chunk.start, chunk.end) for chunk in chunks] == expected


KEYS_ELSEWHERE = """
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase
from hidden_cache.keys import TokenDatabaseAdapter

metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, (2, 2, 4, 1, 16))
for name in ("builtin", "sha256", "sha256_cbor"):
    config = LMCacheEngineConfig.from_defaults(chunk_size=4, pre_caching_hash_algorithm=name)
    adapter = TokenDatabaseAdapter(ChunkedTokenDatabase(config, metadata))
    print("RESULT", name, adapter.stable, *[c.key.chunk_hash for c in adapter.chunks(range_)])
""".replace("range_", "list(range(8))")


@pytest.mark.engine  # no engine, but as much time
def test_keys_that_are_called_stable_are_the_same_in_every_process() -> None:
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    command = [sys.executable, "-c", KEYS_ELSEWHERE]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        for _ in range(2)
    ]
    results = []
    for process in both:
        printed, _ = process.communicate()
        assert process.returncode == 0
        lines = [line.split()[1:] for line in printed.splitlines() if line[:6] == "RESULT"]
        results.append({name: (stable == "True", hashes) for name, stable, *hashes in lines})
    assert {name: stable for name, (stable, _) in results[0].items()} == {
        "builtin": False,
        "sha256": True,
        "sha256_cbor": True,
    }
    for name, (stable, hashes) in results[0].items():
        assert (hashes == results[1][name][1]) is stable


# Settings


def test_lmcaches_other_settings_are_no_misspellings_of_ours(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    settings = engine_config().to_dict()
    path = tmp_path / "lmcache.yaml"
    path.write_text("".join(f"{key}: null\n" for key in settings if key not in KNOWN))
    path.write_text(path.read_text() + "".join(f"{key}: {settings[key]}\n" for key in KNOWN))
    assert len(settings) > 50
    with caplog.at_level("WARNING", logger="hidden_cache"):
        hidden_cache.HiddenCacheConfig.from_yaml(path)
    assert caplog.records == []


KNOWN = ("chunk_size", "enable_hidden_state_cache", "max_hidden_state_cpu_size")


def test_an_engines_settings_are_taken_from_lmcaches_object() -> None:
    config = engine_config(hidden_state_layers=[24, 0], extra_config={"hscache_numa": 0})
    expected = hidden_cache.HiddenCacheConfig(
        chunk_size=CHUNK, pool_bytes=int(0.01 * 2**30), layers=(0, 24), numa=0
    )
    assert hidden_cache.HiddenCacheConfig.from_lmcache(config) == expected
