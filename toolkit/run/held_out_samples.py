"""Lets the model continue held-out prompts before the first step and after the last."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
from toolkit.objectives.objective import Objective
from toolkit.pages.side_by_side import SideBySide
from toolkit.paths import atomic_write
from toolkit.run.stages import PreparedRun
from toolkit.terminal import Pass, Terminal

SAMPLES_FILE = "samples.json"
"""File of a run's folder from which a resumed run reads what its model wrote at first."""

NEW_TOKENS = 40
"""The most tokens of a continuation; each takes a forward of all prompts, without a cache, as in training."""

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
def continuations(accelerator: Accelerator, run: PreparedRun, prompts: list[Prompt]) -> list[str]:
    """Returns the most likely tokens behind each prompt, as text. Every rank calls this.

    The model runs as it is trained, sharded and without a cache, so that nothing is copied; every rank runs the same
    forwards. Without dropout no random number is drawn, so training is not affected.
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
    run.model.eval()
    tell = Pass(Terminal(quiet=ranks.rank() != 0), "continuing held-out prompts")
    for number in range(length):
        tell(number, length)
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
    run.model.train()
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


def first_samples(
    accelerator: Accelerator, run: PreparedRun, count: int, output_dir: Path, resumed: bool
) -> list[Prompt]:
    """Puts what the model writes before its first step into `run.shown`; a resumed run reads it. Collective.

    Returns:
        The prompts, for the end of the run; none if the recipe wants none, or a resumed run did not begin with any.
    """
    path = output_dir / SAMPLES_FILE
    if count == 0 or (resumed and not ranks.on_first_rank(path.exists)):
        return []
    prompts = held_out_prompts(run, count)
    if not prompts:
        told = f"logging.held_out_samples: no held-out row leaves room for {NEW_TOKENS} tokens within data.max_length"
        Terminal(quiet=ranks.rank() != 0).warn(told)
        return []
    if resumed:
        saved = ranks.on_first_rank(lambda: json.loads(path.read_text(encoding="utf-8")))
        run.shown.side_by_side = [SideBySide(**sample) for sample in saved]
        return prompts
    before = continuations(accelerator, run, prompts)
    run.shown.side_by_side = [
        SideBySide(
            _prompt_text(run, prompt),
            _text_up_to_end(run, prompt.answer),
            text,
            images=tuple(map(preview, prompt.images)),
        )
        for prompt, text in zip(prompts, before, strict=True)
    ]
    _save_samples(run, output_dir)
    return prompts


def _prompt_text(run: PreparedRun, prompt: Prompt) -> str:
    """Decodes the prompt; one token stands for all those of an image."""
    hidden = _placeholders(run.data.validation)
    before = [None, *prompt.asked]
    kept = [token for token, last in zip(prompt.asked, before, strict=False) if token != last or token not in hidden]
    text: str = run.tokenizer.decode(kept)
    return text


def _save_samples(run: PreparedRun, output_dir: Path) -> None:
    text = json.dumps([asdict(sample) for sample in run.shown.side_by_side], indent=1)
    ranks.on_first_rank(lambda: atomic_write(output_dir / SAMPLES_FILE, text))


def last_samples(accelerator: Accelerator, run: PreparedRun, prompts: list[Prompt], output_dir: Path) -> None:
    """Puts what the model writes after its last step beside what it wrote before. Collective."""
    if prompts:
        after = continuations(accelerator, run, prompts)
        run.shown.side_by_side = [
            replace(sample, after=text) for sample, text in zip(run.shown.side_by_side, after, strict=True)
        ]
        _save_samples(run, output_dir)
