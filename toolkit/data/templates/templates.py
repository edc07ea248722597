"""Our chat templates, for tokenizers that have none, and the rendering of any chat template."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from toolkit.data.layouts import thoughts
from toolkit.data.layouts.template_arguments import NO_ARGUMENTS, date_of, variables, with_date
from toolkit.data.rows import image_places
from toolkit.data.templates.calls import with_calls_for, with_words_for
from toolkit.errors import BadInputError, first_line
from toolkit.recipe.objectives.section import TEMPLATE_NAMES

_BEGIN = "{%- if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}"


def _written(name: str) -> str:
    """Returns a template. They share a beginning, with tools and calls as Qwen2.5 writes them."""
    files = (Path(__file__).with_name(f"{part}.jinja") for part in ("beginning", name))
    return "\n".join(file.read_text(encoding="utf-8") for file in files).strip()


TEMPLATES = {name: _written(name) for name in TEMPLATE_NAMES}
"""Our chat templates by name. Both begin with the tokenizer's `bos_token`, if it has one
that is no mark of a turn.

chatml closes every turn with `<|im_end|>`, alpaca every assistant turn with the tokenizer's `eos_token`.
"""

MARKERS: dict[str, list[str]] = {"chatml": ["<|im_start|>", "<|im_end|>"], "alpaca": []}
"""Special tokens that a template of ours should have in the vocabulary.

Without them chatml works too, but its markers become several tokens, and generation has no single token to stop at:
with chatml `<|im_end|>` is the end of a turn and belongs among the model's end-of-sequence tokens.
"""


def use_template(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Gives the tokenizer our chat template of that name, or that of a file; None leaves its own.

    Raises:
        BadInputError: if the file cannot be read, or holds no template.
    """
    if name is None:
        return
    if name not in TEMPLATES:
        try:
            template = Path(name).read_text(encoding="utf-8-sig")
            variables(template)  # to read it whole
        except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            raise BadInputError(f"data.chat_template: {name!r} cannot be read: {first_line(error)}{line}") from error
        if not template.strip():
            raise BadInputError(f"data.chat_template: {name!r} is empty; write a template into it, or name another")
        tokenizer.chat_template = template
        return
    # chatml begins each turn with a mark that is the bos of some tokenizers, such as SmolLM2's.
    marked = tokenizer.bos_token in MARKERS[name]
    tokenizer.chat_template = TEMPLATES[name].replace(_BEGIN, "") if marked else TEMPLATES[name]


def template_that(helps: Callable[[PreTrainedTokenizerBase], bool], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the first template of ours with which a copy of the tokenizer does what is asked for, or None."""
    for name in TEMPLATES:
        other = copy.copy(tokenizer)
        use_template(other, name)
        if helps(other):
            return name
    return None


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    prompt: bool = False,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> str:
    """Renders a conversation with the tokenizer's chat template; `prompt` adds a generation prompt.

    Args:
        arguments: arguments of the template, such as `enable_thinking`.

    Raises:
        Exception: a template is a program, and may refuse a conversation in any way.
    """
    template, day = tokenizer.get_chat_template(tools=tools), date_of(tokenizer)
    messages = prepared(messages, template, tokenizer)
    dated = template if day is None else with_date(template, day)
    text = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=dated, tokenize=False, add_generation_prompt=prompt, **arguments
    )
    return str(text)


def prepared(messages: list[dict[str, Any]], template: str, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Returns messages with roles, words, thoughts, calls and images in the form that a chat template reads."""
    if "developer" not in template:
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    special = tokenizer.special_tokens_map
    called = with_calls_for(messages, template, special)
    seen = image_places.for_template(thoughts.for_template(called, template), template)
    return with_words_for(seen, template, special)
