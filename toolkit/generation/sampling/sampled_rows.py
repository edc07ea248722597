"""Makes training rows of scored samples: the best for SFT, best and worst for DPO, all with labels for KTO."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.data.rows.examples import Message
from toolkit.data.rows.image_places import PLACE
from toolkit.errors import counted
from toolkit.generation.sampling.samples import LABELS, PAIRS, SAMPLES, SFT, Sample
from toolkit.generation.text.complete import after_system
from toolkit.generation.text.rows import PromptRow
from toolkit.paths import atomic_write


@dataclass(frozen=True)
class PromptForm:
    """The form of the prompts.

    Attributes:
        chat_template: whether a chat template wrote them; otherwise they are plain text.
        system: the system text of messages that have none.
    """

    chat_template: bool
    system: str | None = None

    def row(self, row: PromptRow, **texts: str) -> dict[str, Any]:
        """Returns the training row, by column. Its tokens are those that the model read and wrote."""
        if not self.chat_template:
            return {"prompt": row.asked(is_plain=True), **texts}
        prompt = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        prompt = _with_images(prompt, row.images) if row.images else prompt
        answers = {name: [{"role": "assistant", "content": text}] for name, text in texts.items()}
        more = {"tools": row.tools, "chat_template_kwargs": dict(row.arguments)}
        return {"prompt": after_system(prompt, self.system), **answers} | {
            name: value for name, value in more.items() if value
        }


@dataclass(frozen=True)
class Sampled:
    """The result of sampling.

    Attributes:
        folder: the folder of the files.
        num_prompts, num_samples: numbers of prompts and samples.
        by_reward: whether a reward model scored; otherwise scores are 1 for a right completion and 0 for another.
        mean_score: the mean over all samples.
        mean_best_score: the mean over each prompt's best sample; for compared answers, the share of prompts with a
            right one.
        left_out: number of samples that are only in samples.jsonl, because they were cut or are empty.
        rows: file -> number of its rows; a file without rows is not written.
        good: number of rows of labels.jsonl with a true label.
    """

    folder: Path
    num_prompts: int
    num_samples: int
    by_reward: bool
    mean_score: float
    mean_best_score: float
    left_out: int
    rows: dict[str, int]
    good: int

    def summary(self) -> str:
        """Returns lines that say what was sampled and written."""
        how_many = f"{counted(self.num_samples, 'sample')} of {counted(self.num_prompts, 'prompt')}"
        mean, best = self.mean_score, self.mean_best_score
        lines = [
            f"{self.folder / SAMPLES}: {how_many}",
            f"mean reward: {mean:.4g}; of the best samples: {best:.4g}"
            if self.by_reward
            else f"right: {mean:.1%} of the samples; {best:.1%} of the prompts have a right one",
        ]
        if self.left_out:
            cut = "cut at --max-new-tokens or the model's last position, or empty"
            lines.append(f"in no other file: {counted(self.left_out, 'sample')} {cut}")
        for name, rows in self.rows.items():
            lacking = self.num_prompts - rows if name != LABELS else 0
            why = "whose samples are all scored alike" if name == PAIRS else "without a sample to learn"
            skipped = f"; none for {counted(lacking, 'prompt')} {why}" if lacking else ""
            good = f", {self.good} of them good" if name == LABELS else ""
            lines.append(
                f"{self.folder / name}: {counted(rows, 'row')}{good}{skipped}{'' if rows else '; not written'}"
            )
        return "\n".join(lines)


def _with_images(messages: list[Message], images: Sequence[Path | bytes]) -> list[Message]:
    """Returns messages with their images inside, because the files may lie outside of the folder of the new rows."""
    contents = iter(image if isinstance(image, bytes) else image.read_bytes() for image in images)

    def in_parts(words: str) -> list[dict[str, str]]:
        parts: list[dict[str, str]] = []
        for number, text in enumerate(words.split(PLACE)):
            parts += [{"type": "image", "base64": base64.b64encode(next(contents)).decode()}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
        return parts

    return [
        {**message, "content": in_parts(message["content"])} if PLACE in (message["content"] or "") else message
        for message in messages
    ]


def write_rows(
    folder: Path, rows: Sequence[PromptRow], samples: Sequence[Sample], form: PromptForm, by_reward: bool
) -> Sampled:
    """Writes a file of rows for each kind of training, and removes files that would have none."""
    of_rows: list[list[Sample]] = [[] for _ in rows]
    for sample in samples:
        of_rows[sample.row].append(sample)
    files: dict[str, list[dict[str, Any]]] = {SFT: [], PAIRS: [], LABELS: []}
    for row, drawn in zip(rows, of_rows, strict=True):
        # After the end of a text that was cut, an end would be learned that the model has not written there.
        usable = [sample for sample in drawn if sample.stopped and not sample.is_empty]
        for name, made in _rows_of_prompt(row, usable, form, by_reward):
            files[name].append(made)
    for name, lines in files.items():
        if lines:
            atomic_write(folder / name, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        else:
            (folder / name).unlink(missing_ok=True)
    scores = [[sample.score for sample in drawn if sample.score is not None] for drawn in of_rows]
    return Sampled(
        folder,
        len(rows),
        len(samples),
        by_reward,
        _mean([score for of_row in scores for score in of_row]),
        _mean([max(of_row) for of_row in scores if of_row]),
        sum(not sample.stopped or sample.is_empty for sample in samples),
        {name: len(lines) for name, lines in files.items()},
        sum(line["label"] for line in files[LABELS]),
    )


def _rows_of_prompt(
    row: PromptRow, samples: Sequence[Sample], form: PromptForm, by_reward: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of one prompt, each with its file. Of samples with equal scores the first counts."""
    if not samples:
        return
    best, worst = max(samples, key=_score_of), min(samples, key=_score_of)
    differ = _score_of(best) > _score_of(worst) and best.completion != worst.completion
    if by_reward or _score_of(best) == 1:
        yield SFT, form.row(row, completion=best.completion)
    if differ:
        yield PAIRS, form.row(row, chosen=best.completion, rejected=worst.completion)
    # Rewards are comparable for one prompt alone: good is what is above its mean.
    bar = _mean([_score_of(sample) for sample in samples]) if by_reward else 0.5
    if differ or not by_reward:
        for sample in samples:
            yield LABELS, {**form.row(row, completion=sample.completion), "label": _score_of(sample) > bar}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _score_of(sample: Sample) -> float:
    assert sample.score is not None
    return sample.score
