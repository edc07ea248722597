"""Lets the model write at evaluations: after held-out rows, and answers to prompts of a file, which are scored."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.data.images.image_files import preview
from toolkit.data.rows.cache import digest
from toolkit.data.samples.image_samples import image_samples_of
from toolkit.data.samples.samples import RowPrompt, Samples
from toolkit.data.tokens.tokenizer import decode
from toolkit.errors import BadInputError
from toolkit.generation.text.complete import Completion, Prompt, Shown, complete, sees_padding
from toolkit.generation.text.evaluation import Scoring, evaluate, has_function, scoring_of
from toolkit.generation.text.load import Loaded, stop_tokens
from toolkit.generation.text.options import Sampling
from toolkit.generation.text.rows import PromptRow, all_right, encode_rows, read_rows
from toolkit.model.adapters.adapters import base_of
from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.recipe.objectives.section import Comparison
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import AnswersSection
from toolkit.run.stages.generating import generating, loaded_of, split_over_ranks
from toolkit.run.stages.part import NEW_FOLDER, Loop, RunPart
from toolkit.run.stages.stages import MetaModel, PreparedRun, Read
from toolkit.training.extension import Extension
from toolkit.training.loop_state import LoopState
from toolkit.training.metrics import Metrics
from toolkit.training.phase import Phase

FILE, COMPARE = "answers.file", "answers.compare"


def written(
    run: PreparedRun, loaded: Loaded, prompts: Sequence[Prompt], size: int, most_tokens: int, trainer: LoopState
) -> list[Completion]:
    """Returns the model's most likely completions of the prompts, on every rank; each rank does a share. Collective.

    The forwards are those of `toolkit generate --eval`, batch for batch. No random number is drawn, so training is not
    affected.

    Args:
        run: the run whose model writes, sharded as it is, with the weights that are evaluated.
        size: prompts in a batch.
        most_tokens: the most tokens of a completion.
    """
    check, sampling = trainer.check_stop, Sampling(most_tokens, 0.0)
    found: dict[int, Completion] = {}

    def completions(batch: list[int]) -> list[Completion]:
        return complete(loaded, [prompts[number] for number in batch], sampling)

    with generating(run, lambda: trainer.enter_phase(Phase.EVALUATE), check_stop=check):
        # Tested here by all ranks at once, because a rank with one prompt in its batch would not test it.
        if size > 1 and sees_padding(loaded, prompts[0]):
            size = 1
        # Apart: a prompt with images enters units that others do not, on all ranks or on none.
        for numbers in _by_images([prompt.shown is not None for prompt in prompts]):
            batches = [numbers[start : start + size] for start in range(0, len(numbers), size)]
            tensor = run.opened.recipe.sharding.tensor
            for batch, done in zip(batches, split_over_ranks(batches, completions, tensor, check), strict=True):
                found.update(zip(batch, done, strict=True))
    return [found[number] for number in range(len(prompts))]


def _by_images(shown: Sequence[bool]) -> list[list[int]]:
    """Returns the numbers of the rows without images, and of those with images."""
    return [[number for number, each in enumerate(shown) if each is wanted] for wanted in (False, True)]


# ---- answers to the prompts of a file ----


def read_asked(recipe: Recipe) -> list[PromptRow]:
    """Returns the prompts with their right answers; none if the recipe names no file.

    Raises:
        BadInputError: if the file or the scoring function cannot be read, or some rows cannot be used.
    """
    if (section := recipe.answers).file is None:
        return []
    rows = read_rows(Path(section.file), FILE, with_answers=True, is_scored=has_function(section.compare))
    scoring_of(rows, section.compare, COMPARE)
    return rows


def reads_of_answers(recipe: Recipe, asked: Sequence[PromptRow]) -> list[Read]:
    """Returns what decides the scores of answers apart from a function of the user's: questions and comparison."""
    if recipe.answers.file is None:
        return []
    files = [Path(recipe.answers.file), *(each for row in asked for each in row.images if isinstance(each, Path))]
    content = hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()
    changed = f"{FILE}, or an image of it, has changed since: scores before and after do not compare"
    compared = f"{COMPARE}: the run up to step {{step}} compared its answers otherwise; undo that, {NEW_FOLDER}"
    how = Comparison.of(recipe.answers.compare)
    steers = recipe.training.best_by == "answers"  # then the best of all evaluations is kept, or ends the run
    return [
        Read(FILE, content, changed, unknown="", refuses=False),
        Read(f"{COMPARE}, how", digest(how.how, how.extract, how.score is None), compared, unknown="", refuses=steers),
    ]


