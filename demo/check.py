"""Whether the extracted rows are right: against transformers, and against each other.

transformers runs the same folder on the same tokens in float32. The error of a row is the relative
L2 distance |row - reference| / |reference|: relative, since norms run from 45 to 25,000 (the first
token of every prompt carries outlier activations), and by row, so that one wrong row is seen.

What error is right was measured, on a CPU: prompts of 37 to 1757 tokens, with and without chunked
prefill and prefix hits, layers 2, 15, 27 and 30, each compared with transformers in float32:

    =====================================  ================  ==============
    what is compared                       median of a layer  single row
    =====================================  ================  ==============
    vLLM in float32                        0.6 to 3.7e-6     up to 1.3e-5
    vLLM in bfloat16                       0.6 to 3.1e-2     up to 1.4e-1
    transformers in bfloat16               0.5 to 3.0e-2     up to 8.2e-2
    the rows of a neighbouring token       0.67 to 1.06      0.17 and more
    the rows of another extracted layer    0.73 to 15        0.01 and more
    =====================================  ================  ==============

So the two engines in bfloat16 are about equally far from float32, and what lies between them is
rounding: bfloat16 keeps 8 bits, every layer adds to the row twice, and kernels that sum in another
order, as other batches make them do, round otherwise. float32 keeps 16 bits more and errs 10,000
times less. The tolerances lie well above what rounding does and below what a mistake does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import hidden_cache
from demo.engine import CHUNK_TOKENS, LAYERS, STEP_TOKENS, Pass, Sample


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative error of any row, and of the median row of any layer."""

    row: float
    median: float


