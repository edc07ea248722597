"""Broken rows and files: a bad row is counted under its reason and named, the good ones around it stay and keep
their numbers; a file or a setting that cannot be used ends in one clear error. Nothing half-written is kept."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.cases import cases

from toolkit import Recipe
from toolkit.data import build
from toolkit.data.documents import processes
from toolkit.data.rows import files, readers, sources
from toolkit.data.templates.templates import use_template
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import ColumnsSection, DataSection, SourceSection

SECONDS = 300
"""Nothing here takes one; what takes so long does not end."""

CLASSES = ObjectiveSection(kind="sequence_classification", labels=["good", "bad"])
ANY_CLASSES = ObjectiveSection(kind="sequence_classification")

ALTERNATING = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
"""A template that refuses conversations, as Mistral's does."""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """What does not end fails."""

    def fail(*_: Any) -> None:
        pytest.fail(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def new_tokenizer(template: str | None) -> Any:
    made = tokenizer._train_byte_pairs(iter(["the fox asks the king"] * 5), 300, ["<|im_start|>", "<|im_end|>"])
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def chatml() -> Any:
    made = new_tokenizer(None)
    use_template(made, "chatml")
    return made


def section(folder: Path, train: str, **settings: Any) -> DataSection:
    return DataSection(
        train=str(folder / train),
        **{"max_length": 1024, "max_dropped_fraction": 1.0, "cache_dir": str(folder / "cache"), **settings},
    )


def report_of(
    folder: Path, train: str, tokens: Any, objective: ObjectiveSection | None = None, **settings: Any
) -> dict[str, Any]:
    report = build.build(section(folder, train, **settings), tokens, 0, objective).report.to_dict()
    assert unfinished(folder) == []
    return report


def refusal(folder: Path, train: str, tokens: Any, objective: Any = None, **settings: Any) -> str:
    """The error's text: one line that a terminal can show."""
    objective = objective and ObjectiveSection.model_validate(objective)
    with pytest.raises(BadInputError) as caught:
        build.build(section(folder, train, **settings), tokens, 0, objective)
    assert caught.value.exit_code == 2
    assert unfinished(folder) == []
    message = str(caught.value)
    message.encode()
    assert message.startswith("data")
    assert "\n" not in message
    assert len(message) < 800
    return message


def unfinished(folder: Path) -> list[Path]:
    """What is left in the cache of work that was not done."""
    return [path for path in folder.glob("cache/*") if not path.name.startswith(("documents-", "samples-"))]


def dropped(report: dict[str, Any], split: str = "train") -> dict[str, list[str]]:
    """Reason -> the rows' names; their counts agree."""
    counts = report[split]
    assert all(found["count"] == len(found["rows"]) for found in counts["dropped"].values())
    assert counts["num_dropped"] == sum(found["count"] for found in counts["dropped"].values())
    assert counts["read"] == counts["kept"] + counts["num_dropped"]
    return {reason: found["rows"] for reason, found in counts["dropped"].items()}


def shown(report: dict[str, Any]) -> dict[str, str]:
    """Row -> its text, of the first rows that are kept."""
    return {example["row"]: "".join(text for text, _ in example["segments"]) for example in report["examples"]}


def as_line(row: Any) -> bytes:
    return (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n"


def lines(path: Path, rows: list[Any]) -> None:
    """A row on each line; bytes as they are."""
    path.write_bytes(b"".join(map(as_line, rows)))


def chat(*messages: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


def said(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASKED, ANSWERED = said("user", "the question"), said("assistant", "the answer")


def calls(*found: Any) -> dict[str, Any]:
    return chat(ASKED, {"role": "assistant", "tool_calls": list(found)})


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"deeper": value}
    return value


# ---- bad rows among good ones ----

GOOD: dict[str, Callable[[int], dict[str, Any]]] = {
    "chat": lambda i: chat(said("user", f"question {i}"), ANSWERED),
    "prompt": lambda i: {"prompt": f"question {i} ", "completion": "the answer"},
    "instruction": lambda i: {"instruction": f"question {i}", "output": "the answer"},
    "text": lambda i: {"text": f"question {i} and the answer"},
    "class": lambda i: {"text": f"question {i}", "label": ("good", "bad")[i % 2]},
    "pair": lambda i: {"text": f"question {i}", "text_pair": "the answer", "label": ("good", "bad")[i % 2]},
}
TABLES = cases(__file__)
TOO_DEEP = "JSON nested too deeply, or with a number that is too long"
LONE = "half a \ud800 character"

LINES: dict[str, tuple[bytes, str]] = {
    **{name: (line.encode("latin-1"), reason) for name, (line, reason) in TABLES["LINES"].items()},
    "nested beyond measure": (b"[" * 100_000 + b"]" * 100_000, TOO_DEEP),
    "number of 5000 digits": (b'{"text": ' + b"7" * 5000 + b"}", TOO_DEEP),
}

ROWS: dict[str, list[tuple[str, Any, str]]] = TABLES["ROWS"]
ROWS["chat"] += [
    ("tools nested beyond measure", chat(ASKED, ANSWERED, tools="[" * 10_000), "tools is not JSON"),
]

ROWS["text"] += [(f"line, {name}", row, reason) for name, (row, reason) in LINES.items()]


@pytest.mark.parametrize("layout", ROWS)
def test_all_bad_rows_of_a_layout_together(tmp_path: Path, chatml: Any, layout: str) -> None:
    """Each in its place between good ones, tokenised in one call, and a tokenizer trained on the same file."""
    rows = [row for _, bad, _ in ROWS[layout] for row in (GOOD[layout](7), bad)]
    lines(tmp_path / "rows.jsonl", rows)
    classes = CLASSES if layout in ("class", "pair") else None
    report = report_of(tmp_path, "rows.jsonl", chatml, classes)
    found = report["train"]
    expected: dict[str, list[str]] = {}
    for number, (_, _, reason) in enumerate(ROWS[layout], start=1):
        expected.setdefault(reason, []).append(f"rows.jsonl:{2 * number}")
    assert {reason: rows["rows"] for reason, rows in found["dropped"].items()} == expected
    assert found["kept"] == len(ROWS[layout])
    assert list(shown(report)) == [f"rows.jsonl:{2 * number - 1}" for number in range(1, found["kept"] + 1)]
    assert all("question 7" in text for text in shown(report).values())
    trained = tokenizer.train(section(tmp_path, "rows.jsonl"), 300, (classes or ObjectiveSection()).kind)
    assert (trained / "tokenizer.json").exists()


def test_what_a_template_refuses_is_a_bad_row(tmp_path: Path) -> None:
    good, called = GOOD["chat"], {"role": "assistant", "tool_calls": [{"name": "f"}]}
    for messages, reason in (
        ([ASKED, ASKED, ANSWERED], "Roles must alternate user/assistant"),
        ([ASKED, called], "'dict object' has no attribute 'content'"),  # fails in the template's own code
    ):
        lines(tmp_path / "rows.jsonl", [good(1), chat(*messages), good(3)])
        report = report_of(tmp_path, "rows.jsonl", new_tokenizer(ALTERNATING))
        [(found, names)] = dropped(report).items()
        assert found.startswith(f"the chat template rejects it: {reason}")
        assert names == ["rows.jsonl:2"]
        assert list(shown(report)) == ["rows.jsonl:1", "rows.jsonl:3"]


# ---- files of every kind ----

TEXTS = ["question 1", "question 2", None, "question 4", ""]
CHATS = [GOOD["chat"](1), chat(said("narrator", "once"), ANSWERED), GOOD["chat"](3)]
NULL, EMPTY = "text is missing or null", "text is empty"


@dataclass(frozen=True)
class Kind:
    """Files, some of whose rows are bad: the reasons and names of these, and the names of the first good ones."""

    path: str
    write: Callable[[Path], Any]
    dropped: dict[str, list[str]]
    kept: list[str]
    settings: dict[str, Any] = field(default_factory=dict)


def content(name: str, text: str | bytes) -> Callable[[Path], Any]:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / name).write_bytes(data)


def text_table() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": TEXTS})


def text_lines(texts: list[Any] = TEXTS) -> bytes:
    return b"".join(as_line({"text": text}) for text in texts)


def saved(**splits: datasets.Dataset) -> Callable[[Path], Any]:
    return lambda folder: datasets.DatasetDict(splits).save_to_disk(folder / "saved")


def saved_in_a_format(folder: Path) -> None:
    """Its rows would come as tensors, without their texts."""
    table = datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(len(TEXTS)))})
    table.set_format("numpy", columns=["number"])
    table.save_to_disk(folder / "saved")


