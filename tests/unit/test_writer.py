"""`RequestWriter`: rows that come step by step are those that come at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from hidden_cache import _native
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import HiddenCacheError, PoolFullError, QueueFullError, TransferError
from hidden_cache.keys import Chunk, TokenChunker
from hidden_cache.lease import Lease
from hidden_cache.store import HiddenStateStore
from hidden_cache.writer import RequestWriter
from tests.unit import LAYOUTS, Layout, make_paged, make_rows

CHUNK = 4
LAYERS = (5, 2, 9)
HIDDEN = 6
SLOT_BYTES = CHUNK * HIDDEN * 4
TOKENS = list(range(18))  # four chunks and a tail of two


def make_store(slots: int = 64, **settings: object) -> HiddenStateStore:
    return HiddenStateStore(
        HiddenCacheConfig(
            chunk_size=CHUNK,
            pool_bytes=slots * SLOT_BYTES,
            **settings,  # type: ignore[arg-type]
        )
    )


@pytest.fixture
def store() -> Iterator[HiddenStateStore]:
    store = make_store()
    yield store
    store.close()


@pytest.fixture
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers stay pending until their engine is drained."""
    engine = partial(_native.TransferEngine, threaded=False)
    monkeypatch.setattr(_native, "TransferEngine", engine)


def rows_for(tokens: int, first: int = 0) -> torch.Tensor:
    return make_rows(tokens, len(LAYERS), HIDDEN, first=first)


def chunks_of(tokens: list[int]) -> list[Chunk]:
    return TokenChunker(CHUNK).chunks(tokens)


def read(held: Lease) -> torch.Tensor:
    held.wait()
    if held.num_tokens == 0:
        return rows_for(0)
    out = torch.empty((held.num_tokens, len(LAYERS), HIDDEN), dtype=held.dtype)
    held.read(0, out)
    return out


def append(
    writer: RequestWriter, rows: torch.Tensor, stop: int, chunks: list[Chunk] | None = None
) -> None:
    """The rows up to `stop`, waiting where the queue is full."""
    part = rows[writer.num_tokens : stop].clone()
    while True:
        try:
            writer.append(part, chunks or ())
            return
        except QueueFullError:
            writer._store._wait_for_one()


