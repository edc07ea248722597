"""The command `toolkit sample`: writes several completions of each prompt, scores them, and makes training rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from rich.progress import track

from toolkit import ranks
from toolkit.generation.sampling.reward import find_reward_model, reward_model
from toolkit.generation.sampling.sample_options import SampleOptions
from toolkit.generation.sampling.sampled_rows import PromptForm, Sampled, write_rows
from toolkit.generation.sampling.samples import Sample, append, begin, give_back, rows_at_a_time, start_file, write
from toolkit.generation.text.command import load_for
from toolkit.generation.text.evaluation import has_function, scoring_of
from toolkit.generation.text.load import tokenizer_of_source
from toolkit.generation.text.rows import PromptRow, completions, encode_rows, read_rows
from toolkit.terminal import Terminal

T = TypeVar("T")


def read_prompts(options: SampleOptions) -> list[PromptRow]:
    """Reads the prompts, with right answers if completions are compared with them.

    Raises:
        BadInputError: if the file cannot be read, or its rows cannot be used.
    """
    rows = read_rows(options.prompts, "PROMPTS", options.reward is None, has_function(options.compare))
    if options.reward is None:
        scoring_of(rows, options.compare, "--compare")
    else:
        find_reward_model(options.reward)
    return rows


def sample(options: SampleOptions) -> Sampled:
    """Samples, scores, and writes the files; continues if an earlier call was interrupted. Collective.

    Raises:
        BadInputError: if a model, a prompt, a folder or an option cannot be used.
        ToolkitError: if the model fails.
    """
    rows = ranks.on_first_rank(lambda: read_prompts(options))
    try:
        found, chat_template = ranks.on_first_rank(lambda: begin(options, rows))
        if len(found) < len(rows) * options.samples:
            found, chat_template = _complete_missing(options, rows, found)
    finally:
        if ranks.rank() == 0:
            give_back(options.to)
    assert chat_template is not None
    form = PromptForm(chat_template, options.system)
    scored = _score_all(options, rows, found, form)

    def files() -> Sampled:
        write(options.to, scored)
        return write_rows(options.to, rows, scored, form, options.reward is not None)

    return ranks.on_first_rank(files)


def _complete_missing(options: SampleOptions, rows: list[PromptRow], found: list[Sample]) -> tuple[list[Sample], bool]:
    """Returns all samples, and whether a chat template writes the prompts. Each rank writes a share of the missing."""
    with load_for(options.writing) as loaded:
        prompts = encode_rows(loaded, rows, "PROMPTS", options.system, options.raw)
        chat_template = not options.raw and loaded.tokenizer.chat_template is not None
        if not found:
            ranks.on_first_rank(lambda: start_file(options, chat_template))
        size, sampling = rows_at_a_time(options), options.writing.sampling
        first = len(found) // options.samples

        def written(start: int) -> list[Sample]:
            wanted = [replace(p, k=k) for p in prompts[start : start + size] for k in range(options.samples)]
            texts = completions(loaded, wanted, sampling, options.batch_size)
            return [
                Sample(p.row, p.k, rows[p.row].given, text.text, text.num_tokens, text.stopped)
                for p, text in zip(wanted, texts, strict=True)
            ]

        for done in in_rounds(range(first, len(rows), size), written, "sampling"):
            ranks.on_first_rank(lambda done=done: append(options.to, done))  # type: ignore[misc]
            found += done
    return found, chat_template


def _score_all(options: SampleOptions, rows: list[PromptRow], found: list[Sample], form: PromptForm) -> list[Sample]:
    """Returns the samples with their scores. Collective."""
    if options.reward is not None:
        return _reward_all(options, options.reward, rows, found, form)

    def scored() -> list[Sample]:
        scoring = scoring_of(rows, options.compare, "--compare", tokenizer_of_source(options.source, options.raw))
        return [replace(sample, score=scoring.score(sample.completion, rows[sample.row])) for sample in found]

    return ranks.on_first_rank(scored)


def _reward_all(
    options: SampleOptions, reward: str, rows: list[PromptRow], found: list[Sample], form: PromptForm
) -> list[Sample]:
    """Returns the samples with their rewards; each rank computes a share. Collective."""
    # An empty completion is none that a reward model knows.
    size, texts = options.batch_size, [sample for sample in found if not sample.is_empty]
    with reward_model(reward, options.dtype, options.device) as judge:

        def scores(start: int) -> list[float]:
            batch = texts[start : start + size]
            read = [form.row(rows[sample.row], completion=sample.completion) for sample in batch]
            return judge.rewards(judge.encode(read), size)

        each = (score for done in in_rounds(range(0, len(texts), size), scores, "scoring") for score in done)
        return [replace(sample, score=None if sample.is_empty else next(each)) for sample in found]


def in_rounds(items: Sequence[int], work: Callable[[int], list[T]], what: str) -> Iterator[list[T]]:
    """Yields on every rank the results of `work` for the next items, one for each rank, in order. Collective."""
    size = ranks.world_size()
    rounds = range(0, len(items), size)
    hidden = ranks.rank() > 0 or not sys.stderr.isatty()
    for start in track(rounds, what, console=Terminal(soft_wrap=False), transient=True, disable=hidden):
        own = start + ranks.rank()
        of_ranks = ranks.on_every_rank(lambda own=own: work(items[own]) if own < len(items) else [], what)  # type: ignore[misc]
        yield [each for of_rank in of_ranks for each in of_rank]
