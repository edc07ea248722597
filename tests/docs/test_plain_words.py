"""Sentences over which native readers stumbled have been written anew, and do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[2]
IN_DOCS = """
still no room, but host memory
An override replaces settings of the file that it excludes
With n equal to the number of ranks nobody does
It counts no time for it
peft itself would take the last word of each match
an expert's rows one after another, as A is
none may appear among the targets
the text without the mark must equal the whole text
Starting may take 36 times as long
which saves k c P_tail of its gathers
one gather more than `zero1`, with the memory of `zero3`
fits means that 1.25 x peak + 2 GiB is at most
the checkpoint's second forward ends where the last input is known
The checker of streams finds no race
rows that share a sample do not see each other (change
""".strip().splitlines()
IN_CODE = """
every 2. block
an version of torch
Makes parameters float32 that are held so
but those kept; what they were, by their first names
issued when the block before has been
where that was not tried
so that it takes the same way
it holds nothing that holds the engine
as where it reduces once a window
where one stands still, the run ends, and is told which
The ranks meet, or say in time that they cannot
what tells of the processes of a run that was killed behind its report
Alone reads its private functions
Kept as it is where it is not a number
in the form of what the block it is like returned
Of a time: `low` is the shortest that is likely
Norm of a tensor of so many elements, of which each rank holds some
AdamW's update the size of a gradient
where the warm-up leaves so many
None: none does
Begins what a batch of KTO has of prompts
Where a batch has what
The prefix of what a classifier has from a language model
The same; a profile sees how long each was waited for
an adapter of a model with random weights fits no model that could be loaded later
""".strip().splitlines()


def words_of(path: Path) -> str:
    return re.sub(r"[\s#]+", " ", path.read_text(encoding="utf-8"))


def test_pages_have_none_of_these() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [(page.name, words) for page in pages for words in IN_DOCS if words in words_of(page)]
    assert found == []


def test_docstrings_and_messages_have_none_of_these() -> None:
    files = [*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    assert len(files) > 300
    found = [(file.name, words) for file in files for words in IN_CODE if words in words_of(file)]
    assert found == []
