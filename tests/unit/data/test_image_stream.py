"""Streamed rows with images: the same micro-batches as from the file, and images in memory for a window alone."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support.sights import drawn_image, save_seeing
from support.texts import make_texts, write_rows

from toolkit.data import build, stream
from toolkit.data.samples.image_samples import COUNTS
from toolkit.data.samples.loader import TrainLoader
from toolkit.data.stream import StreamLoader
from toolkit.data.tokens import tokenizer
from toolkit.errors import DataError
from toolkit.recipe.schema import DataSection, ModelSection

ROWS = 14
COUNTS_OF_ROWS = [1, 0, 2, 0, 0, 1, 0] * 2
STEPS = 3
PLAIN = {"packing": False, "shuffle": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing("llava", tmp_path_factory.mktemp("llava"), make_texts(30))


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer tokens than the rows have, so that a micro-batch may be of two windows.
    monkeypatch.setattr(stream, "WINDOW_SAMPLES", 2)
    monkeypatch.setattr(stream, "BATCH_ROWS", 3)


def png(number: int) -> bytes:
    written = io.BytesIO()
    drawn_image(number).save(written, "PNG")
    return written.getvalue()


def conversation(number: int) -> list[dict[str, str]]:
    words = make_texts(ROWS, seed=9)[number].split()[:5]
    asked = {"role": "user", "content": "<image>" * COUNTS_OF_ROWS[number] + words[0]}
    answers = [{"role": "assistant", "content": words[i]} for i in (1, 3)]
    return [asked, answers[0], {"role": "user", "content": words[2]}, answers[1]]


def rows_file(folder: Path, form: str) -> Path:
    """Rows whose images are files beside them, `data:` URIs, or bytes of a table."""
    folder.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, count in enumerate(COUNTS_OF_ROWS):
        images: list[Any] = [png(10 * number + i) for i in range(count)]
        if form == "files":
            for i, content in enumerate(images):
                (folder / f"{number}-{i}.png").write_bytes(content)
            images = [f"{number}-{i}.png" for i in range(count)]
        elif form == "in the row":
            images = [f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in images]
        rows.append({"messages": conversation(number), "images": images})
    if form == "in a table":
        features = datasets.Features(
            {
                "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
                "images": datasets.List(datasets.Image()),
            }
        )
        shown = [{**row, "images": [{"bytes": content} for content in row["images"]]} for row in rows]
        datasets.Dataset.from_list(shown, features=features).to_parquet(str(folder / "rows.parquet"))
        return folder / "rows.parquet"
    write_rows(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl"


def built(model: Path, folder: Path, train: Any, **settings: Any) -> build.TokenisedData:
    given = {"max_length": 128, "cache_dir": str(folder / "cache"), "max_dropped_fraction": 0.9, **settings}
    data = DataSection(train=train if isinstance(train, list) else str(train), **given)
    return build.build(data, tokenizer.load(ModelSection(name_or_path=str(model)), data), 0)


def micro_batches(data: build.TokenisedData, rank: int, ranks: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    """Those of a rank; `start` resumes behind so many steps, in the window that a checkpoint would name."""
    split = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "rank": rank, "world_size": ranks}
    num_positions = STEPS * 4 * ranks
    loader: Any
    if data.stream is None:
        loader = TrainLoader(data.train, num_positions=num_positions, seed=0, shuffle=False, **split)
    else:
        loader = StreamLoader(data.stream, num_positions=num_positions, **split)
        if start:
            list(loader)
            state = loader.state_at(start * 4 * ranks)
            loader = StreamLoader(data.stream, num_positions=num_positions, **split)
            loader.resume(start, start * 4 * ranks, state)
    return [batch for window in loader for batch in window]


def assert_equal(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("form", "targets"), [("files", "assistant"), ("in the row", "each_turn"), ("in a table", "assistant")]
)
def test_a_stream_makes_the_micro_batches_of_the_file(model: Path, tmp_path: Path, form: str, targets: str) -> None:
    rows = rows_file(tmp_path / "rows", form)
    streamed = built(model, tmp_path, rows, streaming=True, targets=targets, **PLAIN)
    # Before the file is read, which copies images to the cache.
    kept = tmp_path / "cache/pictures"
    assert not kept.exists()
    from_file = built(model, tmp_path, rows, targets=targets, **PLAIN)
    assert kept.exists() == (form != "files")
    for ranks in (1, 2):
        for rank in range(ranks):
            expected = micro_batches(from_file, rank, ranks)
            assert sum(int(batch[COUNTS].sum()) for batch in expected) >= 4
            assert_equal(micro_batches(streamed, rank, ranks), expected)
            assert_equal(micro_batches(streamed, rank, ranks, start=2), expected[4:])
    assert streamed.report.train is not None
    assert streamed.report.train.num_dropped == 0
    # As each answer sees the images before it, the page shows them for each answer.
    times = 2 if targets == "each_turn" else 1
    shown = [len(each.get("images", [])) for each in streamed.report.examples[:3]]
    assert shown == [times * count for count in COUNTS_OF_ROWS[:3]]


def test_a_window_holds_the_images_of_its_own_rows(model: Path, tmp_path: Path) -> None:
    found = built(model, tmp_path, rows_file(tmp_path / "rows", "in the row"), streaming=True, **PLAIN).stream
    assert found is not None
    assert found.images is not None
    numbers = iter(found.windows())
    for window in (next(numbers) for _ in range(3)):
        rows: Any = window.samples.rows
        shown = [record for row in range(len(rows)) for record, _ in rows.images(row)]
        assert len(rows.sources[0].contents) == len({record["digest"] for record in shown}) > 0
        assert found.images.held == {}


def test_packed_samples_of_a_stream_see_their_own_images(model: Path, tmp_path: Path) -> None:
    streamed = built(model, tmp_path, rows_file(tmp_path / "rows", "files"), streaming=True, max_length=256)
    rows = streamed.train.rows
    assert max(len(streamed.train.rows_of(i)) for i in range(len(streamed.train))) > 1  # type: ignore[attr-defined]
    for number in range(len(streamed.train)):
        batch = streamed.train.batch([number])
        names = [rows.name(row) for row in streamed.train.rows_of(number)]  # type: ignore[attr-defined]
        counts = [COUNTS_OF_ROWS[int(name.rpartition(":")[2]) - 1] for name in names]
        assert batch[COUNTS].tolist()[: len(counts)] == counts


def test_paths_start_from_the_folder_of_their_rows(model: Path, tmp_path: Path) -> None:
    for name, numbers in {"a": (0, 1), "b": (2, 0)}.items():
        (tmp_path / name).mkdir()
        drawn_image(numbers[0]).save(tmp_path / name / "shown.png")
        row = {"messages": conversation(1), "images": ["shown.png"]}
        (tmp_path / name / "rows.jsonl").write_text(json.dumps(row) + "\n")
    train = str(tmp_path / "[ab]/rows.jsonl")
    streamed = built(model, tmp_path, train, streaming=True, **PLAIN)
    assert_equal(micro_batches(streamed, 0, 1)[:1], micro_batches(built(model, tmp_path, train, **PLAIN), 0, 1)[:1])
    with pytest.raises(DataError, match=r"none of the rows .* can be used"):
        built(model, tmp_path, train, streaming=True, image_root=str(tmp_path))
    (tmp_path / "a/shown.png").rename(tmp_path / "shown.png")
    assert built(model, tmp_path, train, streaming=True, image_root=str(tmp_path), **PLAIN).train.batch([0])


def test_sources_with_and_without_images_are_mixed(model: Path, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows", "files")
    text = write_rows(tmp_path / "text.jsonl", ({"messages": conversation(1)} for _ in range(4)))
    train = [{"path": str(rows), "weight": 0.5}, {"path": str(text), "weight": 0.5}]
    streamed = built(model, tmp_path, train, streaming=True, **PLAIN)
    assert_equal(micro_batches(streamed, 0, 1)[:2], micro_batches(built(model, tmp_path, train, **PLAIN), 0, 1)[:2])


def test_what_is_said_about_streamed_rows_with_images_can_be_done(model: Path, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows", "files")
    many = {"messages": [{"role": "user", "content": "<image>" * 20 + "who"}, {"role": "assistant", "content": "I"}]}
    rows.write_text((json.dumps({**many, "images": ["0-0.png"] * 20}) + "\n") * 4 + rows.read_text())
    with pytest.raises(DataError, match=r"data\.long_rows=drop$"):
        built(model, tmp_path, rows, streaming=True, max_length=64)
    assert built(model, tmp_path, rows, streaming=True, max_length=64, long_rows="drop").stream is not None
    with pytest.raises(DataError, match=r"long_rows: truncate would cut a row .*; set data\.long_rows=drop, or raise"):
        built(model, tmp_path, rows, streaming=True, long_rows="truncate")
    streamed = built(model, tmp_path, rows, streaming=True, max_length=64, long_rows="drop", **PLAIN)
    path = tmp_path / "rows/0-0.png"
    content = path.read_bytes()
    path.unlink()
    told = r"rows\.jsonl:5: .* cannot be read: .*; bring the old one back, or resume the run, which reads the rows anew"
    with pytest.raises(DataError, match=told):
        streamed.train.batch([0])
    path.write_bytes(content)
    assert streamed.train.batch([0])


def test_settings_of_images_without_an_image_are_refused(model: Path, tmp_path: Path) -> None:
    text = write_rows(tmp_path / "text.jsonl", ({"messages": conversation(1)} for _ in range(4)))
    with pytest.raises(DataError, match=r"data\.image_root has no effect: the model reads no image of the rows"):
        built(model, tmp_path, text, streaming=True, image_root=str(tmp_path))
    rows = rows_file(tmp_path / "rows", "files")
    held_out = {"validation": str(rows), "image_root": str(tmp_path / "rows")}
    assert built(model, tmp_path, text, streaming=True, **held_out).validation is not None


def test_another_processor_is_another_stream(model: Path, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows", "files")
    first = built(model, tmp_path, rows, streaming=True).fingerprint
    assert built(model, tmp_path, rows, streaming=True).fingerprint == first
    assert built(model, tmp_path, rows, streaming=True, image_root=str(tmp_path / "rows")).fingerprint != first
