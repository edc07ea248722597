"""Reads completions back as a chat template writes answers: their calls, and their words after a thought."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.generation.text.rows import PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
