"""Files that unpack to more than the memory, and templates that never end: told within bounds of memory and time."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny import save_llama

from toolkit.data import json_list, readers, templates, time_limit
from toolkit.data.build import build
from toolkit.data.json_list import values_of
from toolkit.data.problem import RowProblem
from toolkit.data.readers import Shard, read
from toolkit.data.sandbox import BoundedEnvironment
from toolkit.data.templates import SlowTemplateError
from toolkit.errors import BadInputError, DataError
from toolkit.recipe.schema import DataSection

MIB = 2**20


def peak_of(action: Any) -> tuple[Any, int]:
    """What `action()` gives, and the most bytes that it held."""
    tracemalloc.start()
    try:
        return action(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def packed(path: Path, *parts: bytes) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part in parts:
            file.write(part)
    return path


def refusal(shard: Shard) -> str:
    with pytest.raises(DataError) as caught:
        list(read(shard))
    return str(caught.value)


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", MIB)
    monkeypatch.setattr(readers, "MAX_TEXT_BYTES", MIB)
    monkeypatch.setattr(json_list, "CHUNK_BYTES", 2**16)


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("start", [b'[{"text": "', b'{"version": "', b'{"data": [{}, "', b"[1"])
def test_a_value_that_unpacks_to_more_than_a_row_may_hold(tmp_path: Path, start: bytes) -> None:
    path = packed(tmp_path / "bomb.json.gz", start, *[b"1" * MIB] * 30)
    told, peak = peak_of(lambda: refusal(Shard("list", str(path))))
    assert str(path) in told
    assert ("more than 1 MiB" in told) or (start == b"[1" and "a number that is too long" in told)
    assert peak < 12 * MIB


@pytest.mark.usefixtures("small_rows")
def test_a_list_larger_than_memory_is_read_row_by_row(tmp_path: Path) -> None:
    row = json.dumps({"text": "a king " * 1000}).encode()
    path = packed(tmp_path / "list.json.gz", b"[" + row, *[b"," + row] * 2000, b" " * 20 * MIB + b"]")
    number, peak = peak_of(lambda: sum(1 for _ in read(Shard("list", str(path)))))
    assert number == 2001
    assert peak < 8 * MIB


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_an_endless_line_of_csv_is_one_bad_row(tmp_path: Path, kind: str) -> None:
    path = packed(tmp_path / f"a.{kind}.gz", b"text\nfirst\n", *[b"a" * MIB] * 30, b"\nthird\n", b'"fourth\nrow"\n')
    rows, peak = peak_of(lambda: list(read(Shard(kind, str(path)))))
    assert [row if isinstance(row, dict) else str(row) for row in rows] == [
        {"text": "first"},
        "a line of more than 1 MiB",
        {"text": "third"},
        {"text": "fourth\nrow"},
    ]
    assert isinstance(rows[1], RowProblem)
    assert peak < 16 * MIB


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize(("kind", "words"), [("csv", "a line of more than 1 MiB"), ("text", "more than 1 MiB")])
def test_an_endless_header_and_an_endless_text(tmp_path: Path, kind: str, words: str) -> None:
    path = packed(tmp_path / "a.gz", *[b"a" * MIB] * 30)
    told, peak = peak_of(lambda: refusal(Shard(kind, str(path))))
    assert words in told
    assert str(path) in told
    assert peak < 12 * MIB


def values_in_pieces(content: bytes, monkeypatch: pytest.MonkeyPatch, size: int, folder: Path) -> Any:
    monkeypatch.setattr(json_list, "CHUNK_BYTES", size)
    (folder / "a.json").write_bytes(content)
    with (folder / "a.json").open("rb") as file:
        return list(values_of(file, "a.json", MIB))


def any_value(chance: random.Random, depth: int) -> Any:
    leaves = [None, True, False, -0.0, 1e-30, 12345678901234567890, 3.25, "", 'é"\\\n\U0001f98a', [], {}]
    if depth == 0 or chance.random() < 0.4:
        return chance.choice(leaves)
    if chance.random() < 0.5:
        return [any_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {f"k{number}": any_value(chance, depth - 1) for number in range(chance.randrange(4))}


@pytest.mark.parametrize("size", [1, 7, 2**20])
def test_values_are_what_json_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    chance = random.Random(size)
    for number in range(60):
        values = [any_value(chance, 3) for _ in range(chance.randrange(5))]
        indent = chance.choice([None, 2])
        wrapped: Any = values if number % 2 else {"version": any_value(chance, 2), "rows": values, "end": 1}
        content = json.dumps(wrapped, indent=indent, ensure_ascii=chance.random() < 0.5).encode()
        assert values_in_pieces(content, monkeypatch, size, tmp_path) == values


@pytest.mark.parametrize("size", [1, 2**20])
def test_what_json_refuses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    whole = json.dumps({"a": [1, {"b": None}], "data": [{"text": "é"}, 2.5, True], "z": "end"}).encode()
    wrong = [whole[:end] for end in range(1, len(whole))]
    wrong += [b"[1,]", b"[1 2]", b"[,1]", b"[1]]", b"[1] x", b"[01]", b"[1.]", b"[tru]", b'{"data": [1],}', b"{,}"]
    wrong += [b"{data: [1]}", b"['a']", b'["\n"]', b'["\\x"]', b"", b" ", b'{"data" [1]}', b"{1: 2}", b"[1}"]
    for content in wrong:
        with pytest.raises(DataError, match=r"is not (JSON|UTF-8)"):
            values_in_pieces(content, monkeypatch, size, tmp_path)
    with pytest.raises(DataError, match="holds two lists, rows and data"):
        values_in_pieces(b'{"rows": [1], "data": [2]}', monkeypatch, size, tmp_path)


ENDLESS = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture
def looping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tokenizer whose template does not end for a conversation that says `loop`."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.2)
    monkeypatch.setattr(time_limit, "LOOK_SECONDS", 0.05)
    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path / "model", ["a king"], tied=True))
    tokenizer.chat_template = ENDLESS
    return tokenizer


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_template_that_does_not_end(looping: Any, in_thread: bool) -> None:
    found: list[BaseException] = []

    def render() -> None:
        try:
            templates.rendered(looping, [{"role": "user", "content": "loop"}])
        except SlowTemplateError as error:
            found.append(error)

    started = time.monotonic()
    if in_thread:
        thread = threading.Thread(target=render)
        thread.start()
        thread.join()
    else:
        render()
    assert time.monotonic() - started < 30
    assert isinstance(found[0], BadInputError)
    assert templates.rendered(looping, [{"role": "user", "content": "fine"}]) == "fine"


@pytest.mark.parametrize(("num_proc", "streaming"), [(1, False), (2, False), (1, True)])
def test_the_row_of_an_endless_template_is_named(tmp_path: Path, looping: Any, num_proc: int, streaming: bool) -> None:
    texts = ["fine"] * 30 + ["loop"] + ["fine"] * 40
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]} for text in texts
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    settings: Any = {"max_length": 64, "cache_dir": str(tmp_path / "cache")}
    data = DataSection(train=str(tmp_path / "rows.jsonl"), num_proc=num_proc, streaming=streaming, **settings)
    with pytest.raises(DataError) as caught:
        build(data, looping, 0)
    assert str(caught.value).startswith("data.chat_template: ")
    assert "rows.jsonl:31: the chat template of" in str(caught.value)
    assert f"of {looping.name_or_path!r} takes longer than 0.2 s" in str(caught.value)
    assert not list(tmp_path.glob("cache/documents-*")), "nothing is left of it"


GROWING = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ ([1] * 9999999999)|length }}",
    "{{ 2 ** (10 ** 9) }}",
    "{{ 7 ** (10 ** 9) % 3 }}",
    "{% set ns = namespace(n=7) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n % 3 }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(40) %}"
    "{% set part %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = part %}{% endfor %}",
    "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='ab') %}"
    "{% for i in range(40) %}{% set ns.s = twice(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s|replace('a', ns.s) %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    *[f"{{{{ 'a'.{name}(9999999999) }}}}" for name in ("ljust", "rjust", "center", "zfill")],
    "{{ '\t'.expandtabs(9999999999) }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ ('b' * 99999).join(['a'] * 99999) }}",
    "{{ (['a'] * 99999)|join('b' * 99999) }}",
    "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "{{ 'a'|center(9999999999) }}",
    "{{ ['a']|map('center', 9999999999)|list|length }}",
    "{{ ('\n' * 99999)|indent(99999) }}",
    "{{ messages|tojson(indent=9999999999) }}",
    "{{ [1]|batch(9999999999, 0)|list|length }}",
    "{{ [1]|slice(9999999999)|list|length }}",
    "{{ 5|round(-9999999999) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '%(a).2000000000d'|format(a=1) }}",
    "{{ '{:>2000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 2000000000) }}",
    "{{ '{a:{b}}'.format_map({'a': 1, 'b': 2000000000}) }}",
]
"""Templates of which one operation would take minutes, or all of the memory."""


def test_templates_that_grow_are_refused_before_they_have(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path / "model", ["a king"], tied=True))
    started, resident = time.monotonic(), psutil.Process().memory_info().rss
    for template in GROWING:
        tokenizer.chat_template = template
        with pytest.raises(SlowTemplateError, match="makes a text of more than 17 million characters") as caught:
            templates.rendered(tokenizer, [{"role": "user", "content": "a king"}])
        assert repr(tokenizer.name_or_path) in str(caught.value), template
    assert time.monotonic() - started < 60
    assert psutil.Process().memory_info().rss - resident < 512 * MIB
    tokenizer.chat_template = "{% generation %}{{ 'a' * 10**10 }}{% endgeneration %}"
    with pytest.raises(SlowTemplateError):
        templates.rendered(tokenizer, [{"role": "user", "content": "a king"}])
    tokenizer.chat_template = "{{ range(10**9)|length }}"
    with pytest.raises(OverflowError, match="Range too big"):
        templates.rendered(tokenizer, [{"role": "user", "content": "a king"}])


ORDINARY = """{% set ns = namespace(n=0, text='') %}{% for message in messages %}
{% set ns.n = ns.n + 2 * loop.index ** 2 %}
{% set ns.text = ns.text ~ message.role ~ ns.n % 7 ~ none ~ [1, 'a'] + message.content[:3] * 2 %}
{{ '%s: %5.2f %% %-4d|' % (message.role, 2.5, ns.n) }}{{ '{:>8}|{a}'.format(message.role, a=1) }}
{{ message.content|replace('k', 'K')|center(20)|indent(4, first=true) }}{{ ['a', 1]|join(', ') }}
{{ message|tojson(indent=2) }}{{ 2.567|round(1) }}{{ '%s-%s'|format(1, 'b') }}{{ message.content.ljust(30) }}
{{ [1, 2] + [3] }}{{ 1.5 * 2 }}{{ 2 ** 0.5 }}{{ 'a-b'.replace('-', '+', 1) }}{{ [1, 2, 3]|batch(2)|list }}
{% macro said(x) %}<{{ x }}>{% endmacro %}{{ said(message.content) }}{% set part %}{{ ns.text }}{% endset %}{{ part }}
{{ messages|map(attribute='role')|join('/') }}{{ "<b>"|e ~ 'x' }}{{ '100% sure' + ' {}' }}{{ '\t'.expandtabs(4) }}
{% endfor %}"""


def test_other_templates_give_what_jinja_gives(tmp_path: Path) -> None:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    messages = [{"role": role, "content": f"a king {role}"} for role in ("user", "assistant", "user")]
    for source in [ORDINARY, *templates.TEMPLATES.values()]:
        texts = []
        for kind in (ImmutableSandboxedEnvironment, BoundedEnvironment):
            environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
            texts.append(environment.from_string(source).render(messages=messages, eos_token="</s>"))
        assert texts[0] == texts[1]
        assert texts[0]


def test_a_template_that_fills_the_memory_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(templates, "MORE_BYTES", 64 * MIB)
    monkeypatch.setattr(time_limit, "LOOK_SECONDS", 0.02)
    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path / "model", ["a king"], tied=True))
    tokenizer.chat_template = (
        "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + ['a' * 999999] %}{% endfor %}"
    )
    resident = psutil.Process().memory_info().rss
    with pytest.raises(SlowTemplateError, match=r"takes longer than 30 s or more than 0.0625 GiB"):
        templates.rendered(tokenizer, [{"role": "user", "content": "a king"}])
    assert psutil.Process().memory_info().rss - resident < 4096 * MIB


def test_a_limit_that_is_kept_costs_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LOOK_SECONDS", 0.01)
    with time_limit.time_limit(0.05):
        pass
    time.sleep(0.2)
    with pytest.raises(time_limit.TimeLimitError), time_limit.time_limit(0.05):
        time.sleep(0.3)


def test_a_limit_that_ends_as_the_block_does_raises_within_it_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LOOK_SECONDS", 0.001)
    time.sleep(0.6)  # the watcher sleeps by the value from before
    over = 0
    for turn in range(200):
        try:
            with time_limit.time_limit(0.002):
                until = time.monotonic() + 0.001 + turn * 1e-5
                while time.monotonic() < until:
                    pass
        except time_limit.TimeLimitError:
            over += 1
        for _ in range(200):  # outside, where nothing may come
            len("")
    assert 0 < over < 200


def test_a_limit_under_a_profiler() -> None:
    """There Python 3.11 never went on, once an exception that had not come was taken back."""
    program = (
        "import cProfile\n"
        "from toolkit.data.time_limit import time_limit\n"
        "def block():\n"
        "    with time_limit(60): return len('ab')\n"
        "assert cProfile.Profile().runcall(lambda: [block() for _ in range(3)]) == [2] * 3\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
