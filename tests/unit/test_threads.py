"""What users of TRL, axolotl, LLaMA-Factory and ms-swift met, as small cases.

Each test names its thread first. What is right is written out, or a plain loop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support.texts import make_texts, write_rows

from toolkit.data import build, stream
from toolkit.data.documents.encode import Encoder
from toolkit.data.samples.loader import TrainLoader
from toolkit.data.stream import StreamLoader
from toolkit.data.templates.templates import use_template
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError, RecipeError
from toolkit.optim.schedule import build_schedule
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import DataSection, ScheduleSection

ASKED = {"role": "user", "content": "why"}
PLAIN = {"instruction": "why", "output": "so"}
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} ARGUMENTS]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(text: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def tokens_of(template: str | None = None, name: str | None = "chatml", **special: str) -> Any:
    made = tokenizer._train_byte_pairs(iter(make_texts(30)), 320, ["<|im_start|>", "<|im_end|>"])
    made.add_special_tokens(special)
    use_template(made, name)
    if template is not None:
        made.chat_template = template
    return made


_folders = count()


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Reads rows as a recipe does, from a file of their own."""

    def read(rows: list[dict[str, Any]], tokens: Any, objective: str = "causal_lm", **fields: Any) -> Any:
        folder = tmp_path / str(next(_folders))
        folder.mkdir()
        write_rows(folder / "rows.jsonl", rows)
        values = {"max_length": 512, "max_dropped_fraction": 1.0, "packing": False, "cache_dir": str(folder), **fields}
        section = DataSection.model_validate({"train": str(folder / "rows.jsonl")} | values)
        return build.build(section, tokens, 0, ObjectiveSection(kind=objective))

    return read


def pieces(data: Any) -> Iterator[tuple[Any, Any]]:
    return (piece for number in range(len(data.train)) for piece in data.train.tokens(number))


def texts(data: Any, tokens: Any) -> list[tuple[str, str]]:
    """Of each row the whole text, and what of it is learned, in the order of their texts."""
    return sorted((tokens.decode(ids), tokens.decode(ids[targets.astype(bool)])) for ids, targets in pieces(data))


def notes(data: Any) -> dict[str, Any]:
    return {what: found["count"] for what, found in data.report.to_dict()["train"].get("noted", {}).items()}


def recipe(**sections: dict[str, Any]) -> Recipe:
    values: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": "model"},
        "data": {"train": "rows.jsonl", "max_length": 64},
        "optimizer": {"learning_rate": 1e-4},
        "training": {"output_dir": "run", "max_steps": 9},
    }
    return Recipe.from_mapping(values | {name: {**values.get(name, {}), **fields} for name, fields in sections.items()})


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns)


def test_the_system_text_of_a_row_is_read(read: Any) -> None:
    """LlamaFactory#7592: Alpaca rows with a column `system` are trained behind the default one."""
    tokens = tokens_of()
    data = read([{**PLAIN, "system": "be short"}, PLAIN], tokens)
    whole = [
        chatml(("system", "be short"), ("user", "why"), ("assistant", "so")),
        chatml(("user", "why"), ("assistant", "so")),
    ]
    assert texts(data, tokens) == sorted((text, "so<|im_end|>") for text in whole)


def test_the_history_of_a_row_is_read(read: Any) -> None:
    """LlamaFactory#4683: the history of an Alpaca row does not reach the training data."""
    tokens = tokens_of()
    data = read([{**PLAIN, "history": [["who", "he"], ["where", "here"]]}], tokens)
    turns = [
        ("user", "who"),
        ("assistant", "he"),
        ("user", "where"),
        ("assistant", "here"),
        ("user", "why"),
        ("assistant", "so"),
    ]
    assert texts(data, tokens) == [(chatml(*turns), "he<|im_end|>here<|im_end|>so<|im_end|>")]


