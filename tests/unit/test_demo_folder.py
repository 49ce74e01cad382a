"""The demo's folder: emptied of the demo's files and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import DemoError
from demo.folder import own_folder, request_id


def test_files_of_an_earlier_demo_go_and_others_stay(tmp_path: Path) -> None:
    name = request_id(1, 3, "Lincoln's Second Inaugural") + "-1a2b3c4d.safetensors"
    own = [name, f"{name}.lock", f"{name}.error", f".{name}.00ff00ff.tmp"]
    others = ["mine.safetensors", f"my-{name}", f"{name}/", "notes.txt", "engine.log"]
    with own_folder(tmp_path):
        pass
    for other in (*own[1:], *others):
        (tmp_path / other).mkdir() if other.endswith("/") else (tmp_path / other).touch()
    with own_folder(tmp_path):
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {other.rstrip("/") for other in others} | {".hidden-cache-demo"}


def test_a_sample_of_an_earlier_demo_goes(tmp_path: Path) -> None:
    with own_folder(tmp_path):
        sample = tmp_path / f"{request_id(2, 1, 'no document')}-1a2b3c4d.safetensors"
        sample.touch()
    with own_folder(tmp_path):
        assert not sample.exists()


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(DemoError, match="choose a new or empty folder"), own_folder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_in_use_by_another_demo_is_refused(tmp_path: Path) -> None:
    with (
        own_folder(tmp_path),
        pytest.raises(DemoError, match="another demo is writing"),
        own_folder(tmp_path),
    ):
        pass


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DemoError, match="--output"), own_folder(file):
        pass
