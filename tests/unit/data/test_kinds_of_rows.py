"""Rows of every kind: the names of their cached folders and of a resumed run, as recorded, and what samples answer."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from support.cases import cases
from support.sights import save_seeing
from support.texts import make_texts, write_rows

from toolkit.data import build
from toolkit.data.images.images import Images
from toolkit.data.kinds import registry
from toolkit.data.templates.templates import MARKERS, use_template
from toolkit.data.tokens import tokenizer
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import DataSection, ModelSection

ASKED = {"role": "user", "content": "who is it"}
DIALOGUE = [ASKED, {"role": "assistant", "content": "a fox"}, ASKED, {"role": "assistant", "content": "a king"}]
SHOWN = {"role": "user", "content": [{"type": "image", "image": "0.bmp"}, {"type": "text", "text": "who is it"}]}
PAIR = {"prompt": [ASKED], "chosen": [DIALOGUE[1]], "rejected": [DIALOGUE[3]]}

KINDS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "text": ("causal_lm", [{"text": "a fox"}, {"text": "a king"}], {}),
    "answers": ("causal_lm", [{"prompt": "who is it", "completion": "a fox"}], {}),
    "conversation": ("causal_lm", [{"messages": DIALOGUE}], {}),
    "each_turn": ("causal_lm", [{"messages": DIALOGUE}], {"targets": "each_turn"}),
    "pairs": ("preference", [PAIR, {**PAIR, "margin": 2.0}], {}),
    "reward": ("reward", [PAIR], {}),
    "judged": ("kto", [{"prompt": [ASKED], "completion": [DIALOGUE[n]], "label": n == 1} for n in (1, 3)], {}),
    "labelled": ("sequence_classification", [{"text": "a fox", "label": "x"}, {"text": "a king", "label": "y"}], {}),
    "tagged": ("token_classification", [{"tokens": ["a", "fox"], "tags": ["O", "X"]}], {}),
    "source-target": ("seq2seq", [{"source": "a fox", "target": "a king"}], {"max_target_length": 32}),
    "held out": ("causal_lm", [{"text": f"{n} foxes"} for n in range(4)], {"validation_fraction": 0.5}),
    "streamed": ("causal_lm", [{"text": "a fox"}, {"text": "a king"}], {"streaming": True}),
    "images": ("causal_lm", [{"messages": [SHOWN, DIALOGUE[1]]}], {}),
}
"""Kind of row -> the objective that reads it, its rows, and the settings of the data."""

RECORDED: dict[str, list[str]] = cases(__file__)["RECORDED"]
"""Kind of row -> the folders of its documents and of its samples, and the fingerprint by which a run resumes."""


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing("llava", tmp_path_factory.mktemp("llava"), make_texts(30))


def bitmap() -> bytes:
    """An image of 16 by 16 pixels, the same with any version of Pillow."""
    pixels = bytes(range(256)) * 3
    header = struct.pack("<IiiHHIIiiII", 40, 16, 16, 1, 24, 0, len(pixels), 2835, 2835, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + header + pixels


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, sighted: Path) -> dict[str, tuple[Path, Any, build.TokenisedData]]:
    """Of each kind: its folder in the cache, the tokenizer and the data.

    The digests of the tokenizer and of the processor depend on the libraries that write them, so they are fixed here.
    """
    read_by = Images.of
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "identity", lambda tokenizer: "tokenizer")
        patched.setattr(build.Images, "of", lambda *given: (found := read_by(*given)) and replace(found, identity="p"))
        return {kind: build_kind(kind, tmp_path_factory.mktemp("kind"), sighted) for kind in KINDS}


def build_kind(kind: str, folder: Path, sighted: Path) -> tuple[Path, Any, build.TokenisedData]:
    objective, rows, settings = KINDS[kind]
    (folder / "0.bmp").write_bytes(bitmap())
    write_rows(folder / "rows.jsonl", rows)
    given = {"train": str(folder / "rows.jsonl"), "max_length": 128, "cache_dir": str(folder / "cache"), **settings}
    data = DataSection.model_validate(given)
    if kind == "images":
        tokens = tokenizer.load(ModelSection(name_or_path=str(sighted)), data)
    else:
        tokens = tokenizer._train_byte_pairs(iter(()), 260, MARKERS["chatml"])
        use_template(tokens, "chatml")
    return folder / "cache", tokens, build.build(data, tokens, 0, ObjectiveSection(kind=objective))


def test_keys_are_as_recorded(built: dict[str, tuple[Path, Any, build.TokenisedData]]) -> None:
    """Another key tokenises everybody's rows again; another fingerprint refuses to resume everybody's runs."""
    found = {kind: keys_of(cache, data) for kind, (cache, _, data) in built.items()}
    assert found == RECORDED


def keys_of(cache: Path, data: build.TokenisedData) -> list[str]:
    names = sorted(path.name for path in cache.iterdir() if path.is_dir())
    documents, samples = (" ".join(name for name in names if name.startswith(of)) for of in ("documents", "samples"))
    # With images the samples are named by the folder of the images, too, which is another one in each test.
    content = data.content if data.stream is None else None
    return [documents, content or samples, data.fingerprint]


IN_CHAT = "<|im_start|>user\nwho is it<|im_end|>\n<|im_start|>assistant\n"
FOX, KING = "a fox<|im_end|>", "a king<|im_end|>"
TEXT = "is_packed, shares_samples, continues_text, tried"
ANSWERS: dict[str, tuple[str, list[int], list[tuple[str, str]]]] = {
    "text": (TEXT, [6, 7], []),  # shorter than what is taken for a prompt
    "answers": (TEXT, [15], [("who is it", FOX)]),
    "conversation": (TEXT, [71], [(IN_CHAT, FOX)]),
    "each_turn": (TEXT, [34, 70], [(IN_CHAT, FOX), (f"{IN_CHAT}{FOX}\n{IN_CHAT}", KING)]),
    "pairs": (f"{TEXT}, compared, of pairs", [71, 71], [(IN_CHAT, FOX), (IN_CHAT, FOX)]),
    "reward": (f"{TEXT}, compared, of pairs", [71], [(IN_CHAT, FOX)]),
    "judged": (f"{TEXT}, compared", [35, 36], [(IN_CHAT, FOX), (IN_CHAT, KING)]),
    "labelled": ("tried", [5, 6], []),
    "tagged": ("tried", [5], []),
    "source-target": ("answers of 31", [12], [("a fox", KING)]),
    "images": (f"{TEXT}, has_images", [40], [(IN_CHAT.replace("who", "<image>" * 4 + "\nwho"), FOX)]),
}
"""Kind of row -> what is true of its samples, the tokens of each row or piece, and the prompts with their answers."""


def test_samples_answer_for_their_kind(built: dict[str, tuple[Path, Any, build.TokenisedData]]) -> None:
    """What the checks before the first step, held-out samples, `verify` and `suggest` ask of them."""
    assert {kind: answers_of(*built[kind][1:]) for kind in ANSWERS} == ANSWERS


def answers_of(tokens: Any, data: build.TokenisedData) -> tuple[str, list[int], list[tuple[str, str]]]:
    samples = data.train
    asked = {
        "is_packed": samples.is_packed,
        "shares_samples": samples.shares_samples,
        "continues_text": samples.continues_text,
        "tried": samples.few(4) is not None,
        "compared": samples.compared is samples,
        "of pairs": samples.keep_apart.startswith("Both completions of a pair share a sample"),
        "has_images": samples.has_images,
        f"answers of {samples.most_answer_tokens}": samples.most_answer_tokens is not None,
    }
    prompts = [prompt for number in range(len(samples)) for prompt in samples.prompts(number)]
    shown = [(tokens.decode(prompt.asked), tokens.decode(prompt.answer)) for prompt in prompts]
    return ", ".join(name for name, holds in asked.items() if holds), samples.lengths().tolist(), shown


def test_the_docs_say_which_objective_takes_which_rows() -> None:
    page = (Path(__file__).parents[3] / "docs/architecture.md").read_text(encoding="utf-8")
    table = [line.split("|")[1:3] for line in page.partition("| objective | rows |\n")[2].split("\n\n")[0].splitlines()]
    told = {kind: rows for kinds, rows in table for kind in re.findall("`(.*?)`", kinds)}
    assert {kind: spec.rows for kind, spec in SPECS.items()} == {
        kind: re.findall("`(.*?)`", rows)[0] for kind, rows in told.items()
    }


def test_a_prompt_leaves_room_for_its_completion(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a fox"}\n{"prompt": "a longer fox"}\n')
    given = {"train": str(tmp_path / "rows.jsonl"), "max_length": 16, "long_rows": "drop", "cache_dir": str(tmp_path)}
    rewards = [{"name": "right", "compare": "text"}]
    section = ObjectiveSection.model_validate({"kind": "grpo", "rewards": rewards, "max_new_tokens": 8})
    tokens = tokenizer._train_byte_pairs(iter(()), 260)
    found = build.build(DataSection.model_validate(given), tokens, 0, section)
    dropped = {reason: rows.count for reason, rows in found.report.train.dropped.items()}
    assert (found.train.num_prompts, dropped) == (1, {"longer than data.max_length less objective.max_new_tokens": 1})


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"messages": DIALOGUE[:2]}, "a fox"),
        ({"prompt": [ASKED], "chosen": [DIALOGUE[1]], "rejected": [DIALOGUE[3]]}, "a fox"),
        ({"prompt": "who is it", "completion": "a king"}, "a king"),
        ({"prompt": "who is it", "completion": "a king", "answer": "a fox"}, "a fox"),
        ({"prompt": "who is it", "completion": "a king", "label": False}, None),
        ({"prompt": "who is it", "answer": "a fox", "when": date(2024, 2, 9), "score": math.nan}, "a fox"),
        ({"prompt": "who is it", "answer": 7.0, "when": datetime(2024, 2, 9, 1)}, 7.0),
    ],
)
def test_the_answer_of_a_training_row_is_what_completions_are_compared_with(
    row: dict[str, Any], answer: str | float | None, tmp_path: Path
) -> None:
    """Dates and NaN in a column that no reward reads leave the row as it is."""
    Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    given = {"train": str(tmp_path / "rows.parquet"), "max_length": 64, "cache_dir": str(tmp_path)}
    rewards = [{"name": "any", "match": "a"}]
    section = ObjectiveSection.model_validate({"kind": "grpo", "rewards": rewards, "max_new_tokens": 8})
    tokens = tokenizer._train_byte_pairs(iter(()), 260, MARKERS["chatml"])
    use_template(tokens, "chatml")
    found = build.build(DataSection.model_validate(given), tokens, 0, section).train.asked_of_itself
    kept = found.prompt(0)[2]["row"]
    assert kept.get("answer") == answer
    assert (kept.get("when") or "2024-02-09").startswith("2024-02-09")


def test_no_two_kinds_have_a_layout_of_one_name() -> None:
    """Layouts are found again by their names in the cache."""
    names = [layout.name for kind in registry.KINDS.values() for layout in kind.layouts]
    assert sorted(set(names)) == sorted(names)
