"""data.targets: each_turn: a sample for each answer, as a model is asked for it, and the answer as it writes it."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with the full-width bar)

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, DEEPSEEK_R1, GEMMA, QWEN_3, ChatTemplate
from support.conversations import ALL_TEMPLATES, CONVERSATIONS, TOOLS, WRITTEN, assistant, cases, tokenizer_for, user

from toolkit.data import build
from toolkit.data.encode import Encoder
from toolkit.data.layouts import Layout
from toolkit.recipe.schema import DataSection

MESSAGES = Layout("messages", {"messages": "messages", "system": "system", "tools": "tools"})


def samples_of(template: ChatTemplate, row: dict[str, Any]) -> tuple[list[tuple[list[int], list[bool]]], Any]:
    """Tokens and targets of each sample of a row, and what is noted of it."""
    document = Encoder(tokenizer_for(template), targets="each_turn").documents([row], MESSAGES)[0]
    assert document["problem"] is None, document["problem"]
    edges = list(pairwise([0, *document["ends"]]))
    return [(document["input_ids"][a:b], document["targets"][a:b]) for a, b in edges], document["note"]


def told(template: ChatTemplate, row: dict[str, Any]) -> list[tuple[str, str]]:
    """What is given and what is written, as text, of each sample."""
    tokens = tokenizer_for(template)
    parts = []
    for ids, targets in samples_of(template, row)[0]:
        start = targets.index(True)
        assert targets == [False] * start + [True] * (len(ids) - start)
        parts.append((tokens.decode(ids[:start]), tokens.decode(ids[start:])))
    return parts


@pytest.mark.parametrize(("name", "kind"), cases())
def test_every_answer_stands_behind_what_a_server_gives(name: str, kind: str) -> None:
    template, messages = ALL_TEMPLATES[name], CONVERSATIONS[kind]
    tokens, tools = tokenizer_for(template), TOOLS if "tools" in kind else None
    samples, _ = samples_of(template, {"messages": messages, "tools": tools})
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, (ids, targets) in zip(answers, samples, strict=True):
        prompt = tokens.apply_chat_template(messages[:i], tools=tools, add_generation_prompt=True)["input_ids"]
        assert ids[: len(prompt)] == prompt
        assert targets == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        # Written out by hand, as the last turn: R1's generation prompt has opened a think block.
        written = WRITTEN[name].turns(messages[: i + 1])[-1]
        written = "\n</think>\n\n" + written if name == "deepseek r1" else written
        if name == "qwen 3" and messages[i].get("tool_calls"):  # the last turn has an empty block, a call's, too
            written = "<think>\n\n</think>\n\n" + written
        alone = tokens.decode(ids[len(prompt) :])
        if template.metaspace:  # decoders take the space from a text's beginning
            whole = tokens.decode(ids)
            alone, written = whole[len(tokens.decode(prompt)) :], written.replace("▁", " ")
            assert alone.strip() == written.strip()
        else:
            assert alone == written


def thinking(content: str, thought: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": thought}


THINKS = [user("one"), thinking("1", "add"), user("two"), thinking("2", "add more"), user("three"), assistant("3")]


def test_each_answer_has_its_own_thoughts_and_not_those_of_earlier_ones() -> None:
    """Qwen 3 leaves out the thoughts of earlier turns, by hand."""
    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    inside = [m | {"content": f"<think>\n{m['reasoning_content']}\n</think>\n\n{m['content']}"} for m in THINKS[1:4:2]]
    inside = [{key: value for key, value in m.items() if key != "reasoning_content"} for m in inside]
    messages = [THINKS[0], inside[0], THINKS[2], inside[1], *THINKS[4:]]
    first = asked.format("one")
    second = first + "1<|im_end|>\n" + asked.format("two")
    third = second + "2<|im_end|>\n" + asked.format("three")
    assert told(QWEN_3, {"messages": messages}) == [
        (first, "<think>\nadd\n</think>\n\n1<|im_end|>"),
        (second, "<think>\nadd more\n</think>\n\n2<|im_end|>"),
        (third, "<think>\n\n</think>\n\n3<|im_end|>"),
    ]


def test_thoughts_that_the_template_leaves_out_are_written_behind_a_prompt_that_opens_them() -> None:
    """DeepSeek R1 leaves out even the last turn's, and its generation prompt ends with <think>."""
    bos, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    first = f"{bos}<｜User｜>one<｜Assistant｜><think>\n"
    second = f"{bos}<｜User｜>one<｜Assistant｜>1{end}<｜User｜>two<｜Assistant｜><think>\n"
    third = second.replace("<think>\n", f"2{end}<｜User｜>three<｜Assistant｜><think>\n")
    assert told(DEEPSEEK_R1, {"messages": THINKS}) == [
        (first, f"add\n</think>\n\n1{end}"),
        (second, f"add more\n</think>\n\n2{end}"),
        (third, f"\n</think>\n\n3{end}"),
    ]


