"""Layouts of rows: what is learned of each, written out, and values as files and tables hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from pydantic import ValidationError
from support.cases import cases
from support.chat_templates import GLM_45, tokenizer_for
from support.texts import write_rows
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2ForSequenceClassification, PreTrainedTokenizerFast

from toolkit.data import build
from toolkit.data.documents.encode import VERBATIM
from toolkit.data.rows.readers import read
from toolkit.data.rows.sources import open_source
from toolkit.data.templates.prompts import prompt_ids
from toolkit.data.templates.templates import MARKERS, use_template
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError, DataError
from toolkit.objectives.classification import SequenceClassification
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection, SourceSection

TABLES = cases(__file__)


@pytest.fixture(scope="module")
def chatml() -> Any:
    made = tokenizer._train_byte_pairs(iter(["the fox asks the king"] * 5), 300, MARKERS["chatml"])
    use_template(made, "chatml")
    return made


def built(folder: Path, tokens: Any, rows: list[Any], kind: str = "causal_lm", **settings: Any) -> build.TokenisedData:
    return file_built(lines(folder, rows), tokens, kind, **settings)


def learned(data: build.TokenisedData, tokens: Any, number: int = 0) -> list[tuple[str, str]]:
    """Of each piece of a sample: its text, and the text of its targets."""
    found = []
    for ids, targets in data.train.tokens(number):
        mine = [token for token, target in zip(ids.tolist(), targets.tolist(), strict=True) if target]
        found.append((tokens.decode(ids.tolist()), tokens.decode(mine)))
    return found


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
MORE, LAST = {"role": "user", "content": "and"}, {"role": "assistant", "content": "bye"}
DIALOGUE = turn("user", "hi") + turn("assistant", "hello") + turn("user", "and") + turn("assistant", "bye")
CALL = '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(("row", "targets", "text", "words"), TABLES["LEARNED"])
def test_what_is_learned_of_a_row(
    tmp_path: Path, chatml: Any, row: dict[str, Any], targets: str, text: str, words: str
) -> None:
    assert learned(built(tmp_path, chatml, [row], targets=targets), chatml) == [(text, words)]


def test_calls_of_a_tool_are_the_same_tokens_in_either_layout(tmp_path: Path, chatml: Any) -> None:
    function = {"name": "sum", "description": "adds", "parameters": {"type": "object"}}
    call = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
    openai = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            LAST,
        ],
        "tools": [{"type": "function", "function": function}],
    }
    older = {
        **openai,
        "messages": [
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "sum", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "sum", "content": "2"},
            LAST,
        ],
    }
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "sum", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "bye"},
        ],
        "tools": json.dumps([function]),
    }
    found = []
    for number, row in enumerate((openai, older, sharegpt)):
        folder = tmp_path / str(number)
        folder.mkdir()
        found += learned(built(folder, chatml, [row]), chatml)
    text, words = found[0]
    assert found == [(text, words)] * 3
    assert words == f"{CALL}<|im_end|>bye<|im_end|>"
    assert text.endswith(
        turn("user", "hi")
        + turn("assistant", CALL)
        + turn("user", "\n<tool_response>\n2\n</tool_response>").replace("user\n\n", "user\n")
        + turn("assistant", "bye")
    )


def test_a_history_that_is_none(tmp_path: Path, chatml: Any) -> None:
    rows = [{"instruction": "and", "output": "bye", "history": history} for history in ([], None, "hi", [["hi"]])]
    report = built(tmp_path, chatml, rows).report
    assert report.train is not None
    assert {why: found.rows for why, found in report.train.dropped.items()} == {
        "history is not a list of pairs of question and answer": ["rows.jsonl:3", "rows.jsonl:4"]
    }


@pytest.mark.parametrize("row", TABLES["JUDGED"])
@pytest.mark.parametrize("streaming", [False, True])
def test_answers_that_are_judged_are_refused(tmp_path: Path, chatml: Any, row: dict[str, Any], streaming: bool) -> None:
    with pytest.raises(DataError, match=r"judged good or bad one by one .* set objective.kind=kto"):
        built(tmp_path, chatml, [row], streaming=streaming)
    if not streaming:
        _learn_judged(tmp_path, chatml, row)
    topic = {**{key: value for key, value in row.items() if key != "kto_tag"}, "label": "greetings"}
    assert len(built(tmp_path, chatml, [topic]).train) == 1


def test_judgements_are_read_by_their_names_and_as_numbers(tmp_path: Path, chatml: Any) -> None:
    """A ClassLabel may call 0 `true`; pandas makes floats of a column with gaps."""
    rows = [{"prompt": "hi", "completion": "hello", "label": label} for label in (0, 1)]
    kinds = {**dict.fromkeys(("prompt", "completion"), datasets.Value("string"))}
    table = datasets.Dataset.from_list(
        rows, features=datasets.Features({**kinds, "label": datasets.ClassLabel(names=["true", "false"])})
    )
    table.to_parquet(tmp_path / "named.parquet")
    section = DataSection(train=str(tmp_path / "named.parquet"), max_length=64, cache_dir=str(tmp_path / "cache"))  # type: ignore[arg-type]
    assert build.build(section, chatml, 0, ObjectiveSection(kind="kto")).train.batch([0])["good"].tolist() == [
        True,
        False,
    ]
    called = datasets.Features({**kinds, "label": datasets.ClassLabel(names=["bad", "good"])})
    datasets.Dataset.from_list(rows, features=called).to_parquet(tmp_path / "called.parquet")
    (tmp_path / "mine.py").write_text("def judged(row):\n    return {**row, 'label': row['label'] == 1}\n")
    section = section.model_copy(update={"train": [SourceSection(path=str(tmp_path / "called.parquet"))]})
    with pytest.raises(DataError, match=r"label is the class 'bad', which is neither true nor false \(data.map can"):
        build.build(section, chatml, 0, ObjectiveSection(kind="kto"))
    section = section.model_copy(update={"map": f"{tmp_path}/mine.py:judged"})
    mapped = build.build(section, chatml, 0, ObjectiveSection(kind="kto"))
    assert mapped.train.batch([0])["good"].tolist() == [False, True]
    floats = [{**row, "label": float(row["label"])} for row in rows]
    assert built(tmp_path, chatml, floats, "kto").train.batch([0, 1])["good"].tolist() == [False, True]
    with pytest.raises(DataError, match=r"judged good or bad one by one"):
        built(tmp_path, chatml, floats)


@pytest.mark.parametrize("completion", [{"prompt": [USER], "completion": [ANSWER]}, {"messages": [USER, ANSWER]}])
def test_an_answer_that_its_template_does_not_end_is_ended_in_any_layout(
    tmp_path: Path, completion: dict[str, Any]
) -> None:
    """GLM's: the token that begins the next turn is learned. A reward model reads what the template writes."""
    tokens, answer = tokenizer_for(GLM_45), "\n<think></think>\nhello"
    assert [words for _, words in learned(built(tmp_path, tokens, [completion]), tokens)] == [f"{answer}<|user|>"]
    pair = {"prompt": [USER], "chosen": [ANSWER], "rejected": [LAST]}
    for kind, end in (("preference", "<|user|>"), ("reward", "")):
        assert learned(built(tmp_path, tokens, [pair], kind), tokens)[0][1] == f"{answer}{end}", kind


