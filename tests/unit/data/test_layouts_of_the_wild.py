"""Rows as well-known data sets and tools write them: what is learned of each, and what is said of every other key."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from support.chat_templates import CHATML, QWEN_3, ChatTemplate, of_trl, tokenizer_for

from toolkit.data import build
from toolkit.errors import DataError
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection

QWEN_3_OWN = of_trl("qwen3", QWEN_3)
ASKED = {"role": "user", "content": "why"}


def said(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


@dataclass(frozen=True)
class Wild:
    """A row, where such rows come from, and what is made of it.

    Attributes:
        learned: the targets, in order; None if the row is refused.
        noted: what the report says of its keys.
        told: words of the error.
    """

    source: str
    row: dict[str, Any]
    learned: str | None = None
    noted: tuple[str, ...] = ()
    told: str = ""
    objective: str = "causal_lm"
    columns: dict[str, str] = field(default_factory=dict)
    template: ChatTemplate = CHATML


EMPTY = "<think>\n\n</think>\n\n"
LOOKED = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call><|im_end|>'
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
WILD = {
    "chat": Wild(
        "OpenAI, supervised fine-tuning, chat format with weights",
        {
            "messages": [
                {"role": "system", "content": "be short"},
                ASKED,
                said("bad", weight=0),
                ASKED,
                said("good", weight=1),
            ]
        },
        noted=("a message is not learned (weight: 0)",),
        learned="good<|im_end|>",
    ),
    "tools": Wild(
        "OpenAI, supervised fine-tuning, tool calling",
        {
            "messages": [ASKED, {"role": "assistant", "tool_calls": [{"id": "call_1", **CALL}]}],
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
            "parallel_tool_calls": False,
        },
        template=QWEN_3_OWN,
        noted=("column parallel_tool_calls is not read",),
        learned="<think>\n\n</think>\n\n" + LOOKED,
    ),
    "sharegpt": Wild(
        "lm-sys/FastChat, ShareGPT export",
        {"id": "q_0", "conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]},
        noted=("column id is not read",),
        learned="so<|im_end|>",
    ),
    "alpaca": Wild(
        "tatsu-lab/alpaca",
        {"instruction": "why", "input": "", "output": "so", "text": "Below is an instruction ... so"},
        noted=("column text is not read",),
        learned="so<|im_end|>",
    ),
    "dolly": Wild(
        "databricks/databricks-dolly-15k",
        {"instruction": "why", "context": "here", "response": "so", "category": "open_qa"},
        told="for example data.columns.output=response data.columns.input=context",
    ),
    "dolly, named": Wild(
        "the same, with data.columns",
        {"instruction": "why", "context": "here", "response": "so", "category": "open_qa"},
        columns={"instruction": "instruction", "input": "context", "output": "response"},
        noted=("column category is not read",),
        learned="so<|im_end|>",
    ),
    "orca": Wild(
        "Open-Orca/OpenOrca",
        {"id": "niv.1", "system_prompt": "", "question": "why", "response": "so"},
        told="data.columns.instruction=question data.columns.output=response data.columns.system=system_prompt",
    ),
    "ultrachat": Wild(
        "HuggingFaceH4/ultrachat_200k",
        {"prompt": "why", "prompt_id": "f0", "messages": [ASKED, said("so")]},
        noted=("column prompt is not read", "column prompt_id is not read"),
        learned="so<|im_end|>",
    ),
    "no robots": Wild(
        "HuggingFaceH4/no_robots",
        {"prompt": "why", "prompt_id": "f0", "messages": [ASKED, said("so")], "category": "Chat"},
        noted=("column category is not read", "column prompt is not read", "column prompt_id is not read"),
        learned="so<|im_end|>",
    ),
    "ultrafeedback": Wild(
        "HuggingFaceH4/ultrafeedback_binarized",
        {
            "prompt": "why",
            "prompt_id": "f0",
            "chosen": [ASKED, said("so")],
            "rejected": [ASKED, said("no")],
            "messages": [ASKED, said("so")],
            "score_chosen": 8.0,
            "score_rejected": 3.0,
        },
        objective="preference",
        noted=(
            "column messages is not read",
            "column prompt_id is not read",
            "column score_chosen is not read",
            "column score_rejected is not read",
        ),
        learned="so<|im_end|>no<|im_end|>",
    ),
    "hh": Wild(
        "Anthropic/hh-rlhf",
        {"chosen": "\n\nHuman: why\n\nAssistant: so", "rejected": "\n\nHuman: why\n\nAssistant: no"},
        objective="preference",
        learned="so<|im_end|>no<|im_end|>",
    ),
    "axolotl": Wild(
        "axolotl, chat_template with train and train_detail",
        {"messages": [ASKED, said("bad", train=False), ASKED, said("good", train=True)]},
        noted=("a message is not learned (train: false)",),
        learned="good<|im_end|>",
    ),
    "segments": Wild(
        "axolotl, input_output",
        {"segments": [{"label": True, "text": "<s>why\n"}, {"label": True, "text": "so</s>"}]},
        told="matches no known column layout; it has segments",
    ),
    "swift": Wild(
        "ms-swift, messages with loss and channel",
        {"messages": [ASKED, said("bad", loss=False), ASKED, said("good")], "channel": "math"},
        noted=("a message is not learned (loss: false)", "column channel is not read"),
        learned="good<|im_end|>",
    ),
    "swift, older": Wild(
        "ms-swift, query and response",
        {"query": "why", "response": "so", "history": [["a", "b"]]},
        told="for example data.columns.instruction=query data.columns.output=response",
    ),
    "factory": Wild(
        "LLaMA-Factory, alpaca format",
        {"instruction": "why", "input": "here", "output": "so", "system": "be short", "history": [["a", "b"]]},
        learned="b<|im_end|>so<|im_end|>",
    ),
    "factory, tools": Wild(
        "LLaMA-Factory, sharegpt format with function_call and observation",
        {
            "conversations": [
                {"from": "human", "value": "why"},
                {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "it"}}'},
                {"from": "observation", "value": "it is"},
                {"from": "gpt", "value": "so"},
            ],
            "system": "be short",
            "tools": '[{"name": "look", "description": "", "parameters": {"type": "object"}}]',
        },
        template=QWEN_3_OWN,
        learned=f"{EMPTY}{LOOKED}{EMPTY}so<|im_end|>",
    ),
    "harmony": Wild(
        "openai/gpt-oss, multilingual thinking",
        {
            "reasoning_language": "English",
            "developer": "be short",
            "user": "why",
            "analysis": "hm",
            "final": "so",
            "messages": [ASKED, said("so", thinking="hm")],
        },
        template=QWEN_3_OWN,
        noted=(
            "column analysis is not read",
            "column developer is not read",
            "column final is not read",
            "column reasoning_language is not read",
            "column user is not read",
        ),
        learned="<think>\nhm\n</think>\n\nso<|im_end|>",
    ),
    "llava": Wild(
        "liuhaotian/LLaVA-Instruct-150K",
        {
            "id": "1",
            "image": "coco/1.jpg",
            "conversations": [{"from": "human", "value": "<image>\nwhy"}, {"from": "gpt", "value": "so"}],
        },
        told="the row has an image (image), and the model's folder has no image processor; name a model",
    ),
    "gsm8k": Wild(
        "openai/gsm8k",
        {"question": "why", "answer": "so\n#### 2"},
        told="for example data.columns.prompt=question data.columns.completion=answer",
    ),
    "metamath": Wild(
        "meta-math/MetaMathQA",
        {"type": "GSM_Rephrased", "query": "why", "response": "so"},
        told="for example data.columns.prompt=query data.columns.completion=response",
    ),
    "smoltalk": Wild(
        "HuggingFaceTB/smoltalk2",
        {"messages": [ASKED, said("so")], "chat_template_kwargs": {"enable_thinking": False}, "source": "magpie"},
        template=QWEN_3_OWN,
        noted=("chat_template_kwargs of the row: enable_thinking=false", "column source is not read"),
        learned="so<|im_end|>",
    ),
    "thoughts": Wild(
        "open-thoughts/OpenThoughts-114k",
        {
            "system": "be short",
            "conversations": [{"from": "user", "value": "why"}, {"from": "assistant", "value": "<think>hm</think> so"}],
        },
        learned="<think>hm</think> so<|im_end|>",
    ),
    "judged": Wild(
        "TRL, unpaired preference",
        {"prompt": "why", "completion": "no", "label": False},
        told="rows are judged good or bad one by one (label: False), as for KTO; set objective.kind=kto",
    ),
    "web text": Wild(
        "HuggingFaceFW/fineweb",
        {"text": "why so", "id": "<urn:1>", "dump": "CC-MAIN", "url": "http://a", "token_count": 2},
        noted=(
            "column dump is not read",
            "column id is not read",
            "column token_count is not read",
            "column url is not read",
        ),
        learned="hy so<|im_end|>",
    ),
    "xlam": Wild(
        "Salesforce/xlam-function-calling-60k",
        {"id": 0, "query": "why", "answers": '[{"name": "look", "arguments": {}}]', "tools": "[]"},
        told="matches no known column layout; it has answers, id, query, tools",
    ),
}


@lru_cache
def tokenizer(template: ChatTemplate) -> Any:
    return tokenizer_for(template)


def outcome(wild: Wild, folder: Path) -> tuple[str | None, list[str], str]:
    """What is learned, what is noted, and why nothing is."""
    (folder / "rows.jsonl").write_text(json.dumps(wild.row) + "\n")
    data = {"train": str(folder / "rows.jsonl"), "max_length": 512, "cache_dir": str(folder), "columns": wild.columns}
    section, tokens = ObjectiveSection(kind=wild.objective), tokenizer(wild.template)
    try:
        made = build.build(DataSection.model_validate({**data, "packing": False}), tokens, 0, section)
    except DataError as error:
        return None, [], str(error)
    labels = torch.cat([made.train.batch([n])["labels"].flatten() for n in range(len(made.train))])
    return tokens.decode(labels[labels != -100]), sorted(made.report.to_dict()["train"].get("noted", {})), ""


def test_rows_of_the_wild(tmp_path: Path) -> None:
    for name, wild in WILD.items():
        learned, noted, told = outcome(wild, tmp_path)
        assert (learned, tuple(noted)) == (wild.learned, wild.noted), name
        assert wild.told in told, name
        assert bool(told) == (learned is None), "what is refused is told"
        assert (wild.learned is None) == bool(wild.told), name
