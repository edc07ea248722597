"""What a model writes after a prompt with which the text of the conversation does not begin.

A chat template may write an answer after other characters than its own generation prompt: blanks, a thought that the
prompt opens or closes, or a history that changes once the answer follows. Then the answer is what the template writes
from where the two part. Anything else is refused in the words of its cause.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.layouts.template_arguments import variables
from toolkit.data.layouts.thoughts import THOUGHTS, thought_of
from toolkit.data.rows.examples import Message
from toolkit.data.rows.values import RowProblem
from toolkit.data.templates.templates import rendered

CLOSED = "an answer has thoughts, and the generation prompt of the chat template closes them before it"
OPENED = (
    "the generation prompt of the chat template opens thoughts, and the template writes an answer's in another form"
)
PARTED = "the chat template writes what comes before an answer otherwise once the answer follows"

_ASKED = [{"role": "user", "content": "What is three plus four?"}]
_THOUGHT, _WORDS = "I count on from four.", "Seven"
_TAG = re.compile(r"(?:<[^<>]*>|\[[^\[\]]*\])\w*\s*$")


def shared_length(text: str, other: str) -> int:
    """Returns how many characters two texts begin with both."""
    return len(commonprefix([text, other]))  # noqa: RUF071 (of characters is what it should be)


def written_otherwise(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    prompt: str,
    text: str,
    arguments: Mapping[str, Any],
) -> str:
    """Returns what the model writes after the prompt, for the last of the messages, whose text is `text`.

    Raises:
        RowProblem: if prompt and text part by more than blanks, a thought or the history.
    """
    common = shared_length(prompt, text)
    if not prompt[common:].strip():
        return text[common:]
    template, given = tokenizer.get_chat_template(), json.dumps(dict(arguments), sort_keys=True)
    opening, between = _around_thought(tokenizer, template, given) or _usual(prompt)
    # Both are optional: a prompt may also end a thought that it has not opened, as Laguna's.
    marks = rf"({re.escape(opening)}\s*)?({re.escape(between.strip())}\s*)?\Z"
    end = re.search(marks, prompt)
    if end is None or not end[0] or not text.startswith(prompt[: end.start()]):
        return _after_history(messages, prompt, text, common)
    rest = text[end.start() :]
    if not end[2]:
        return _after_opened(messages[-1], rest, opening, between)
    if thought_of(messages[-1]).strip():
        raise RowProblem(f"{CLOSED}{_opened_by(tokenizer, messages, prompt, arguments)}")
    return re.sub(marks.removesuffix(r"\Z"), "", rest, count=1)


def _usual(prompt: str) -> tuple[str, str]:
    return "<think>", "\n</think>\n\n" if prompt.endswith("\n") else "</think>"


def _after_opened(message: Message, rest: str, opening: str, between: str) -> str:
    """Returns an answer that ends the thought that the prompt opened; `rest` is what the template writes of it."""
    closing, words = between.strip(), str(message.get("content") or "")
    if rest.startswith(opening):
        raise RowProblem(OPENED)
    before, closed, _ = words.partition(closing)
    if closed and before.strip() and rest.strip().startswith(before.strip()):
        return rest  # the template writes the thought as it is in the words
    thought, rest = thought_of(message), rest.removeprefix(closing)
    if not between.startswith("\n"):
        return thought + between + rest
    # The words of such a message have line ends after the thought.
    return thought.strip("\n") + between + (rest.lstrip("\n") if closed and not message.get(THOUGHTS) else rest)


def _after_history(messages: list[Message], prompt: str, text: str, common: int) -> str:
    """Returns what follows the end of the prompt, with which the text goes on after leaving out a part of it.

    Mistral puts the system text into the last user turn, GPT-OSS leaves out thoughts before a final answer.
    """
    said = str(messages[-2].get("content") or "").strip()
    asked, rest = prompt[common:], text[common:]
    shared = next((n for n in range(min(len(asked), len(rest)), 0, -1) if rest.startswith(asked[-n:])), 0)
    if not said or said not in prompt or not text[: common + shared].endswith(prompt[prompt.rfind(said) :]):
        raise RowProblem(PARTED)
    return rest[shared:]


@lru_cache(maxsize=64)
def _around_thought(tokenizer: PreTrainedTokenizerBase, template: str, arguments: str) -> tuple[str, str] | None:
    """Returns the mark that opens thoughts, and what the template writes between a thought and the words after it.

    Args:
        template: the tokenizer's.
        arguments: arguments of the template in JSON.
    """
    answer = {"role": "assistant", "content": _WORDS, THOUGHTS: _THOUGHT}
    try:
        text = rendered(tokenizer, [*_ASKED, answer], arguments=json.loads(arguments))
    except Exception:  # a template is a program, and may refuse a conversation in any way
        return None
    before, _, after = text.partition(_THOUGHT)
    between, said, _ = after.partition(_WORDS)
    mark = _TAG.search(before)
    return (mark[0].rstrip(), between) if mark and said and between.strip() else None


def _opened_by(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], prompt: str, arguments: Mapping[str, Any]
) -> str:
    """Returns which argument of the template opens thoughts, in parentheses; empty if none is found."""
    for name in sorted(variables(tokenizer.get_chat_template())):
        for value in (True, False):
            try:
                other = rendered(tokenizer, messages[:-1], None, True, {**arguments, name: value})
            except Exception:  # noqa: S112 (a template is a program, and may refuse a value in any way)
                continue
            if len(other) < len(prompt) and prompt.startswith(other):
                return f" (data.template_arguments: {{{name}: {str(value).lower()}}} opens them)"
    return ""
