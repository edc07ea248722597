"""Lets the model answer held-out prompts at evaluations during training, and counts the right answers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.data.rows.cache import digest
from toolkit.data.samples.samples import Samples
from toolkit.errors import BadInputError
from toolkit.generation.text.complete import Completion, Prompt, complete, sees_padding
from toolkit.generation.text.evaluation import Scoring, evaluate, has_function, scoring_of
from toolkit.generation.text.load import Loaded
from toolkit.generation.text.options import Sampling
from toolkit.generation.text.rows import PromptRow, all_right, encode_rows, read_rows
from toolkit.recipe.objectives.section import Comparison
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import AnswersSection
from toolkit.run.stages.generating import generating, loaded_of, split_over_ranks
from toolkit.run.stages.part import NEW_FOLDER, Loop, RunPart
from toolkit.run.stages.stages import MetaModel, PreparedRun, Read
from toolkit.training.extension import Extension
from toolkit.training.loop_state import LoopState
from toolkit.training.phase import Phase

FILE, COMPARE = "answers.file", "answers.compare"


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
    """Has the model answer at evaluations, each rank a share of the prompts. Its forwards are those of `toolkit
    generate --eval`, batch for batch.

    Args:
        run: the run whose model answers, sharded as it is, with the weights that are evaluated.
        asked: what it answers.

    Raises:
        BadInputError: if the model cannot take some rows; it names them.
    """

    def __init__(self, run: PreparedRun, asked: list[PromptRow]) -> None:
        opened, recipe, self._run = run.opened, run.opened.recipe, run
        self._section = recipe.answers
        self._rows = asked
        self._tensor = recipe.sharding.tensor
        self._loaded = loaded_of(run, "lower answers.batch_size or answers.max_new_tokens")
        section = self._section
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
        began = time.perf_counter()
        check = trainer.check_stop
        with generating(self._run, lambda: trainer.enter_phase(Phase.EVALUATE), check_stop=check):
            found = self._evaluate(check)
        shares = {f"answer_{name}": share for name, share in found.items()}
        return {**shares, "answer_seconds": time.perf_counter() - began}

    def _scoring(self) -> Scoring:
        return scoring_of(
            self._rows, self._section.compare, COMPARE, None if self._section.raw else self._loaded.tokenizer
        )

    def _evaluate(self, check: Callable[[], None]) -> dict[str, float]:
        size, prompts = self._section.batch_size, self._prompts
        # Tested here by all ranks at once, because a rank with one prompt in its batch would not test it.
        if size > 1 and sees_padding(self._loaded, prompts[0]):
            size = 1
        sampling = Sampling(self._section.max_new_tokens, 0.0)

        def answers(batch: list[int]) -> list[Completion]:
            return complete(self._loaded, [prompts[number] for number in batch], sampling)

        written: dict[int, Completion] = {}
        # Apart: a prompt with images enters units that others do not, on all ranks or on none.
        for numbers in _by_images([prompt.shown is not None for prompt in prompts]):
            batches = [numbers[start : start + size] for start in range(0, len(numbers), size)]
            for batch, found in zip(batches, split_over_ranks(batches, answers, self._tensor, check), strict=True):
                written.update(zip(batch, found, strict=True))
        completions = [written[number] for number in range(len(prompts))]
        # Once for all: a function of the user's may have effects, and need not be on every host.
        return ranks.on_first_rank(lambda: evaluate(self._rows, completions, self._scoring()).shares())


def _by_images(shown: Sequence[bool]) -> list[list[int]]:
    """Returns the numbers of the rows without images, and of those with images."""
    return [[number for number, each in enumerate(shown) if each is wanted] for wanted in (False, True)]


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
