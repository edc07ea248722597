"""Chat templates: ours, for tokenizers that bring none, and how any of them is rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data import picture_places
from toolkit.data.sandbox import LONGEST, TooLargeError, use_in_transformers
from toolkit.data.template_arguments import NO_ARGUMENTS
from toolkit.data.template_date import date_of, with_date
from toolkit.data.thoughts import for_template
from toolkit.data.time_limit import TimeLimitError, time_limit
from toolkit.errors import BadInputError, DataError
from toolkit.paths import GIB

RENDER_SECONDS = 30.0
"""Time limit of one rendering, which takes milliseconds: a template can loop for years."""

MORE_BYTES = 4 * GIB
"""By which the process may grow in a rendering, as far as that is seen: every half second."""

_CALLS = r"""
{%- macro write_calls(message) %}
    {%- for tool_call in message.tool_calls or [] %}
        {%- set call = tool_call.function if tool_call.function else tool_call %}
        {%- if not loop.first or message.content %}{{ '\n' }}{% endif %}
        {{- '<tool_call>\n{"name": ' + (call.name | tojson) + ', "arguments": ' }}
        {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
{%- macro write_tools() %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endmacro %}
{%- if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}
{%- set opening = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
"""
"""How our templates begin. Tools and calls are written as Qwen2.5 does."""

_CHATML = r"""
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + opening }}
    {%- if tools %}{{ ('\n\n' if opening else '') + write_tools() }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in turns %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
        {{- write_calls(message) + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_ALPACA = r"""
{%- if opening %}{{ opening + '\n\n' }}{% endif %}
{%- if tools %}{{ write_tools() + '\n\n' }}{% endif %}
{%- for message in turns %}
    {%- if message.role == 'assistant' %}
        {{- '### Response:\n' + (message.content or '') + write_calls(message) }}{{ eos_token }}{{ '\n\n' }}
    {%- elif message.role == 'tool' %}
        {{- '### Tool Response:\n' + message.content + '\n\n' }}
    {%- elif message.role == 'system' %}
        {{- message.content + '\n\n' }}
    {%- else %}
        {{- '### Instruction:\n' + message.content + '\n\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}
"""

TEMPLATES: dict[str, str] = {
    "chatml": (_CALLS + _CHATML).strip(),
    "alpaca": (_CALLS + _ALPACA).strip(),
}
"""Our chat templates by name. Both begin with the tokenizer's `bos_token`, where it has one.

chatml closes every turn with `<|im_end|>`, alpaca every assistant turn with the tokenizer's `eos_token`.
"""

MARKERS: dict[str, list[str]] = {"chatml": ["<|im_start|>", "<|im_end|>"], "alpaca": []}
"""Special tokens that a template of ours would like in the vocabulary.

Without them chatml works too, but its markers become several tokens, and generation has no one token to stop at:
with chatml `<|im_end|>` is the end of a turn and belongs among the model's end-of-sequence tokens.
"""


def use_template(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Gives the tokenizer our chat template of that name; None leaves its own.

    Raises:
        BadInputError: there is none of that name.
    """
    if name is None:
        return
    if name not in TEMPLATES:
        close = get_close_matches(name, TEMPLATES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        names = ", ".join(sorted(TEMPLATES))
        raise BadInputError(f"data.chat_template: there is no template {name!r}{hint}. Templates: {names}")
    tokenizer.chat_template = TEMPLATES[name]


class SlowTemplateError(DataError):
    """A chat template that does not come to an end, or makes what no memory holds.

    Attributes:
        row: index of the conversation among those that were rendered together.
    """

    row = 0


@contextmanager
def within_bounds(tokenizer: PreTrainedTokenizerBase, num_messages: int) -> Iterator[None]:
    """The tokenizer's chat template writes a conversation inside.

    Raises:
        SlowTemplateError: it takes longer than `RENDER_SECONDS`, or makes something larger than `LONGEST`.
    """
    use_in_transformers()
    try:
        with time_limit(RENDER_SECONDS, MORE_BYTES):
            yield
        return
    except TimeLimitError:
        why = f"takes longer than {RENDER_SECONDS:g} s or more than {MORE_BYTES / GIB:g} GiB"
    except TooLargeError:
        why = f"makes a text of more than {LONGEST / 1e6:.0f} million characters, or a number of 20,000 digits,"
    raise SlowTemplateError(
        f"the chat template of {tokenizer.name_or_path!r} {why} for a conversation of {num_messages} messages: it "
        "loops or grows without end, or nearly; correct the template, or set data.chat_template to "
        f"{' or '.join(sorted(TEMPLATES))}"
    )


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    prompt: bool = False,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> str:
    """A conversation as the tokenizer's chat template writes it, `prompt` with a generation prompt behind it.

    Args:
        arguments: of the template, such as `enable_thinking`.

    Raises:
        SlowTemplateError: see `within_bounds`; and whatever the template raises.
    """
    template, day = tokenizer.get_chat_template(tools=tools), date_of(tokenizer)
    messages = picture_places.for_template(for_template(messages, template), template)
    dated = template if day is None else with_date(template, day)
    with within_bounds(tokenizer, len(messages)):
        text = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=dated, tokenize=False, add_generation_prompt=prompt, **arguments
        )
    return str(text)
