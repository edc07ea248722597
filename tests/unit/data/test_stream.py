"""toolkit.data.stream: one global order for any number of ranks, exact resumption, weights, limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import write_rows

from toolkit.data import build, stream
from toolkit.data.samples.samples import IGNORED
from toolkit.data.stream import StreamLoader
from toolkit.data.tokens import tokenizer
from toolkit.errors import DataError
from toolkit.recipe.schema import DataSection

TEXTS = [f"row {i} " + "of the story about a fox and a king " * (i % 5) for i in range(90)]


@pytest.fixture(scope="module")
def byte_pairs() -> Any:
    return tokenizer._train_byte_pairs(iter(TEXTS), 320)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW_SAMPLES", 6)
    monkeypatch.setattr(stream, "BATCH_ROWS", 4)


def rows_file(path: Path, texts: list[str]) -> Path:
    write_rows(path, ({"text": text} for text in texts))
    return path


def built(tmp_path: Path, byte_pairs: Any, train: Any = None, **fields: Any) -> build.TokenisedData:
    source = train if train is not None else str(rows_file(tmp_path / "a.jsonl", TEXTS))
    values = {
        "train": source,
        "max_length": 32,
        "cache_dir": str(tmp_path / "cache"),
        "streaming": True,
        "max_dropped_fraction": 1.0,
        **fields,
    }
    return build.build(DataSection.model_validate(values), byte_pairs, seed=3)


def loader(data: build.TokenisedData, rank: int, ranks: int, micro: int, accumulation: int, steps: int) -> StreamLoader:
    return StreamLoader(
        data.stream,
        num_positions=steps * ranks * micro * accumulation,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        rank=rank,
        world_size=ranks,
    )


def tokens_of(window: list[dict[str, torch.Tensor]]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in window for row in batch["input_ids"].tolist()]


def steps_of(tmp_path: Path, byte_pairs: Any, ranks: int, micro: int, accumulation: int) -> list[list[Any]]:
    """The samples of each step over all ranks, sorted; each rank has its own stream."""
    loaders = [loader(built(tmp_path, byte_pairs), rank, ranks, micro, accumulation, steps=5) for rank in range(ranks)]
    return [sorted(row for window in windows for row in tokens_of(window)) for windows in zip(*loaders, strict=True)]


def test_the_samples_of_a_step_do_not_depend_on_the_split(tmp_path: Path, byte_pairs: Any) -> None:
    expected = steps_of(tmp_path, byte_pairs, 1, 8, 1)
    assert [len(step) for step in expected] == [8] * 5
    for ranks, micro, accumulation in [(1, 2, 4), (2, 4, 1), (2, 1, 4), (4, 2, 1), (4, 1, 2)]:
        assert steps_of(tmp_path, byte_pairs, ranks, micro, accumulation) == expected


def test_every_token_of_a_pass_is_a_target_once(tmp_path: Path, byte_pairs: Any) -> None:
    data = built(tmp_path, byte_pairs)
    targets: list[int] = []
    for window in data.stream.windows():
        if window.state["sources"][0][0] > 0:
            break
        rows = window.samples.batch(range(len(window.samples)))["labels"]
        targets += rows[rows != IGNORED].tolist()
    wanted = [token for text in TEXTS for token in [*byte_pairs(text)["input_ids"], byte_pairs.eos_token_id][1:]]
    extra = len(targets) - len(wanted)  # the last window goes on into the next pass
    assert 0 <= extra < 6 * 32 + 4 * 60
    for token in set(wanted):
        assert targets.count(token) >= wanted.count(token)


@pytest.mark.parametrize(("cut", "ahead"), [*((cut, 0) for cut in range(1, 12)), (2, 9), (7, 6)])
def test_a_run_that_is_cut_off_goes_on_at_the_next_sample(
    tmp_path: Path, byte_pairs: Any, cut: int, ahead: int
) -> None:
    """Also where micro-batches were made some steps ahead of the training."""
    whole = loader(built(tmp_path, byte_pairs), 0, 1, 3, 1, steps=14)
    expected = [tokens_of(window) for window in whole]
    first = loader(built(tmp_path, byte_pairs), 0, 1, 3, 1, steps=14)
    done = [tokens_of(window) for _, window in zip(range(cut + ahead), first, strict=False)][:cut]
    first.epoch_at(cut)
    state = json.loads(json.dumps(first.state_at(first.samples_at(cut))))
    assert state["samples"] <= 3 * cut
    rest = loader(built(tmp_path, byte_pairs), 0, 1, 3, 1, steps=14)
    rest.resume(cut, 3 * cut, state)
    assert done + [tokens_of(window) for window in rest] == expected
    assert rest.epoch_at(14) == whole.epoch_at(14)


def test_windows_are_shuffled_by_the_seed(tmp_path: Path, byte_pairs: Any) -> None:
    orders = []
    for shuffle in (True, False):
        data = built(tmp_path, byte_pairs, shuffle=shuffle)
        window = next(data.stream.windows())
        orders.append([window.samples.documents(number) for number in range(len(window.samples))])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_weighted_sources_are_mixed_and_started_again(tmp_path: Path, byte_pairs: Any) -> None:
    first = rows_file(tmp_path / "first.jsonl", [f"first {i}" for i in range(7)])
    second = rows_file(tmp_path / "second.jsonl", [f"second {i}" for i in range(100)])
    sources = [{"path": str(first), "weight": 1.0}, {"path": str(second), "weight": 3.0}]
    data = built(tmp_path, byte_pairs, train=sources, packing=False)
    seen: list[str] = []
    for window in data.stream.windows():
        rows = window.samples.rows
        seen += [byte_pairs.decode(rows.tokens(row)[0]) for row in range(len(rows))]
        if len(seen) > 60:
            break
    shares = [sum(text.startswith("first") for text in seen[start : start + 4]) for start in range(0, 56, 4)]
    assert set(shares) == {1}
    assert seen.count("first 0<|endoftext|>") > 1
    assert seen.count("second 0<|endoftext|>") == 1


def test_a_source_without_a_usable_row_ends_with_an_error(tmp_path: Path, byte_pairs: Any) -> None:
    path = rows_file(tmp_path / "a.jsonl", [" "] * 9)
    why = r"none of the rows of 'a.jsonl' \(9\) can be used. Of 12 read: text is empty: 12 \(a.jsonl:1, a.jsonl:2, "
    with pytest.raises(DataError, match=why):
        built(tmp_path, byte_pairs, train=str(path))


def test_too_many_long_rows_end_the_run(tmp_path: Path, byte_pairs: Any) -> None:
    with pytest.raises(DataError, match=r"are longer than data.max_length, 32 tokens.*data.long_rows"):
        built(tmp_path, byte_pairs, long_rows="error")
    report = built(tmp_path, byte_pairs, long_rows="drop").report.to_dict()
    assert report["train"]["dropped"]["longer than data.max_length"]["count"] > 0
    cut = built(tmp_path, byte_pairs, long_rows="truncate").report.to_dict()["train"]
    sizes = [len(byte_pairs(text)["input_ids"]) + 1 for text in TEXTS[: cut["read"]]]
    long = {f"a.jsonl:{number}": size - 32 for number, size in enumerate(sizes, start=1) if size > 32}
    assert cut["long"] == {"count": len(long), "rows": list(long), "cut_tokens": sum(long.values())}
    assert cut["tokens"] == sum(sizes)


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_a_source_of_long_rows_alone_ends_with_an_error(tmp_path: Path, byte_pairs: Any, policy: str) -> None:
    prompts = [{"prompt": "of the story about a fox " * 20, "completion": " and"} for _ in range(9)]
    path = write_rows(tmp_path / "a.jsonl", prompts)
    with pytest.raises(DataError, match=r"none of the rows of 'a.jsonl' \(9\) can be used"):
        built(tmp_path, byte_pairs, train=str(path), long_rows=policy)
