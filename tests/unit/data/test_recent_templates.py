"""Templates of 2025 and 2026: what is learned is what was found by hand, of whole conversations and by turn."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with the full-width bar)

from __future__ import annotations

import json
from functools import cache
from itertools import groupby, pairwise
from typing import Any

import pytest
from support.chat_templates import GLM_45, GPT_OSS, MAGISTRAL, PHI_4, QWEN_3, QWEN_35, RECENT, SMOLLM_3, ChatTemplate
from support.chat_templates import tokenizer_for as new_tokenizer
from support.conversations import assistant, in_lists, system, user

from toolkit.data.documents.encode import Encoder
from toolkit.data.kinds.registry import LAYOUTS
from toolkit.data.layouts.layout import Layout
from toolkit.data.templates.stops import NextTurn, next_turn_of, require_turn_end, turn_ends

LAYOUT = Layout(LAYOUTS["messages"], {"messages": "messages", "tools": "tools"})
Message = dict[str, Any]


def call(city: str) -> Message:
    return {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def calls(*cities: str, thought: str = "") -> Message:
    message = {"role": "assistant", "content": "", "tool_calls": [call(city) for city in cities]}
    return message | ({"reasoning_content": thought} if thought else {})


def thinks(thought: str, words: str) -> Message:
    return {"role": "assistant", "content": words, "reasoning_content": thought}


RESULT = {"role": "tool", "content": "18", "name": "weather", "tool_call_id": "a1b2c3d4e"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It is.", "parameters": {}}}]

CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [user("two"), assistant("four")],
    "several turns": [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f g")],
    "system": [system("Be brief."), user("two"), assistant("four"), user("so"), assistant("no")],
    "thoughts": [user("two"), thinks("add them", "four")],
    "thoughts of all": [user("a"), thinks("first", "b"), user("c"), thinks("second", "d")],
    "thoughts of some": [user("a"), thinks("first", "b"), user("c"), assistant("d")],
    "tools": [user("Paris?"), calls("Paris"), RESULT, assistant("It is 18.")],
    "parallel calls": [user("Both?"), calls("Paris", "Rome"), RESULT, RESULT, assistant("Both 18.")],
    "tools and thoughts": [user("Paris?"), calls("Paris", thought="look"), RESULT, thinks("said", "It is 18.")],
    "empty answer": [user("a"), assistant(""), user("b"), assistant("c")],
    "two in a row": [user("a"), assistant("b"), assistant("c")],
    "unicode": [user("数字 🎉?"), assistant("四 é ñ 🎉"), user("é?"), assistant("👩‍👩‍👧 ok")],
}
KINDS_WITH_TOOLS = ("tools", "parallel calls", "tools and thoughts")


def arguments(city: str) -> str:
    return json.dumps({"city": city})


def cities(message: Message) -> list[str]:
    return [one["function"]["arguments"]["city"] for one in message.get("tool_calls", [])]


def written(name: str, message: Message, thought: str | None, last: bool) -> str:
    """What a model writes in a turn, by hand. `thought`: None if the template leaves thoughts out there."""
    words, asked = message["content"], cities(message)
    json_calls = [f'{{"name": "weather", "arguments": {arguments(city)}}}' for city in asked]
    in_tags = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in json_calls)
    qwen_thought = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    if name == "gpt-oss":
        shown = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        if asked:
            return f"{shown} to=functions.weather<|channel|>commentary json<|message|>{arguments(asked[0])}<|call|>"
        return f"{shown}<|channel|>final<|message|>{words}{'<|return|>' if last else '<|end|>'}"
    if name == "qwen 3.5":
        functions = [f"<function=weather>\n<parameter=city>\n{c}\n</parameter>\n</function>" for c in asked]
        return qwen_thought + words + "\n".join(f"<tool_call>\n{f}\n</tool_call>" for f in functions) + "<|im_end|>"
    if name == "qwen 3":
        return qwen_thought + words + in_tags + "<|im_end|>"
    if name == "deepseek v3.1":
        each = "".join(f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{arguments(c)}<｜tool▁call▁end｜>" for c in asked)
        block = f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>" if asked else ""
        return f"{words}{block}<｜end▁of▁sentence｜>"
    if name == "gemma 3":
        return f"{words}<end_of_turn>"
    if name == "gemma 4":
        shown = f"<|channel>thought\n{thought}\n<channel|>" if thought else ""
        each = "".join(f"<|tool_call>call:weather{arguments(c)}<tool_call|>" for c in asked)
        return f"{shown}{each}{words}<turn|>"
    if name == "llama 4":
        each = "".join(f'{{"name": "weather", "parameters": {arguments(c)}}}' for c in asked)
        return words + each + ("<|eom|>" if asked else "<|eot|>")
    if name == "magistral":
        shown = f"[THINK]{thought}[/THINK]" if thought else ""
        return shown + words + "".join(f"[TOOL_CALLS]weather[ARGS]{arguments(c)}" for c in asked) + "</s>"
    if name == "glm 4.5":
        said = f"\n{words}" if words else ""
        each = "".join(f"\n<tool_call>weather\n{arguments(c)}\n</tool_call>" for c in asked)
        return f"\n<think>{thought or ''}</think>{said}{each}"
    if name == "kimi k2":
        start, argue, end = "<|tool_call_begin|>functions.weather:", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
        each = "".join(f"{start}{i}{argue}{arguments(c)}{end}" for i, c in enumerate(asked))
        return words + (f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>" if asked else "") + "<|im_end|>"
    if name == "granite 4":
        return words + in_tags + "<|end_of_text|>"
    if name in ("smollm 3", "phi 4"):
        return f"{words}<|im_end|>"
    assert name == "minimax m2", name
    shown = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    each = "".join(f'<invoke name="weather">{arguments(c)}</invoke>\n' for c in asked)
    block = f"\n<minimax:tool_call>\n{each}</minimax:tool_call>" if asked else ""
    return f"{shown}{words}{block}[e~["


def stop_of(name: str, messages: list[Message], index: int, alone: bool) -> str:
    """What the model writes to stop behind an answer that the template does not end: GLM's mark of the next turn.

    Args:
        alone: the answer is learned by itself, with whatever would follow it.
    """
    if name != "glm 4.5":
        return ""
    role = messages[index + 1]["role"] if index + 1 < len(messages) else "user"
    if role == "assistant":
        return "<|user|>" if alone else ""
    return "<|observation|>" if role == "tool" else "<|user|>"


def thought_in(name: str, messages: list[Message], index: int, alone: bool) -> str | None:
    """The thoughts that a template writes of a message; None if it leaves them out, or has no place for them.

    Args:
        alone: the message is the last one, as when it was written.
    """
    thought = messages[index].get("reasoning_content", "")
    behind_last_user = alone or index > max(i for i, m in enumerate(messages) if m["role"] == "user")
    last = alone or index == len(messages) - 1
    if name == "magistral":
        return thought
    if name == "gpt-oss":
        return thought if last else None
    if name == "qwen 3":  # the fixture reads thoughts inside the words alone
        return "" if last else None
    if name in ("qwen 3.5", "gemma 4", "glm 4.5", "minimax m2"):
        return thought if behind_last_user else None
    return None


REFUSED = {("gpt-oss", "parallel calls"): "one call at a time", ("gemma 3", "two in a row"): "alternate"}
"""Conversations that a template does not take, and what it says."""

TEMPLATES = {template.name: template for template in (*RECENT, QWEN_3, PHI_4)}


@cache
def tokenizer(name: str) -> Any:
    return new_tokenizer(TEMPLATES[name])


def encoded(name: str, messages: list[Message], kind: str, targets: Any, **row: Any) -> Any:
    tools = TOOLS if kind in KINDS_WITH_TOOLS else None
    encoder = Encoder(tokenizer(name), targets=targets, next_turn=next_turn_of(tokenizer(name)))
    return in_lists(encoder.documents([{"messages": messages, "tools": tools, **row}], LAYOUT)[0])


def learned(name: str, ids: list[int], targets: list[bool]) -> list[str]:
    """The text of each stretch of targets."""
    found, place = [], 0
    for is_target, stretch in groupby(targets):
        count = len(list(stretch))
        if is_target:
            head = tokenizer(name).decode(ids[:place])
            found.append(tokenizer(name).decode(ids[: place + count])[len(head) :])
        place += count
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_those_found_by_hand_and_what_a_server_gives(name: str) -> None:
    for kind in CONVERSATIONS:
        if TEMPLATES[name].tools or kind not in KINDS_WITH_TOOLS:
            every_turn_is_what_a_server_gives_and_the_model_writes(name, kind)


def every_turn_is_what_a_server_gives_and_the_model_writes(name: str, kind: str) -> None:
    messages, tokens = CONVERSATIONS[kind], tokenizer(name)
    document = encoded(name, messages, kind, "each_turn")
    thinking = any(message.get("reasoning_content") for message in messages)
    if (name, kind) in REFUSED:
        assert REFUSED[name, kind] in document["problem"]
        return
    if name == "gemma 4" and thinking:  # without enable_thinking its prompt closes thoughts
        assert "closes them before it" in document["problem"]
        document = encoded(name, messages, kind, "each_turn", chat_template_kwargs={"enable_thinking": True})
    assert document["problem"] is None, document["problem"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    given = {"enable_thinking": True} if name == "gemma 4" and thinking else {}
    tools = TOOLS if kind in KINDS_WITH_TOOLS else None
    for i, (start, end) in zip(answers, pairwise([0, *document["ends"]]), strict=True):
        ids, targets = document["input_ids"][start:end], document["targets"][start:end]
        # A template of channels or calls sees the messages as rows have them.
        before = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages[:i]]
        prompt = tokens.apply_chat_template(
            before if not thinking else for_servers(name, messages[:i]),
            tools=tools,
            add_generation_prompt=True,
            **given,
        )["input_ids"]
        assert ids[: len(prompt)] == prompt
        assert targets == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        expected = written(name, messages[i], thought_in(name, messages, i, alone=True), last=True)
        expected += stop_of(name, messages, i, alone=True)
        if name == "qwen 3.5":
            expected = expected.removeprefix("<think>\n")
        if name == "minimax m2":
            bare = "" if messages[i].get("reasoning_content") else "\n</think>\n\n"
            expected = bare + expected.removeprefix("<think>\n")
        assert tokens.decode(ids)[len(tokens.decode(prompt)) :] == expected


def for_servers(name: str, messages: list[Message]) -> list[Message]:
    """Messages as vLLM hands them to a template: thoughts under the key that it reads."""
    if name == "magistral":
        return [
            m
            if not m.get("reasoning_content")
            else {
                **{key: value for key, value in m.items() if key != "reasoning_content"},
                "content": [
                    {"type": "thinking", "thinking": m["reasoning_content"]},
                    *([{"type": "text", "text": m["content"]}] if m["content"] else []),
                ],
            }
            for m in messages
        ]
    if name == "gpt-oss":
        return [m | {"thinking": m["reasoning_content"]} if m.get("reasoning_content") else m for m in messages]
    return messages


def test_thoughts_that_no_closed_prompt_may_be_followed_by_are_dropped_by_name() -> None:
    row = {"chat_template_kwargs": {"enable_thinking": False}}
    document = encoded("qwen 3.5", CONVERSATIONS["thoughts"], "thoughts", "each_turn", **row)
    assert document["problem"] == (
        "an answer has thoughts, and the generation prompt of the chat template closes them before it "
        "(data.template_arguments: {enable_thinking: true} opens them)"
    )
    plain = encoded("qwen 3.5", CONVERSATIONS["one turn"], "one turn", "each_turn", **row)
    assert learned("qwen 3.5", plain["input_ids"], plain["targets"]) == ["four<|im_end|>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_has_a_stop(name: str) -> None:
    tokens = tokenizer(name)
    require_turn_end(tokens, "rows.jsonl")
    following = next_turn_of(tokens)
    if name == "glm 4.5":
        assert following == NextTurn("<|user|>", "<|observation|>")
        assert tokens.convert_ids_to_tokens(sorted(turn_ends(tokens))) == ["<|user|>", "<|observation|>"]
    else:
        assert following is None


def test_the_mark_that_stops_a_call_is_learned_behind_a_call_that_ends_its_row() -> None:
    messages = CONVERSATIONS["tools"][:2]
    document = encoded("glm 4.5", messages, "tools", "assistant")
    assert learned("glm 4.5", document["input_ids"], document["targets"])[0].endswith("</tool_call><|observation|>")
    unlearned = [*messages, RESULT, assistant("18") | {"weight": 0}]
    document = encoded("glm 4.5", unlearned, "tools", "assistant")
    (only,) = learned("glm 4.5", document["input_ids"], document["targets"])
    assert only.endswith("</tool_call><|observation|>")
    assert tokenizer("glm 4.5").decode(document["input_ids"]).endswith("18")


def test_the_names_are_those_of_the_fixtures() -> None:
    used: tuple[ChatTemplate, ...] = (GLM_45, GPT_OSS, MAGISTRAL, QWEN_35, SMOLLM_3)
    assert {template.name for template in used} <= set(TEMPLATES)
    assert len(CONVERSATIONS) == 12
