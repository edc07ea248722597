"""From a row of any usual layout to what is learned from it: a text, an answer, a conversation, a class."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from toolkit.data.problem import RowProblem
from toolkit.data.readers import Row, listed
from toolkit.data.sources import Source
from toolkit.errors import DataError
from toolkit.recipe.schema import ColumnsSection

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Role's name in a row -> its name in a chat template."""


@dataclass(frozen=True)
class Text:
    """All of it is learned."""

    text: str


@dataclass(frozen=True)
class Answer:
    """A completion is learned, given a prompt; both as they are, without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """The assistant's turns are learned. Messages have `role` and `content`."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Labelled:
    """The class of a text, or of a pair of texts; a number that names a class comes as text."""

    text: str
    text_pair: str | None
    label: str


MAX_LEVELS = 100
"""Deepest nesting of a row's tools and calls; templates and Python's JSON give up at some hundreds."""


@dataclass(frozen=True)
class Pair:
    """One completion preferred over the other; what comes before them is the same."""

    chosen: Answer | Conversation
    rejected: Answer | Conversation


Example = Text | Answer | Conversation | Labelled | Pair

KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("messages",),
    "prompt and completion": ("prompt", "completion"),
    "instruction and output": ("instruction", "output"),
    "text": ("text",),
    "text and label": ("text", "label"),
    "chosen and rejected": ("chosen", "rejected"),
}
"""Layout -> the columns that it cannot do without."""

OPTIONAL = {
    "messages": ("system", "tools"),
    "conversations": ("system", "tools"),
    "prompt and completion": ("tools",),
    "instruction and output": ("input", "system"),
    "text": (),
    "text and label": ("text_pair",),
    "chosen and rejected": ("prompt", "system", "tools"),
}

LAYOUTS_OF = {
    "causal_lm": [kind for kind in KINDS if kind not in ("text and label", "chosen and rejected")],
    "sequence_classification": ["text and label"],
    "preference": ["chosen and rejected"],
}
"""Objective -> the layouts that it can learn from, in the order in which they are looked for."""


@dataclass(frozen=True)
class Layout:
    """How a source's rows are laid out.

    Attributes:
        kind: a key of `KINDS`.
        columns: what a column is -> its name.
        label_names: of numbers in the label's column, where the source names them.
    """

    kind: str
    columns: dict[str, str]
    label_names: tuple[str, ...] = ()

    def example(self, row: Row) -> Example:
        """What is learned from a row. Raises RowProblem."""
        if isinstance(row, RowProblem):
            raise row
        values = {what: row.get(column) for what, column in self.columns.items()}
        if self.kind == "text":
            return Text(_text(values["text"], self.columns["text"]))
        if self.kind == "text and label":
            return self._labelled(values)
        if self.kind == "chosen and rejected":
            return _pair(values, self.columns)
        if self.kind == "prompt and completion":
            return _answer(values, self.columns)
        if self.kind == "instruction and output":
            return _instruction(values, self.columns)
        messages = _messages(values["messages"], self.columns["messages"])
        return _conversation(_with_system(messages, values.get("system")), _tools(values.get("tools")))

    def _labelled(self, values: dict[str, Any]) -> Labelled:
        pair = values.get("text_pair")
        return Labelled(
            _text(values["text"], self.columns["text"]),
            _text(pair, self.columns["text_pair"]) if "text_pair" in self.columns else None,
            _label(values["label"], self.columns["label"], self.label_names),
        )


