"""The marks of chat templates become turns, and any other text stays as it is."""

from __future__ import annotations

import json

import pytest
from support.cases import cases

from toolkit.pages.parts.turns import turns_of

TABLES = cases(__file__)

ASKED = [("system", "Be brief."), ("user", "1 < 2?\nReally?")]


@pytest.mark.parametrize("text", TABLES["MARKED"])
def test_marks_of_templates_are_turns(text: str) -> None:
    assert turns_of(text) == ASKED
    assert turns_of(f"{text}Yes.")[2][1] == "Yes.", "a turn that is written is shown"


def test_messages_as_json_are_turns() -> None:
    messages = [{"role": role, "content": content} for role, content in ASKED]
    assert turns_of(json.dumps(messages)) == ASKED
    assert turns_of(json.dumps([*messages, {"role": "assistant", "tool_calls": []}])) == [], "calls would not be shown"


@pytest.mark.parametrize(
    "text", ["", "[1]", "[cut", "To be or not to be", "Say <|im_start|>user\nhello", "### Instruction:\nAdd.\n"]
)
def test_other_text_has_none(text: str) -> None:
    assert turns_of(text) == []
