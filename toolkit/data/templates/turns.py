"""Makes a sample of each answer of a conversation: the prompt before it, and what the model writes.

Templates that leave out the thoughts of earlier turns write the same answer in two ways: with its thoughts as the last
turn, without them as an earlier one. At inference each answer is the last one when it is written. So each is rendered
as the last one here, behind its prompt as it is rendered at that time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.layouts.row_flags import Span, without
from toolkit.data.layouts.template_arguments import NO_ARGUMENTS
from toolkit.data.layouts.thoughts import INSIDE, thought_of
from toolkit.data.rows.examples import Message
from toolkit.data.rows.values import RowProblem
from toolkit.data.templates.chat import NO_WAY, ConversationText, target_mask, turn_span
from toolkit.data.templates.marks import stands_in

GREETING = "an answer that nothing comes before is not learned (data.targets: each_turn)"
OF_EARLIER_TURNS = "of earlier turns (data.targets: each_turn learns them)"
ASKED_OTHERWISE = "an answer does not stand behind the prompt of inference"
OTHER_PROMPT = f"{ASKED_OTHERWISE} (data.targets: each_turn puts it there)"
CLOSED = "an answer has thoughts, and the generation prompt of the chat template closes them before it"

_OPENED = re.compile(r"<think>(\n*)$")
_EMPTY = re.compile(r"<think>\s*</think>\s*$")


@dataclass(frozen=True)
class Turn:
    """One answer.

    Attributes:
        index: number of its message.
        prompt: the conversation before it with the generation prompt, as at inference.
        written: the text that the model writes, including the token that ends its turn.
    """

    index: int
    prompt: str
    written: str


def turns_of(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    wanted: list[int],
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> list[Turn]:
    """Returns the answers of the messages `wanted`, except one that opens the conversation and so has no prompt.

    Raises:
        RowProblem: if the template refuses what comes before an answer, or does not write the answer behind it.
    """
    return [_turn(tokenizer, messages[: i + 1], tools, arguments) for i in wanted if i > 0]


def _turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    arguments: Mapping[str, Any],
) -> Turn:
    row = ConversationText(tokenizer, messages, tools, arguments)
    with row.telling_calls([len(messages) - 1]):
        return _last_turn(row)


def _last_turn(row: ConversationText) -> Turn:
    messages = row.messages
    index = len(messages) - 1
    prompt = row.beginning(index, prompt=True)
    if prompt is None:
        raise RowProblem(NO_WAY)
    text = row.text[: row.closed_end(0, len(row.text))]
    written = text[len(prompt) :] if text.startswith(prompt) else _written_otherwise(row, index, text, prompt)
    # The words may begin with the mark of thoughts that the prompt has opened already.
    opened = _OPENED.search(prompt)
    if not stands_in(messages[index], (opened[0] if opened else "") + written):
        raise RowProblem(NO_WAY)
    return Turn(index, prompt, written)


def _written_otherwise(row: ConversationText, index: int, text: str, prompt: str) -> str:
    """Returns what is written behind a prompt that the text of the conversation does not begin with.

    DeepSeek R1 opens thoughts, and leaves out even the last turn's; Qwen 3 closes them if it is not to think; Mistral
    puts the system text into the last user turn.

    Raises:
        RowProblem: if it cannot be found.
    """
    thought = thought_of(row.messages[index])
    if opened := _OPENED.search(prompt):
        rest = _rest_behind(text, prompt[: opened.start()])
        # These models write thoughts on lines of their own if the prompt opens them so.
        closing = "\n</think>\n\n" if opened[1] else "</think>"
        thought = thought.strip("\n") if opened[1] else thought
        return thought + closing + rest.removeprefix("</think>")
    if closed := _EMPTY.search(prompt):
        if thought:
            raise RowProblem(CLOSED)
        return _rest_behind(text, prompt[: closed.start()])
    start, end = turn_span(row, index)
    if thought.strip() and thought.strip() in row.text[start:end]:
        raise RowProblem(NO_WAY)  # the prompt may have closed them, in a form that is not known here
    return row.text[start:end]


def _rest_behind(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise RowProblem(NO_WAY)
    rest = text[len(beginning) :]
    if INSIDE.match(rest):
        raise RowProblem(NO_WAY)  # thoughts of another form than the prompt's
    return rest


def is_asked_otherwise(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the chat template writes a plain answer behind another text than its generation prompt."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    asked = [{"role": "user", "content": "What is three plus four?"}]
    for before in (asked, [{"role": "system", "content": "Be brief."}, *asked]):
        try:
            row = ConversationText(tokenizer, [*before, {"role": "assistant", "content": "Seven"}], None)
        except RowProblem:  # a template without a system prompt
            continue
        if row.shared(len(before), prompt=True) is None:
            return True
    return False


def has_thoughts_at_inference(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    arguments: Mapping[str, Any],
    text: str,
) -> bool:
    """Returns whether the first thoughts that the text of a conversation lacks are rendered with their own answer."""
    for i, message in enumerate(messages[:-1]):
        thought = thought_of(message).strip() if message["role"] == "assistant" else ""
        if thought and thought not in text and i > 0:
            try:
                return thought in _turn(tokenizer, messages[: i + 1], tools, arguments).written
            except RowProblem:
                return False
    return False


def parts_in(text: str, messages: list[Message], parts: dict[int, tuple[Span, ...]]) -> list[Span]:
    """Returns the places of parts of messages in the text of the conversation (characters).

    Raises:
        RowProblem: if a message with parts is not in the text exactly once, word for word.
    """
    found = []
    for number, spans in parts.items():
        words = messages[number]["content"]
        if text.count(words) != 1:
            raise RowProblem("a message with train_detail does not stand in what the chat template renders, or twice")
        found += [(text.index(words) + start, text.index(words) + end) for start, end in spans]
    return found


def parts_in_turn(turn: Turn, message: Message, parts: tuple[Span, ...]) -> list[Span]:
    """Returns the places of parts of a message's words in the answer (characters).

    Raises:
        RowProblem: if the words are not in the answer exactly once.
    """
    words = message["content"]
    if turn.written.count(words) != 1:
        raise RowProblem("a message with train_detail does not stand in what the chat template renders, or twice")
    place = turn.written.index(words)
    return [(place + start, place + end) for start, end in parts]


@dataclass(frozen=True)
class EncodedTurns:
    """Answers as tokens, one after the other, each behind its prompt.

    Attributes:
        targets: which tokens the model writes.
        ends: position after the last token of each answer.
    """

    ids: list[int]
    targets: list[bool]
    ends: list[int]


def encode_turns(tokenizer: PreTrainedTokenizerBase, turns: list[Turn], cuts: list[list[Span]]) -> EncodedTurns:
    """Tokenises answers.

    Args:
        cuts: characters of each answer that are not learned.

    Raises:
        RowProblem: if one token would hold the end of a prompt and the beginning of an answer.
    """
    found = EncodedTurns([], [], [])
    before = tokenizer([turn.prompt for turn in turns], **_PLAIN)["input_ids"]
    whole = tokenizer([turn.prompt + turn.written for turn in turns], **_PLAIN)["input_ids"]
    for turn, prompt, both, unlearned in zip(turns, before, whole, cuts, strict=True):
        written = _continuation(tokenizer, turn, prompt, both)
        found.ids.extend([*prompt, *written])
        learned = _learned_tokens(tokenizer, turn, written, unlearned) if unlearned else [True] * len(written)
        found.targets.extend([*[False] * len(prompt), *learned])
        found.ends.append(len(found.ids))
    return found


_PLAIN = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
"""Arguments of the tokenizer: a chat template writes its own special tokens."""


def _continuation(tokenizer: PreTrainedTokenizerBase, turn: Turn, prompt: list[int], both: list[int]) -> list[int]:
    """Returns the tokens of an answer behind a prompt, which a server tokenises alone."""
    if both[: len(prompt)] == prompt:
        return both[len(prompt) :]
    # For example, line ends of both may become one token.
    written: list[int] = tokenizer(turn.written, **_PLAIN)["input_ids"]
    if tokenizer.decode([*prompt, *written]) != tokenizer.decode(both):
        raise RowProblem("the beginning of an answer and the end of the generation prompt are one token")
    return written


def _learned_tokens(
    tokenizer: PreTrainedTokenizerBase, turn: Turn, written: list[int], unlearned: list[Span]
) -> list[bool]:
    spans = without([(0, len(turn.written))], unlearned)
    encoded = tokenizer(turn.written, **_PLAIN, return_offsets_mapping=True)
    if encoded["input_ids"] != written:
        raise RowProblem("a message with train_detail is tokenised otherwise behind its generation prompt")
    return target_mask(spans, encoded["offset_mapping"])
