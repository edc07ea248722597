"""Lets the model continue held-out prompts before the first step, at evaluations, and after the last step."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from PIL import Image

from toolkit import ranks
from toolkit.data.picture_files import preview
from toolkit.data.picture_samples import PictureSamples
from toolkit.data.samples import IGNORED, Batch, PairSamples, SourceTargetSamples, TextSamples, filled_up
from toolkit.data.tokenizer import pad_id
from toolkit.model.without_dropout import without_dropout
from toolkit.objectives.objective import Objective
from toolkit.pages.side_by_side import SideBySide
from toolkit.paths import atomic_write
from toolkit.run.stages import OpenedRun, PreparedRun
from toolkit.terminal import Pass, Terminal
from toolkit.training.durable_writes import patiently
from toolkit.training.extension import Extension
from toolkit.training.heartbeat import Heartbeat
from toolkit.training.loop_state import LoopState
from toolkit.training.metrics import Metrics
from toolkit.training.phase import Phase

SAMPLES_FILE = "samples.json"
"""File of a run's folder from which a resumed run reads what its model wrote at first."""

NEW_TOKENS = 40
"""The most tokens of a continuation; each takes a forward of all prompts, without a cache, as in training."""

MOST_BETWEEN = 4
"""The most evaluations between the first step and the last at which prompts are continued, however long the run is."""

SHOWN = 100
"""Characters of the first continuation that the console shows at an evaluation."""

PLAIN_PROMPT = 16
"""Tokens of a row that are its prompt if all of it is learned, as in plain text."""


@dataclass(frozen=True)
class Prompt:
    """Tokens of a held-out row: the prompt, with its images, and the answer behind it, or the target."""

    asked: list[int]
    answer: list[int]
    images: tuple[Image.Image, ...] = ()


def held_out_prompts(run: PreparedRun, count: int) -> list[Prompt]:
    """Returns the first held-out rows that leave room for an answer; for pairs, with the chosen completion."""
    samples = run.data.validation
    if isinstance(samples, SourceTargetSamples):
        pairs = (samples.parts(number) for number in range(min(count, len(samples))))
        return [Prompt(source.tolist(), target.tolist()) for source, target in pairs]
    if not isinstance(samples, TextSamples):
        return []
    found: list[Prompt] = []
    for number in range(len(samples)):
        pieces = samples.tokens(number)
        seen = samples.seen(number) if isinstance(samples, PictureSamples) else [[]] * len(pieces)
        # The completions of a pair follow each other, the chosen one first.
        step = 2 if isinstance(samples, PairSamples) else 1
        for (ids, targets), images in zip(pieces[::step], seen[::step], strict=True):
            prompt = _prompt(ids, targets)
            if prompt is None or len(found) == count or len(prompt.asked) + NEW_TOKENS > samples.max_length:
                continue
            if images and _placeholders(samples).intersection(map(int, ids[len(prompt.asked) :])):
                continue  # an image of a later turn
            found.append(replace(prompt, images=tuple(images)))
        if len(found) == count:
            break
    return found


def _placeholders(samples: object) -> frozenset[int]:
    """Returns the tokens that stand for images; none if rows have no images."""
    return samples.pictures.token_ids if isinstance(samples, PictureSamples) else frozenset()


def _prompt(ids: np.ndarray, targets: np.ndarray) -> Prompt | None:
    """Returns what comes before the first target, and the targets from there on; None if either is empty.

    `ids` and `targets` are (length,).
    """
    learned = np.asarray(targets, dtype=bool)
    first = PLAIN_PROMPT if learned[1:].all() else int(learned.argmax())
    if first == 0 or first >= len(ids):
        return None
    ends = np.flatnonzero(~learned[first:])
    end = first + int(ends[0]) if len(ends) else len(ids)
    return Prompt([int(token) for token in ids[:first]], [int(token) for token in ids[first:end]])