def used_slots(store: HiddenStateStore) -> int:
    stats = store.stats()
    return stats.num_slots - stats.free_slots


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [1, 3, 4, 5, 18])
def test_rows_out_of_a_cache_in_steps_of_any_size(
    layout: Layout, step: int, store: HiddenStateStore
) -> None:
    rows = rows_for(len(TOKENS))
    paged, block_ids = make_paged(rows, 3, layout, seed=step)
    writer = store.writer("a", LAYERS)
    chunks = chunks_of(TOKENS)
    for stop in [*range(step, len(TOKENS), step), len(TOKENS)]:
        # As much of the block table, and as many keys, as there are by then.
        known = [chunk for chunk in chunks if chunk.start < stop]
        writer.append_paged(
            paged, block_ids[: -(-stop // 3)], stop, known[writer.num_known :], stream=None
        )
        assert writer.num_tokens == stop
    held = writer.finish()
    assert torch.equal(read(held), rows)
    assert held.new_chunks == 4
    held.release()
    found = store.retrieve_layers(TOKENS, LAYERS)
    assert found is not None
    for place, layer in enumerate(LAYERS):
        assert torch.equal(found[layer], rows[:16, place])
    assert used_slots(store) == 4 * len(LAYERS)


@pytest.mark.parametrize("seed", range(30))
def test_any_steps_rewinds_and_neighbours_leave_each_request_its_rows(seed: int) -> None:
    """Writers that share prefixes, in random steps and with preemptions, in a small pool."""
    choose = random.Random(seed)
    store = make_store(slots=choose.choice([3 * len(LAYERS) * 5, 400]), max_pending=8)
    live: list[tuple[RequestWriter, list[int], torch.Tensor]] = []
    leases: list[tuple[Lease, torch.Tensor]] = []

    def content(tokens: list[int]) -> torch.Tensor:
        # Rows that tell of all tokens before them, as hidden states do.
        sums = torch.tensor(tokens).cumsum(0) * 7 + torch.arange(len(tokens))
        return (sums[:, None, None] * 100 + rows_for(1) % 50).to(torch.int32)

    for _ in range(150):
        action = choose.choice("nssssrfad")
        if action == "n" and len(live) < 5:
            tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 20))]
            live.append((store.writer(f"{seed}", LAYERS), tokens, content(tokens)))
        elif action == "d" and leases:
            held, rows = leases.pop(choose.randrange(len(leases)))
            assert torch.equal(read(held), rows)
            held.release()
        elif live and action in "srfa":
            place = choose.randrange(len(live))
            writer, tokens, rows = live[place]
            if action == "s":
                stop = min(len(tokens), writer.num_tokens + choose.randrange(1, 7))
                known = chunks_of(tokens)
                if choose.random() < 0.5:  # keys that come as late as they may
                    known = [chunk for chunk in known if chunk.end <= stop]
                try:
                    append(writer, rows, stop, known[writer.num_known :])
                except PoolFullError:
                    writer.abandon()
                    del live[place]
            elif action == "r":
                writer.rewind(choose.randrange(writer.num_tokens + 1))
            elif action == "a":
                writer.abandon()
                del live[place]
            else:
                leases.append((writer.finish(), rows[: writer.num_tokens]))
                del live[place]
        if choose.random() < 0.1:
            tokens = [choose.randrange(2) for _ in range(16)]
            found = store.retrieve_layers(tokens, LAYERS)
            if found is not None:
                for layer_place, layer in enumerate(LAYERS):
                    expected = content(tokens)[: len(found[layer]), layer_place]
                    assert torch.equal(found[layer], expected)
    for writer, _, _ in live:
        writer.abandon()
    for held, rows in leases:
        assert torch.equal(read(held), rows)
        held.release()
    for engine in store._memory.engines.values():
        engine.drain()
    assert used_slots(store) == store.num_cached_chunks() * len(LAYERS)
    store.reset()
    assert used_slots(store) == 0
    store.close()


def test_what_is_there_is_not_copied_again(store: HiddenStateStore) -> None:
    rows = rows_for(18)
    first = store.writer("a", LAYERS)
    append(first, rows, 9, chunks_of(TOKENS))
    first.finish().release()
    second = store.writer("b", LAYERS)
    append(second, rows_for(18, first=9000), 6, chunks_of(TOKENS))
    append(second, rows_for(18, first=9000), 18)
    held = second.finish()
    assert held.tokens_from_pool == second.tokens_from_pool == 8
    assert held.new_chunks == 2
    assert torch.equal(read(held)[:8], rows[:8])
    assert torch.equal(read(held)[8:], rows_for(18, first=9000)[8:])
    held.release()


def test_of_two_that_bring_the_same_chunk_the_faster_one_keeps_it(store: HiddenStateStore) -> None:
    slow, fast = store.writer("slow", LAYERS), store.writer("fast", LAYERS)
    append(slow, rows_for(18), 3, chunks_of(TOKENS))
    append(fast, rows_for(18, first=9000), 4, chunks_of(TOKENS))
    fast.finish().wait()
    append(slow, rows_for(18), 4)
    held = slow.finish()
    assert held.new_chunks == 0
    assert torch.equal(read(held), rows_for(4, first=9000)), "what all others see"
    held.release()


def test_two_that_bring_layers_of_one_chunk_both_leave_theirs(store: HiddenStateStore) -> None:
    rows = rows_for(4)
    one, other = store.writer("one", (5,)), store.writer("other", (2, 5))
    for writer, part in ((one, rows[:, :1]), (other, 9000 + rows[:, [1, 0]])):
        writer.append(part[:3].clone(), chunks_of(TOKENS[:4]))
    one.append(rows[3:, :1].clone())
    first = one.finish()
    first.wait()
    other.append(9000 + rows[3:, [1, 0]])
    second = other.finish()
    second.wait()
    assert (first.new_chunks, second.new_chunks) == (1, 1)
    found = store.retrieve_layers(TOKENS[:4], (5, 2))
    assert found is not None
    assert torch.equal(found[5], rows[:, 0]), "the first that was whole"
    assert torch.equal(found[2], 9000 + rows[:, 1])
    out = torch.empty(4, 2, HIDDEN, dtype=rows.dtype)
    second.read(0, out)
    assert torch.equal(out, torch.stack([found[2], found[5]], 1))
    first.release()
    second.release()
    assert used_slots(store) == 2


