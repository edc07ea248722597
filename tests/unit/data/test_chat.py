"""toolkit.data.templates.chat: the targets are the assistant's words and the end of its turn, and nothing else.

What a template writes for an assistant's turn is written out by hand in `WRITTEN`, and compared with the decoded
target tokens.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.chat_templates import CHATML, PHI_3, QWEN_25, ChatTemplate
from support.chat_templates import tokenizer_for as new_tokenizer
from support.conversations import (
    ALL_TEMPLATES,
    CONVERSATIONS,
    OURS,
    QWEN_CALL,
    TOOLS,
    USES_TOOL,
    WRITTEN,
    assistant,
    kinds_of,
    system,
    tokenizer_for,
    user,
)
from tokenizers.processors import ByteLevel
from transformers import PreTrainedTokenizerFast

from toolkit.data.rows.values import RowProblem
from toolkit.data.templates.chat import NO_TURN, Rendered, render
from toolkit.data.templates.masks import target_mask
from toolkit.data.templates.templates import MARKERS, TEMPLATES, use_template
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.errors import BadInputError

TABLES = cases(__file__)


def render_kind(name: str, kind: str, targets: Any = "assistant") -> tuple[PreTrainedTokenizerFast, Rendered]:
    tokenizer = tokenizer_for(ALL_TEMPLATES[name])
    return tokenizer, render(tokenizer, CONVERSATIONS[kind], TOOLS if "tools" in kind else None, targets)


def closes_turns(tokenizer: PreTrainedTokenizerFast, rendered: Rendered) -> bool:
    """Whether each span ends with a special token, whitespace aside."""
    special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return all(rendered.text[start:end].rstrip().endswith(special) for start, end in rendered.spans)


def decode_targets(tokenizer: PreTrainedTokenizerFast, text: str, spans: list[tuple[int, int]]) -> list[str]:
    """What the target tokens of each span say."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    masks = [target_mask([span], offsets) for span in spans]
    # No token is in two spans, and all spans together give what they give one by one.
    assert [sum(column) for column in zip(*masks, strict=True)] == target_mask(spans, offsets)
    ids = encoded["input_ids"]
    return [
        tokenizer.decode([token for token, target in zip(ids, mask, strict=True) if target], skip_special_tokens=False)
        for mask in masks
    ]


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_targets_are_the_assistants_words_and_the_end_of_its_turn(name: str) -> None:
    for kind in kinds_of(name):
        tokenizer, every = render_kind(name, kind)
        if every.turns is not None:  # each answer is a text of its own (test_rule_of_answers.py)
            continue
        expected = WRITTEN[name].turns(CONVERSATIONS[kind])
        assert [every.text[start:end] for start, end in every.spans] == expected, kind
        if ALL_TEMPLATES[name].metaspace:  # which writes a space as this sign, and so reads the sign as a space
            expected = [turn.replace("▁", " ") for turn in expected]
        assert decode_targets(tokenizer, every.text, every.spans) == expected, kind
        assert closes_turns(tokenizer, every), kind
        assert render_kind(name, kind, "last_turn")[1] == Rendered(every.text, every.spans[-1:])
        assert render_kind(name, kind, "all")[1] == Rendered(every.text, [(0, len(every.text))])


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_wrong_masks_are_told_apart(name: str) -> None:
    """The comparison of the tests above sees a token too many or too few at either end, and a missing turn."""
    tokenizer, rendered = render_kind(name, "several turns")
    if rendered.turns is not None:
        return
    end = len(WRITTEN[name].end)
    expected = WRITTEN[name].turns(CONVERSATIONS["several turns"])
    first, *rest = rendered.spans
    wrong = {
        "a token of the prompt": (first[0] - 1, first[1]),
        "no end of turn": (first[0], first[1] - end),
        "the next turn's beginning": (first[0], first[1] + 1),
        "without the first word": (first[0] + len(WRITTEN[name].before) + 3, first[1]),
        "all that follows": (first[0], rest[0][0]),
    }
    for what, span in wrong.items():
        assert decode_targets(tokenizer, rendered.text, [span, *rest]) != expected, what
    assert decode_targets(tokenizer, rendered.text, rest) != expected


