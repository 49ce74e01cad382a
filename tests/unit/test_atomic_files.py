"""One claim at a time, no litter of the dead, none of the living swept away, and no way out."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hidden_cache import atomic_files
from hidden_cache.atomic_files import claim, folder_of, is_temporary, prepare_folder, published
from tests.threads import PATIENCE_S


def temporaries(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if is_temporary(name)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    with folder_of(os.path.join(tmp_path, "")) as (fd, _):
        yield fd


# Claims

CONTENDERS = """
import fcntl, multiprocessing, os, sys, threading
from hidden_cache.atomic_files import claim

folder = os.open(sys.argv[1], os.O_PATH)
ROUNDS, PROCESSES, THREADS = 300, 4, 3

def contend(barrier, wins, leads):
    for number in range(ROUNDS):
        name, held = f"lock{number}", []
        if leads:
            if number % 3:  # somebody had it before
                os.close(claim(folder, name))
            if number % 3 == 2:  # and is still being read
                held.append(os.open(name, os.O_RDONLY, dir_fd=folder))
                fcntl.flock(held[-1], fcntl.LOCK_SH)
        barrier.wait()
        try:
            held.append(claim(folder, name))
            os.pwrite(held[-1], b"mine", 0)
            with wins.get_lock():
                wins[number] += 1
        except BlockingIOError:
            pass
        barrier.wait()
        found = os.open(name, os.O_RDONLY, dir_fd=folder)
        assert os.pread(found, 9, 0) == b"mine"  # the winner's is the one of that name
        os.close(found)
        barrier.wait()
        for fd in held:
            os.close(fd)

