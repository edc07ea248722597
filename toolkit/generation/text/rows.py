"""Reads files of prompts, with or without right answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from toolkit.data.rows.examples import Message
from toolkit.errors import BadInputError
from toolkit.generation.text.complete import Completion, Prompt, complete, encode_prompt
from toolkit.generation.text.image_prompts import encode_with_images
from toolkit.generation.text.load import Loaded
from toolkit.generation.text.options import Sampling

T = TypeVar("T")

COLUMNS = ("prompt", "messages", "question")
"""Columns of a row's prompt; the first that is not null counts."""

PROBLEMS_SHOWN = 10
"""Number of bad rows that an error names."""

LENGTH_SHOWN = 80
"""Characters of an answer that are printed."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt of a file.

    Attributes:
        place: file:line, for messages.
        given: the prompt as the file has it.
        prompt: a text, or checked messages.
        tools: tools that the assistant may call.
        arguments: arguments of the chat template (`chat_template_kwargs`), which override the recipe's.
        answers: the right answers; empty if the row is not evaluated.
        images: files or contents, in the order of their places in the messages.
        fields: the whole row, as the file has it.
    """

    place: str
    given: Any
    prompt: str | list[Message]
    tools: list[dict[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    images: tuple[Path | bytes, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    def asked(self, is_plain: bool) -> str | list[Message]:
        """Returns the prompt; a text without a chat template has no place for the system prompt of its row."""
        return self.given if is_plain and isinstance(self.given, str) else self.prompt


def read_rows(path: Path, option: str, with_answers: bool, is_scored: bool = False) -> list[PromptRow]:
    """Reads a file of prompts (.txt or .jsonl), or of prompts with answers (.jsonl).

    Args:
        option: the name of the file in errors, such as `--eval`.
        with_answers: whether rows need answers.
        is_scored: whether a function scores, so that rows need no answers; answers of training rows are still read.

    Raises:
        BadInputError: if the file cannot be read or has no rows, or rows are wrong; it names their lines.
    """
    kinds = (".jsonl",) if with_answers and not is_scored else (".txt", ".jsonl")
    if path.suffix not in kinds:
        raise BadInputError(f"{option}: {str(path)!r} is of an unknown kind; allowed: {', '.join(kinds)}")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInputError(f"{option}: {str(path)!r} cannot be read: {error.strerror}; name a file") from error

    named = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not named:
        raise BadInputError(f"{option}: {str(path)!r} holds no prompt; write one a line")
    make = _plain_row if path.suffix == ".txt" else partial(_json_row, path.parent, with_answers, is_scored)
    return all_right(option, [(place, partial(make, place, line)) for place, line in named])


def all_right(option: str, attempts: Iterable[tuple[str, Callable[[], T]]]) -> list[T]:
    """Calls each attempt, which has the place of its row, and returns the results.

    Raises:
        BadInputError: names the rows whose attempts failed.
    """
    good, problems = [], []
    for place, attempt in attempts:
        try:
            good.append(attempt())
        except BadInputError as problem:
            problems.append(f"  {place}: {problem}")
    if problems:
        more = len(problems) - PROBLEMS_SHOWN
        shown = [*problems[:PROBLEMS_SHOWN], *([f"  and {more} more"] if more > 0 else [])]
        told = f"{option}: rows that cannot be used: {len(problems)}; correct them, or take them out"
        raise BadInputError("\n".join([told, *shown]))
    return good


def _plain_row(place: str, line: bytes) -> PromptRow:
    text = _decode_line(line)
    return PromptRow(place, text, text, fields={"prompt": text})


def _decode_line(line: bytes) -> str:
    try:
        # Some editors begin a file with a byte order mark.
        return line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInputError("not UTF-8") from None


def _json_row(folder: Path, with_answers: bool, is_scored: bool, place: str, line: bytes) -> PromptRow:
    try:
        fields = json.loads(_decode_line(line))
    except (ValueError, RecursionError):
        raise BadInputError("not JSON") from None
    if not isinstance(fields, dict):
        raise BadInputError("no object, as {} is")
    if with_answers and fields.get("choices") is not None:
        raise BadInputError(
            "it has choices, which lm-evaluation-harness scores (`toolkit help serving`); leave such rows out"
        )
    there = [name for name in COLUMNS if name in fields]
    # A table's rows have all its columns, those that they do not use as null.
    column = next((name for name in there if fields[name] is not None), next(iter(there), None))
    if column is None:
        has = f"it has {', '.join(map(repr, fields))}" if fields else "it is empty"
        raise BadInputError(f"no prompt; {has}; needed: one of {', '.join(COLUMNS)}")
    given, answer = fields[column], fields.get("answer")
    if with_answers and answer is None:
        given, answer = _split(column, given, fields, is_scored)
    row = replace(_checked_row(place, column, given, fields, folder), fields=fields)
    if not with_answers or (is_scored and answer is None):
        return row
    return replace(row, answers=answers_of(answer))


def _split(column: str, given: Any, fields: dict[str, Any], is_scored: bool) -> tuple[Any, str | None]:
    """Returns the prompt and the answer of a row to train on.

    An answer that is judged bad is none, which only a row that is scored can do without.
    """
    from toolkit.data.layouts.answers import learned_answer
    from toolkit.data.layouts.messages import messages_of, role_of
    from toolkit.data.rows.values import RowProblem, is_judged_bad

    try:
        messages = messages_of(given, column, images=True) if isinstance(given, list) and given else []
        answer = learned_answer(fields, messages)
        if answer is None and not is_scored and is_judged_bad(fields):
            raise RowProblem("its completion is labelled false, so it has no reference answer; leave the row out")
    except RowProblem as problem:
        raise BadInputError(str(problem)) from None
    is_answered = len(messages) > 1 and messages[-1]["role"] == "assistant"
    asked = len(given) if isinstance(given, list) else 0
    while is_answered and asked and role_of(given[asked - 1]) == "assistant":
        asked -= 1  # Harmony's answer is in several messages
    return given[:asked] if is_answered else given, answer


def row_of(place: str, prompt: str | list[Message]) -> PromptRow:
    """Makes a row of a prompt. Messages are checked as in a file, and paths of images start from the current folder.

    Raises:
        BadInputError: if an image is missing, or the prompt asks nothing.
    """
    from toolkit.data.rows.image_places import is_image

    messages = prompt if isinstance(prompt, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    if not any(is_image(part) for content in contents if isinstance(content, list) for part in content):
        return PromptRow(place, prompt, prompt)
    return _checked_row(place, "messages", prompt, {}, Path())


def _checked_row(place: str, column: str, value: Any, fields: Mapping[str, Any], folder: Path) -> PromptRow:
    """Makes a row of a text or messages, which are checked as in training.

    Args:
        folder: the folder of the file; paths of images start from it.

    Raises:
        BadInputError: if training would refuse the row.
    """
    from toolkit.data.images.image_files import file_or_content
    from toolkit.data.kinds.registry import LAYOUTS
    from toolkit.data.layouts.layout import Layout
    from toolkit.data.layouts.messages import MEDIA
    from toolkit.data.layouts.template_arguments import COLUMN, arguments_of
    from toolkit.data.rows.examples import Conversation
    from toolkit.data.rows.image_places import COLUMNS as IMAGES
    from toolkit.data.rows.image_places import column_of
    from toolkit.data.rows.values import RowProblem

    names = {"prompt": column, "completion": "completion", "tools": "tools"}
    layout = Layout(LAYOUTS["prompt and completion"], names, images=True)
    try:
        # Images stand in a user's turn.
        asked = [{"role": "user", "content": value}] if isinstance(value, str) and column_of(fields) else value
        asked = _with_system_or_tools(asked, fields)
        completion = "any" if isinstance(asked, str) else [{"role": "assistant", "content": "any"}]
        row = {column: asked, "completion": completion, "tools": fields.get("tools")}
        arguments = arguments_of(fields.get(COLUMN))
        example = layout.example(row | {name: fields[name] for name in (*IMAGES, *MEDIA) if name in fields})
        if not isinstance(example, Conversation):
            return PromptRow(place, value, str(value), None, arguments)
        images = tuple(file_or_content(reference, folder) for reference in example.images)
    except RowProblem as problem:
        raise BadInputError(str(problem)) from None
    # Without the answer that was put after it for the check.
    messages = example.messages[:-1]
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadInputError(f"nothing is asked: the last message is the {messages[-1]['role']}'s, and not the user's")
    return PromptRow(place, value, messages, example.tools, arguments, images=images)


def _with_system_or_tools(asked: Any, fields: Mapping[str, Any]) -> Any:
    """Returns what is asked as messages, after the system prompt of its row, if the row has one or tools.

    As in training, a prompt next to a completion has no system prompt, nor has its text tools.
    """
    from toolkit.data.layouts.messages import SYSTEM
    from toolkit.data.rows.values import is_absent, is_empty

    system = fields.get("system")
    if fields.get("completion") is not None or (is_absent(system) and is_empty(fields.get("tools"))):
        return asked
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    first = messages[0] if isinstance(messages, list) and messages else None
    has_own = not isinstance(first, dict) or first.get("role") in SYSTEM
    return messages if is_absent(system) or has_own else [{"role": "system", "content": system}, *messages]


def answers_of(value: Any) -> tuple[str, ...]:
    """Returns the right answers of a row's column `answer`; see `right_answers`. Raises BadInputError."""
    from toolkit.data.layouts.answers import right_answers
    from toolkit.data.rows.values import RowProblem

    try:
        return right_answers(value)
    except RowProblem as problem:
        raise BadInputError(str(problem)) from None


def encode_rows(loaded: Loaded, rows: list[PromptRow], option: str, system: str | None, raw: bool) -> list[Prompt]:
    """Encodes the rows.

    Raises:
        BadInputError: names the rows that the model cannot take.
    """
    prompts = all_right(option, [(row.place, partial(_encode_row, loaded, row, system, raw)) for row in rows])
    return [replace(prompt, row=number) for number, prompt in enumerate(prompts)]


def _encode_row(loaded: Loaded, row: PromptRow, system: str | None, raw: bool) -> Prompt:
    if not row.images:
        asked = row.asked(raw or loaded.tokenizer.chat_template is None)
        return encode_prompt(loaded, asked, system, raw, row.tools, row.arguments)
    if raw:
        raise BadInputError("images go where the chat template says; leave --raw out")
    assert isinstance(row.prompt, list)
    return encode_with_images(loaded, row.prompt, row.images, system, row.tools, row.arguments)


def completions(loaded: Loaded, prompts: list[Prompt], sampling: Sampling, batch_size: int) -> Iterator[Completion]:
    """Yields a completion of each prompt, in order."""
    for start in range(0, len(prompts), batch_size):
        yield from complete(loaded, prompts[start : start + batch_size], sampling)
