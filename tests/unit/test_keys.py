"""Chunk keys: equal where the prefix is equal, and only there."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import re
import struct
import subprocess
import sys
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hidden_cache.errors import ConfigError
from hidden_cache.keys import (
    RUN_TOKENS,
    BlockHashChunker,
    Chunk,
    Placeholder,
    TokenChunker,
    TokenDatabaseAdapter,
    block_hashes_are_stable,
    make_namespace,
)

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


# Placeholders

content_hashes: st.SearchStrategy[str | bytes] = st.one_of(
    st.sampled_from(["a", "b", b"a", b"c"]),
    st.text(min_size=1, max_size=6),
    st.binary(min_size=1, max_size=6),
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[Placeholder]]:
    """A number of tokens, and at least one placeholder among them."""
    steps = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=4))
    found, end = [], 0
    for gap, length in steps:
        found.append(Placeholder(end + gap, length, draw(content_hashes)))
        end += gap + length
    return end + draw(st.integers(0, 12)), found


def as_bytes(placeholder: Placeholder) -> tuple[int, int, bytes]:
    start, length, content = placeholder
    return start, length, content.encode() if isinstance(content, str) else content


def same_tokens(count: int) -> list[int]:
    """As placeholders have them: nothing but the placeholders tells one token from another."""
    return [7] * count


@repeatable
@given(prompts(), chunk_sizes, st.data())
def test_another_content_place_or_length_changes_the_keys_from_its_first_chunk_on(
    prompt: tuple[int, list[Placeholder]], size: int, data: st.DataObject
) -> None:
    count, placeholders = prompt
    place = data.draw(st.integers(0, len(placeholders) - 1))
    old = placeholders[place]
    earliest = sum(placeholders[place - 1][:2]) if place > 0 else 0
    latest = placeholders[place + 1].start if place + 1 < len(placeholders) else count
    match data.draw(st.sampled_from(Placeholder._fields)):
        case "start":
            new = old._replace(start=data.draw(st.integers(earliest, latest - old.length)))
        case "length":
            new = old._replace(length=data.draw(st.integers(1, latest - old.start)))
        case _:
            new = old._replace(content_hash=data.draw(content_hashes))
    assume(as_bytes(new) != as_bytes(old))
    changed = [*placeholders[:place], new, *placeholders[place + 1 :]]
    before, after = (
        keys_of(TokenChunker(size).chunks(same_tokens(count), given))
        for given in (placeholders, changed)
    )
    first = min(old.start, new.start) // size
    assert before[:first] == after[:first]
    assert set(before[first:]).isdisjoint(after[first:])


@repeatable
@given(prompts(), chunk_sizes, st.randoms(use_true_random=False))
def test_equal_placeholders_give_equal_keys_in_any_order(
    prompt: tuple[int, list[Placeholder]], size: int, random: random.Random
) -> None:
    count, placeholders = prompt
    mixed = random.sample(placeholders, len(placeholders))
    once, again = (TokenChunker(size).chunks(same_tokens(count), p) for p in (placeholders, mixed))
    assert once == again


@repeatable
@given(prompts(), chunk_sizes)
def test_no_content_leaves_the_keys_before_it_and_changes_all_others(
    prompt: tuple[int, list[Placeholder]], size: int
) -> None:
    count, placeholders = prompt
    without = keys_of(TokenChunker(size).chunks(same_tokens(count)))
    having = keys_of(TokenChunker(size).chunks(same_tokens(count), placeholders))
    first = placeholders[0].start // size
    assert having[:first] == without[:first]
    assert set(having[first:]).isdisjoint(without[first:])


def test_a_longer_prompt_has_the_keys_of_its_beginning() -> None:
    chunker, image = TokenChunker(4), Placeholder(3, 7, "cat")
    shorter = chunker.chunks(same_tokens(12), [image])
    assert chunker.chunks(same_tokens(20), [image, Placeholder(15, 2, "dog")])[:3] == shorter


def test_content_cannot_imitate_tokens_of_another_chunk_size() -> None:
    content = Placeholder(0, 1, struct.pack("<3q", 1, 2, 3))
    (with_content,) = keys_of(TokenChunker(2).chunks([5, 6], [content]))
    root = hashlib.sha256(b"0,0;").digest()
    record = b"0,1,24;" + struct.pack("<3q", 1, 2, 3)
    hashed = root + struct.pack("<2q", 5, 6) + b";" + hashlib.sha256(record).digest()
    assert with_content == hashlib.sha256(hashed).digest()
    assert (len(hashed) - len(root)) % 8 != 0, "as no number of tokens has"


@pytest.mark.parametrize(
    ("placeholders", "message"),
    [
        ([(-1, 2, "a")], "covers tokens -1 to 1, must lie within the 8 tokens given: give it with"),
        ([(6, 3, "a")], "covers tokens 6 to 9, must lie within the 8 tokens given: give it with"),
        ([(9, 1, "a")], "covers tokens 9 to 10, must lie within the 8 tokens given"),
        ([(4, 0, "a")], "at token 4 has 0 tokens, must have at least 1: leave it out"),
        ([(4, -2, "a")], "at token 4 has -2 tokens, must have at least 1"),
        ([(4, 2, "b"), (2, 3, "a")], "covers tokens 4 to 6, must start at 5 or behind, where"),
        ([(2, 3, "a"), (2, 3, "a")], "covers tokens 2 to 5, must start at 5 or behind"),
        ([(2, 3, "")], "at token 2 has an empty content_hash, must tell its content"),
        ([(2, 3, b"")], "at token 2 has an empty content_hash, must tell its content"),
    ],
)
def test_placeholders_that_cannot_be_are_refused(
    placeholders: list[tuple[int, int, str | bytes]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenChunker(4).chunks(range(8), [Placeholder(*given) for given in placeholders])


@pytest.mark.parametrize(
    ("placeholder", "message"),
    [
        (
            (2, 3, 5),
            "at token 2 has a content_hash of type int, must be str or bytes: give a digest",
        ),
        ((2, 3, None), "at token 2 has a content_hash of type NoneType, must be str or bytes"),
        ((2.5, 3, "a"), "'float' object cannot be interpreted as an integer"),
    ],
)
def test_placeholders_of_other_types_are_refused(placeholder: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TokenChunker(4).chunks(range(8), [placeholder])


# What tokens may be


def test_keys_never_change() -> None:
    chunker = TokenChunker(256, seed=b"model", salt=b"tenant")
    keys = [c.key.hex() for c in chunker.chunks(range(512)) if isinstance(c.key, bytes)]
    assert keys == [
        "d89198fd75e571e2b651ef275cd14a6e77895fd0d777225d3422ac03e651af81",
        "3f8ee780e6cb064fb290f14d87e1899c70986b894c6539af34e904541ac0de40",
    ]
    image = Placeholder(300, 100, "9f86d081")
    keys = [c.key.hex() for c in chunker.chunks(range(512), [image]) if isinstance(c.key, bytes)]
    assert keys == [
        "d89198fd75e571e2b651ef275cd14a6e77895fd0d777225d3422ac03e651af81",
        "f3c49da323914a7463f848372c0b62c92c5938ef1ebce91789b30519279d6aa3",
    ]


def test_tokens_may_come_from_any_iterable() -> None:
    chunker = TokenChunker(2)
    assert chunker.chunks(iter([5, 6, 7])) == chunker.chunks((5, 6)) == chunker.chunks([5, 6])
    assert chunker.chunks([]) == []


def test_a_token_may_be_anything_that_is_an_integer() -> None:
    class Five:
        def __index__(self) -> int:
            return 5

    chunker = TokenChunker(4)
    given = [np.int32(1), True, np.uint64(7), Five()]
    assert chunker.chunks(given) == chunker.chunks([1, 1, 7, 5])
    assert chunker.chunks(np.array([1, 1, 7, 5], dtype=np.int16)) == chunker.chunks([1, 1, 7, 5])


@pytest.mark.parametrize("token", [1.5, np.float32(2), "3", None, [4]])
def test_a_token_that_is_no_integer_is_refused(token: Any) -> None:
    kind = type(token).__name__
    with pytest.raises(TypeError, match=f"token 1 is a .*{kind}, must be an integer: give"):
        TokenChunker(2).chunks([0, token])


def test_what_holds_no_tokens_is_refused() -> None:
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        TokenChunker(2).chunks(5)  # type: ignore[arg-type]


def test_a_tail_is_looked_at_too() -> None:
    with pytest.raises(TypeError, match="token 2 is a float"):
        TokenChunker(2).chunks([0, 1, 2.5])  # type: ignore[list-item]


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1, np.uint64(2**64 - 1)])
def test_a_token_beyond_64_bits_is_refused(token: int) -> None:
    assert TokenChunker(2).chunks([2**63 - 1, -(2**63)]) != []
    with pytest.raises(
        OverflowError, match=rf"token 1 is {token}, must lie in \[-2\*\*63, 2\*\*63"
    ):
        TokenChunker(2).chunks([0, token])


def test_an_error_of_a_tokens_own_comes_through() -> None:
    class Broken:
        def __index__(self) -> int:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        TokenChunker(2).chunks([0, Broken()])  # type: ignore[list-item]


def test_a_list_that_gets_shorter_while_it_is_read_is_refused() -> None:
    class Clears:
        def __index__(self) -> int:
            tokens.clear()
            return 1

    tokens: list[Any] = [0, Clears(), 2, 3]
    with pytest.raises(IndexError, match="tokens 0 to 4 are asked of 0: do not change the list"):
        TokenChunker(2).chunks(tokens)


@pytest.mark.parametrize("size", [1, 3, 4096, 5000, 20000])
def test_prompts_longer_than_a_run_have_the_same_chain(size: int) -> None:
    tokens = [7 * i % 50257 for i in range(2 * RUN_TOKENS + 4321)]
    key = hashlib.sha256(b"0,0;").digest()
    expected = []
    for start in range(0, len(tokens) - size + 1, size):
        piece = struct.pack(f"<{size}q", *tokens[start : start + size])
        key = hashlib.sha256(key + piece).digest()
        expected.append(Chunk(start, start + size, key))
    assert TokenChunker(size).chunks(tokens) == expected
    assert TokenChunker(size).chunks(torch.tensor(tokens)) == expected
    assert TokenChunker(size).chunks(torch.tensor(tokens, dtype=torch.int32)) == expected


INTEGER_DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_a_tensor_has_the_keys_of_its_list(dtype: torch.dtype) -> None:
    tokens = list(range(100, 117))
    expected = TokenChunker(4).chunks(tokens)
    tensor = torch.tensor(tokens, dtype=dtype)
    assert TokenChunker(4).chunks(tensor) == expected
    spread = torch.stack([tensor, tensor]).T.contiguous()[:, 1]
    assert spread.stride() == (2,)
    assert TokenChunker(4).chunks(spread) == expected
    assert TokenChunker(4).chunks(torch.tensor([9, *tokens]).to(dtype)[1:]) == expected


def test_an_empty_tensor_has_no_chunks() -> None:
    assert TokenChunker(1).chunks(torch.tensor([])) == []


def test_a_tensor_of_numbers_beyond_64_bits_is_refused() -> None:
    with pytest.raises(OverflowError, match=f"token 1 is {2**63}, must lie in"):
        TokenChunker(2).chunks(torch.tensor([0, 2**63], dtype=torch.uint64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_a_tensor_of_other_than_integers_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"a tensor of {dtype}, must be of an integer dtype"):
        TokenChunker(2).chunks(torch.ones(4, dtype=dtype))


@pytest.mark.parametrize("shape", [(), (2, 3), (0, 4)])
def test_a_tensor_of_other_than_one_dimension_is_refused(shape: tuple[int, ...]) -> None:
    sizes = re.escape(str(list(shape)))
    with pytest.raises(ValueError, match=f"a tensor of shape {sizes}, must have one dimension"):
        TokenChunker(2).chunks(torch.zeros(shape, dtype=torch.int64))


def test_a_chunk_is_a_plain_value() -> None:
    chunk = TokenChunker(2).chunks([1, 2])[0]
    assert chunk == Chunk(0, 2, chunk.key) != Chunk(0, 2, None)
    assert pickle.loads(pickle.dumps(chunk)) == chunk
    assert str(Chunk(0, 2, b"k")) == "Chunk(start=0, end=2, key=b'k')"
    with pytest.raises(AttributeError):
        chunk.start = 1  # type: ignore[misc]


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
def test_chunks_are_those_that_are_whole_and_hashed(
    blocks: int, hash_block: int, num_tokens: int, num_hashes: int
) -> None:
    size = blocks * hash_block
    chunker = BlockHashChunker(size, hash_block, b"n:")
    chunks = chunker.chunks(hashes(num_hashes), num_tokens)
    hashed = min(num_hashes // blocks, num_tokens // size)
    assert [(c.start, c.end) for c in chunks] == [(i * size, (i + 1) * size) for i in range(hashed)]
    assert keys_of(chunks) == [
        b"n:" + hashes(num_hashes)[(i + 1) * blocks - 1] for i in range(hashed)
    ]
    assert chunker.chunks(hashes(num_hashes), num_tokens, first=2) == chunks[2:]


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


HASH_ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


@pytest.mark.parametrize("seed", [None, "0", "random"])
@pytest.mark.parametrize("hash_algo", HASH_ALGORITHMS)
def test_block_hashes_of_a_sha256_or_with_a_seed_are_stable(
    hash_algo: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_seed(seed, monkeypatch)
    expected = hash_algo.startswith("sha256") or seed is not None
    assert block_hashes_are_stable(hash_algo) is expected


@pytest.mark.engine  # no engine, but as much time
@pytest.mark.parametrize("seed", [None, "0", "random", ""])
@pytest.mark.parametrize("hash_algo", HASH_ALGORITHMS)
def test_block_hashes_are_stable_where_vllm_starts_them_from_the_same_seed(
    hash_algo: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashing = pytest.importorskip("vllm.utils.hashing")
    kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    set_seed(seed, monkeypatch)
    function = hashing.get_hash_fn_by_name(hash_algo)
    # A process asks once: two answers are two processes'.
    one, other = (kv_cache_utils.resolve_none_hash_seed(function) for _ in range(2))
    assert block_hashes_are_stable(hash_algo) is (one == other)


def set_seed(seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)


# Stable keys


@pytest.mark.parametrize("stable", [True, False])
def test_keys_out_of_block_hashes_are_as_stable_as_the_engine_says(stable: bool) -> None:
    assert BlockHashChunker(2, 2, b"", stable=stable).stable is stable


def test_keys_are_not_stable_unless_told() -> None:
    assert not BlockHashChunker(2, 2, b"").stable


@pytest.mark.parametrize(
    ("chunker", "settings"),
    [
        (TokenChunker(2), []),
        (BlockHashChunker(2, 2, b""), ["PYTHONHASHSEED", "prefix_caching_hash_algo"]),
        (
            TokenDatabaseAdapter(SimpleNamespace(chunk_size=2)),
            ["PYTHONHASHSEED", "pre_caching_hash_algorithm"],
        ),
    ],
)
def test_each_chunker_names_what_makes_its_keys_stable(
    chunker: TokenChunker | BlockHashChunker | TokenDatabaseAdapter, settings: list[str]
) -> None:
    assert bool(chunker.what_makes_stable) is bool(settings)
    assert all(name in chunker.what_makes_stable for name in settings)


def test_a_tail_has_a_key_where_it_is_asked_for() -> None:
    whole = TokenChunker(4).chunks(range(10))
    with_tail = TokenChunker(4, save_unfull_chunk=True).chunks(range(10))
    assert with_tail[:2] == whole
    assert (with_tail[2].start, with_tail[2].end) == (8, 10)
    # Neither the chunk that it grows into nor a longer tail is the same.
    longer = TokenChunker(4, save_unfull_chunk=True).chunks(range(11))
    assert with_tail[2].key not in {longer[2].key, TokenChunker(4).chunks(range(12))[2].key}
    assert TokenChunker(4, save_unfull_chunk=True).chunks(range(8)) == whole