def _learn_judged(folder: Path, tokens: Any, row: dict[str, Any]) -> None:
    """The same rows are what KTO learns from: the completion, and whether it is good."""
    column = "kto_tag" if "kto_tag" in row else "label"
    good = str(row[column]).lower() == "true"
    rows = [row, {**row, column: not good}, {**row, column: None}, {**row, column: "fine"}]
    data = built(folder, tokens, rows, "kto")
    assert data.train.batch([0, 1])["good"].tolist() == [good, not good]
    assert learned(data, tokens)[0][1].startswith("hello")
    assert data.report.train is not None
    assert {why: found.count for why, found in data.report.train.dropped.items()} == {
        f"{column} is missing or null": 1,
        f"{column} is neither true nor false": 1,
    }
    with pytest.raises(DataError, match=r"every row \(1\) is judged"):
        built(folder, tokens, [row], "kto")
    told = []
    for place in range(3):  # one of the three is held out, once the other
        judged = [{**row, column: good is not (number == place)} for number in range(3)]
        try:
            built(folder, tokens, judged, "kto", validation_fraction=0.34)
        except DataError as error:
            told.append(str(error))
    assert len(told) == 1
    assert "every row (2) is judged" in told[0]


PAIR = (
    (turn("user", "hi") + turn("assistant", "hello"), "hello<|im_end|>"),
    (turn("user", "hi") + turn("assistant", "go"), "go<|im_end|>"),
)
WORSE = {"role": "assistant", "content": "go"}