def require_sighted(asked: Sequence[PromptRow], train: Samples) -> None:
    """Raises BadInputError if images are asked about and none are trained on: only then the model has towers.

    Args:
        train: the samples to train on.
    """
    with_images = next((row.place for row in asked if row.images), None)
    if with_images is not None and not train.has_images:
        raise BadInputError(f"{FILE}: {with_images} has images, and no row to train on has any; leave such rows out")


class AskedWhileTraining(RunPart):
    """Prompts of a file that the model answers at evaluations (`answers.file`)."""

    def before_rows(self) -> None:
        self._asked = ranks.on_first_rank(lambda: read_asked(self.recipe))
        self.reads += ranks.on_first_rank(lambda: reads_of_answers(self.recipe, self._asked))

    def on_meta(self, on_meta: MetaModel) -> None:
        require_sighted(self._asked, on_meta.data.train)

    def extension(self, loop: Loop) -> Extension | None:
        return Answers(loop.run, self._asked) if self._asked else None


class Answers(Extension):
    """Has the model answer at evaluations, and counts the right answers.

    Args:
        run: the run whose model answers.
        asked: what it answers.

    Raises:
        BadInputError: if the model cannot take some rows; it names them.
    """

    def __init__(self, run: PreparedRun, asked: list[PromptRow]) -> None:
        opened, recipe, self._run = run.opened, run.opened.recipe, run
        self._section = section = recipe.answers
        self._rows = asked
        self._loaded = loaded_of(run, "lower answers.batch_size or answers.max_new_tokens")
        if run.tokenizer.chat_template is not None and run.data.report.chat_template is None and not section.raw:
            opened.console.warn(
                "answers: prompts are asked with the chat template, and no training row uses it; set "
                "answers.raw=true to ask as the rows do"
            )
        if recipe.data.source_prefix is not None:
            opened.console.warn(
                "answers: prompts are asked as answers.file has them, without data.source_prefix "
                f"{recipe.data.source_prefix!r}; write it into their rows"
            )
        self._prompts = encode_rows(self._loaded, self._rows, FILE, section.system, section.raw)
        if not self._loaded.encoder_decoder:  # their answers have all positions, whatever the prompt
            _require_room(self._loaded, self._rows, self._prompts, section)

    def at_evaluation(self, trainer: LoopState) -> dict[str, Any]:
        began, section = time.perf_counter(), self._section
        answers = written(self._run, self._loaded, self._prompts, section.batch_size, section.max_new_tokens, trainer)
        # Once for all: a function of the user's may have effects, and need not be on every host.
        found = ranks.on_first_rank(lambda: evaluate(self._rows, answers, self._scoring()).shares())
        shares = {f"answer_{name}": share for name, share in found.items()}
        return {**shares, "answer_seconds": time.perf_counter() - began}

    def _scoring(self) -> Scoring:
        return scoring_of(
            self._rows, self._section.compare, COMPARE, None if self._section.raw else self._loaded.tokenizer
        )


def _require_room(loaded: Loaded, rows: list[PromptRow], prompts: list[Prompt], section: AnswersSection) -> None:
    """Raises BadInputError that names prompts after which the model has no positions left for a whole answer.

    Ranks that share forwards generate in step, so none may have to end its answers before the others.
    """
    if loaded.positions is None:
        return
    room = loaded.positions - section.max_new_tokens

    def check(prompt: Prompt) -> Prompt:
        if len(prompt.ids) > room:
            raise BadInputError(
                f"the prompt's {len(prompt.ids)} tokens and answers.max_new_tokens {section.max_new_tokens} exceed the "
                f"model's {loaded.positions} positions; lower that, or shorten the prompt"
            )
        return prompt

    all_right(FILE, [(row.place, partial(check, prompt)) for row, prompt in zip(rows, prompts, strict=True)])


# ---- what is written after held-out rows ----

NEW_TOKENS = 40
"""The most tokens of a continuation."""

SHOWN = 100
"""Characters of the first continuation that the console shows at an evaluation."""

TEXTS = "texts"
"""Key of an evaluation's record with what the model wrote after each held-out prompt."""