def recognise(source: Source, columns: ColumnsSection, objective: str) -> Layout:
    """The layout of a source.

    Args:
        objective: `objective.kind` of the recipe.

    Raises:
        DataError: where its columns are of no known layout, or one that the recipe names is not there.
    """
    by_hand = {what: name for what, name in columns.model_dump().items() if name is not None}
    for what, name in by_hand.items():
        if name not in source.columns:
            raise DataError(
                f"{source.field}: {source.name!r} has no column {name!r} (data.columns.{what}); {_has(source)}"
            )
    usual = {**{what: what for what in ColumnsSection.model_fields}, **by_hand}
    candidates = LAYOUTS_OF[objective]
    for kind in candidates:
        sharegpt = kind == "conversations" and "messages" not in by_hand
        names = {**usual, "messages": "conversations"} if sharegpt else usual
        needed = {what: names[what] for what in KINDS[kind]}
        chosen = any(what in by_hand for what in KINDS[kind]) or all(what in OPTIONAL[kind] for what in by_hand)
        if chosen and all(name in source.columns for name in needed.values()):
            # The first rows need not have all columns, and what a row may lack is looked for in each.
            extra = {
                what: names[what] for what in OPTIONAL[kind] if what != "text_pair" or names[what] in source.columns
            }
            labels = source.label_names.get(needed.get("label", ""), [])
            return Layout(kind, {**needed, **extra}, tuple(labels))
    allowed = "; ".join(" + ".join(KINDS[kind]) for kind in candidates if kind != "conversations")
    raise DataError(
        f"{source.field}: {source.name!r} is laid out in no known way; {_has(source)}; needed: {allowed}. "
        "Name its columns by hand, for example data.columns.text=body"
    )


def _has(source: Source) -> str:
    return f"it has {listed(source.columns) or 'no columns'}"


def texts_of(example: Example) -> list[str]:
    """The words of a row, for a tokenizer to be trained on."""
    if isinstance(example, Text):
        return [example.text]
    if isinstance(example, Answer):
        return [example.prompt + example.completion]
    if isinstance(example, Labelled):
        return [example.text, *([example.text_pair] if example.text_pair is not None else [])]
    if isinstance(example, Pair):
        return [*texts_of(example.chosen), *texts_of(example.rejected)]
    return [message["content"] for message in example.messages if message["content"]]


# ---- one layout each ----


def _text(value: Any, column: str) -> str:
    """A column's text. Raises RowProblem where it holds none."""
    if value is None:
        raise RowProblem(f"{column} is missing or null")
    if not isinstance(value, str):
        raise RowProblem(f"{column} is no text but {_type(value)}")
    if not value.strip():
        raise RowProblem(f"{column} is empty")
    return _encodable(value, column)