def one_arrow_file(folder: Path) -> None:
    text_table().save_to_disk(folder / "saved")
    next(folder.glob("saved/*.arrow")).rename(folder / "a.arrow")


def two_files(folder: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_bytes(text_lines())


def two_layouts(folder: Path) -> None:
    lines(folder / "a.jsonl", [GOOD["chat"](1), GOOD["chat"](2)])
    lines(folder / "b.jsonl", [GOOD["text"](1), GOOD["chat"](2), GOOD["text"](3)])


def of_texts(name: str, write: Callable[[Path], Any]) -> Kind:
    """A file or folder of `TEXTS`."""
    return Kind(name, write, {NULL: [f"{name}:3"], EMPTY: [f"{name}:5"]}, [f"{name}:{row}" for row in (1, 2, 4)])


KINDS = {
    **{
        name: Kind(path, content(path, text.encode("latin-1")), *rows)
        for name, (path, text, *rows) in TABLES["KINDS"].items()
    },
    "json of lines": of_texts("a.json", content("a.json", text_lines())),
    "parquet": of_texts("a.parquet", lambda folder: text_table().to_parquet(folder / "a.parquet")),
    "parquet of conversations": Kind(
        "a.parquet",
        lambda folder: datasets.Dataset.from_list([*CHATS, {"messages": None}]).to_parquet(folder / "a.parquet"),
        {"a message has an unknown role": ["a.parquet:2"], "messages is missing or null": ["a.parquet:4"]},
        ["a.parquet:1", "a.parquet:3"],
    ),
    "arrow file": of_texts("a.arrow", one_arrow_file),
    "folder": of_texts("saved", lambda folder: text_table().save_to_disk(folder / "saved")),
    "folder of splits": of_texts("saved", saved(test=datasets.Dataset.from_dict({"text": ["a"]}), train=text_table())),
    "folder with a format": of_texts("saved", saved_in_a_format),
    "gz": of_texts("a.jsonl.gz", content("a.jsonl.gz", gzip.compress(text_lines()))),
    "xz": Kind(
        "a.csv.xz",
        content("a.csv.xz", lzma.compress(b'text,n\nquestion 1,1\n"",2\n\xff,3\nquestion 4,4\n')),
        {EMPTY: ["a.csv.xz:2"], "not UTF-8": ["a.csv.xz:3"]},
        ["a.csv.xz:1", "a.csv.xz:4"],
    ),
    "two files": Kind(
        "*.jsonl",
        two_files,
        {NULL: ["a.jsonl:3", "b.jsonl:3"], EMPTY: ["a.jsonl:5", "b.jsonl:5"]},
        ["a.jsonl:1", "a.jsonl:2", "a.jsonl:4"],
    ),
    "two files of different layouts": Kind(
        "*.jsonl",
        two_layouts,
        {"messages is missing or null": ["b.jsonl:1", "b.jsonl:3"]},
        ["a.jsonl:1", "a.jsonl:2", "b.jsonl:2"],
    ),
    "a parquet file's name with brackets": of_texts(
        "a[1].parquet", lambda folder: text_table().to_parquet(folder / "a[1].parquet")
    ),
    "columns by hand": Kind(
        "a.jsonl",
        content("a.jsonl", b'{"body": "question 1"}\n{"body": 5}\n{"text": "question 3"}\n'),
        {"body is a number, not text": ["a.jsonl:2"], "body is missing or null": ["a.jsonl:3"]},
        ["a.jsonl:1"],
        {"columns": ColumnsSection(text="body")},
    ),
}


def test_bad_rows_of_every_kind_of_file(tmp_path: Path, chatml: Any) -> None:
    for number, (name, kind) in enumerate(KINDS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        kind.write(folder)
        report = report_of(folder, kind.path, chatml, **kind.settings)
        assert dropped(report) == kind.dropped, name
        assert list(shown(report))[: len(kind.kept)] == kind.kept, name
        assert all("question" in text for text in shown(report).values()), name


def test_the_rows_behind_a_stray_quote_are_whole(tmp_path: Path, chatml: Any) -> None:
    (tmp_path / "a.csv").write_text('text,n\n"stray,1\nquestion 2,2\n"question 3",3\n"question\n4",4\nquestion 5,5\n')
    report = report_of(tmp_path, "a.csv", chatml)
    end = chatml.eos_token
    assert shown(report) == {"a.csv:4": f"question\n4{end}", "a.csv:5": f"question 5{end}"}
    assert dropped(report) == {"not CSV: ',' expected after '\"'": ["a.csv:1", "a.csv:2", "a.csv:3"]}


def test_a_quote_that_is_never_closed_takes_up_no_more_than_a_field(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_FIELD_BYTES", 100)
    rows = [f"question {i},{i}\n" for i in range(1, 21)]
    (tmp_path / "a.csv").write_text('text,n\n"' + "".join(rows))
    lost = "not CSV: field larger than field limit (100)"
    assert list(dropped(report_of(tmp_path, "a.csv", chatml))) == [lost]


@pytest.mark.parametrize("piece", [1, 99, 100, 101])
def test_names_hold_across_the_pieces_of_a_file(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """The file is cut into pieces amid its lines or between them; one line is longer than many of them."""
    monkeypatch.setattr(sources, "SHARD_BYTES", piece)
    rows: list[Any] = [json.dumps({"text": f"question {i:02}"}).encode().ljust(49) for i in range(1, 41)]
    rows[4] = b""
    rows[9] = json.dumps({"text": "question " * 100}).encode()
    rows[20] = b"no JSON"
    rows[39] = b'{"text": "half'
    lines(tmp_path / "rows.jsonl", rows)
    report = report_of(tmp_path, "rows.jsonl", chatml)
    assert dropped(report) == {
        "blank line": ["rows.jsonl:5"],
        "not JSON": ["rows.jsonl:21", "rows.jsonl:40"],
    }
    assert report["train"]["kept"] == 37


@pytest.mark.slow
def test_several_processes_name_the_same_rows(tmp_path: Path, chatml: Any) -> None:
    two_files(tmp_path)
    alone = report_of(tmp_path, "*.jsonl", chatml)
    together = report_of(tmp_path, "*.jsonl", chatml, num_proc=2, cache_dir=str(tmp_path / "cache" / "documents-2"))
    assert together["train"]["dropped"] == alone["train"]["dropped"]
    assert together["examples"] == alone["examples"]


# ---- rows that are all right ----

LATE = as_line({"text": "question 1", "n": nested(300), LONE: 1})
FINE = [*TABLES["FINE"].items(), ("columns that nobody asked for", ("a.jsonl", LATE.decode(), "question 1"))]


def test_what_is_unusual_but_right_is_kept(tmp_path: Path, chatml: Any) -> None:
    for number, (case, (name, text, expected)) in enumerate(FINE):
        folder = tmp_path / str(number)
        folder.mkdir()
        content(name, text.encode("latin-1"))(folder)
        report = report_of(folder, name, chatml)
        assert dropped(report) == {}, case
        assert expected in shown(report)[f"{name}:1"], case


def test_columns_that_come_late_are_read(tmp_path: Path, chatml: Any) -> None:
    """A row need not have all columns, so the first rows do not tell what the later ones have."""
    late = chat(ASKED, ANSWERED, system="be late", tools=[{"name": "f"}])
    lines(tmp_path / "rows.jsonl", [*[GOOD["chat"](1)] * sources.ROWS_LOOKED_AT, late])
    built = build.build(section(tmp_path, "rows.jsonl", packing=False), chatml, 0)
    text = chatml.decode(built.train.batch([sources.ROWS_LOOKED_AT])["input_ids"][0])
    assert "be late" in text
    assert '{"name": "f"}' in text


def test_a_column_by_hand_that_a_layout_can_do_without(tmp_path: Path, chatml: Any) -> None:
    lines(tmp_path / "rows.jsonl", [{**GOOD["chat"](1), "rules": "be kind"}, {**GOOD["chat"](2), "rules": 5}])
    report = report_of(tmp_path, "rows.jsonl", chatml, columns=ColumnsSection(system="rules"))
    assert "be kind" in shown(report)["rows.jsonl:1"]
    assert dropped(report) == {"system is a number, not text": ["rows.jsonl:2"]}


# ---- what cannot be used at all ----


@dataclass(frozen=True)
class Refused:
    """Files or settings, and what the error says about them."""

    path: str
    write: Callable[[Path], Any]
    says: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)


def refused(name: str, text: str | bytes, *says: str) -> Refused:
    return Refused(name, content(name, text), (name, *says))


def nothing(folder: Path) -> None:
    pass


def parquet(folder: Path) -> bytes:
    table = datasets.Dataset.from_dict({"text": [f"question {i}" for i in range(2000)]})
    table.to_parquet(folder / "whole.parquet")
    return (folder / "whole.parquet").read_bytes()


def spoilt_parquet(folder: Path) -> None:
    data = bytearray(parquet(folder))
    data[200:600] = b"\xff" * 400
    (folder / "a.parquet").write_bytes(data)


def saved_and_cut(folder: Path) -> None:
    text_table().save_to_disk(folder / "saved")
    file = next(folder.glob("saved/*.arrow"))
    file.write_bytes(file.read_bytes()[:300])


def saved_and_lost(folder: Path) -> None:
    text_table().save_to_disk(folder / "saved")
    next(folder.glob("saved/*.arrow")).unlink()


def saved_and_half_described(folder: Path) -> None:
    text_table().save_to_disk(folder / "saved")
    (folder / "saved" / "state.json").write_text('{"_data_fi')


def no_rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": []}, features=datasets.Features({"text": datasets.Value("string")}))


def packed_parquet(folder: Path) -> None:
    (folder / "a.parquet.gz").write_bytes(gzip.compress(parquet(folder)))


def good_and_empty(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(text_lines())
    (folder / "b.jsonl").touch()


MANY_LINES = b"".join(as_line({"text": f"question {i * 7919 % 10007}"}) for i in range(2000))
UNKNOWN = "matches no known column layout; it has"
NEEDED = "needed: messages; prompt + completion; instruction + output; text"
MANY_KEYS = {f"{LONE} {i}\n{'long' * 100}": i for i in range(3000)}

REFUSED = {
    **{
        name: Refused(path, content(path, text.encode("latin-1")), *rest)
        for name, (path, text, *rest) in TABLES["REFUSED"].items()
    },
    "no file": Refused("a.jsonl", nothing, ("data.train: there is no file", "a.jsonl")),
    "glob that matches nothing": Refused("none*.jsonl", nothing, ("data.train: there is no file", "none*.jsonl")),
    "link to nothing": Refused(
        "a.jsonl", lambda folder: (folder / "a.jsonl").symlink_to(folder / "lost"), ("data.train", "a link to a file")
    ),
    "folder": Refused(
        "rows", lambda folder: (folder / "rows").mkdir(), ("data.train", "is a folder; name files", "*.jsonl")
    ),
    "empty file among others": Refused("*.jsonl", good_and_empty, ("data.train", "b.jsonl' is empty")),
    "one object of thousands of keys": refused(
        "a.json", json.dumps(MANY_KEYS, indent=1), "the keys half a \\ud800 character 0\\nlonglong", "2,990 more"
    ),
    "gz, cut": refused("a.jsonl.gz", gzip.compress(MANY_LINES)[:-500], "cannot be read", "ended before the end"),
    "gz of nothing": refused("a.jsonl.gz", gzip.compress(b""), "holds no rows"),
    "parquet, spoilt": Refused("a.parquet", spoilt_parquet, ("a.parquet' cannot be read",)),
    "parquet, no rows": Refused(
        "a.parquet", lambda folder: no_rows().to_parquet(folder / "a.parquet"), ("a.parquet", "holds no rows")
    ),
    "parquet of numbers": Refused(
        "a.parquet",
        lambda folder: datasets.Dataset.from_dict({"text": [1, 2]}).to_parquet(folder / "a.parquet"),
        ("data.train", "text is a number, not text: 2 (a.parquet:1, a.parquet:2)"),
    ),
    "parquet, packed": Refused(
        "a.parquet.gz", packed_parquet, ("data.train", "a compressed .parquet file; decompress it")
    ),
    "folder without a train split": Refused(
        "saved", saved(test=text_table()), ("data.train", "has no split train; it has test", "saved/test")
    ),
    "folder, rows cut": Refused("saved", saved_and_cut, ("data.train", "saved' cannot be read")),
    "folder, rows lost": Refused("saved", saved_and_lost, ("data.train", "saved' cannot be read", "No such file")),
    "folder, half described": Refused("saved", saved_and_half_described, ("data.train", "saved' cannot be read")),
    "folder, no rows": Refused(
        "saved", lambda folder: no_rows().save_to_disk(folder / "saved"), ("data.train", "saved' holds no rows")
    ),
    "thousands of columns": refused("a.jsonl", as_line(MANY_KEYS), UNKNOWN, "and 2,990 more", NEEDED),
}


def test_what_cannot_be_used_is_one_clear_error(tmp_path: Path, chatml: Any) -> None:
    for number, (name, case) in enumerate(REFUSED.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        case.write(folder)
        tokens = new_tokenizer(None) if name == "no chat template" else chatml
        message = refusal(folder, case.path, tokens, **case.settings)
        assert [words for words in case.says if words not in message] == [], (name, message)


def test_validation_is_named_where_it_is_at_fault(tmp_path: Path, chatml: Any) -> None:
    lines(tmp_path / "rows.jsonl", [GOOD["text"](1)])
    lines(tmp_path / "bad.jsonl", [{"text": None}])
    saved(train=text_table())(tmp_path)
    for name, says in (
        ("lost.jsonl", "there is no file"),
        ("bad.jsonl", "none of its rows (1)"),
        ("saved", "no split"),
    ):
        message = refusal(tmp_path, "rows.jsonl", chatml, validation=str(tmp_path / name))
        assert message.startswith(f"data.validation: {says}" if name == "bad.jsonl" else "data.validation: ")
        assert says in message


def test_a_weight_of_rows_that_are_all_bad(tmp_path: Path, chatml: Any) -> None:
    lines(tmp_path / "rows.jsonl", [GOOD["text"](1)])
    lines(tmp_path / "bad.jsonl", [{"text": None}])
    mix = [SourceSection(path=str(tmp_path / name), weight=1.0) for name in ("rows.jsonl", "bad.jsonl")]
    with pytest.raises(BadInputError, match=r"data\.train: 'bad\.jsonl' has a weight, but none of its rows"):
        build.build(section(tmp_path, "rows.jsonl").model_copy(update={"train": mix}), chatml, 0)
    assert unfinished(tmp_path) == []


def test_a_compression_that_nothing_installed_reads(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "infer_compression", lambda name: None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"(\xb5/\xfd")
    assert "cannot be decompressed here; install zstandard" in refusal(tmp_path, "a.jsonl.zst", chatml)


def test_a_file_that_may_not_be_read(tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(tmp_path / "rows.jsonl", [GOOD["text"](1)])

    def forbidden(path: Path, mode: str) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    assert "rows.jsonl' cannot be read: [Errno 13] Permission denied" in refusal(tmp_path, "rows.jsonl", chatml)


# ---- long, repeated and held-out rows ----


def prompts(folder: Path, good: int, long: int) -> None:
    rows = [{"prompt": f"question {i} ", "completion": "yes"} for i in range(good)]
    rows[1:1] = [{"prompt": "question ", "completion": f"{i} {'long ' * 30}"} for i in range(long)]
    lines(folder / "rows.jsonl", rows)


def test_long_rows_are_an_error_past_one_percent(tmp_path: Path, chatml: Any) -> None:
    prompts(tmp_path, good=99, long=1)
    report = report_of(tmp_path, "rows.jsonl", chatml, max_length=32)
    assert dropped(report) == {"longer than data.max_length": ["rows.jsonl:2"]}
    prompts(tmp_path, good=98, long=2)
    message = refusal(tmp_path, "rows.jsonl", chatml, max_length=32)
    assert message.startswith(
        "data.train: 2 of 100 rows (2.0%) are longer than data.max_length, 32 tokens; the longest"
    )
    assert message.endswith("data.long_rows=drop, truncate or split")


LONG = "the fox " * 40
ALL_LONG: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "answers": ("causal_lm", {"prompt": "a", "completion": LONG}, {}, ["drop", "truncate", "split"]),
    "text": ("causal_lm", {"text": LONG}, {"long_rows": "error"}, ["drop", "truncate", "split"]),
    "a stream": ("causal_lm", {"text": LONG}, {"long_rows": "error", "streaming": True}, ["drop", "truncate", "split"]),
    "each turn": (
        "causal_lm",
        chat({"role": "user", "content": LONG}, {"role": "assistant", "content": "a"}),
        {"targets": "each_turn"},
        ["drop", "truncate", "split"],
    ),
    "pairs": ("preference", {"prompt": LONG, "chosen": "a", "rejected": "b"}, {}, ["drop"]),
    "judged": ("kto", {"prompt": LONG, "completion": "a", "label": True}, {}, ["drop"]),
    "classes": ("sequence_classification", {"text": LONG, "label": "good"}, {}, ["drop", "truncate"]),
    "tags": ("token_classification", {"tokens": ["a"] * 90, "tags": ["A"] * 90}, {}, ["drop", "truncate"]),
    "targets": ("seq2seq", {"source": LONG, "target": "a"}, {}, ["drop", "truncate"]),
}
"""Rows that are too long -> objective, the long row, settings, what may become of it."""

SHORT: dict[str, list[dict[str, Any]]] = {
    "kto": [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)],
    "sequence_classification": [{"text": "a", "label": label} for label in ("good", "bad")],
    "token_classification": [{"tokens": ["a", "b"], "tags": ["A", "B"]}] * 2,
    "preference": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2,
    "seq2seq": [{"source": "a", "target": "b"}] * 2,
}


def test_what_an_error_about_long_rows_advises_is_possible(tmp_path: Path, chatml: Any) -> None:
    """Each value that it names: the recipe takes it, and the rows are used."""
    for number, (name, (kind, long, settings, ways)) in enumerate(ALL_LONG.items()):
        cut = {key: value.replace(LONG, "a fox") for key, value in long.items() if isinstance(value, str)}
        short = SHORT.get(kind, [{**long, **cut}] * 2)
        if kind == "causal_lm" and "messages" in long:
            short = [chat({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})] * 2
        file, objective = f"{number}.jsonl", ObjectiveSection(kind=kind)
        lines(tmp_path / file, [*short * 10, *[long] * 20])
        message = refusal(tmp_path, file, chatml, objective, max_length=32, **settings)
        advised = re.findall(r"\w+", message.rpartition("data.long_rows=")[2])
        assert [word for word in advised if word != "or"] == ways, name
        for way in ways:
            values = {**settings, "long_rows": way}
            data = section(tmp_path, file, max_length=32, **values)
            Recipe.from_mapping(
                {
                    "model": {"name_or_path": "m"},
                    "data": data.model_dump(exclude_unset=True),
                    "objective": {"kind": kind},
                    "optimizer": {"learning_rate": 1e-3},
                    "training": {"output_dir": "o", "max_steps": 1},
                }
            )
            assert report_of(tmp_path, file, chatml, objective, max_length=32, **values)["train"]["kept"] > 0, name


@pytest.mark.parametrize(
    ("policy", "expected", "tokens_cut"),
    [("drop", ["rows.jsonl:2", "rows.jsonl:3"], False), ("truncate", [], True), ("split", [], False)],
)
def test_long_rows_as_the_recipe_says(
    tmp_path: Path, chatml: Any, policy: str, expected: list[str], tokens_cut: bool
) -> None:
    prompts(tmp_path, good=3, long=2)
    report = report_of(tmp_path, "rows.jsonl", chatml, max_length=32, long_rows=policy)
    assert dropped(report) == ({"longer than data.max_length": expected} if expected else {})
    long = report["train"]["long"]
    assert (long["count"], long["rows"]) == (2, ["rows.jsonl:2", "rows.jsonl:3"])
    assert (long["cut_tokens"] > 0) == tokens_cut == any("cut off" in told for told in report["warnings"])


def test_a_long_prompt_leaves_nothing_to_learn(tmp_path: Path, chatml: Any) -> None:
    lines(tmp_path / "rows.jsonl", [GOOD["prompt"](1), {"prompt": "long " * 50, "completion": "b"}, GOOD["prompt"](3)])
    report = report_of(tmp_path, "rows.jsonl", chatml, max_length=32, long_rows="truncate")
    assert dropped(report) == {"nothing to learn within 32 tokens (data.max_length)": ["rows.jsonl:2"]}


def test_repeated_rows_are_counted_and_kept(tmp_path: Path, chatml: Any) -> None:
    once, twice = GOOD["text"](1), GOOD["text"](2)
    lines(tmp_path / "rows.jsonl", [once, twice, {"text": None}, twice, twice])
    lines(tmp_path / "held.jsonl", [b"no JSON", twice, GOOD["text"](9)])
    report = report_of(tmp_path, "rows.jsonl", chatml, validation=str(tmp_path / "held.jsonl"))
    assert report["train"]["kept"] == 4
    assert report["train"]["duplicates"] == {"count": 2, "rows": ["rows.jsonl:4", "rows.jsonl:5"]}
    assert dropped(report, "validation") == {"not JSON": ["held.jsonl:1"]}
    assert report["validation"]["also_in_train"] == 1


def test_bad_rows_are_not_held_out(tmp_path: Path, chatml: Any) -> None:
    lines(tmp_path / "rows.jsonl", [{"text": None}, GOOD["text"](2), b"no JSON", GOOD["text"](4)])
    report = report_of(tmp_path, "rows.jsonl", chatml, validation_fraction=0.5)
    assert (report["train"]["kept"], report["validation"]["kept"]) == (1, 1)
    assert dropped(report) == {NULL: ["rows.jsonl:1"], "not JSON": ["rows.jsonl:3"]}


def test_a_stream_names_its_bad_rows(tmp_path: Path, chatml: Any) -> None:
    lines(tmp_path / "rows.jsonl", [GOOD["text"](1), b"no JSON", GOOD["text"](3), {"text": ""}])
    found = report_of(tmp_path, "rows.jsonl", chatml, streaming=True, max_length=16)["train"]["dropped"]
    assert {reason: set(rows["rows"]) for reason, rows in found.items()} == {
        "not JSON": {"rows.jsonl:2"},
        EMPTY: {"rows.jsonl:4"},
    }


def test_labels_that_are_numbers_or_truths(tmp_path: Path, chatml: Any) -> None:
    """1.0 is 1, and true is a name of its own; what names no class does not become one."""
    rows = [{"text": f"question {i}", "label": label} for i, label in enumerate([1, 1.0, True, "1", " 1 ", 0.5, None])]
    lines(tmp_path / "rows.jsonl", rows)
    report = report_of(tmp_path, "rows.jsonl", chatml, ANY_CLASSES)
    assert report["train"]["labels"] == {"1": 4, "true": 1}
    assert dropped(report) == {
        "label is a number, but not a whole one (objective.labels=[score] learns numbers)": ["rows.jsonl:6"],
        "label is missing or null": ["rows.jsonl:7"],
    }


def test_numbers_to_learn_are_those_of_float32(tmp_path: Path, chatml: Any) -> None:
    numbers = ["3.5", -2, 1e38, "1e39", 10**400, "nan", "inf", "", True, None, -100, -100.0000001, [1.0]]
    lines(tmp_path / "rows.jsonl", [{"text": "a", "label": number} for number in numbers])
    report = report_of(
        tmp_path, "rows.jsonl", chatml, ObjectiveSection(kind="sequence_classification", labels=["score"])
    )
    assert report["train"]["kept"] == 3
    assert [len(rows) for reason, rows in dropped(report).items() if "not a number of float32" in reason] == [10]


def test_an_error_while_rows_are_tokenised_leaves_nothing(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows are good, and the file ends amid a later one."""
    monkeypatch.setattr(processes, "BATCH_ROWS", 8)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(MANY_LINES)[:-500])
    refusal(tmp_path, "a.jsonl.gz", chatml)
    assert list((tmp_path / "cache").iterdir()) == []


def values_in(content: bytes, folder: Path) -> list[Any]:
    (folder / "a.json").write_bytes(content)
    return list(readers.read(readers.Shard("list", str(folder / "a.json"))))


def test_a_list_may_stand_under_a_key(tmp_path: Path) -> None:
    rows = [{"text": "é"}, {"text": 'a "king"', "tags": [1.5, None, {"b": True}]}]
    for value in (rows, {"version": [1], "rows": rows, "end": 1}):
        assert values_in(json.dumps(value, indent=2, ensure_ascii=False).encode(), tmp_path) == rows
    assert [str(row) for row in values_in(b"[2.5, null]", tmp_path)] == [
        "a number, not a JSON object",
        "null, not a JSON object",
    ]
    with pytest.raises(BadInputError, match="holds two lists, rows and data"):
        values_in(b'{"rows": [1], "data": [2]}', tmp_path)
    with pytest.raises(BadInputError, match=r"is not JSON: Expecting value \(line 2, column 2\); correct it there"):
        values_in(b'[{"a": 1},\n x]', tmp_path)
    for content in (b'[{"text": "\xe9"}]', b'{"data": [1],}', b"[1] x", b"", b"[" * 100_000):
        with pytest.raises(BadInputError, match=r"is not (JSON|UTF-8)"):
            values_in(content, tmp_path)


def test_a_csv_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Quotes, commas and line breaks in cells, and no row given back by mistake."""
    rows = [
        {"text": text, "n": str(i)} for i, text in enumerate(['a "b" c', "d, e", "f\ng\r\nh", '"', '""', "\n", "i"] * 3)
    ]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "n"])
        writer.writeheader()
        writer.writerows(rows)
    [shard] = sources.open_source(SourceSection(path=str(tmp_path / "a.csv")), "data.train").shards
    assert list(sources.read(shard)) == rows