@pytest.mark.parametrize("row", TABLES["PAIRS"])
def test_pairs_in_any_layout_are_the_same_tokens(tmp_path: Path, chatml: Any, row: dict[str, Any]) -> None:
    assert tuple(learned(built(tmp_path, chatml, [row], "preference"), chatml)) == PAIR


def test_pairs_of_several_turns_hold_the_prompt_once(tmp_path: Path, chatml: Any) -> None:
    said = [USER, ANSWER, MORE]
    rows = [
        {"prompt": "hi", "chosen": [*said, LAST], "rejected": [*said, WORSE]},
        {
            "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: and\n\nAssistant: bye",
            "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: and\n\nAssistant: go",
        },
        {"instruction": "and", "history": [["hi", "hello"]], "chosen": "bye", "rejected": "go"},
    ]
    data = built(tmp_path, chatml, rows, "preference")
    for number in range(3):
        assert learned(data, chatml, number) == [
            (DIALOGUE, "bye<|im_end|>"),
            (DIALOGUE.replace("bye", "go"), "go<|im_end|>"),
        ]


def test_a_system_prompt_beside_a_text_prompt_makes_conversations(tmp_path: Path, chatml: Any) -> None:
    """Intel/orca_dpo_pairs, some of whose rows have an empty system prompt."""
    orca = {"system": "be kind", "question": "hi", "chosen": "hello", "rejected": "go"}
    named = {"columns": {"prompt": "question"}}
    data = built(tmp_path, chatml, [orca, {**orca, "question": "hi hi", "system": ""}], "preference", **named)
    brief, asked = turn("system", "be kind"), turn("user", "hi hi")
    assert learned(data, chatml, 0) == [(f"{brief}{text}", words) for text, words in PAIR]
    assert [text for text, _ in learned(data, chatml, 1)] == [asked + turn("assistant", w) for w in ("hello", "go")]
    assert data.report.train is not None
    assert data.report.train.noted == {}
    # Without one they are what they were: text behind text, whose end is the tokenizer's.
    text = [(f"hihello{chatml.eos_token}", f"hello{chatml.eos_token}"), (f"higo{chatml.eos_token}",) * 2]
    text[1] = (text[1][0], f"go{chatml.eos_token}")
    for plain in (
        {key: value for key, value in orca.items() if key != "system"},
        {**orca, "system": None, "tools": []},
    ):
        assert learned(built(tmp_path, chatml, [plain], "preference", **named), chatml) == text
    # One form for all pairs of a run: another source has no system prompt, and is rendered, too.
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({key: value for key, value in orca.items() if key != "system"}) + "\n")
    mixed = built(tmp_path, chatml, [orca], "preference", validation=str(held_out), **named)
    rendered = turn("user", "hi") + turn("assistant", "hello")
    assert mixed.validation is not None
    assert chatml.decode(mixed.validation.batch([0])["input_ids"][0]).startswith(rendered)
    # Where the first rows have none, a later one is not read, unless the column is named.
    rows = [{**orca, "question": f"hi{'!' * i}", "system": "be kind" if i == 100 else ""} for i in range(101)]
    counted = built(tmp_path, chatml, rows, "preference", **named)
    assert counted.report.train is not None
    assert {what: found.rows for what, found in counted.report.train.noted.items()} == {
        VERBATIM: [f"rows.jsonl:{row}" for row in range(1, 21)],
        "column system is not read": ["rows.jsonl:101"],
    }
    assert learned(counted, chatml)[0] == text[0]
    named["columns"]["system"] = "system"
    written = built(tmp_path, chatml, rows, "preference", **named)
    assert [learned(written, chatml, i)[0][0].startswith(brief) for i in (0, 100)] == [False, True]
    assert learned(written, chatml)[0] == PAIR[0]
    assert len({data.fingerprint for data in (counted, written)}) == 2


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_column_beside_text_is_counted_and_the_advice_of_a_refusal_leads_on(
    tmp_path: Path, chatml: Any, streaming: bool
) -> None:
    row = {"prompt": "hi", "completion": "hello", "tools": [{"type": "function", "function": {"name": "sum"}}]}
    report = built(tmp_path, chatml, [row | {"system": "be kind"}], streaming=streaming).report
    assert any("columns that are not read: tools" in line and "system" in line for line in report.warnings)
    row = {"prompt": "hi", "completion": "hello", "system": "be kind"}
    with pytest.raises(
        DataError,
        match=r"system has no effect .* or name the prompt data.columns.instruction and the completion data.col",
    ):
        built(tmp_path, chatml, [row], columns={"system": "system"}, streaming=streaming)
    columns = {"system": "system", "instruction": "prompt", "output": "completion"}
    data = built(tmp_path, chatml, [row], columns=columns, streaming=streaming)
    assert learned(data, chatml)[0] == (turn("system", "be kind") + PAIR[0][0], PAIR[0][1])