def test_rows_of_another_kind_never_stand_for_a_requests_own() -> None:
    store = make_store(slots=1 << 20)
    chunks = chunks_of(TOKENS[:4])
    wide, narrow = store.writer("wide", (0,)), store.writer("narrow", (0,))
    rows = rows_for(4)[:, :1]
    for writer, part in ((wide, rows), (narrow, rows[..., :2])):
        writer.append(part[:3].clone(), chunks)
    wide.append(rows[3:].clone())
    wide.finish().wait()
    narrow.append(rows[3:, :, :2].clone())
    held = narrow.finish()
    held.wait()
    out = torch.zeros(6, 1, 2, dtype=rows.dtype)
    held.read(0, out[:4])
    assert torch.equal(out[:4], rows[..., :2])
    assert not out[4:].any(), "nothing is written behind what was asked for"


@pytest.mark.usefixtures("_still")
def test_a_layer_that_another_is_still_bringing_does_not_stand_for_a_requests_own() -> None:
    store = make_store()
    chunks = chunks_of(TOKENS[:4])
    rows = rows_for(4)

    def arrive() -> None:
        for engine in store._memory.engines.values():
            engine.drain()

    base = store.writer("base", (5,))
    append(base, rows[:, :1], 4, chunks)
    base.finish().release()
    arrive()
    slow, fast = store.writer("slow", (5, 2)), store.writer("fast", (5, 2))
    append(slow, rows[:, :2], 3, chunks)
    arrive()
    append(fast, rows[:, :2], 4, chunks)
    (ticket,) = fast.finish().tickets
    append(slow, rows[:, :2], 4)
    held = slow.finish()
    ticket.cancel()
    arrive()
    held.wait()
    out = torch.empty(4, 2, HIDDEN, dtype=rows.dtype)
    held.read(0, out)
    assert torch.equal(out, rows[:, :2])


def test_an_abandoned_request_leaves_its_whole_chunks(store: HiddenStateStore) -> None:
    writer = store.writer("a", LAYERS)
    append(writer, rows_for(18), 10, chunks_of(TOKENS))
    while not writer.source_free:
        store._wait_for_one()
    writer.abandon()
    writer.abandon()
    assert store.coverage(TOKENS, LAYERS) == 8
    assert used_slots(store) == 2 * len(LAYERS)


def test_after_a_rewind_rows_come_again(store: HiddenStateStore) -> None:
    rows = rows_for(18)
    writer = store.writer("a", LAYERS)
    append(writer, torch.full_like(rows, -1), 6, [])
    writer.rewind(0)
    append(writer, rows, 18, chunks_of(TOKENS))
    held = writer.finish()
    assert torch.equal(read(held), rows)
    held.release()


def test_a_rewind_into_what_is_everybodys_changes_nothing_there(store: HiddenStateStore) -> None:
    rows = rows_for(18)
    writer = store.writer("a", LAYERS)
    append(writer, rows, 10, chunks_of(TOKENS))
    writer.rewind(5)
    append(writer, torch.full_like(rows, -1), 8)
    append(writer, rows, 18)
    held = writer.finish()
    assert torch.equal(read(held), rows)
    held.release()


def test_only_what_was_taken_is_held_at_the_end(store: HiddenStateStore) -> None:
    writer = store.writer("a", LAYERS)
    append(writer, rows_for(18), 18, chunks_of(TOKENS))
    writer.rewind(5)
    held = writer.finish()
    assert held.num_tokens == 5
    assert torch.equal(read(held), rows_for(18)[:5])
    held.release()


