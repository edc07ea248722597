"""Chat templates that never end, or take all of the memory: found in a process of its own, and told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.chat_templates import CHAT_TEMPLATES, CHATML, RECENT, ChatTemplate, tokenizer_for
from support.tiny import save_llama

from toolkit.data.build import build
from toolkit.data.templates import template_trial, templates
from toolkit.errors import BadInputError, DataError
from toolkit.generation.text.complete import templated
from toolkit.recipe.schema import DataSection

KING = [{"role": "user", "content": "a king"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "TRIAL_SECONDS", 1)
    monkeypatch.setattr(templates, "TRIAL_BYTES", 2**28)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(save_llama(tmp_path_factory.mktemp("model"), ["a king"], tied=True))


REPEATED = "{% set ns = namespace(v=FIRST) %}{% for i in range(60) %}{% set ns.v = NEXT %}{% endfor %}{{ ns.v }}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

SLOW = [
    LOOPS,
    "{% generation %}" + LOOPS + "{% endgeneration %}",
    "{% if tools %}" + LOOPS + "{% endif %}",
    "{% if add_generation_prompt and messages[0].role == 'system' %}" + LOOPS + "{% endif %}",
    "{% if messages[0].content is not string %}" + LOOPS + "{% endif %}",
    "{{ 7 ** (10 ** 9) % 3 }}",
    "{{ [1]|slice(9999999999)|list|length }}",
    REPEATED.replace("FIRST", "[1]").replace("NEXT", "[ns.v, ns.v]"),
]
"""Templates that take minutes, or years; the last writes a list that is nested 60 deep."""

LARGE = [
    "{{ 'a' * 10**10 }}",
    "{{ ([1] * 9999999999)|length }}",
    REPEATED.replace("FIRST", "'ab'").replace("NEXT", "ns.v ~ ns.v"),
    REPEATED.replace("FIRST", "[1]").replace("NEXT", "ns.v + ns.v"),
    "{% set ns = namespace(s='ab') %}{% for m in messages %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}"
    + REPEATED.replace("FIRST", "'a'").replace("NEXT", "twice(ns.v)"),
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + ['a' * i * 999] %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ messages|tojson(indent=9999999999) }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '{:>2000000000}'.format(1) }}",
]
"""Templates that would take all of the memory; the third and the fourth by one operation, which no exception ends."""


@pytest.mark.slow
@pytest.mark.parametrize("template", SLOW)
def test_a_template_that_does_not_end(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template, started, children = template, time.monotonic(), set(psutil.Process().children())
    with pytest.raises(DataError, match=r"^data.chat_template: .* takes longer than 1 s for a conversation of") as told:
        templates.rendered(tokenizer, KING)
    assert repr(tokenizer.name_or_path) in str(told.value)
    assert "set data.chat_template to alpaca or chatml" in str(told.value)
    assert time.monotonic() - started < 60
    assert set(psutil.Process().children()) <= children, "the trial has ended with its process"


@pytest.mark.parametrize("template", LARGE)
def test_a_template_that_takes_all_memory(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template, resident = template, psutil.Process().memory_info().rss
    with pytest.raises(DataError, match=r"takes more than 0.25 GiB for a conversation of 100 messages"):
        templates.rendered(tokenizer, KING)
    assert psutil.Process().memory_info().rss - resident < 2**26


def test_a_text_that_no_conversation_has(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for i in range(4200) %}{{ 'a' * 4000 }}{% endfor %}"
    with pytest.raises(DataError, match="makes a text of more than 17 million characters"):
        templates.rendered(tokenizer, KING)
    tokenizer.chat_template = "{% for i in range(4100) %}{{ 'a' * 4000 }}{% endfor %}"
    assert len(templates.rendered(tokenizer, KING)) == 4100 * 4000


@pytest.mark.parametrize(("num_proc", "streaming"), [(1, False), (2, False), (1, True)])
def test_a_run_ends_before_it_reads_a_row(tmp_path: Path, tokenizer: Any, num_proc: int, streaming: bool) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}" + LOOPS + "{% endfor %}"
    chat = {"messages": [*KING, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(chat) + "\n") * 70)
    settings: Any = {"max_length": 64, "cache_dir": str(tmp_path / "cache")}
    data = DataSection(train=str(tmp_path / "rows.jsonl"), num_proc=num_proc, streaming=streaming, **settings)
    with pytest.raises(DataError, match=r"^data.chat_template: the chat template of .* takes longer than 1 s"):
        build(data, tokenizer, 0)
    assert not list(tmp_path.glob("cache/documents-*")), "nothing is left of it"


def test_generation_says_the_same(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ 'a' * 10**11 }}"
    with pytest.raises(BadInputError, match=r"^data.chat_template: the chat template of .* takes more than 0.25 GiB"):
        templated(tokenizer, KING)


REFUSALS = [
    ("{{ range(10**9)|length }}", "Range too big"),
    ("{{ raise_exception('no king') }}", "no king"),
    ("{% for %}", "Expected an expression"),
    ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "maximum recursion depth"),
]


def test_a_template_that_refuses_has_ended(tokenizer: Any) -> None:
    for template, words in REFUSALS:
        tokenizer.chat_template = template
        with pytest.raises(Exception, match=words):
            templates.rendered(tokenizer, KING)


def test_a_template_is_tried_once_and_ours_never(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: tried.append(args) or run(*args, **kwargs))
    for template in templates.TEMPLATES.values():
        tokenizer.chat_template = template
        templates.rendered(tokenizer, KING)
    assert len(tried) == 0
    tokenizer.chat_template = "{{ messages[0].content }} is tried once"
    for _ in range(3):
        assert templates.rendered(tokenizer, KING) == "a king is tried once"
    assert len(tried) == 1


def test_a_trial_imports_no_large_package() -> None:
    program = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); print(*{'torch', 'transformers', 'toolkit'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", program, template_trial.__file__]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []


def test_templates_of_known_models_pass() -> None:
    for known in (*CHAT_TEMPLATES, *RECENT):
        told = template_trial.trial(known.template, {"bos_token": known.bos or "", "eos_token": known.eos})
        assert told is None, known.name


ORDINARY = """{% set ns = namespace(n=0, text='') %}{% for message in messages %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% set ns.n = ns.n + 2 * loop.index ** 2 %}{% set ns.text = ns.text ~ message.role ~ ns.n % 7 %}
{{ '%s: %5.2f %% %-4d|' % (message.role, 2.5, ns.n) }}{{ '{:>8}|{a}'.format(message.role, a=1) }}
{{ message|tojson(indent=2) }}{{ {'b': 'é', 'a': '<'}|tojson(sort_keys=true, separators=(',', ':')) }}
    {%- generation %} {{ message.content }}{% endgeneration %}
{{ strftime_now('%Y') }}{{ eos_token }}{{ dict(a=1) }}{{ ns.text }}
{% endfor %}{{ tools|tojson if tools else '' }}{{ '>' if add_generation_prompt }}"""


def attempt(write: Callable[..., str], **variables: Any) -> str:
    try:
        return write(**variables)
    except Exception as error:
        return type(error).__name__


OTHERS = [replace(CHATML, name=name, template=text) for name, text in {"odd": ORDINARY, **templates.TEMPLATES}.items()]


@pytest.mark.parametrize("known", [*OTHERS, *CHAT_TEMPLATES, *RECENT], ids=lambda known: known.name)
def test_a_trial_writes_what_transformers_writes(known: ChatTemplate) -> None:
    tokenizer, written = tokenizer_for(known), []
    render = template_trial.environment().from_string(known.template).render
    for variables in template_trial.conversations():
        written.append(attempt(render, **tokenizer.special_tokens_map, documents=None, **variables))
        conversation = variables.pop("messages")
        expected = attempt(tokenizer.apply_chat_template, conversation=conversation, tokenize=False, **variables)
        assert written[-1] == expected
    assert max(map(len, written)) > 500, "one of them at least is written"
