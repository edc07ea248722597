"""Counts right answers of a model: completions that are compared or scored."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from toolkit.errors import BadInputError, counted
from toolkit.generation.text.complete import Completion
from toolkit.generation.text.rows import LENGTH_SHOWN, PromptRow
from toolkit.recipe.objectives.section import Comparison
from toolkit.user_function import UserFunction, as_number, load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MISMATCHES_SHOWN = 5
"""Number of wrong answers that are printed."""

MINUS = "\u2212"
"""The minus of mathematics, which models and data write as well as the hyphen."""

NUMBER = re.compile(
    r"(?:(?<![A-Za-z0-9_.)\]%])-)?"  # after a word or a number it is a dash: 3-5
    r"(?:(?:\d{1,3}(?:,\d{4})+(?!\d)|\d+(?:,\d{3}(?!\d))*)(?:\.\d+)?|(?<![A-Za-z0-9_.])\.\d+)"
    r"(?:[eE][+-]?\d{1,3}(?![A-Za-z0-9_]))?"
)
"""A number as people write it, with or without commas at the thousands (or, as in East Asia, ten thousands)."""


class Scoring(Protocol):
    """Scores completions: a comparison with answers, or a user's function."""

    def score(self, completion: str, row: PromptRow) -> float: ...


@dataclass(frozen=True)
class Compared:
    """Compares completions with answers.

    Attributes:
        reader: reads completions as the tokenizer and its chat template write them; None for plain text.
    """

    comparison: Comparison
    reader: Reader | None = None

    def of_completion(self, text: str) -> Any:
        """Returns the value of a completion that is compared; None, which equals no answer, if it has none."""
        part = text if self.comparison.extract is None else _last_match(self.comparison.extract, text)
        return None if part is None else self._value(part)

    def of_answer(self, text: str) -> Any:
        """Returns the value of an answer of a file, which may be bare or stand in a text as in a completion."""
        part = None if self.comparison.extract is None else _last_match(self.comparison.extract, text)
        return self._value(text if part is None else part)

    def score(self, completion: str, row: PromptRow) -> float:
        """Returns 1 if a completion is one of the row's answers, else 0."""
        reader = self.reader if self.comparison.extract is None else None  # the whole text is searched
        answers = (text for answer in row.answers for text in (reader.readings(answer, True) if reader else [answer]))
        right = [*map(self.of_answer, answers)]
        found = map(self.of_completion, reader.readings(completion) if reader else [completion])
        if any(value is not None and value in right for value in found):
            return 1.0
        return float(reader is not None and any(reader.calls(completion, answer, row) for answer in row.answers))

    def _value(self, text: str) -> Any:
        if self.comparison.how == "numeric":
            found = NUMBER.findall(text.replace(MINUS, "-"))
            return Decimal(found[-1].replace(",", "")) if found else None
        if self.comparison.how == "structured":
            return comparable_json(text)
        return text if self.comparison.how == "strict" else normalised(text)


def has_function(compare: str | None) -> bool:
    """Tells whether a comparison is a user's function, which needs no answers."""
    return Comparison.of(compare).score is not None


LACKS = {"numeric": "holds no number", "structured": "is not JSON"}