def test_reserved_chunks_of_a_layer_lie_side_by_side(store: HiddenStateStore) -> None:
    rows = rows_for(16)
    writer = store.writer("a", LAYERS)
    writer.reserve(rows, 16, chunks_of(TOKENS[:16]))
    assert used_slots(store) == 4 * len(LAYERS)
    for stop in range(1, 17):
        append(writer, rows, stop)
    held = writer.finish()
    assert torch.equal(read(held), rows)
    held.release()
    found = store.retrieve_layers(TOKENS[:16], LAYERS, copy=False)
    assert found is not None
    assert store.stats().bytes_retrieved == 0
    for place, layer in enumerate(LAYERS):
        assert torch.equal(found[layer], rows[:, place])


def test_no_room_takes_nothing() -> None:
    store = make_store(slots=2 * len(LAYERS))
    one, other = store.writer("one", LAYERS), store.writer("other", LAYERS)
    append(one, rows_for(18), 5)
    with pytest.raises(PoolFullError) as caught:
        append(other, rows_for(18), 1)
    assert caught.value.can_wait
    with pytest.raises(PoolFullError) as caught:
        append(one, rows_for(18), 9)
    assert not caught.value.can_wait
    assert (one.num_tokens, other.num_tokens) == (5, 0)
    one.abandon()
    for engine in store._memory.engines.values():
        engine.drain()
    append(other, rows_for(18), 1)
    other.abandon()
    store.close()


@pytest.mark.usefixtures("_still")
def test_a_rewind_into_what_is_everybodys_waits_for_nothing() -> None:
    store = make_store(max_pending=1)
    rows = rows_for(18)
    writer = store.writer("a", LAYERS)
    writer.append(rows[:4], chunks_of(TOKENS))
    writer.rewind(2)
    assert writer.append(rows[2:4]) is None, "they are on their way"
    writer.abandon()
    for engine in store._memory.engines.values():
        engine.drain()
    store.close()


@pytest.mark.usefixtures("_still")
def test_a_full_queue_takes_nothing() -> None:
    store = make_store(max_pending=1)
    rows = rows_for(18)
    writer = store.writer("a", LAYERS)
    writer.append(rows[:3])
    with pytest.raises(QueueFullError):
        writer.append(rows[3:18], chunks_of(TOKENS))
    assert writer.num_tokens == 3
    assert used_slots(store) == len(LAYERS)
    writer.rewind(2)
    with pytest.raises(QueueFullError, match="before the rewind"):
        writer.append(rows[2:3])
    for engine in store._memory.engines.values():
        engine.drain()
    writer.append(rows[2:18], chunks_of(TOKENS))
    held = writer.finish()
    for engine in store._memory.engines.values():
        engine.drain()
    assert torch.equal(read(held), rows)
    held.release()
    store.close()


@pytest.mark.usefixtures("_still")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_chunk_is_whole_when_the_transfers_of_all_its_steps_are_done(failing: int) -> None:
    store = make_store()
    writer = store.writer("a", LAYERS)
    append(writer, rows_for(4), 3, chunks_of(TOKENS[:4]))
    append(writer, rows_for(4), 4)
    held = writer.finish()
    held.tickets[failing].cancel()
    for engine in store._memory.engines.values():
        engine.drain()
    assert store.num_cached_chunks() == 1, "not known yet"
    assert store.coverage(TOKENS[:4], LAYERS) == 0
    assert store.num_cached_chunks() == 0
    with pytest.raises(TransferError):
        held.wait()
    held.release()
    assert used_slots(store) == 0


