"""data.targets: each_turn: a sample for each answer, as a model is asked for it, and the answer as it writes it."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with the full-width bar)

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, DEEPSEEK_R1, GEMMA, PHI_3, QWEN_3, ChatTemplate
from support.chat_templates import tokenizer_for as new_tokenizer
from support.conversations import (
    ALL_TEMPLATES,
    CONVERSATIONS,
    TOOLS,
    WRITTEN,
    assistant,
    cases,
    in_lists,
    kinds_of,
    tokenizer_for,
    user,
)
from tokenizers import AddedToken

from toolkit.data import build
from toolkit.data.documents.encode import Encoder
from toolkit.data.kinds.registry import LAYOUTS, kind_for
from toolkit.data.layouts.layout import Layout
from toolkit.recipe.schema import DataSection

MESSAGES = Layout(LAYOUTS["messages"], {"messages": "messages", "system": "system", "tools": "tools"})


def samples_of(template: ChatTemplate, row: dict[str, Any]) -> tuple[list[tuple[list[int], list[bool]]], Any]:
    """Tokens and targets of each sample of a row, and what is noted of it."""
    document = in_lists(Encoder(tokenizer_for(template), targets="each_turn").documents([row], MESSAGES)[0])
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


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_every_answer_stands_behind_what_a_server_gives(name: str) -> None:
    for kind in kinds_of(name):
        stands_behind_what_a_server_gives(name, kind)


def stands_behind_what_a_server_gives(name: str, kind: str) -> None:
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
    document = in_lists(Encoder(tokenizer_for(GEMMA), targets="each_turn").documents([row], MESSAGES)[0])
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


OPENS = ChatTemplate(
    "opens a thought",
    CHATML.template.replace("<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>\\n'"),
    CHATML.special,
    CHATML.eos,
)
"""Opens a thought in the generation prompt alone, as DeepSeek's R1 distills do."""


def asked(template: ChatTemplate, messages: list[Any], tools: Any = None) -> list[int]:
    """The tokens that a server gives the model before an answer to these messages."""
    tokens = tokenizer_for(template)
    return tokens.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]


def test_an_answer_that_is_not_learned_behind_the_prompt_of_inference_is_counted() -> None:
    """Exactly: the tokens before the first learned token of each answer, by what a server gives."""
    wrong = []
    for name, kind in cases():
        template, messages = ALL_TEMPLATES[name], CONVERSATIONS[kind]
        tools = TOOLS if "tools" in kind else None
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for targets, wanted in (("assistant", answers), ("last_turn", answers[-1:])):
            encoder = Encoder(tokenizer_for(template), targets)
            document = in_lists(encoder.documents([{"messages": messages, "tools": tools}], MESSAGES)[0])
            ids, learned = document["input_ids"], document["targets"]
            starts = [i for i, now in enumerate(learned) if now and not learned[i - 1]]
            is_asked_so = [ids[:start] for start in starts] == [asked(template, messages[:i], tools) for i in wanted]
            if is_asked_so == ("behind the prompt of inference" in str(document["note"])):
                wrong.append((name, kind, targets, document["note"]))
    assert wrong == []


def test_each_turn_is_what_the_report_advises_for_it(tmp_path: Path) -> None:
    tokens, told = tokenizer_for(OPENS), "an answer does not stand behind the prompt of inference"
    rows = [
        {"messages": [user("why"), assistant("so")]},
        {"messages": [user("why"), assistant("<think>\na king\n</think>\n\nno")]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for streaming in (False, True):
        data = {"train": str(path), "max_length": 64, "cache_dir": str(tmp_path / "cache"), "streaming": streaming}
        report = build.build(DataSection.model_validate(data), tokens, 0).report
        [line] = [line for line in report.warnings if told in line]
        assert line.startswith("train: ")
        assert line.endswith(f" row{'s' if streaming else ''}: {told} (data.targets: each_turn puts it there)")
        assert report.train.noted[line.split(": ", 2)[2]].rows == ["rows.jsonl:1"]
        mended = build.build(DataSection.model_validate(data | {"targets": "each_turn"}), tokens, 0)
        assert not any(told in line for line in mended.report.warnings)
        pieces = [ids.tolist() for number in range(len(mended.train)) for ids, _ in mended.train.tokens(number)]
        prompt = asked(OPENS, [user("why")])
        assert all(ids[: len(prompt)] == prompt for ids in pieces)


def test_a_token_that_holds_the_end_of_a_prompt_is_not_the_prompt() -> None:
    """Two line ends are one token, as in most vocabularies; a server's prompt ends with one."""
    tokens = tokenizer_for(CHATML)
    both = tokens("\n\n", add_special_tokens=False)["input_ids"]
    for words, counted in (("\nso", len(both) == 1), ("so", False)):
        row = {"messages": [user("why"), assistant(words)]}
        note = Encoder(tokens).documents([row], MESSAGES)[0]["note"]
        assert ("behind the prompt of inference" in str(note)) == counted


@pytest.mark.parametrize("objective", ["preference", "kto", "reward"])
def test_compared_answers_stand_behind_one_prompt(objective: str) -> None:
    """Thoughts in the chosen answer alone; a reward model reads what the template writes of both."""
    thought, plain = assistant("<think>\na king\n</think>\n\nso"), assistant("no")
    names = {name: name for name in ("prompt", "chosen", "rejected", "completion", "label", "system", "tools")}
    encoder = kind_for(objective).encodes(tokenizer_for(OPENS), "last_turn", objective)
    if objective == "kto":
        rows = [{"prompt": [user("why")], "completion": [answer], "label": True} for answer in (thought, plain)]
        judged = encoder.documents(rows, Layout(LAYOUTS["judged prompt and completion"], names))
        sides = [in_lists(document) for document in judged]
    else:
        pair = {"prompt": [user("why")], "chosen": [thought], "rejected": [plain]}
        both = in_lists(encoder.documents([pair], Layout(LAYOUTS["chosen and rejected"], names))[0])
        halves = (slice(both["split"]), slice(both["split"], None))
        sides = [{**both, **{key: both[key][half] for key in ("input_ids", "targets")}} for half in halves]
    tokens, prompt = tokenizer_for(OPENS), asked(OPENS, [user("why")])
    begins = [side["input_ids"][: side["targets"].index(True)] for side in sides]
    words = [tokens.decode(side["input_ids"][len(begin) :]) for side, begin in zip(sides, begins, strict=True)]
    assert [side["note"] for side in sides] == [None, None]
    assert begins[0] == prompt
    assert words[0].startswith("a king\n</think>\n\nso<|im_end|>")
    if objective == "reward":
        assert tokens.decode(begins[1]).endswith("assistant\n")
    else:
        assert begins[1] == prompt
        assert words[1].startswith("\n</think>\n\nno<|im_end|>")


def test_a_prompts_token_that_takes_white_space_of_the_answer_is_not_learned() -> None:
    """Phi 3's tokens take the white space behind them: `<|assistant|>` reaches into an answer that begins with some."""
    tokens = new_tokenizer(PHI_3)
    taking = [AddedToken(token, special=True, rstrip=True, normalized=False) for token in PHI_3.special]
    tokens.add_special_tokens({"additional_special_tokens": taking}, False)
    row = {"messages": [user("two"), assistant("\n four")]}
    document = in_lists(Encoder(tokens).documents([row], MESSAGES)[0])
    learned = [
        token for token, is_learned in zip(document["input_ids"], document["targets"], strict=True) if is_learned
    ]
    assert (tokens.decode(learned), document["note"]) == ("four<|end|><|endoftext|>", None)