def test_sources_have_columns_of_their_own(tmp_path: Path, chatml: Any) -> None:
    (tmp_path / "other").mkdir()
    first = lines(tmp_path, [{"question": "hi", "reply": "hello", "prompt": "no"}])
    other = lines(tmp_path / "other", [{"prompt": "and", "completion": "bye"}])

    def read(own: dict[str, str], *others: str, **more: Any) -> list[tuple[str, str]]:
        train = [{"path": str(first), "columns": own}, *others]
        data = file_built(first, chatml, train=train, shuffle=False, **more)
        return [pair for number in range(len(data.train)) for pair in learned(data, chatml, number)]

    named, end = {"prompt": "question", "completion": "reply"}, chatml.eos_token
    first_row, usual = ("hihello" + end, "hello" + end), ("andbye" + end, "bye" + end)
    assert read(named, str(other)) == [first_row, usual]
    assert read({"text": "prompt"}, str(other)) == [("no" + end, "o" + end), usual], "not what was kept of the others"
    with pytest.raises(DataError, match=r"'rows.jsonl' has no column 'ask' \(columns\.prompt\); it has"):
        read({"prompt": "ask"})
    with pytest.raises(DataError, match=r"^columns\.input has no effect on .* the prompt columns\.instr"):
        read({**named, "input": "prompt"})
    with pytest.raises(ValidationError, match=r"data\.columns has no effect, because every source has columns"):
        read(named, columns={"prompt": "question"})


def test_margins_come_with_the_batch(tmp_path: Path, chatml: Any) -> None:
    pair = {"prompt": "hi", "chosen": [ANSWER], "rejected": [WORSE]}
    rows = [{**pair, "prompt": f"hi {gap}", "gap": gap} for gap in (0.5, None, "2", True, "much")]
    data = built(tmp_path, chatml, rows, "reward", columns={"margin": "gap"})
    assert data.train.batch([0, 1, 2])["margin"].tolist() == [0.5, 0.0, 2.0]
    assert data.report.train is not None
    assert {why: found.count for why, found in data.report.train.dropped.items()} == {
        "gap is true or false, not a finite number": 1,
        "gap is text, not a finite number": 1,
    }
    with pytest.raises(
        DataError, match=r"margin has no effect on 'rows.jsonl', .* or set objective.kind=reward, which"
    ):
        built(tmp_path, chatml, rows, "preference", columns={"margin": "gap"})


