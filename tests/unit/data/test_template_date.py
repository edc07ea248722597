"""One date for a run: what chat templates that write the day's date write."""

from __future__ import annotations

import json
import shutil
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, SMOLLM_3, tokenizer_for
from support.conversations import assistant, user
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from transformers import AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.data import build
from toolkit.data.layouts import template_arguments
from toolkit.data.templates.templates import rendered
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError
from toolkit.recipe.schema import DataSection, ModelSection

MESSAGES = [user("why"), assistant("so")]
FIRST_DAY, SECOND_DAY = date(2024, 2, 9), date(2025, 12, 31)


def test_every_directive_is_written_as_python_writes_it() -> None:
    formats = ["%d %B %Y", "%A, %-d. %b %y", "%Y-%m-%d %H:%M:%S", "100%% on %d%%d", "%j|%U|%I %p|%x"]
    tokens = tokenizer_for(CHATML)
    tokens.chat_template = (
        "\n" + "{%- macro day() -%}{{ strftime_now(formats[0]) }}{%- endmacro -%}"
        "{{ day() }}{% for format in formats %}{{ ';' + strftime_now(format) }}{% endfor %}"
    )
    template_arguments.set_date(tokens, FIRST_DAY)
    found = rendered(tokens, MESSAGES, arguments={"formats": formats})
    written = [datetime(2024, 2, 9).strftime(wanted) for wanted in formats]
    assert found == ";".join([written[0], *written])
    # transformers' own rendering differs in the day alone, to the first line end.
    own = tokens.apply_chat_template(MESSAGES, tokenize=False, formats=formats)
    assert own == ";".join(datetime.now().strftime(wanted) for wanted in [formats[0], *formats])


def test_what_is_exported_goes_on_to_write_the_day_on_which_it_is_asked(tmp_path: Path) -> None:
    tokens = tokenizer_for(SMOLLM_3)
    template_arguments.set_date(tokens, FIRST_DAY)
    assert "Today Date: 09 February 2024\n" in rendered(tokens, MESSAGES)
    tokens.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == SMOLLM_3.template.strip()


def test_a_day_for_a_template_that_writes_none_is_an_error(tmp_path: Path) -> None:
    tokenizer_for(CHATML).save_pretrained(tmp_path)
    data = DataSection(train=["rows.jsonl"], max_length=64, template_date=FIRST_DAY)  # type: ignore[list-item]
    with pytest.raises(BadInputError, match=r"data\.template_date has no effect: the chat template writes no date"):
        tokenizer.load(ModelSection(name_or_path=str(tmp_path)), data)


def test_rows_are_tokenised_anew_on_another_day_only_if_they_have_it(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "the king eats"}))
    (tmp_path / "completions.jsonl").write_text(json.dumps({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}))

    def texts_on(day: date, file: str) -> tuple[str, str]:
        tokens = tokenizer_for(SMOLLM_3)
        template_arguments.set_date(tokens, day)
        data = DataSection(train=[str(tmp_path / file)], max_length=128, cache_dir=str(tmp_path / "cache"))  # type: ignore[list-item]
        found = build.build(data, tokens, seed=0)
        return tokens.decode(found.train.batch([0])["input_ids"][0]), found.fingerprint

    for file in ("chats.jsonl", "completions.jsonl"):
        first, second = (texts_on(day, file) for day in (FIRST_DAY, SECOND_DAY))
        assert "09 February 2024" in first[0]
        assert "31 December 2025" in second[0]
        assert first[1] != second[1]
    assert texts_on(FIRST_DAY, "texts.jsonl") == texts_on(SECOND_DAY, "texts.jsonl")


@pytest.mark.slow
def test_a_run_keeps_the_day_on_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_llama(tmp_path / "base", make_texts(60), tied=True)
    tokens = AutoTokenizer.from_pretrained(base)
    tokens.chat_template = (
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content + (eos_token if m.role == 'assistant' else '') }}"
        "{% endfor %}"
    )
    tokens.save_pretrained(base)
    rows = [json.dumps({"messages": [user(asked), assistant("so")]}) for asked in make_texts(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    values = recipe_values(base, tmp_path / "rows.jsonl", tmp_path / "out", tmp_path / "cache", max_steps=4)
    values["data"] |= {"max_length": 64, "long_rows": "drop"}
    values["checkpoint"] = {"every_steps": 2}

    def run(day: date, **data: Any) -> list[float]:
        monkeypatch.setattr(template_arguments, "today", lambda: day)
        monkeypatch.setattr("toolkit.run.prepare.today", lambda: day)
        result = finetune(Recipe.from_mapping(values | {"data": values["data"] | data}))
        lines = (result.output_dir / "metrics.jsonl").read_text().splitlines()
        return [record["train_loss"] for record in map(json.loads, lines) if "train_loss" in record]

    losses = run(FIRST_DAY)
    assert Recipe.load(tmp_path / "out" / "recipe.yaml").data.template_date == FIRST_DAY
    assert run(SECOND_DAY) == losses, "the same command on another day finds its run finished"
    # As if it had been killed after step 2.
    for name in ("step_00000004", "latest"):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / name, ignore_errors=True)
    for name in ("finished.json", "report.html"):
        (tmp_path / "out" / name).unlink()
    assert run(SECOND_DAY) == losses
    assert Recipe.load(tmp_path / "out" / "recipe.yaml").data.template_date == FIRST_DAY
    values["checkpoint"] |= {"resume": str(tmp_path / "out" / "checkpoints" / "step_00000004")}
    values["training"]["output_dir"] = str(tmp_path / "other")
    with pytest.raises(BadInputError, match=r"""template_date: "2024-02-09" there, "2025-12-31" now"""):
        run(SECOND_DAY, template_date=SECOND_DAY)
