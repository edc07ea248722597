"""Conversations, and what each template of `chat_templates` writes for the assistant's turns, written out by hand."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with the full-width bar)

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from support.chat_templates import CHAT_TEMPLATES, ChatTemplate
from support.chat_templates import tokenizer_for as new_tokenizer
from toolkit.data.templates.templates import MARKERS, TEMPLATES

OURS = [
    ChatTemplate(
        name=f"our {name}",
        template=template,
        special=("<s>", "</s>", *MARKERS[name]),
        bos="<s>",
        eos="</s>",
        tools=True,
    )
    for name, template in TEMPLATES.items()
]
ALL_TEMPLATES = {template.name: template for template in (*OURS, *CHAT_TEMPLATES)}


@dataclass(frozen=True)
class Written:
    """How a template writes an assistant's turn behind the generation prompt.

    `before` and `end` stand around the words; `last_before` and `last_end` in the last turn, where they differ.
    `call` is the whole text of the tool call `CALL` between them.
    """

    end: str
    before: str = ""
    last_before: str | None = None
    last_end: str | None = None
    strips: bool = False
    call: str | None = None
    before_call: str | None = None

    def turns(self, messages: list[dict[str, Any]]) -> list[str]:
        """The text that the model is to write, for each assistant turn."""
        said = [message for message in messages if message["role"] == "assistant"]
        return [self._turn(message, message is said[-1]) for message in said]

    def _turn(self, message: dict[str, Any], last: bool) -> str:
        end = self.last_end if last and self.last_end is not None else self.end
        if message.get("tool_calls"):
            assert self.call is not None
            return (self.before if self.before_call is None else self.before_call) + self.call + end
        before = self.last_before if last and self.last_before is not None else self.before
        return before + (message["content"].strip() if self.strips else message["content"]) + end


QWEN_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]'
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
MISTRAL_V3_TURN = Written(before=" ", end="</s>", strips=True, call=MISTRAL_CALL, before_call="")

WRITTEN = {
    "our chatml": Written(end="<|im_end|>", call=QWEN_CALL),
    "our alpaca": Written(end="</s>", call=QWEN_CALL),
    "llama 3.1": Written(
        end="<|eot_id|>", strips=True, call='{"name": "get_weather", "parameters": {"city": "Paris"}}'
    ),
    "qwen 2.5": Written(end="<|im_end|>", call=QWEN_CALL),
    # Only the last turn has a think block, an empty one, which the generation prompt leaves to the model.
    "qwen 3": Written(end="<|im_end|>", last_before="<think>\n\n</think>\n\n", call=QWEN_CALL),
    "mistral v1": Written(before=" ", end="</s>"),
    "mistral v3": MISTRAL_V3_TURN,
    "mistral v3, system text in the last user turn": MISTRAL_V3_TURN,
    "gemma": Written(end="<end_of_turn>", strips=True),
    # A finished conversation has the end of text behind the last turn.
    "phi 3": Written(end="<|end|>", last_end="<|end|>\n<|endoftext|>"),
    "phi 4": Written(end="<|im_end|>"),
    "chatml": Written(end="<|im_end|>"),
    "chatml with generation": Written(end="<|im_end|>"),
    "generation with end": Written(end="<|im_end|>"),
    "zephyr": Written(end="</s>"),
    "deepseek v3": Written(end="<｜end▁of▁sentence｜>", call=DEEPSEEK_CALL),
    # Its generation prompt ends with an open think block, which a finished conversation has not.
    "deepseek r1": Written(end="<｜end▁of▁sentence｜>"),
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
USES_TOOL = [
    user("What is the weather in Paris?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "18", "name": "get_weather", "tool_call_id": "a1b2c3d4e"},
    assistant("It is 18 degrees."),
]
QUOTES = """Say <|im_start|>assistant
hi<|im_end|> and <|start_header_id|>assistant<|end_header_id|>

hi<|eot_id|> and [INST] x [/INST] hi</s> and <start_of_turn>model
hi<end_of_turn> and <|assistant|>
hi<|end|> and <|im_start|>assistant<|im_sep|>hi<|im_end|> and <｜Assistant｜>hi<｜end▁of▁sentence｜> and

### Response:
hi</s>"""

CONVERSATIONS = {
    "one turn": [user("What is two plus two?"), assistant("It is four.")],
    "system": [system("Be brief."), user("Two plus two?"), assistant("Four."), user("Plus one?"), assistant("Five.")],
    "several turns": [user("Hello"), assistant("Hi!"), user("Name?"), assistant("Fox."), user("Bye"), assistant("Bye")],
    "tools": USES_TOOL,
    "tools, then more": [*USES_TOOL, user("Thanks."), assistant("You are welcome.")],
    "tools and system": [system("Be brief."), *USES_TOOL, user("Thanks."), assistant("You are welcome.")],
    "nothing said": [user("Say nothing."), assistant(""), user("Now?"), assistant("No."), user("Now?"), assistant("")],
    "whitespace": [user("  So?\n"), assistant("  def f():\n        x  =  1\n"), user("\tGo on "), assistant(" y\t")],
    "unicode": [user("数字 🎉?"), assistant("四 👩‍👩‍👧 e\u0301 ñ 🎉"), user("e\u0301?"), assistant("é")],
    "quoted markers": [user(QUOTES), assistant("hi"), user("Once more: " + QUOTES), assistant("hi")],
    "assistant quotes": [user("Quote it."), assistant(f"Here: {QUOTES}"), user("And?"), assistant("done")],
    "repeated words": [user("Say yes."), assistant("Say yes."), user("Say yes."), assistant("Say yes.")],
}


def kinds_of(name: str) -> list[str]:
    """The kinds of conversations that a template takes."""
    template = ALL_TEMPLATES[name]
    is_fit = {"tools": template.tools, "system": template.system}
    return [kind for kind in CONVERSATIONS if all(fits or word not in kind for word, fits in is_fit.items())]


def cases() -> list[tuple[str, str]]:
    """Every template with every kind of conversation that it takes."""
    return [(name, kind) for name in ALL_TEMPLATES for kind in kinds_of(name)]


@cache
def tokenizer_for(template: ChatTemplate) -> PreTrainedTokenizerFast:
    return new_tokenizer(template)


def in_lists(document: dict[str, Any]) -> dict[str, Any]:
    """A document with lists in place of its arrays."""
    return {name: getattr(value, "tolist", lambda value=value: value)() for name, value in document.items()}
