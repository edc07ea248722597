"""Finds the special token that ends an answer: one that the chat template writes, or one that begins what follows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from toolkit.data.layouts.messages import Span
from toolkit.data.rows.examples import Message
from toolkit.data.templates.masks import special_ids
from toolkit.data.templates.templates import rendered
from toolkit.errors import DataError


def configured_ends(settings: GenerationConfig) -> list[int]:
    """Returns the tokens at which generation ends by the settings of a model."""
    ends = settings.eos_token_id
    return list(ends) if isinstance(ends, list) else [] if ends is None else [int(ends)]


def add_ends(settings: GenerationConfig, ends: Collection[int]) -> list[int]:
    """Adds tokens at which generation ends to the settings of a model, and returns those that were missing."""
    before = configured_ends(settings)
    missing = sorted(set(ends) - set(before))
    if missing:
        settings.eos_token_id = [*before, *missing] if before or len(missing) > 1 else missing[0]
    return missing


@dataclass(frozen=True)
class NextTurn:
    """Special tokens that begin what follows an answer, for chat templates that end answers with nothing (GLM's).

    At inference the model writes them, and the server stops: GLM's `eos_token_id` has `<|user|>` and `<|observation|>`.

    Attributes:
        user: the token that begins a user's turn.
        tool: the token that begins the result of a call.
    """

    user: str
    tool: str

    def stop(self, messages: list[Message], index: int) -> str:
        """Returns the token that the model writes to end the answer of message `index`."""
        has_next = index + 1 < len(messages)
        is_call = messages[index + 1]["role"] == "tool" if has_next else bool(messages[index].get("tool_calls"))
        return self.tool if is_call else self.user

    def stopped(self, text: str, spans: list[Span], messages: list[Message]) -> tuple[str, list[Span]]:
        """Extends the learned spans by the token that stops each answer, and adds that of the last one to the text."""
        ends = [next((len(m) for m in (self.user, self.tool) if text.startswith(m, end)), 0) for _, end in spans]
        spans = [(start, end + more) for (start, end), more in zip(spans, ends, strict=True)]
        start, end = spans[-1]
        if messages[-1]["role"] != "assistant" or text[end:].strip():
            return text, spans
        whole = text[:end] + self.stop(messages, len(messages) - 1)
        return whole, [*spans[:-1], (start, len(whole))]


def next_turn_of(tokenizer: PreTrainedTokenizerBase) -> NextTurn | None:
    """Returns the tokens that stop answers if the chat template ends none; None if it does, or none is found."""
    if tokenizer.chat_template is None or _ends_behind(tokenizer, _behind_answer(tokenizer)):
        return None
    user = _first_special(tokenizer, _behind_answer(tokenizer, {"role": "user", "content": "And four?"}))
    result = {"role": "tool", "content": "7", "name": "add", "tool_call_id": "a1b2c3d4e"}
    tool = _first_special(tokenizer, _behind_answer(tokenizer, result))
    return None if user is None else NextTurn(user, tool or user)


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the special tokens that end an assistant's words; none without a template."""
    if tokenizer.chat_template is None:
        return frozenset()
    if following := next_turn_of(tokenizer):
        ids: list[int] = tokenizer.convert_tokens_to_ids([following.user, following.tool])
        return frozenset(ids)
    return _ends_behind(tokenizer, _behind_answer(tokenizer))


def end_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the special tokens that end an assistant's words, and the end of a text, as they are written."""
    ids = turn_ends(tokenizer) | ({tokenizer.eos_token_id} - {None})
    texts: list[str] = tokenizer.convert_ids_to_tokens(sorted(ids))
    return texts


def require_turn_end(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Checks that the chat template puts a special token after an answer, so that the model can learn to stop.

    Args:
        source: the source of conversations, for the error.

    Raises:
        DataError: if it does not.
    """
    behind = _behind_answer(tokenizer)
    if behind is None or turn_ends(tokenizer):
        return
    raise DataError(
        f"{source} holds conversations, and the chat template of {tokenizer.name_or_path!r} ends an answer with "
        f"{behind!r}, in which no token is a special one: the model would not learn to stop. Set "
        "data.chat_template=alpaca, which ends answers with the tokenizer's eos_token, or add the mark that ends them "
        "to the vocabulary as a special token (model.add_tokens: [{content: MARK, special: true}])"
    )


def _behind_answer(tokenizer: PreTrainedTokenizerBase, *following: Message) -> str | None:
    """Returns what the chat template writes after an assistant's words, or None if it refuses a plain conversation."""
    words = "Seven"
    messages = [{"role": "user", "content": "What is three plus four?"}, {"role": "assistant", "content": words}]
    try:
        _, found, behind = rendered(tokenizer, [*messages, *following]).rpartition(words)
    except Exception:  # a template is a program, and may refuse a conversation in any way
        return None
    return behind if found else None


def _ends_behind(tokenizer: PreTrainedTokenizerBase, behind: str | None) -> frozenset[int]:
    ids = tokenizer(behind or "", add_special_tokens=False)["input_ids"]
    return frozenset(ids) & special_ids(tokenizer)


def _first_special(tokenizer: PreTrainedTokenizerBase, behind: str | None) -> str | None:
    """Returns the special token with which a text begins, or None."""
    ids = tokenizer(behind or "", add_special_tokens=False)["input_ids"]
    if not ids or ids[0] not in special_ids(tokenizer):
        return None
    token: str = tokenizer.convert_ids_to_tokens(ids[0])
    return token
