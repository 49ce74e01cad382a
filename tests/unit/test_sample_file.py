"""Samples on disk: whole or not at all, and an answer for whoever waits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pickle
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hidden_cache import sample_file
from hidden_cache.errors import (
    DamagedSampleError,
    HiddenCacheError,
    NonFiniteRowsError,
    SampleRefusedError,
    UnsupportedVersionError,
)
from hidden_cache.sample_file import (
    SampleLock,
    Written,
    cleanup_hidden_states,
    error_path,
    load_hidden_states,
    lock_path,
    read_metadata,
    sample_name,
    write_error,
    write_sample,
)
from tests.threads import PATIENCE_S, Asking

repeatable = settings(derandomize=True, deadline=None, database=None)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "request.safetensors")


def rows_of(tokens: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(tokens * 2 * 3).view(tokens, 2, 3).to(dtype)


def write(path: str, rows: torch.Tensor | None = None, **metadata: str) -> Written:
    rows = rows_of() if rows is None else rows
    ids = torch.arange(len(rows)) + 100
    pieces = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    return write_sample(path, ids, (len(rows), 2, 3), rows.dtype, pieces, metadata)


def leftovers(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != "request.safetensors")


@contextlib.contextmanager
def watched_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that is set when a reader is about to wait for a lock."""
    waits = threading.Event()
    lock_shared = sample_file._lock_shared

    def announce(fd: int, path: str, deadline: float | None) -> None:
        waits.set()
        lock_shared(fd, path, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(sample_file, "_lock_shared", announce)
        yield waits


# Names


@pytest.mark.parametrize("ordinary", ["cmpl-0a1b2c_3.4~5", "0", "A-b", "x" * 200])
def test_ordinary_ids_are_unchanged(ordinary: str) -> None:
    assert sample_name(ordinary) == f"{ordinary}.safetensors"


@pytest.mark.parametrize(
    ("request_id", "name"),
    [
        ("a/b", "a%2Fb"),
        ("/etc/passwd", "%2Fetc%2Fpasswd"),
        ("..", "%2E."),
        (".", "%2E"),
        (".hidden", "%2Ehidden"),
        ("../../x", "%2E.%2F..%2Fx"),
        ("100%", "100%25"),
        ("%2F", "%252F"),
        ("a b\n\0", "a%20b%0A%00"),
        ("é", "%C3%A9"),
        ("", "="),
        ("=", "%3D"),
        ("\ud800", "%ED%A0%80"),
    ],
)
def test_odd_ids_are_encoded(request_id: str, name: str) -> None:
    assert sample_name(request_id) == f"{name}.safetensors"


def test_the_name_of_a_long_id_is_cut_and_nobody_elses() -> None:
    long = "x" * 300
    name = sample_name(long).removesuffix(".safetensors")
    assert len(name) == 200
    assert sample_name(name) != sample_name(long)
    assert sample_name(long + "y") != sample_name(long)


all_text = st.text(st.characters(), max_size=400)


@repeatable
@given(all_text)
def test_any_id_gives_one_name_inside_the_folder_with_room_for_every_suffix(
    request_id: str,
) -> None:
    name = sample_name(request_id)
    assert os.path.basename(name) == name
    assert name not in (".", "..")
    assert not name.startswith(".")
    assert name.isascii()
    assert name.isprintable()
    for made in (name, lock_path(name), error_path(name)):
        assert len(made) <= 255


@repeatable
@given(all_text, all_text)
def test_different_ids_have_different_names(one: str, other: str) -> None:
    assert (sample_name(one) == sample_name(other)) == (one == other)
    name = sample_name(one).removesuffix(".safetensors")
    assert name == one or sample_name(name) != sample_name(one)


@pytest.mark.parametrize("request_id", ["../../etc/x", "y" * 300, "..", "", "é" * 200])
def test_a_sample_with_an_odd_id_can_be_written_locked_refused_and_read(
    request_id: str, tmp_path: Path
) -> None:
    path = str(tmp_path / sample_name(request_id))
    lock = SampleLock(path)
    write(path, request_id=request_id)
    lock.release()
    assert read_metadata(path)["request_id"] == request_id
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows_of())
    write_error(path, request_id, "aborted", "why")
    with pytest.raises(SampleRefusedError):
        load_hidden_states(path)
    assert {p.parent for p in tmp_path.rglob("*")} == {tmp_path}


