"""toolkit.data.text: every token is a target once, positions restart, nothing is wasted."""

from __future__ import annotations

import random

import pytest

from toolkit.data.text import IGNORED, RowCount, cut_blocks, problem_of


def test_blocks_written_out() -> None:
    blocks = list(cut_blocks([[1, 2, 3, 4, 5], [6, 7]], max_length=4, pad_id=0))
    assert blocks == [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4], "position_ids": [0, 1, 2, 3]},
        {"input_ids": [4, 5, 6, 7], "labels": [-100, 5, -100, 7], "position_ids": [0, 1, 0, 1]},
    ]


def test_the_last_block_is_filled_up() -> None:
    blocks = list(cut_blocks([[1, 2, 3, 4, 5, 6]], max_length=4, pad_id=9))
    assert blocks[1] == {"input_ids": [4, 5, 6, 9], "labels": [-100, 5, 6, -100], "position_ids": [0, 1, 2, 3]}


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_a_target_exactly_once(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, 40) for _ in range(chance.randint(1, 12))]
    token = iter(range(1, 10_000))
    documents = [[next(token) for _ in range(length)] for length in lengths]
    max_length = chance.randint(2, 16)
    blocks = list(cut_blocks(documents, max_length, pad_id=0))
    targets = [label for block in blocks for label in block["labels"] if label != IGNORED]
    assert targets == [token for document in documents for token in document[1:]]
    home = {token: number for number, document in enumerate(documents) for token in document}
    for block in blocks:
        assert {len(values) for values in block.values()} == {max_length}
        ids, positions = block["input_ids"], block["position_ids"]
        assert positions[0] == 0
        for i in range(1, max_length):
            if ids[i] == 0:
                assert positions[i] == positions[i - 1] + 1, "padding must not look like a document"
                assert block["labels"][i] == IGNORED
            elif home[ids[i]] == home[ids[i - 1]]:
                assert positions[i] == positions[i - 1] + 1
                assert block["labels"][i] == ids[i]
            else:
                assert positions[i] == 0
                assert block["labels"][i] == IGNORED


def test_documents_of_one_token_give_nothing_to_train_on() -> None:
    assert list(cut_blocks([[1], [2]], max_length=4, pad_id=0)) == []


def test_problems_of_rows_are_counted_with_their_numbers() -> None:
    count = RowCount()
    kept = [count.keep(problem_of(text), row) for row, text in enumerate(["a", None, "", 3, "  ", "b"])]
    assert kept == [True, False, False, False, False, True]
    assert (count.read, count.kept, count.num_dropped) == (6, 2, 4)
    assert count.dropped == {"null": [1], "empty": [2, 4], "not text but int": [3]}
