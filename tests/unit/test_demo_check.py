"""The demo's check of its files: each kind of mistake is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from demo.check import check_files
from demo.engine import CHUNK_TOKENS, LAYERS, Pass, Sample
from demo.prompts import Prompt

TOKENS = list(range(CHUNK_TOKENS + 40))
ROWS = torch.arange(len(TOKENS) * len(LAYERS) * 8, dtype=torch.float32).view(-1, len(LAYERS), 8)


@pytest.fixture
def passes(tmp_path: Path) -> list[Pass]:
    """Two passes over one prompt; in the second its chunk comes from the pool."""
    return [
        Pass(number, 1.0, [sample(tmp_path / f"{number}.safetensors", pooled)])
        for number, pooled in ((1, 0), (2, CHUNK_TOKENS))
    ]


def sample(path: Path, pooled: int) -> Sample:
    write(path, ROWS, TOKENS)
    return Sample(
        prompt=Prompt("document", "question", "text"),
        token_ids=TOKENS,
        answer="answer",
        path=path,
        file_bytes=path.stat().st_size,
        row_bytes=ROWS.nbytes,
        tokens_from_pool=pooled,
    )


def write(path: Path, rows: torch.Tensor, token_ids: list[int]) -> None:
    save_file({"hidden_states": rows, "token_ids": torch.tensor(token_ids)}, path)


def problems(passes: list[Pass]) -> str:
    return "\n".join(check_files(passes, torch.float32)[0])


def test_right_files_pass_and_their_pooled_rows_are_counted(passes: list[Pass]) -> None:
    assert check_files(passes, torch.float32) == ([], CHUNK_TOKENS * len(LAYERS))


def test_token_ids_of_another_prompt(passes: list[Pass]) -> None:
    write(passes[0].samples[0].path, ROWS, TOKENS[::-1])
    assert "token ids are not the prompt's" in problems(passes)


def test_a_row_too_few(passes: list[Pass]) -> None:
    write(passes[0].samples[0].path, ROWS[:-1].clone(), TOKENS[:-1])
    assert f"the rows are [{len(TOKENS) - 1}, " in problems(passes)


def test_another_dtype(passes: list[Pass]) -> None:
    write(passes[0].samples[0].path, ROWS.bfloat16(), TOKENS)
    assert "of torch.bfloat16" in problems(passes)


def test_rows_from_the_pool_that_changed(passes: list[Pass]) -> None:
    rows = ROWS.clone()
    rows[CHUNK_TOKENS - 1, -1, -1] += 0.5
    write(passes[1].samples[0].path, rows, TOKENS)
    assert "rows from the pool are not those of 1.safetensors" in problems(passes)


def test_rows_from_a_pool_that_nobody_filled(passes: list[Pass]) -> None:
    first = replace(passes[0], samples=[replace(passes[0].samples[0], tokens_from_pool=256)])
    assert "nobody put them there" in problems([first])


def test_a_chunk_gathered_twice(passes: list[Pass]) -> None:
    second = replace(passes[1], samples=[replace(passes[1].samples[0], tokens_from_pool=0)])
    assert "0 tokens came from the pool, not the 256" in problems([passes[0], second])