def test_the_input_follows_the_instruction_and_an_empty_one_leaves_nothing(read: Any) -> None:
    """LlamaFactory#2686: how `input` is joined to `instruction`. Here as docs/data.md says: a blank line between."""
    tokens = tokens_of()
    data = read([{**PLAIN, "input": "the fox"}, {**PLAIN, "input": ""}, {**PLAIN, "input": None}], tokens)
    asked = ["why", "why", "why\n\nthe fox"]
    assert texts(data, tokens) == sorted(
        (chatml(("user", text), ("assistant", "so")), "so<|im_end|>") for text in asked
    )


def test_arguments_of_calls_may_be_objects_or_texts_of_any_types(read: Any) -> None:
    """axolotl#3136: one argument that is a text in a row and a number in another; objects, or JSON in a text."""
    tokens = tokens_of(CALLING.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}"))
    found: list[list[tuple[str, str]]] = []
    for form in (lambda arguments: arguments, json.dumps):
        calls = [
            [{"type": "function", "function": {"name": "look", "arguments": form(arguments)}}]
            for arguments in ({"at": "2025-08-01"}, {"at": 1690876800}, {})
        ]
        found.append(
            texts(read([{"messages": [ASKED, said(None, tool_calls=call)]} for call in calls], tokens), tokens)
        )
    assert found[0] == found[1]
    assert [learned for _, learned in found[0]] == [
        '[look {"at": "2025-08-01"}]<|im_end|>',
        '[look {"at": 1690876800}]<|im_end|>',
        "[look {}]<|im_end|>",
    ]


@pytest.mark.parametrize("written", ["{{ c.function.arguments }}", "{{ '' + c.function.arguments }}"])
def test_a_template_that_joins_arguments_gets_them_as_json(read: Any, written: str) -> None:
    """transformers#45419, asked for TRL: templates disagree whether arguments are an object or a text.

    Before, the first one taught Python's text of an object, and the second one refused every call.
    """
    tokens = tokens_of(CALLING.replace("ARGUMENTS", written))
    for arguments in ({"at": "Zürich", "n": [1, None]}, '{"at": "Zürich", "n": [1, null]}'):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        learned = [
            text for _, text in texts(read([{"messages": [ASKED, said(None, tool_calls=[call])]}], tokens), tokens)
        ]
        assert learned == ['[look {"at": "Zürich", "n": [1, null]}]<|im_end|>']
    generation = "{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    marked = tokens.chat_template.replace("{{ m.content }}{% for c in m.tool_calls or [] %}", generation)
    tokens.chat_template = marked.replace("{% endfor %}<|im_end|>", "{% endfor %}{% endgeneration %}<|im_end|>")
    [(_, learned_text)] = texts(read([{"messages": [ASKED, said(None, tool_calls=[call])]}], tokens), tokens)
    assert '{"at": "Zürich", "n": [1, null]}]<|im_end|>' in learned_text


def test_tools_of_a_table_have_no_fields_of_other_rows(read: Any, tmp_path: Path) -> None:
    """ms-swift#10110: Arrow gives each tool, and each call, the fields of all others as null. JSON's nulls stay."""
    tokens = tokens_of("{{ tools | tojson }}" + CALLING.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}"))
    rows, expected = [], []
    for name, arguments in (("look", {"at": "it"}), ("go", {"to": "there"})):
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {"type": "function", "function": {"name": name, "description": "does it", "parameters": schema}}
        rows.append({"messages": [ASKED, said(None, tool_calls=[call])], "tools": [tool]})
        expected.append((json.dumps([tool]), f"[{name} {json.dumps(arguments)}]<|im_end|>"))
    table = datasets.Dataset.from_list(rows)
    assert table[0]["tools"][0]["function"]["parameters"]["properties"]["to"] is None
    table.to_parquet(tmp_path / "rows.parquet")
    found = texts(read([], tokens, train=str(tmp_path / "rows.parquet")), tokens)
    assert [(whole.partition("<|im_start|>")[0], learned) for whole, learned in found] == sorted(expected)
    rows[0]["tools"][0]["function"]["parameters"]["properties"]["at"]["default"] = None  # type: ignore[index]
    rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"at": None}  # type: ignore[index]
    [(whole, learned)] = texts(read(rows[:1], tokens), tokens)
    assert whole.startswith(json.dumps(rows[0]["tools"]))
    assert learned == '[look {"at": null}]<|im_end|>'


