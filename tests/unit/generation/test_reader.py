"""What a model wrote is scored as it was written, and read as the chat template of its row writes answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import CHAT_TEMPLATES, GLM_45, GPT_OSS, MAGISTRAL, QWEN_3, RECENT, tokenizer_for
from support.tiny import save_llama
from transformers import AddedToken

from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.generation.text.complete import Prompt, complete, stream
from toolkit.generation.text.evaluation import evaluate, scoring_of
from toolkit.generation.text.load import Loaded
from toolkit.generation.text.options import Sampling
from toolkit.generation.text.rows import PromptRow, read_rows
from toolkit.recipe.schema import DataSection, ModelSection

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]  # fmt: skip
ASKED = [{"role": "user", "content": "The weather in Paris?"}]
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|eom|>", "<|eot|>", "<|call|>", "<|return|>", "<turn|>", "[e~[",
    "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|tool_response>", "<|user|>", "<|observation|>",  # noqa: RUF001
)  # fmt: skip
WITHOUT_CALLS = {"mistral v1", "gemma", "phi 3", "phi 4", "chatml", "chatml with generation", "generation with end",
                 "zephyr", "deepseek r1", "gemma 3", "smollm 3"}  # fmt: skip


def calls(*arguments: dict[str, Any], number: str = "a1b2c3d4e") -> list[dict[str, Any]]:
    return [
        {"id": number, "type": "function", "function": {"name": "weather", "arguments": each}} for each in arguments
    ]


def written(tokenizer: Any, answer: dict[str, Any]) -> str:
    """What transformers writes for an answer behind the prompt, up to the end of the turn."""
    arguments = {"tools": TOOLS, "tokenize": False}
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, **arguments)
    whole = tokenizer.apply_chat_template([*ASKED, {"role": "assistant", **answer}], **arguments)
    shared = next(n for n in range(len(whole)) if prompt[: n + 1] != whole[: n + 1])
    text = whole[shared:]
    return text[: min((text.find(end) for end in ENDS if end in text), default=len(text))]


def test_a_right_call_is_right_as_each_template_writes_it() -> None:
    """Whatever the comparison; neither the order of arguments nor a number of the call counts."""
    for template in (*CHAT_TEMPLATES, *RECENT):
        if template.name in WITHOUT_CALLS:
            continue
        tokenizer = tokenizer_for(template)
        right = json.dumps({"name": "weather", "arguments": {"days": 3, "city": "Paris"}})
        row = PromptRow("f:1", "", ASKED, TOOLS, answers=(right,))
        content = "" if "v3" in template.name or template in (GLM_45, MAGISTRAL) else None
        told = [
            written(tokenizer, {"content": content, "tool_calls": calls(*arguments, number=number)})
            for arguments, number in (
                ([{"city": "Paris", "days": 3}], "a1b2c3d4e"),
                ([{"days": 3, "city": "Paris"}], "zyxwvutsr"),
                ([{"city": "Paris", "days": 4}], "a1b2c3d4e"),
                ([{"city": "Paris"}], "a1b2c3d4e"),
            )
        ]
        for how in (None, "structured"):
            score = scoring_of([row], how, "--compare", tokenizer).score
            found = [
                score(text, row) for text in (*told, f"I look. {told[0]}", told[0].replace("weather", "wether"), "")
            ]
            assert found == [1, 1, 0, 0, 1, 0, 0], (template.name, how, told)
        bare = scoring_of([row], "structured", "--compare", tokenizer).score
        assert [bare(text, row) for text in (right, f"Here: {right}", right[:-1])] == [1, 0, 0], template.name


def test_several_calls_are_right_together() -> None:
    tokenizer = tokenizer_for(QWEN_3)
    two, other = [{"city": "Paris"}, {"city": "Rome"}], [{"city": "Rome"}, {"city": "Rome"}]
    answer = json.dumps([{"name": "weather", "arguments": each} for each in two])
    row = PromptRow("f:1", "", ASKED, TOOLS, answers=(answer,))
    score = scoring_of([row], None, "--compare", tokenizer).score
    texts = [written(tokenizer, {"content": "", "tool_calls": calls(*each)}) for each in (two, other, two[:1], two[1:])]
    assert [score(text, row) for text in texts] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("template", "thinks"),
    [
        (QWEN_3, "<think>\nIt is\n</think>\n\nFour"),
        (MAGISTRAL, "[THINK]It is[/THINK]Four"),
        (GPT_OSS, "<|channel|>analysis<|message|>It is<|end|><|start|>assistant<|channel|>final<|message|>Four"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_stands_after_a_thought_is_compared(template: Any, thinks: str) -> None:
    tokenizer = tokenizer_for(template)
    for answers in (("four",), ("<think>\nother\n</think>\n\nfour",) if template is QWEN_3 else ("four",)):
        row = PromptRow("f:1", "", ASKED, answers=answers)
        score = scoring_of([row], None, "--compare", tokenizer).score
        assert [score(text, row) for text in (thinks, "Four", thinks + " five", "five")] == [1, 1, 0, 0]
    whole = scoring_of([row], r"strict=(?s)^(.*)$", "--compare", tokenizer).score
    assert whole(thinks, PromptRow("f:1", "", ASKED, answers=(thinks,))) == 1, "an expression sees the whole text"


def test_training_rows_are_read_as_they_are_trained_on(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    said, in_text = (
        {"role": "assistant", "content": None},
        [{"function": {"name": "weather", "arguments": '{"city": "Paris"}'}}],
    )
    rows: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"messages": [*ASKED, {"role": "assistant", "content": parts}]}, ("Yes.",)),
        ({"messages": [*ASKED, {**said, "tool_calls": calls({"city": "Paris"})}]}, (json.dumps(call),)),
        ({"messages": [*ASKED, {**said, "tool_calls": in_text * 2}]}, (json.dumps([call] * 2),)),
        ({"messages": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "Yes."}]}, ("Yes.",)),
        ({"messages": [*ASKED, {"role": "assistant", "content": "thought", "channel": "analysis"},
                       {"role": "assistant", "content": "Yes.", "channel": "final"}]}, ("Yes.",)),
        ({"prompt": "?", "completion": [{"role": "assistant", "content": parts}]}, ("Yes.",)),
        ({"prompt": "?", "chosen": [{"role": "assistant", "content": "Yes."}], "rejected": []}, ("Yes.",)),
        ({"prompt": "?", "answer": parts}, ("Yes.",)),
        ({"prompt": "?", "answer": {"role": "assistant", "tool_calls": calls({"city": "Paris"})}}, (json.dumps(call),)),
        ({"prompt": "?", "answer": [4, "four"]}, ("4", "four")),
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row, _ in rows))
    assert [row.answers for row in read_rows(file, "--eval", True)] == [answers for _, answers in rows]


class Writes:
    """A model that writes given tokens behind each prompt."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.device, self.dtype = torch.tensor([ids]), torch.device("cpu"), torch.float32

    def generate(self, input_ids: torch.Tensor, streamer: Any = None, **_settings: Any) -> torch.Tensor:
        if streamer is not None:
            streamer.put(input_ids)
            for token in self.ids[0, : self.ids.shape[1] // 2 + 2]:  # it ends at the stop
                streamer.put(token[None])
            streamer.end()
        return torch.cat([input_ids, self.ids], dim=1)


def test_all_that_a_model_writes_is_scored_and_shown_but_its_end_padding_and_beginning(tmp_path: Path) -> None:
    """Tokens of `model.add_tokens`, special ones of a base, and marks of thoughts, channels and calls."""
    save_llama(tmp_path, ["a red king"], tied=True)
    asked = ["<ans>", "</ans>", {"content": "<s>", "special": True}]
    section = ModelSection.model_validate({"name_or_path": str(tmp_path), "add_tokens": asked})
    added = tokenizers.load(section, DataSection.model_validate({"train": "rows.jsonl", "max_length": 8}))
    added.bos_token = "<s>"
    of_base = [AddedToken(text, special=True, normalized=False) for text in ("[THINK]", "[/THINK]", "<|python_tag|>")]
    added.add_tokens(of_base, special_tokens=True)
    end, pad = added.eos_token_id, added.pad_token_id
    marked = ["<ans>red</ans>", "[THINK]red[/THINK]king", "<|python_tag|>red", "<ans></ans>", "a<ans>"]
    for text in (*marked, "red", " red", ""):
        ids = added(text, add_special_tokens=False)["input_ids"]
        loaded = Loaded("m", Writes([added.bos_token_id, *ids, pad, end, *ids]), added, frozenset([end]), None)
        [found] = complete(loaded, [Prompt([1, 2], [])], Sampling(20, 0.0))
        row = PromptRow("f:1", "", "?", answers=(text,))
        assert (found.text, evaluate([row], [found], scoring_of([row], "strict", "c", added)).exact) == (text, 1)
        pieces: list[str] = []
        assert stream(loaded, Prompt([1, 2], []), Sampling(20, 0.0), pieces.append) == "".join(pieces) == text
    spanish = added.convert_tokens_to_ids("[THINK]")  # as mBART's language begins a target
    target = Loaded("m", Writes([spanish, *added("red")["input_ids"], end]), added, frozenset([end]), None, True)
    shown: list[str] = []
    assert complete(target, [Prompt([1], [])], Sampling(20, 0.0))[0].text == "red"
    assert stream(target, Prompt([1], []), Sampling(20, 0.0), shown.append) == "".join(shown) == "red"
    added.pad_token = "a"  # a word, as the "!" that some tokenizers pad with
    inside = added("kan<s>k", add_special_tokens=False)["input_ids"]
    assert tokenizers.decode(added, [added.pad_token_id, *inside, added.pad_token_id]) == "kan<s>k"


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_an_answer_is_right_as_its_tokens_write_it(scheme: str) -> None:
    """SentencePiece's put a space after a token of `model.add_tokens`, with a chat template and without one."""
    tokenizer = tokenizer_for(replace(GLM_45, metaspace=scheme))
    tokenizer.add_tokens([AddedToken("<ans>", normalized=False), AddedToken("</ans>", normalized=False)])
    for tokenizer.chat_template in (GLM_45.template, None):
        for answer in ("<ans>four</ans>", "the moon", "<ans>the moon</ans>", '{"city": 1}'):
            text = tokenizers.decode(tokenizer, tokenizer(answer, add_special_tokens=False)["input_ids"])
            row = PromptRow("f:1", "", ASKED, answers=(answer,))
            for how in (None, "strict", *(["structured"] if "{" in answer else [])):
                score = scoring_of([row], how, "--compare", tokenizer).score
                assert [score(each, row) for each in (text, answer, f"{text}s", "")] == [1, 1, 0, 0], (answer, how)


def test_added_tokens_are_ordinary_unless_asked_and_those_of_the_base_stay(tmp_path: Path) -> None:
    save_llama(tmp_path, ["a red king"], tied=True)
    section = {
        "name_or_path": str(tmp_path),
        "add_tokens": ["<ans>", "red", {"content": "<end>", "special": True}, "<|pad|>"],
    }
    plain = tokenizers.load(ModelSection(name_or_path=str(tmp_path)), DataSection(train="r", max_length=8))
    added = tokenizers.load(ModelSection.model_validate(section), DataSection(train="r", max_length=8))
    special = {token.content: token.special for token in added.added_tokens_decoder.values()}
    assert (special["<ans>"], special["<end>"]) == (False, True)
    before = {token.content: token.special for token in plain.added_tokens_decoder.values()}
    assert {name: special[name] for name in before} == before
    assert set(added.all_special_tokens) - set(plain.all_special_tokens) == {"<end>"}
    assert (
        added.decode(added("<ans>king<end>", add_special_tokens=False)["input_ids"], skip_special_tokens=True)
        == "<ans>king"
    )