def random_conversation(template: ChatTemplate, chance: random.Random) -> list[dict[str, Any]]:
    """Turns of words that all differ: u1, u2 ... of others than the assistant, a1, a2 ... of the assistant."""
    number = iter(range(1, 10_000))

    def words(sign: str) -> str:
        gaps = [chance.choice([" ", "\n", "  ", "🎉 ", " 的", " <|im_end|> ", " [/INST] ", "\n\n"]) for _ in range(5)]
        return "".join(f"{sign}{next(number)}x{gap}" for gap in gaps[: chance.randint(1, 5)])

    messages = [system(words("u"))] if template.system and chance.random() < 0.5 else []
    for _ in range(chance.randint(1, 4)):
        messages.append(user(words("u")))
        if template.tools and chance.random() < 0.4:
            messages += [USES_TOOL[1], {**USES_TOOL[2], "content": words("u")}]
        messages.append(assistant(words("a")))
    return messages


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_targets_hold_every_word_of_the_assistant_and_none_of_others(name: str) -> None:
    template = ALL_TEMPLATES[name]
    tokenizer = tokenizer_for(template)
    for seed in range(12):
        messages = random_conversation(template, random.Random(seed))
        rendered = render(tokenizer, messages, TOOLS if template.tools else None, "assistant")
        if rendered.turns is not None:
            continue
        turns = [message for message in messages if message["role"] == "assistant"]
        decoded = decode_targets(tokenizer, rendered.text, rendered.spans)
        words = [re.findall(r"[ua]\d+x", turn) for turn in decoded]
        assert words == [re.findall(r"a\d+x", turn["content"] or "") for turn in turns], seed
        encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
        mask = target_mask(rendered.spans, encoded["offset_mapping"])
        for found in re.finditer(r"u\d+x", rendered.text):
            overlap = target_mask([found.span()], encoded["offset_mapping"])
            assert not any(a and b for a, b in zip(mask, overlap, strict=True)), seed


def problem(template: str | ChatTemplate, messages: list[dict[str, Any]], targets: Any = "assistant") -> str:
    """Why the row cannot be used."""
    if isinstance(template, str):
        template = replace(CHATML, template=template)
    with pytest.raises(RowProblem) as caught:
        render(tokenizer_for(template), messages, None, targets)
    return str(caught.value)


def test_a_conversation_that_the_assistant_begins() -> None:
    messages = [assistant("Hello."), user("Hi"), assistant("Yes?")]
    for template in (OURS[0], PHI_3):
        rendered = render(tokenizer_for(template), messages, None, "assistant")
        turns = [rendered.text[start:end] for start, end in rendered.spans]
        assert turns == WRITTEN[template.name].turns(messages)


def test_a_conversation_that_the_user_ends() -> None:
    for name in ("our chatml", "phi 3", "chatml with generation"):
        messages = [user("Hi"), assistant("Hello."), user("Well?")]
        rendered = render(tokenizer_for(ALL_TEMPLATES[name]), messages, None, "assistant")
        assert [rendered.text[start:end] for start, end in rendered.spans] == ["Hello." + WRITTEN[name].end]


def test_the_next_turns_marker_is_not_taken_for_the_end_of_a_turn() -> None:
    no_end = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
{%- endfor %}"""
    for template in (no_end, re.sub(r"{% (end)?generation %}", "", no_end)):
        tokenizer = tokenizer_for(replace(CHATML, template=template))
        rendered = render(tokenizer, [user("Hi"), assistant("Hello."), user("So"), assistant("Bye")], None, "assistant")
        assert rendered.text[slice(*rendered.spans[0])].endswith("Hello.")
        assert not closes_turns(tokenizer, rendered)
        rendered = render(tokenizer, [user("Hi"), assistant(""), user("So"), assistant("Bye")], None, "assistant")
        assert all(start < end for start, end in rendered.spans)
        assert rendered.text[slice(*rendered.spans[-1])].endswith("Bye")


@pytest.mark.parametrize(("template", "reason"), TABLES["ERRORS"])
def test_a_templates_own_errors_are_problems(template: str, reason: str) -> None:
    assert reason in problem(template, [user("Hi"), assistant("Hello.")])
    assert "\n" not in problem(template, [user("Hi"), assistant("Hello.")])


def test_without_an_assistant_there_is_nothing_to_learn() -> None:
    messages = [system("Be brief."), user("Hi")]
    for targets in ("assistant", "last_turn"):
        assert problem(CHATML, messages, targets) == NO_TURN
    assert render(tokenizer_for(CHATML), messages, None, "all").spans


def test_an_empty_list_of_tools_is_no_tools() -> None:
    tokenizer = tokenizer_for(ALL_TEMPLATES["llama 3.1"])
    messages = CONVERSATIONS["one turn"]
    assert render(tokenizer, messages, [], "assistant") == render(tokenizer, messages, None, "assistant")


def test_renders_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each assistant turn, one of the whole, one that checks the whole."""
    tokenizer = new_tokenizer(QWEN_25)
    count = 0
    original = tokenizer.apply_chat_template

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return original(*arguments, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counting)
    render(tokenizer, CONVERSATIONS["several turns"], None, "assistant")
    assert count <= 2 * 3 + 2


