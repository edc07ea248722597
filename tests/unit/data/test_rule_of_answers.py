"""The rule of an answer: what the model must write after the prompt that a server gives it."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with the full-width bar)

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import (
    CHATML,
    DEEPSEEK_R1,
    GEMMA_4,
    GLM_45,
    LLAMA_31,
    MINIMAX_M2,
    MISTRAL_V1,
    MISTRAL_V3,
    PHI_3,
    QWEN_3,
    RECENT,
    ChatTemplate,
    all_of_trl,
)
from support.chat_templates import tokenizer_for as new_tokenizer
from support.conversations import (
    ALL_TEMPLATES,
    CALL,
    TOOLS,
    USES_TOOL,
    assistant,
    in_lists,
    system,
    tokenizer_for,
    user,
)
from support.texts import write_rows
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from toolkit.data import build
from toolkit.data.documents.encode import Encoder
from toolkit.data.kinds.registry import LAYOUTS, kind_for
from toolkit.data.layouts.layout import Layout
from toolkit.data.templates.prompts import prompt_ids, prompt_of
from toolkit.data.templates.stops import next_turn_of, turn_ends
from toolkit.recipe.schema import DataSection

TRL = {template.name: template for template in all_of_trl()}
TEMPLATES = {**ALL_TEMPLATES, **{template.name: template for template in RECENT}, **TRL}
NAMES = {name: name for name in ("messages", "system", "tools", "prompt", "completion", "chosen", "rejected", "label")}
MESSAGES = Layout(LAYOUTS["messages"], {**NAMES, "chat_template_kwargs": "chat_template_kwargs"})


def thinks(thought: str, words: str, **more: Any) -> dict[str, Any]:
    return {**assistant(words), "reasoning_content": thought, **more}


KINDS = {
    "plain": [user("one"), assistant("first"), user("two"), assistant("second"), user("three"), assistant("third")],
    "system": [system("Be brief."), user("one"), assistant("first"), user("two"), assistant("second")],
    "thoughts": [user("one"), thinks("add it", "first"), user("two"), thinks("add more", "second")],
    "words": [user("one"), assistant("<think>\nadd it\n</think>\n\nfirst"), user("two"), assistant("second")],
    "calls": [*USES_TOOL, user("Thanks."), assistant("Welcome.")],
    "empty": [user("one"), assistant(""), user("two"), assistant("second")],
}


def document_of(template: ChatTemplate, messages: list[Any], targets: Any = "assistant", **row: Any) -> dict[str, Any]:
    tokens = tokenizer_for(template)
    encoder = Encoder(tokens, targets=targets, next_turn=next_turn_of(tokens))
    return in_lists(encoder.documents([{"messages": messages, **row}], MESSAGES)[0])


def samples_of(document: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    edges = pairwise([0, *(document.get("ends") or [document["length"]])])
    return [(document["input_ids"][a:b], document["targets"][a:b]) for a, b in edges]


def shown(template: ChatTemplate, messages: list[Any], **row: Any) -> list[tuple[str, str]]:
    """What is given and what is written, as text, of each sample with one answer."""
    document, parts = document_of(template, messages, **row), []
    assert document["problem"] is None, document["problem"]
    for ids, targets in samples_of(document):
        start = targets.index(True)
        parts.append((tokenizer_for(template).decode(ids[:start]), tokenizer_for(template).decode(ids[start:])))
    return parts


def asked(template: ChatTemplate, messages: list[Any], tools: Any) -> list[int]:
    """The tokens that a server gives the model, with thoughts under each name and words as the template reads them."""
    given = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
    if template.name == "magistral":
        part = {"type": "thinking", "closed": True}
        given = [
            {
                "role": m["role"],
                "content": [{**part, "thinking": m["thinking"]}, {"type": "text", "text": m["content"]}],
            }
            if "thinking" in m
            else m
            for m in given
        ]
    if template.name.startswith(("trl idefics", "trl smolvlm", "trl llava")):
        given = [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in given]
    found: Any = tokenizer_for(template).apply_chat_template(given, tools=tools, add_generation_prompt=True)
    return list(found["input_ids"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_is_what_a_model_writes_after_what_it_is_given(name: str) -> None:
    template = TEMPLATES[name]
    for kind, messages in KINDS.items():
        tools = TOOLS if kind == "calls" else None
        document = document_of(template, messages, tools=tools)
        if document["problem"] is not None:
            assert "cannot be located" not in document["problem"]
            continue
        samples, answers = samples_of(document), [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        apart = bool(document.get("ends"))
        assert len(samples) == (len(answers) if apart else 1)
        for number, i in enumerate(answers):
            ids, targets = samples[number if apart else 0]
            prompt = asked(template, messages[:i], tools)
            assert ids[: len(prompt)] == prompt, (kind, i)
            assert not targets[len(prompt) - 1], (kind, i)
            end = next((k for k in range(len(prompt), len(ids)) if not targets[k]), len(ids))
            assert end > len(prompt), (kind, i)
            if next_turn_of(tokenizer_for(template)):  # GLM ends an answer with what begins the next turn
                assert ids[end - 1] in turn_ends(tokenizer_for(template)), (kind, i)
            if apart:
                assert targets == [False] * len(prompt) + [True] * (len(ids) - len(prompt)), (kind, i)
            says_it(template, ids[len(prompt) : end], messages[i], str(document["note"]), f"{kind} {i}")


def says_it(template: ChatTemplate, ids: list[int], message: dict[str, Any], note: str, where: str) -> None:
    """Whether what is learned says what the message says; what it does not is noted."""
    text = tokenizer_for(template).decode(ids)
    thought, _, words = (message["content"] or "").rpartition("</think>")
    assert words.strip() in text or "words of the assistant" in note, where
    assert thought.removeprefix("<think>").strip() in text or "<think>" in note, where
    assert message.get("reasoning_content", "") in text or "reasoning_content" in note, where
    assert not re.match(r"\s*(<think>)?\s*</think>", text) or "an empty thought" in note, where
    assert all(call["function"]["name"] in text for call in message.get("tool_calls") or ()), where


BOS, USER, ASSISTANT, END = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
SUM = "17 times 3 is 51."
OPENS = replace(
    CHATML,
    name="opens",
    template=CHATML.template.replace("<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>\\n'"),
)
CLOSES = replace(OPENS, name="closes", template=OPENS.template.replace("<think>\\n'", "</think>'"))
OWN_CLOSE = replace(
    CHATML,
    name="closes in its own form",
    template=CHATML.template.replace("|>assistant\\n'", "|>assistant\\n<think:open></think:open>'").replace(
        "message['content']",
        "('<think:open>' + message.thought + '</think:open>' if message.thought else '') + message['content']".replace(
            "thought", "reasoning_content"
        ),
    ),
)
NEMOTRON, QWEN_3_THINKS = TRL["trl nemotron_3_nano"], TRL["trl qwen3"]
ROWS: dict[str, tuple[ChatTemplate, dict[str, Any], str]] = {
    "R1, its own form": (DEEPSEEK_R1, assistant(f"<think>\n{SUM}\n</think>\n\n51"), f"{SUM}\n</think>\n\n51{END}"),
    "R1, no lines": (DEEPSEEK_R1, assistant(f"<think>{SUM}</think>51"), f"{SUM}\n</think>\n\n51{END}"),
    "R1, as toolkit sample writes": (DEEPSEEK_R1, assistant(f"{SUM}\n</think>\n\n51"), f"{SUM}\n</think>\n\n51{END}"),
    "R1, a field": (DEEPSEEK_R1, thinks(SUM, "51"), f"{SUM}\n</think>\n\n51{END}"),
    "R1, plain": (DEEPSEEK_R1, assistant("51"), f"\n</think>\n\n51{END}"),
    "verbatim, its own form": (OPENS, assistant(f"<think>\n{SUM}\n</think>\n\n51"), f"{SUM}\n</think>\n\n51<|im_end|>"),
    "verbatim, sampled": (OPENS, assistant(f"{SUM}\n</think>\n\n51"), f"{SUM}\n</think>\n\n51<|im_end|>"),
    "Nemotron 3, plain": (NEMOTRON, assistant("51"), "</think>51<|im_end|>"),
    "MiniMax M2, a call without thoughts": (
        MINIMAX_M2,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        "\n</think>\n\n\n<minimax:tool_call>\n"
        '<invoke name="get_weather">{"city": "Paris"}</invoke>\n</minimax:tool_call>[e~[',
    ),
    "Gemma 4, whose prompt closes thoughts": (GEMMA_4, assistant("51"), "51<turn|>"),
    "a prompt that closes alone": (CLOSES, assistant("51"), "51<|im_end|>"),
    "a prompt that closes in its own form": (OWN_CLOSE, assistant("51"), "51<|im_end|>"),
    "GLM, an empty answer": (GLM_45, assistant(""), "\n<think></think><|user|>"),
}


@pytest.mark.parametrize("name", ROWS)
def test_an_answer_after_a_prompt_of_its_own(name: str) -> None:
    template, answer, written = ROWS[name]
    [(prompt, found)] = shown(template, [user("17 times 3?"), answer])
    assert prompt == prompt_of(tokenizer_for(template), [user("17 times 3?")])
    assert found.removesuffix("\n") == written


@pytest.mark.parametrize("targets", ["assistant", "last_turn", "each_turn"])
def test_an_empty_thought_is_learned_if_inference_does_not_write_it_and_counted(targets: str, tmp_path: Path) -> None:
    """Qwen 3, which is asked with thinking by default; a row with a thought has none that is empty."""
    asked: list[Any] = [user("17 times 3?")]
    row: dict[str, Any] = {"messages": [*asked, assistant("51")]}
    for arguments, empty, count in (
        ({"enable_thinking": True}, "<think>\n\n</think>\n\n", 1),
        ({"enable_thinking": False}, "", 0),
    ):
        row["chat_template_kwargs"] = arguments
        [(prompt, written)] = shown(QWEN_3_THINKS, **row, targets=targets)
        assert prompt == prompt_of(tokenizer_for(QWEN_3_THINKS), asked, arguments=arguments)
        assert written.removesuffix("\n") == f"{empty}51<|im_end|>"
        rows = [row, {"messages": [*asked, thinks("b", "c")]}]
        report = built(tmp_path, QWEN_3_THINKS, rows, targets=targets).report
        told = {what: found.count for what, found in report.train.noted.items() if "an empty thought" in what}
        assert list(told.values()) == [count] * count
        assert sum("1 row: an empty thought" in warning for warning in report.warnings) == count


def test_mistral_with_a_thought_in_the_words_and_a_system_prompt_in_the_last_turn() -> None:
    words = "<think>add</think>51"
    [(prompt, written)] = shown(MISTRAL_V3, [system("Be brief."), user("17 times 3?"), assistant(words)])
    assert "Be brief.\n\n17 times 3?" in prompt
    assert written.strip() == f"{words}</s>"


REFUSED = {
    "thoughts after a prompt that closes them": (
        TRL["trl qwen3_5_nothink"],
        [user("a"), thinks("b", "c")],
        "enable_thinking: true",
    ),
    "thoughts after a form of its own": (OWN_CLOSE, [user("a"), thinks("b", "c")], "closes them before it"),
    "a history that changes": (
        replace(CHATML, template="{{ messages | length }}" + CHATML.template),
        [user("a"), assistant("b")],
        "what comes before an answer otherwise once the answer follows",
    ),
    "a call that is left out": (
        CHATML,
        [user("a"), {**assistant("b"), "tool_calls": [CALL]}],
        "leaves out calls of tools",
    ),
    "nothing is asked": (CHATML, [user("a"), {**assistant("b"), "weight": 0}], "has weight 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_learned_is_refused_in_the_words_of_its_cause(name: str) -> None:
    template, messages, problem = REFUSED[name]
    assert problem in document_of(template, messages)["problem"]


def test_each_answer_has_its_own_thoughts_and_not_those_of_earlier_ones() -> None:
    """Qwen 3 leaves out the thoughts of earlier turns, by hand; last_turn has one sample of them."""
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    first = turn.format("one")
    second = f"{first}first<|im_end|>\n{turn.format('two')}"
    learned = ["<think>\nadd it\n</think>\n\nfirst<|im_end|>", "<think>\nadd more\n</think>\n\nsecond<|im_end|>"]
    inside = [
        {"role": m["role"], "content": f"<think>\n{m['reasoning_content']}\n</think>\n\n{m['content']}"} if i % 2 else m
        for i, m in enumerate(KINDS["thoughts"])
    ]
    assert shown(QWEN_3, inside) == [(first, learned[0]), (second, learned[1])]
    assert [text for text, _ in shown(QWEN_3, inside, targets="last_turn")] == [second]


def of_rules(rules: dict[str, Any], template: ChatTemplate) -> Any:
    changed = Tokenizer.from_str(json.dumps(rules))
    tokens = PreTrainedTokenizerFast(tokenizer_object=changed, bos_token=template.bos, eos_token=template.eos)
    tokens.chat_template = template.template
    return tokens


def test_line_ends_at_the_end_of_a_prompt_are_tokens_as_a_server_has_them() -> None:
    """GPT-2 splits two line ends before a word, and not at the end of a text."""
    tokens = new_tokenizer(LLAMA_31)
    rules = json.loads(tokens.backend_tokenizer.to_str())
    rules["model"]["vocab"]["ĊĊ"] = len(tokens)
    rules["model"]["merges"].append(["Ċ", "Ċ"])
    rules["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokens = of_rules(rules, LLAMA_31)
    assert len(prompt_ids(tokens, "\n\n", None)) == 1, "line ends are merged"
    messages = [user("one"), assistant("first"), user("two"), assistant("second")]
    document = in_lists(Encoder(tokens).documents([{"messages": messages}], MESSAGES)[0])
    for i, (ids, targets) in zip((1, 3), samples_of(document), strict=True):
        prompt = prompt_ids(tokens, prompt_of(tokens, messages[:i]), None)
        assert ids[: len(prompt)] == prompt
        assert targets.index(True) == len(prompt)


def test_a_mark_that_takes_the_white_space_of_an_answer_is_not_learned() -> None:
    """Phi 3's <|assistant|> takes all that follows it."""
    rules = json.loads(new_tokenizer(PHI_3).backend_tokenizer.to_str())
    for token in rules["added_tokens"]:
        token["rstrip"] = token["content"] == "<|assistant|>"
    tokens = of_rules(rules, PHI_3)
    document = in_lists(Encoder(tokens).documents([{"messages": [user("a"), assistant("  yes")]}], MESSAGES)[0])
    learned = [t for t, on in zip(document["input_ids"], document["targets"], strict=True) if on]
    assert tokens.decode(learned).startswith("yes<|end|>")


