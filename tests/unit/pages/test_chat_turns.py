"""The marks of chat templates become turns, and any other text stays as it is."""

from __future__ import annotations

import json

import pytest

from toolkit.pages.parts.turns import turns_of

ASKED = [("system", "Be brief."), ("user", "1 < 2?\nReally?")]


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 < 2?\nReally?<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\n1 < 2?\nReally?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>system\nBe brief.<end_of_turn>\n<start_of_turn>user\n1 < 2?\nReally?<end_of_turn>\n"
        "<start_of_turn>model\n",
        "<|system|>\nBe brief.</s>\n<|user|>\n1 < 2?\nReally?</s>\n<|assistant|>\n",
        "<|system|>\nBe brief.<|end|>\n<|user|>\n1 < 2?\nReally?<|end|>\n<|assistant|>\n",
    ],
)
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
