"""Converts messages of a conversation, whatever their keys and shapes, to what chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.data.layouts.thoughts import FIELDS, THOUGHTS, in_one_message, is_thought, thoughts_of
from toolkit.data.rows.examples import Conversation, Message
from toolkit.data.rows.image_places import PLACE, WITH_IMAGES, is_image, placed, reference_of
from toolkit.data.rows.values import (
    RowProblem,
    RowValues,
    encodable,
    is_absent,
    is_empty,
    key_shown,
    parsed,
    text_of,
    type_of,
    writable,
    yes_or_no,
)

# ---- Reads a row's flags: which messages and parts of them are learned, and what of it is ignored ----
# Each tool has its own flags on a message: OpenAI `weight`, axolotl `train` and `train_detail`, ms-swift `loss` and
# `loss_scale`; others `mask`. They mean the same here. If two of them contradict each other, or one has a value that is
# neither yes nor no, the row is dropped by name.

Span = tuple[int, int]

FLAGS = ("weight", "train", "training", "loss", "loss_scale", "mask")
"""Flags that say whether a message is learned; `mask` says that it is not."""

PARTS = "train_detail"
"""Key for the characters of a message that are learned: a list of inclusive begin_offset and end_offset, `train`."""

IN_PARTS = f"parts of a message are not learned ({PARTS})"
"""Note of the report about such a message."""

MEDIA = tuple(
    name
    for kind in ("image", "video", "audio")
    for name in (kind, f"{kind}s", f"{kind}_url", f"{kind}_urls", f"{kind}_path", f"{kind}_paths", f"rejected_{kind}s")
)
"""Columns and keys of values that are not text."""


class UnreadMedium(RowProblem):
    """A row holds an image, a video or sound. `Layout` completes its sentence: why that is not read, and what to do.

    Args:
        whose: `the row` or `a message`.
        place: the column, key or type of part that holds it.
    """

    def __init__(self, whose: str, place: str) -> None:
        self.is_image = "image" in place
        what = "an image" if self.is_image else "a video" if "video" in place else "sound"
        super().__init__(f"{whose} has {what} ({place})")


def refuse_media(values: Mapping[str, Any], whose: str) -> None:
    """Refuses images, sound and video in a row or message, because only its text would be learned.

    Raises:
        UnreadMedium: if there are any.
    """
    for name in MEDIA:
        if not is_empty(values.get(name)):
            raise UnreadMedium(whose, name)


def refuse_parts(parts: list[Any]) -> None:
    """Refuses parts of a message's content that are not text.

    Raises:
        RowProblem: if there are any; `UnreadMedium` for an image, sound or video.
    """
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            continue
        found = str(part.get("type") or next(iter(part), "")) if isinstance(part, dict) else ""
        if any(medium in found for medium in ("image", "video", "audio")):
            raise UnreadMedium("a message", key_shown(found))
        raise RowProblem("a message's content holds more than text")


def is_learned(fields: Mapping[str, Any]) -> bool | None:
    """Returns whether a message's flags say that it is learned, or None if it has none.

    Raises:
        RowProblem: if a flag is neither yes nor no, or two contradict each other.
    """
    said = {name: _yes_or_no(name, fields[name]) != (name == "mask") for name in FLAGS if name in fields}
    if len(set(said.values())) > 1:
        yes, no = (next(name for name, learned in said.items() if learned is wanted) for wanted in (True, False))
        raise RowProblem(f"a message's {yes} says that it is learned, and its {no} that it is not")
    return next(iter(said.values()), None)


def _yes_or_no(name: str, value: Any) -> bool:
    found = yes_or_no(value)
    if found is None:
        what = "0 nor 1" if name in ("weight", "loss_scale") else "true nor false"
        raise RowProblem(f"a message's {name} is neither {what}")
    return found


def unlearned_parts(fields: Mapping[str, Any], text: str) -> tuple[Span, ...]:
    """Returns the characters of a message that are not learned, by axolotl's `train_detail`, sorted.

    Raises:
        RowProblem: if it is not a list of parts of the text.
    """
    parts = fields.get(PARTS)
    if is_empty(parts):
        return ()
    spans = []
    for part in parts if isinstance(parts, list) else [parts]:
        found = part if isinstance(part, dict) else {}
        begin, end, train = (found.get(name) for name in ("begin_offset", "end_offset", "train"))
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < len(text):
            raise RowProblem(f"a message's {PARTS} names no parts of its text (begin_offset, end_offset, train)")
        if not _yes_or_no(PARTS, train):
            spans.append((begin, end + 1))
    return tuple(sorted(spans))


def without(spans: list[Span], cuts: list[Span]) -> list[Span]:
    """Returns the spans, sorted and disjoint, without the characters of `cuts`."""
    for first, last in cuts:
        spans = [
            piece
            for start, end in spans
            for piece in ((start, min(end, first)), (max(start, last), end))
            if piece[0] < piece[1]
        ]
    return spans


ROLES = {
    "system": "system",
    "developer": "developer",
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

KNOWN = ("name", "tool_call_id", "channel")
"""Further keys of a message that a template gets."""

READ = {*KNOWN, *FIELDS, *FLAGS, PARTS, *MEDIA, "tool_calls", "function_call"}
"""Keys of a message that are read, apart from its role and content."""

OF_ROW = ("unread", "parts", "weight", WITH_IMAGES)
"""Keys of a message that are not for a template."""

SYSTEM = ("system", "developer")

ONLY_ASSISTANTS = "says that it is learned, and only the assistant's are"


def asked_of(values: RowValues) -> list[Message]:
    """Returns what Alpaca's columns ask: earlier turns (`history`), then the instruction with its input.

    Raises:
        RowProblem: if a column holds no text, or `history` is not a list of pairs.
    """
    asked, about = values.text("instruction"), values["input"]
    if about is not None and not isinstance(about, str):
        raise RowProblem(f"{values.columns['input']} is {type_of(about)}, not text")
    if about and about.strip():
        asked = f"{asked}\n\n{encodable(about, values.columns['input'])}"
    return [*_history(values["history"], values.columns["history"]), {"role": "user", "content": asked}]


def _history(value: Any, column: str) -> list[Message]:
    turns = [] if is_absent(value) else value
    is_list = isinstance(turns, list)
    if not is_list or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise RowProblem(f"{column} is not a list of pairs of question and answer")
    return [
        {"role": role, "content": text_of(text, column)}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def with_system(messages: list[Message], values: RowValues) -> list[Message]:
    """Returns the messages after the row's system prompt, if there is one and they have none."""
    if (messages and messages[0]["role"] in SYSTEM) or is_absent(system := values["system"]):
        return messages
    return [{"role": "system", "content": text_of(system, "system")}, *messages]


