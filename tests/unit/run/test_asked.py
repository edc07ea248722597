"""Which prompts a run answers while it trains, and what is refused before it begins."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases import cases
from support.texts import write_rows

from toolkit.data.samples.samples import TextSamples
from toolkit.errors import BadInputError, RecipeError
from toolkit.generation.text.complete import Prompt
from toolkit.generation.text.rows import PromptRow
from toolkit.pages.card import recipe_for_readers
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import AnswersSection
from toolkit.run.parts.answers import _require_room, read_asked, reads_of_answers, require_sighted
from toolkit.run.stages.generating import split_over_ranks
from toolkit.run.stages.part import require_same_reads
from toolkit.run.stages.stages import Read

TABLES = cases(__file__)

QUESTION = {"prompt": "2 + 2?", "answer": "4"}
UNEVALUATED = ["data.validation_fraction=null", "training.eval_every_steps=null", "logging.held_out_samples=0"]
FILE = ["answers.file=a.jsonl"]
BY_ANSWERS = ["training.best_by=answers", "training.patience=1", "training.eval_every_steps=1"]


def recipe_of(file: Path, *words: str) -> Recipe:
    return Recipe.load("quickstart", [f"answers.file={file}", *words])


def written(folder: Path, *rows: Any) -> Path:
    write_rows(folder / "asked.jsonl", rows)
    return folder / "asked.jsonl"


def test_rows_are_those_of_an_evaluation(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]
    found = read_asked(recipe_of(written(tmp_path, QUESTION, {"messages": messages}), "answers.compare=numeric"))
    assert [row.answers for row in found] == [("4",), ("6",)]
    assert found[1].prompt == messages[:1]
    assert read_asked(Recipe.load("quickstart")) == []


def test_a_resumed_run_scores_as_before(tmp_path: Path) -> None:
    """A function's source is compared with other code of the user's."""
    (tmp_path / "a.png").write_text("one")
    image = {"type": "image", "image": "a.png"}
    row = {"prompt": [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}], "answer": "4"}
    file, best = written(tmp_path, row), BY_ANSWERS
    one, two, numeric = ([f"answers.compare={how}"] for how in (f"{tmp_path}/1.py:f", f"{tmp_path}/2.py:f", "numeric"))
    for name in ("1.py", "2.py"):
        (tmp_path / name).write_text("def f(completion, row):\n    return 1.0\n")

    def reads(*words: str) -> list[Read]:
        recipe = recipe_of(file, *words)
        return reads_of_answers(recipe, read_asked(recipe))

    def resume(before: list[str], now: list[str], image: str = "one") -> str:
        (tmp_path / "a.png").write_text("one")
        resumed = SimpleNamespace(step=8, digests={read.name: read.digest for read in reads(*before)}.copy)
        (tmp_path / "a.png").write_text(image)
        said: list[str] = []
        try:
            require_same_reads(SimpleNamespace(reads=reads(*now), resumed=resumed), said.append)  # type: ignore[arg-type]
        except BadInputError as error:
            return f"refused: {error}"
        return " ".join(said)

    otherwise = "answers.compare: the run up to step 8 compared its answers otherwise"
    for before, now in (([], []), (one, two), (numeric, [*numeric, "answers.batch_size=2"])):
        assert resume(before, now) == resume([*before, *best], [*now, *best]) == ""
    for before, now in ((numeric, []), ([], one), (one, numeric), (numeric, ["answers.compare='numeric=a+'"])):
        assert resume(before, now).startswith(otherwise)
        assert resume([*before, *best], [*now, *best]).startswith(f"refused: {otherwise}")
    assert resume(best, best, "two").startswith("answers.file, or an image of it, has changed since")


def test_a_relative_file_is_relative_to_the_recipe(tmp_path: Path) -> None:
    written(tmp_path, QUESTION)
    text = Recipe.load("quickstart").to_yaml().replace("file: null", "file: asked.jsonl")
    (tmp_path / "mine.yaml").write_text(text)
    assert Recipe.load(tmp_path / "mine.yaml").answers.file == str(tmp_path / "asked.jsonl")
    scored = Recipe.load("quickstart", ["answers.file=a.jsonl", "answers.compare=mine.py:judge"]).to_yaml()
    (tmp_path / "scored.yaml").write_text(scored)
    found = Recipe.load(tmp_path / "scored.yaml")
    assert found.answers.compare == f"{tmp_path / 'mine.py'}:judge"
    assert "compare: mine.py:judge" in recipe_for_readers(found)


@pytest.mark.parametrize(("row", "words", "told"), TABLES["UNANSWERABLE"])
def test_rows_that_cannot_be_answered_are_named(tmp_path: Path, row: Any, words: list[str], told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        read_asked(recipe_of(written(tmp_path, row), *words))


def test_images_are_refused_where_none_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    rows = [QUESTION, QUESTION | {"image": "a.png"}]
    asked = read_asked(recipe_of(written(tmp_path, *rows)))
    of_text = TextSamples(*[None] * 6)  # type: ignore[arg-type]
    with pytest.raises(
        BadInputError, match=r"answers.file: .*asked.jsonl:2 has images, and no row to train on has any"
    ):
        require_sighted(asked, of_text)
    require_sighted(asked[:1], of_text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"answers.file: '.*gone.jsonl' cannot be read: No such file"):
        read_asked(recipe_of(tmp_path / "gone.jsonl"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["answers.compare=numeric"], "answers.compare has no effect without answers.file"),
        ([*FILE, "answers.raw=true", "answers.system=Hi"], "answers.system has no effect with"),
        ([*FILE, "answers.compare=scores"], "answers.compare: unknown 'scores'; allowed: text, strict"),
        ([*FILE, "answers.compare='text=('"], "answers.compare: '(' is not a Python regular expression"),
        ([*FILE, "answers.score=a:b"], "answers.score: gone since 0.3.0; write answers.compare: file.py:function"),
        ([*FILE, *UNEVALUATED], "answers.file has no effect without data.validation or data.validation_fraction"),
        (["training.best_by=answers"], "training.best_by answers has no effect without training.patience"),
        (BY_ANSWERS, "training.best_by answers is not possible without answers.file"),
    ],
)
def test_settings_that_contradict_each_other_are_told(words: list[str], told: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(told)):
        Recipe.load("quickstart", words)


def test_prompts_leave_room_for_whole_answers() -> None:
    """Ranks that share forwards go on until the last has ended: none may come to the end of the positions before."""
    rows = [PromptRow(f"f:{n}", "?", "?") for n in (1, 2)]
    prompts, section = [Prompt([1] * 8, []), Prompt([1] * 9, [])], AnswersSection(file="f", max_new_tokens=4)
    _require_room(SimpleNamespace(positions=13), rows, prompts, section)  # type: ignore[arg-type]
    _require_room(SimpleNamespace(positions=None), rows, prompts, section)  # type: ignore[arg-type]
    told = "f:2: the prompt's 9 tokens and answers.max_new_tokens 4 exceed the model's 12 positions"
    with pytest.raises(BadInputError, match=told) as error:
        _require_room(SimpleNamespace(positions=12), rows, prompts, section)  # type: ignore[arg-type]
    assert "f:1" not in str(error.value)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("number", [1, 5, 6])
def test_each_batch_is_done_once_and_all_ranks_do_equally_many(
    monkeypatch: pytest.MonkeyPatch, size: int, number: int
) -> None:
    parts: list[dict[int, list[int]]] = []
    calls: list[list[int]] = []
    for rank in range(size):
        monkeypatch.setattr("toolkit.ranks.rank", lambda rank=rank: rank)
        monkeypatch.setattr("toolkit.ranks.world_size", lambda: size)
        monkeypatch.setattr(
            "toolkit.ranks.gather_objects", lambda found: parts.append(found) or [{n: [n] for n in range(number)}]
        )
        done: list[int] = []
        assert split_over_ranks(list(range(number)), lambda batch, done=done: done.append(batch) or [batch]) == [
            [n] for n in range(number)
        ]
        calls.append(done)
    assert len({len(done) for done in calls}) == 1
    assert sorted(n for part in parts for n in part) == list(range(number))
