"""Each token in one place, order kept, positions restart, little is wasted."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from toolkit.data.samples.packing import Pieces, best_fit, mixed, split, whole
from toolkit.data.samples.samples import IGNORED, TextSamples, sample_of


class Tokens:
    """Rows of distinct tokens, all of them targets but the first of each."""

    def __init__(self, lengths: list[int]) -> None:
        ends = np.cumsum([0, *lengths])
        self.rows = [np.arange(start + 1, stop + 1) for start, stop in pairwise(ends)]
        self.lengths = np.array(lengths)

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> Any:
        targets = np.arange(len(self.rows[row])) > 0
        return self.rows[row][start:stop], targets[start:stop]


def pack(rows: Tokens, max_length: int, policy: Any) -> TextSamples:
    pieces = policy(np.arange(len(rows)), rows.lengths, max_length)
    sample_of_piece = best_fit(pieces.lengths(), max_length)
    in_order = pieces.take(np.argsort(sample_of_piece, kind="stable"))
    return TextSamples(rows, in_order, np.cumsum(np.bincount(sample_of_piece)).tolist(), max_length, True, 0)


@pytest.mark.parametrize("seed", range(30))
def test_every_token_stands_in_one_place_and_is_a_target_once(seed: int) -> None:
    chance = random.Random(seed)
    rows = Tokens([chance.randint(1, 60) for _ in range(chance.randint(1, 40))])
    max_length = chance.randint(2, 24)
    samples = pack(rows, max_length, split)
    batch = {name: tensor.numpy() for name, tensor in samples.batch(range(len(samples))).items()}
    lengths = batch.pop("lengths")
    assert {tensor.shape for tensor in batch.values()} == {(len(samples), max_length)}
    assert lengths.tolist() == [(ids != 0).sum() for ids in batch["input_ids"]]
    targets = sorted(batch["labels"][batch["labels"] != IGNORED].tolist())
    assert targets == sorted(token for row in rows.rows for token in row[1:].tolist())
    home = {token: number for number, row in enumerate(rows.rows) for token in row.tolist()}
    first = {row[0] for row in rows.rows}
    for ids, labels, positions in zip(*(batch[n] for n in ("input_ids", "labels", "position_ids")), strict=True):
        assert positions[0] == 0
        for i in range(max_length):
            if ids[i] == 0:
                assert i > 0
                assert positions[i] == positions[i - 1] + 1, "padding must not look like a document"
                assert labels[i] == IGNORED
            elif positions[i] == 0:
                assert labels[i] == IGNORED, "nothing precedes it"
            else:
                assert (home[ids[i]], ids[i]) == (home[ids[i - 1]], ids[i - 1] + 1), "order inside a document"
                assert positions[i] == positions[i - 1] + 1
                assert labels[i] == ids[i]
        assert not (set(ids.tolist()) & first) - {int(ids[i]) for i in range(max_length) if positions[i] == 0}


def test_pieces_written_out() -> None:
    lengths = np.array([5, 2, 9, 1])
    pieces = split(np.arange(4), lengths, 4)
    assert [pieces.place(i) for i in range(len(pieces))] == [
        (0, 0, 4),
        (0, 3, 5),
        (1, 0, 2),
        (2, 0, 4),
        (2, 3, 7),
        (2, 6, 9),
        (3, 0, 1),
    ]
    cut = whole(np.arange(4), lengths, 4)
    assert [cut.place(i) for i in range(4)] == [(0, 0, 4), (1, 0, 2), (2, 0, 4), (3, 0, 1)]


def test_a_sample_written_out() -> None:
    found = sample_of([(np.array([1, 2, 3]), np.array([0, 1, 1])), (np.array([7, 8]), np.array([1, 1]))], 7, 9)
    assert found["input_ids"].tolist() == [1, 2, 3, 7, 8, 9, 9]
    assert found["labels"].tolist() == [-100, 2, 3, -100, 8, -100, -100]
    assert found["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(10))
def test_best_fit_is_what_a_search_over_all_samples_finds(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, 20) for _ in range(60)]
    room: list[int] = []
    contents: list[list[int]] = []
    for piece in sorted(range(60), key=lambda i: -lengths[i]):
        fitting = [(space, number) for number, space in enumerate(room) if space >= lengths[piece]]
        if not fitting:
            room.append(20)
            contents.append([])
            fitting = [(20, len(room) - 1)]
        best = min(fitting)[0]
        number = [n for s, n in fitting if s == best][-1] if len(fitting) > 1 else fitting[0][1]
        room[number] -= lengths[piece]
        contents[number].append(piece)
    found = best_fit(np.array(lengths), 20)
    assert found.max() + 1 == len(room), "as few samples"
    used = np.bincount(found, weights=lengths)
    assert used.max() <= 20
    assert sorted(used.tolist()) == sorted(float(20 - space) for space in room), "filled alike"


def test_samples_are_numbered_by_their_first_piece() -> None:
    found = best_fit(np.array([3, 9, 2, 9, 5, 4]), 10)
    firsts = [int(np.flatnonzero(found == sample)[0]) for sample in range(found.max() + 1)]
    assert firsts == sorted(firsts)
    assert found[0] == 0


def test_long_conversations_fill_samples_well() -> None:
    """Lognormal lengths, median 120, at most 512."""
    draw = np.random.default_rng(0).lognormal(np.log(120), 0.9, 4000)
    lengths = np.clip(draw, 8, 512).astype(np.int64)
    for count in (512, 4000):
        found = best_fit(lengths[:count], 512)
        assert lengths[:count].sum() / (512 * (found.max() + 1)) >= 0.97


def test_a_padded_batch_is_as_long_as_its_longest_row() -> None:
    rows = Tokens([3, 12, 5])
    pieces = whole(np.arange(3), rows.lengths, 14)
    samples = TextSamples(rows, pieces, [1, 2, 3], 14, False, 0)
    assert samples.batch([0, 2])["input_ids"].shape == (2, 8)
    assert samples.batch([0, 1])["input_ids"].shape == (2, 14), "16 would be more than the limit"
    assert samples.batch([0])["labels"].tolist() == [[-100, 2, 3, -100, -100, -100, -100, -100]]


@pytest.mark.parametrize(("counts", "weights"), [([3, 5], [1.0, 2.0]), ([100, 7, 30], [0.5, 0.3, 0.2]), ([4], [2.0])])
def test_a_mix_holds_its_shares_in_every_stretch(counts: list[int], weights: list[float]) -> None:
    order = mixed(counts, weights)
    length = sum(len(places) for places, _ in order)
    source_of = np.empty(length, dtype=int)
    for number, (places, rows) in enumerate(order):
        source_of[places] = number
        assert set(rows.tolist()) == set(range(counts[number])), "every row is seen"
        assert (np.diff(places) > 0).all()
    for stop in range(1, length + 1):
        for number, weight in enumerate(weights):
            share = stop * weight / sum(weights)
            assert abs((source_of[:stop] == number).sum() - share) <= 1.0 + len(weights) / 2
    longest = int(np.argmax([count / weight for count, weight in zip(counts, weights, strict=True)]))
    assert len(order[longest][0]) == counts[longest], "the one that takes longest is seen once"


def test_a_mix_written_out() -> None:
    """Rows of weight 1 come at 1/2 and 3/2, of weight 2 at 1/4, 3/4, 5/4 and 7/4."""
    (few, few_rows), (many, many_rows) = mixed([2, 3], [1.0, 2.0])
    assert (few.tolist(), few_rows.tolist()) == ([1, 4], [0, 1])
    assert (many.tolist(), many_rows.tolist()) == ([0, 2, 3, 5], [0, 1, 2, 0])


def test_pieces_are_taken() -> None:
    pieces = Pieces(np.array([1, 2]), np.array([0, 3]), np.array([4, 9]))
    assert pieces.lengths().tolist() == [4, 6]
    assert pieces.take([1]).place(0) == (2, 3, 9)
