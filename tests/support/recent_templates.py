"""Chat templates of models of 2025 and 2026, written afresh: what decides where an answer begins and ends, no more."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with the full-width bar)

from __future__ import annotations

from support.chat_templates import _DEEPSEEK_SPECIAL, ChatTemplate

_LAST_USER = """\
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
"""

_THOUGHT = """\
{%- set thought = message.reasoning_content or '' %}
{%- set words = message.content or '' %}
{%- if not thought and '</think>' in words %}
    {%- set thought = words.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
    {%- set words = words.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
"""

GPT_OSS = ChatTemplate(
    name="gpt-oss",
    template="""\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}
{%- set first = messages[0].role in ['developer', 'system'] %}
{%- if first or tools %}
    {{- '<|start|>developer<|message|>' + (messages[0].content if first else '') }}
    {%- if tools %}{{ '# Tools ' + (tools | tojson) }}{% endif %}{{ '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in (messages[1:] if first else messages) %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- (call.arguments | tojson) + '<|call|>' }}
        {%- set called.name = call.name %}
    {%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (message.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    special=(
        "<|endoftext|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|return|>",
        "<|call|>",
    ),
    eos="<|return|>",
    tools=True,
)

QWEN_35 = ChatTemplate(
    name="qwen 3.5",
    template=_LAST_USER
    + """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
"""
    + _THOUGHT
    + """\
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_user %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {{- words }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n\\n' if loop.first and words else ('' if loop.first else '\\n') }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<parameter=' + key + '>\\n' + (value | string) + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}
{%- endif %}""",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
    tools=True,
)

DEEPSEEK_V31 = ChatTemplate(
    name="deepseek v3.1",
    template="""\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- message.content }}
    {%- elif message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- else %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<｜Assistant｜></think>' }}{% endif %}
        {{- (message.content or '').split('</think>')[-1] }}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- (call.function.arguments | tojson) + '<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking is defined and thinking else '</think>') }}
{%- endif %}""",
    special=_DEEPSEEK_SPECIAL,
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
    tools=True,
)

GEMMA_3 = ChatTemplate(
    name="gemma 3",
    template="""\
{{- bos_token }}
{%- set first = messages[0].role == 'system' %}
{%- for message in (messages[1:] if first else messages) %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- (messages[0].content + '\\n\\n' if first and loop.first else '') + message.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    special=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    bos="<bos>",
    eos="<eos>",
    metaspace="never",
)

GEMMA_4 = ChatTemplate(
    name="gemma 4",
    template=_LAST_USER
    + """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|tool_response>' + message.content + '<tool_response|>' }}
    {%- else %}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last_user %}
            {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + (call.function.arguments | tojson) + '<tool_call|>' }}
        {%- endfor %}
        {{- (message.content or '') | trim + '<turn|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' }}
    {{- '' if enable_thinking is defined and enable_thinking else '<|channel>thought\\n<channel|>' }}
{%- endif %}""",
    special=(
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<|turn>",
        "<turn|>",
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
    ),
    bos="<bos>",
    eos="<eos>",
    tools=True,
    metaspace="never",
)

LLAMA_4 = ChatTemplate(
    name="llama 4",
    template="""\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|header_start|>' + role + '<|header_end|>\\n\\n' + (message.content or '') | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
    {%- endfor %}
    {{- '<|eom|>' if message.tool_calls else '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{% endif %}""",
    special=("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
    bos="<|begin_of_text|>",
    eos="<|eot|>",
    tools=True,
)

MAGISTRAL = ChatTemplate(
    name="magistral",
    template="""\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for block in message.content or [] %}
                {%- if block['type'] == 'text' %}
                    {{- block['text'] }}
                {%- elif block['type'] == 'thinking' %}
                    {{- '[THINK]' + block['thinking'] + '[/THINK]' }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}""",
    special=(
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[THINK]",
        "[/THINK]",
    ),
    bos="<s>",
    eos="</s>",
    tools=True,
)

GLM_45 = ChatTemplate(
    name="glm 4.5",
    template=_LAST_USER
    + """\
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
"""
    + _THOUGHT
    + """\
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n<think>' + (thought if loop.index0 > ns.last_user else '') + '</think>' }}
        {%- if words.strip() %}{{ '\\n' + words.strip() }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {{- (call.function.arguments | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}""",
    special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    eos="<|endoftext|>",
    tools=True,
)

KIMI_K2 = ChatTemplate(
    name="kimi k2",
    template="""\
{%- for message in messages %}
    {%- set role = {'system': 'system', 'tool': 'system'}.get(message.role, message.role) %}
    {{- '<|im_' + role + '|>' + message.role + '<|im_middle|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_calls_section_begin|>' if loop.first else '' }}
        {{- '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0 | string }}
        {{- '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) + '<|tool_call_end|>' }}
        {{- '<|tool_calls_section_end|>' if loop.last else '' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}""",
    special=(
        "[BOS]",
        "[EOS]",
        "<|im_end|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    eos="<|im_end|>",
    tools=True,
)

GRANITE_4 = ChatTemplate(
    name="granite 4",
    template="""\
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if not loop.first or message.content else '' }}
        {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}""",
    special=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    eos="<|end_of_text|>",
    tools=True,
)

SMOLLM_3 = ChatTemplate(
    name="smollm 3",
    template="""\
{%- set thinks = enable_thinking is not defined or enable_thinking %}
{{- '<|im_start|>system\\nToday Date: ' + strftime_now('%d %B %Y') + '\\nReasoning Mode: ' }}
{{- ('/think' if thinks else '/no_think') + '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + ('' if thinks else '<think>\\n\\n</think>\\n') }}
        {{- message.content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('' if thinks else '<think>\\n\\n</think>\\n') }}
{%- endif %}""",
    special=("<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
)

MINIMAX_M2 = ChatTemplate(
    name="minimax m2",
    template=_LAST_USER
    + """\
{{- ']~!b[' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- ']~b]ai\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last_user %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<minimax:tool_call>\\n' if loop.first else '' }}
            {{- '<invoke name="' + call.function.name + '">' + (call.function.arguments | tojson) + '</invoke>\\n' }}
            {{- '</minimax:tool_call>' if loop.last else '' }}
        {%- endfor %}
        {{- '[e~[\\n' }}
    {%- else %}
        {{- ']~b]' + message.role + '\\n' + message.content + '[e~[\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}""",
    special=("]~!b[", "]~b]", "[e~["),
    eos="[e~[",
    tools=True,
)

RECENT = (
    GPT_OSS,
    QWEN_35,
    DEEPSEEK_V31,
    GEMMA_3,
    GEMMA_4,
    LLAMA_4,
    MAGISTRAL,
    GLM_45,
    KIMI_K2,
    GRANITE_4,
    SMOLLM_3,
    MINIMAX_M2,
)