def test_our_chatml_written_out() -> None:
    tokenizer = tokenizer_for(OURS[0])
    messages = [system("Be brief."), *USES_TOOL]
    assert render(tokenizer, messages, None, "all").text == (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
        f"<|im_start|>assistant\n{QWEN_CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 18 degrees.<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template([user("Hi")], tokenize=False, add_generation_prompt=True)
    assert prompt == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_our_alpaca_written_out() -> None:
    tokenizer = tokenizer_for(OURS[1])
    messages = [system("Be brief."), *USES_TOOL]
    assert render(tokenizer, messages, None, "all").text == (
        "<s>Be brief.\n\n"
        "### Instruction:\nWhat is the weather in Paris?\n\n"
        f"### Response:\n{QWEN_CALL}</s>\n\n"
        "### Tool Response:\n18\n\n"
        "### Response:\nIt is 18 degrees.</s>\n\n"
    )
    prompt = tokenizer.apply_chat_template([user("Hi")], tokenize=False, add_generation_prompt=True)
    assert prompt == "<s>### Instruction:\nHi\n\n### Response:\n"


@pytest.mark.parametrize("template", OURS, ids=lambda template: template.name)
def test_our_templates_list_the_tools_in_the_system_turn(template: ChatTemplate) -> None:
    tokenizer = tokenizer_for(template)
    alone = render(tokenizer, [*USES_TOOL], TOOLS, "all").text
    behind = render(tokenizer, [system("Be brief."), *USES_TOOL], TOOLS, "all").text
    listed = '<tools>\n{"type": "function", "function": {"name": "get_weather", "description": "The weather in a city.'
    assert alone.count(listed) == 1
    assert behind == alone.replace("# Tools", "Be brief.\n\n# Tools")
    assert alone.index(listed) < alone.index("What is the weather")


def test_chatml_without_its_markers_in_the_vocabulary_does_not_close_turns() -> None:
    tokenizer = new_tokenizer(replace(OURS[0], special=("<s>", "</s>")))
    rendered = render(tokenizer, CONVERSATIONS["several turns"], None, "assistant")
    assert rendered.text[slice(*rendered.spans[0])].startswith("Hi!")
    assert not closes_turns(tokenizer, rendered)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKERS["chatml"]})
    rendered = render(tokenizer, CONVERSATIONS["several turns"], None, "assistant")
    assert closes_turns(tokenizer, rendered)
    assert decode_targets(tokenizer, rendered.text, rendered.spans)[0] == "Hi!<|im_end|>"


def test_use_template(tmp_path: Path) -> None:
    tokenizer = new_tokenizer(CHATML)
    use_template(tokenizer, None)
    assert tokenizer.chat_template == CHATML.template
    use_template(tokenizer, "alpaca")
    assert tokenizer.chat_template == TEMPLATES["alpaca"]
    with pytest.raises(BadInputError, match=r"data.chat_template: 'none.jinja' cannot be read: .*No such file"):
        use_template(tokenizer, "none.jinja")
    assert tokenizer.chat_template == TEMPLATES["alpaca"]
    file = tmp_path / "mine.jinja"
    for content, told in (
        ("{{ messages[0].content }", r"mine.jinja' cannot be read: .* \(line 1\)"),
        ("\n", "is empty"),
    ):
        file.write_text(content)
        with pytest.raises(BadInputError, match=told):
            use_template(tokenizer, str(file))
    file.write_text("{{ messages[0].content }}", encoding="utf-8-sig")
    use_template(tokenizer, str(file))
    assert tokenizer.apply_chat_template([user("Hi")], tokenize=False) == "Hi"
    tokenizer.bos_token = "<|im_start|>"  # as SmolLM2's is
    use_template(tokenizer, "chatml")
    assert tokenizer.apply_chat_template([user("Hi")], tokenize=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_mask_by_the_definition() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        offsets = list(pairwise(sorted(chance.choices(range(60), k=40))))
        ends = sorted(chance.sample(range(60), 12))
        spans = list(zip(ends[::2], ends[1::2], strict=True))
        widened = [range(min(start, end - 1), end) for start, end in offsets]
        by_characters = [any(a <= i < b for i in token for a, b in spans) for token in widened]
        assert target_mask(spans, offsets) == by_characters, seed


def test_whitespace_is_learned_where_the_tokenizer_trims_offsets() -> None:
    tokenizer = _train_byte_pairs(iter(["def f(x):\n    return x\n\n    y"] * 9), 300, MARKERS["chatml"])
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    use_template(tokenizer, "chatml")
    code = "def f(x):\n\n    return x"
    messages = [{"role": "user", "content": "  code "}, {"role": "assistant", "content": code}]
    rendered = render(tokenizer, messages, None, "assistant")
    encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
    assert any(start == end for start, end in encoded["offset_mapping"]), "the tokenizer trims"
    mask = target_mask(rendered.spans, encoded["offset_mapping"])
    learned = [token for token, target in zip(encoded["input_ids"], mask, strict=True) if target]
    assert tokenizer.decode(learned) == f"{code}<|im_end|>"