def scoring_of(
    rows: list[PromptRow], compare: str | None, field: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> Scoring:
    """Returns the scoring of a comparison. Imports a user's function, which runs code of its module.

    Args:
        compare: as in a recipe; see `Comparison`.
        field: the option or the field of the comparison, for errors.
        tokenizer: the model's; None for plain text, in which nothing is read but what stands there.

    Raises:
        BadInputError: if answers lack the number or the JSON that is compared, or the function cannot be imported.
    """
    comparison = Comparison.of(compare)
    if comparison.score is not None:
        return Scorer(load_function(comparison.score, field))
    compared = Compared(comparison, None if tokenizer is None else Reader(tokenizer))
    lacking = [row.place for row in rows if None in map(compared.of_answer, row.answers)]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise BadInputError(
            f"{field}: the answer of {lacking[0]}{more} {LACKS[comparison.how]}; compare by text, or correct it"
        )
    return compared


def _last_match(pattern: str, text: str) -> str | None:
    compiled = re.compile(pattern)
    matches = list(compiled.finditer(text))
    return None if not matches else matches[-1][1 if compiled.groups else 0]


@dataclass(frozen=True)
class Mismatch:
    """A row whose completion equals none of its answers, or has a score below 1."""

    row: PromptRow
    completion: str
    score: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """Counts of rows that were answered right.

    Attributes:
        stopped: number of answers that a token ended; the others were cut.
        tokens: tokens of all answers, without those that ended them.
    """

    num_rows: int
    mismatches: list[Mismatch]
    stopped: int
    tokens: int

    @property
    def exact(self) -> int:
        return self.num_rows - len(self.mismatches)

    @property
    def accuracy(self) -> float:
        """Mean score of the rows, 0 to 1; for compared answers, the share of right ones."""
        return (self.exact + math.fsum(wrong.score for wrong in self.mismatches)) / self.num_rows

    def shares(self) -> dict[str, float]:
        """Returns the accuracy, the share of answers that stop, and their mean length."""
        return {
            "accuracy": self.accuracy,
            "stopped": self.stopped / self.num_rows,
            "mean_tokens": self.tokens / self.num_rows,
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the command's JSON."""
        mismatches = [
            {"row": wrong.row.place, "prompt": wrong.row.given, "completion": wrong.completion}
            | {"answers": list(wrong.row.answers)}
            | ({"score": wrong.score} if wrong.score else {})
            for wrong in self.mismatches
        ]
        return {**self.shares(), "exact": self.exact, "rows": self.num_rows, "mismatches": mismatches}


def evaluate(rows: list[PromptRow], completions: Iterable[Completion], scoring: Scoring) -> Evaluation:
    """Scores each row's completion; `completions` are in the order of the rows.

    Raises:
        BadInputError: if a user's function fails on one.
    """
    wrong, stopped, tokens = [], 0, 0
    for row, completion in zip(rows, completions, strict=True):
        score = scoring.score(completion.text, row)
        if score < 1:
            wrong.append(Mismatch(row, completion.text, score))
        stopped += completion.stopped
        tokens += completion.num_tokens
    return Evaluation(len(rows), wrong, stopped, tokens)


def normalised(text: str) -> str:
    """Returns the text in lower case, with one space between words."""
    return " ".join(text.casefold().split())


def summary(found: Evaluation) -> str:
    """Returns lines with the accuracy and the first wrong answers."""
    shares = found.shares()
    lines = [
        f"accuracy: {found.accuracy:.1%} ({found.exact} of {counted(found.num_rows, 'row')} exact)",
        f"answers that stop: {shares['stopped']:.1%}; mean length: {shares['mean_tokens']:.1f} tokens",
    ]
    for wrong in found.mismatches[:MISMATCHES_SHOWN]:
        expected = " or ".join(_shortened(answer) for answer in wrong.row.answers)
        told = f" instead of {expected}" if expected else ""
        scored = f", scored {wrong.score:.2f}" if wrong.score or not expected else ""
        lines.append(f"  {wrong.row.place}: {_shortened(wrong.completion)}{told}{scored}")
    more = len(found.mismatches) - MISMATCHES_SHOWN
    return "\n".join([*lines, *([f"  and {more} more; --json has them all"] if more > 0 else [])])


def _shortened(text: str) -> str:
    return repr(text if len(text) <= LENGTH_SHOWN else f"{text[:LENGTH_SHOWN]}...")


@dataclass(frozen=True)
class Scorer:
    """Scores completions by a function, which takes a completion and its row as the file has it.

    The function returns True, False or a number from 0 to 1.
    """

    function: UserFunction

    def score(self, completion: str, row: PromptRow) -> float:
        """Returns the score of a row's completion, 0 to 1.

        Raises:
            BadInputError: if the function fails or returns something else; it names the row.
        """
        # A copy, so that one score does not depend on those before it.
        found = self.function.call(row.place, completion, copy.deepcopy(dict(row.fields)))
        score = as_number(found)
        if score is not None and 0 <= score <= 1:
            return score
        raise self.function.wrong(found, row.place, "True, False, or a number from 0 to 1")


WORDS, THOUGHT = "Wordsofananswer", "Thoughtofananswer"
"""Words that are found again in what a chat template writes."""


@dataclass(frozen=True)
class Reader:
    """Reads what a model wrote after prompts that its tokenizer's chat template wrote."""

    tokenizer: PreTrainedTokenizerBase

    def readings(self, text: str, is_answer: bool = False) -> Iterator[str]:
        """Yields a completion or an answer as it is, and without a thought that the chat template writes before it.

        Of an answer also with the spaces that its tokens write: SentencePiece's put one after an added token.
        """
        from toolkit.data.tokens.tokenizer import decode

        yield text
        if self._end_of_thought and self._end_of_thought in text:
            yield text.rpartition(self._end_of_thought)[2]
        if is_answer:
            spaced = decode(self.tokenizer, self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            if spaced != text and "".join(spaced.split()) == "".join(text.split()):
                yield from self.readings(spaced)

    @cached_property
    def _end_of_thought(self) -> str:
        """What the chat template writes between a thought, in its field or in the words, and the words; or nothing."""
        asked = [{"role": "user", "content": "?"}]
        for said in ({"content": WORDS, "reasoning_content": THOUGHT}, {"content": f"<think>{THOUGHT}</think>{WORDS}"}):
            written = self._written(asked, said, PromptRow("", "", asked))
            _, thought, behind = written.partition(THOUGHT)
            if thought:
                return behind.partition(WORDS)[0].strip()
        return ""

    def calls(self, completion: str, answer: str, row: PromptRow) -> bool:
        """Tells whether a completion ends with the calls of an answer, as the row's chat template writes them."""
        wanted = calls_of(answer)
        if wanted is None:
            return False
        asked = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        before = self._written(asked, {"content": WORDS}, row).partition(WORDS)[0]  # such as an empty thought
        for call in wanted:  # in the order of the completion: some templates write no JSON
            arguments = call["function"]["arguments"]
            ordered = sorted(arguments, key=completion.find)
            call["function"] = {**call["function"], "arguments": {name: arguments[name] for name in ordered}}
        text = self._written(asked, {"content": None, "tool_calls": wanted}, row).removeprefix(before)
        added = self.tokenizer.added_tokens_decoder.values()
        # The end of a call may be another than that of an answer, and is no part of a completion either.
        end = next((each.content for each in added if text.endswith(each.content)), "")
        is_written = wanted[0]["function"]["name"] in text
        return is_written and any(_ends_with(completion, each) for each in (text, text.removesuffix(end)))

    def _written(self, asked: Sequence[dict[str, Any]], said: dict[str, Any], row: PromptRow) -> str:
        """Returns what the chat template writes for an answer after its prompt; nothing if it refuses that."""
        from toolkit.data.templates.stops import turn_ends
        from toolkit.data.templates.templates import rendered
        from toolkit.data.tokens.tokenizer import decode

        tokenizer, messages = self.tokenizer, [*asked, {"role": "assistant", **said}]
        try:
            prompt = rendered(tokenizer, [*asked], row.tools, prompt=True, arguments=row.arguments)
            whole = rendered(tokenizer, messages, row.tools, arguments=row.arguments)
        except Exception:  # a template is a program, and may refuse a conversation in any way
            return ""
        # A prompt may open a thought that the text of an answer without one lacks.
        shared = next((n for n, pair in enumerate(zip(prompt, whole, strict=False)) if len({*pair}) > 1), len(prompt))
        ids = tokenizer(whole[shared:], add_special_tokens=False, verbose=False)["input_ids"]
        return decode(tokenizer, ids, turn_ends(tokenizer) | {tokenizer.eos_token_id})


def calls_of(answer: str) -> list[dict[str, Any]] | None:
    """Returns the calls of an answer in JSON, as messages have them; None if it is another text."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(
        isinstance(call, dict)
        and call.keys() == {"name", "arguments"}
        and isinstance(call["name"], str)
        and isinstance(call["arguments"], dict)
        for call in calls
    ):
        return None
    # Mistral's template takes identifiers of nine characters alone.
    return [{"id": f"call{n:05}", "type": "function", "function": call} for n, call in enumerate(calls)]


def _ends_with(completion: str, calls: str) -> bool:
    """Tells whether a completion ends with calls; words before them do not count, nor the order of keys in JSON."""
    first, *others = _pieces(calls)
    found = _pieces(completion)[-1 - len(others) :]
    return len(found) > len(others) and found[0].endswith(first) and found[1:] == others


def _pieces(text: str) -> list[Any]:
    """Returns a text as the values of JSON in it and the text between them: text, value, text, and so on to a text."""
    pieces: list[Any] = []
    start = place = 0
    while found := re.compile(r"[{\[]").search(text, place):
        try:
            value, end = _DECODER.raw_decode(text, found.start())
        except (ValueError, ArithmeticError, RecursionError):
            place = found.end()
            continue
        pieces += [" ".join(text[start : found.start()].split()), with_kind(_without_id(value))]
        start = place = end
    return [*pieces, " ".join(text[start:].split())]


def _without_id(value: Any) -> Any:
    """Returns calls without their identifiers, which a model draws."""
    if isinstance(value, list):
        return [_without_id(each) for each in value]
    is_call = isinstance(value, dict) and "name" in value and ("arguments" in value or "parameters" in value)
    return {key: each for key, each in value.items() if key != "id"} if is_call else value


def comparable_json(text: str) -> Any:
    """Returns a value that is equal for all texts of the same JSON; None if the text is not JSON."""
    try:
        return with_kind(_DECODER.decode(text))
    except (ValueError, ArithmeticError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal, parse_constant=_refuse_constant)


def with_kind(value: Any) -> Any:
    """Adds the kind to a value: in Python true equals 1, and a list of pairs could be an object."""
    if isinstance(value, dict):
        return "object", {key: with_kind(each) for key, each in value.items()}
    if isinstance(value, list):
        return "array", [with_kind(each) for each in value]
    return type(value).__name__, value