def messages_of(value: Any, column: str, images: bool = False) -> list[Message]:
    """Returns messages with `role` and `content`.

    Args:
        images: whether parts of content may be images; see `image_places.placed`.

    Raises:
        RowProblem: if the value is not a list of messages that can be read.
    """
    if value is None:
        raise RowProblem(f"{column} is missing or null")
    if not isinstance(value, list):
        raise RowProblem(f"{column} is {type_of(value)}, not a list of messages")
    if not value:
        raise RowProblem(f"{column} is empty")
    return in_one_message([_message(item, images) for item in value])


def role_of(item: dict[str, Any]) -> str | None:
    """Returns the role of a message as a row has it, in a chat template's word; None if it has none that is known."""
    return ROLES.get(str(item.get("role") or item.get("from")).lower())


def _message(item: Any, images: bool = False) -> Message:
    if not isinstance(item, dict):
        raise RowProblem("a message is not an object")
    fields = {key: value for key, value in item.items() if value is not None}  # parquet fills up with nulls
    # OpenAI's rows have `role` and `content`, ShareGPT's `from` and `value`.
    named = fields.pop("role", None) or fields.pop("from", None)
    if named is None:
        raise RowProblem("a message has no role")
    if not isinstance(named, str) or named.lower() not in ROLES:
        raise RowProblem("a message has an unknown role")
    role = ROLES[named.lower()]
    content = fields.pop("content", None)
    content = fields.pop("value", None) if content is None else content
    calls = _tool_calls(fields.get("tool_calls"))
    if named.lower() == "function_call":  # ShareGPT's: the text is the call, or a list of calls
        content, calls = None, _calls_in_text(content)
    elif isinstance(fields.get("function_call"), dict):  # OpenAI's, from before there were tools
        calls = [*calls, _tool_call(fields["function_call"])]
    if content is None and not calls:
        raise RowProblem("a message has no content")
    refuse_media(fields, "a message")
    known = {key: value for key, value in fields.items() if key in KNOWN}
    if thoughts := thoughts_of(fields, content):
        known[THOUGHTS] = thoughts
    writable(known, "a message")
    shown = [part for part in content if is_image(part)] if images and isinstance(content, list) else []
    words = None if content is None else _text_of_content(_with_places(content) if shown else content, role)
    message = {"role": role, "content": words, **known, **_row_fields(fields, role, words or "")}
    if shown:
        message[WITH_IMAGES] = [reference_of(part) for part in shown]
    return {**message, "tool_calls": calls} if calls else message


