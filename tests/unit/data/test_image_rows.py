"""Rows with images, of every layout: the tokens of transformers' processor, what is learned, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from support.cases import cases
from support.sights import drawn_image, save_seeing
from support.texts import make_texts
from transformers import AutoProcessor

from toolkit.data import build
from toolkit.data.images.image_files import preview
from toolkit.data.samples.documents_apart import documents_apart
from toolkit.data.samples.image_samples import COUNTS, KINDS_OF_TOKENS, ImageSamples
from toolkit.data.samples.samples import TextSamples
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError, DataError
from toolkit.pages.data_page import render_data_page
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection, ModelSection


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing("llava", tmp_path_factory.mktemp("llava"), make_texts(30))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number in range(3):
        drawn_image(number).save(tmp_path / "in" / f"{number}.png")
    return tmp_path


def png(number: int) -> bytes:
    stream = io.BytesIO()
    drawn_image(number).save(stream, "PNG")
    return stream.getvalue()


def built(model: Path, folder: Path, rows: Any, **settings: Any) -> build.TokenisedData:
    if isinstance(rows, list):
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        rows = folder / "rows.jsonl"
    objective = ObjectiveSection(kind=settings.pop("kind", "causal_lm"))
    given = {"max_length": 128, "cache_dir": str(folder / "cache"), "max_dropped_fraction": 0.9, **settings}
    data = DataSection(train=[str(rows)], **given)  # type: ignore[list-item]
    return build.build(data, tokenizer.load(ModelSection(name_or_path=str(model)), data), 0, objective)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ANSWER = {"role": "assistant", "content": "a fox"}
SHOWN = {"type": "image"}
URI = "data:image/png;base64," + base64.b64encode(png(0)).decode()
TABLES = cases(__file__)
TABLES["LAYOUTS"]["openai's"][0]["messages"][0]["content"][1]["image_url"]["url"] = URI
LAYOUTS: dict[str, tuple[dict[str, Any], list[int], str]] = TABLES["LAYOUTS"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_is_what_the_processor_makes_of_it(model: Path, folder: Path, name: str) -> None:
    row, numbers, asked = LAYOUTS[name]
    samples = built(model, folder, [row], packing=False).train
    assert isinstance(samples, ImageSamples)
    batch = samples.batch([0])
    whole = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\na fox<|im_end|>\n"
    processor = AutoProcessor.from_pretrained(model)
    expected = processor(text=[whole], images=[[drawn_image(number) for number in numbers]], return_tensors="pt")
    length = expected["input_ids"].shape[1]
    assert torch.equal(batch["input_ids"][:, :length], expected["input_ids"])
    assert int(batch["lengths"][0]) == length
    assert torch.equal(batch["picture/pixel_values"], expected["pixel_values"])
    assert processor.tokenizer.decode(batch["labels"][batch["labels"] >= 0]) == "a fox<|im_end|>"
    placeholder = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert torch.equal(batch[KINDS_OF_TOKENS] == 1, batch["input_ids"] == placeholder)
    assert batch[COUNTS].tolist() == [len(numbers)]


FOX, KING = ANSWER, {**ANSWER, "content": "a king"}
PAIRS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = TABLES["PAIRS"]
"""A layout of pairs -> a row, and the images of its halves."""


@pytest.mark.parametrize("name", PAIRS)
def test_each_half_of_a_pair_is_what_the_processor_makes_of_it(model: Path, folder: Path, name: str) -> None:
    row, numbers = PAIRS[name]
    found = built(model, folder, [row], packing=False, kind="preference")
    assert found.report.train is not None
    assert not found.report.train.noted or "before the first words" in next(iter(found.report.train.noted))
    batch = found.train.batch([0])
    processor = AutoProcessor.from_pretrained(model)
    images = [drawn_image(number) for number in numbers]
    words = "a fox" if row["chosen"] == row["rejected"] else "a king"
    whole = [
        f"<|im_start|>user\n<image>\nwho<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
        for said in ("a fox", words)
    ]
    expected = processor(text=whole, images=[[image] for image in images], return_tensors="pt", padding=True)
    for half in range(2):
        ids = expected["input_ids"][half][expected["attention_mask"][half] == 1]
        assert torch.equal(batch["input_ids"][batch["segments"] == half], ids)
    assert torch.equal(batch["picture/pixel_values"], expected["pixel_values"])
    learned = [batch["labels"][(batch["segments"] == half) & (batch["labels"] >= 0)] for half in range(2)]
    assert processor.tokenizer.batch_decode(learned) == ["a fox<|im_end|>", f"{words}<|im_end|>"]
    assert batch[COUNTS].tolist() == [1, 1]
    # The page shows each half with its images, and what is learned of it.
    (example,) = found.report.examples
    assert [(part["name"], part["images"]) for part in example["parts"]] == [
        (side, [preview(image)]) for side, image in zip(("chosen", "rejected"), images, strict=True)
    ]
    page = render_data_page("pairs", found.report.to_dict()).partition('class="example"')[2].partition("</details>")[0]
    before, _, after = page.partition(">rejected</p>")
    for part, image, said in ((before, images[0], "a fox"), (after, images[1], words)):
        assert part.count("<img") == 1
        assert preview(image) in part
        assert f"<mark>{said}&lt;|im_end|&gt;</mark>" in part


def test_completions_in_rows_of_their_own_keep_the_small_image(model: Path, folder: Path) -> None:
    """For a model that cannot keep documents apart: the small image of pairs without any is behind the first pair."""
    plain = {"prompt": [user(text("so"))], "chosen": [FOX], "rejected": [KING]}
    found = built(model, folder, [plain, PAIRS["whole conversations"][0], plain], packing=False, kind="preference")
    batch = found.train.batch([0, 2])
    apart = documents_apart(batch)
    assert apart[COUNTS].tolist() == [0, 0, 1, 0, 0]
    assert apart["segments"].amax(dim=1).tolist() == [0, 1, -1, 2, 3]
    assert (apart[KINDS_OF_TOKENS].sum(dim=1) > 0).tolist() == [False, False, True, False, False]
    assert int((apart["labels"][2] >= 0).sum()) == 0
    assert len(apart["picture/pixel_values"]) == 1
    for half in range(4):
        ids = apart["input_ids"][apart["segments"] == half]
        assert torch.equal(ids, batch["input_ids"][batch["segments"] == half])
    assert (apart["position_ids"].diff(dim=1) == 1).all()


@pytest.mark.parametrize("form", ["bytes in parquet", "image feature", "saved"])
def test_images_that_a_table_holds_are_the_same(model: Path, folder: Path, form: str) -> None:
    row, numbers, _ = LAYOUTS["llama-factory's"]
    plain = built(model, folder, [row], packing=False).train.batch([0])
    held = [{"bytes": png(number), "path": None} for number in numbers]
    table = datasets.Dataset.from_list([{**row, "images": held}])
    if form != "bytes in parquet":
        table = table.cast_column("images", datasets.List(datasets.Image()))
    path = folder / ("table" if form == "saved" else "table.parquet")
    table.save_to_disk(path) if form == "saved" else table.to_parquet(path)
    found = built(model, folder, path, packing=False).train.batch([0])
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[key], found[key]) for key in plain)


GOOD = LAYOUTS["parts with paths"][0]
PROBLEMS: dict[str, tuple[dict[str, Any], str]] = TABLES["PROBLEMS"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_row_that_cannot_be_used_is_dropped_by_name(model: Path, folder: Path, name: str) -> None:
    row, problem = PROBLEMS[name]
    found = built(model, folder, [GOOD, row])
    assert found.report.train is not None
    ((why, rows),) = found.report.train.dropped.items()
    assert problem.replace("|", "") in why or any(part in why for part in problem.split("|"))
    assert rows.rows == ["rows.jsonl:2"]


def test_rows_that_are_too_long_are_advised_what_is_built(model: Path, folder: Path) -> None:
    long = {"messages": [user(*[{**SHOWN, "image": "in/0.png"}] * 20, text("who")), ANSWER]}
    with pytest.raises(DataError, match=r"1 of 2 rows .*: data\.long_rows=drop$"):
        built(model, folder, [GOOD, long], max_length=64)
    assert len(built(model, folder, [GOOD, long], max_length=64, long_rows="drop").train) == 1


def test_a_row_is_never_cut_inside_an_image(model: Path, folder: Path) -> None:
    long = {"messages": [user(*[{**SHOWN, "image": "in/0.png"}] * 20, text("who")), ANSWER]}
    found = built(model, folder, [*[GOOD] * 200, long], max_length=64)
    assert found.report.train is not None
    assert found.report.train.long.rows == ["rows.jsonl:201"]
    assert sum(int(found.train.batch([i])[COUNTS].sum()) for i in range(len(found.train))) == 200


@pytest.mark.parametrize(("setting", "told"), TABLES["IMPOSSIBLE"])
def test_what_is_not_possible_is_refused_with_advice(
    model: Path, folder: Path, setting: dict[str, str], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        built(model, folder, [GOOD], **setting)


def test_each_answer_sees_the_images_before_it(model: Path, folder: Path) -> None:
    shown = [user({**SHOWN, "image": f"in/{n}.png"}, text("who")) for n in range(2)]
    row = {"messages": [shown[0], FOX, user(text("so")), KING, shown[1], FOX]}
    found = built(model, folder, [row], targets="each_turn", max_length=256).train
    assert isinstance(found, ImageSamples)
    batch = found.batch([0])
    processor = AutoProcessor.from_pretrained(model)
    begins = [f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n" for asked in ("<image>\nwho", "so")]
    wholes = [f"{begins[0]}a fox<|im_end|>"]
    wholes.append(f"{wholes[0]}\n{begins[1]}a king<|im_end|>")
    wholes.append(f"{wholes[1]}\n{begins[0]}a fox<|im_end|>")
    seen = [[0], [0], [0, 1]]
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), int(batch["lengths"][0])]
    documents = [batch["input_ids"][0, start:end] for start, end in pairwise(starts)]
    by_length = sorted(zip(documents, batch[COUNTS].tolist(), strict=True), key=lambda found: len(found[0]))
    for (ids, count), whole, numbers in zip(by_length, wholes, seen, strict=True):
        images = [drawn_image(number) for number in numbers]
        assert torch.equal(ids, processor(text=[whole], images=[images], return_tensors="pt")["input_ids"][0])
        assert count == len(numbers)
    pixels = processor(text=["<image>"] * 2, images=[[drawn_image(n)] for n in range(2)], return_tensors="pt")
    places = [[len(ids) for ids, _ in by_length].index(len(ids)) for ids in documents]
    order = [image for place in places for image in seen[place]]
    assert torch.equal(batch["picture/pixel_values"], pixels["pixel_values"][order])


def test_rows_of_several_files_share_samples(model: Path, folder: Path) -> None:
    found = built(model, folder, [GOOD, {"messages": [{"role": "user", "content": "so"}, ANSWER]}]).train
    assert isinstance(found, ImageSamples)
    assert len(found) == 1
    batch = found.batch([0])
    assert sorted(batch[COUNTS].tolist()) == [0, 1]
    assert int((batch["position_ids"][0] == 0).sum()) == 2


def test_a_micro_batch_without_an_image_has_a_small_one_that_teaches_nothing(model: Path, folder: Path) -> None:
    plain = {"messages": [{"role": "user", "content": "so"}, ANSWER]}
    found = built(model, folder, [GOOD, plain], packing=False).train
    number = next(i for i in range(2) if not found.has_image(i))  # type: ignore[attr-defined]
    batch = found.batch([number])
    text_only = TextSamples.batch(found, [number])  # type: ignore[arg-type]
    length = int(text_only["lengths"][0])
    assert int(batch["lengths"][0]) == length
    assert torch.equal(batch["input_ids"][:, :length], text_only["input_ids"][:, :length])
    assert int((batch["labels"] >= 0).sum()) == int((text_only["labels"] >= 0).sum())
    assert batch[COUNTS].tolist() == [0, 1]
    assert len(batch["picture/pixel_values"]) == 1


def test_a_folder_may_move_and_a_file_may_not_change(model: Path, folder: Path) -> None:
    first = built(model, folder, [GOOD])
    moved = folder / "moved"
    moved.mkdir()
    for name in ("in", "rows.jsonl"):
        shutil.move(folder / name, moved / name)
    second = built(model, moved, moved / "rows.jsonl", cache_dir=str(folder / "cache"))
    assert second.fingerprint == first.fingerprint
    assert torch.equal(second.train.batch([0])["picture/pixel_values"].isfinite(), torch.ones(1, 3, 28, 28).bool())
    Image.new("RGB", (40, 30)).save(moved / "in" / "0.png")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*0\.png' is another image than when the rows were read"):
        second.train.batch([0])
    (moved / "in" / "0.png").unlink()
    with pytest.raises(DataError, match="an image that cannot be read: No such file"):
        second.train.batch([0])


def test_what_an_error_about_the_cache_advises_leads_on(model: Path, folder: Path) -> None:
    """An image that is gone, and a copy in the cache, of an image that a row holds, that is cut short or spoilt."""
    held = {"messages": [user({**SHOWN, "image": URI}, text("who")), ANSWER]}
    named = {"messages": [user({**SHOWN, "image": "in/1.png"}, text("who")), ANSWER]}
    before = built(model, folder, [held, named], packing=False)
    assert before.content is not None
    (copy,) = (folder / "cache" / "pictures").iterdir()
    told = []
    for spoil in (lambda: copy.write_bytes(png(0)[:-9]), lambda: copy.write_bytes(png(0)[:-9] + bytes(9)), copy.unlink):
        spoil()
        with pytest.raises(DataError, match=r"rows\.jsonl:1: ") as error:
            built(model, folder, [held, named], packing=False).train.batch([0])
        told.append(str(error.value))
        shutil.rmtree(folder_to_delete(told[-1]))
        found = built(model, folder, [held, named], packing=False)
        assert (found.content, found.fingerprint) == (before.content, before.fingerprint)
        assert torch.equal(found.train.batch([0])["input_ids"], before.train.batch([0])["input_ids"])
    assert "is another image than when the rows were read" in told[0]
    assert told[1] == told[0]
    assert "cannot be read: No such file" in told[2]
    (folder / "in" / "1.png").unlink()
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*cannot be read: No such file") as error:
        built(model, folder, [held, named], packing=False)
    shutil.rmtree(folder_to_delete(str(error.value)))
    without = built(model, folder, [held, named], packing=False)
    assert without.report.train is not None
    assert (len(without.train), list(without.report.train.dropped)) == (1, ["an image that is missing"])
    assert without.fingerprint == before.fingerprint
    assert without.content != before.content


def folder_to_delete(told: str) -> str:
    (found,) = re.findall(r"bring the old one back, or delete '([^']*)' and start again", told)
    return str(found)


def test_another_folder_for_images(model: Path, folder: Path) -> None:
    shutil.move(folder / "in", folder / "elsewhere")
    row = {"messages": [user({**SHOWN, "image": "0.png"}, text("who")), ANSWER]}
    for name, problem in {"gone": "does not exist", "elsewhere/0.png": "is not a folder"}.items():
        with pytest.raises(DataError, match=rf"data\.image_root: '{folder}/{name}' {problem} .*; name the folder"):
            built(model, folder, [row], image_root=str(folder / name))
    found = built(model, folder, [row], image_root=str(folder / "elsewhere"))
    assert found.train.batch([0])[COUNTS].tolist() == [1]
    with pytest.raises(DataError, match=r"data\.image_root has no effect: the model reads no image"):
        built(model, folder, [{"messages": [{"role": "user", "content": "so"}, ANSWER]}], image_root=str(folder))


def test_what_is_wrong_with_a_processor_is_said_by_name(model: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BadInputError, match=r"^data\.max_pixels: the processor of .* \(CLIPImageProcessor\w*\) does not scale"
    ):
        built(model, folder, [GOOD], max_pixels=10**6)
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "processor_config.json").write_text('{"image_processor": 3}')
    with pytest.raises(
        BadInputError, match=r"^data\.train has images, and no processor can be loaded from .*; correct its"
    ):
        built(broken, folder, [GOOD])


def test_a_model_that_reads_text_alone_drops_such_rows(model: Path, folder: Path, tmp_path: Path) -> None:
    blind = shutil.copytree(model, tmp_path / "blind")
    (blind / "processor_config.json").unlink()
    found = built(blind, folder, [GOOD, {"messages": [{"role": "user", "content": "so"}, ANSWER]}])
    assert type(found.train) is TextSamples
    assert found.report.train is not None
    (why,) = found.report.train.dropped
    assert why.startswith("a message has an image (image), and the model's folder has no image processor; name a model")


def test_what_nothing_reads_is_refused_by_its_own_name(model: Path, folder: Path) -> None:
    """With advice that can be followed: each is followed here, where it is not to leave rows out."""
    plain = [{"messages": [{"role": "user", "content": "so"}, ANSWER]}] * 200
    sound = {"messages": [user({"type": "input_audio", "input_audio": {"data": ""}}, text("who")), ANSWER]}
    kept = {"messages": [{**ANSWER, "role": "user", "images": ["in/0.png"]}, ANSWER]}
    pair = {"prompt": [user({**SHOWN, "image": "in/0.png"}, text("who"))], "chosen": [ANSWER]}
    pair["rejected"] = [{**ANSWER, "content": "a king"}]
    token = {"prompt": "<image>who", "chosen": " a fox", "rejected": " a king"}
    good = {"prompt": "who", "chosen": " a fox", "rejected": " a king"}
    judged = {"images": ["in/0.png"], "prompt": [user(SHOWN, text("who"))], "completion": [ANSWER], "label": True}
    labelled = [{"text": "a fox", "label": label} for label in ("x", "y")]
    cases: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
        ([*plain, GOOD], {}, "images are read if one of the first 100 rows has one in .*; put such a row first"),
        ([GOOD, sound], {}, r"^a message has sound \(input_audio\), which is not read; leave such rows out"),
        ([GOOD, kept], {}, r"a message has an image \(images\), where none is looked for; put it into the co"),
        (
            [*labelled, {**labelled[0], "image": "in/0.png"}],
            {"kind": "sequence_classification"},
            r"the row has an image \(image\), and objective.kind=sequence_classification reads no images; leave such",
        ),
        ([good, token], {"kind": "preference"}, "the text contains the model's image token, but the row has no im"),
        ([pair, token], {"kind": "preference"}, "the text contains the model's image token, but the row has no im"),
        (
            [{**judged, "label": True}, {**judged, "label": False}, {**judged, "prompt": "who", "completion": "a fox"}],
            {"kind": "kto"},
            "their position in the text is unknown; write the prompt and its answer as messages",
        ),
    ]
    for rows, settings, problem in cases:
        report = built(model, folder, rows, **settings).report.train
        assert report is not None
        (why,) = report.dropped
        assert re.search(problem, why), why
    assert built(model, folder, [GOOD, *plain]).report.train.num_dropped == 0  # type: ignore[union-attr]


def test_what_stands_for_an_image_is_shown_short(model: Path, folder: Path) -> None:
    many = {"messages": [user(*[{**SHOWN, "image": "in/0.png"}] * 3, text("who")), ANSWER]}
    tokens = tokenizer.load(ModelSection(name_or_path=str(model)), DataSection(train="a.jsonl", max_length=8))  # type: ignore[arg-type]
    tokens.chat_template = tokens.chat_template.replace("<image>\n", "<image>")
    data = DataSection(train=str(folder / "rows.jsonl"), max_length=64, cache_dir=str(folder / "cache"))  # type: ignore[arg-type]
    (folder / "rows.jsonl").write_text(json.dumps(many))
    (example,) = build.build(data, tokens, seed=0).report.to_dict()["examples"]
    assert example["segments"][0][0] == "<|im_start|>user\n<image> (x 12)who<|im_end|>\n<|im_start|>assistant\n"