def process(barrier, wins, leads):
    threads = [
        threading.Thread(target=contend, args=(barrier, wins, leads and not n))
        for n in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

context = multiprocessing.get_context("fork")
barrier, wins = context.Barrier(PROCESSES * THREADS, timeout=60), context.Array("i", ROUNDS)
processes = [context.Process(target=process, args=(barrier, wins, not n)) for n in range(PROCESSES)]
for child in processes:
    child.start()
for child in processes:
    child.join()
assert list(wins) == [1] * ROUNDS, list(wins)
assert sorted(os.listdir(sys.argv[1])) == sorted(f"lock{n}" for n in range(ROUNDS))
"""


def test_of_many_writers_at_once_exactly_one_has_it(tmp_path: Path) -> None:
    """In several processes with several threads each, on names that are new, old, or being read."""
    done = subprocess.run(
        [sys.executable, "-c", CONTENDERS, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_readers_are_in_nobodys_way(folder: int, tmp_path: Path) -> None:
    os.close(claim(folder, "lock"))
    with open(tmp_path / "lock") as reader:
        fcntl.flock(reader.fileno(), fcntl.LOCK_SH)
        first = claim(folder, "lock")
        with pytest.raises(BlockingIOError):
            claim(folder, "lock")
    os.close(first)
    assert os.listdir(tmp_path) == ["lock"]


def test_a_writer_that_replaces_a_name_meets_one_that_was_faster(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw readers only; the other has come and gone before this one looks again."""
    os.close(claim(folder, "lock"))
    winner: list[int] = []
    replace = atomic_files._replace

    def be_late(old: int, folder: int, name: str) -> int:
        if not winner:
            winner.append(-1)
            winner[0] = claim(folder, name)
        return replace(old, folder, name)

    with open(tmp_path / "lock") as reader:
        fcntl.flock(reader.fileno(), fcntl.LOCK_SH)
        monkeypatch.setattr(atomic_files, "_replace", be_late)
        with pytest.raises(BlockingIOError):
            claim(folder, "lock")
    assert atomic_files._is_named(winner[0], folder, "lock")
    os.close(winner[0])


def test_a_claimed_file_is_empty(folder: int, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("what somebody wrote into it")
    os.close(claim(folder, "lock"))
    assert (tmp_path / "lock").read_text() == ""


def test_without_links_a_name_is_still_had_by_one(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*arguments: Any, **folders: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    fd = claim(folder, "lock")
    with pytest.raises(BlockingIOError):
        claim(folder, "lock")
    os.close(fd)
    assert os.listdir(tmp_path) == ["lock"]


def test_a_link_in_the_place_of_a_lock_is_not_followed(folder: int, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("content")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        claim(folder, "lock")
    assert (tmp_path / "precious").read_text() == "content"


def test_a_file_system_without_locks_has_no_claims_but_takes_files(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks"):
        claim(folder, "lock")
    assert os.listdir(tmp_path) == []
    with published(str(tmp_path / "file")) as fd:
        os.write(fd, b"whole")
        prepare_folder(str(tmp_path))
    assert (tmp_path / "file").read_text() == "whole"


# What killed writers leave

KILLED = """
import sys
from hidden_cache.atomic_files import published

with published(sys.argv[1]) as fd:
    print("writing", flush=True)
    sys.stdin.read()  # until killed
"""


class Writer:
    """A process that is writing a file until it is killed."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "writing\n"

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[str], Writer]]:
    writers: list[Writer] = []

    def make(name: str = "file") -> Writer:
        writers.append(Writer(tmp_path / name))
        return writers[-1]

    yield make
    for made in writers:
        made.kill()


def test_what_a_killed_writer_left_is_removed_at_the_next_start(
    writer: Callable[[], Writer], tmp_path: Path
) -> None:
    one, other = writer(), writer()
    assert len(temporaries(tmp_path)) == 2
    assert prepare_folder(str(tmp_path)) == 0, "they live"
    assert len(temporaries(tmp_path)) == 2
    one.kill()
    assert prepare_folder(str(tmp_path)) == 1
    assert len(temporaries(tmp_path)) == 1
    other.kill()
    assert prepare_folder(str(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


def test_a_writer_of_this_process_lives_too(tmp_path: Path) -> None:
    with published(str(tmp_path / "file")) as fd:
        os.write(fd, b"whole")
        assert prepare_folder(str(tmp_path)) == 0
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "whole"


def test_a_lock_that_dies_before_it_has_its_name_is_removed(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, name = atomic_files._make_temporary(folder, 0o644)
    os.link(name, "lock", src_dir_fd=folder, dst_dir_fd=folder)
    assert prepare_folder(str(tmp_path)) == 0
    os.close(fd)  # killed between giving the one name and taking the other
    assert prepare_folder(str(tmp_path)) == 1
    assert os.listdir(tmp_path) == ["lock"]


@pytest.mark.parametrize(("age_s", "left"), [(0, 1), (3000, 1), (4000, 0)])
def test_what_another_machine_may_be_writing_is_left_for_an_hour(
    age_s: int, left: int, tmp_path: Path
) -> None:
    """Its locks may not be seen here."""
    boot = "0" * 8 if atomic_files._this_boot() != "0" * 8 else "1" * 8
    file = tmp_path / f".hscache-{boot}01234567.tmp"
    file.write_text("")
    os.utime(file, (time.time() - age_s,) * 2)
    assert prepare_folder(str(tmp_path)) == 1 - left
    assert len(temporaries(tmp_path)) == left


def test_nothing_of_others_is_removed(tmp_path: Path) -> None:
    names = ["a.safetensors", ".x.0a1b2c3d.tmp", ".hscache-x.tmp", ".hscache-0123456789abcdef.tmp~"]
    for name in names:
        (tmp_path / name).write_text("")
    (tmp_path / ".hscache-0123456789abcdef.tmp").mkdir()
    link = tmp_path / f".hscache-{atomic_files._this_boot()}01234567.tmp"
    link.symlink_to("a.safetensors")
    assert prepare_folder(str(tmp_path)) == 0
    assert len(os.listdir(tmp_path)) == len(names) + 2


def test_folders_below_are_looked_through_where_asked(
    writer: Callable[[str], Writer], tmp_path: Path
) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    writer("a/b/file").kill()
    assert prepare_folder(str(tmp_path)) == 0
    assert prepare_folder(str(tmp_path), below=True) == 1
    assert os.listdir(below) == []


def test_looking_ends(writer: Callable[[], Writer], tmp_path: Path) -> None:
    writer().kill()
    assert prepare_folder(str(tmp_path), within_s=-1) == 0
    assert prepare_folder(str(tmp_path)) == 1


def test_a_writer_whose_new_file_is_taken_for_dead_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    swept: list[bool] = []

    def sweep_first(fd: int, how: int) -> None:
        if not swept:
            swept.append(False)
            (name,) = temporaries(tmp_path)
            with folder_of(os.path.join(tmp_path, "")) as (folder, _):
                swept[0] = atomic_files._remove_if_dead(folder, name, time.time() + 60)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    with published(str(tmp_path / "file")) as fd:
        os.write(fd, b"whole")
    assert swept == [True]
    assert os.listdir(tmp_path) == ["file"]


def test_writers_and_starts_side_by_side(tmp_path: Path) -> None:
    done = threading.Event()
    removed: list[int] = []

    def sweep() -> None:
        while not done.is_set():
            removed.append(prepare_folder(str(tmp_path)))

    def write(prefix: str) -> None:
        for number in range(200):
            with published(str(tmp_path / f"{prefix}{number}")) as fd:
                os.write(fd, b"whole")

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    failed: list[BaseException] = []

    def guarded(prefix: str) -> None:
        try:
            write(prefix)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=guarded, args=(prefix,)) for prefix in "ab"]
    for thread in sweepers + writers:
        thread.start()
    for thread in writers:
        thread.join(PATIENCE_S)
    done.set()
    for thread in sweepers:
        thread.join(PATIENCE_S)
    assert failed == []
    assert len(os.listdir(tmp_path)) == 400


# Confinement


def test_folders_below_a_root_are_made(tmp_path: Path) -> None:
    with published(str(tmp_path / "a" / "b" / "file"), str(tmp_path)) as fd:
        os.write(fd, b"whole")
    assert (tmp_path / "a" / "b" / "file").read_text() == "whole"


def test_without_a_root_no_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), published(str(tmp_path / "a" / "file")):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["a", "a/b"])
def test_a_link_that_came_since_the_path_was_chosen_is_no_way_out(
    where: str, tmp_path: Path
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / where).parent.mkdir(parents=True)
    (outside / "b").mkdir(parents=True)
    (root / where).symlink_to(outside)
    with pytest.raises(NotADirectoryError), published(str(root / "a" / "b" / "f"), str(root)):
        pass
    assert [file for file in outside.rglob("*") if file.is_file()] == []


def test_a_link_in_the_place_of_a_folder_that_is_about_to_be_made_is_no_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    mkdir = os.mkdir

    def be_late(name: str, **folders: int) -> None:
        (root / "a").symlink_to(outside)
        mkdir(name, **folders)

    monkeypatch.setattr(os, "mkdir", be_late)
    with pytest.raises(NotADirectoryError), published(str(root / "a" / "file"), str(root)):
        pass
    assert os.listdir(outside) == []


def test_a_folder_that_turns_into_a_link_while_it_is_written_to_keeps_the_file(
    tmp_path: Path,
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a").mkdir(parents=True)
    outside.mkdir()
    with published(str(root / "a" / "file"), str(root)) as fd:
        os.write(fd, b"whole")
        (root / "a").rename(root / "moved")
        (root / "a").symlink_to(outside)
    assert os.listdir(outside) == []
    assert (root / "moved" / "file").read_text() == "whole"


def test_a_link_in_the_place_of_the_file_is_replaced(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.write_text("precious")
    (root / "file").symlink_to(outside)
    with published(str(root / "file"), str(root)) as fd:
        os.write(fd, b"whole")
    assert outside.read_text() == "precious"
    assert (root / "file").read_text() == "whole"


@pytest.mark.parametrize("path", ["outside/file", "root/../outside/file", "file"])
def test_a_path_outside_the_root_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").mkdir()
    place = published(str(tmp_path / path), str(tmp_path / "root"))
    with pytest.raises(PermissionError, match="outside"), place:
        pass
    assert os.listdir(tmp_path / "outside") == []


def test_a_root_that_is_a_link_itself_is_the_folder_it_means(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    with published(str(tmp_path / "link" / "file"), str(tmp_path / "link")):
        pass
    assert os.listdir(tmp_path / "root") == ["file"]
