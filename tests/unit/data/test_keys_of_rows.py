"""Every key of a row and of a message is read, refused or counted by its name."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, DEEPSEEK_R1, QWEN_3, ChatTemplate, of_trl, tokenizer_for

from toolkit.data import build
from toolkit.data.encode import Encoder
from toolkit.data.layouts import Layout
from toolkit.recipe.schema import DataSection

MESSAGES = Layout("messages", {"messages": "messages", "system": "system", "tools": "tools"})
ASKED = {"role": "user", "content": "why"}


@lru_cache
def tokenizer(template: ChatTemplate) -> Any:
    return tokenizer_for(template)


def encoded(row: dict[str, Any], template: ChatTemplate = CHATML, layout: Layout = MESSAGES) -> tuple[str, Any, Any]:
    """What is learned of a row, as text; why it is dropped; what is noted of it."""
    tokens = tokenizer(template)
    document = Encoder(tokens).documents([row], layout)[0]
    learned = [t for t, learned in zip(document["input_ids"], document["targets"], strict=True) if learned]
    return tokens.decode(learned), document["problem"], document["note"]


def answers(*flags: dict[str, Any]) -> dict[str, Any]:
    """A conversation whose answers are "one", "two", ... with these keys beside them."""
    words = ("one", "two", "three")
    turns = [[ASKED, {"role": "assistant", "content": word, **keys}] for word, keys in zip(words, flags, strict=False)]
    return {"messages": [message for turn in turns for message in turn]}


END = "<|im_end|>"

FLAGGED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "axolotl": (answers({"train": False}, {"train": True}), f"two{END}", "a message is not learned (train: false)"),
    "axolotl, older": (answers({"training": False}, {}), f"two{END}", "a message is not learned (training: false)"),
    "ms-swift": (answers({"loss": False}, {"loss": True}), f"two{END}", "a message is not learned (loss: false)"),
    "ms-swift scale": (answers({"loss_scale": 0.0}, {}), f"two{END}", "a message is not learned (loss_scale: 0.0)"),
    "mask": (answers({"mask": True}, {"mask": False}), f"two{END}", "a message is not learned (mask: true)"),
    "openai": (answers({"weight": 0}, {"weight": 1}), f"two{END}", "a message is not learned (weight: 0)"),
    "as text": (answers({"train": "false"}, {}), f"two{END}", "a message is not learned (train: false)"),
    "null": (answers({"train": None}, {}), f"one{END}two{END}", None),
    "two that agree": (answers({"train": False, "weight": 0}, {}), f"two{END}", "a message is not learned (weight: 0)"),
    "parts": (
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": "bad good",
                    "train_detail": [
                        {"begin_offset": 0, "end_offset": 3, "train": False},
                        {"begin_offset": 4, "end_offset": 7, "train": True},
                    ],
                },
            ]
        },
        f"good{END}",
        "parts of a message are not learned (train_detail)",
    ),
    "unknown key": (answers({"mood": "glad"}), f"one{END}", "a message's mood is not read"),
    "unknown column": (answers({}) | {"id": 7, "empty": None}, f"one{END}", "column id is not read"),
    "user's flag": (
        {"messages": [ASKED | {"train": True}, {"role": "assistant", "content": "one"}]},
        f"one{END}",
        "a message of the user says that it is learned, and only the assistant's are",
    ),
    "developer": (
        {"messages": [{"role": "developer", "content": "be short"}, *answers({})["messages"]]},
        f"one{END}",
        "developer is written as system: the chat template knows no developer",
    ),
}


@pytest.mark.parametrize("name", FLAGGED)
def test_a_flag_means_what_it_means_to_its_tool(name: str) -> None:
    row, learned, note = FLAGGED[name]
    assert encoded(row) == (learned, None, note)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "contradiction": (
        answers({"train": True, "loss": False}),
        "train says that it is learned, and its loss",
    ),
    "share": (answers({"weight": 0.5}), "a message's weight is neither 0 nor 1"),
    "flag of words": (answers({"train": "maybe"}), "a message's train is neither true nor false"),
    "scale": (answers({"loss_scale": 0.3}), "a message's loss_scale is neither 0 nor 1"),
    "parts outside": (
        answers({"train_detail": [{"begin_offset": 0, "end_offset": 99, "train": False}]}),
        "a message's train_detail names no parts of its text",
    ),
    "parts twice": (
        answers({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}) | {"system": "one"},
        "a message with train_detail does not stand in what the chat template renders, or twice",
    ),
    "image": (answers({}) | {"image": "cat.png"}, "image holds what is not text"),
    "images": (answers({}) | {"images": ["cat.png"]}, "images holds what is not text"),
    "video": (answers({}) | {"videos": [{"bytes": "x"}]}, "videos holds what is not text"),
    "audio": (answers({}) | {"audio": {"path": "a.wav"}}, "audio holds what is not text"),
    "image of a message": (answers({"images": ["cat.png"]}), "a message's images holds what is not text"),
    "thoughts that differ": (answers({"reasoning": "a", "thinking": "b"}), "a message has two different thoughts"),
    "thought of numbers": (answers({"thinking": 3}), "a message's thinking is a number, not text"),
    "channel": (answers({"channel": "aside"}), "a message's channel is none of analysis, commentary, final"),
    "analysis at the end": (answers({}, {"channel": "analysis"}), "a message of the channel analysis has no answer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_learned_as_it_is_meant_is_dropped_by_name(name: str) -> None:
    row, problem = REFUSED[name]
    learned, found, _ = encoded(row)
    assert problem in str(found)
    assert learned == ""


def test_empty_columns_of_pictures_are_none() -> None:
    assert encoded(answers({}) | {"image": None, "images": [], "video": ""})[1] is None


HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
GPT_OSS = of_trl("gptoss", ChatTemplate("", "", HARMONY, "<|return|>"))
QWEN_3_OWN, QWEN_36 = of_trl("qwen3", QWEN_3), of_trl("qwen3_6", QWEN_3)
THOUGHT = "a king walked"
THINKING: dict[str, list[dict[str, Any]]] = {
    "reasoning_content": [{"role": "assistant", "reasoning_content": THOUGHT, "content": "one"}],
    "reasoning": [{"role": "assistant", "reasoning": THOUGHT, "content": "one"}],
    "thinking": [{"role": "assistant", "thinking": THOUGHT, "content": "one"}],
    "the same twice": [{"role": "assistant", "thinking": THOUGHT, "reasoning": THOUGHT, "content": "one"}],
    "a part": [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": "one"}]}
    ],
    "Mistral's part": [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
                {"type": "text", "text": "one"},
            ],
        }
    ],
    "Harmony's channels": [
        {"role": "assistant", "channel": "analysis", "content": THOUGHT},
        {"role": "assistant", "channel": "final", "content": "one"},
    ],
}


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("template", [QWEN_3_OWN, QWEN_36, GPT_OSS], ids=lambda template: template.name)
def test_thoughts_are_learned_whatever_they_are_called(name: str, template: ChatTemplate) -> None:
    """As the template writes them under its own name."""
    field = "thinking" if template is GPT_OSS else "reasoning_content"
    written = tokenizer(template).apply_chat_template(
        [ASKED, {"role": "assistant", field: THOUGHT, "content": "one"}], tokenize=False
    )
    learned, problem, note = encoded({"messages": [ASKED, *THINKING[name]]}, template)
    assert (problem, note) == (None, None)
    assert THOUGHT in learned
    assert written.rstrip().endswith(learned.rstrip())


@pytest.mark.parametrize("name", THINKING)
def test_thoughts_that_a_template_leaves_out_are_counted(name: str) -> None:
    learned, problem, note = encoded({"messages": [ASKED, *THINKING[name]]})
    assert (learned, problem, note) == (f"one{END}", None, "the chat template leaves out reasoning_content")


def test_thoughts_inside_the_words_that_a_template_leaves_out_are_counted() -> None:
    row = {"messages": [ASKED, {"role": "assistant", "content": f"<think>{THOUGHT}</think>one"}]}
    earlier = {"messages": [*row["messages"], ASKED, {"role": "assistant", "content": "two"}]}
    assert encoded(earlier, DEEPSEEK_R1)[2] == "the chat template leaves out <think>"
    assert encoded(earlier)[2] is None, "ChatML writes words as they are"


def test_the_report_counts_each_key_once_a_row(tmp_path: Path) -> None:
    rows = [answers({"train": False, "mood": "glad"}, {}) | {"id": i, "source": "web"} for i in range(5)]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, answers({})]))
    section = DataSection.model_validate({"train": str(path), "max_length": 64, "cache_dir": str(tmp_path / "cache")})
    report = build.build(section, tokenizer(CHATML), seed=0).report
    noted = {what: found["count"] for what, found in report.to_dict()["train"]["noted"].items()}
    assert noted == {
        "a message's mood is not read": 5,
        "a message is not learned (train: false)": 5,
        "column id is not read": 5,
        "column source is not read": 5,
    }
    told = "\n".join(report.warnings)
    assert "train: 5 rows: a message is not learned (train: false)" in told
    assert "train: columns that are not read: id (5 rows), source (5 rows)" in told