# Writing


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_a_sample_is_what_safetensors_itself_would_write(
    dtype: torch.dtype, path: str, tmp_path: Path
) -> None:
    rows = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    written = write(path, rows, model="m", layer_ids="1,2")
    assert written == Written(os.path.getsize(path), 0)
    tensors = {"hidden_states": rows, "token_ids": torch.arange(7) + 100}
    theirs = str(tmp_path / "theirs")
    save_file(tensors, theirs)
    for loaded in (load_file(path), load_hidden_states(path)):
        expected = load_file(theirs)
        assert loaded.keys() == expected.keys()
        for name, tensor in loaded.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"hscache_version": "1.0", "model": "m", "layer_ids": "1,2"}


def test_one_buffer_may_serve_all_pieces(path: str) -> None:
    rows = rows_of(6)
    buffer = torch.empty(2, 2, 3)

    def pieces() -> Iterator[torch.Tensor]:
        for start in range(0, 6, 2):
            yield buffer.copy_(rows[start : start + 2])

    write_sample(path, torch.arange(6), (6, 2, 3), torch.float32, pieces(), {})
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows)


def test_pieces_need_not_be_contiguous(path: str) -> None:
    rows = rows_of(4)
    strided = torch.empty(4, 3, 2).transpose(1, 2).copy_(rows)
    assert not strided.is_contiguous()
    write_sample(path, torch.arange(4), (4, 2, 3), torch.float32, [strided], {})
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows)


def test_a_prompt_without_ids_has_none(path: str) -> None:
    write_sample(path, torch.empty(0, dtype=torch.int64), (5, 2, 3), torch.float32, [rows_of()], {})
    sample = load_hidden_states(path)
    assert sample["token_ids"].shape == (0,)
    assert torch.equal(sample["hidden_states"], rows_of())


def test_a_sample_without_tokens_is_a_sample(path: str) -> None:
    write_sample(path, torch.empty(0, dtype=torch.int64), (0, 2, 3), torch.float32, [], {})
    assert load_hidden_states(path)["hidden_states"].shape == (0, 2, 3)


def test_a_sample_is_readable_by_its_owner_only(path: str) -> None:
    old = os.umask(0)
    try:
        write(path)
        write_error(path, "r", "aborted", "why")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(error_path(path)).st_mode) == 0o600


@pytest.mark.parametrize("text", ['quote " and \\', "line\nbreak", "é 漢字 🙂", "half \ud800 pair"])
def test_metadata_may_be_any_text(text: str, path: str) -> None:
    write(path, note=text)
    assert read_metadata(path)["note"] == text.replace("\ud800", "?")
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows_of())


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([rows_of(4)], "the pieces are 96 bytes, must be 120"),
        ([rows_of(5), rows_of(1)], "the pieces are 144 bytes, must be 120"),
        ([], "the pieces are 0 bytes, must be 120"),
        ([rows_of(5, torch.float64)], "of torch.float64, must be .* of torch.float32"),
        ([rows_of(5).view(5, 3, 2)], "a piece is .5, 3, 2. .*, must be .n, 2, 3."),
    ],
)
def test_pieces_that_do_not_make_up_the_shape_leave_nothing_behind(
    pieces: list[torch.Tensor], message: str, path: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write_sample(path, torch.arange(5), (5, 2, 3), torch.float32, pieces, {})
    assert os.listdir(tmp_path) == []


def test_token_ids_that_are_not_one_for_each_row_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 token ids for 5 tokens"):
        write_sample(path, torch.arange(4), (5, 2, 3), torch.float32, [rows_of()], {})
    assert os.listdir(tmp_path) == []


def test_a_dtype_that_a_sample_does_not_take_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden states are torch.int32: a sample takes .*BF16"):
        write_sample(path, torch.arange(5), (5, 2, 3), torch.int32, [rows_of(5, torch.int32)], {})
    assert os.listdir(tmp_path) == []


def test_a_writer_that_fails_half_way_leaves_what_was_there(path: str, tmp_path: Path) -> None:
    write(path)
    seen: list[str] = []

    def pieces() -> Iterator[torch.Tensor]:
        yield rows_of(2, torch.float32) + 1
        seen.extend(leftovers(tmp_path))
        raise InterruptedError("no more rows")

    with pytest.raises(InterruptedError):
        write_sample(path, torch.arange(5), (5, 2, 3), torch.float32, pieces(), {})
    assert len(seen) == 1, "half a sample lies beside its place, not in it"
    assert leftovers(tmp_path) == []
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows_of())


