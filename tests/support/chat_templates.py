"""Chat templates as well-known models have them, and a small tokenizer for each."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with the full-width bar)

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
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


CHATML = ChatTemplate(
    name="chatml",
    template="""\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
)

CHATML_GENERATION = ChatTemplate(
    name="chatml with generation",
    template="""\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content }}{% endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
)

GENERATION_WITH_END = ChatTemplate(
    name="generation with end",
    template="""\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content + '<|im_end|>' + '\\n' }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
)

LLAMA_31 = ChatTemplate(
    name="llama 3.1",
    template="""\
{{- bos_token }}
{%- set date_string = date_string if date_string is defined else "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Given the following functions, please respond with a JSON for a function call " }}
    {{- "with its proper arguments that best answers the given prompt.\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) + "\\n\\n" }}{% endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    special=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    tools=True,
)

_QWEN_TOOLS = """\
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{% endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments " }}
    {{- "within <tool_call></tool_call> XML tags:\\n<tool_call>\\n" }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
"""

_QWEN_RESULT = """\
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{% endif %}
"""

QWEN_25 = ChatTemplate(
    name="qwen 2.5",
    template="""\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + "\\n\\n" }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.\\n\\n' }}
    {%- endif %}
"""
    + _QWEN_TOOLS
    + """\
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- (tool_call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
"""
    + _QWEN_RESULT
    + """\
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
    tools=True,
)

QWEN_3 = ChatTemplate(
    name="qwen 3",
    template="""\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
"""
    + _QWEN_TOOLS
    + """\
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')
           and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{% endif %}
            {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- (tool_call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
"""
    + _QWEN_RESULT
    + """\
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
    tools=True,
)

MISTRAL_V1 = ChatTemplate(
    name="mistral v1",
    template="""\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, with an initial optional system message!') }}
    {%- endif %}
{%- endfor %}""",
    special=("<unk>", "<s>", "</s>"),
    bos="<s>",
    eos="</s>",
    metaspace="first",
)

MISTRAL_V3 = ChatTemplate(
    name="mistral v3",
    template="""\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' + ("]" + eos_token if loop.last else ", ") }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with an initial optional system message!") }}
    {%- endif %}
{%- endfor %}""",
    special=(
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    bos="<s>",
    eos="</s>",
    tools=True,
    metaspace="always",
)

MISTRAL_LAST = replace(
    MISTRAL_V3,
    name="mistral v3, system text in the last user turn",
    template=MISTRAL_V3.template.replace("if loop.last and system", "if message == user_messages[-1] and system"),
)

GEMMA = ChatTemplate(
    name="gemma",
    template="""\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    special=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    bos="<bos>",
    eos="<eos>",
    system=False,
    metaspace="never",
)

PHI_3 = ChatTemplate(
    name="phi 3",
    template="""\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    eos="<|endoftext|>",
)

PHI_4 = ChatTemplate(
    name="phi 4",
    template="""\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    special=("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    bos="<|endoftext|>",
    eos="<|im_end|>",
)

ZEPHYR = ChatTemplate(
    name="zephyr",
    template="""\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    special=("<unk>", "<s>", "</s>"),
    bos="<s>",
    eos="</s>",
    metaspace="always",
)

_DEEPSEEK_SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)

DEEPSEEK_V3 = ChatTemplate(
    name="deepseek v3",
    template="""\
{%- set ns = namespace(is_tool=false, system_prompt='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% endif %}
{%- endfor %}
{{- bos_token + ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message.tool_calls %}
        {%- set ns.is_tool = false %}
        {{- '<｜Assistant｜>' + (message['content'] or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for tool in message['tool_calls'] %}
            {{- ('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' }}
            {{- tool['function']['name'] + '\\n```json\\n' + (tool['function']['arguments'] | tojson) }}
            {{- '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if ns.is_tool %}
            {{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
            {%- set ns.is_tool = false %}
        {%- else %}
            {{- '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- elif message['role'] == 'tool' %}
        {{- '\\n' if ns.is_tool else '<｜tool▁outputs▁begin｜>' }}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
        {%- set ns.is_tool = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜>' }}{% endif %}""",
    special=_DEEPSEEK_SPECIAL,
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
    tools=True,
)

DEEPSEEK_R1 = ChatTemplate(
    name="deepseek r1",
    template="""\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- message['content'] }}
    {%- elif message['role'] == 'user' %}
        {{- '<｜User｜>' + message['content'] }}
    {%- else %}
        {{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}""",
    special=_DEEPSEEK_SPECIAL,
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
)

CHAT_TEMPLATES = (
    LLAMA_31,
    QWEN_25,
    QWEN_3,
    MISTRAL_V1,
    MISTRAL_V3,
    MISTRAL_LAST,
    GEMMA,
    PHI_3,
    PHI_4,
    CHATML,
    CHATML_GENERATION,
    GENERATION_WITH_END,
    ZEPHYR,
    DEEPSEEK_V3,
    DEEPSEEK_R1,
)


def of_trl(name: str, like: ChatTemplate) -> ChatTemplate:
    """A template that TRL is installed with."""
    text = files("trl").joinpath("chat_templates", f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(name, text, like.special, like.eos, like.bos)
