"""Lets the model continue held-out prompts before the first step, at evaluations, and after the last step."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from toolkit import ranks
from toolkit.data.images.image_files import preview
from toolkit.data.samples.image_samples import image_samples_of
from toolkit.data.samples.samples import RowPrompt
from toolkit.data.tokens.tokenizer import decode
from toolkit.generation.text.complete import Prompt, Shown, complete
from toolkit.generation.text.load import stop_tokens
from toolkit.generation.text.options import Sampling
from toolkit.model.adapters.adapters import base_of
from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.paths import SAMPLES_FILE, atomic_write
from toolkit.run.stages.generating import generating, loaded_of
from toolkit.run.stages.part import Loop, RunPart
from toolkit.run.stages.stages import PreparedRun
from toolkit.terminal import Pass
from toolkit.training.durable_writes import patiently
from toolkit.training.extension import Extension
from toolkit.training.extensions.heartbeat import Heartbeat
from toolkit.training.loop_state import LoopState
from toolkit.training.metrics import Metrics
from toolkit.training.phase import Phase

NEW_TOKENS = 40
"""The most tokens of a continuation."""

MOST_BETWEEN = 4
"""The most evaluations between the first step and the last at which prompts are continued, however long the run is."""

SHOWN = 100
"""Characters of the first continuation that the console shows at an evaluation."""


def held_out_prompts(run: PreparedRun, count: int) -> list[RowPrompt]:
    """Returns the first held-out rows that leave room for an answer; for pairs, with the chosen completion."""
    samples = run.data.validation
    if samples is None:
        return []
    prompts = (prompt for number in range(len(samples)) for prompt in samples.prompts(number))
    beside = samples.most_answer_tokens is not None  # the answer takes nothing of max_length
    fitting = (prompt for prompt in prompts if beside or len(prompt.asked) + NEW_TOKENS <= samples.max_length)
    return list(islice(fitting, count))


@torch.no_grad()
def continuations(
    run: PreparedRun, prompts: list[RowPrompt], beat: Callable[[], None], check_stop: Callable[[], None] = lambda: None
) -> list[str]:
    """Returns the most likely tokens after each prompt, as text. Every rank calls this, and runs the same forwards.

    No random number is drawn, so training is not affected.

    Args:
        beat: called before each forward, so that slow ones do not count as a stall.
        check_stop: as it is given to `generating`.
    """
    samples = run.data.validation
    assert samples is not None, "the prompts are of its rows"
    length = min(NEW_TOKENS, samples.most_answer_tokens or NEW_TOKENS)
    # No further image can be generated.
    loaded = loaded_of(run, "lower logging.held_out_samples", never_written=samples.placeholders)
    with_images = image_samples_of(samples)
    asked = [
        Prompt(prompt.asked, [], Shown(with_images.images, partial(tuple, prompt.images)))
        if with_images is not None and prompt.images
        else Prompt(prompt.asked, [])
        for prompt in prompts
    ]
    with Pass(run.opened.console, "continuing held-out prompts"), generating(run, beat, check_stop=check_stop):
        return [completion.text for completion in complete(loaded, asked, Sampling(length, 0.0))]


def steps_between(num_steps: int, every: int | None) -> list[int]:
    """Returns the steps whose evaluations continue the prompts: at most `MOST_BETWEEN`, spread evenly over the run.

    Args:
        num_steps: steps of the run, whose last one is left out.
        every: steps from one evaluation to the next, or None if there are none in between.
    """
    due = list(range(every, num_steps, every)) if every is not None else []
    chosen = [(place + 1) * (len(due) + 1) // (MOST_BETWEEN + 1) - 1 for place in range(MOST_BETWEEN)]
    return due if len(due) <= MOST_BETWEEN else [due[number] for number in chosen]


class HeldOutTexts(RunPart):
    """What the model writes after held-out prompts (`logging.held_out_samples`)."""

    def extension(self, loop: Loop) -> Extension | None:
        if self.recipe.logging.held_out_samples == 0:
            return None
        return HeldOutSamples(loop.run, loop.metrics, loop.heartbeat)


class HeldOutSamples(Extension):
    """Puts what the model writes after held-out prompts into the report, and into a file of the run's folder.

    Args:
        run: the run whose model writes, with the weights that are evaluated.
        metrics: prints what it writes after the first prompt.
        heartbeat: beats while a write waits for room.
    """

    def __init__(self, run: PreparedRun, metrics: Metrics, heartbeat: Heartbeat) -> None:
        opened = run.opened
        self._run, self._shown, self._console = run, opened.shown, opened.console
        self._metrics, self._heartbeat = metrics, heartbeat
        self._path = opened.output_dir / SAMPLES_FILE
        self._count = opened.recipe.logging.held_out_samples
        self._steps = steps_between(run.num_steps, opened.recipe.training.eval_every_steps)
        self._prompts: list[RowPrompt] = []

    def before_training(self, trainer: LoopState) -> None:
        """Continues the prompts before the first step. A run that resumes reads what it wrote. Collective.

        Raises:
            OSError: if the file cannot be written.
        """
        self._trainer = trainer
        self._prompts = held_out_prompts(self._run, self._count)
        if not self._prompts:
            self._console.warn(
                f"logging.held_out_samples: no held-out row leaves room for {NEW_TOKENS} tokens within data.max_length"
            )
            return
        shown = [_unanswered(self._run, prompt) for prompt in self._prompts]
        if (step := trainer.global_step) > 0:
            self._shown.side_by_side = ranks.on_first_rank(lambda: self._written_until(step, shown))
            return
        self._shown.side_by_side = shown
        self._continue(trainer, Phase.GENERATE, lambda one, text: replace(one, before=text))
        ranks.on_first_rank(self._write)

    def _written_until(self, step: int, shown: list[SideBySide]) -> list[SideBySide]:
        """Returns `shown` with what the file says of the steps up to this one."""
        try:
            saved = [SideBySide(**sample) for sample in json.loads(self._path.read_text(encoding="utf-8"))]
            kept = [
                replace(sample, before=old.before, between=[(at, text) for at, text in old.between if at <= step])
                for sample, old in zip(shown, saved, strict=True)
                if (old.prompt, old.expected) == (sample.prompt, sample.expected)
            ]
        except (OSError, ValueError, TypeError, RecursionError):  # whatever may stand in a file
            kept = []
        if len(kept) == len(shown):
            return kept
        self._console.warn(
            f"{self._path} is gone, or not of these held-out prompts: the report shows what the model writes from step "
            f"{step} on"
        )
        return shown

    def at_evaluation(self, trainer: LoopState) -> dict[str, Any]:
        step = trainer.global_step
        if self._prompts and step in self._steps:
            first = self._continue(
                trainer, Phase.EVALUATE, lambda one, text: replace(one, between=[*one.between, (step, text)])
            )
            self._metrics.progress.line(step, f"writes {first[:SHOWN]!r}")
            ranks.on_first_rank(self._write_if_possible)
        return {}

    def after_last_step(self) -> None:
        """Continues the prompts with the weights that are exported. Collective."""
        if self._prompts:
            self._continue(self._trainer, Phase.EVALUATE, lambda one, text: replace(one, after=text))
            waits = self._heartbeat.wait
            ranks.on_first_rank(lambda: patiently(self._write, SAMPLES_FILE, self._console.warn, waits))

    def _continue(self, trainer: LoopState, phase: Phase, put: Callable[[SideBySide, str], SideBySide]) -> str:
        """Continues the prompts, puts each text into what is shown of its prompt, and returns the first. Collective."""
        trainer.check_stop()  # before the first token where ranks need not run the same forwards
        check = trainer.check_stop
        texts = continuations(self._run, self._prompts, lambda: trainer.enter_phase(phase), check)
        pairs = zip(self._shown.side_by_side, texts, strict=True)
        self._shown.side_by_side = [put(one, text) for one, text in pairs]
        return texts[0]

    def _write_if_possible(self) -> None:
        # A full disk costs this file, which is written again at the end, and not the run.
        with suppress(OSError):
            self._write()

    def _write(self) -> None:
        text = json.dumps([asdict(sample) for sample in self._shown.side_by_side], indent=1)
        atomic_write(self._path, text)


def _unanswered(run: PreparedRun, prompt: RowPrompt) -> SideBySide:
    """Returns a prompt with its answer in the data; one token stands for all those of an image."""
    assert run.data.validation is not None, "the prompt is of its rows"
    hidden = run.data.validation.placeholders
    before = [None, *prompt.asked]
    kept = [token for token, last in zip(prompt.asked, before, strict=False) if token != last or token not in hidden]
    stops, is_target = stop_tokens(base_of(run.inner), run.tokenizer), run.inner.config.is_encoder_decoder
    answer = decode(run.tokenizer, prompt.answer, stops, is_target)
    return SideBySide(run.tokenizer.decode(kept), answer, images=tuple(map(preview, prompt.images)))