def test_a_missing_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write(str(tmp_path / "gone" / "request.safetensors"))


FULL_DISK = """
import errno, os, resource, signal, sys
import torch
from hidden_cache import sample_file
from hidden_cache.errors import SampleRefusedError

folder, what, really = sys.argv[1], sys.argv[2], sys.argv[3] == "really"

def no_room(*arguments, **keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

path = os.path.join(folder, "request.safetensors")
lock = sample_file.SampleLock(path)
if what == "bytes" and not really:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
if what == "files" and really:
    try:
        for number in range(100):
            open(os.path.join(folder, f"filler{number}"), "x").close()
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
elif what == "files":
    sample_file.published = no_room
there = sorted(os.listdir(folder))
rows = torch.zeros(4096, 2, 64)
try:
    shape = (4096, 2, 64)
    sample_file.write_sample(path, torch.arange(4096), shape, rows.dtype, rows.split(512), {})
except OSError as error:
    assert error.errno in (errno.EFBIG, errno.ENOSPC), error
    assert sorted(os.listdir(folder)) == there, os.listdir(folder)
    try:
        lock.refuse("r", "write_failed", str(error))
        assert what == "bytes"
    except OSError:
        assert what == "files"
assert os.path.exists(sample_file.error_path(path)) == (what == "bytes")
try:
    sample_file.load_hidden_states(path)
except SampleRefusedError as error:
    print(error.request_id, error.reason, error.detail)
"""


@pytest.mark.parametrize(
    ("what", "option"), [("bytes", "size=1m"), ("files", "size=1m,nr_inodes=4")]
)
def test_a_full_disk_leaves_no_part_and_who_waits_learns_it(
    what: str, option: str, tmp_path: Path
) -> None:
    """Full of bytes, the reason still has room; without room for another file it has not."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f'mount -t tmpfs -o {option} tmpfs "{folder}" && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh"]
    really = "really"
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        command, really = [], "stand-in"  # no mounts for us here
    done = subprocess.run(
        [*command, sys.executable, "-c", FULL_DISK, str(folder), what, really],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("r write_failed [Errno ")


# Rows that are no numbers


def with_non_finite(*places: tuple[int, int]) -> torch.Tensor:
    rows = rows_of(7)
    for (token, layer), value in zip(
        places, [float("nan"), float("inf"), float("-inf")], strict=False
    ):
        rows[token, layer, 1] = value
    return rows


def write_looking(path: str, rows: torch.Tensor, non_finite: str) -> Written:
    ids = torch.arange(len(rows))
    return write_sample(
        path,
        ids,
        (len(rows), 2, 3),
        rows.dtype,
        torch.split(rows, 2),
        {"a": "b"},
        non_finite=non_finite,
    )


def test_non_finite_rows_are_refused_with_their_number_and_first_place(
    path: str, tmp_path: Path
) -> None:
    rows = with_non_finite((5, 1), (3, 0), (5, 0))
    with pytest.raises(NonFiniteRowsError, match=r"3 of 14 rows .* at token 3: set ") as caught:
        write_looking(path, rows, "refuse")
    assert (caught.value.rows, caught.value.of, caught.value.first_token) == (3, 14, 3)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.rows) == (str(caught.value), 3)
    assert os.listdir(tmp_path) == []


def test_non_finite_rows_are_marked(path: str) -> None:
    rows = with_non_finite((5, 1), (3, 0), (5, 0))
    written = write_looking(path, rows, "mark")
    assert written == Written(os.path.getsize(path), 3)
    assert read_metadata(path) == {"hscache_version": "1.0", "a": "b", "non_finite_rows": "3"}
    loaded = load_hidden_states(path)["hidden_states"]
    assert torch.equal(loaded.view(torch.int32), rows.view(torch.int32))


@pytest.mark.parametrize("policy", ["refuse", "mark"])
def test_a_sample_that_was_looked_at_says_so(policy: str, path: str) -> None:
    assert write_looking(path, rows_of(7), policy).non_finite_rows == 0
    assert read_metadata(path)["non_finite_rows"] == "0"


def test_nobody_looks_where_all_rows_are_allowed(path: str) -> None:
    assert write_looking(path, with_non_finite((0, 0)), "allow").non_finite_rows == 0
    assert "non_finite_rows" not in read_metadata(path)


def test_the_number_of_marked_rows_has_room_in_the_header(path: str) -> None:
    rows = torch.full((6000, 2, 3), float("nan"))
    assert write_looking(path, rows, "mark").non_finite_rows == 12_000
    assert read_metadata(path)["non_finite_rows"] == "12000"
    assert load_hidden_states(path)["hidden_states"].isnan().all()


# Giving up


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_write_can_be_given_up_before_each_piece_and_before_it_is_published(
    at: int, path: str, tmp_path: Path
) -> None:
    asked = 0

    def give_up() -> None:
        nonlocal asked
        asked += 1
        if asked == at:
            raise InterruptedError("too late")

    rows = rows_of(6)
    with pytest.raises(InterruptedError, match="too late"):
        write_sample(
            path,
            torch.arange(6),
            (6, 2, 3),
            rows.dtype,
            torch.split(rows, 2),
            {},
            give_up=give_up,
        )
    assert os.listdir(tmp_path) == []


# Open files


FEW_FILES = """
import os, resource, sys
import torch
from hidden_cache.sample_file import SampleLock, load_hidden_states, write_error, write_sample