@pytest.mark.parametrize("template", [CHATML, QWEN_3, MISTRAL_V1], ids=lambda template: template.name)
def test_parts_of_a_message_are_not_learned(template: ChatTemplate) -> None:
    """In one text and in a text of each answer; Mistral's tokenizer writes a space before each text."""
    parts = [{"begin_offset": 0, "end_offset": 3, "train": False}]
    messages = [user("a"), assistant("Plain"), user("b"), {**assistant("some words"), "train_detail": parts}]
    learned = ""
    for ids, targets in samples_of(document_of(template, messages, targets="each_turn")):
        learned = tokenizer_for(template).decode([t for t, on in zip(ids, targets, strict=True) if on])
    assert "words" in learned
    assert "some" not in learned


def test_an_answer_that_nothing_comes_before() -> None:
    messages = [assistant("Hello."), user("a"), assistant("b")]
    note = "an answer that nothing comes before is not learned"
    assert document_of(CHATML, messages)["note"] is None
    assert document_of(CHATML, messages, "each_turn")["note"] == note
    assert document_of(CHATML, messages[:1])["problem"] == "nothing is asked"


SEES = {**assistant("Let me see."), "tool_calls": [CALL]}
NAMES_ALONE = CHATML.template.replace(
    "message['content']", "(message.tool_calls[0].function.name if message.tool_calls else message.content)"
)
LEFT_OUT = {
    "words next to a call": (LLAMA_31, [user("a"), SEES], "words of the assistant"),
    "words of an answer that is not learned": (
        LLAMA_31,
        [user("a"), {**SEES, "weight": 0}, USES_TOOL[2], assistant("b")],
        "words of the assistant",
    ),
    "an argument of a call": (
        replace(CHATML, template=NAMES_ALONE),
        [user("a"), {**SEES, "content": None}],
        "calls of tools",
    ),
    "a thought": (CHATML, [user("a"), thinks("b", "c")], "reasoning_content"),
    "a thought of an earlier turn": (
        QWEN_3,
        [user("a"), {**thinks("so", "c"), "weight": 0}, user("d"), assistant("e")],
        "reasoning_content",
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_whatever_is_not_in_what_is_rendered_is_counted(name: str) -> None:
    template, messages, what = LEFT_OUT[name]
    for targets in ("assistant", "last_turn", "all", "each_turn"):
        assert f"the chat template leaves out {what}" in str(document_of(template, messages, targets)["note"]), targets


@pytest.mark.parametrize("objective", ["preference", "kto", "reward"])
def test_compared_answers_stand_after_one_prompt(objective: str) -> None:
    """Thoughts in the chosen answer alone; a reward model reads what the template writes of both."""
    thought, plain = assistant("<think>\na king\n</think>\n\nso"), assistant("no")
    encoder = kind_for(objective).encodes(tokenizer_for(OPENS), "last_turn", objective)
    if objective == "kto":
        rows: list[Any] = [
            {"prompt": [user("why")], "completion": [answer], "label": True} for answer in (thought, plain)
        ]
        documents = encoder.documents(rows, Layout(LAYOUTS["judged prompt and completion"], NAMES))
        sides = [in_lists(document)["input_ids"] for document in documents]
    else:
        row = {"prompt": [user("why")], "chosen": [thought], "rejected": [plain]}
        [pair] = encoder.documents([row], Layout(LAYOUTS["chosen and rejected"], NAMES))
        ids = in_lists(pair)["input_ids"]
        sides = [ids[: pair["split"]], ids[pair["split"] :]]
    prompt = asked(OPENS, [user("why")], None)
    after = [side[: len(prompt)] == prompt for side in sides]
    assert after == [True, objective != "reward"]


def built(folder: Path, template: ChatTemplate, rows: list[dict[str, Any]], **settings: Any) -> Any:
    path = write_rows(folder / "rows.jsonl", rows)
    fields = {"train": [{"path": str(path)}], "cache_dir": str(folder / "cache"), "max_length": 64, "packing": False}
    return build.build(DataSection.model_validate(fields | settings), tokenizer_for(template), seed=0)


def test_samples_are_answers_and_the_report_says_what_they_cost(tmp_path: Path) -> None:
    rows = [{"messages": KINDS["thoughts"]}, {"messages": [user("What is it?"), assistant("It is four.")]}]
    found = built(tmp_path, QWEN_3, rows)
    expected = [ids for row in rows for ids, _ in samples_of(document_of(QWEN_3, row["messages"]))]
    assert [found.train.documents(number)[0] for number in range(len(found.train))] == expected
    report = found.report.train
    # A conversation is as long as its longest sample; the samples before it are read as well.
    assert (report.read, report.samples, report.tokens) == (2, 3, len(expected[1]) + len(expected[2]))
    assert report.repeated_tokens == len(expected[0])
    [cost] = [warning for warning in found.report.warnings if "more than once" in warning]
    assert cost.startswith(f"train: {report.repeated_tokens} tokens read more than once")
    assert "data.targets=last_turn" in cost
    streamed = built(tmp_path, QWEN_3, rows, streaming=True, shuffle=False)
    assert [streamed.train.documents(number)[0] for number in range(3)] == expected
    # Held-out rows are whole conversations.
    held = built(tmp_path, QWEN_3, rows, validation_fraction=0.5)
    assert sorted([len(held.train), len(held.validation)]) == [1, 2]


@pytest.mark.parametrize("policy", ["truncate", "split"])
def test_samples_of_a_row_are_cut_one_by_one(policy: str, tmp_path: Path) -> None:
    long = "one two three"
    messages = [user("a"), thinks(long, "first"), user("b"), thinks(long, "second")]
    whole = [ids for ids, _ in samples_of(document_of(QWEN_3, messages))]
    found = built(tmp_path, QWEN_3, [{"messages": messages}], long_rows=policy, max_length=16)
    made = [found.train.documents(number)[0] for number in range(len(found.train))]
    stride = 15 if policy == "split" else 10**6
    pieces = [ids[at : at + 16] for ids in whole for at in range(0, max(1, len(ids) - 1), stride)]
    assert [ids for ids in made if ids not in pieces] == []
    assert len(made) <= len(pieces)
    cut = sum(max(0, len(ids) - 16) for ids in whole) if policy == "truncate" else 0
    streamed = built(tmp_path, QWEN_3, [{"messages": messages}], long_rows=policy, max_length=16, streaming=True)
    assert found.report.train.long.cut_tokens == cut
    assert streamed.report.train.long.cut_tokens == cut * streamed.report.train.read, "a stream reads it again"


def test_a_developer_is_asked_as_it_is_learned() -> None:
    tokens = tokenizer_for(QWEN_3)
    learned = document_of(QWEN_3, [{"role": "developer", "content": "Be brief."}, user("a"), assistant("b")])
    prompt = prompt_of(tokens, [{"role": "developer", "content": "Be brief."}, user("a")])
    assert prompt == prompt_of(tokens, [system("Be brief."), user("a")])
    ids = prompt_ids(tokens, prompt, None)
    assert learned["input_ids"][: len(ids)] == ids


def test_keys_of_rows_change_where_a_template_needs_a_text_of_each_answer() -> None:
    keys = {t.name: Encoder(tokenizer_for(t)).key(MESSAGES) for t in (CHATML, LLAMA_31, QWEN_3, DEEPSEEK_R1)}
    plain = [["assistant", None, "causal_lm", None]]
    assert keys == {"chatml": plain, "llama 3.1": plain, "qwen 3": [*plain, "apart"], "deepseek r1": [*plain, "apart"]}
