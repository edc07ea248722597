"""The prompt of an answer: what a server gives a model before it writes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.layouts.template_arguments import NO_ARGUMENTS, require_taken
from toolkit.data.rows.examples import Message
from toolkit.data.rows.values import RowProblem
from toolkit.data.templates.templates import rendered
from toolkit.errors import first_line


def prompt_of(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> str:
    """Returns the prompt of the answer to messages: what the chat template makes of them with its generation prompt.

    Raises:
        RowProblem: if the chat template does not take an argument, or refuses the conversation.
    """
    try:
        require_taken(arguments, tokenizer.get_chat_template(tools=tools))
        return rendered(tokenizer, messages, tools, prompt=True, arguments=arguments)
    except RowProblem:
        raise
    except Exception as error:  # a template is a program, and may refuse a conversation in any way
        raise RowProblem(f"the chat template rejects it: {first_line(error)}") from error


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, bos: int | None) -> list[int]:
    """Returns the tokens of a prompt, after the token `bos` if it is given; a chat template writes it itself."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]