TOLERANCES = {"float32": Tolerance(1e-4, 2e-5), "bfloat16": Tolerance(0.2, 0.06)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One sample against transformers: its errors as in Tolerance, and what is wrong, in words.

    `transformers_median` is transformers' own error in bfloat16, if the engine runs in that.
    """

    worst: float
    median: float
    problems: list[str]
    transformers_median: float | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """All that was checked: right if there are no `problems`."""

    tolerance: Tolerance
    comparisons: list[Comparison]
    rows_compared: int
    pooled_rows_compared: int
    problems: list[str]


class Reference:
    """transformers, running the model of a folder on the CPU."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModel

        self._model = AutoModel.from_pretrained(model, dtype=dtype)

    def rows(self, token_ids: list[int]) -> torch.Tensor:
        """Hidden states `[tokens, len(LAYERS), hidden]` in float32.

        Layer i is `hidden_states[i]`, but the last one is what enters the final norm:
        transformers gives it only after that norm, vLLM extracts it before.
        """
        before_norm: list[torch.Tensor] = []
        hook = self._model.norm.register_forward_pre_hook(
            lambda _, inputs: before_norm.append(inputs[0])
        )
        try:
            with torch.inference_mode():
                states = self._model(
                    input_ids=torch.tensor([token_ids]), output_hidden_states=True, use_cache=False
                ).hidden_states
        finally:
            hook.remove()
        by_layer = [*states[:-1], before_norm[0]]
        return torch.stack([by_layer[layer][0] for layer in LAYERS], dim=1).float()


def row_errors(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative L2 distances `[tokens, layers]` of rows `[tokens, layers, hidden]`."""
    norm = torch.linalg.vector_norm
    errors: torch.Tensor = norm(rows.float() - reference, dim=-1) / norm(reference, dim=-1)
    return errors


def compare(
    rows: torch.Tensor,
    reference: torch.Tensor,
    tolerance: Tolerance,
    transformers_rows: torch.Tensor | None = None,
) -> Comparison:
    """Compare extracted rows of any dtype with transformers' in float32, of the same shape.

    With `transformers_rows`, its rows in the engine's dtype, the median must also be at most
    twice as far off as theirs.
    """
    errors = row_errors(rows, reference)
    medians = errors.median(dim=0).values
    own = None if transformers_rows is None else row_errors(transformers_rows, reference)
    problems = []
    for place, layer in enumerate(LAYERS):
        of_layer, median = errors[:, place], float(medians[place])
        # "not <=": a NaN is over every tolerance.
        if over := int((~(of_layer <= tolerance.row)).sum()):
            token = int(of_layer.nan_to_num(nan=torch.inf).argmax())
            problems.append(
                f"layer {layer}: {over} of {len(of_layer)} rows are off by more than "
                f"{tolerance.row:g}, most that of token {token}: {float(of_layer[token]):.3g}"
            )
        if not median <= tolerance.median:
            problems.append(
                f"layer {layer}: the median row is off by {median:.3g}, more than "
                f"{tolerance.median:g}"
            )
        if own is not None and not median <= 2 * (of_own := float(own[:, place].median())):
            problems.append(
                f"layer {layer}: the median row is off by {median:.3g}, more than twice the "
                f"{of_own:.3g} of transformers in the same dtype"
            )
    return Comparison(
        worst=float(errors.max()),
        median=float(medians.max()),
        problems=problems,
        transformers_median=None if own is None else float(own.median(dim=0).values.max()),
    )


# Prompts whose rows are compared with transformers.
PROMPTS_COMPARED = 3


def choose(samples: list[Sample]) -> list[int]:
    """The places in a pass of the prompts to compare: the shortest of each kind, to save time.

    One that took several steps and found its document's rows in the pool; one that took several
    steps and was gathered whole, of another document; and the shortest of all.
    """
    by_length = sorted(range(len(samples)), key=lambda place: len(samples[place].token_ids))
    long = [place for place in by_length if len(samples[place].token_ids) > STEP_TOKENS]
    pooled = next((place for place in long if samples[place].tokens_from_pool), long[0])
    document = samples[pooled].prompt.document
    others = [place for place in long if samples[place].prompt.document != document]
    whole = next((place for place in others if not samples[place].tokens_from_pool), others[0])
    return [pooled, whole, by_length[0]]


def check(passes: list[Pass], model: Path, dtype: str, advance: Callable[[], None]) -> Checked:
    """Check every file, and the rows of a few prompts, in every pass, against transformers.

    `advance` is called after each of PROMPTS_COMPARED prompts.
    """
    tolerance = TOLERANCES[dtype]
    problems, pooled_rows_compared = check_files(passes, getattr(torch, dtype))
    in_float32 = Reference(model)
    in_dtype = None if dtype == "float32" else Reference(model, getattr(torch, dtype))
    comparisons = []
    rows_compared = 0
    for place in choose(passes[0].samples):
        token_ids = passes[0].samples[place].token_ids
        reference = in_float32.rows(token_ids)
        transformers_rows = None if in_dtype is None else in_dtype.rows(token_ids)
        for each in passes:
            sample = each.samples[place]
            rows = hidden_cache.load_hidden_states(sample.path)["hidden_states"]
            if rows.shape != reference.shape:
                problems.append(
                    f"{_name(each, sample)}: the rows are {list(rows.shape)}, "
                    f"transformers' are {list(reference.shape)}"
                )
                continue
            found = compare(rows, reference, tolerance, transformers_rows)
            comparisons.append(found)
            rows_compared += rows.shape[0] * rows.shape[1]
            problems += [f"{_name(each, sample)}: {problem}" for problem in found.problems]
        advance()
    return Checked(tolerance, comparisons, rows_compared, pooled_rows_compared, problems)


def check_files(passes: list[Pass], dtype: torch.dtype) -> tuple[list[str], int]:
    """What is wrong with the files, and how many rows from the pool were found unchanged.

    Rows from the pool must be, bit for bit, those of another request with the same tokens, in this
    pass or one before: one of them put them there. (Which one cannot be told from outside: rows
    leave while requests are computed beside each other.)
    """
    problems: list[str] = []
    pooled_rows = 0
    run: list[Sample] = []
    for each in passes:
        run += each.samples
        for sample in each.samples:
            loaded = hidden_cache.load_hidden_states(sample.path)
            rows, tokens, pooled = (
                loaded["hidden_states"],
                sample.token_ids,
                sample.tokens_from_pool,
            )
            found = []
            if loaded["token_ids"].tolist() != tokens:
                found.append("the file's token ids are not the prompt's")
            if rows.dtype != dtype or rows.shape[:-1] != (len(tokens), len(LAYERS)):
                found.append(
                    f"the rows are {list(rows.shape)} of {rows.dtype}, not [{len(tokens)}, "
                    f"{len(LAYERS)}, hidden] of {dtype}"
                )
            elif pooled:
                others = [
                    other
                    for other in run
                    if other is not sample and other.token_ids[:pooled] == tokens[:pooled]
                ]
                if not others:
                    found.append(f"{pooled} tokens came from the pool, but nobody put them there")
                elif any(torch.equal(rows[:pooled], _first_rows(o, pooled)) for o in others):
                    pooled_rows += pooled * len(LAYERS)
                else:
                    found.append(f"rows from the pool are not those of {others[0].path.name}")
            whole_chunks = len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
            if each is not passes[0] and pooled < whole_chunks:
                found.append(
                    f"{pooled} tokens came from the pool, not the {whole_chunks} that the pass "
                    "before put there"
                )
            problems += [f"{_name(each, sample)}: {problem}" for problem in found]
    return problems, pooled_rows


def _first_rows(sample: Sample, tokens: int) -> torch.Tensor:
    return hidden_cache.load_hidden_states(sample.path)["hidden_states"][:tokens]


def _name(each: Pass, sample: Sample) -> str:
    return f"pass {each.number}, {sample.prompt.question!r} ({sample.path.name})"