@pytest.fixture
def with_bos(chatml: Any) -> Any:
    """A tokenizer that has a begin-of-text token and does not add it, as SmolLM2's."""
    made = tokenizer._train_byte_pairs(iter(["the fox asks the king"] * 5), 300, ["<s>"])
    made.bos_token = "<s>"
    return made


@pytest.mark.parametrize(
    ("add_bos", "adds_it", "begins"),
    [(None, False, False), (None, True, True), (True, False, True), (True, True, True), (False, True, False)],
)
@pytest.mark.parametrize("row", [{"text": "the fox"}, {"prompt": "the", "completion": " fox"}])
def test_plain_text_begins_as_the_tokenizer_does(
    tmp_path: Path, with_bos: Any, row: dict[str, Any], add_bos: bool | None, adds_it: bool, begins: bool
) -> None:
    if adds_it:
        number = with_bos.bos_token_id
        with_bos.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", number)])
    data = built(tmp_path, with_bos, [row], add_bos=add_bos)
    end = with_bos.eos_token
    [(text, targets)] = learned(data, with_bos)
    assert text == ("<s>" if begins else "") + "the fox" + end
    if "prompt" in row:
        assert targets == " fox" + end
    else:  # nothing precedes the first token
        assert (
            targets == ("the fox" if begins else text.removeprefix(with_bos.tokenize("the fox")[0])[: -len(end)]) + end
        )
    asked = prompt_ids(with_bos, "the fox", tokenizer.bos_of(with_bos, None))  # as generation does
    assert (asked[0] == with_bos.bos_token_id) == adds_it


def test_add_bos_without_effect(tmp_path: Path, chatml: Any) -> None:
    with pytest.raises(DataError, match=r"data.add_bos has no effect on 'rows.jsonl', which holds conversations"):
        built(tmp_path, chatml, [{"messages": [USER, ANSWER]}], add_bos=True)
    with pytest.raises(BadInputError, match=r"data.add_bos: the tokenizer has no begin-of-text token"):
        built(tmp_path, chatml, [{"text": "the fox"}], add_bos=True)


def test_half_of_the_rows_dropped_is_an_error(tmp_path: Path, chatml: Any) -> None:
    rows = [{"text": "the fox"} if number % 2 else {"text": number} for number in range(40)]
    for streaming in (False, True):
        with pytest.raises(DataError) as caught:
            built(tmp_path, chatml, rows, max_dropped_fraction=0.49, streaming=streaming, max_length=16)
        message = str(caught.value)
        assert message.startswith("data.train: ")
        assert "(50.0%) cannot be used, and data.max_dropped_fraction allows 49.0%" in message
        assert "text is a number, not text: " in message
        assert "(rows.jsonl:1, rows.jsonl:3, rows.jsonl:5)" in message
        data = built(tmp_path, chatml, rows, max_dropped_fraction=0.5, streaming=streaming, max_length=16)
        assert data.report.train is not None
        assert data.report.train.num_dropped == data.report.train.kept


def test_a_line_end_behind_the_end_of_a_turn_is_no_missing_end(tmp_path: Path, chatml: Any) -> None:
    assert built(tmp_path, chatml, [{"messages": [USER, ANSWER]}], targets="all").report.warnings == []


@pytest.mark.parametrize("streaming", [False, True])
def test_blank_lines_are_counted_and_are_no_error(tmp_path: Path, chatml: Any, streaming: bool) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the fox"}\n\n\n')
    data = DataSection(train=[str(tmp_path / "a.jsonl")], max_length=16, streaming=streaming, cache_dir=str(tmp_path))  # type: ignore[list-item]
    report = build.build(data, chatml, 0).report.train
    assert report is not None
    assert report.dropped.keys() == {"blank line"}