def test_cells_of_a_table_are_read_as_they_are_written(read: Any, tmp_path: Path) -> None:
    """ms-swift#306: empty cells of a CSV file become nan, and numbers lose their zeros."""
    tokens = tokens_of()
    (tmp_path / "rows.csv").write_text("instruction,input,output\nwhy,,007\nwho,NA,None\nwhere,x,\nwhat,1.50,nan\n")
    data = read([], tokens, train=str(tmp_path / "rows.csv"))
    asked = [("what\n\n1.50", "nan"), ("who\n\nNA", "None"), ("why", "007")]
    expected = [(chatml(("user", text), ("assistant", answer)), f"{answer}<|im_end|>") for text, answer in asked]
    assert texts(data, tokens) == expected
    assert data.report.to_dict()["train"]["dropped"] == {"output is empty": {"count": 1, "rows": ["rows.csv:3"]}}


def test_dropped_rows_are_named_with_their_reasons(read: Any) -> None:
    """ms-swift#4026: half of the rows are filtered, and nothing says why."""
    tokens = tokens_of()
    rows = [PLAIN, {"instruction": "why", "output": None}, {"instruction": "", "output": "so"}, PLAIN]
    report = read(rows, tokens).report.to_dict()["train"]
    assert (report["read"], report["kept"], report["num_dropped"]) == (4, 2, 2)
    assert sorted(row for found in report["dropped"].values() for row in found["rows"]) == [
        "rows.jsonl:2",
        "rows.jsonl:3",
    ]


def test_judgements_are_read_as_they_are_written(read: Any) -> None:
    """LlamaFactory#3803: under KTO every Alpaca row counts as a good one."""
    tokens = tokens_of()
    labels = [True, False, "false", "true", 0, 1]
    data = read(
        [{"instruction": f"why {n}", "output": "so", "label": label} for n, label in enumerate(labels)], tokens, "kto"
    )
    good = {
        tokens.decode(data.train.tokens(i)[0][0]): bool(data.train.batch([i])["good"][0])
        for i in range(len(data.train))
    }
    expected = [True, False, False, True, False, True]
    assert good == {chatml(("user", f"why {n}"), ("assistant", "so")): value for n, value in enumerate(expected)}


def test_judgements_of_one_kind_are_refused(read: Any) -> None:
    """trl#1724: KTO on rows of one kind alone."""
    with pytest.raises(BadInputError, match=r"every row \(4\) is judged false; .* add some of the other kind"):
        read([{**PLAIN, "label": False}] * 4, tokens_of(), "kto")


def test_an_answer_that_is_marked_is_not_learned(read: Any) -> None:
    """ms-swift#5215: some answers of a conversation are bad, and should not be learned."""
    tokens = tokens_of()
    data = read([{"messages": [ASKED, said("bad", loss=False), ASKED, said("good", loss=True)]}], tokens)
    assert [learned for _, learned in texts(data, tokens)] == ["good<|im_end|>"]
    assert notes(data) == {"a message is not learned (loss: false)": 1}


def test_words_that_both_sides_say_are_learned_once_each(read: Any) -> None:
    """axolotl#2089: with Mistral's template the turns are searched in the text, and the wrong ones are found."""
    tokens = tokens_of(MISTRAL, None, bos_token="<s>", eos_token="</s>")
    turns = [{"from": "human", "value": "MASKED"}, {"from": "gpt", "value": "NOT MASKED"}] * 3
    turns += [{"from": "human", "value": "NOT MASKED"}, {"from": "gpt", "value": "MASKED"}]
    [(whole, learned)] = texts(read([{"conversations": turns}], tokens), tokens)
    assert whole == "<s>" + "[INST] MASKED[/INST] NOT MASKED</s>" * 3 + "[INST] NOT MASKED[/INST] MASKED</s>"
    assert learned == " NOT MASKED</s>" * 3 + " MASKED</s>"


