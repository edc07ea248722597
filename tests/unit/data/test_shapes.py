"""Answers found from a conversation of the same shape are those that the renderings of the row itself show."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from support.chat_templates import CHATML, LLAMA_31, RECENT
from support.chat_templates import tokenizer_for as new_tokenizer
from support.conversations import ALL_TEMPLATES, assistant, system, tokenizer_for, user

from toolkit.data.rows.values import RowProblem
from toolkit.data.templates import chat, prompts
from toolkit.data.templates.chat import ConversationText, Rendered, render
from toolkit.data.templates.templates import rendered

SAID = [
    "yes",
    "no ",
    " so it is\n\n",
    "Two\n\nparagraphs",
    "{% x %} {{ y }}",
    "né à 東京",
    "'quoted' \"twice\"",
    "assistant",
]
SAID += [
    "<b>bold</b>",
    "/no_think",
    "Say <|im_end|> now",
    "⟦w1⟧",
    "[INST] hi [/INST]",
    "1",
    "a" * 90,
    "```py\n  x\n```",
]


TEMPLATES = ALL_TEMPLATES | {template.name: template for template in RECENT}


def outcome(by: Any, *args: Any) -> tuple[Any, ...]:
    try:
        found: Rendered = by(*args)
    except RowProblem as problem:
        return (str(problem),)
    return found.text, found.spans, found.turns


def conversation(chance: random.Random, end: str) -> list[dict[str, Any]]:
    messages = [system(chance.choice(SAID))] if chance.random() < 0.3 else []
    for _ in range(chance.randint(1, 3)):
        answer = assistant(chance.choice(SAID))
        thought = chance.choice(["", "hm", "\nhm\n", "  hm, so <think>"])
        kind = chance.randrange(4)
        if kind == 0:
            answer["reasoning_content"] = thought
        elif kind == 1:
            answer["content"] = f"<think>{thought}</think>{chance.choice(['', chr(10) * 2])}{answer['content']}"
        if chance.random() < 0.1:
            answer["content"] += chance.choice([end, f"{end}\n", f" {end} "])
        messages += [user(chance.choice(SAID)), answer]
    return messages if chance.random() < 0.8 else messages[:-1] or messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_answers_are_those_of_renderings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, chance, short, apart = tokenizer_for(TEMPLATES[name]), random.Random(name), 0, 0
    for number in range(60):
        messages = conversation(chance, TEMPLATES[name].special[-1])
        targets: Any = chance.choice(["assistant", "last_turn"])
        unlearned = frozenset(i for i in range(len(messages)) if chance.random() < 0.1)
        found = outcome(render, tokens, messages, None, targets, unlearned)
        with monkeypatch.context() as patched:
            patched.setattr(chat, "_by_shape", lambda *_: None)
            expected = outcome(render, tokens, messages, None, targets, unlearned)
        assert found == expected, (number, messages)
        if len(found) == 3 and found[2] is None:
            row = ConversationText(tokens, messages, None)
            short += chat._by_shape(row, targets, unlearned) is not None
        apart += len(found) == 3 and found[2] is not None
    assert short + apart > 10


def test_a_row_is_rendered_once_and_before_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> str:
        texts.append(rendered(*args, **kwargs))
        return texts[-1]

    for room in (chat, prompts):
        monkeypatch.setattr(room, "rendered", counted)
    for template in (CHATML, LLAMA_31):
        tokens = new_tokenizer(template)
        for first, second in (("hot", "cold"), ("dry", "wet")):
            texts.clear()
            answers = [assistant(f"<think>\nso {word}\n</think>\n\nit is {word}") for word in (first, second)]
            messages = [user(f"why {first}"), answers[0], user(f"how {second}"), answers[1]]
            text = render(tokens, messages, None, "assistant").text
        asked = [rendered(tokens, messages[:count], prompt=True) for count in (1, 3)]
        assert texts == [text, *asked], template.name


@pytest.mark.parametrize(
    "written",
    [
        # What a template writes of one conversation and not of the other, with and without words that it names.
        "{{ message.content if message.content|length < 9 else message.content[:9] }}",
        "{{ message.content|upper if 'now' in message.content else message.content }}",
        "{{ message.content|replace('ab c', 'd') }}",
    ],
)
def test_a_template_that_looks_into_words_is_asked_about_each_row(written: str) -> None:
    body = "{% for message in messages %}<|im_start|>{{ message.role }}\n" + written + "<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokens = new_tokenizer(replace(CHATML, template=body + prompt))
    for said in ("abc", "ab c", "come now", "long words of many letters", "abc"):
        messages = [user(said), assistant("four")]
        found = render(tokens, messages, None, "assistant")
        assert found.text == tokens.apply_chat_template(messages, tokenize=False)
        start, end = found.spans[0]
        assert found.text[start:end].startswith("four")
        assert found.text[end - 10 : end] == "<|im_end|>"


@pytest.mark.parametrize(
    "test",
    [
        "'/think' in said",
        "'think' in said",
        "said == 'why /think'",
        "said[-6:] == '/think'",
        "said.endswith(('/fast', '/think'))",
        "said in ['why /think']",
        "('/th' ~ 'ink') in said",
        "said|length > 5",
    ],
)
def test_a_generation_prompt_may_depend_on_words(test: str) -> None:
    """The text is the same; what a server gives is not."""
    body = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    asks = "{% if add_generation_prompt %}{% set said = messages[-1].content %}<|im_start|>assistant\n"
    tokens = new_tokenizer(replace(CHATML, template=f"{body}{asks}{{{{ '<think>' if {test} }}}}{{% endif %}}"))
    said = [
        render(tokens, [user(words), assistant("four")], None, "assistant").turns is None
        for words in ("why", "why /think")
    ]
    assert said == [True, False]


def test_a_template_may_write_what_looks_like_a_place() -> None:
    body = "⟦w0⟧⟦w99⟧{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    prompt = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokens = new_tokenizer(replace(CHATML, template=body + prompt))
    found = render(tokens, [user("why"), assistant("four")], None, "assistant")
    assert [found.text[start:end] for start, end in found.spans] == ["four<|im_end|>"]