class HeldOutTexts(RunPart):
    """What the model writes after held-out prompts (`logging.held_out_samples`)."""

    def extension(self, loop: Loop) -> Extension | None:
        if self.recipe.logging.held_out_samples == 0:
            return None
        if not (prompts := held_out_prompts(loop.run, self.recipe.logging.held_out_samples)):
            self.opened.console.warn(
                f"logging.held_out_samples: no held-out row leaves room for {NEW_TOKENS} tokens within data.max_length"
            )
            return None
        return Continuations(loop.run, loop.metrics, prompts)


def held_out_prompts(run: PreparedRun, count: int) -> list[RowPrompt]:
    """Returns the first held-out rows that leave room for an answer; for pairs, with the chosen completion."""
    samples = run.data.validation
    if samples is None:
        return []
    prompts = (prompt for number in range(len(samples)) for prompt in samples.prompts(number))
    beside = samples.most_answer_tokens is not None  # the answer takes nothing of max_length
    fitting = (prompt for prompt in prompts if beside or len(prompt.asked) + NEW_TOKENS <= samples.max_length)
    return list(islice(fitting, count))


class Continuations(Extension):
    """Puts what the model writes after held-out prompts into the records of evaluations, and into the report.

    Args:
        run: the run whose model writes.
        metrics: has the records, also those that a resumed run begins with.
        prompts: of held-out rows.
    """

    def __init__(self, run: PreparedRun, metrics: Metrics, prompts: Sequence[RowPrompt]) -> None:
        samples = run.data.validation
        assert samples is not None, "the prompts are of its rows"
        self._run, self._metrics, self._shown = run, metrics, run.opened.shown
        self._most_tokens = min(NEW_TOKENS, samples.most_answer_tokens or NEW_TOKENS)
        # No further image can be generated.
        self._loaded = loaded_of(run, "lower logging.held_out_samples", never_written=samples.placeholders)
        with_images = image_samples_of(samples)
        self._prompts = [
            Prompt(prompt.asked, [], Shown(with_images.images, partial(tuple, prompt.images)))
            if with_images is not None and prompt.images
            else Prompt(prompt.asked, [])
            for prompt in prompts
        ]
        self._unanswered = [_unanswered(run, prompt) for prompt in prompts]
        self._texts: dict[int, Sequence[str]] = {}

    def before_training(self, trainer: LoopState) -> None:
        self._trainer = trainer
        found = {record["step"]: record.get(TEXTS, ()) for record in self._metrics.records}
        # Of a run that resumes with more prompts than before, all texts are from here on.
        self._texts = {step: texts for step, texts in found.items() if len(texts) >= len(self._prompts)}
        self._show()

    def at_evaluation(self, trainer: LoopState) -> dict[str, Any]:
        found = written(self._run, self._loaded, self._prompts, len(self._prompts), self._most_tokens, trainer)
        texts = [completion.text for completion in found]
        self._texts[trainer.global_step] = texts
        self._metrics.progress.line(trainer.global_step, f"writes {texts[0][:SHOWN]!r}")
        self._show()
        return {TEXTS: texts}

    def after_last_step(self) -> None:
        """Shows what the weights that are exported have written at their evaluation."""
        exported = self._shown.exported_step
        self._show(self._trainer.global_step if exported is None else exported)

    def _show(self, exported: int | None = None) -> None:
        self._shown.side_by_side = []
        for number, one in enumerate(self._unanswered):
            texts = {step: found[number] for step, found in self._texts.items()}
            between = [(step, text) for step, text in texts.items() if 0 < step < self._run.num_steps]
            after = None if exported is None else texts.get(exported)
            self._shown.side_by_side.append(replace(one, before=texts.get(0), between=between, after=after))


def _unanswered(run: PreparedRun, prompt: RowPrompt) -> SideBySide:
    """Returns a prompt with its answer in the data; one token stands for all those of an image."""
    assert run.data.validation is not None, "the prompt is of its rows"
    hidden = run.data.validation.placeholders
    before = [None, *prompt.asked]
    kept = [token for token, last in zip(prompt.asked, before, strict=False) if token != last or token not in hidden]
    stops, is_target = stop_tokens(base_of(run.inner), run.tokenizer), run.inner.config.is_encoder_decoder
    answer = decode(run.tokenizer, prompt.answer, stops, is_target)
    return SideBySide(run.tokenizer.decode(kept), answer, images=tuple(map(preview, prompt.images)))