def test_every_answer_of_a_conversation_is_learned(read: Any) -> None:
    """ms-swift#721 asks for it, axolotl#1761 met the last one alone."""
    tokens = tokens_of()
    turns = [{"role": "system", "content": "be short"}, ASKED, said("one"), ASKED, said("two"), ASKED, said("three")]
    [(_, learned)] = texts(read([{"messages": turns}], tokens), tokens)
    assert learned == "one<|im_end|>two<|im_end|>three<|im_end|>"


def test_a_pair_begins_once(read: Any) -> None:
    """axolotl#1616: the token that begins a text stands before the prompt, and again before both completions."""
    tokens = tokens_of(MISTRAL, None, bos_token="<s>", eos_token="</s>")
    pair = {"prompt": [ASKED], "chosen": [said("so")], "rejected": [said("no")]}
    found = [ids.tolist() for ids, _ in pieces(read([pair], tokens, "preference"))]
    assert [ids.count(tokens.bos_token_id) for ids in found] == [1, 1]
    assert [tokens.decode(ids) for ids in found] == ["<s>[INST] why[/INST] so</s>", "<s>[INST] why[/INST] no</s>"]


def test_a_tokenizer_without_a_beginning_adds_none(read: Any) -> None:
    """trl#1885: Qwen's `bos_token` is null, and None stands among the tokens of a pair."""
    tokens = tokens_of()
    assert tokens.bos_token_id is None
    pair = {"prompt": "why", "chosen": " so", "rejected": " no"}
    end = tokens.eos_token
    assert texts(read([pair], tokens, "preference"), tokens) == [
        (f"why no{end}", f" no{end}"),
        (f"why so{end}", f" so{end}"),
    ]


def test_a_row_that_is_cut_does_not_teach_an_end(read: Any) -> None:
    """LlamaFactory#5231: where a row is cut, the end of the turn is gone. Here none is made up, and the cut is told."""
    tokens = tokens_of()
    row = {"messages": [ASKED, said("the king and the fox went by the river and the old town")]}
    [(whole, targets)] = pieces(read([row], tokens))
    length = len(whole) - 4
    data = read([row], tokens, max_length=length, long_rows="truncate")
    [(ids, cut_targets)] = pieces(data)
    assert (ids.tolist(), cut_targets.tolist()) == (whole[:length].tolist(), targets[:length].tolist())
    assert tokens.convert_tokens_to_ids("<|im_end|>") not in ids[cut_targets.astype(bool)]
    assert data.report.to_dict()["train"]["long"]["cut_tokens"] == 4


def test_a_row_without_targets_is_not_evaluated(read: Any, tmp_path: Path) -> None:
    """trl#1053: an answer that is cut away leaves a row without targets, whose mean is NaN."""
    tokens = tokens_of()
    long = {"messages": [{"role": "user", "content": "the king " * 200}, said("so")]}
    write_rows(tmp_path / "held_out.jsonl", (long, PLAIN | {"messages": [ASKED, said("so")]}))
    data = read(
        [{"messages": [ASKED, said("so")]}],
        tokens,
        max_length=64,
        long_rows="truncate",
        validation=str(tmp_path / "held_out.jsonl"),
    )
    assert len(data.validation) == 1
    assert (data.validation.batch([0])["labels"] != -100).sum() > 0
    assert list(data.report.to_dict()["validation"]["dropped"]) == [
        "nothing to learn within 64 tokens (data.max_length)"
    ]