def test_rows_that_are_too_long_and_dropped_on_request_are_no_error(tmp_path: Path, chatml: Any) -> None:
    rows = [{"text": "the fox " * (1 + 40 * (number % 2))} for number in range(4)]
    data = built(tmp_path, chatml, rows, max_dropped_fraction=0.0, long_rows="drop", max_length=16)
    assert data.report.train is not None
    assert data.report.train.num_dropped == 2


@pytest.mark.parametrize(("row", "kind", "hint"), TABLES["HINTS"])
def test_a_hint_fits_the_nearest_layout(tmp_path: Path, chatml: Any, row: dict[str, Any], kind: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        built(tmp_path, chatml, [row], kind)
    assert str(caught.value).endswith(f"for example {hint}")


def test_a_column_that_is_named_by_hand_is_read_once(tmp_path: Path, chatml: Any) -> None:
    """`input` as the instruction is not also what the instruction is about, nor is it as the system prompt."""
    row, asked = {"input": "hi", "output": "hello"}, turn("user", "hi") + turn("assistant", "hello")
    assert learned(built(tmp_path, chatml, [row], columns={"instruction": "input"}), chatml)[0][0] == asked
    behind = learned(built(tmp_path, chatml, [{**row, "instruction": "hi"}], columns={"system": "input"}), chatml)
    assert behind[0][0] == turn("system", "hi") + asked
    with pytest.raises(ValueError, match=r"data.columns, or a source's: instruction and input are both 'input'"):
        built(tmp_path, chatml, [row], columns={"instruction": "input", "input": "input"})


def test_rows_are_named_by_the_files_of_this_run(tmp_path: Path, chatml: Any) -> None:
    found = []
    for number in range(2):
        paths = []
        for folder in ("one", "two"):
            path = tmp_path / str(number) / folder / "rows.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text(f'{{"text": "the fox"}}\n{{"text": "{folder}"}}\n{{"text": 1}}\n')
            paths.append(str(path))
        if number == 1:  # the same rows in other folders, found in the cache
            (tmp_path / "1/two").rename(tmp_path / "1/three")
            paths[1] = paths[1].replace("two", "three")
        settings = {"train": paths, "max_length": 16, "cache_dir": str(tmp_path / "cache"), "max_dropped_fraction": 1.0}
        for streaming in (False, True):
            data = build.build(DataSection(**settings, streaming=streaming), chatml, 0)
            assert data.report.train is not None
            assert data.report.train.dropped["text is a number, not text"].rows == [
                "one/rows.jsonl:3",
                f"{('two', 'three')[number]}/rows.jsonl:3",
            ]
            if not streaming:
                names = [source.source for source in data.report.train.sources]
                assert names == ["one/rows.jsonl", f"{('two', 'three')[number]}/rows.jsonl"]
                found.append(data.fingerprint)
    assert found[0] == found[1], "a run goes on with files that were moved"
    assert len(list((tmp_path / "cache").glob("documents-*"))) == 2, "tokenised once"


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_are_evaluated_and_trained_on_are_told(tmp_path: Path, chatml: Any, streaming: bool) -> None:
    (tmp_path / "held.jsonl").write_text('{"text": "the fox"}\n{"text": "the king"}\n{"text": "the crow"}\n')
    rows = [{"text": "the king"}, {"text": "the fox"}, {"text": "the king"}, {"text": "the hare"}]
    data = built(tmp_path, chatml, rows, validation=str(tmp_path / "held.jsonl"), streaming=streaming, max_length=16)
    assert data.report.validation is not None
    assert data.report.validation.also_in_train == 2
    assert any("2 rows also in train" in warning for warning in data.report.warnings)


def lines(folder: Path, rows: list[Any]) -> Path:
    return write_rows(folder / "rows.jsonl", rows)


def file_built(path: Path, tokens: Any, kind: str = "causal_lm", **settings: Any) -> build.TokenisedData:
    given = {"max_length": 1024, "max_dropped_fraction": 1.0, "packing": False, **settings}
    data = DataSection(**{"train": str(path), "cache_dir": str(path.parent / "cache"), **given})
    return build.build(data, tokens, 0, ObjectiveSection(kind=kind))


def dropped(data: build.TokenisedData) -> dict[str, list[str]]:
    assert data.report.train is not None
    return {why: found.rows for why, found in data.report.train.dropped.items()}


def texts(data: build.TokenisedData, tokens: Any) -> list[str]:
    """Each sample's text."""
    return ["".join(tokens.decode(ids.tolist()) for ids, _ in data.train.tokens(n)) for n in range(len(data.train))]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_calls_in_a_table_are_the_same_tokens_as_in_lines(tmp_path: Path, chatml: Any, kind: str) -> None:
    """A table gives each call the arguments of all others, and each tool their parameters."""
    rows = []
    for argument in ("city", "sum"):
        call = {"function": {"name": "f", "arguments": {argument: "1"}}}
        tool = {"name": "f", "parameters": {"properties": {argument: {"enum": [None, "1"]}}}}
        rows.append({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]})
    table = datasets.Dataset.from_list(rows)
    place = tmp_path / f"rows.{kind}"
    table.to_parquet(place) if kind == "parquet" else table.save_to_disk(place)
    found = texts(file_built(place, chatml), chatml)
    assert found == texts(file_built(lines(tmp_path, rows), chatml), chatml)
    assert '"enum": [null, "1"]' in found[0]


