"""The file of samples: appended while they are written, and gone on with after an end."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError, ToolkitError
from toolkit.generation.load import find_model
from toolkit.generation.rows import PromptRow
from toolkit.generation.sample_options import SampleOptions
from toolkit.paths import atomic_write, clear_interrupted_writes, fingerprint_of

SAMPLES, SETTINGS = "samples.jsonl", "sampling.json"
SFT, PAIRS, LABELS = "sft.jsonl", "pairs.jsonl", "labels.jsonl"


@dataclass(frozen=True)
class Sample:
    """A completion of a prompt.

    Attributes:
        row, k: of the file of prompts, and of the row's completions, both from 0.
        prompt: as its file has it.
        tokens: without the one that ends the text.
        stopped: whether a token ended the text; else it was cut.
        score: 1 or 0 where it was compared with answers, else the reward; None: not scored yet, or nothing to reward.
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
    """What decides about a sample beside its prompt: the option's name -> its value.

    Raises BadInputError where there is no model, or its files cannot be read.
    """
    writing = options.writing
    sampling = writing.sampling
    return {
        "SOURCE": _identity(options.source),
        "--samples": options.samples,
        "--temperature": sampling.temperature,
        "--top-p": sampling.top_p,
        "--seed": sampling.seed,
        "--max-new-tokens": sampling.max_new_tokens,
        "--system": options.system,
        "--raw": options.raw,
        "--dtype": options.dtype,
    }


def _identity(source: str) -> str:
    """Tells a model from others: a hub name, or the fingerprint of the weights."""
    place = find_model(source)
    if place.on_hub:
        return place.name
    try:
        found = fingerprint_of(
            Path(place.name), "adapter_model*.safetensors" if place.is_adapter else "model*.safetensors"
        )
    except (OSError, ValueError) as error:
        raise BadInputError(f"{place.name!r}: its weights cannot be read: {error}; save them again") from error
    return found or str(Path(place.name).resolve())


def begin(options: SampleOptions, rows: Sequence[PromptRow]) -> tuple[list[Sample], bool | None]:
    """The samples that are there, of whole batches of rows, and whether they were written with a chat template.

    What a kill has left of another batch is taken out of the file. Both are empty, and None, where nothing was begun.

    Raises:
        BadInputError: the folder cannot be made, was begun with other settings or prompts, or holds odd lines.
    """
    folder = options.to
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_interrupted_writes(folder)
        _require_own(folder)
        settings = _json(folder / SETTINGS, (folder / SETTINGS).read_text("utf-8")) if _is_there(folder) else None
        lines = (folder / SAMPLES).read_bytes().splitlines(keepends=True) if settings is not None else []
    except OSError as error:
        raise BadInputError(f"--to: {str(folder)!r} cannot be used: {error.strerror}; name another folder") from error
    if settings is None:
        return [], None
    _require_same(folder, settings, settings_of(options))
    # A kill may have torn the last line.
    whole = [line for line in lines if line.endswith(b"\n")]
    found = [_sample(folder, number, line, rows, options.samples) for number, line in enumerate(whole)]
    if len(found) < len(rows) * options.samples:
        found = found[: len(found) - len(found) % (rows_at_a_time(options) * options.samples)]
    if len(found) < len(lines):
        write(folder, found)
    return found, settings["chat_template"]


def _require_own(folder: Path) -> None:
    """Raises BadInputError for a folder with visible files that this command has not written."""
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others and not {SETTINGS, SAMPLES, SFT, PAIRS, LABELS}.intersection(others):
        raise BadInputError(
            f"--to: {str(folder)!r} holds files of something else ({others[0]}); name a new folder, or an empty one"
        )


def give_back(folder: Path) -> None:
    """Takes away the folder of a command that has written nothing."""
    with contextlib.suppress(OSError):  # it is not empty, or gone
        folder.rmdir()


def rows_at_a_time(options: SampleOptions) -> int:
    """Rows whose completions a rank writes before it hands them over: always the same ones, so that batches are."""
    return max(1, options.batch_size // options.samples)


def _is_there(folder: Path) -> bool:
    has = {name: (folder / name).exists() for name in (SETTINGS, SAMPLES)}
    if len({*has.values()}) > 1:
        there, missing = sorted(has, key=lambda name: not has[name])
        raise BadInputError(
            f"--to: {str(folder)!r} has {there} without {missing}, so nobody knows how it was made; remove it, or name "
            "another folder"
        )
    foreign = [name for name in (SFT, PAIRS, LABELS) if not has[SETTINGS] and (folder / name).exists()]
    if foreign:
        raise BadInputError(
            f"--to: {str(folder)!r} has {', '.join(foreign)}, which this command has not written and would replace; "
            "name another folder"
        )
    return has[SETTINGS]


def _require_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    problems = []
    for name, value in now.items():
        if before.get(name) != value:
            shown = "another model" if name == "SOURCE" else f"{before.get(name)!r}, and now it is {value!r}"
            problems.append(f"{name}: the samples in {str(folder)!r} were begun with {shown}")
    if problems:
        raise BadInputError("\n".join([*problems, "set that again, or name another folder with --to"]))


def _sample(folder: Path, number: int, line: bytes, rows: Sequence[PromptRow], samples: int) -> Sample:
    """A line of the file. Raises BadInputError where it is no sample, or one of another prompt."""
    place = f"{folder / SAMPLES}:{number + 1}"
    try:
        found = Sample(**_json(place, line))
    except TypeError:
        raise BadInputError(f"{place}: no sample; remove the file, or name another folder with --to") from None
    row, k = divmod(number, samples)
    if row >= len(rows) or (found.row, found.k, found.prompt) != (row, k, rows[row].given):
        what = rows[row].place if row < len(rows) else "no row"
        raise BadInputError(
            f"{place}: the sample is of another prompt than {what} of the file of prompts; give the prompts that it "
            "was begun with, perhaps with more behind them, or name another folder with --to"
        )
    return found


def _json(place: Any, text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadInputError(f"{place}: no object of JSON; remove the file, or name another folder with --to")
    return found


def start_file(options: SampleOptions, chat_template: bool) -> None:
    """Makes the empty file of samples, beside how they are made."""
    settings = {**settings_of(options), "chat_template": chat_template}
    write(options.to, [])
    atomic_write(options.to / SETTINGS, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


def append(folder: Path, samples: Sequence[Sample]) -> None:
    """Adds samples to the file. Raises ToolkitError where the disk is full."""
    try:
        with (folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.write("".join(sample.line() for sample in samples))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        what = f"{folder / SAMPLES} cannot be written: {error.strerror}"
        raise ToolkitError(f"{what}; make room, and the same command goes on") from error


def write(folder: Path, samples: Sequence[Sample]) -> None:
    """Writes the file anew."""
    atomic_write(folder / SAMPLES, "".join(sample.line() for sample in samples))