def test_a_pair_that_is_too_long_is_never_cut(read: Any) -> None:
    """trl#6548: both completions are cut by the length of the longer one, and the shorter one may be left empty."""
    with pytest.raises(
        RecipeError, match=r"long_rows truncate is not possible with objective.kind preference; allowed"
    ):
        recipe(data={"long_rows": "truncate"}, objective={"kind": "preference"})
    tokens = tokens_of()
    long = {"prompt": "why", "chosen": " so", "rejected": " the king and the queen" * 40}
    short = {**long, "rejected": " no"}
    data = read([long, short], tokens, "preference", max_length=48, long_rows="drop")
    end = tokens.eos_token
    assert texts(data, tokens) == [(f"why no{end}", f" no{end}"), (f"why so{end}", f" so{end}")]


def test_packing_keeps_every_row_once(read: Any) -> None:
    """ms-swift#2343: an iterator is advanced twice, and packing loses half of the rows."""
    tokens = tokens_of()
    rows = [{"text": text} for text in dict.fromkeys(make_texts(60, seed=3))]
    alone, packed = (read(rows, tokens, packing=packing, max_length=256) for packing in (False, True))
    assert len(packed.train) < len(alone.train) == len(rows)
    assert sorted(whole for whole, _ in texts(packed, tokens)) == sorted(row["text"] + tokens.eos_token for row in rows)