def test_a_null_in_a_line_is_meant(tmp_path: Path, chatml: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"city": None}}}
    path = lines(tmp_path, [{"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}])
    assert '"arguments": {"city": null}' in texts(file_built(path, chatml), chatml)[0]


@pytest.mark.parametrize("last", [{"role": "user", "content": "and"}, {"role": "tool", "content": "5"}])
def test_what_is_compared_or_judged_ends_with_the_assistants_turn(
    tmp_path: Path, chatml: Any, last: dict[str, Any]
) -> None:
    other = {**ANSWER, "content": "go"}
    said = [USER, ANSWER, {**last, "content": "more"}]
    pairs = [{"chosen": [USER, ANSWER], "rejected": [USER, other]}, {"chosen": [USER, ANSWER, last], "rejected": said}]
    found = file_built(lines(tmp_path, pairs), chatml, "preference")
    assert dropped(found) == {"the last turn is not the assistant's": ["rows.jsonl:2"]}
    judged = [{"messages": [USER, ANSWER], "label": good} for good in (True, False)]
    found = file_built(lines(tmp_path, [*judged, {"messages": said, "label": True}]), chatml, "kto")
    assert dropped(found) == {"the last turn is not the assistant's": ["rows.jsonl:3"]}


def test_thoughts_that_are_no_text_are_named(tmp_path: Path, chatml: Any) -> None:
    thoughts = (None, "", "hm", 5, 0, ["hm"], {"hm": "hm"}, True)
    rows = [{"messages": [USER, {**ANSWER, "reasoning_content": thought}]} for thought in thoughts]
    assert dropped(file_built(lines(tmp_path, [{"messages": [USER, ANSWER]}, *rows]), chatml)) == {
        "a message's reasoning_content is a number, not text": ["rows.jsonl:5", "rows.jsonl:6"],
        "a message's reasoning_content is a list, not text": ["rows.jsonl:7"],
        "a message's reasoning_content is an object, not text": ["rows.jsonl:8"],
        "a message's reasoning_content is true or false, not text": ["rows.jsonl:9"],
    }


@pytest.mark.parametrize("cell", ["", " "])
def test_empty_cells_say_nothing(tmp_path: Path, chatml: Any, cell: str) -> None:
    asked = tmp_path / "asked.csv"
    asked.write_text(f"instruction,output,history,system\nhi,hello,{cell},{cell}\n")
    data = file_built(asked, chatml)
    assert dropped(data) == {}
    plain = [{"messages": [USER, ANSWER]}]
    assert texts(data, chatml) == texts(file_built(lines(tmp_path, plain), chatml), chatml)
    pairs = tmp_path / "pairs.csv"
    pairs.write_text(f"prompt,chosen,rejected,margin\nq,a,b,{cell}\nq,c,d,2\n")
    compared = file_built(pairs, chatml, "reward")
    assert dropped(compared) == {}
    assert compared.train.batch([0, 1])["margin"].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("nothing", ["", " ", "null", "[]", None])
def test_tools_and_calls_that_are_none(tmp_path: Path, chatml: Any, nothing: str | None) -> None:
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, {**ANSWER, "tool_calls": nothing}], "tools": nothing}]
    data = file_built(lines(tmp_path, rows), chatml)
    assert dropped(data) == {}
    first, second = texts(data, chatml)
    assert first == second