def test_flags_of_messages_hold_here_too() -> None:
    bad, good = assistant("bad") | {"train": False}, assistant("so so")
    parts = [{"begin_offset": 0, "end_offset": 2, "train": False}, {"begin_offset": 3, "end_offset": 4, "train": True}]
    row = {"messages": [user("a"), bad, user("b"), good | {"train_detail": parts}]}
    (sample,), note = samples_of(CHATML, row)
    tokens = tokenizer_for(CHATML)
    assert "bad" in tokens.decode(sample[0])
    assert tokens.decode([t for t, learned in zip(*sample, strict=True) if learned]) == "so<|im_end|>"
    assert note == "a message is not learned (train: false); parts of a message are not learned (train_detail)"


def test_an_answer_that_nothing_comes_before_is_counted_and_not_learned() -> None:
    samples, note = samples_of(CHATML, {"messages": [assistant("Hi."), user("a"), assistant("b")]})
    assert len(samples) == 1
    assert note == "an answer that nothing comes before is not learned (data.targets: each_turn)"


def test_two_answers_in_a_row_and_words_that_a_template_drops() -> None:
    row = {"messages": [user("a"), assistant("b"), assistant("c")]}
    assert [written for _, written in told(CHATML, row)] == ["b<|im_end|>", "c<|im_end|>"]
    document = Encoder(tokenizer_for(GEMMA), targets="each_turn").documents([row], MESSAGES)[0]
    assert "alternate" in document["problem"]


def built(folder: Path, template: ChatTemplate, rows: list[dict[str, Any]], **settings: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"train": [{"path": str(path)}], "cache_dir": str(folder / "cache"), "max_length": 64} | settings
    return build.build(DataSection.model_validate(fields), tokenizer_for(template), seed=0)


def test_samples_are_answers_and_the_report_says_what_they_cost(tmp_path: Path) -> None:
    rows = [
        {"messages": [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f")]},
        {"messages": [user("What is it?"), assistant("It is four.")]},
    ]
    found = built(tmp_path, CHATML, rows, targets="each_turn", packing=False)
    expected = [ids for row in rows for ids, _ in samples_of(CHATML, row)[0]]
    assert [found.train.documents(number)[0] for number in range(len(found.train))] == expected
    labels = found.train.batch([1])["labels"][0].tolist()
    learned = [token for token in labels if token != -100]
    assert tokenizer_for(CHATML).decode(learned) == "d<|im_end|>"
    report = found.report.train
    # A conversation is as long as its last sample; the samples before it are read beside it.
    assert (report.read, report.samples, report.tokens) == (2, 4, len(expected[2]) + len(expected[3]))
    assert report.repeated_tokens == len(expected[0]) + len(expected[1])
    [cost] = [warning for warning in found.report.warnings if "each_turn" in warning]
    assert cost.startswith(f"train: data.targets each_turn reads {report.repeated_tokens} tokens more than once")
    # Held-out rows are whole conversations.
    held = built(tmp_path, CHATML, rows, targets="each_turn", packing=False, validation_fraction=0.5)
    assert sorted([len(held.train), len(held.validation)]) == [1, 3]


def test_rows_whose_longest_sample_is_too_long_are_dropped(tmp_path: Path) -> None:
    rows = [{"messages": [user("a"), assistant("b"), user("c " * 40), assistant("d")]}] + [
        {"messages": [user("a"), assistant(f"b{number}")]} for number in range(120)
    ]
    found = built(tmp_path, CHATML, rows, targets="each_turn")
    assert found.report.train.dropped["longer than data.max_length"].rows == ["rows.jsonl:1"]
    assert found.report.train.kept == 120


def test_streamed_samples_are_the_same(tmp_path: Path) -> None:
    rows = [{"messages": CONVERSATIONS["several turns"]}, {"messages": THINKS[:2]}]
    settings = {"targets": "each_turn", "packing": False, "shuffle": False}
    whole, streamed = (built(tmp_path, CHATML, rows, **settings, streaming=on) for on in (False, True))
    documents = [[samples.documents(i) for i in range(4)] for samples in (whole.train, streamed.train)]
    assert documents[0] == documents[1]
    report = streamed.report.train
    assert report.repeated_tokens * whole.report.train.tokens == whole.report.train.repeated_tokens * report.tokens


def test_the_report_of_all_turns_suggests_it_where_thoughts_of_earlier_turns_are_lost(tmp_path: Path) -> None:
    inside = [
        user("one"),
        assistant("<think>\nadd\n</think>\n\n1"),
        user("two"),
        assistant("<think>\nmore\n</think>\n\n2"),
    ]
    rows = [{"messages": inside}, {"messages": inside[:2]}, {"messages": [user("a"), assistant("b")]}]
    noted = built(tmp_path, QWEN_3, rows).report.train.noted
    told = "the chat template leaves out <think> of earlier turns (data.targets: each_turn learns them)"
    assert {what: found.rows for what, found in noted.items()} == {told: ["rows.jsonl:1"]}
    assert not built(tmp_path, QWEN_3, rows, targets="each_turn").report.train.noted