def loaders(samples: Any, ranks: int, micro: int, accumulation: int, positions: int) -> list[TrainLoader]:
    return [
        TrainLoader(
            samples, num_positions=positions, micro_batch_size=micro, gradient_accumulation_steps=accumulation,
            rank=rank, world_size=ranks, seed=3, shuffle=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def learned_in(windows: Any) -> list[tuple[int, ...]]:
    """The targets of each row of a step, over ranks and micro-batches."""
    rows = (row for window in windows for batch in window for row in batch["labels"])
    return sorted(found for row in rows if (found := tuple(row[row != -100].tolist())))


def test_packed_epochs_are_whole_and_the_schedule_ends_with_them(read: Any) -> None:
    """trl#761: with packed rows an epoch jumps from 0.25 to 1, and the rate does not reach its end."""
    data = read([{"text": text} for text in make_texts(60, seed=3)], tokens_of(), packing=True, max_length=128)
    samples, epochs = len(data.train), 3
    steps = [learned_in([window]) for window in loaders(data.train, 1, 2, 2, epochs * samples)[0]]
    assert len(steps) == math.ceil(epochs * samples / 4)
    each = sorted(row for step in steps for row in step)
    once = learned_in([[data.train.batch([number])] for number in range(samples)])
    assert each == sorted(once * epochs)
    rates = rates_of(ScheduleSection(kind="linear"), len(steps))
    assert rates == pytest.approx([1 - step / len(steps) for step in range(len(steps))])


def test_ranks_share_one_order(read: Any) -> None:
    """LlamaFactory#1218: ranks mix their sources by seeds of their own: rows are learned twice, others never."""
    data = read([{"text": text} for text in dict.fromkeys(make_texts(24, seed=5))], tokens_of())
    expected = [learned_in([window]) for window in loaders(data.train, 1, 4, 1, len(data.train))[0]]
    for ranks, micro, accumulation in ((2, 2, 1), (4, 1, 1), (2, 1, 2)):
        found = zip(*loaders(data.train, ranks, micro, accumulation, len(data.train)), strict=True)
        assert [learned_in(windows) for windows in found] == expected


def test_a_stream_resumes_without_the_rows_before(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift#3951: on 28 million rows a resumed run stays at 0 %, as it tokenises all that it has learned."""
    monkeypatch.setattr(stream, "WINDOW_SAMPLES", 6)
    monkeypatch.setattr(stream, "BATCH_ROWS", 4)
    encoded: list[int] = []
    documents = Encoder.documents

    def counting(self: Any, rows: Any, layout: Any) -> Any:
        encoded.append(len(rows))
        return documents(self, rows, layout)

    monkeypatch.setattr(Encoder, "documents", counting)
    rows = [{"text": f"row {number} of the story"} for number in range(400)]

    def loader() -> StreamLoader:
        data = read(rows, tokens_of(), streaming=True, packing=True, max_length=32)
        return StreamLoader(
            data.stream, num_positions=400, micro_batch_size=2, gradient_accumulation_steps=2, rank=0, world_size=1
        )

    whole = loader()
    windows = iter(whole)
    steps = [learned_in([next(windows)]) for _ in range(22)]
    samples = whole.samples_at(20)
    state = whole.state_at(samples)
    resumed = loader()
    resumed.resume(20, samples, state)
    encoded.clear()
    after = iter(resumed)
    assert [learned_in([next(after)]) for _ in range(2)] == steps[20:]
    assert sum(encoded) < 60, "of the 80 samples before, each of two rows or more"


def rates_of(section: ScheduleSection, num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, found = build_schedule(optimizer, section, num_steps), []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_a_warm_up_counts_optimizer_steps() -> None:
    """axolotl#977: with accumulation, the warm-up lasts as many times longer. Here a schedule knows no micro-batch."""
    rates = rates_of(ScheduleSection(kind="constant", warmup_fraction=0.25), 40)
    assert rates == pytest.approx([(step + 1) / 11 for step in range(10)] + [1.0] * 30)


def test_a_warm_up_of_nothing_is_none() -> None:
    """axolotl#3254: `warmup_steps: 0` counts as unset, and 3 % of the steps warm up."""
    for section in (
        ScheduleSection(kind="linear", warmup_steps=0),
        ScheduleSection(kind="linear", warmup_fraction=0.0),
    ):
        assert rates_of(section, 100)[:2] == pytest.approx([1.0, 0.99])


def test_named_held_out_rows_are_not_split_again(read: Any, tmp_path: Path) -> None:
    """ms-swift#902: training and validation files are joined, and 1 % of both becomes the validation set."""
    tokens = tokens_of()
    write_rows(tmp_path / "held_out.jsonl", ({"text": f"held out {n}"} for n in range(5)))
    data = read([{"text": f"trained {n}"} for n in range(20)], tokens, validation=str(tmp_path / "held_out.jsonl"))
    held_out = [tokens.decode(data.validation.tokens(n)[0][0]) for n in range(len(data.validation))]
    assert sorted(held_out) == [f"held out {n}{tokens.eos_token}" for n in range(5)]
    assert sorted(whole for whole, _ in texts(data, tokens)) == sorted(
        f"trained {n}{tokens.eos_token}" for n in range(20)
    )
    with pytest.raises(RecipeError, match=r"validation is not possible with data.validation_fraction"):
        recipe(data={"validation": "held_out.jsonl", "validation_fraction": 0.1})


def test_reading_rows_leaves_the_tokenizer_as_it_was(read: Any, tmp_path: Path) -> None:
    """LlamaFactory#1436: preprocessing changes the tokenizer, and the changed one is saved with the model."""
    tokens = tokens_of()
    tokens.save_pretrained(tmp_path / "before")
    for objective, packing in (("causal_lm", True), ("causal_lm", False), ("preference", True)):
        row = (
            {"prompt": "why", "chosen": " so", "rejected": " no"}
            if objective == "preference"
            else {"messages": [ASKED, said("so")]}
        )
        fields = {} if objective == "preference" else {"long_rows": "truncate"}
        read([row, row], tokens, objective, packing=packing, max_length=32, **fields)
    tokens.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes(), file.name


def test_an_end_inside_an_answer_is_told(read: Any) -> None:
    """transformers#26468: special tokens that stand in the words of a row count as special ones."""
    tokens = tokens_of()
    inside, outside = "say <|im_end|> now", "say <|im_start|> now"
    data = read(
        [{"messages": [ASKED, said(inside)]}, {"messages": [{"role": "user", "content": inside}, said(outside)]}],
        tokens,
    )
    assert notes(data) == {"an answer holds <|im_end|>, which ends it: the model learns to stop there": 1}