folder = sys.argv[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
locks = []
while not locks or locks[-1].open_files_limit is None:
    path = os.path.join(folder, str(len(locks)))
    locks.append(SampleLock(path))
assert locks[-1].open_files_limit == 128
*held, crowding = locks
crowding.refuse("r", "too_many_files", "why")
SampleLock(os.path.join(folder, "next")).release()
files = [open(os.devnull) for _ in range(20)]  # as the engine does
rows = torch.zeros(5, 2, 3)
for lock in held:
    write_sample(lock.path, torch.arange(5), (5, 2, 3), rows.dtype, [rows], {})
    lock.release()
    load_hidden_states(lock.path)
print(len(held))
"""


def test_locks_leave_files_to_open_for_everything_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert 20 < int(done.stdout) <= 96


def test_there_is_no_limit_where_files_are_unlimited(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = SampleLock(path)
    for limit, expected in ((resource.RLIM_INFINITY, None), (lock._fd + 1, lock._fd + 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert lock.open_files_limit == expected
    lock.release()


# Waiting for the writer


def test_a_reader_waits_for_its_writer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = SampleLock(path)
    with watched_waits(monkeypatch) as waits:
        reader = Asking(load_hidden_states, path)
        assert waits.wait(PATIENCE_S)
    write(path)
    lock.release()
    assert torch.equal(reader.answer()["hidden_states"], rows_of())


def test_many_readers_get_what_one_writer_brings(path: str) -> None:
    lock = SampleLock(path)
    readers = [
        Asking(load_hidden_states, path, timeout)
        for timeout in (None, None, PATIENCE_S, PATIENCE_S)
    ]
    write(path)
    lock.release()
    for reader in readers:
        assert torch.equal(reader.answer()["hidden_states"], rows_of())


def test_a_reason_reaches_who_waits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = SampleLock(path)
    with watched_waits(monkeypatch) as waits:
        reader = Asking(load_hidden_states, path)
        assert waits.wait(PATIENCE_S)
    write_error(path, "r/1", "pool_full", "the whole pool has 3")
    lock.release()
    with pytest.raises(SampleRefusedError, match="pool_full: the whole pool has 3") as caught:
        reader.answer()
    refused = caught.value
    assert (refused.path, refused.request_id, refused.reason, refused.detail) == (
        path,
        "r/1",
        "pool_full",
        "the whole pool has 3",
    )
    with open(error_path(path)) as file:
        assert json.load(file)["version"] == 1


def test_a_reader_that_may_not_wait_longer_says_so(path: str) -> None:
    lock = SampleLock(path)
    with pytest.raises(TimeoutError, match="still being written"):
        load_hidden_states(path, timeout=0.01)
    lock.release()


def test_a_reason_reaches_who_waits_in_a_folder_that_is_removed(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = SampleLock(path)
    with watched_waits(monkeypatch) as waits:
        reader = Asking(load_hidden_states, path)
        assert waits.wait(PATIENCE_S)
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        lock.refuse("r", "write_failed", "the folder is gone")
    with pytest.raises(SampleRefusedError, match="write_failed: the folder is gone"):
        reader.answer()


def test_a_reason_in_the_lock_ends_with_the_next_request(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sample_file, "write_error", full)
    lock = SampleLock(path)
    with pytest.raises(OSError, match="No space"):
        lock.refuse("r", "write_failed", "full")
    SampleLock(path).release()
    with pytest.raises(SampleRefusedError, match="writer_died"):
        load_hidden_states(path)


def test_a_refused_lock_is_released_and_refused_once(path: str) -> None:
    lock = SampleLock(path)
    lock.refuse("r", "aborted", "why")
    lock.refuse("r", "shutdown", "another")
    with pytest.raises(SampleRefusedError, match="aborted: why"):
        load_hidden_states(path)
    SampleLock(path).release()


def test_a_lock_let_go_without_an_answer_means_that_the_writer_died(path: str) -> None:
    SampleLock(path).release()
    with pytest.raises(SampleRefusedError) as caught:
        load_hidden_states(path)
    assert caught.value.reason == "writer_died"


KILLED_WRITER = """
import sys
import torch
from hidden_cache.sample_file import SampleLock, write_sample

def pieces():
    yield torch.zeros(2, 2, 3)
    print("writing", flush=True)
    sys.stdin.read()  # until killed

lock = SampleLock(sys.argv[1])
print("locked", flush=True)
write_sample(sys.argv[1], torch.arange(5), (5, 2, 3), torch.float32, pieces(), {})
"""


def test_a_killed_writer_is_told_to_who_waits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "locked\n"
        assert writer.stdout.readline() == "writing\n"
        with watched_waits(monkeypatch) as waits:
            reader = Asking(load_hidden_states, path)
            assert waits.wait(PATIENCE_S)
        writer.send_signal(signal.SIGKILL)
    with pytest.raises(SampleRefusedError) as caught:
        reader.answer()
    assert caught.value.reason == "writer_died"
    assert not os.path.exists(path)


def test_what_is_not_there_is_not_waited_for(path: str) -> None:
    with pytest.raises(FileNotFoundError, match="neither a sample, nor a reason, nor a writer"):
        load_hidden_states(path)
    with pytest.raises(FileNotFoundError):
        load_hidden_states(path, timeout=0.01)


def test_with_a_timeout_a_sample_may_appear_later(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = threading.Event()
    load = sample_file._load

    def announce(path: str) -> dict[str, torch.Tensor]:
        try:
            return load(path)
        except FileNotFoundError:
            missed.set()
            raise

    monkeypatch.setattr(sample_file, "_load", announce)
    reader = Asking(load_hidden_states, path, PATIENCE_S)
    assert missed.wait(PATIENCE_S)
    write(path)
    assert torch.equal(reader.answer()["hidden_states"], rows_of())


# Locks


def test_a_second_live_writer_is_refused(path: str) -> None:
    lock = SampleLock(path)
    with pytest.raises(BlockingIOError):
        SampleLock(path)
    lock.release()
    SampleLock(path).release()


def test_a_refused_second_writer_destroys_nothing(path: str, tmp_path: Path) -> None:
    lock = SampleLock(path)
    write(path)
    write_error(path, "r", "aborted", "why")
    there = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(BlockingIOError):
        SampleLock(path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == there
    with open(lock_path(path)) as reader, pytest.raises(BlockingIOError):
        fcntl.flock(reader.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    lock.release()


def test_a_lock_clears_what_an_earlier_request_left(path: str, tmp_path: Path) -> None:
    SampleLock(path).release()
    write(path)
    write_error(path, "r", "aborted", "why")
    lock = SampleLock(path)
    assert leftovers(tmp_path) == ["request.safetensors.lock"]
    assert not os.path.exists(path)
    write(path, rows_of() + 1)
    lock.release()
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows_of() + 1)


def test_a_lock_is_held_from_the_moment_it_has_its_name(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []

    def check_first(give_name: Callable[..., None]) -> Callable[..., None]:
        def checked(source: str, target: str, **folders: int) -> None:
            nameless = os.path.join(os.path.dirname(path), source)
            with open(nameless) as file, pytest.raises(BlockingIOError):
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            named.append(target)
            give_name(source, target, **folders)

        return checked

    for name in ("rename", "link"):
        monkeypatch.setattr(os, name, check_first(getattr(os, name)))
    SampleLock(path).release()
    with open(lock_path(path)) as reader:
        fcntl.flock(reader.fileno(), fcntl.LOCK_SH)
        SampleLock(path).release()
    assert named == ["request.safetensors.lock"] * 2


def test_a_reader_whose_sample_the_next_request_takes_away_waits_for_that_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SampleLock(path).release()
    write(path)
    load = sample_file._load
    looks, taken_away, missed = threading.Event(), threading.Event(), threading.Event()

    def pause(path: str) -> dict[str, torch.Tensor]:
        looks.set()
        assert taken_away.wait(PATIENCE_S)
        try:
            return load(path)
        except FileNotFoundError:
            missed.set()
            raise

    monkeypatch.setattr(sample_file, "_load", pause)
    reader = Asking(load_hidden_states, path)
    assert looks.wait(PATIENCE_S)
    lock = SampleLock(path)
    taken_away.set()
    assert missed.wait(PATIENCE_S)
    write(path, rows_of() + 1)
    lock.release()
    assert torch.equal(reader.answer()["hidden_states"], rows_of() + 1)


def test_a_reader_of_a_replaced_lock_waits_for_the_new_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SampleLock(path).release()
    write(path)
    is_current = sample_file._is_current
    met_the_old_one, replaced = threading.Event(), threading.Event()
    answers: list[bool] = []

    def pause(fd: int, lock: str) -> bool:
        if not met_the_old_one.is_set():
            met_the_old_one.set()
            assert replaced.wait(PATIENCE_S)
        answers.append(is_current(fd, lock))
        return answers[-1]

    monkeypatch.setattr(sample_file, "_is_current", pause)
    reader = Asking(load_hidden_states, path)
    assert met_the_old_one.wait(PATIENCE_S)
    lock = SampleLock(path)  # the next request of that name
    replaced.set()
    write(path, rows_of() + 1)
    lock.release()
    assert torch.equal(reader.answer()["hidden_states"], rows_of() + 1)
    assert answers == [False, True]


def test_a_lock_that_cannot_be_had_leaves_nothing_behind(path: str, tmp_path: Path) -> None:
    os.mkdir(lock_path(path))
    with pytest.raises(OSError, match=r"request\.safetensors\.lock"):
        SampleLock(path)
    assert leftovers(tmp_path) == ["request.safetensors.lock"]


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(path: str) -> None:
    lock = SampleLock(path)
    inherited = os.dup(lock._fd)  # as a child has it
    lock.release()
    SampleLock(path).release()
    os.close(inherited)


def test_releasing_twice_does_not_close_somebody_elses_file(path: str, tmp_path: Path) -> None:
    lock = SampleLock(path)
    lock.release()
    with open(tmp_path / "other", "w") as other:
        lock.release()
        other.write("x")


# Versions and damage


def write_raw(path: str, header: Any, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)


def with_version(version: str) -> dict[str, Any]:
    return {
        "__metadata__": {"hscache_version": version},
        "token_ids": {"dtype": "I64", "shape": [0], "data_offsets": [0, 0]},
        "hidden_states": {"dtype": "F32", "shape": [0, 1, 1], "data_offsets": [0, 0]},
    }


def test_a_newer_minor_version_is_read(path: str) -> None:
    write_raw(path, with_version("1.7"))
    assert load_hidden_states(path)["hidden_states"].shape == (0, 1, 1)


@pytest.mark.parametrize("version", ["2.0", "10.0", "0.9", "", "x"])
def test_another_major_version_is_refused(version: str, path: str) -> None:
    write_raw(path, with_version(version))
    for read in (load_hidden_states, read_metadata):
        with pytest.raises(UnsupportedVersionError, match=f"version {version}, .* reads 1.0"):
            read(path)


def test_a_file_without_our_metadata_is_read(path: str) -> None:
    save_file({"hidden_states": rows_of(), "token_ids": torch.arange(5)}, path)
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows_of())
    assert read_metadata(path) == {}


@pytest.mark.parametrize(
    "tensors",
    [
        {"hidden_states": rows_of()},
        {"token_ids": torch.arange(5)},
        {"hidden_states": rows_of(), "token_ids": torch.arange(4)},
        {"hidden_states": rows_of(), "token_ids": torch.arange(5, dtype=torch.int32)},
        {"hidden_states": rows_of().view(5, 6), "token_ids": torch.arange(5)},
        {"other": rows_of()},
    ],
    ids=lambda tensors: " ".join(f"{name}{list(t.shape)}" for name, t in tensors.items()),
)
def test_a_file_of_other_tensors_is_no_sample(tensors: dict[str, torch.Tensor], path: str) -> None:
    save_file(tensors, path)
    with pytest.raises(DamagedSampleError, match="must hold hidden_states"):
        load_hidden_states(path)


def original(folder: Path) -> bytes:
    path = folder / "original"
    write(str(path), model="m", layer_ids="1,2")
    return path.read_bytes()


def test_no_cut_off_file_is_a_sample(path: str, tmp_path: Path) -> None:
    whole = original(tmp_path)
    for length in range(len(whole)):
        Path(path).write_bytes(whole[:length])
        with pytest.raises(DamagedSampleError):
            load_hidden_states(path)


@settings(repeatable, max_examples=300)
@given(data=st.data())
def test_a_damaged_header_is_an_error_or_changes_no_row(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    whole = bytearray(original(folder))
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header_bytes - 1))
        whole[place] = data.draw(st.integers(0, 255))
    path = folder / "damaged"
    path.write_bytes(whole)
    try:
        sample = load_hidden_states(str(path))
    except HiddenCacheError:
        return
    rows = sample["hidden_states"]
    assert (rows.dim(), rows.nbytes) == (3, rows_of().nbytes)
    assert rows.contiguous().view(torch.uint8).flatten().tolist() == list(whole[-rows.nbytes :])


@settings(repeatable, max_examples=100)
@given(content=st.binary(max_size=300))
def test_garbage_is_no_sample(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("garbage") / "request.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedSampleError, match="cannot be read"):
        load_hidden_states(path)
    with pytest.raises(DamagedSampleError, match="cannot be read"):
        read_metadata(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b'{"reason": "x"}', b"\xff\xfe\x00", b"[" * 100_000],
)
def test_a_damaged_reason_is_still_a_refusal(content: bytes, path: str) -> None:
    Path(error_path(path)).write_bytes(content)
    with pytest.raises(SampleRefusedError) as caught:
        load_hidden_states(path)
    assert caught.value.reason == "unknown"


# Cleaning up


def present(path: str) -> list[bool]:
    return [os.path.exists(name) for name in (path, lock_path(path), error_path(path))]


@pytest.mark.parametrize(("keep", "left"), [(False, [False] * 3), (True, [True, False, False])])
def test_cleanup_removes_the_sample_and_what_is_beside_it(
    keep: bool, left: list[bool], path: str
) -> None:
    SampleLock(path).release()
    write(path)
    write_error(path, "r", "aborted", "why")
    cleanup_hidden_states(path, keep_hidden_states=keep)
    assert present(path) == left
    cleanup_hidden_states(Path(path), keep_hidden_states=keep)
    assert present(path) == left


def test_a_loaded_sample_outlives_its_file(path: str) -> None:
    write(path)
    sample = load_hidden_states(path)
    cleanup_hidden_states(path)
    assert torch.equal(sample["hidden_states"], rows_of())
