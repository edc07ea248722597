"""Texts as packed rows, tokenised, cut and packed without any of the toolkit's code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

T = 32
"""Tokens of a row."""


def plain_rows(model_folder: Path, data: Path) -> torch.Tensor:
    """(N, 3, T): input ids, labels and positions, cut and packed here by hand."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    pieces = []
    for line in data.read_text().splitlines():
        document = tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id]
        start = 0
        while start == 0 or start + 1 < len(document):
            pieces.append(document[start : start + T])
            start += T - 1
    rows: list[list[int]] = []  # numbers of the pieces in each, the row last added to at the end
    for number in sorted(range(len(pieces)), key=lambda i: -len(pieces[i])):
        room = [T - sum(len(pieces[i]) for i in row) for row in rows]
        fitting = [(space, -row) for row, space in enumerate(room) if space >= len(pieces[number])]
        row = rows.pop(-min(fitting)[1]) if fitting else []
        rows.append([*row, number])
    in_order = sorted(sorted(row) for row in rows)
    return torch.tensor([_row([pieces[i] for i in row], tokenizer.pad_token_id) for row in in_order])


def _row(documents: list[list[int]], pad: int) -> list[list[int]]:
    ids = [token for document in documents for token in document]
    labels = [label for document in documents for label in [-100, *document[1:]]]
    positions = [i for document in documents for i in range(len(document))]
    missing = T - len(ids)
    last = positions[-1]
    return [ids + [pad] * missing, labels + [-100] * missing, positions + list(range(last + 1, last + 1 + missing))]
