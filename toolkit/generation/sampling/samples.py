"""The file of samples, which is appended to while they are written and continued after an interruption."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError, ToolkitError
from toolkit.generation.sampling.sample_options import SampleOptions
from toolkit.generation.text.load import find_model
from toolkit.generation.text.rows import PromptRow
from toolkit.paths import atomic_write, clear_interrupted_writes, fingerprint_of, parse_json

SAMPLES, SETTINGS = "samples.jsonl", "sampling.json"
SFT, PAIRS, LABELS = "sft.jsonl", "pairs.jsonl", "labels.jsonl"


@dataclass(frozen=True)
class Sample:
    """A completion of a prompt.

    Attributes:
        row, k: numbers of the row in the file of prompts and of the completion of the row, from 0.
        prompt: the prompt as its file has it.
        tokens: number of tokens, without the one that ends the text.
        stopped: whether a token ended the text; otherwise it was cut.
        score: 1 or 0 if it was compared with answers, else the reward; None before scoring, or if the sample is empty.
    """

    row: int
    k: int
    prompt: Any
    completion: str
    tokens: int
    stopped: bool
    score: float | None = None

    @property
    def is_empty(self) -> bool:
        return not self.completion.strip()

    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def settings_of(options: SampleOptions) -> dict[str, Any]:
    """Returns the options that decide about a sample, by name.

    Raises:
        BadInputError: if there is no model, or its files cannot be read.
    """
    writing = options.writing
    sampling = writing.sampling
    return {
        "SOURCE": _model_identity(options.source),
        "--samples": options.samples,
        "--temperature": sampling.temperature,
        "--top-p": sampling.top_p,
        "--seed": sampling.seed,
        "--max-new-tokens": sampling.max_new_tokens,
        "--system": options.system,
        "--raw": options.raw,
        "--dtype": options.dtype,
    }


def _model_identity(source: str) -> str:
    """Returns what tells a model from others: a hub name, or the fingerprint of the weights."""
    place = find_model(source)
    if place.on_hub:
        return place.name
    try:
        found = fingerprint_of(Path(place.name), "adapter_model*.safetensors" if place.is_adapter else None)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{place.name!r}: its weights cannot be read: {error}; save them again") from error
    return found or str(Path(place.name).resolve())


def begin(options: SampleOptions, rows: Sequence[PromptRow]) -> tuple[list[Sample], bool | None]:
    """Returns the samples in the file, of whole batches of rows, and whether a chat template wrote the prompts.

    Samples of a batch that was interrupted are removed from the file. For a new file, there are no samples, and None.

    Raises:
        BadInputError: if the folder cannot be made, was begun with other settings or prompts, or holds odd lines.
    """
    folder = options.to
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_interrupted_writes(folder)
        others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        if SETTINGS not in others:
            if others:
                raise BadInputError(
                    f"--to: {str(folder)!r} holds {others[0]} and no {SETTINGS}, so nobody knows how it was "
                    "made; name a new folder, or an empty one"
                )
            return [], None
        settings = parse_json((folder / SETTINGS).read_bytes())
        lines = (folder / SAMPLES).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise BadInputError(f"--to: {str(folder)!r} cannot be used: {error.strerror}; name another folder") from error
    _require_same(folder, settings, settings_of(options))
    # A kill may have torn the last line.
    whole = [line for line in lines if line.endswith(b"\n")]
    found = [_read_sample(folder, number, line, rows, options.samples) for number, line in enumerate(whole)]
    if len(found) < len(rows) * options.samples:
        found = found[: len(found) - len(found) % (rows_at_a_time(options) * options.samples)]
    if len(found) < len(lines):
        write(folder, found)
    return found, settings["chat_template"]


def give_back(folder: Path) -> None:
    """Removes the folder if the command has written nothing into it."""
    with contextlib.suppress(OSError):  # it is not empty, or gone
        folder.rmdir()


def rows_at_a_time(options: SampleOptions) -> int:
    """Returns how many rows a rank completes before it hands them over; a constant, so that batches stay the same."""
    return max(1, options.batch_size // options.samples)


def _require_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    problems = []
    for name, value in now.items():
        if before.get(name) != value:
            shown = "another model" if name == "SOURCE" else f"{before.get(name)!r}, and now it is {value!r}"
            problems.append(f"{name}: the samples in {str(folder)!r} were begun with {shown}")
    if problems:
        raise BadInputError("\n".join([*problems, "set that again, or name another folder with --to"]))


def _read_sample(folder: Path, number: int, line: bytes, rows: Sequence[PromptRow], samples: int) -> Sample:
    """Reads a line of the file. Raises BadInputError if it is not a sample, or one of another prompt."""
    place = f"{folder / SAMPLES}:{number + 1}"
    try:
        found = Sample(**parse_json(line))
    except (TypeError, ValueError):
        raise BadInputError(f"{place}: no sample; remove the file, or name another folder with --to") from None
    row, k = divmod(number, samples)
    if row >= len(rows) or (found.row, found.k, found.prompt) != (row, k, rows[row].given):
        what = rows[row].place if row < len(rows) else "no row"
        raise BadInputError(
            f"{place}: the sample belongs to another prompt than {what}; pass the file of prompts that it was begun "
            "with (you may append to it), or name another folder with --to"
        )
    return found


def start_file(options: SampleOptions, chat_template: bool) -> None:
    """Makes the empty file of samples, and the file with the settings."""
    settings = {**settings_of(options), "chat_template": chat_template}
    write(options.to, [])
    atomic_write(options.to / SETTINGS, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


def append(folder: Path, samples: Sequence[Sample]) -> None:
    """Appends samples to the file.

    Raises:
        ToolkitError: if the disk is full.
    """
    try:
        with (folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.write("".join(sample.line() for sample in samples))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        what = f"{folder / SAMPLES} cannot be written: {error.strerror}"
        raise ToolkitError(f"{what}; make room, then run the same command to resume") from error


def write(folder: Path, samples: Sequence[Sample]) -> None:
    """Replaces the file by one with these samples."""
    atomic_write(folder / SAMPLES, "".join(sample.line() for sample in samples))