@torch.no_grad()
def continuations(
    accelerator: Accelerator, run: PreparedRun, prompts: list[Prompt], beat: Callable[[], None]
) -> list[str]:
    """Returns the most likely tokens behind each prompt, as text. Every rank calls this.

    The model runs as it is trained, sharded and without a cache, so that nothing is copied; every rank runs the same
    forwards. Without dropout no random number is drawn, so training is not affected.

    Args:
        beat: called before each forward, so that slow ones do not count as a stall.
    """
    # An encoder-decoder's rows are targets, which begin with the token that begins a target.
    begun = isinstance(run.data.validation, SourceTargetSamples)
    rows = [_decoder_start(run.objective, prompt) if begun else list(prompt.asked) for prompt in prompts]
    starts, length = [len(row) for row in rows], NEW_TOKENS
    if isinstance(run.data.validation, SourceTargetSamples):
        length = min(length, run.data.validation.max_target_length - 1)
    width, padding = max(starts) + length, pad_id(run.tokenizer)
    samples = run.data.validation
    shown = samples.shown_tensors([[p.images] for p in prompts]) if isinstance(samples, PictureSamples) else {}
    never = sorted(_placeholders(samples))  # no further image can be generated
    tell = Pass(Terminal(quiet=ranks.rank() != 0), "continuing held-out prompts")
    with without_dropout(run.model):
        for number in range(length):
            tell(number, length)
            beat()
            batch = _padded_batch(rows, width, padding)
            if isinstance(samples, PictureSamples):
                batch = samples.with_kinds(batch) | shown
            batch = run.objective.on_host(_with_sources(batch, prompts, padding) if begun else batch)
            logits = run.objective.logits(run.model, send_to_device(batch, accelerator.device))
            ends = torch.tensor([len(row) - 1 for row in rows], device=logits.device)
            last = logits[torch.arange(len(rows), device=logits.device), ends]
            last[:, never] = -torch.inf
            chosen = last.argmax(dim=-1).tolist()
            for row, token in zip(rows, chosen, strict=True):
                row.append(token)
    return [_text_up_to_end(run, row[start:]) for row, start in zip(rows, starts, strict=True)]


def _decoder_start(objective: Objective, prompt: Prompt) -> list[int]:
    """Returns the token that the decoder gets before a target."""
    return objective.decoder_inputs(torch.tensor([prompt.answer]))[0, :1].tolist()


def _with_sources(batch: Batch, prompts: list[Prompt], padding: int) -> Batch:
    """Returns a batch of targets as the decoder gets them, (B, U), with their sources, (B, T)."""
    sources, lengths = filled_up([prompt.asked for prompt in prompts], padding, max(len(p.asked) for p in prompts))
    mask = (torch.arange(sources.shape[1]) < lengths[:, None]).long()
    targets = {"decoder_input_ids": batch["input_ids"], "labels": batch["labels"], "target_lengths": batch["lengths"]}
    return {"input_ids": sources, "attention_mask": mask, "lengths": lengths, **targets}


def _padded_batch(rows: list[list[int]], width: int, padding: int) -> Batch:
    """Returns a batch (B, `width`), padded on the right, where a causal model never looks."""
    ids = torch.tensor([row + [padding] * (width - len(row)) for row in rows])
    positions = torch.arange(width).expand(len(rows), -1).contiguous()
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids, "labels": torch.full_like(ids, IGNORED), "position_ids": positions, "lengths": lengths}


def _text_up_to_end(run: PreparedRun, ids: list[int]) -> str:
    """Decodes the tokens up to the first special one, which ends a text or a turn."""
    special = set(run.tokenizer.all_special_ids)
    end = next((place for place, token in enumerate(ids) if token in special), len(ids))
    text: str = run.tokenizer.decode(ids[:end])
    return text


