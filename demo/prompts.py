"""The demo's input: public-domain English, and questions about it.

Every prompt is a document first and one question after it, so the prompts of one document share a
prefix of hundreds of tokens: what an engine's prefix cache and this project's pool live on. Two
more prompts have no document and are shorter than one block of the paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).parent / "text"
NO_DOCUMENT = "no document"
SHORT_QUESTIONS = ("What is the capital of France?", "How many legs does a spider have?")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: `text` is what the user says, without the chat template around it."""

    document: str  # its title, or NO_DOCUMENT
    question: str
    text: str


def prompts() -> list[Prompt]:
    """All prompts, those of one document side by side, in the same order at every call."""
    found = []
    for path in sorted(TEXT.glob("*.txt")):
        title, body, questions = read_document(path)
        found += [
            Prompt(title, question, f"{title}\n\n{body}\n\nQuestion: {question}")
            for question in questions
        ]
    return found + [Prompt(NO_DOCUMENT, question, question) for question in SHORT_QUESTIONS]


def read_document(path: Path) -> tuple[str, str, list[str]]:
    """Title, body and questions of a document file.

    Lines that start with "#" come first: the title, then where the text is from. Lines that start
    with "?" are questions. The rest is the body; its paragraphs are wrapped in the file and come
    back as one line each, an empty line between them.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    questions = [line[1:].strip() for line in lines if line.startswith("?")]
    paragraphs = "\n".join(line for line in lines if not line.startswith(("#", "?"))).split("\n\n")
    body = "\n\n".join(" ".join(text.split()) for text in paragraphs if text.strip())
    return comments[0], body, questions
