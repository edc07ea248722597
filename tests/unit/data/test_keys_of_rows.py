"""Every key of a row and of a message is read, refused or counted by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.chat_templates import CHATML, QWEN_3, ChatTemplate, of_trl, tokenizer_for
from support.conversations import in_lists
from support.texts import write_rows

from toolkit.data import build
from toolkit.data.documents.encode import EMPTY_THOUGHT, VERBATIM, Encoder
from toolkit.data.kinds.recognise import recognise
from toolkit.data.kinds.registry import LAYOUTS, kind_for
from toolkit.data.layouts.layout import Layout
from toolkit.data.report import Found
from toolkit.data.rows.sources import open_source
from toolkit.data.selection import nothing_left
from toolkit.data.templates.templates import TEMPLATES, use_template
from toolkit.errors import DataError
from toolkit.recipe.schema import ColumnsSection, DataSection, SourceSection

MESSAGES = Layout(LAYOUTS["messages"], {"messages": "messages", "system": "system", "tools": "tools"})
ASKED = {"role": "user", "content": "why"}


@lru_cache
def tokenizer(template: ChatTemplate) -> Any:
    return tokenizer_for(template)


def encoded(row: dict[str, Any], template: ChatTemplate = CHATML, layout: Layout = MESSAGES) -> tuple[str, Any, Any]:
    """What is learned of a row, as text; why it is dropped; what is noted of it."""
    tokens = tokenizer(template)
    row = answers(*row["answers"]) | row if "answers" in row else row
    row = {key: value for key, value in row.items() if key != "answers"}
    document = in_lists(Encoder(tokens).documents([row], layout)[0])
    learned = [t for t, learned in zip(document["input_ids"], document["targets"], strict=True) if learned]
    return tokens.decode(learned), document["problem"], document["note"]


def answers(*flags: dict[str, Any]) -> dict[str, Any]:
    """A conversation whose answers are "one", "two", ... with these keys next to them."""
    words = ("one", "two", "three")
    turns = [[ASKED, {"role": "assistant", "content": word, **keys}] for word, keys in zip(words, flags, strict=False)]
    return {"messages": [message for turn in turns for message in turn]}


END = "<|im_end|>"

TABLES = cases(__file__)
"""Rows, in which `answers` are the keys of each answer of a conversation."""


def test_a_flag_means_what_it_means_to_its_tool() -> None:
    for name, (row, learned, note) in TABLES["FLAGGED"].items():
        assert encoded(row) == (learned, None, note), name


def test_what_cannot_be_learned_as_it_is_meant_is_dropped_by_name() -> None:
    for row, problem in TABLES["REFUSED"].values():
        learned, found, _ = encoded(row)
        assert problem in str(found)
        assert learned == ""


def test_empty_columns_of_images_are_none() -> None:
    assert encoded(answers({}) | {"image": None, "images": [], "video": ""})[1] is None


def test_a_place_for_an_image_that_is_not_there_is_said() -> None:
    learned, problem, note = encoded(
        {"messages": [{"role": "user", "content": "<image>\nwho"}, *answers({})["messages"][1:]]}
    )
    assert (learned, problem) == (f"one{END}", None)
    assert note == "<image> is in the words of a row without images, and is read as text"


HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
LFM2 = of_trl("lfm2", CHATML)
GPT_OSS = of_trl("gptoss", ChatTemplate("", "", HARMONY, "<|return|>"))
QWEN_3_OWN, QWEN_36 = of_trl("qwen3", QWEN_3), of_trl("qwen3_6", QWEN_3)
THOUGHT = "a king walked"


@pytest.mark.parametrize("template", [QWEN_3_OWN, QWEN_36, GPT_OSS], ids=lambda template: template.name)
def test_thoughts_are_learned_whatever_they_are_called(template: ChatTemplate) -> None:
    """As the template writes them under its own name."""
    field = "thinking" if template is GPT_OSS else "reasoning_content"
    written = tokenizer(template).apply_chat_template(
        [ASKED, {"role": "assistant", field: THOUGHT, "content": "one"}], tokenize=False
    )
    for name, thoughts in TABLES["THINKING"].items():
        learned, problem, note = encoded({"messages": [ASKED, *thoughts]}, template)
        assert (problem, note) == (None, None), name
        assert THOUGHT in learned, name
        assert written.rstrip().endswith(learned.rstrip()), name
        lacking = encoded({"messages": [ASKED, *thoughts]})
        assert lacking == (f"one{END}", None, "the chat template leaves out reasoning_content"), name


def test_what_a_template_leaves_out_of_a_conversation_is_counted() -> None:
    """The test's own ChatML writes no tools; the second template neither these nor a system prompt."""
    tools = {"tools": [{"type": "function", "function": {"name": "look"}}]}
    silent = replace(CHATML, template=CHATML.template.replace("messages %}", "messages if m.role != 'system' %}"))
    silent = replace(silent, template=silent.template.replace("for message in", "for m in").replace("message[", "m["))
    kept_system = {"messages": [BRIEF, *DIALOGUE]}
    no_tools, no_system = "the chat template leaves out tools", "the chat template leaves out the system prompt"
    assert encoded(kept_system | tools) == (f"so{END}", None, no_tools)
    assert encoded(kept_system | tools, silent) == (f"so{END}", None, f"{no_tools}; {no_system}")
    assert encoded({"messages": DIALOGUE, "system": "be kind"}, silent)[2] == no_system
    assert encoded(kept_system | tools, QWEN_3_OWN)[2] == EMPTY_THOUGHT, "nothing is left out"
    by_turn = in_lists(Encoder(tokenizer(silent), "each_turn").documents([kept_system], MESSAGES)[0])
    assert by_turn["note"] == no_system


