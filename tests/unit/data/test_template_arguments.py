"""data.template_arguments and a row's chat_template_kwargs: what a chat template is given beside the messages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.cases import cases
from support.chat_templates import CHATML, LLAMA_31, tokenizer_for
from support.conversations import assistant, in_lists, user
from transformers import AutoTokenizer

from toolkit.data.documents.encode import EMPTY_THOUGHT, Encoder
from toolkit.data.kinds.registry import LAYOUTS
from toolkit.data.layouts.layout import Layout
from toolkit.data.layouts.template_arguments import set_defaults, variables
from toolkit.errors import BadInputError
from toolkit.generation.text.complete import Message
from toolkit.recipe.recipe import Recipe

TABLES = cases(__file__)

# As Qwen 3's: no thinking closes an empty think block in the generation prompt.
THINKING = replace(
    CHATML,
    template="""
{%- if effort is defined %}{{ '<|im_start|>effort ' + effort + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
)
MESSAGES: list[Message] = [user("why"), assistant("so")]
LAYOUT = Layout(LAYOUTS["messages"], {"messages": "messages"})


def encoded(arguments: dict[str, Any] | None, row: dict[str, Any], targets: Any = "assistant") -> tuple[str, str, Any]:
    """The text, what of it is learned, and why the row is dropped or what is noted of it."""
    tokens = tokenizer_for(THINKING)
    set_defaults(tokens, arguments)
    document = in_lists(Encoder(tokens, targets=targets).documents([{"messages": MESSAGES, **row}], LAYOUT)[0])
    learned = [t for t, is_target in zip(document["input_ids"], document["targets"], strict=True) if is_target]
    return tokens.decode(document["input_ids"]), tokens.decode(learned), document["problem"] or document["note"]


PLAIN = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nso<|im_end|>"


@pytest.mark.parametrize("targets", ["assistant", "each_turn"])
def test_the_recipes_arguments_hold_for_every_row_and_a_rows_own_come_before_them(targets: str) -> None:
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    empty, end = "<think>\n\n</think>\n\n", "so<|im_end|>"
    for recipe, row, learned in [(None, {}, empty + end), (off, {}, end), (off, on, empty + end), (None, off, end)]:
        text, found, note = encoded(recipe, {"chat_template_kwargs": row} if row else {}, targets)
        assert (text.strip(), found) == (PLAIN, learned)
        said = [f"chat_template_kwargs of the row: enable_thinking={json.dumps(row['enable_thinking'])}"] if row else []
        assert note == ("; ".join([*said, *[EMPTY_THOUGHT] * (learned != end)]) or None)


@pytest.mark.parametrize("value", ["high", 'a "quoted" ünï {{ x }} %}', "back\\slash\nline"])
def test_values_reach_the_template_as_they_are(value: str) -> None:
    text, _, _ = encoded({"effort": value}, {})
    assert text.startswith(f"<|im_start|>effort {value}<|im_end|>\n<|im_start|>user")
    assert encoded(None, {"chat_template_kwargs": json.dumps({"effort": value})})[0] == text


@pytest.mark.parametrize(("given", "told"), TABLES["DROPPED"])
def test_rows_with_arguments_that_no_template_takes_are_dropped_by_name(given: Any, told: str) -> None:
    assert encoded(None, {"chat_template_kwargs": given})[2] == told


def test_null_arguments_and_empty_columns_say_nothing() -> None:
    for given in (None, "", {}, {"enable_thinking": None}):
        assert encoded(None, {"chat_template_kwargs": given})[2] == EMPTY_THOUGHT


def test_an_argument_without_effect_is_an_error() -> None:
    with pytest.raises(
        BadInputError, match=r"template_arguments.thinking: .* it takes effort, enable_thinking; remove"
    ):
        set_defaults(tokenizer_for(THINKING), {"thinking": True})
    with pytest.raises(BadInputError, match="takes no such argument; it takes none"):
        set_defaults(tokenizer_for(CHATML), {"add_generation_prompt": True})
    tokens = tokenizer_for(CHATML)
    tokens.chat_template = None
    with pytest.raises(BadInputError, match=r"the tokenizer has no chat template; remove it, or name a file"):
        set_defaults(tokens, {"thinking": True})


def test_variables_are_those_from_outside() -> None:
    assert variables(LLAMA_31.template) == {"date_string"}
    assert (
        variables("{% for m in messages %}{% generation %}{{ m.x }}{% endgeneration %}{% break %}{% endfor %}") == set()
    )


def test_an_export_keeps_the_defaults(tmp_path: Any) -> None:
    tokens = tokenizer_for(THINKING)
    set_defaults(tokens, {"enable_thinking": False})
    tokens.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    prompt = again.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    on = again.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, tokenize=False, enable_thinking=True)
    assert on.endswith("<|im_start|>assistant\n")


def test_the_recipe_refuses_it_where_no_template_is_used() -> None:
    fields = {
        "model": {"name_or_path": "x"},
        "data": {"train": "a.jsonl", "max_length": 8, "template_arguments": {"a": 1}},
        "objective": {"kind": "sequence_classification"},
        "optimizer": {"learning_rate": 1.0},
        "training": {"output_dir": "o", "num_epochs": 1},
    }
    with pytest.raises(BadInputError, match=r"data.template_arguments has no effect with objective.kind sequence"):
        Recipe.from_mapping(fields)