def steps_between(num_steps: int, every: int | None) -> list[int]:
    """Returns the steps whose evaluations continue the prompts: at most `MOST_BETWEEN`, spread evenly over the run.

    Args:
        num_steps: steps of the run, whose last one is left out.
        every: steps from one evaluation to the next, or None if there are none in between.
    """
    due = list(range(every, num_steps, every)) if every is not None else []
    chosen = [(place + 1) * (len(due) + 1) // (MOST_BETWEEN + 1) - 1 for place in range(MOST_BETWEEN)]
    return due if len(due) <= MOST_BETWEEN else [due[number] for number in chosen]


class HeldOutSamples(Extension):
    """Puts what the model writes behind held-out prompts into `run.shown`, and into a file of the run's folder.

    Args:
        opened, run: the run whose model writes, with the weights that are evaluated.
        metrics: prints what it writes behind the first prompt.
        heartbeat: told before each forward outside of an evaluation, and while a write waits for room.
    """

    def __init__(self, opened: OpenedRun, run: PreparedRun, metrics: Metrics, heartbeat: Heartbeat) -> None:
        self._run, self._accelerator, self._console = run, opened.accelerator, opened.console
        self._metrics, self._heartbeat = metrics, heartbeat
        self._path = opened.output_dir / SAMPLES_FILE
        self._count = opened.recipe.logging.held_out_samples
        self._steps = steps_between(run.num_steps, opened.recipe.training.eval_every_steps)
        self._prompts: list[Prompt] = []

    def begin(self, step: int) -> None:
        """Continues the prompts before the first step. A run that resumes after `step` reads what it wrote. Collective.

        Raises:
            OSError: if the file cannot be written.
        """
        if self._count == 0:
            return
        self._prompts = held_out_prompts(self._run, self._count)
        if not self._prompts:
            self._console.warn(
                f"logging.held_out_samples: no held-out row leaves room for {NEW_TOKENS} tokens within data.max_length"
            )
            return
        shown = [_unanswered(self._run, prompt) for prompt in self._prompts]
        if step > 0:
            self._run.shown.side_by_side = ranks.on_first_rank(lambda: self._written_until(step, shown))
            return
        self._run.shown.side_by_side = shown
        # Its forwards may compile.
        self._continue(lambda: self._heartbeat.enter_phase(Phase.GENERATE), lambda one, text: replace(one, before=text))
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
                lambda: trainer.enter_phase(Phase.EVALUATE),
                lambda one, text: replace(one, between=[*one.between, (step, text)]),
            )
            self._metrics.progress.line(step, f"writes {first[:SHOWN]!r}")
            ranks.on_first_rank(self._write_if_possible)
        return {}

    def end(self) -> None:
        """Continues the prompts after the last step. Collective."""
        if self._prompts:
            self._continue(
                lambda: self._heartbeat.enter_phase(Phase.EVALUATE), lambda one, text: replace(one, after=text)
            )
            waits = self._heartbeat.wait
            ranks.on_first_rank(lambda: patiently(self._write, SAMPLES_FILE, self._console.warn, waits))

    def _continue(self, beat: Callable[[], None], put: Callable[[SideBySide, str], SideBySide]) -> str:
        """Continues the prompts, puts each text into what is shown of its prompt, and returns the first. Collective."""
        texts = continuations(self._accelerator, self._run, self._prompts, beat)
        shown = self._run.shown
        shown.side_by_side = [put(one, text) for one, text in zip(shown.side_by_side, texts, strict=True)]
        return texts[0]

    def _write_if_possible(self) -> None:
        # A full disk costs this file, which is written again at the end, and not the run.
        with suppress(OSError):
            self._write()

    def _write(self) -> None:
        text = json.dumps([asdict(sample) for sample in self._run.shown.side_by_side], indent=1)
        atomic_write(self._path, text)


def _unanswered(run: PreparedRun, prompt: Prompt) -> SideBySide:
    """Returns a prompt with its answer in the data; one token stands for all those of an image."""
    hidden = _placeholders(run.data.validation)
    before = [None, *prompt.asked]
    kept = [token for token, last in zip(prompt.asked, before, strict=False) if token != last or token not in hidden]
    images = tuple(map(preview, prompt.images))
    return SideBySide(run.tokenizer.decode(kept), _text_up_to_end(run, prompt.answer), images=images)