def _row_fields(fields: dict[str, Any], role: str, words: str) -> dict[str, Any]:
    """Returns a message's own flags under the keys `OF_ROW`: whether it is learned, and what of it is ignored."""
    learned, parts = is_learned(fields), unlearned_parts(fields, words)
    unread = [f"a message's {key_shown(key)} is not read" for key in sorted(fields.keys() - READ)]
    if learned is False:
        names = [name for name in FLAGS if name in fields]
        unread.append(f"a message is not learned ({names[0]}: {str(fields[names[0]]).lower()})")
    elif learned and role != "assistant":
        unread.append(f"a message of the {role} {ONLY_ASSISTANTS}")
    if parts:
        unread.append(IN_PARTS)
    found = {"unread": unread, "parts": parts, "weight": None if learned is None else int(learned)}
    return {key: value for key, value in found.items() if value not in (None, [], ())}


def _with_places(content: list[Any]) -> list[Any]:
    """Returns the parts of a message, with a place as the text of each image."""
    return [{"type": "text", "text": PLACE} if is_image(part) else part for part in content]


def _calls_in_text(value: Any) -> list[dict[str, Any]]:
    calls = parsed(value, "a function_call")
    return _tool_calls(calls if isinstance(calls, list) else [calls])


def _text_of_content(content: Any, role: str) -> str:
    """Returns the words of a message, which are text or parts of text; the assistant's may be empty."""
    if isinstance(content, list):
        content = [part for part in content if not is_thought(part)]
        refuse_parts(content)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RowProblem(f"a message's content is {type_of(content)}, not text")
    if not content.strip() and role == "user":
        raise RowProblem("a user's message is empty")
    return encodable(content, "a message")


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    calls = None if is_absent(value) else parsed(value, "tool_calls")
    if calls in (None, []):
        return []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowProblem("tool_calls is not a list of calls")
    writable(calls, "tool_calls")
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a call whose arguments are an object, as chat templates expect, not JSON in a string."""
    # Older layouts have the function itself as the call.
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem("a tool call names no function")
    arguments = parsed(function.get("arguments") or {}, "a tool call's arguments")
    if not isinstance(arguments, dict):
        raise RowProblem(f"a tool call's arguments are {type_of(arguments)}, not an object")
    writable(arguments, "tool_calls")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Returns tools in OpenAI's form, or None if there are none.

    Raises:
        RowProblem: if it is not a list of tools.
    """
    tools = None if is_absent(value) else parsed(value, "tools")
    if tools in (None, []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowProblem("tools is not a list of tools")
    writable(tools, "tools")
    # ShareGPT names the function alone; templates were written for OpenAI's form.
    return [{"type": "function", "function": tool} if "name" in tool else tool for tool in tools]


def conversation(
    messages: list[Message], tools: list[dict[str, Any]] | None, of_row: list[Any] | None = None
) -> Conversation:
    """Checks messages for what no template can render, and returns the conversation.

    Args:
        of_row: images of the row's column, or None if rows have no images.

    Raises:
        RowProblem: if roles are out of order, nobody answers, or nothing is asked.
    """
    messages, images, where = (messages, [], []) if of_row is None else placed(messages, of_row)
    roles = [message["role"] for message in messages]
    # OpenAI's rows may have one of each.
    if set(SYSTEM) & set(roles[2:] if tuple(roles[:2]) == SYSTEM else roles[1:]):
        raise RowProblem("roles out of order: system is not the first message")
    if "assistant" not in roles:
        raise RowProblem("no assistant turn")
    if "tool" in roles[: roles.index("assistant")]:
        raise RowProblem("roles out of order: tool before any assistant turn")
    if roles[0] == "assistant" and len(roles) == 1:
        raise RowProblem("nothing is asked")
    unlearned = frozenset(number for number, message in enumerate(messages) if message.get("weight") == 0)
    parts = {number: message["parts"] for number, message in enumerate(messages) if "parts" in message}
    notes = dict.fromkeys(note for message in messages for note in message.get("unread", ()))
    # A template that writes whole messages would write these, too.
    plain = [{key: value for key, value in message.items() if key not in OF_ROW} for message in messages]
    return Conversation(plain, tools, unlearned, parts, (*notes, *where), images=tuple(images))


def answered_last(found: Conversation) -> Conversation:
    """Returns the conversation, whose last turn is compared or judged.

    Raises:
        RowProblem: if the last turn is not the assistant's.
    """
    # An earlier turn would be learned in its place, and two sides that share it would cancel without a word.
    if found.messages[-1]["role"] != "assistant":
        raise RowProblem("the last turn is not the assistant's")
    return found