@pytest.mark.parametrize("named", [True, False])
def test_token_types_are_those_with_which_the_model_is_used(tmp_path: Path, named: bool) -> None:
    """Funnel's [CLS] is of type 2; BigBird's tokenizer knows types, and gives none where nobody asks."""
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "fox": 3, "king": 4}, "[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS]:2 $A:0 [SEP]:0",
        pair="[CLS]:2 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if named else [])]
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", model_input_names=names)
    path = lines(tmp_path, [{"text": "fox", "text_pair": "king", "label": label} for label in ("good", "bad")])
    batch = file_built(path, made, "sequence_classification", packing=None).train.batch([0])
    assert batch["input_ids"][0, :5].tolist() == [1, 3, 2, 4, 2]
    assert ("token_type_ids" in batch) is named
    if named:
        assert made("fox", "king")["token_type_ids"] == batch["token_type_ids"][0, :5].tolist() == [2, 0, 0, 1, 1]


def test_a_model_that_takes_types_for_words_is_called_without_any(tmp_path: Path, chatml: Any) -> None:
    """GPT-2 adds the embedding of the word with the type's number, to all tokens where types are 0."""
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 400, "num_labels": 2}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, pad_token_id=tokenizer.pad_id(chatml))).eval()
    path = lines(tmp_path, [{"text": text, "label": label} for text, label in (("the fox", "good"), ("a king", "bad"))])
    batch = file_built(path, chatml, "sequence_classification", packing=None).train.batch([0, 1])
    with torch.no_grad():
        plain = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        assert torch.equal(SequenceClassification(model, 2).logits(model, batch), plain)


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this datasets has no such type")
@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_nulls_that_an_object_was_given_are_kept_where_its_type_holds_its_own_keys(tmp_path: Path, kind: str) -> None:
    """Objects of one struct are filled up with nulls for each other's keys; those of the type Json are as written."""
    called = [{"role": "assistant", "name": None, "arguments": {"city": "Rome", "unit": None}}]
    features = datasets.Features(
        {"tools": datasets.Json(), "messages": datasets.List({key: datasets.Value("string") for key in called[0]})}
    )
    features["messages"].feature["arguments"] = datasets.Json()
    table = datasets.Dataset.from_dict({"tools": [{"a": None}], "messages": [called]}, features=features)
    if kind == "saved":
        table.save_to_disk(tmp_path / "rows")
    else:
        table.to_parquet(tmp_path / "rows.parquet")
    path = tmp_path / ("rows" if kind == "saved" else "rows.parquet")
    (shard,) = open_source(SourceSection(path=str(path)), "data.train").shards
    (row,) = read(shard)
    assert row == {
        "tools": {"a": None},
        "messages": [{"role": "assistant", "arguments": {"city": "Rome", "unit": None}}],
    }