def _encodable(value: str, column: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowProblem(f"{column} holds half a character (a lone surrogate)") from None
    return value


def _writable(value: Any, what: str, levels: int = MAX_LEVELS) -> None:
    """Raises RowProblem where a template could not write a value, or its text not be encoded."""
    if levels == 0:
        raise RowProblem(f"{what} nested more than {MAX_LEVELS} levels deep")
    if isinstance(value, str):
        _encodable(value, what)
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _writable(item, what, levels - 1)


def _type(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _label(value: Any, column: str, names: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        if names and not 0 <= value < len(names):
            raise RowProblem(f"{column} is a number without a name")
        return names[value] if names else str(value)
    return _text(value, column).strip()


def _answer(values: dict[str, Any], columns: dict[str, str]) -> Example:
    prompt, completion = values["prompt"], values["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        asked = _messages(prompt, columns["prompt"])
        answered = _messages(completion, columns["completion"])
        return _conversation([*asked, *answered], _tools(values.get("tools")))
    return Answer(_text(prompt, columns["prompt"]), _text(completion, columns["completion"]))


def _pair(values: dict[str, Any], columns: dict[str, str]) -> Pair:
    """Both completions after the prompt; without one, it is what both conversations begin with."""
    sides: list[Answer | Conversation] = []
    for side in ("chosen", "rejected"):
        if values.get("prompt") is None and isinstance(values[side], str):
            raise RowProblem(f"{columns['prompt']} is missing or null")
        prompt = values.get("prompt") if values.get("prompt") is not None else []
        if isinstance(values[side], list) or isinstance(prompt, list):
            if isinstance(prompt, str):
                asked = [{"role": "user", "content": _text(prompt, columns["prompt"])}]
            else:
                asked = _messages(prompt, columns["prompt"]) if prompt else []
            answered = _messages(values[side], columns[side])
            messages = _with_system([*asked, *answered], values.get("system"))
            sides.append(_conversation(messages, _tools(values.get("tools"))))
        else:
            sides.append(Answer(_text(prompt, columns["prompt"]), _text(values[side], columns[side])))
    chosen, rejected = sides
    if chosen == rejected:
        raise RowProblem(f"{columns['chosen']} and {columns['rejected']} are the same")
    before = [side.messages[:-1] for side in sides if isinstance(side, Conversation)]
    if before and before[0] != before[-1]:
        raise RowProblem(f"{columns['chosen']} and {columns['rejected']} differ before the last message")
    return Pair(chosen, rejected)


def _instruction(values: dict[str, Any], columns: dict[str, str]) -> Conversation:
    asked = _text(values["instruction"], columns["instruction"])
    about = values.get("input")
    if about is not None and not isinstance(about, str):
        raise RowProblem(f"{columns['input']} is no text but {_type(about)}")
    if about and about.strip():
        asked = f"{asked}\n\n{_encodable(about, columns['input'])}"
    answer = _text(values["output"], columns["output"])
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return Conversation(_with_system(messages, values.get("system")))


def _with_system(messages: list[Message], system: Any) -> list[Message]:
    if system is None or system == "" or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": _text(system, "system")}, *messages]


def _messages(value: Any, column: str) -> list[Message]:
    """Messages with `role` and `content`. Raises RowProblem."""
    if value is None:
        raise RowProblem(f"{column} is missing or null")
    if not isinstance(value, list):
        raise RowProblem(f"{column} is no list of messages but {'text' if isinstance(value, str) else _type(value)}")
    if not value:
        raise RowProblem(f"{column} is empty")
    return [_message(item) for item in value]


def _message(item: Any) -> Message:
    if not isinstance(item, dict):
        raise RowProblem("a message is no object")
    fields = {key: value for key, value in item.items() if value is not None}  # parquet fills up with nulls
    role = fields.pop("role", None) or fields.pop("from", None)
    if role is None:
        raise RowProblem("a message has no role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise RowProblem("a message has an unknown role")
    content = fields.pop("content", None)
    content = fields.pop("value", None) if content is None else content
    role = ROLES[role.lower()]
    calls = _tool_calls(fields.get("tool_calls"))
    if content is None and not calls:
        raise RowProblem("a message has no content")
    known = {key: value for key, value in fields.items() if key in ("name", "tool_call_id", "reasoning_content")}
    _writable(known, "a message")
    message = {"role": role, "content": None if content is None else _content(content, role), **known}
    return {**message, "tool_calls": calls} if calls else message


def _content(content: Any, role: str) -> str:
    """The words of a message: text, or parts of text. The assistant's may be empty."""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RowProblem("a message's content holds more than text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RowProblem(f"a message's content is no text but {_type(content)}")
    if not content.strip() and role == "user":
        raise RowProblem("a user's message is empty")
    return _encodable(content, "a message")


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    if value in (None, []):
        return []
    calls = _json(value, "tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowProblem("tool_calls is no list of calls")
    _writable(calls, "tool_calls")
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, as chat templates want it, and not JSON in a string."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem("a tool call names no function")
    arguments = _json(function.get("arguments") or {}, "a tool call's arguments")
    if not isinstance(arguments, dict):
        raise RowProblem(f"a tool call's arguments are no object but {_type(arguments)}")
    _writable(arguments, "tool_calls")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value in (None, "", []):
        return None
    tools = _json(value, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowProblem("tools is no list of tools")
    _writable(tools, "tools")
    return tools


def _json(value: Any, what: str) -> Any:
    """The value of JSON in a string; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise RowProblem(f"{what} is not JSON") from None


def _conversation(messages: list[Message], tools: list[dict[str, Any]] | None) -> Conversation:
    """Checked for what no template makes sense of; what else a template refuses, it says itself."""
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        raise RowProblem("roles out of order: system is not the first message")
    if "assistant" not in roles:
        raise RowProblem("no assistant turn")
    if "tool" in roles[: roles.index("assistant")]:
        raise RowProblem("roles out of order: tool before any assistant turn")
    if roles[0] == "assistant" and len(roles) == 1:
        raise RowProblem("nothing is asked")
    return Conversation(messages, tools)