def test_after_a_reset_a_writer_takes_no_more(store: HiddenStateStore) -> None:
    writer = store.writer("a", LAYERS)
    append(writer, rows_for(18), 6, chunks_of(TOKENS))
    store.reset()
    assert store.weights_epoch == store.stats().weights_epoch == 1
    for use in (lambda: append(writer, rows_for(18), 18), writer.finish):
        with pytest.raises(HiddenCacheError, match="reset"):
            use()
    writer.abandon()
    store.reset(weights_epoch=7)
    with pytest.raises(ValueError, match="weights_epoch is 7, was 7 already"):
        store.reset(weights_epoch=7)
    for engine in store._memory.engines.values():
        engine.drain()
    assert used_slots(store) == 0


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk(4, 8, b"b")], "given, must be tokens 8 to 12"),
        ([Chunk(8, 13, b"c")], "given, must be tokens 8 to 12"),
        ([Chunk(8, 8, b"c")], "given, must be tokens 8 to 12"),
        ([Chunk(8, 10, b"c"), Chunk(10, 14, b"d")], "a short one must come last"),
        ([Chunk(8, 12, None), Chunk(12, 16, b"d")], "those without a key must come last"),
        ([Chunk(8, 12, b"a")], "has a key twice"),
        ([Chunk(8, 12, b"c"), Chunk(12, 16, b"c")], "has a key twice"),
    ],
)
def test_chunks_that_do_not_follow_are_refused(
    chunks: list[Chunk], message: str, store: HiddenStateStore
) -> None:
    writer = store.writer("x", LAYERS)
    writer.append(rows_for(6), [Chunk(0, 4, b"a"), Chunk(4, 8, b"b")])
    with pytest.raises(ValueError, match=message):
        writer.append(rows_for(2), chunks)
    assert writer.num_tokens == 6
    writer.append(rows_for(2), [Chunk(8, 12, b"c")])
    writer.abandon()


@pytest.mark.parametrize("taken", [3, 6])
def test_rows_behind_a_short_chunk_are_refused(taken: int, store: HiddenStateStore) -> None:
    writer = store.writer("x", LAYERS)
    writer.append(rows_for(taken), chunks_of(TOKENS[:4]))
    tail = [Chunk(4, 5, b"tail")]
    with pytest.raises(ValueError, match=r"rows up to token 8 are given, beyond Chunk\(start=4"):
        writer.append(rows_for(8 - taken), tail)
    if taken < 5:
        writer.append(rows_for(5 - taken), tail)
        with pytest.raises(ValueError, match="a short one must come last"):
            writer.append(rows_for(1))
    writer.finish().release()


@pytest.mark.parametrize("layers", [(), (3, 3)])
def test_layers_that_are_not_each_named_once_are_refused(
    layers: tuple[int, ...], store: HiddenStateStore
) -> None:
    with pytest.raises(ValueError, match="must name one layer or more, each once"):
        store.writer("x", layers)


def test_rows_and_uses_that_cannot_be_are_refused(store: HiddenStateStore) -> None:
    writer = store.writer("x", LAYERS)
    with pytest.raises(ValueError, match=r"rows have shape \[4, 2, 6\], must be \[n, 3, hidden\]"):
        writer.append(rows_for(4)[:, :2])
    for bad in (rows_for(4).repeat_interleave(2, dim=2)[..., ::2], rows_for(4)[..., :0]):
        with pytest.raises(ValueError, match=r"side by side: give rows.contiguous\(\)"):
            writer.append(bad)
    writer.append(rows_for(4))
    with pytest.raises(ValueError, match="a request's rows are of one kind"):
        writer.append(rows_for(4).to(torch.int64))
    with pytest.raises(ValueError, match="rows up to token 2 are given, 4 are there"):
        writer.append_paged(*make_paged(rows_for(4), 3), 2)
    with pytest.raises(ValueError, match="cannot rewind to 5 tokens"):
        writer.rewind(5)
    with pytest.raises(ValueError, match="cannot rewind to -1 tokens"):
        writer.rewind(-1)
    with pytest.raises(IndexError):
        writer.append_paged(*make_paged(rows_for(4), 3), 8)
    writer.finish().release()
    for use in (lambda: writer.append(rows_for(4)), writer.finish, lambda: writer.rewind(0)):
        with pytest.raises(HiddenCacheError, match="'x' has ended"):
            use()


def test_a_request_without_rows_is_a_lease_of_none(store: HiddenStateStore) -> None:
    held = store.writer("x", LAYERS).finish()
    assert held.num_tokens == 0
    held.wait()
    held.release()
