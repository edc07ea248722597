"""Chat templates as well-known models have them, and a small tokenizer for each.

Those of 2025 and 2026 are written afresh: what decides where an answer begins and ends, no more.
"""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with the full-width bar)

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ChatTemplate:
    """A template with its model's special tokens. `metaspace` for a SentencePiece-like tokenizer.

    `system` and `tools` say whether the template takes them.
    """

    name: str
    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    system: bool = True
    tools: bool = False
    metaspace: str | None = None


TEXTS = [
    "the king and the queen of hearts walked by the river at night while the moon was high",
    "user and assistant and system write the weather in Paris: a tool gives it, the answer is four",
    '{"name": "get_weather", "arguments": {"city": "Paris"}} function instruction response',
] * 3


def tokenizer_for(template: ChatTemplate) -> PreTrainedTokenizerFast:
    """A tokenizer of some hundred entries with the template and its special tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(template.metaspace, template.special)),
        bos_token=template.bos,
        eos_token=template.eos,
    )
    tokenizer.chat_template = template.template
    return tokenizer


@lru_cache
def _trained(metaspace: str | None, special: tuple[str, ...]) -> str:
    """The tokenizer as JSON."""
    tokenizer = Tokenizer(BPE())
    if metaspace is None:
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme=metaspace)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = []
    trainer = BpeTrainer(vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    rules = tokenizer.to_str()
    return rules if metaspace is None else _with_bytes(rules)


def _with_bytes(rules: str) -> str:
    """Falls back to bytes, of which there are 256 more entries, as SentencePiece does."""
    values: dict[str, Any] = json.loads(rules)
    model = values["model"]
    for byte in range(256):
        model["vocab"][f"<0x{byte:02X}>"] = len(model["vocab"])
    model["byte_fallback"] = True
    return json.dumps(values)


def _read(name: str, special: str, eos: str, **more: Any) -> ChatTemplate:
    """The template of a file in templates/; its special tokens are separated by spaces."""
    path = Path(__file__).parent / "templates" / f"{name.replace(' ', '-')}.jinja"
    return ChatTemplate(name, path.read_text(encoding="utf-8").removesuffix("\n"), tuple(special.split()), eos, **more)


_CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
    "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
_DEEPSEEK_ENDS: dict[str, Any] = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>"}
_GEMMA: dict[str, Any] = {"bos": "<bos>", "eos": "<eos>", "metaspace": "never"}
_SENTENCE: dict[str, Any] = {"bos": "<s>", "eos": "</s>"}

CHATML = _read("chatml", _CHATML, eos="<|im_end|>")
CHATML_GENERATION = _read("chatml with generation", _CHATML, eos="<|im_end|>")
GENERATION_WITH_END = _read("generation with end", _CHATML, eos="<|im_end|>")
LLAMA_31 = _read(
    "llama 3.1",
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>",
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    tools=True,
)
QWEN_25 = _read("qwen 2.5", _CHATML, eos="<|im_end|>", tools=True)
QWEN_3 = _read("qwen 3", _CHATML, eos="<|im_end|>", tools=True)
MISTRAL_V1 = _read("mistral v1", "<unk> <s> </s>", **_SENTENCE, metaspace="first")
MISTRAL_V3 = _read(
    "mistral v3",
    "<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
    **_SENTENCE,
    tools=True,
    metaspace="always",
)
MISTRAL_LAST = replace(
    MISTRAL_V3,
    name="mistral v3, system text in the last user turn",
    template=MISTRAL_V3.template.replace("if loop.last and system", "if message == user_messages[-1] and system"),
)
GEMMA = _read("gemma", "<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn>", **_GEMMA, system=False)
PHI_3 = _read("phi 3", "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>", eos="<|endoftext|>")
PHI_4 = _read("phi 4", "<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>", bos="<|endoftext|>", eos="<|im_end|>")
ZEPHYR = _read("zephyr", "<unk> <s> </s>", **_SENTENCE, metaspace="always")
DEEPSEEK_V3 = _read("deepseek v3", _DEEPSEEK, **_DEEPSEEK_ENDS, tools=True)
DEEPSEEK_R1 = _read("deepseek r1", _DEEPSEEK, **_DEEPSEEK_ENDS)
GPT_OSS = _read(
    "gpt-oss",
    "<|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>",
    eos="<|return|>",
    tools=True,
)
QWEN_35 = _read("qwen 3.5", _CHATML, eos="<|im_end|>", tools=True)
DEEPSEEK_V31 = _read("deepseek v3.1", _DEEPSEEK, **_DEEPSEEK_ENDS, tools=True)
GEMMA_3 = _read("gemma 3", "<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn>", **_GEMMA)
GEMMA_4 = _read(
    "gemma 4",
    "<pad> <eos> <bos> <unk> <|turn> <turn|> <|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> "
    "<tool_response|>",
    **_GEMMA,
    tools=True,
)
LLAMA_4 = _read(
    "llama 4",
    "<|begin_of_text|> <|end_of_text|> <|header_start|> <|header_end|> <|eot|> <|eom|>",
    bos="<|begin_of_text|>",
    eos="<|eot|>",
    tools=True,
)
MAGISTRAL = _read(
    "magistral",
    "<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] [ARGS] [TOOL_RESULTS] [/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] "
    "[THINK] [/THINK]",
    **_SENTENCE,
    tools=True,
)
GLM_45 = _read(
    "glm 4.5",
    "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
    eos="<|endoftext|>",
    tools=True,
)
KIMI_K2 = _read(
    "kimi k2",
    "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
    eos="<|im_end|>",
    tools=True,
)
GRANITE_4 = _read("granite 4", "<|end_of_text|> <|start_of_role|> <|end_of_role|>", eos="<|end_of_text|>", tools=True)
SMOLLM_3 = _read("smollm 3", "<|end_of_text|> <|im_start|> <|im_end|>", eos="<|im_end|>")
MINIMAX_M2 = _read("minimax m2", "]~!b[ ]~b] [e~[", eos="[e~[", tools=True)

# fmt: off
CHAT_TEMPLATES = (
    LLAMA_31, QWEN_25, QWEN_3, MISTRAL_V1, MISTRAL_V3, MISTRAL_LAST, GEMMA, PHI_3, PHI_4, CHATML, CHATML_GENERATION,
    GENERATION_WITH_END, ZEPHYR, DEEPSEEK_V3, DEEPSEEK_R1,
)
RECENT = (
    GPT_OSS, QWEN_35, DEEPSEEK_V31, GEMMA_3, GEMMA_4, LLAMA_4, MAGISTRAL, GLM_45, KIMI_K2, GRANITE_4, SMOLLM_3,
    MINIMAX_M2,
)
# fmt: on


_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]+[|｜]>|</?s>|<(?:bos|eos|start_of_turn|end_of_turn|turn\||\|turn|channel\||\|channel)>"
    r"|<end_of_utterance>|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS)\]"
)


def all_of_trl() -> list[ChatTemplate]:
    """Every template that TRL is installed with, and the special tokens that it names."""
    found = []
    for file in sorted(files("trl").joinpath("chat_templates").iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".jinja"):
            continue
        text = file.read_text(encoding="utf-8")
        special = tuple(sorted(set(_SPECIAL.findall(text)))) or ("<|im_start|>", "<|im_end|>")
        eos = next((token for token in special if re.search("end|eot|eos|/s", token)), special[0])
        bos = next((token for token in special if re.search("begin|bos|<s>", token)), None)
        found.append(ChatTemplate(f"trl {file.name.removesuffix('.jinja')}", text, special, eos, bos, tools=True))
    return found


def of_trl(name: str, like: ChatTemplate) -> ChatTemplate:
    """A template that TRL is installed with."""
    text = files("trl").joinpath("chat_templates", f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(name, text, like.special, like.eos, like.bos)