def test_turns_that_a_template_leaves_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes no results of tools, nor calls: an answer behind them is learned without them, a call not at all."""
    silent = replace(CHATML, template=CHATML.template.replace("messages %}", "messages if message.role != 'tool' %}"))
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "the moon"}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    turns = [ASKED, {**called, "weight": 0}, {"role": "tool", "content": 'it is "full"'}, *DIALOGUE[1:]]
    no_calls, no_results = (
        "the chat template leaves out calls of tools",
        "the chat template leaves out results of tools",
    )
    assert encoded({"messages": turns}, silent)[2].split("; ")[1:] == [no_calls, no_results]
    by_turn = in_lists(Encoder(tokenizer(silent), "each_turn").documents([{"messages": turns}], MESSAGES)[0])
    assert by_turn["note"].split("; ")[1:] == [no_calls, no_results]
    for name in (*TEMPLATES, ""):  # the first of ours that writes the calls of this row is advised
        problem = encoded({"messages": [ASKED, called]}, silent)[1]
        assert problem == no_calls + (name and f" (data.chat_template={name} writes them)")
        mend = nothing_left("", {problem: Found(count=1, rows=["rows.jsonl:1"])}).partition("1). ")[2]
        assert mend.startswith(f"Set data.chat_template={name}" if name else "Correct them")
        monkeypatch.setitem(TEMPLATES, name or "chatml", silent.template)
    listed = {"tools": [{"type": "function", "function": {"name": "look"}}]}
    assert encoded({"messages": [ASKED, called], **listed}, LFM2)[1] == no_calls, "the tools have the name, too"
    assert no_calls in encoded({"messages": turns, **listed}, LFM2)[2]
    in_json = CHATML.template.replace("message['content']", "(message.content | tojson)")
    assert encoded({"messages": [*DIALOGUE, *turns[2:]]}, replace(CHATML, template=in_json))[2] is None


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_words_reach_a_template_that_reads_parts_alone(name: str) -> None:
    end = "<end_of_utterance>"
    template = of_trl(name, ChatTemplate("", "", ("<|im_start|>", "<|begin_of_text|>", end), end))
    assert encoded({"messages": [BRIEF, *DIALOGUE]}, template) == (f" so{end}", None, None)


def test_prompts_are_asked_behind_the_system_prompt_of_their_row(tmp_path: Path) -> None:
    asked, _ = learned_of(tmp_path, {"messages": [BRIEF, ASKED]}, "grpo")
    sharegpt = {"conversations": [{"from": "human", "value": "why"}]}
    for row in ({"prompt": "why"}, {"prompt": [ASKED]}, {"messages": [ASKED]}, {"messages": DIALOGUE}, sharegpt):
        assert learned_of(tmp_path, {**row, "system": "be kind"}, "grpo")[0] == asked, row
    assert learned_of(tmp_path, {"prompt": "why"}, "grpo")[0] != asked


@pytest.mark.parametrize("judged", [{"label": False}, {"label": "false"}, {"kto_tag": 0.0}])
def test_an_answer_that_is_judged_bad_is_no_reference(judged: dict[str, Any]) -> None:
    for name, row in (("prompt", {"prompt": "why", "completion": "so"}), ("asked messages", {"messages": DIALOGUE})):
        layout = Layout(LAYOUTS[name], {column: column for column in row})
        assert "answer" in layout.example(row).row  # type: ignore[attr-defined]
        assert "answer" not in layout.example(row | judged).row  # type: ignore[attr-defined]


def test_the_report_counts_each_key_once_a_row(tmp_path: Path) -> None:
    rows = [answers({"train": False, "mood": "glad"}, {}) | {"id": i, "source": "web"} for i in range(5)]
    path = write_rows(tmp_path / "chat.jsonl", [*rows, answers({})])
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


DIALOGUE = [ASKED, {"role": "assistant", "content": "so"}]
BRIEF = {"role": "system", "content": "be kind"}
ROWS: dict[str, dict[str, Any]] = TABLES["ROWS"]
"""Objective -> a row of each layout that it learns from."""

VALUES: dict[str, Any] = TABLES["VALUES"]
"""A value of each column that any layout knows."""


@lru_cache
def with_tools() -> Any:
    tokens = tokenizer_for(CHATML)
    use_template(tokens, "chatml")
    return tokens


def learned_of(folder: Path, row: dict[str, Any], objective: str, **columns: str) -> tuple[Any, str]:
    """What is learned of the only row of a file, or None if it is refused; what is noted of it."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    source = open_source(SourceSection(path=str(folder / "rows.jsonl")), "data.train")
    targets = "assistant" if objective in ("causal_lm", "distillation") else "last_turn"
    encoder = kind_for(objective).encodes(with_tools(), targets, objective)
    try:
        layout = recognise(source, ColumnsSection.model_validate(columns), objective)
        document = in_lists(encoder.documents([row], layout)[0])
    except DataError:
        return None, ""
    learned = [document.get(name) for name in ("input_ids", "targets", "split", "margin", "label", "tags")]
    return (learned if document["problem"] is None else None), document["note"] or ""


@pytest.mark.parametrize("objective", ROWS)
def test_a_column_that_some_layout_knows_changes_what_is_learned_or_is_counted_or_refused(
    objective: str, tmp_path: Path
) -> None:
    """Every layout, every such column that its row lacks, under its own name and named by the recipe."""
    silent = []
    for name, row in ROWS[objective].items():
        plain, note = learned_of(tmp_path, row, objective)
        # Only a row of its own kind is told: a prompt of text, beside a chat template.
        told = VERBATIM if "prompt as text" in name and objective != "reward" else ""
        assert (plain is None, note) == (False, told), name
        for what in VALUES.keys() - row.keys():
            for column, named in ((what, {}), ("mine", {what: "mine"})):
                found, note = learned_of(tmp_path, {**row, column: VALUES[what]}, objective, **named)
                if found is not None and (found == plain) != (f"column {column} is not read" in note):
                    silent.append(f"{name}: {column} as {what}: {'lost' if found == plain else 'read and counted'}")
    assert silent == []
