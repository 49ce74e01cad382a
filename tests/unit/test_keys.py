"""Chunk keys: equal where the prefix is equal, and only there."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidden_cache.errors import ConfigError
from hidden_cache.keys import BlockHashChunker, Chunk, TokenChunker, make_namespace

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=60)
token_lists = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40)
chunk_sizes = st.integers(1, 9)


def keys_of(chunks: list[Chunk]) -> list[Hashable | None]:
    return [chunk.key for chunk in chunks]


# TokenChunker


@repeatable
@given(token_lists, token_lists, token_lists, chunk_sizes)
def test_the_same_prefix_has_the_same_keys(
    shared: list[int], one: list[int], other: list[int], size: int
) -> None:
    chunker = TokenChunker(size)
    first, second = chunker.chunks(shared + one), chunker.chunks(shared + other)
    whole = len(shared) // size
    assert first[:whole] == second[:whole] == chunker.chunks(shared)


@repeatable
@given(token_lists, chunk_sizes, st.data())
def test_one_changed_token_changes_its_key_and_all_later_ones_only(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[place] ^= 1
    before, after = (keys_of(TokenChunker(size).chunks(t)) for t in (tokens, changed))
    assert len(before) == len(after)
    assert [a == b for a, b in zip(before, after, strict=True)] == [
        place >= (i + 1) * size for i in range(len(before))
    ]


@repeatable
@given(token_lists, chunk_sizes)
def test_chunks_are_whole_and_a_tail_has_none(tokens: list[int], size: int) -> None:
    chunks = TokenChunker(size).chunks(tokens)
    whole = len(tokens) // size
    assert [(c.start, c.end) for c in chunks] == [(i * size, i * size + size) for i in range(whole)]
    assert len(set(keys_of(chunks))) == whole
    assert None not in keys_of(chunks)


def test_a_key_is_a_sha256_chain_over_little_endian_tokens() -> None:
    tokens = [1, 2**40, 3, 2**63 - 1]
    key = hashlib.sha256(b"1,2;" + b"s" + b"xy").digest()
    expected = []
    for start in (0, 2):
        key = hashlib.sha256(key + struct.pack("<2q", *tokens[start : start + 2])).digest()
        expected.append(key)
    assert keys_of(TokenChunker(2, seed=b"s", salt=b"xy").chunks(tokens)) == expected


def test_seed_and_salt_set_apart() -> None:
    pairs = [(b"", b""), (b"a", b""), (b"", b"a"), (b"a", b"b"), (b"ab", b""), (b"", b"ab")]
    keys = [TokenChunker(2, seed=s, salt=t).chunks([1, 2])[0].key for s, t in pairs]
    assert len(set(keys)) == len(pairs)


def test_tokens_may_come_from_any_iterable() -> None:
    chunker = TokenChunker(2)
    assert chunker.chunks(iter([5, 6, 7])) == chunker.chunks((5, 6)) == chunker.chunks([5, 6])
    assert chunker.chunks([]) == []


def test_keys_are_the_same_in_every_process() -> None:
    script = (
        "from hidden_cache.keys import TokenChunker, make_namespace\n"
        "print([c.key.hex() for c in TokenChunker(3, seed=b'm').chunks(range(10))])\n"
        "print(make_namespace(model='m', revision='r', weights_epoch=1).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "4711")
    }
    here = [
        str(c.key.hex())
        for c in TokenChunker(3, seed=b"m").chunks(range(10))
        if isinstance(c.key, bytes)
    ]
    namespace = make_namespace(weights_epoch=1, revision="r", model="m").hex()
    assert outputs == {f"{here}\n{namespace}\n"}


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk_size is {size}, must be at least 1"):
        TokenChunker(size)


# make_namespace


def test_a_namespace_depends_on_every_part_of_the_identity() -> None:
    parts: list[dict[str, str | int]] = [
        {"model": "a"},
        {"model": "b"},
        {"model": "a", "weights_epoch": 0},
        {"model": "a", "weights_epoch": 1},
        {"model": "a", "weights_epoch": "1"},
        {"name": "a"},
    ]
    spaces = [make_namespace(**identity) for identity in parts]
    assert len(set(spaces)) == len(parts)
    assert {len(space) for space in spaces} == {16}


# BlockHashChunker


def hashes(count: int) -> list[bytes]:
    return [f"hash {i}".encode() for i in range(count)]


@repeatable
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 100), st.integers(0, 40))
def test_chunks_cover_all_tokens_and_the_hashed_ones_have_keys(
    blocks: int, hash_block: int, num_tokens: int, num_hashes: int
) -> None:
    size = blocks * hash_block
    chunks = BlockHashChunker(size, hash_block, b"n:").chunks(hashes(num_hashes), num_tokens)
    assert [c.start for c in chunks] == list(range(0, num_tokens, size))
    assert [c.end for c in chunks] == [min(c.start + size, num_tokens) for c in chunks]
    hashed = min(num_hashes // blocks, num_tokens // size)
    assert keys_of(chunks[:hashed]) == [
        b"n:" + hashes(num_hashes)[(i + 1) * blocks - 1] for i in range(hashed)
    ]
    assert keys_of(chunks[hashed:]) == [None] * (len(chunks) - hashed)


def test_the_namespace_sets_apart() -> None:
    one, other = (BlockHashChunker(2, 2, make_namespace(model=m)) for m in "ab")
    assert one.chunks(hashes(1), 2)[0].key != other.chunks(hashes(1), 2)[0].key


@pytest.mark.parametrize(("size", "nearest"), [(100, 128), (129, 256), (0, 128), (-5, 128)])
def test_a_size_that_is_no_multiple_of_the_hash_block_names_one_that_is(
    size: int, nearest: int
) -> None:
    with pytest.raises(
        ConfigError, match=f"{size}, must be a multiple .* 128 tokens: set {nearest}"
    ):
        BlockHashChunker(size, 128, b"")
    assert BlockHashChunker(nearest, 128, b"").chunk_size == nearest


@pytest.mark.parametrize(
    ("hash_block", "expected"), [(16, 256), (128, 256), (100, 300), (512, 512)]
)
def test_the_default_size_is_the_next_multiple(hash_block: int, expected: int) -> None:
    assert BlockHashChunker.default_chunk_size(hash_block) == expected
    BlockHashChunker(expected, hash_block, b"")
