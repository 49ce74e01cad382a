"""The demo's prompts: documents first, so that they share prefixes, and clearly anyone's to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.prompts import NO_DOCUMENT, TEXT, prompts, read_document

PATHS = sorted(TEXT.glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_document_says_why_it_may_be_used(path: Path) -> None:
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert "public domain" in header[-1]


def test_prompts_of_a_document_start_with_it_and_lie_side_by_side() -> None:
    documents = [prompt.document for prompt in prompts()]
    assert documents == sorted(documents, key=documents.index)
    for path in PATHS:
        title, body, questions = read_document(path)
        own = [prompt for prompt in prompts() if prompt.document == title]
        assert [prompt.question for prompt in own] == questions
        assert all(prompt.text.startswith(f"{title}\n\n{body}") for prompt in own)
        assert all(prompt.text.endswith(prompt.question) for prompt in own)


def test_a_body_has_no_comments_and_no_questions() -> None:
    for path in PATHS:
        body = read_document(path)[1]
        assert not any(line.startswith(("#", "?")) for line in body.splitlines())


def test_prompts_without_a_document_are_short() -> None:
    short = [prompt for prompt in prompts() if prompt.document == NO_DOCUMENT]
    assert short
    assert all(len(prompt.text.split()) < 20 for prompt in short)
